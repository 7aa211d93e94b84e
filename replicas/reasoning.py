"""Where the tokens of an output are reasoning, by the tokens around it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.sampling_params import ReasoningMarks

_MAX_TOKENS_BEFORE = 4
"""Tokens of an output, such as line breaks, before the beginning of the reasoning."""


class ReasoningReader:
    """Reader of an output's tokens. Its state follows from the tokens alone.

    Args:
        marks: The tokens around the reasoning.

    Attributes:
        is_open: Whether the reasoning has begun and not ended.
        num_tokens: Tokens of the reasoning so far, the marks excluded. While it is open, tokens
            that may begin its end count.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self._longest = max(len(marks.start_token_ids), len(marks.end_token_ids))
        self._tail: list[int] = []
        self._num_before = 0
        self._may_begin = bool(marks.start_token_ids)
        self.is_open = marks.is_open
        self.num_tokens = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens of the output."""
        for token_id in token_ids:
            if self.is_open:
                self._read_reasoning(token_id)
            elif self._may_begin:
                self._read_before(token_id)

    def copy(self) -> ReasoningReader:
        """Return a reader of the same state."""
        other = ReasoningReader(self._marks)
        other._tail = list(self._tail)
        other._num_before, other._may_begin = self._num_before, self._may_begin
        other.is_open, other.num_tokens = self.is_open, self.num_tokens
        return other

    def next_of_end(self) -> int:
        """Return the token with which the end begins or, if that has begun, continues."""
        end = self._marks.end_token_ids
        for count in range(min(len(self._tail), len(end) - 1), 0, -1):
            if tuple(self._tail[-count:]) == end[:count]:
                return end[count]
        return end[0]

    def _read_reasoning(self, token_id: int) -> None:
        end = self._marks.end_token_ids
        self.num_tokens += 1
        if self._is_last_of(token_id, end):
            self.num_tokens -= len(end)
            self.is_open = False
            self._may_begin = False

    def _read_before(self, token_id: int) -> None:
        start = self._marks.start_token_ids
        self._num_before += 1
        if self._is_last_of(token_id, start):
            self.is_open = True
        else:
            self._may_begin = self._num_before < _MAX_TOKENS_BEFORE + len(start)

    def _is_last_of(self, token_id: int, mark: tuple[int, ...]) -> bool:
        """Append a token to the tail; return whether a mark ends with it."""
        self._tail.append(token_id)
        if token_id == mark[-1] and tuple(self._tail[-len(mark) :]) == mark:
            self._tail.clear()
            return True
        del self._tail[: -self._longest]
        return False
