"""Checks of prefill and decode arguments before the device gets them.

As with the torch generator, a wrong argument is a ValueError with both numbers. The checks keep a
call within the compiled shapes and within the cache, as the device checks no index. Page tables are
wide, so they are not copied, and not read if the device keeps its own.

Dimensions: N rows that prefill, B slots, K entries of a page table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    IntArray = npt.NDArray[np.integer[Any]]
    Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Sizes that a generator was created with.

    Attributes:
        max_batch_size: B.
        max_seq_len: Tokens of the longest sequence.
        vocab_size: Size of the vocabulary.
        num_blocks: Blocks of a lane's KV cache.
        block_size: Tokens per block.
        table_width: Most entries of a sequence's page table.
    """

    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    table_width: int

    def check_width(self, num_blocks: int) -> None:
        """Refuse a page table that is wider than the compiled one."""
        if num_blocks > self.table_width:
            raise ValueError(
                f"a page table has {num_blocks} blocks per row, more than the device's "
                f"{self.table_width}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCall:
    """Checked arguments of a prefill.

    Attributes:
        tokens: int64 (N, longest), prompts from position 0.
        page_table: Integers (N, K); the caller's.
        starts: int64 (N,), first position to compute.
        ends: int64 (N,), one past the last.
        slots: int64 (N,), all different.
    """

    tokens: Int64Array
    page_table: IntArray
    starts: Int64Array
    ends: Int64Array
    slots: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCall:
    """Checked inputs of a decode of all B rows; None where the device continues with its own.

    Attributes:
        tokens: int64 (B,).
        positions: int64 (B,), -1 for padding rows.
        page_table: Integers (B, K); the caller's.
    """

    tokens: Int64Array | None
    positions: Int64Array | None
    page_table: IntArray | None


def check_prefill(
    limits: CallLimits,
    *,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    prompt_lens: torch.Tensor,
    start_pos: torch.Tensor,
    empty_slots: Sequence[int],
) -> PrefillCall:
    """Check and convert the arguments of ``prefill_forward``.

    Raises:
        ValueError: A dtype, rank, number of rows, slot, length, block or token is out of range.
    """
    call = PrefillCall(
        tokens=_int64("tokens", tokens, 2),
        page_table=_integers("page_table", page_table, 2),
        starts=_int64("start_pos", start_pos, 1),
        ends=_int64("prompt_lens", prompt_lens, 1),
        slots=_int64("empty_slots", empty_slots, 1),
    )
    slots, num_rows = call.slots, len(call.slots)
    lengths = (len(call.tokens), len(call.starts), len(call.ends))
    if lengths != (num_rows,) * 3:
        raise ValueError(f"tokens, start_pos, prompt_lens of {lengths} rows, {num_rows} slots")
    if not 0 <= slots.min() <= slots.max() < limits.max_batch_size:
        raise ValueError(f"empty_slots {slots} for a batch of {limits.max_batch_size}")
    if len(set(slots.tolist())) < num_rows:
        raise ValueError(f"empty_slots {slots} contains a slot twice")
    _check_tables(limits, call.page_table, num_rows)
    width = min(call.tokens.shape[1], _tokens_of_a_row(limits, call.page_table))
    if (call.ends - call.starts).min() < 1 or call.starts.min() < 0 or call.ends.max() > width:
        raise ValueError(
            f"prefill chunks {call.starts} to {call.ends} do not fit in rows of {width} tokens"
        )
    _check_tokens(limits, call.tokens)
    return call


def check_decode(
    limits: CallLimits,
    *,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    start_pos: torch.Tensor,
    reload_inputs: bool,
    reload_page_table: bool,
) -> DecodeCall:
    """Check and convert the arguments of ``decode_forward`` that the device loads.

    Args:
        limits: See `CallLimits`.
        tokens: See ``decode_forward``.
        page_table: See ``decode_forward``.
        start_pos: See ``decode_forward``.
        reload_inputs: See ``decode_forward``; otherwise tokens and positions may be of any step.
        reload_page_table: See ``decode_forward``.

    Raises:
        ValueError: A dtype, rank, number of rows, position, block or token is out of range; or both
            are reloaded.
    """
    if reload_inputs and reload_page_table:
        raise ValueError("reload_inputs and reload_page_table: the first includes the second")
    if not (reload_inputs or reload_page_table):
        return DecodeCall(None, None, None)
    num_rows = limits.max_batch_size
    table = _integers("page_table", page_table, 2)
    _check_tables(limits, table, num_rows)
    if not reload_inputs:
        return DecodeCall(None, None, table)
    rows = _int64("tokens", tokens, 2)
    positions = _int64("start_pos", start_pos, 1)
    if rows.shape != (num_rows, 1) or len(positions) != num_rows:
        raise ValueError(
            f"tokens {rows.shape} and {len(positions)} positions for a batch of {num_rows}"
        )
    width = _tokens_of_a_row(limits, table)
    if positions.min() < -1 or positions.max() >= width:
        raise ValueError(f"decode positions {positions} do not fit in {width} tokens")
    _check_tokens(limits, rows)
    return DecodeCall(rows[:, 0], positions, table)


def check_goes_on(*, reset: bool, remap: torch.Tensor | None, samples: bool) -> None:
    """Refuse arguments that need ``reload_inputs``.

    Args:
        reset: ``reset_sampling_state``.
        remap: ``slot_remap``.
        samples: Whether there are ``sampling_params``.

    Raises:
        ValueError: Names the argument.
    """
    if reset:
        raise ValueError("reset_sampling_state needs reload_inputs")
    if remap is not None:
        raise ValueError("slot_remap needs reload_inputs: tokens and positions move with their row")
    if not samples:
        raise ValueError("logits need reload_inputs: the device does not know the next token")


def check_logits_rows(
    limits: CallLimits, logits_rows: object, start_pos: torch.Tensor, *, samples: bool
) -> Int64Array:
    """Check and convert ``logits_rows``.

    Raises:
        ValueError: There are no ``sampling_params`` beside it, or a row does not decode.
    """
    if not samples:
        raise ValueError("logits_rows without sampling_params: every row's logits are given anyway")
    rows = _int64("logits_rows", logits_rows, 1)
    if rows.min() < 0 or rows.max() >= limits.max_batch_size:
        raise ValueError(f"logits_rows {rows} for a batch of {limits.max_batch_size}")
    padding = rows[np.asarray(start_pos)[rows] < 0]
    if len(padding):
        raise ValueError(f"logits_rows {padding} do not decode")
    return rows


def check_remap(limits: CallLimits, slot_remap: torch.Tensor) -> Int64Array:
    """Check and convert ``slot_remap``.

    Raises:
        ValueError: It is not a permutation of the slots.
    """
    remap = _int64("slot_remap", slot_remap, 1)
    if not np.array_equal(np.sort(remap), np.arange(limits.max_batch_size)):
        raise ValueError(f"slot_remap {remap} does not permute {limits.max_batch_size} slots")
    return remap


def _integers(name: str, values: object, num_dims: int) -> IntArray:
    """Return integers of the given rank; arrays and tensors are not copied.

    Raises:
        ValueError: The values have another dtype or rank, or are missing.
    """
    array: IntArray = np.asarray(values)
    if array.ndim != num_dims or array.dtype.kind not in "iu" or not array.size:
        raise ValueError(
            f"{name} must be integers in {num_dims} dimensions, got {array.dtype} {array.shape}"
        )
    return array


def _int64(name: str, values: object, num_dims: int) -> Int64Array:
    return _integers(name, values, num_dims).astype(np.int64)


def _tokens_of_a_row(limits: CallLimits, page_table: IntArray) -> int:
    num_blocks: int = page_table.shape[1]
    return min(num_blocks * limits.block_size, limits.max_seq_len)


def _check_tables(limits: CallLimits, page_table: IntArray, num_rows: int) -> None:
    if len(page_table) != num_rows:
        raise ValueError(f"page_table has {len(page_table)} rows, not {num_rows}")
    limits.check_width(page_table.shape[1])
    least, most = page_table.min(), page_table.max()
    if least < 0 or most >= limits.num_blocks:
        raise ValueError(f"page_table has blocks {least} to {most}, the cache {limits.num_blocks}")


def _check_tokens(limits: CallLimits, tokens: Int64Array) -> None:
    least, most = tokens.min(), tokens.max()
    if least < 0 or most >= limits.vocab_size:
        raise ValueError(f"tokens {least} to {most}, the vocabulary has {limits.vocab_size}")
