"""Queued sequences, without slot or blocks, in the order of admission.

Owner: the scheduler, on the engine's core thread. Keeps running totals of their tokens to compute,
and of the number bound to each DP group.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from replicas.engine.sequence import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.engine.sequence import Sequence


class WaitingQueue:
    """The queue of sequences, with running totals.

    Args:
        num_groups: DP groups of the engine.

    Attributes:
        num_tokens: Tokens that the queued sequences have to compute.
        num_asking_for: Sequences that ask for each DP group; index -1 counts those without one.
    """

    def __init__(self, num_groups: int) -> None:
        self._sequences: deque[Sequence] = deque()
        self.num_tokens = 0
        self.num_asking_for = [0] * (num_groups + 1)
        self._num_tokens_for = [0] * (num_groups + 1)
        self._num_pairs_for = [0] * (num_groups + 1)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, seq: Sequence) -> None:
        """Queue a sequence behind all others."""
        self._sequences.append(seq)
        self._enter(seq)

    def push_front(self, seq: Sequence) -> None:
        """Queue a sequence before all others."""
        self._sequences.appendleft(seq)
        self._enter(seq)

    def pop(self) -> Sequence:
        """Remove and return the first sequence; the queue must not be empty."""
        seq = self._sequences.popleft()
        self._count(seq, -1)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from any place in the queue."""
        self._sequences.remove(seq)
        self._count(seq, -1)

    def load_of(self, group: int) -> tuple[int, int, int]:
        """Return the sequences that will run in a group, their tokens and pairs of tokens.

        Sequences that ask for no group count with an equal share, rounded up.
        """
        num_groups = len(self.num_asking_for) - 1
        own, tokens, pairs = (
            counts[group] - (-counts[-1] // num_groups)
            for counts in (self.num_asking_for, self._num_tokens_for, self._num_pairs_for)
        )
        return own, tokens, pairs

    def check_invariants(self) -> None:
        """Assert that all counts match the queue."""
        assert self.num_tokens == sum(s.num_new_tokens for s in self._sequences)
        for group, num_asking in enumerate(self.num_asking_for[:-1]):
            waiting = [s for s in self._sequences if s.dp_group == group]
            assert num_asking == len(waiting)
            assert self._num_tokens_for[group] == sum(s.num_new_tokens for s in waiting)
            assert self._num_pairs_for[group] == sum(s.num_new_pairs for s in waiting)

    def _enter(self, seq: Sequence) -> None:
        assert seq.phase is Phase.WAITING, f"{seq.request_id} is {seq.phase}"
        self._count(seq, 1)

    def _count(self, seq: Sequence, sign: int) -> None:
        self.num_tokens += sign * seq.num_new_tokens
        self.num_asking_for[seq.dp_group] += sign
        self._num_tokens_for[seq.dp_group] += sign * seq.num_new_tokens
        self._num_pairs_for[seq.dp_group] += sign * seq.num_new_pairs
