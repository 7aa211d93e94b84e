"""Bring the generator's three input forms to one: tokens in a row over a lane-free block space.

Padded prefill rows, the padded decode batch and the flat mixed batch all become a ``PagedBatch``.
Lanes vanish here: block ``b`` of lane ``l`` becomes ``l * num_blocks + b``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    import numpy.typing as npt

    from replicas.generators.protocol import FlatBatch

    Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockSpace:
    """Mapping of lane-local blocks and global slots to the cache.

    Attributes:
        num_blocks: Blocks per lane of each KV group, with the null block.
        block_size: Tokens per block.
        slots_per_lane: ``max_batch_size // tt_data_parallel``.
    """

    num_blocks: Sequence[int]
    block_size: int
    slots_per_lane: int

    def first_blocks(self, slots: Int64Array) -> Int64Array:
        """Return (G, n), the global id of block 0 of the lanes of slots (n,)."""
        return self.of_lanes(slots // self.slots_per_lane)

    def of_lanes(self, lanes: Int64Array) -> Int64Array:
        """Return (G, n), the global id of block 0 of lanes (n,)."""
        first: Int64Array = np.array(self.num_blocks)[:, None] * lanes
        return first


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One forward pass: T tokens of R requests, request after request; all contiguous.

    Each of G KV groups has positions and a table of its own.

    Attributes:
        input_ids: int64 (T,).
        positions: int64 (T,), position of each token in its sequence.
        kv_positions: int64 (G, T), where its KV goes: global block * block_size + offset.
        query_start_loc: int64 (R + 1,), request r owns tokens query_start_loc[r]..[r + 1].
        seq_lens: int64 (R,), tokens of each request after this pass, the new ones included.
        block_table: int64 (G, R, K), global block ids; no request reads a block that another writes
            in this pass.
        logits_indices: int64 (S,), tokens whose logits are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_positions: torch.Tensor
    query_start_loc: Int64Array
    seq_lens: Int64Array
    block_table: Int64Array
    logits_indices: torch.Tensor


def requests_of(batch: PagedBatch, which: npt.NDArray[np.bool_]) -> tuple[torch.Tensor, PagedBatch]:
    """Return a pass of some requests (R,), and int64 indices of its tokens in the whole one."""
    counts = np.diff(batch.query_start_loc)
    tokens = torch.from_numpy(np.flatnonzero(np.repeat(which, counts)))
    return tokens, PagedBatch(
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        kv_positions=batch.kv_positions[:, tokens],
        query_start_loc=np.concatenate(([0], np.cumsum(counts[which]))),
        seq_lens=batch.seq_lens[which],
        block_table=np.ascontiguousarray(batch.block_table[:, which]),
        logits_indices=tokens[:0],
    )


def from_flat(batch: FlatBatch, space: BlockSpace) -> PagedBatch:
    """Convert the engine's flat batch."""
    first_blocks = space.of_lanes(batch.dp_groups.astype(np.int64))
    places = batch.slot_mapping + first_blocks[:, batch.request_indices] * space.block_size
    return PagedBatch(
        input_ids=torch.from_numpy(batch.input_ids.astype(np.int64)),
        positions=torch.from_numpy(np.ascontiguousarray(batch.positions)),
        kv_positions=torch.from_numpy(places),
        query_start_loc=batch.query_start_loc.astype(np.int64),
        seq_lens=batch.seq_lens.astype(np.int64),
        block_table=np.ascontiguousarray(batch.block_table + first_blocks[:, :, None]),
        logits_indices=torch.from_numpy(batch.logits_indices),
    )


def from_prefill(
    tokens: Int64Array,
    page_table: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    first_blocks: Int64Array,
    block_size: int,
) -> PagedBatch:
    """Convert padded prefill rows.

    Args:
        tokens: (N, longest) prompts from position 0.
        page_table: (G, N, K) lane-local blocks.
        starts: (N,) first position of each chunk.
        ends: (N,) end position of each chunk.
        first_blocks: (G, N) global id of block 0 of each row's lane.
        block_size: Tokens per block.

    Raises:
        ValueError: A chunk is empty, or ends past its row of tokens or its page table.
    """
    num_scheduled = ends - starts
    width = min(tokens.shape[1], page_table.shape[2] * block_size)
    if num_scheduled.min() < 1 or starts.min() < 0 or ends.max() > width:
        raise ValueError(f"prefill chunks {starts} to {ends} do not fit in rows of {width} tokens")
    query_start_loc = np.concatenate(([0], np.cumsum(num_scheduled)))
    rows = np.repeat(np.arange(len(starts)), num_scheduled)
    positions = np.arange(len(rows)) - np.repeat(query_start_loc[:-1] - starts, num_scheduled)
    return _from_positions(
        tokens[rows, positions], rows, positions, page_table + first_blocks[:, :, None], block_size
    )


def from_decode(
    tokens: Int64Array,
    page_table: Int64Array,
    positions: Int64Array,
    first_blocks: Int64Array,
    block_size: int,
) -> PagedBatch:
    """Convert the live rows of a decode batch; arguments as in ``from_prefill``, one token a row.

    Raises:
        ValueError: A position lies past its page table.
    """
    width = page_table.shape[2] * block_size
    if positions.max() >= width:
        raise ValueError(f"decode position {positions.max()} does not fit in {width} tokens")
    rows = np.arange(len(positions))
    table = page_table + first_blocks[:, :, None]
    return _from_positions(tokens, rows, positions, table, block_size)


def _from_positions(
    input_ids: Int64Array,
    rows: Int64Array,
    positions: Int64Array,
    block_table: Int64Array,
    block_size: int,
) -> PagedBatch:
    """Assemble a batch whose rows' tokens are contiguous and want one logit each."""
    blocks = np.ascontiguousarray(block_table[:, rows, positions // block_size])
    ends = np.searchsorted(rows, np.arange(block_table.shape[1]), side="right")
    return PagedBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        kv_positions=torch.from_numpy(blocks * block_size + positions % block_size),
        query_start_loc=np.concatenate(([0], ends)),
        seq_lens=positions[ends - 1] + 1,
        block_table=np.ascontiguousarray(block_table),
        logits_indices=torch.from_numpy(ends - 1),
    )
