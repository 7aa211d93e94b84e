"""The torch generator's paged KV cache: one tensor per layer and plane, seen per lane.

Layers of a KV group have blocks of the same ids; another group has a number of its own.

Dimensions: P = lanes * blocks of a group's lane, H KV heads, S block size, D head size.
"""

from __future__ import annotations

import math
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from kv_transfer.shared_region import SharedRegion
from replicas.errors import ConfigError
from replicas.generators.torch.memory import own_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.protocol import KVCacheShape

LaneCache: TypeAlias = list[list[torch.Tensor]]
"""[layer] -> [k, v], or one plane of latents; each (num_blocks, H, S, D)."""


class CacheGroup(NamedTuple):
    """Layers whose planes are alike.

    Attributes:
        layers: Their indices.
        shape: (num_blocks, H, S, D) of one lane; of states (num_blocks, 1, 1, elements).
        dtype: Dtype of the elements.
        num_planes: 2 for keys and values, 1 for latents and states.
    """

    layers: Sequence[int]
    shape: KVCacheShape
    dtype: torch.dtype
    num_planes: int

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane's part of a plane."""
        return math.prod(self.shape) * self.dtype.itemsize


class TorchKVCache(list[LaneCache]):
    """``cache[lane][layer] -> [k, v]``, views of tensors that hold every lane.

    Owner: the tensors' memory. One flat pass addresses all lanes through ``planes``, where block
    ``b`` of lane ``l`` is row ``l * num_blocks + b``, with the number of the layer's group.

    Attributes:
        planes: Per layer (k, v), or one plane of latents or states; each (P, H, S, D), contiguous.
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
        groups: Sequence[CacheGroup] = (),
    ) -> None:
        """Allocate zeros.

        Args:
            shape: (num_blocks, H, S, D) of one lane; the first is that of the only KV group.
            dtype: Dtype of keys and values.
            num_layers: Layers.
            num_lanes: Lanes.
            num_planes: 2 for keys and values, 1 for latents.
            shares: Whether other processes of this host may map the cache.
            groups: The KV groups; empty if there is only one. Those of states have shapes and
                dtypes of their own.

        Raises:
            ConfigError: A dimension is not positive.
            TransferError: The host gives no memory that can be shared.
        """
        groups = groups or [CacheGroup(range(num_layers), shape, dtype, num_planes)]
        if min(num_layers, num_lanes, *(size for group in groups for size in group.shape)) < 1:
            raise ConfigError(f"KV cache {groups=} {num_layers=} {num_lanes=} must be positive")
        self.num_blocks = [group.shape[0] for group in groups]
        by_layer = {layer: nth for nth, group in enumerate(groups) for layer in group.layers}
        self.group_of = [by_layer[layer] for layer in range(num_layers)]
        self.block_size = shape[2]
        of_layers = [groups[nth] for nth in self.group_of]
        of_planes = [group for group in of_layers for _ in range(group.num_planes)]
        starts = [0, *accumulate(num_lanes * group.lane_bytes for group in of_planes)]
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
                start + lane * group.lane_bytes
                for start, group in zip(starts, of_planes, strict=True)
            )
            for lane in range(num_lanes)
        )
        planes = iter([
            torch.frombuffer(
                self.memory,
                dtype=group.dtype,
                count=num_lanes * math.prod(group.shape),
                offset=start,
            ).view(num_lanes * group.shape[0], *group.shape[1:])
            for start, group in zip(starts, of_planes, strict=True)
        ])  # fmt: skip
        self.planes = [tuple(islice(planes, group.num_planes)) for group in of_layers]
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
