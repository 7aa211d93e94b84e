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
"""Shortest turn that counts as stalled; also how long an engine may be silent before it is dead."""
KNOWN_STEP_S = 60.0
"""Least step timeout of an engine whose warm-up has run every shape that it will ever run."""
FACTOR = 4.0
"""A turn may take this many times its usual duration."""
FIRST_S = 2.0
"""Assumed duration of the first turn of a size, of up to `FIRST_TOKENS` tokens; more tokens take
proportionally longer. The first turn may compile, or load a library."""
FIRST_TOKENS = 2048
_KEPT = 0.99
"""Decay of the longest duration of a size, per shorter turn."""


def first_turn_s(num_tokens: int) -> float:
    """Return how many seconds the first turn of this size may take before it counts as stalled."""
    return max(STALL_S, FACTOR * FIRST_S * max(1.0, num_tokens / FIRST_TOKENS))


class Watchdog:
    """The progress of one core thread, and the one judge of whether it stalls.

    Written by the core thread alone; read by the threads that send and beat. All times are readings
    of one monotonic clock in seconds.

    Attributes:
        count: Grows with every turn of the core thread's loop; odd while it works, even while it
            waits for messages or for other engines.
        num_tokens: Tokens that the present turn computes.
        num_stalls: Stalled turns that have ended.
    """

    __slots__ = ("_turn", "_usual_s", "count", "num_stalls", "num_tokens")

    def __init__(self) -> None:
        self.count = 1
        self.num_stalls = 0
        # Start of the present turn and its allowed duration; replaced as a whole, because other
        # threads read it.
        self._turn: tuple[float, float] | None = None
        self.num_tokens = 0
        # Usual duration, by the bit length of a turn's number of tokens.
        self._usual_s: dict[int, float] = {}

    def work(self, now_s: float) -> None:
        """Begin another turn."""
        self._learn(now_s)
        self.count = (self.count + 2) | 1
        self.num_tokens = 0
        self._turn = now_s, self._allowed_s(0)

    def compute(self, num_tokens: int) -> None:
        """Note the number of tokens that the present turn computes on the device."""
        if self._turn is not None:
            self.num_tokens = num_tokens
            self._turn = self._turn[0], self._allowed_s(num_tokens)

    def rest(self, now_s: float) -> None:
        """End the present turn; the core now waits for a message."""
        self._learn(now_s)
        self.count = (self.count | 1) + 1
        self._turn = None

    def stalled_s(self, now_s: float) -> float:
        """Return how long the present turn has taken if it is stalled, otherwise 0."""
        turn = self._turn
        if turn is None:
            return 0.0
        began_s, allowed_s = turn
        return now_s - began_s if now_s - began_s > allowed_s else 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for other engines of the gang in the middle of a turn."""
        self.count += 1
        try:
            yield
        finally:
            self.count += 1

    def stalls_at_s(self) -> float | None:
        """Return the moment after which the present turn counts as stalled; None at rest."""
        return None if self._turn is None else sum(self._turn)

    def _allowed_s(self, num_tokens: int) -> float:
        usual_s = self._usual_s.get(num_tokens.bit_length())
        if usual_s is None:
            return first_turn_s(num_tokens)
        return max(STALL_S, FACTOR * usual_s)

    def _learn(self, now_s: float) -> None:
        """Learn from the turn's duration; a stalled turn at most doubles the allowed duration."""
        if self._turn is None:
            return
        began_s, allowed_s = self._turn
        self.num_stalls += now_s - began_s > allowed_s
        took_s = min(now_s - began_s, 2 * allowed_s / FACTOR)
        size = self.num_tokens.bit_length()
        self._usual_s[size] = max(took_s, _KEPT * self._usual_s.get(size, 0.0))
