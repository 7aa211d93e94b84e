"""Circuit breakers: a replica that fails request after request gets no new one for a while. Pure.

Not for replicas that stall, are silent or gone, which is noticed elsewhere: for those that move and
still give no tokens, as each request finds out for itself. After `THRESHOLD` failures without a
success between them a breaker opens, for a time that doubles each time; then one request is the
probe, and its first token closes it. To have no room is no failure, nor is a client that leaves; a
connection that breaks is one, however many requests it had.

Owner: the pool state of one ingress, which places nothing on a replica whose breaker is open unless
all others of its side are shut out as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

THRESHOLD = 3
"""Failures one after the other that open a breaker."""
FIRST_OPEN_S = 2.0
"""How long it is open the first time."""
MAX_OPEN_S = 60.0
"""And at the most."""
FORGET_S = 2 * MAX_OPEN_S
"""A replica that was lost is remembered for so long: one that comes and goes has one breaker."""


@dataclass(slots=True)
class Breaker:
    """One replica's; see the module docstring. All times are of one monotonic clock, in seconds.

    Attributes:
        num_failures: Since the last success.
        num_trips: How often it has opened since it was closed last.
        until_s: It is open until then; None while closed.
        probe: The request that is the probe; None: there is none.
        failed_s: When it last failed.
    """

    num_failures: int = 0
    num_trips: int = 0
    until_s: float | None = None
    probe: str | None = None
    failed_s: float = 0.0

    @property
    def state(self) -> str:
        """closed; open; half_open: the next request is the probe; probing: it is under way."""
        if self.until_s is not None:
            return "open"
        if not self.num_trips:
            return "closed"
        return "half_open" if self.probe is None else "probing"

    @property
    def admits(self) -> bool:
        """Whether a new request may go there."""
        return self.state in {"closed", "half_open"}

    def sent(self, request_id: str) -> None:
        """A request goes there: it is the probe if one is due."""
        if self.state == "half_open":
            self.probe = request_id

    def succeeded(self) -> None:
        """A request got a token from there."""
        self.num_failures = self.num_trips = 0
        self.until_s = self.probe = None

    def failed(self, now_s: float) -> None:
        """A request got an error from there, or nothing; while it is open that is nothing new."""
        self.failed_s = now_s
        self.num_failures += 1
        if self.until_s is None and (self.num_trips or self.num_failures >= THRESHOLD):
            self.until_s = now_s + min(FIRST_OPEN_S * 2.0**self.num_trips, MAX_OPEN_S)
            self.num_trips += 1
            self.probe = None

    def ended(self, request_id: str) -> None:
        """A request has ended, whatever came of it: a probe without a verdict is due again."""
        if request_id == self.probe:
            self.probe = None

    def expire(self, now_s: float) -> None:
        """Be half open once the time is over."""
        if self.until_s is not None and now_s >= self.until_s:
            self.until_s = None

    def is_forgotten(self, now_s: float) -> bool:
        """Whether what it knows of a replica that is gone is too old to matter."""
        return not self.num_failures or now_s - self.failed_s >= FORGET_S


class Breakers:
    """The breakers of every replica that has failed since it last gave a token."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}

    def __repr__(self) -> str:
        return f"Breakers({ {i: b.state for i, b in self._breakers.items()} })"

    def admits(self, incarnation: str) -> bool:
        """Whether a new request may go to a replica."""
        breaker = self._breakers.get(incarnation)
        return breaker is None or breaker.admits

    def state(self, incarnation: str) -> str:
        """See `Breaker.state`."""
        breaker = self._breakers.get(incarnation)
        return "closed" if breaker is None else breaker.state

    def until_s(self, incarnation: str) -> float | None:
        """When an open breaker lets a probe go; None if it is not open."""
        breaker = self._breakers.get(incarnation)
        return None if breaker is None else breaker.until_s

    @property
    def probes(self) -> list[tuple[str, str]]:
        """(incarnation, request id) of every probe that is under way."""
        return [(i, b.probe) for i, b in self._breakers.items() if b.probe is not None]

    def check_invariants(self, now_s: float) -> None:
        """None is open for longer than its time."""
        for incarnation, breaker in self._breakers.items():
            assert breaker.until_s is None or now_s <= breaker.until_s, f"{incarnation}: {breaker}"

    # Each says whether it has changed who may be placed on.

    def sent(self, incarnation: str, request_id: str) -> bool:
        """A request goes to a replica."""
        return self._tell(incarnation, lambda breaker: breaker.sent(request_id))

    def succeeded(self, incarnation: str) -> bool:
        """A request got a token from a replica."""
        breaker = self._breakers.pop(incarnation, None)
        return breaker is not None and not breaker.admits

    def failed(self, incarnation: str, now_s: float) -> bool:
        """A request got an error from a replica, or nothing."""
        self._breakers.setdefault(incarnation, Breaker())
        return self._tell(incarnation, lambda breaker: breaker.failed(now_s))

    def ended(self, incarnation: str, request_id: str) -> bool:
        """A request has nothing to do with a replica any more."""
        return self._tell(incarnation, lambda breaker: breaker.ended(request_id))

    def expire(self, now_s: float) -> bool:
        """Let probes go where the time is over, and forget what is old."""
        is_changed = False
        for incarnation, breaker in list(self._breakers.items()):
            is_changed |= self._tell(incarnation, lambda b: b.expire(now_s))
            if breaker.is_forgotten(now_s) and breaker.state != "probing":
                del self._breakers[incarnation]
        return is_changed

    def _tell(self, incarnation: str, what: Callable[[Breaker], None]) -> bool:
        breaker = self._breakers.get(incarnation)
        if breaker is None:
            return False
        was = breaker.admits
        what(breaker)
        return breaker.admits != was
