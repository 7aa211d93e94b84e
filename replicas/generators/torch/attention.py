"""Attention over the paged KV cache by PyTorch's operations.

A back end prepares one pass (which tokens go together) and returns a function that every layer
calls. Positions past a sequence's end, those behind a window and the null block may hold anything,
NaN included, and never reach a result.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks of all lanes, S block size,
R rows (tokens of one sequence that attend together), n tokens of a row, W blocks of a row,
L = W * S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from replicas.generators.torch.plain import Attend, PlainKernels
from replicas.generators.torch.row_attention import attend_rows

if TYPE_CHECKING:
    from replicas.generators.layer_specs import AttentionSpec, LatentAttentionSpec
    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.generators.torch.kernels import Kernels
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.latent import LatentProducts

MOST_QUERIES = 256
"""Tokens of a row: a mask of more would take much memory, and half of it would be empty."""
MOST_KEYS = 1 << 20
"""Gathered positions of a group of rows: more would take much memory and are no faster."""


class AttentionBackend(Protocol):
    """Holds nothing that changes.

    Attributes:
        kernels: What a pass does besides, in the same spirit.
        is_compiled: Whether whole layers may be run by compiled code.
    """

    kernels: Kernels | PlainKernels
    is_compiled: bool

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """Return the attention function of one pass, which every layer calls once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of about equal sizes.

    Attributes:
        tokens: int64 (R, n), indices of tokens in the pass; short rows repeat their last one.
        positions: int64 (R, n), places of these tokens in their sequences.
        tables: int64 (groups, R, K), global block ids of their sequences in each KV group.
        are_first: bool (R, n), False where a token is repeated.
    """

    tokens: torch.Tensor
    positions: Int64Array
    tables: Int64Array
    are_first: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """What rows see through a window.

    Attributes:
        blocks: int64 (R * W,), of the cache.
        hidden: bool (R, L, 1): positions that no token of a row sees, to be replaced by zeros.
        visible: bool (R, 1, n, L), for each token.
    """

    blocks: torch.Tensor
    hidden: torch.Tensor
    visible: torch.Tensor


class BatchedAttention:
    """Attention of rows in groups of about equal sizes: decodes together, prompts in pieces.

    Attributes:
        kernels: See ``AttentionBackend``.
        is_compiled: See ``AttentionBackend``.
    """

    kernels: Kernels | PlainKernels
    is_compiled = False

    def __init__(self) -> None:
        self.kernels = PlainKernels()

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """Return the attention function of one pass, which layers call once each."""
        groups: list[_Rows] = []
        windows: dict[tuple[int, int | None], list[_Window]] = {}

        def attend(
            layer: int,
            q: torch.Tensor,
            spec: AttentionSpec | LatentAttentionSpec,
            sinks: torch.Tensor | None = None,
            latent: LatentProducts | None = None,
        ) -> torch.Tensor:
            if not groups:  # made when a layer needs them
                groups.extend(_groups(batch, cache.block_size))
            key = group, window = cache.group_of[layer], spec.window
            if key not in windows:
                windows[key] = [
                    _window(r, r.tables[group], window, cache.block_size) for r in groups
                ]
            value = cache.planes[layer][-1].shape[-1] if latent is None else latent.value
            out = q.new_empty(*q.shape[:2], value)
            for rows, seen in zip(groups, windows[key], strict=True):
                some, held = q[rows.tokens], [_gather(each, seen) for each in cache.planes[layer]]
                if latent is None:
                    keys, values = held
                    found = attend_rows(some, keys, values, seen.visible, spec, sinks)
                else:
                    found = latent.attend(some, held[0], seen.visible)
                out[rows.tokens[rows.are_first]] = found[rows.are_first]
            return out

        return attend


def _groups(batch: PagedBatch, block_size: int) -> list[_Rows]:
    """Cut the requests of a pass into rows, and group these by their sizes."""
    starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
    counts = ends - starts
    pieces = -(-counts // MOST_QUERIES)
    requests = np.repeat(np.arange(len(counts)), pieces)
    piece = np.arange(len(requests)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = starts[requests] + piece * MOST_QUERIES
    sizes = np.minimum(ends[requests] - first, MOST_QUERIES)
    lengths = batch.seq_lens[requests] - (ends[requests] - first - sizes)
    # Neighbouring powers of two share a group: at most half of it is padding.
    keys = np.stack([_log2(sizes), _log2(-(-lengths // block_size))])
    groups: list[_Rows] = []
    for key in np.unique(keys, axis=1).T:
        which = np.flatnonzero((keys == key[:, None]).all(axis=0))
        longest = int(lengths[which].max())
        most = max(1, MOST_KEYS // (longest + int(sizes[which].max())))
        groups += [
            _rows(batch, requests[part], first[part], sizes[part], lengths[part])
            for part in np.split(which, range(most, len(which), most))
        ]
    return groups


def _log2(values: Int64Array) -> Int64Array:
    """Return the exponents of the next powers of two."""
    return np.ceil(np.log2(values)).astype(np.int64)


def _rows(
    batch: PagedBatch, requests: Int64Array, first: Int64Array, sizes: Int64Array, ends: Int64Array
) -> _Rows:
    steps = np.arange(sizes.max())
    taken = np.minimum(steps, sizes[:, None] - 1)
    return _Rows(
        tokens=torch.from_numpy(first[:, None] + taken),
        positions=(ends - sizes)[:, None] + taken,
        tables=batch.block_table[:, requests],
        are_first=torch.from_numpy(steps < sizes[:, None]),
    )


def _window(rows: _Rows, table: Int64Array, window: int | None, block_size: int) -> _Window:
    """Return the blocks of a KV group's table and the positions that rows see."""
    last = rows.positions[:, -1]
    oldest = 0 * rows.positions if window is None else np.maximum(rows.positions - window + 1, 0)
    begin = oldest[:, 0] // block_size
    width = int((last // block_size - begin).max()) + 1
    columns = begin[:, None] + np.arange(width)
    blocks = np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1)
    positions = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(len(last), -1)
    hidden = (positions > last[:, None]) | (positions < oldest[:, :1])
    visible = positions[:, None] <= rows.positions[:, :, None]
    if window is not None:
        visible &= positions[:, None] >= oldest[:, :, None]
    return _Window(
        blocks=torch.from_numpy(np.ascontiguousarray(blocks).reshape(-1)),
        hidden=torch.from_numpy(hidden)[:, :, None],
        visible=torch.from_numpy(visible)[:, None],
    )


def _gather(plane: torch.Tensor, seen: _Window) -> torch.Tensor:
    """Return what rows see of a plane (P, G, S, D) as (R, G, L, D), zero where they see nothing."""
    _, num_heads, block_size, size = plane.shape
    num_rows, length, _ = seen.hidden.shape
    blocks = plane.index_select(0, seen.blocks)
    blocks = blocks.view(num_rows, length // block_size, num_heads, block_size, size)
    found = blocks.transpose(1, 2).reshape(num_rows, num_heads, length, size)
    return found.masked_fill_(seen.hidden[:, None], 0.0)
