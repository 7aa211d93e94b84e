"""Rotary tables on the device, and lookup of the rows that a call needs.

Layout "hf": channel i is paired with i + head_dim / 2, as in the weights that transformers saves,
so weights and KV cache are those of the torch generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import ttnn

from replicas.generators.torch.rope import cos_and_sin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.rope_config import RopeConfig


class DeviceRope:
    """Tables of the cosines and sines of every position.

    Owner: two bfloat16 tensors (1, 1, max_seq_len, head_dim), row-major, the same on every chip.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_seq_len: int, device: ttnn.MeshDevice
    ) -> None:
        """Fill the tables for positions 0..max_seq_len-1."""
        self._head_dim = head_dim
        self._tables = [
            ttnn.from_torch(
                half.repeat(1, 2)[None, None],
                dtype=ttnn.bfloat16,
                layout=ttnn.ROW_MAJOR_LAYOUT,
                device=device,
                memory_config=ttnn.DRAM_MEMORY_CONFIG,
                mesh_mapper=ttnn.ReplicateTensorToMesh(device),
            )
            for half in cos_and_sin(rope, head_dim, max_seq_len, torch.bfloat16)
        ]

    def of_chunk(self, rope_indices: ttnn.Tensor) -> list[ttnn.Tensor]:
        """Return cos and sin (1, 1, S, head_dim), tiles in DRAM, for indices (1, S)."""
        num_tokens = rope_indices.shape[-1]
        return [
            ttnn.reshape(
                ttnn.embedding(rope_indices, table, layout=ttnn.TILE_LAYOUT),
                (1, 1, num_tokens, self._head_dim),
            )
            for table in self._tables
        ]

    def of_rows(
        self, rope_indices: ttnn.Tensor, memory_configs: Sequence[ttnn.MemoryConfig]
    ) -> list[list[ttnn.Tensor]]:
        """Return cos and sin (1, B, 1, head_dim) for indices (1, B), once for each place.

        Args:
            rope_indices: Position of each row's token.
            memory_configs: One core per row, as for the rotated heads.
        """
        num_rows = rope_indices.shape[-1]
        both = []
        for table in self._tables:
            rows = ttnn.embedding(rope_indices, table, layout=ttnn.ROW_MAJOR_LAYOUT)
            # Each row becomes a separate tile.
            rows = ttnn.reshape(rows, (1, num_rows, 1, self._head_dim))
            both.append(ttnn.to_layout(rows, ttnn.TILE_LAYOUT))
        return [[ttnn.to_memory_config(tiles, where) for tiles in both] for where in memory_configs]
