"""Simulated model: KV rows, a paged cache of them, and the next token of a context.

Each token's K and V are 64-bit hashes of (token id, position). The token after a context is a
function of the sum, modulo 2^64, of K + V over *all* of its rows as found through the page table.
So a single wrong, stale, lost or damaged row gives another token, and `expected_tokens` computes
the right ones without an engine. Pure numpy; the cache belongs to its creator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replicas.kv_groups import KVSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    UInt64Array = npt.NDArray[np.uint64]
    Int64Array = npt.NDArray[np.int64]

KV_SPEC = KVSpec(heads=1, width=2, dtype="float32")
"""Of the simulated KV: one uint64 of K and one of V per token, moved as pairs of float32."""

_K_SALT, _V_SALT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_POSITION_SHIFT = np.uint64(32)


def kv_rows(
    token_ids: Sequence[int] | npt.NDArray[np.integer], positions: Sequence[int] | Int64Array
) -> UInt64Array:
    """K and V of tokens.

    Args:
        token_ids: (T,) token ids.
        positions: (T,) position of each in its sequence.

    Returns:
        uint64 (T, 2).
    """
    tokens = np.asarray(token_ids).astype(np.uint64)
    key = (np.asarray(positions).astype(np.uint64) << _POSITION_SHIFT) | tokens
    return np.stack([_mix64(key + _K_SALT), _mix64(key + _V_SALT)], axis=-1)


class NextToken:
    """Maps the sum of a context's rows to the next token id, never to an end token.

    Args:
        vocab_size: Token ids are below this.
        eos_token_ids: Ids that are never given.

    Raises:
        ValueError: No token id is left.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        allowed = np.setdiff1d(np.arange(vocab_size), np.fromiter(eos_token_ids, np.int64))
        if not len(allowed):
            raise ValueError(f"a vocabulary of {vocab_size} holds only end tokens")
        self._allowed: Int64Array = allowed.astype(np.int64)

    def __call__(self, sums: UInt64Array) -> Int64Array:
        """Return token ids for sums of K + V: int64, of the same shape."""
        chosen: Int64Array = self._allowed[_mix64(sums) % np.uint64(len(self._allowed))]
        return chosen


