"""The torch generator's paged KV cache: one tensor per layer and plane, seen per lane.

Dimensions: P = lanes * num_blocks blocks of all lanes, H KV heads, S block size, D head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from kv_transfer.shared_region import SharedRegion
from replicas.errors import ConfigError
from replicas.generators.torch.memory import own_memory

if TYPE_CHECKING:
    from replicas.generators.protocol import KVCacheShape

LaneCache: TypeAlias = list[list[torch.Tensor]]
"""[layer] -> [k, v], or one plane of latents; each (num_blocks, H, S, D)."""


class TorchKVCache(list[LaneCache]):
    """``cache[lane][layer] -> [k, v]``, views of tensors that hold every lane.

    Owner: the tensors' memory. One flat pass addresses all lanes through ``planes``, where block
    ``b`` of lane ``l`` is row ``l * num_blocks + b``.

    Attributes:
        planes: Per layer (k, v), or one plane of latents; each (P, H, S, D), contiguous.
        num_blocks: Blocks per lane, with the null block.
        block_size: Tokens per block.
        memory: The bytes of all planes, (n,) uint8: layer by layer, K before V.
        offsets: Per lane, per layer and plane: where in ``memory`` the lane's first block is.
        shared_region: Where ``memory`` is when other processes of this host may map it, else None.
    """

    def __init__(
        self,
        shape: KVCacheShape,
        dtype: torch.dtype,
        num_layers: int,
        num_lanes: int,
        *,
        num_planes: int = 2,
        shares: bool = False,
    ) -> None:
        """Allocate zeros.

        Args:
            shape: (num_blocks, H, S, D) of one lane.
            dtype: Dtype of keys and values.
            num_layers: Layers.
            num_lanes: Lanes.
            num_planes: 2 for keys and values, 1 for latents.
            shares: Whether other processes of this host may map the cache.

        Raises:
            ConfigError: A dimension is not positive.
            TransferError: The host gives no memory that can be shared.
        """
        if min(*shape, num_layers, num_lanes) < 1:
            raise ConfigError(f"KV cache {shape=} {num_layers=} {num_lanes=} must be positive")
        self.num_blocks, _, self.block_size, _ = shape
        whole = (num_lanes * shape[0], *shape[1:])
        num_items = math.prod(whole)
        plane_bytes, lane_bytes = (n * dtype.itemsize for n in (num_items, math.prod(shape)))
        num_bytes = num_planes * num_layers * plane_bytes
        self.shared_region = SharedRegion.create(num_bytes) if shares else None
        if self.shared_region is None:
            self.memory = own_memory(num_bytes)
            # Memory that is short must show now.
            self.memory.fill(0)
        else:
            self.memory = self.shared_region.memory
        self.offsets = tuple(
            tuple(
                piece * plane_bytes + lane * lane_bytes for piece in range(num_planes * num_layers)
            )
            for lane in range(num_lanes)
        )
        planes = [
            torch.frombuffer(self.memory, dtype=dtype, count=num_items, offset=offset).view(whole)
            for offset in self.offsets[0]
        ]
        self.planes = [
            tuple(planes[first : first + num_planes]) for first in range(0, len(planes), num_planes)
        ]
        super().__init__(
            [
                [
                    [plane.narrow(0, lane * self.num_blocks, self.num_blocks) for plane in layer]
                    for layer in self.planes
                ]
                for lane in range(num_lanes)
            ]
        )
