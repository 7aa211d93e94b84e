"""Speculative decoding: drafts of the next tokens, and how many of them a pass has confirmed. Pure.

A pass computes a row's last token and its k drafts, and draws a token after each of them with the
random number of that position. A drawn token depends on the logits and that number alone, so as
long as the drafts equal what is drawn, the draws are those of plain decoding. The first draw that
differs replaces its draft; if none differs, the last draw is one token more.

For a draft that is a single token this is the rejection sampling of Leviathan et al. (2023): a
draft is accepted with its probability under the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.integer[Any]]


def accepted_runs(drawn: IntArray, drafts: IntArray, counts: IntArray) -> IntArray:
    """Return (R,) the number of new tokens of each row: draws that equal their drafts, and one.

    Args:
        drawn: (S,) drawn tokens of all rows, one row's after the other's.
        drafts: (S,) the draft of the same position; ignored in the last position of a row, which
            follows its last draft.
        counts: (R,) positions of each row; a row without any gets no token.
    """
    ends = counts.cumsum()
    differs = drawn != drafts
    differs[ends[counts > 0] - 1] = True
    ends_of_runs = np.flatnonzero(differs)
    starts = ends - counts
    # A row without positions may have no end behind its start.
    found = np.searchsorted(ends_of_runs, starts[counts > 0])
    lengths = np.zeros(len(counts), dtype=np.int64)
    lengths[counts > 0] = ends_of_runs[found] - starts[counts > 0] + 1
    return lengths


class Drafter(Protocol):
    """Proposer of drafts, after each step, from the tokens of the persistent batch.

    Owner: the model runner. It may keep state of a slot's tokens, which only grow until another row
    takes the slot.
    """

    def take_slot(self, slot: int) -> None:
        """Drop the state of a slot, because another row has taken it."""
        ...

    def propose(
        self, token_ids: IntArray, slots: IntArray, num_tokens: IntArray, limits: IntArray
    ) -> list[list[int]]:
        """Return the drafts of each row; none where it has no proposal.

        Args:
            token_ids: (B, M) tokens of all slots; not modified.
            slots: (R,) the rows.
            num_tokens: (R,) tokens of each.
            limits: (R,) most drafts of each.
        """
        ...


class NgramDrafter:
    """A drafter that repeats the row's own text.

    It searches the longest n-gram at the row's end that has occurred before, and of its occurrences
    the earliest. The tokens after that are the drafts. Unlike a search of the whole text in every
    step, an index of all n-grams is kept for each slot. It is extended by the new tokens of a row
    when drafts are wanted, which takes about 200 bytes a token and n-gram length.

    Source: vLLM v1/spec_decode/ngram_proposer.py, which rescans the text in each step.

    Args:
        shortest: Tokens of the shortest n-gram searched.
        longest: Tokens of the longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[int, _NgramIndex] = {}

    def take_slot(self, slot: int) -> None:
        """Drop the index of a slot, because another row has taken it."""
        self._indices.pop(slot, None)

    def propose(
        self, token_ids: IntArray, slots: IntArray, num_tokens: IntArray, limits: IntArray
    ) -> list[list[int]]:
        """Return the drafts of each row; see `Drafter.propose`."""
        rows = zip(slots.tolist(), num_tokens.tolist(), limits.tolist(), strict=True)
        return [
            self._propose_row(slot, token_ids[slot, :length], limit) if limit > 0 else []
            for slot, length, limit in rows
        ]

    def _propose_row(self, slot: int, token_ids: IntArray, limit: int) -> list[int]:
        index = self._indices.get(slot)
        if index is None:
            index = self._indices[slot] = _NgramIndex(self._sizes)
        start = index.find(token_ids)
        drafts: list[int] = [] if start is None else token_ids[start : start + limit].tolist()
        return drafts


class _NgramIndex:
    """Index of one row's n-grams: where each was followed by a token for the first time."""

    __slots__ = ("_longest", "_num_indexed", "_tables")

    def __init__(self, sizes: range) -> None:
        self._tables: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in sizes]
        self._longest = sizes[0]
        # Every n-gram that ends before this position is indexed.
        self._num_indexed = 0

    def find(self, token_ids: IntArray) -> int | None:
        """Index new tokens; return what follows the longest known n-gram at the end of (n,)."""
        length = len(token_ids)
        first = max(0, self._num_indexed - self._longest)
        tail: list[int] = token_ids[first:].tolist()
        known = range(self._num_indexed - first, length - first)
        for size, table in self._tables:
            # The n-gram at the very end is followed by no token yet, so it is not indexed.
            for end in known:
                if end >= size:
                    table.setdefault(tuple(tail[end - size : end]), first + end)
        self._num_indexed = length
        for size, table in self._tables:
            found = table.get(tuple(tail[-size:])) if len(tail) >= size else None
            if found is not None:
                return found
        return None