class PagedKVCache:
    """KV rows of every lane, in blocks; block ids are lane-local, block 0 is the null block.

    A sum per block is kept beside the rows, so that a decode step reads blocks and not tokens.

    Args:
        num_lanes: DP groups.
        num_blocks: Blocks of a lane, null block included.
        block_size: Tokens per block.

    Attributes:
        rows: uint64 (num_lanes, num_blocks, block_size, 2); change it by the methods only.
    """

    def __init__(self, num_lanes: int, num_blocks: int, block_size: int) -> None:
        self.num_lanes = num_lanes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rows: UInt64Array = np.zeros((num_lanes, num_blocks, block_size, 2), np.uint64)
        self._sums: UInt64Array = np.zeros((num_lanes, num_blocks), np.uint64)

    def write_tokens(
        self,
        lane: int,
        block_ids: npt.NDArray[np.integer] | Sequence[int],
        token_ids: npt.NDArray[np.integer] | Sequence[int],
        start: int,
    ) -> None:
        """Write the rows of consecutive tokens of one sequence.

        Args:
            lane: The sequence's lane.
            block_ids: (K,) its page table.
            token_ids: (T,) the tokens at positions start..start + T - 1.
            start: Position of the first.

        Raises:
            IndexError: The page table is too short.
        """
        positions = np.arange(start, start + len(token_ids))
        table = np.asarray(block_ids)
        blocks = table[positions // self.block_size]
        self.rows[lane, blocks, positions % self.block_size] = kv_rows(token_ids, positions)
        self._sum_again(lane, np.unique(blocks))

    def write_rows(
        self,
        lanes: Int64Array,
        tables: npt.NDArray[np.integer],
        token_ids: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer],
    ) -> None:
        """Write one token of each of R sequences: a decode step.

        Args:
            lanes: (R,) lane of each.
            tables: (R, K) page tables.
            token_ids: (R,) the tokens.
            positions: (R,) their positions.
        """
        blocks = tables[np.arange(len(lanes)), positions // self.block_size]
        rows = kv_rows(token_ids, positions.astype(np.int64))
        self.rows[lanes, blocks, positions % self.block_size] = rows
        self._sum_again(lanes, blocks)

    def context_sums(
        self,
        lanes: Int64Array,
        tables: npt.NDArray[np.integer],
        num_tokens: npt.NDArray[np.integer],
    ) -> UInt64Array:
        """Sum K + V over the first `num_tokens` rows of each of R sequences.

        Args:
            lanes: (R,) lane of each.
            tables: (R, K) page tables.
            num_tokens: (R,) context lengths.

        Returns:
            uint64 (R,), modulo 2^64.
        """
        size = self.block_size
        num_full = np.asarray(num_tokens) // size
        width = int(num_full.max(initial=0))
        sums = self._sums[lanes[:, None], tables[:, :width]]
        sums[np.arange(width) >= num_full[:, None]] = 0
        total: UInt64Array = sums.sum(axis=1, dtype=np.uint64)
        rest = np.asarray(num_tokens) % size
        (partial,) = np.nonzero(rest)
        last = self.rows[lanes[partial], tables[partial, num_full[partial]]].copy()
        last[np.arange(size) >= rest[partial, None]] = 0
        total[partial] += last.sum(axis=(1, 2), dtype=np.uint64)
        return total

    def window_sums(
        self,
        lanes: Int64Array,
        tables: npt.NDArray[np.integer],
        num_tokens: npt.NDArray[np.integer],
        window: int,
    ) -> UInt64Array:
        """Sum K + V over the last `window` of the first `num_tokens` rows of each of R sequences.

        Arguments and result as those of `context_sums`; reads no block behind the window.
        """
        positions = np.asarray(num_tokens)[:, None] - 1 - np.arange(window)
        seen = np.maximum(positions, 0)
        blocks = np.take_along_axis(tables, seen // self.block_size, axis=1)
        rows = self.rows[lanes[:, None], blocks, seen % self.block_size]
        rows[positions < 0] = 0
        total: UInt64Array = rows.sum(axis=(1, 2), dtype=np.uint64)
        return total

    def read_blocks(self, lane: int, block_ids: Sequence[int]) -> UInt64Array:
        """Copy blocks out: uint64 (n, block_size, 2)."""
        rows: UInt64Array = self.rows[lane, np.asarray(block_ids, np.int64)]
        return rows

    def write_blocks(self, lane: int, block_ids: Sequence[int], rows: UInt64Array) -> None:
        """Copy blocks in, as `read_blocks` gives them."""
        ids = np.asarray(block_ids, np.int64)
        self.rows[lane, ids] = rows
        self._sum_again(lane, ids)

    def _sum_again(self, lanes: int | Int64Array, block_ids: npt.NDArray[np.integer]) -> None:
        rows = self.rows[lanes, block_ids]
        self._sums[lanes, block_ids] = rows.sum(axis=(1, 2), dtype=np.uint64)


def draw_salt(seed: int) -> np.uint64:
    """Return what a seed adds to the sum of a context for a row that is not greedy."""
    salt: np.uint64 = _mix64(np.array([seed], np.int64).view(np.uint64))[0]
    return salt


GREEDY = np.uint64(0)
"""The salt of a greedy row."""


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    eos_token_ids: Collection[int],
    salt: np.uint64 = GREEDY,
) -> list[int]:
    """Return the `num_tokens` tokens after a prompt, computed without pages or an engine.

    `salt` is that of the row's seed, see `draw_salt`.
    """
    next_token = NextToken(vocab_size, eos_token_ids)
    rows = kv_rows(prompt, np.arange(len(prompt)))
    # An array of one: numpy warns of overflow in scalars.
    total: UInt64Array = np.array([rows.sum(dtype=np.uint64)]) + salt
    output: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        output.append(int(next_token(total)[0]))
        total += kv_rows(output[-1:], [position]).sum(axis=1, dtype=np.uint64)
    return output


def _mix64(values: UInt64Array) -> UInt64Array:
    """Return the finaliser of splitmix64: a bijection that spreads every bit."""
    z = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64Array = z ^ (z >> np.uint64(31))
    return mixed
