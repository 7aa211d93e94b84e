"""Keys and values of decoding rows, dense and kept from pass to pass beside the paged cache.

Blocks stay the truth: every pass writes them first. A row is taken over from an earlier pass only
if it holds exactly what its sequence's blocks hold before the newest token: same blocks, same
length, and nothing has been written to them since (`TorchKVCache.written`), by whomever. Then only
the newest token is added; any other row is gathered afresh, and zeroed behind its end, so that
nothing left over in a block reaches a product.

Dimensions: B rows in use, C rows there is room for, G KV heads, L tokens of a row in whole blocks,
S block size, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from replicas.generators.torch.inputs import Int64Array
    from replicas.generators.torch.kv_cache import TorchKVCache

SMALL_BYTES = 256 << 20
"""A cache up to this size may be kept dense as a whole, a larger one by half."""

_ROWS_AT_ONCE = 8
"""Room is made for so many rows at a time, so that one more seldom needs all to be moved."""


def max_dense_bytes(cache: TorchKVCache) -> int:
    """How much may be kept beside a cache; rows over it are gathered in every pass."""
    size = cache.memory.nbytes
    return max(size // 2, min(size, SMALL_BYTES))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens``."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """Rows to be read from blocks.

    Attributes:
        sources: int64 (2 * n * G * L / S,), blocks of a layer's ``TorchKVCache.layers`` seen as
            (2 * P * G, S * D).
        targets: int64 (2 * n * G,), rows of the dense memory seen as (2 * C * G, L * D); None where
            they are all rows in use, in order.
        tails: int64, tokens behind the end, of the dense memory seen as (2 * C * G * L, D).
    """

    sources: torch.Tensor
    targets: torch.Tensor | None
    tails: torch.Tensor


class DenseKV:
    """The rows of one group of decodes.

    Owner: the dense memory and what is known of its rows. Memory is that of all layers, or of one
    layer, whose rows then are gathered anew in each layer, where all would be more than allowed.

    Attributes:
        nbytes: Bytes held.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._cache: TorchKVCache | None = None
        self._layers: list[torch.Tensor] = []
        self._room = 0
        self._width = 0
        # Per row: its blocks, its tokens (-1: it holds nothing), and the cache's clock then.
        self._tables = np.zeros((0, 0), dtype=np.int64)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._clocks = np.zeros(0, dtype=np.int64)
        # Per block a row that may have it as its last one; a hint, looked at before it is believed.
        self._row_of_block = np.zeros(0, dtype=np.int64)

    def rows_for(
        self, cache: TorchKVCache, tables: Int64Array, lengths: Int64Array, max_bytes: int
    ) -> DenseRows:
        """Give sequences their rows, for one pass.

        Args:
            cache: Where their blocks are.
            tables: (B, K) global block ids, the newest token's included.
            lengths: (B,) tokens, the newest included.
            max_bytes: Bound on what may be kept for all layers.
        """
        count, size = len(lengths), cache.block_size
        self._fit(cache, count, blocks_for(int(lengths.max()), size) * size, max_bytes)
        padded = np.zeros((count, self._width // size), dtype=np.int64)
        used = min(tables.shape[1], padded.shape[1])
        padded[:, :used] = tables[:, :used]
        rows, is_kept = self._assign(cache, padded, lengths)
        if len(self._layers) < len(cache.planes):
            rows, is_kept = np.arange(count), np.zeros(count, dtype=np.bool_)
        # Until the pass is through they hold nothing that could be relied on.
        self._lengths[rows] = -1
        return DenseRows(
            rows=rows,
            length=self._width,
            gather=None if is_kept.all() else self._gather(cache, padded, lengths, rows, ~is_kept),
            appends=self._appends(cache, lengths, rows) if is_kept.any() else None,
            owner=self,
            blocks=cache.layers,
            tables=padded,
            lengths=lengths,
        )

    def views(self, layer: int) -> torch.Tensor:
        """Dense memory of a layer, (2 * C * G * L, D)."""
        return self._layers[layer if len(self._layers) > 1 else 0]

    def keep(self, rows: Int64Array, tables: Int64Array, lengths: Int64Array) -> None:
        """Rely on rows from now on: the pass is through."""
        assert self._cache is not None
        self._tables[rows], self._lengths[rows] = tables, lengths
        self._clocks[rows] = self._cache.clock
        last = tables[np.arange(len(rows)), (lengths - 1) // self._cache.block_size]
        self._row_of_block[last] = rows

    def _fit(self, cache: TorchKVCache, count: int, width: int, max_bytes: int) -> None:
        """Have room for so many rows of so many tokens; where it moves, what was there is lost."""
        is_there = cache is self._cache and count <= self._room and width <= self._width
        if is_there and 2 * count + _ROWS_AT_ONCE > self._room and 2 * width > self._width:
            return
        plane = cache.planes[0][0]
        num_blocks, num_kv_heads, _, head_dim = plane.shape
        self._cache, self._width = cache, width
        self._room = -(-count // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
        shape = (2 * self._room * num_kv_heads * width, head_dim)
        layer_bytes = shape[0] * head_dim * plane.element_size()
        num_layers = len(cache.planes) if layer_bytes * len(cache.planes) <= max_bytes else 1
        self._layers = []  # before the new ones, so that both are never there at once
        self._layers = [torch.zeros(shape, dtype=plane.dtype) for _ in range(num_layers)]
        self.nbytes = num_layers * layer_bytes
        self._tables = np.zeros((self._room, width // cache.block_size), dtype=np.int64)
        self._lengths = np.full(self._room, -1, dtype=np.int64)
        self._clocks = np.zeros(self._room, dtype=np.int64)
        self._row_of_block = np.full(num_blocks, -1, dtype=np.int64)

    def _assign(
        self, cache: TorchKVCache, tables: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """A row below B for each sequence, and whether it holds all but the newest token."""
        count, cached = len(lengths), lengths - 1
        last = tables[np.arange(count), np.maximum(cached - 1, 0) // cache.block_size]
        hints = self._row_of_block[last]
        is_kept = (hints >= 0) & (hints < count)
        hints = np.where(is_kept, hints, 0)
        is_used = np.arange(tables.shape[1]) * cache.block_size < cached[:, None]
        is_kept &= self._lengths[hints] == cached
        is_kept &= ((self._tables[hints] == tables) | ~is_used).all(axis=1)
        written = np.where(is_used, cache.written[tables], 0).max(axis=1)
        is_kept &= written <= self._clocks[hints]
        # Two that share all of their blocks may be pointed to one row: the first has it.
        first = np.unique(hints[is_kept], return_index=True)[1]
        if len(first) < is_kept.sum():
            chosen = np.flatnonzero(is_kept)[first]
            is_kept[:] = False
            is_kept[chosen] = True
        rows = hints.astype(np.int64)
        if not is_kept.all():
            rows[~is_kept] = np.setdiff1d(np.arange(count), hints[is_kept])
        return rows, is_kept

    def _gather(
        self,
        cache: TorchKVCache,
        tables: Int64Array,
        lengths: Int64Array,
        rows: Int64Array,
        is_stale: npt.NDArray[np.bool_],
    ) -> _Gather:
        num_blocks, num_kv_heads = cache.planes[0][0].shape[:2]
        heads, halves = np.arange(num_kv_heads), np.arange(2)[:, None, None]
        stale, stale_tables = rows[is_stale], tables[is_stale]
        blocks = stale_tables[:, None, :] * num_kv_heads + heads[:, None]
        sources = blocks[None] + halves[..., None] * (num_blocks * num_kv_heads)
        targets = (halves * self._room + stale[:, None]) * num_kv_heads + heads
        where, positions = np.nonzero(np.arange(self._width) >= lengths[is_stale][:, None])
        tails = targets[:, where] * self._width + positions[:, None]
        return _Gather(
            sources=torch.from_numpy(sources.reshape(-1)),
            targets=None if is_stale.all() else torch.from_numpy(targets.reshape(-1)),
            tails=torch.from_numpy(tails.reshape(-1)),
        )

    def _appends(self, cache: TorchKVCache, lengths: Int64Array, rows: Int64Array) -> torch.Tensor:
        """Where the newest tokens go, (B * 2 * G,) in the order of rows 0 to B - 1."""
        num_kv_heads = cache.planes[0][0].shape[1]
        newest = np.empty_like(lengths)
        newest[rows] = lengths - 1
        first = (np.arange(2)[:, None] * self._room * num_kv_heads) + np.arange(num_kv_heads)
        at = (np.arange(len(rows)) * num_kv_heads)[:, None] + first.reshape(-1)
        return torch.from_numpy((at * self._width + newest[:, None]).reshape(-1))


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """What one pass does with a group's dense rows.

    Attributes:
        rows: (B,) the row of each sequence, in the order in which they were given.
        length: L.
        gather: Rows to be read from blocks; None when all are there.
        appends: Where the newest tokens go; None when all rows are gathered, with these in them.
        owner: Whose rows they are.
        blocks: Per layer its blocks, as ``TorchKVCache.layers``.
        tables: (B, L / S) blocks of each sequence.
        lengths: (B,) tokens of each sequence.
    """

    rows: Int64Array
    length: int
    gather: _Gather | None
    appends: torch.Tensor | None
    owner: DenseKV
    blocks: Sequence[torch.Tensor]
    tables: Int64Array
    lengths: Int64Array

    def with_new(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring a layer's rows up to date.

        Args:
            layer: Which.
            kv: (B, 2 * G, D) of the newest tokens, in the order of rows 0 to B - 1; the cache has
                them already.

        Returns:
            Keys and values, each (B * G, L, D), contiguous.
        """
        memory, head_dim = self.owner.views(layer), kv.shape[-1]
        if self.gather is not None:
            self._read_blocks(layer, memory, head_dim)
        if self.appends is not None:
            memory.index_copy_(0, self.appends, kv.view(-1, head_dim))
        size = kv.shape[0] * kv.shape[1] // 2
        k, v = memory.view(2, -1, self.length, head_dim).unbind(0)
        return k[:size], v[:size]

    def keep(self) -> None:
        """Rely on the rows in the next pass."""
        self.owner.keep(self.rows, self.tables, self.lengths)

    def _read_blocks(self, layer: int, memory: torch.Tensor, head_dim: int) -> None:
        assert self.gather is not None
        blocks, sources, targets = self.blocks[layer], self.gather.sources, self.gather.targets
        if targets is None:
            # Straight into their place: a copy between would be as large as all that is kept.
            halves = memory.view(2, -1, blocks.shape[1])
            for half, wanted in zip(halves, sources.view(2, -1), strict=True):
                torch.index_select(blocks, 0, wanted, out=half[: len(wanted)])
        else:
            found = blocks.index_select(0, sources).view(len(targets), -1)
            memory.view(-1, self.length * head_dim).index_copy_(0, targets, found)
        memory.index_fill_(0, self.gather.tails, 0)
