"""Attention of a decoder layer over the paged KV cache of a lane.

A chunk at position 0 attends to its own keys and values, a later one to the paged cache; a decode
row to its blocks. Keys and values are rounded to the cache's dtype before a chunk attends to them,
so that cutting a prompt elsewhere changes nothing.

Dimensions: S tokens of a bucket, B decode rows; heads are those of one chip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import ttnn

from replicas.generators.ttnn.buckets import TILE
from replicas.generators.ttnn.products import core_range, freed_after_move, width_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.inputs import TTDecodeInputs, TTPrefillInputs
    from replicas.generators.ttnn.kernels import LaneKernels
    from replicas.generators.ttnn.products import Products
    from replicas.generators.ttnn.weights import TTLayerWeights

LARGEST_PIECE = 256
_PIECES = (LARGEST_PIECE, 128)
"""Tokens of a chunk that attention processes at once if every core then has work; else 64.
Source: SDPA program configurations of tt-metal's models/tt_transformers/tt/model_config.py."""

_COLUMNS = 8
"""Cores side by side that hold decode rows; every chip has as many. Then the usual numbers of rows
fill a rectangle, and heads are joined by the op's plain program, not by that for any set of cores.
"""


class PagedAttention:
    """Attention of every layer of a lane.

    Owner: nothing on the device; weights and cache are arguments.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: ttnn.MeshDevice,
        kernels: LaneKernels,
        *,
        tp: int,
        max_rows: int,
        block_size: int,
    ) -> None:
        """Prepare for one lane; see ``buckets.check_lane`` for what fits."""
        self._kernels = kernels
        self._num_heads = config.num_attention_heads // tp
        self._num_kv_heads = config.num_key_value_heads // tp
        self._eps = config.rms_norm_eps
        # An operation refuses a scale that float32 cannot hold.
        self._scale = float(np.float32(config.head_dim**-0.5))
        self._num_rows = max_rows
        self._block_size = block_size
        self._head_dim = config.head_dim
        self._grid = device.compute_with_storage_grid_size()
        columns = min(max_rows, _COLUMNS)
        self._joined_in = _height_shards(
            core_range(0, max_rows, ttnn.CoreCoord(columns, self._grid.y)), config.head_dim
        )
        """A core's L1 per decode row, which holds the row's heads as one tile row."""
        num_cores = self._grid.x * self._grid.y
        all_heads = self._num_heads + 2 * self._num_kv_heads
        self._is_apart = 2 * max_rows <= num_cores and all_heads <= num_cores
        self.rotated_in = [self._joined_in]
        """Memory configurations in which queries are rotated, and keys, if these differ."""
        if self._is_apart:
            # Cores that differ write keys and values at once.
            self.rotated_in = [
                _height_shards(core_range(first, max_rows, self._grid), config.head_dim)
                for first in (0, max_rows)
            ]
            self._cut_in = width_shards(core_range(0, all_heads, self._grid), config.head_dim)
        else:
            self._cut_in = ttnn.L1_MEMORY_CONFIG
        self._concat_cores = None if max_rows % columns == 0 else _whole(self._grid)

    def piece(self, num_tokens: int, start: int) -> int:
        """Return how many tokens of queries, and of keys, attention of a chunk processes at once.

        If an earlier part of the sequence is in the cache, its end must be a multiple of this
        number. ttnn requires that for both, and for keys because of its issue 35225. The tokens of
        a block always qualify.

        Args:
            num_tokens: S.
            start: Position of the first; a multiple of the block size.
        """
        num_cores = self._grid.x * self._grid.y
        pieces = (
            piece
            for piece in _PIECES
            if num_tokens % piece == 0 and self._num_heads * num_tokens // piece >= num_cores
        )
        largest = next(pieces, 64)
        if start == 0:
            return largest
        return self._block_size if start % largest else max(largest, self._block_size)

    def prefill(  # noqa: PLR0913 - what a chunk consists of
        self,
        x: ttnn.Tensor,
        layer: TTLayerWeights,
        products: Products,
        rope: Sequence[ttnn.Tensor],
        inputs: TTPrefillInputs,
        cache: Sequence[ttnn.Tensor],
        *,
        piece: int,
    ) -> ttnn.Tensor:
        """Write a chunk's keys and values, and attend with its queries.

        Args:
            x: (1, 1, S, hidden) in DRAM; freed.
            layer: Its weights.
            products: Of the lane's chunks.
            rope: Cos and sin (1, 1, S, head_dim).
            inputs: Page tables and start of the chunk.
            cache: Keys and values of the layer; the chunk's blocks are written.
            piece: See the method of this name.

        Returns:
            (1, 1, S, hidden), summed over the chips.
        """
        dram = ttnn.DRAM_MEMORY_CONFIG
        qkv = products.times("qkv", x, layer.qkv, layer.qkv_bias)
        ttnn.deallocate(x)
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            qkv,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            transpose_k_heads=False,
            memory_config=dram,
        )
        ttnn.deallocate(qkv)
        q = self._rotated(self._normed(q, layer.q_norm, dram), rope, is_decode=False)
        k = self._rotated(self._normed(k, layer.k_norm, dram), rope, is_decode=False)
        k, v = (
            self._filled(plane, new, inputs.chunk_page_table)
            for plane, new in zip(cache, (k, v), strict=True)
        )
        if inputs.chunk_start is None:
            heads = ttnn.transformer.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                scale=self._scale,
                memory_config=dram,
                program_config=self._program(piece),
                compute_kernel_config=self._kernels.attention,
            )
        else:
            heads = ttnn.transformer.chunked_scaled_dot_product_attention(
                q,
                cache[0],
                cache[1],
                inputs.page_table,
                chunk_start_idx_tensor=inputs.chunk_start,
                scale=self._scale,
                memory_config=dram,
                program_config=self._program(piece),
                compute_kernel_config=self._kernels.attention,
            )
        for used in (q, k, v):
            ttnn.deallocate(used)
        joined = ttnn.experimental.nlp_concat_heads(heads, memory_config=dram)
        ttnn.deallocate(heads)
        return _output(joined, layer, products)

    def decode(
        self,
        x: ttnn.Tensor,
        layer: TTLayerWeights,
        products: Products,
        rope: Sequence[Sequence[ttnn.Tensor]],
        inputs: TTDecodeInputs,
        cache: Sequence[ttnn.Tensor],
    ) -> ttnn.Tensor:
        """Write each row's key and value, and attend with its query.

        Args:
            x: (1, 1, 32, hidden) where ``qkv`` takes it, the first B rows used; freed.
            layer: Its weights.
            products: Of the lane's decode steps.
            rope: Cos and sin (1, B, 1, head_dim), a core per row, for each of ``rotated_in``.
            inputs: Positions and page tables.
            cache: Keys and values of the layer, written at the rows' positions.

        Returns:
            (1, 1, 32, hidden) in L1, summed over the chips; rows B to 31 mean nothing.
        """
        product = products.times("qkv", x, layer.qkv, layer.qkv_bias)
        ttnn.deallocate(x)
        q, k, v = self._heads_of_rows(freed_after_move(product, self._cut_in))
        del product
        q_place, k_place = self.rotated_in[0], self.rotated_in[-1]
        q = self._rotated(self._normed_rows(q, layer.q_norm, q_place), rope[0], is_decode=True)
        k = self._rotated(self._normed_rows(k, layer.k_norm, k_place), rope[-1], is_decode=True)
        self._write_rows(k, v, inputs, cache)
        heads = ttnn.transformer.paged_scaled_dot_product_attention_decode(
            q,
            cache[0],
            cache[1],
            page_table_tensor=inputs.page_table,
            cur_pos_tensor=inputs.positions,
            scale=self._scale,
            # Its output is refused in shards where heads share keys.
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            program_config=self._program(0),
            compute_kernel_config=self._kernels.attention_of_rows,
        )
        ttnn.deallocate(q)
        sharded = ttnn.to_memory_config(heads, self._joined_in)
        ttnn.deallocate(heads)
        by_head = ttnn.experimental.nlp_concat_heads_decode(
            sharded, num_heads=self._num_heads, sub_core_grids=self._concat_cores
        )
        ttnn.deallocate(sharded)
        return _output(by_head, layer, products)

    def _heads_of_rows(self, qkv: ttnn.Tensor) -> tuple[ttnn.Tensor, ttnn.Tensor, ttnn.Tensor]:
        """Cut queries, keys and values (1, B, heads, head_dim) out of a product, which is freed."""
        width = qkv.shape[3]
        if self._num_rows < TILE:
            # The heads are spread over a core per row of the shape; the memory stays.
            qkv = ttnn.reshape(qkv, (1, 1, self._num_rows, width), (1, 1, TILE, width))
        q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
            qkv,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            overlap_qk_coregrid=not self._is_apart,
            memory_config=(
                ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG if self._is_apart else self._joined_in
            ),
        )
        ttnn.deallocate(qkv)
        return q, k, v

    def _write_rows(
        self,
        k: ttnn.Tensor,
        v: ttnn.Tensor,
        inputs: TTDecodeInputs,
        cache: Sequence[ttnn.Tensor],
    ) -> None:
        """Write each row's key and value, which are freed."""
        where = {"update_idxs_tensor": inputs.positions, "page_table": inputs.page_table}
        if self._is_apart:
            ttnn.experimental.paged_fused_update_cache(cache[0], k, cache[1], v, **where)
        else:
            for plane, new in zip(cache, (k, v), strict=True):
                ttnn.experimental.paged_update_cache(plane, new, **where)
        ttnn.deallocate(k)
        ttnn.deallocate(v)

    def _normed(
        self, heads: ttnn.Tensor, weight: ttnn.Tensor | None, memory_config: ttnn.MemoryConfig
    ) -> ttnn.Tensor:
        """Normalise each head, where the model does, and free the argument."""
        if weight is None:
            return heads
        out = ttnn.rms_norm(
            heads,
            epsilon=self._eps,
            weight=weight,
            memory_config=memory_config,
            compute_kernel_config=self._kernels.norm,
        )
        ttnn.deallocate(heads)
        return out

    def _normed_rows(
        self, heads: ttnn.Tensor, weight: ttnn.Tensor | None, where: ttnn.MemoryConfig
    ) -> ttnn.Tensor:
        if weight is None:
            return heads
        # The norm takes no height shards.
        joined = ttnn.to_memory_config(heads, ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(heads)
        normed = self._normed(joined, weight, ttnn.L1_MEMORY_CONFIG)
        out = ttnn.to_memory_config(normed, where)
        ttnn.deallocate(normed)
        return out

    def _rotated(
        self, heads: ttnn.Tensor, rope: Sequence[ttnn.Tensor], *, is_decode: bool
    ) -> ttnn.Tensor:
        """Rotate each head, and free the argument."""
        cos, sin = rope
        out = ttnn.experimental.rotary_embedding_hf(
            heads,
            cos,
            sin,
            is_decode_mode=is_decode,
            compute_kernel_config=self._kernels.rope,
        )
        ttnn.deallocate(heads)
        return out

    def _filled(
        self, plane: ttnn.Tensor, new: ttnn.Tensor, chunk_page_table: ttnn.Tensor
    ) -> ttnn.Tensor:
        """Write a chunk's keys or values, and return them in the dtype of the cache."""
        if new.dtype != plane.dtype:
            # Tiles are copied as they are, so they must be the cache's.
            cast = ttnn.typecast(new, plane.dtype)
            ttnn.deallocate(new)
            new = cast
        ttnn.experimental.paged_fill_cache(plane, new, chunk_page_table, batch_idx=0)
        return new

    def _program(self, chunk_size: int) -> ttnn.SDPAProgramConfig:
        """Take queries and keys in pieces of ``chunk_size`` tokens; 0 leaves it to the op."""
        return ttnn.SDPAProgramConfig(
            compute_with_storage_grid_size=self._grid,
            q_chunk_size=chunk_size,
            k_chunk_size=chunk_size,
            exp_approx_mode=False,
        )


def _output(joined: ttnn.Tensor, layer: TTLayerWeights, products: Products) -> ttnn.Tensor:
    partial = products.times("o", joined, layer.o)
    ttnn.deallocate(joined)
    return products.summed(partial, layer.o_bias)


def _height_shards(cores: ttnn.CoreRangeSet, head_dim: int) -> ttnn.MemoryConfig:
    """Return a row of tiles on each core."""
    return ttnn.MemoryConfig(
        ttnn.TensorMemoryLayout.HEIGHT_SHARDED,
        ttnn.BufferType.L1,
        ttnn.ShardSpec(cores, [TILE, head_dim], ttnn.ShardOrientation.ROW_MAJOR),
    )


def _whole(grid: ttnn.CoreCoord) -> ttnn.CoreRangeSet:
    return ttnn.CoreRangeSet(
        [ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(grid.x - 1, grid.y - 1))]
    )
