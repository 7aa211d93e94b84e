"""Persistent batch: tables and counters of every slot, and the model inputs built from them.

Owner: the model runner. Pure numpy. Rows are slots and never move, so a TT trace sees constant
shapes, and the cost of a step depends on its changes and not on the tables' width. The same tables
give two forms: the flat form (`flat_inputs`), in which prefill chunks and decodes share a pass, and
the two padded forms of Tenstorrent's generator interface.

Source of the flat form: vLLM v1/worker/gpu_model_runner.py `_prepare_inputs`.

Dimensions: G KV groups; B slots; M longest sequence; K blocks per sequence, in the group with the
most; R scheduled requests; T their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from replicas.generators.protocol import FlatBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from replicas.engine.step import NewRow, ScheduledBatch


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Arguments of `prefill_forward`: one row per prefilling sequence.

    Attributes:
        tokens: int32 (N, max(prompt_lens)), zero padded on the right.
        page_tables: int32 (G, N, K), padded with the null block.
        start_pos: int32 (N,), tokens already in the cache.
        prompt_lens: int64 (N,), end position of this chunk.
        empty_slots: The N global slots.
    """

    tokens: npt.NDArray[np.int32]
    page_tables: npt.NDArray[np.int32]
    start_pos: npt.NDArray[np.int32]
    prompt_lens: npt.NDArray[np.int64]
    empty_slots: list[int]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Arguments of `decode_forward`: the whole padded batch, row == slot.

    Attributes:
        tokens: int32 (B, 1), 0 in rows that do not decode.
        start_pos: int32 (B,), -1 in rows that do not decode.
        page_tables: int32 (G, B, K); all null in rows that do not decode. The batch's own: the next
            changes are written into them, so they may be read only during the call.
    """

    tokens: npt.NDArray[np.int32]
    start_pos: npt.NDArray[np.int32]
    page_tables: npt.NDArray[np.int32]


class TokenPlaces(NamedTuple):
    """Where the T tokens of a step are: in the token table, the block table and the KV cache.

    Attributes:
        request_indices: int32 (T,), each token's row of the step.
        positions: int64 (T,), its position in its sequence.
        token_indices: int64 (T,), its index in the flattened token table: slot * M + position.
        block_table_indices: int64 (G, T), index of its block in the flattened block tables of all
            groups: (group * B + slot) * K + position // block size.
        block_numbers: int64 (G, T), lane-local id of that block.
        block_offsets: int64 (G, T), its place in the block; (T,) if all blocks have one size.
    """

    request_indices: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    token_indices: npt.NDArray[np.int64]
    block_table_indices: npt.NDArray[np.int64]
    block_numbers: npt.NDArray[np.int64]
    block_offsets: npt.NDArray[np.int64]


class PersistentBatch:
    """Tables and counters of all slots; `apply` copies a step's changes into them.

    Args:
        max_batch_size: B.
        max_model_len: M, in tokens.
        block_sizes: Tokens per block of each KV group.
        table_width: K; None takes ceil(M / smallest block size).
    """

    def __init__(
        self,
        max_batch_size: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        table_width: int | None = None,
    ) -> None:
        self.block_sizes = block_sizes
        self.max_model_len = max_model_len
        width = -(-max_model_len // min(block_sizes))
        self.table_width = width if table_width is None else table_width
        assert self.table_width >= width, f"{table_width=} is less than {width}"
        self.token_ids = np.zeros((max_batch_size, max_model_len), dtype=np.int32)
        shape = (len(block_sizes), max_batch_size, self.table_width)
        self.block_table = np.zeros(shape, dtype=np.int32)
        # Division by one number is several times as fast as by an array of them.
        of_groups = np.array(block_sizes, dtype=np.int64)[:, None]
        self._sizes = block_sizes[0] if len(set(block_sizes)) == 1 else of_groups
        self._table_starts = np.arange(shape[0])[:, None] * (max_batch_size * self.table_width)
        self.num_tokens = np.zeros(max_batch_size, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_batch_size, dtype=np.int32)
        self.num_computed_tokens = np.zeros(max_batch_size, dtype=np.int32)
        self.num_blocks = np.zeros(shape[:2], dtype=np.int32)
        self.dp_groups = np.zeros(max_batch_size, dtype=np.int32)
        # The page tables of decode calls, and which rows of them hold their sequence's blocks.
        self._decode_table = np.zeros_like(self.block_table)
        self._is_decoding = np.zeros(max_batch_size, dtype=np.bool_)

    def apply(self, batch: ScheduledBatch) -> None:
        """Take over new rows and new blocks; call before the inputs are built."""
        for row in batch.new:
            self._put(row)
        for slot, block_ids in batch.appended_blocks:
            self._append_blocks(slot, block_ids)

    def advance(
        self,
        slots: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        num_logits: npt.NDArray[np.int32],
    ) -> None:
        """Count the tokens that a step computes; `record` later stores those that it samples.

        Args:
            slots: (R,) rows that run, all different.
            counts: (R,) tokens to compute of each.
            num_logits: (R,) tokens that each gets if all its drafts are accepted.
        """
        self.num_computed_tokens[slots] += counts
        self.num_tokens[slots] = np.minimum(self.num_tokens[slots] + num_logits, self.max_model_len)

    def advance_decodes(self) -> None:
        """Do `advance` for a step with the same rows as the last `decode_inputs`."""
        np.add(self.num_computed_tokens, self._is_decoding, out=self.num_computed_tokens)
        np.add(self.num_tokens, self._is_decoding, out=self.num_tokens)
        np.minimum(self.num_tokens, self.max_model_len, out=self.num_tokens)

    def give_back(
        self, slots: npt.NDArray[np.int32], num_rejected: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Undo the progress that `advance` has counted for rejected drafts.

        Their KV stays behind the row's end until the next pass overwrites it. Fewer than none were
        rejected of a row that got more tokens than `advance` has counted.

        Args:
            slots: (n,) rows, all different.
            num_rejected: (n,) tokens of each.
        """
        self.num_computed_tokens[slots] -= num_rejected
        self.num_tokens[slots] = self.num_computed_tokens[slots] + 1

    def record(
        self,
        slots: npt.NDArray[np.int32],
        places: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.integer[Any]],
    ) -> None:
        """Store the tokens that a step has sampled.

        Args:
            slots: (S,) its rows that sampled.
            places: (S,) their `num_tokens` before the step.
            token_ids: (S,) their tokens.
        """
        if places.max(initial=0) >= self.max_model_len:
            fits = places < self.max_model_len
            slots, places, token_ids = slots[fits], places[fits], token_ids[fits]
        self.token_ids[slots, places] = token_ids

    def put_drafts(self, slot: int, start: int, drafts: list[int]) -> None:
        """Write drafts behind a row's tokens, of which there are `start`."""
        self.token_ids[slot, start : start + len(drafts)] = drafts

    def num_logits(
        self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return (R,) logit rows of each row: of its last known token and of every draft.

        0 in a row whose last known token is not among the computed ones.
        """
        wanted: npt.NDArray[np.int32]
        wanted = self.num_computed_tokens[slots] + counts - self.num_tokens[slots] + 1
        np.maximum(wanted, 0, out=wanted)
        return wanted

    def flat_inputs(
        self,
        slots: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        num_logits: npt.NDArray[np.int32],
    ) -> FlatBatch:
        """Return the flat form of a step.

        Args:
            slots: (R,) rows that run, in order.
            counts: (R,) tokens to compute for each.
            num_logits: (R,) trailing tokens of each whose logits are wanted.
        """
        places = self.places_of_tokens(slots, counts)
        seq_lens = self.num_computed_tokens[slots] + counts
        query_start_loc = np.zeros(len(slots) + 1, dtype=np.int32)
        ends = np.cumsum(counts, out=query_start_loc[1:])
        width = -(-int(seq_lens.max()) // min(self.block_sizes))
        tables = [table[slots, :width] for table in self.block_table]
        return FlatBatch(
            request_indices=places.request_indices,
            input_ids=self.token_ids.reshape(-1).take(places.token_indices),
            positions=places.positions,
            slot_mapping=places.block_numbers * self._sizes + places.block_offsets,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=tables[0][None] if len(tables) == 1 else np.stack(tables),
            dp_groups=self.dp_groups[slots],
            logits_indices=last_indices(ends, num_logits),
        )

    def places_of_tokens(
        self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> TokenPlaces:
        """Return where the tokens of a step are.

        Source: vLLM v1/worker/gpu_model_runner.py `_prepare_inputs`, and block_table.py
        `compute_slot_mapping`.

        Args:
            slots: (R,) rows that run, in order.
            counts: (R,) tokens to compute for each.
        """
        request_indices = np.repeat(np.arange(len(slots), dtype=np.int32), counts)
        # For each token: its position minus its index in the flat batch.
        shifts = self.num_computed_tokens[slots] - (np.cumsum(counts) - counts)
        positions = np.arange(len(request_indices), dtype=np.int64) + np.repeat(shifts, counts)
        rows = slots[request_indices].astype(np.int64)
        columns, block_offsets = np.divmod(positions, self._sizes)
        block_table_indices = rows * self.table_width + columns
        if len(self.block_sizes) == 1:
            block_table_indices = block_table_indices[None]
        else:
            block_table_indices = block_table_indices + self._table_starts
        return TokenPlaces(
            request_indices=request_indices,
            positions=positions,
            token_indices=rows * self.max_model_len + positions,
            block_table_indices=block_table_indices,
            block_numbers=self.block_table.reshape(-1).take(block_table_indices).astype(np.int64),
            block_offsets=block_offsets,
        )

    def prefill_inputs(
        self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> PrefillInputs:
        """Return the padded form of a prefill step."""
        start_pos = self.num_computed_tokens[slots]
        prompt_lens = (start_pos + counts).astype(np.int64)
        width = int(prompt_lens.max())
        tokens = self.token_ids[slots, :width]
        tokens[np.arange(width)[None, :] >= prompt_lens[:, None]] = 0
        return PrefillInputs(
            tokens, self.block_table.take(slots, axis=1), start_pos, prompt_lens, slots.tolist()
        )

    def decode_inputs(self, slots: npt.NDArray[np.int32]) -> DecodeInputs:
        """Return the padded form of a decode step: every slot, whether it runs or not.

        Args:
            slots: (R,) rows with one token left to compute.
        """
        self._decode(slots)
        tokens = np.zeros((len(self.num_tokens), 1), dtype=np.int32)
        tokens[slots, 0] = self.token_ids[slots, self.num_computed_tokens[slots]]
        start_pos = np.where(self._is_decoding, self.num_computed_tokens, np.int32(-1))
        return DecodeInputs(tokens, start_pos, self._decode_table)

    def keep_decoding(self, slots: npt.NDArray[np.int32]) -> None:
        """Drop all rows of the last `decode_inputs` but these (R,)."""
        if np.count_nonzero(self._is_decoding) > len(slots):
            self._decode(slots)

    def _decode(self, slots: npt.NDArray[np.int32]) -> None:
        is_decoding = np.zeros(len(self.num_tokens), dtype=np.bool_)
        is_decoding[slots] = True
        changed = is_decoding != self._is_decoding
        if changed.any():
            # Only rows that come or go: `_append_blocks` has kept the others up to date.
            self._decode_table[:, changed & ~is_decoding] = 0
            coming = changed & is_decoding
            self._decode_table[:, coming] = self.block_table[:, coming]
            self._is_decoding = is_decoding

    def _put(self, row: NewRow) -> None:
        slot, count = row.slot, len(row.token_ids)
        self.token_ids[slot, :count] = row.token_ids
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        self.num_computed_tokens[slot] = row.num_computed_tokens
        self.block_table[:, slot] = 0
        self.num_blocks[:, slot] = 0
        if self._is_decoding[slot]:
            self._decode_table[:, slot] = 0
            self._is_decoding[slot] = False
        self._append_blocks(slot, row.block_ids)
        self.dp_groups[slot] = row.dp_group

    def _append_blocks(self, slot: int, appended: list[list[int]]) -> None:
        is_decoding = self._is_decoding[slot]
        for group, block_ids in enumerate(appended):
            start = int(self.num_blocks[group, slot])
            end = start + len(block_ids)
            self.block_table[group, slot, start:end] = block_ids
            if is_decoding:
                self._decode_table[group, slot, start:end] = block_ids
            self.num_blocks[group, slot] = end


def last_indices(
    ends: npt.NDArray[np.integer[Any]], counts: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int64]:
    """Return (sum(counts),) the last `counts` indices before each of `ends`, in order.

    Source: vLLM v1/worker/gpu_model_runner.py `_calc_spec_decode_metadata`, `logits_indices`.
    """
    sums = counts.cumsum()
    shifts = np.repeat(ends - sums, counts)
    indices: npt.NDArray[np.int64] = np.arange(len(shifts), dtype=np.int64) + shifts
    return indices
