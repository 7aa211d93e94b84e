"""The torch generator's paged KV cache: one tensor per layer and plane, seen per lane.

Dimensions: P = lanes * num_blocks blocks of all lanes, H KV heads, S block size, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from replicas.generators.protocol import KVCacheShape

LaneCache: TypeAlias = list[list[torch.Tensor]]
"""[layer] -> [k, v], each (num_blocks, H, S, D)."""


class TorchKVCache(list[LaneCache]):
    """``cache[lane][layer] -> [k, v]``, views of tensors that hold every lane.

    Owner: the tensors' memory. One flat pass addresses all lanes through ``planes``, where block
    ``b`` of lane ``l`` is row ``l * num_blocks + b``.

    Attributes:
        planes: Per layer (k, v), each (P, H, S, D), contiguous.
        num_blocks: Blocks per lane, with the null block.
        block_size: Tokens per block.
    """

    def __init__(
        self, shape: KVCacheShape, dtype: torch.dtype, num_layers: int, num_lanes: int
    ) -> None:
        """Allocate zeros.

        Args:
            shape: (num_blocks, H, S, D) of one lane.
            dtype: Dtype of keys and values.
            num_layers: Layers.
            num_lanes: Lanes.

        Raises:
            ConfigError: A dimension is not positive.
        """
        if min(*shape, num_layers, num_lanes) < 1:
            raise ConfigError(f"KV cache {shape=} {num_layers=} {num_lanes=} must be positive")
        self.num_blocks, _, self.block_size, _ = shape
        whole = (num_lanes * shape[0], *shape[1:])
        self.planes = [
            (torch.zeros(whole, dtype=dtype), torch.zeros(whole, dtype=dtype))
            for _ in range(num_layers)
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
