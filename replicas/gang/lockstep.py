"""Lock-step of a gang: who steps in a turn, when turns begin and end, what a lost rank does. Pure.

The experts of a mixture-of-experts model are shared out over the ranks of a gang, so every forward
pass is a collective of them all: it happens on all ranks or, where it has begun, never ends. Each
rank *declares*, once for each turn, how many tokens its batch has, if it has one. Once all have,
and one has a batch, the turn starts, and a rank without one serves the others' (an idle pass).
While nobody has a batch no turn starts: a *wave* of turns is over, the gang is paused, and every
rank has said that it would serve. So the first batch, whoever has it, begins the next wave with
nobody else being asked. A rank that said that it had none may say otherwise until the turn starts;
what the turn says of a rank counts, not what the rank has by then.

Source: what vLLM's data-parallel engines do with waves and dummy batches; there the ranks agree
every few steps, here in each, by one message up and one down.
"""

from __future__ import annotations

import msgspec


class LockstepError(Exception):
    """Ranks of a gang do not agree about where they are: going on would hang them all."""


class Turn(msgspec.Struct, frozen=True, tag="turn", array_like=True):
    """One step of the whole gang.

    Attributes:
        number: From 0 on, without gaps.
        num_tokens: For each rank how many tokens of its own it computes; one of them has some.
    """

    number: int
    num_tokens: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Tokens of the rank that has most: it takes all ranks as long as that one."""
        return max(self.num_tokens)


class Declaration(msgspec.Struct, frozen=True, tag="declare", array_like=True):
    """What a rank has for a turn.

    Attributes:
        number: The turn.
        num_tokens: Of its batch; 0: it has none.
    """

    number: int
    num_tokens: int


class Loss(msgspec.Struct, frozen=True, tag="loss", array_like=True):
    """Why the gang ends.

    Attributes:
        rank: Who was lost first.
        reason: For a person.
    """

    rank: int
    reason: str


class Waves:
    """What the ranks have declared, and the turns that follow from it.

    Args:
        size: Ranks of the gang.

    Attributes:
        number: The turn that is to start next.
        num_waves: How often turns have begun after a pause.
        loss: Why there will be no further turn; None while there may be.
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
        """Whether all ranks wait and none has a batch."""
        return not any(num_tokens != 0 for num_tokens in self._declared)

    def declare(self, rank: int, said: Declaration) -> Turn | None:
        """Take what a rank has.

        Args:
            rank: Who.
            said: For which turn; one that has started already took what the rank said before.

        Returns:
            The turn that starts with it, for every rank; None if none does.

        Raises:
            LockstepError: The rank speaks of a turn that is not there yet, or takes a batch back.
        """
        if self.loss is not None or said.number < self.number:
            return None
        before = self._declared[rank]
        if said.number > self.number or (before is not None and not said.num_tokens):
            raise LockstepError(
                f"rank {rank} declares {said} before turn {self.number}, and said {before} already"
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
        """A rank takes no more requests and has none left; says whether it was the last one.

        It still serves the others, which cannot go on without it.
        """
        is_new = rank not in self._drained
        self._drained.add(rank)
        return is_new and len(self._drained) == len(self._declared)

    def lose(self, rank: int, reason: str) -> Loss | None:
        """A rank is no more, or nothing is heard of it.

        Returns:
            What every rank is to be told; None if they have been told already, or if they are all
            drained: then they end as they should.
        """
        if self.loss is not None or len(self._drained) == len(self._declared):
            return None
        self.loss = Loss(rank, reason)
        return self.loss


class Rank:
    """One rank's side: the turn it waits for, and what it has said of it.

    Args:
        rank: Its number.

    Attributes:
        number: The turn that it takes next.
    """

    def __init__(self, rank: int) -> None:
        self.number = 0
        self._rank = rank
        self._declared: int | None = None

    def declare(self, num_tokens: int) -> Declaration | None:
        """Say what it has for the next turn.

        Args:
            num_tokens: Of its batch; 0: it has none.

        Returns:
            What is to be sent; None if that has been said already, or a batch was declared, which
            it still has.
        """
        if self._declared or self._declared == num_tokens:
            return None
        self._declared = num_tokens
        return Declaration(self.number, num_tokens)

    def take(self, turn: Turn) -> bool:
        """Take a turn that has started; says whether it computes its batch, or serves the others.

        Raises:
            LockstepError: It is another one, or it says that this rank has a batch and it has not.
        """
        is_own = turn.num_tokens[self._rank] > 0
        if turn.number != self.number or (is_own and not self._declared):
            raise LockstepError(
                f"rank {self._rank} waits for turn {self.number}, having said {self._declared}, "
                f"and {turn} starts"
            )
        # A batch that came too late for this turn is for the next, which has yet to be told.
        self._declared = None
        self.number += 1
        return is_own


class SilenceWatch:
    """Tells ranks that say nothing. Counts looks and reads no clock.

    A host that slept, or a process that was stopped and goes on, must not accuse everybody else.

    Args:
        size: Ranks of the gang.
        max_looks: A rank that was not heard between so many looks is silent.

    Attributes:
        size: As given.
    """

    def __init__(self, size: int, max_looks: int) -> None:
        self.size = size
        self._max_looks = max_looks
        self._num_looks = [0] * size

    def hear(self, rank: int) -> None:
        """A rank said something."""
        self._num_looks[rank] = 0

    def look(self) -> list[int]:
        """Another while has passed; returns who is silent."""
        self._num_looks = [count + 1 for count in self._num_looks]
        return [rank for rank, count in enumerate(self._num_looks) if count >= self._max_looks]
