"""Lockstep of a gang: when turns start, which ranks compute, and what a loss means. Pure.

The experts of a mixture-of-experts model are distributed over the ranks of a gang, so every forward
pass is a collective operation: once begun, it completes only if all ranks take part. Each rank
*declares*, once per turn, how many tokens its batch has, or 0 without a batch. When all have
declared and at least one has a batch, the turn starts; ranks without a batch serve the others (an
idle pass).

While no rank has a batch, no turn starts: the *wave* of turns is over and the gang is paused, with
every rank ready to serve. The first batch on any rank then starts the next wave without further
messages. A rank that declared 0 may declare a batch until the turn starts. The numbers in the
`Turn` count, not the batch that a rank has by then.

Source: vLLM's data-parallel engines with their waves and dummy batches; there the ranks agree every
few steps, here in each, by one message up and one down.
"""

from __future__ import annotations

import msgspec


class LockstepError(Exception):
    """Disagreement of ranks about the current turn; to continue would hang the whole gang."""


class Turn(msgspec.Struct, frozen=True, tag="turn", array_like=True):
    """One step of all ranks of a gang.

    Attributes:
        number: Number of the turn, from 0 without gaps.
        num_tokens: For each rank the tokens of its own batch; at least one is positive.
    """

    number: int
    num_tokens: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Tokens of the largest batch, which determines the duration for all ranks."""
        return max(self.num_tokens)


class Declaration(msgspec.Struct, frozen=True, tag="declare", array_like=True):
    """A rank's batch size for a turn.

    Attributes:
        number: The turn.
        num_tokens: Tokens of its batch; 0 without one.
    """

    number: int
    num_tokens: int


class Loss(msgspec.Struct, frozen=True, tag="loss", array_like=True):
    """Loss of a rank, which ends the gang.

    Attributes:
        rank: The rank that was lost first.
        reason: Explanation for log lines and errors.
    """

    rank: int
    reason: str


class Waves:
    """Declarations of all ranks and the turns that follow from them.

    Args:
        size: Number of ranks.

    Attributes:
        number: Number of the next turn to start.
        num_waves: Number of waves so far.
        loss: The loss that ended the gang; None while it lives.
    """

    def __init__(self, size: int) -> None:
        self.number = 0
        self.num_waves = 0
        self.loss: Loss | None = None
        self._declared: list[int | None] = [None] * size
        self._drained: set[int] = set()
        self._was_paused = True

    @property
    def is_paused(self) -> bool:
        """Whether no rank has a batch and all wait."""
        return not any(num_tokens != 0 for num_tokens in self._declared)

    def declare(self, rank: int, said: Declaration) -> Turn | None:
        """Process a rank's declaration.

        Args:
            rank: The declaring rank.
            said: The declaration; ignored if its turn has already started.

        Returns:
            The turn that this declaration starts, to be sent to every rank; None if it starts none.

        Raises:
            LockstepError: The rank declares for a future turn, or withdraws a batch.
        """
        if self.loss is not None or said.number < self.number:
            return None
        before = self._declared[rank]
        if said.number > self.number or (before is not None and not said.num_tokens):
            raise LockstepError(
                f"rank {rank} sent {said} at turn {self.number}, after declaring {before} tokens"
            )
        self._declared[rank] = said.num_tokens
        if None in self._declared:
            return None
        if not any(self._declared):
            self._was_paused = True
            return None
        turn = Turn(self.number, tuple(num_tokens or 0 for num_tokens in self._declared))
        self.num_waves += self._was_paused
        self._was_paused = False
        self.number += 1
        self._declared = [None] * len(self._declared)
        return turn

    def drain(self, rank: int) -> bool:
        """Record that a rank is drained; return whether it was the last one.

        A drained rank still serves the others, which cannot compute without it.
        """
        is_new = rank not in self._drained
        self._drained.add(rank)
        return is_new and len(self._drained) == len(self._declared)

    def lose(self, rank: int, reason: str) -> Loss | None:
        """Record that a rank is gone or silent.

        Returns:
            The loss to announce to every rank; None if one was announced before, or if all ranks
            are drained and thus expected to end.
        """
        if self.loss is not None or len(self._drained) == len(self._declared):
            return None
        self.loss = Loss(rank, reason)
        return self.loss


class Rank:
    """One rank's side of the lockstep: the turn that it waits for and its declaration.

    Args:
        rank: The rank's number.

    Attributes:
        number: Number of the next turn.
    """

    def __init__(self, rank: int) -> None:
        self.number = 0
        self._rank = rank
        self._declared: int | None = None

    def declare(self, num_tokens: int) -> Declaration | None:
        """Declare the rank's batch for the next turn.

        Args:
            num_tokens: Tokens of its batch; 0 without one.

        Returns:
            The message to send; None if it was sent before, or a batch was declared, which still
            stands.
        """
        if self._declared or self._declared == num_tokens:
            return None
        self._declared = num_tokens
        return Declaration(self.number, num_tokens)

    def enter_turn(self, turn: Turn) -> bool:
        """Enter a turn that has started; return whether the rank computes its own batch in it.

        Raises:
            LockstepError: The turn is not the expected one, or counts a batch that was not
            declared.
        """
        is_own = turn.num_tokens[self._rank] > 0
        if turn.number != self.number or (is_own and not self._declared):
            raise LockstepError(
                f"rank {self._rank} expects turn {self.number} with {self._declared} tokens "
                f"declared, but got {turn}"
            )
        # A batch declared too late for this turn must be declared again for the next one.
        self._declared = None
        self.number += 1
        return is_own


class SilenceWatch:
    """Detector of silent ranks. Counts checks and reads no clock.

    That way a suspended host, or a process that was stopped and resumed, does not accuse all ranks.

    Args:
        size: Number of ranks.
        max_looks: Number of checks without a message after which a rank counts as silent.

    Attributes:
        size: As given.
    """

    def __init__(self, size: int, max_looks: int) -> None:
        self.size = size
        self._max_looks = max_looks
        self._num_looks = [0] * size

    def record_message(self, rank: int) -> None:
        """Record a message from a rank."""
        self._num_looks[rank] = 0

    def look(self) -> list[int]:
        """Count one check interval; return the silent ranks."""
        self._num_looks = [count + 1 for count in self._num_looks]
        return [rank for rank, count in enumerate(self._num_looks) if count >= self._max_looks]
