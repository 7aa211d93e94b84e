"""Progress of the core thread, and detection of turns that take too long. Pure.

A device call that never returns leaves the sending threads alive, so only the core thread's own
progress shows that an engine still serves. The expected duration of a turn is learned from turns of
about as many tokens: the same engine needs milliseconds for a decode step and maybe a minute for a
long prompt that it cannot chunk, and must not count as stalled while it is only busy.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STALL_S = 5.0
"""No shorter turn counts as stalled; so long an engine may also be silent before it is dead."""
FACTOR = 4.0
"""How many times as long as usual a turn may take."""
FIRST_S = 2.0
"""What a turn of `FIRST_TOKENS` tokens, or fewer, is taken to need before the first of its size: it
may compile, or load a library. More tokens, in proportion."""
FIRST_TOKENS = 2048
_KEPT = 0.99
"""What is left of the longest turn of a size with each that is shorter."""


def first_turn_s(num_tokens: int) -> float:
    """How long the first turn of so many tokens may take, in seconds, before it stalls."""
    return max(STALL_S, FACTOR * FIRST_S * max(1.0, num_tokens / FIRST_TOKENS))


class Pulse:
    """The progress of one core thread, and the one judge of whether it stalls.

    Written by the core thread alone; read by the threads that send and beat. All times are readings
    of one monotonic clock in seconds.

    Attributes:
        count: Grows with every turn of the core thread's loop; odd while it works, even while it
            waits for messages or for other engines.
        num_tokens: That the present turn computes.
        num_stalls: Turns that have stalled and ended.
    """

    __slots__ = ("_turn", "_usual_s", "count", "num_stalls", "num_tokens")

    def __init__(self) -> None:
        self.count = 1
        self.num_stalls = 0
        # When the present turn began and how long it may take, replaced as a whole: others read it.
        self._turn: tuple[float, float] | None = None
        self.num_tokens = 0
        # By the binary logarithm of the tokens of a turn.
        self._usual_s: dict[int, float] = {}

    def work(self, now_s: float) -> None:
        """Another turn begins."""
        self._learn(now_s)
        self.count = (self.count + 2) | 1
        self.num_tokens = 0
        self._turn = now_s, self._allowed_s(0)

    def compute(self, num_tokens: int) -> None:
        """The present turn goes to the device with so many tokens."""
        if self._turn is not None:
            self.num_tokens = num_tokens
            self._turn = self._turn[0], self._allowed_s(num_tokens)

    def rest(self, now_s: float) -> None:
        """Nothing is to be done until a message comes."""
        self._learn(now_s)
        self.count = (self.count | 1) + 1
        self._turn = None

    def stalled_s(self, now_s: float) -> float:
        """How long the present turn has taken, if that is longer than it should; otherwise 0."""
        turn = self._turn
        if turn is None:
            return 0.0
        began_s, allowed_s = turn
        return now_s - began_s if now_s - began_s > allowed_s else 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In the middle of a turn it is for other engines of the gang to get on."""
        self.count += 1
        try:
            yield
        finally:
            self.count += 1

    def stalls_at_s(self) -> float | None:
        """After which moment the present turn counts as stalled; None at rest."""
        return None if self._turn is None else sum(self._turn)

    def _allowed_s(self, num_tokens: int) -> float:
        usual_s = self._usual_s.get(num_tokens.bit_length())
        if usual_s is None:
            return first_turn_s(num_tokens)
        return max(STALL_S, FACTOR * usual_s)

    def _learn(self, now_s: float) -> None:
        """Take over what the turn took; one that stalled at most doubles what the next one may."""
        if self._turn is None:
            return
        began_s, allowed_s = self._turn
        self.num_stalls += now_s - began_s > allowed_s
        took_s = min(now_s - began_s, 2 * allowed_s / FACTOR)
        size = self.num_tokens.bit_length()
        self._usual_s[size] = max(took_s, _KEPT * self._usual_s.get(size, 0.0))
