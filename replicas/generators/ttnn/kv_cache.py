"""The KV cache of a mesh: two tensors for every layer of every lane, in its chips' DRAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import ttnn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replicas.generators.protocol import KVCacheShape


class TTKVCache(list[list[list[ttnn.Tensor]]]):
    """``cache[lane][layer] -> [k, v]``, each (num_blocks, H / tp, block_size, head_dim) per chip.

    Attributes:
        num_blocks: Blocks per lane, with the null block.
        block_size: Tokens per block.
    """

    def __init__(
        self, planes: list[list[list[ttnn.Tensor]]], num_blocks: int, block_size: int
    ) -> None:
        super().__init__(planes)
        self.num_blocks = num_blocks
        self.block_size = block_size


def zeroed_cache(
    lanes: Iterable[ttnn.MeshDevice], shape: KVCacheShape, num_layers: int, kv_dtype: str
) -> TTKVCache:
    """Allocate a cache.

    Args:
        lanes: Submesh of each lane.
        shape: (num_blocks, num_kv_heads, block_size, head_dim), the heads of a lane's chips
            together.
        num_layers: Layers.
        kv_dtype: ttnn's dtype of the stored values.
    """
    num_blocks, num_heads, block_size, head_dim = shape
    devices = list(lanes)
    heads = num_heads // devices[0].get_num_devices()
    # Packed once, as every plane of every chip has the same zeros.
    zeros = ttnn.from_torch(
        torch.zeros(num_blocks, heads, block_size, head_dim, dtype=torch.bfloat16),
        dtype=getattr(ttnn, kv_dtype),
        layout=ttnn.TILE_LAYOUT,
    )
    planes = [
        [[_in_dram(zeros, device) for _ in ("k", "v")] for _ in range(num_layers)]
        for device in devices
    ]
    return TTKVCache(planes, num_blocks, block_size)


def _in_dram(host: ttnn.Tensor, device: ttnn.MeshDevice) -> ttnn.Tensor:
    return ttnn.to_device(host, device, memory_config=ttnn.DRAM_MEMORY_CONFIG)
