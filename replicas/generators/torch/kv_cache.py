"""The torch generator's paged KV cache: one tensor per layer and plane, seen per lane.

Layers of a KV group have blocks of the same ids; another group has a number of its own.

Dimensions: P = lanes * blocks of a group's lane, H KV heads, S block size, D head size.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch

from kv_transfer.shared_region import SharedRegion
from replicas.errors import ConfigError
from replicas.generators.torch.memory import own_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.protocol import KVCacheShape

LaneCache: TypeAlias = list[list[torch.Tensor]]
"""[layer] -> [k, v], or one plane of latents; each (num_blocks, H, S, D)."""


class TorchKVCache(list[LaneCache]):
    """``cache[lane][layer] -> [k, v]``, views of tensors that hold every lane.

    Owner: the tensors' memory. One flat pass addresses all lanes through ``planes``, where block
    ``b`` of lane ``l`` is row ``l * num_blocks + b``, with the number of the layer's group.

    Attributes:
        planes: Per layer (k, v), or one plane of latents; each (P, H, S, D), contiguous.
        group_of: KV group of each layer.
        num_blocks: Per KV group, blocks per lane, with the null block.
        block_size: Tokens per block.
        memory: The bytes of all planes, (n,) uint8: layer by layer, K before V.
        offsets: Per lane, per layer and plane: where in ``memory`` the lane's first block is.
        shared_region: Where ``memory`` is when other processes of this host may map it, else None.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: what few caches have
        self,
        shape: KVCacheShape,
        dtype: torch.dtype,
        num_layers: int,
        num_lanes: int,
        *,
        num_planes: int = 2,
        shares: bool = False,
        groups: Sequence[tuple[Sequence[int], int]] = (),
    ) -> None:
        """Allocate zeros.

        Args:
            shape: (num_blocks, H, S, D) of one lane; the first is that of the only KV group.
            dtype: Dtype of keys and values.
            num_layers: Layers.
            num_lanes: Lanes.
            num_planes: 2 for keys and values, 1 for latents.
            shares: Whether other processes of this host may map the cache.
            groups: Layers and blocks per lane of each KV group; empty if there is only one.

        Raises:
            ConfigError: A dimension is not positive.
            TransferError: The host gives no memory that can be shared.
        """
        groups = groups or [(range(num_layers), shape[0])]
        self.num_blocks = [num_blocks for _, num_blocks in groups]
        if min(*shape, num_layers, num_lanes, *self.num_blocks) < 1:
            raise ConfigError(f"KV cache {shape=} {num_layers=} {num_lanes=} must be positive")
        by_layer = {layer: nth for nth, (layers, _) in enumerate(groups) for layer in layers}
        self.group_of = [by_layer[layer] for layer in range(num_layers)]
        self.block_size = shape[2]
        lane_blocks = [self.num_blocks[group] for group in self.group_of for _ in range(num_planes)]
        block_items = math.prod(shape[1:])
        block_bytes = block_items * dtype.itemsize
        starts = [0, *accumulate(num_lanes * count * block_bytes for count in lane_blocks)]
        num_bytes = starts.pop()
        self.shared_region = SharedRegion.create(num_bytes) if shares else None
        if self.shared_region is None:
            self.memory = own_memory(num_bytes)
            # Memory that is short must show now.
            self.memory.fill(0)
        else:
            self.memory = self.shared_region.memory
        self.offsets = tuple(
            tuple(
                start + lane * count * block_bytes
                for start, count in zip(starts, lane_blocks, strict=True)
            )
            for lane in range(num_lanes)
        )
        planes = [
            torch.frombuffer(
                self.memory,
                dtype=dtype,
                count=num_lanes * count * block_items,
                offset=start,
            ).view(num_lanes * count, *shape[1:])
            for start, count in zip(starts, lane_blocks, strict=True)
        ]
        self.planes = [
            tuple(planes[first : first + num_planes]) for first in range(0, len(planes), num_planes)
        ]
        super().__init__(
            [
                [
                    [
                        plane.narrow(0, lane * self.num_blocks[group], self.num_blocks[group])
                        for plane in layer
                    ]
                    for layer, group in zip(self.planes, self.group_of, strict=True)
                ]
                for lane in range(num_lanes)
            ]
        )
