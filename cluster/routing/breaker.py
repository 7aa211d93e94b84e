"""Circuit breakers: a replica that fails request after request gets no new one for a while. Pure.

They are not for replicas that stall, are silent or gone, which is noticed elsewhere. They are for
replicas that respond and still give no tokens. After `THRESHOLD` failures without a success between
them a breaker opens, for a time that doubles with each trip. Then one request is the probe, and its
first token closes the breaker. A replica without room has not failed, nor has one whose client
left. A broken connection is one failure, however many requests it carried.

Owner: the pool state of one ingress. It places nothing on a replica whose breaker is open unless
all other replicas of its side are shut out as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

THRESHOLD = 3
"""Consecutive failures that open a breaker."""
FIRST_OPEN_S = 2.0
"""Seconds that a breaker stays open the first time."""
MAX_OPEN_S = 60.0
"""Most seconds that a breaker stays open."""
FORGET_S = 2 * MAX_OPEN_S
"""Seconds that a breaker outlives the last failure, also of a replica that was lost and returns."""


@dataclass(slots=True)
class Breaker:
    """The breaker of one replica; all times are on one monotonic clock, in seconds.

    Attributes:
        num_failures: Failures since the last success.
        num_trips: Number of trips since it was last closed.
        until_s: End of the open period; None if not open.
        probe: Id of the request that probes; None if there is none.
        failed_s: Time of the last failure.
    """

    num_failures: int = 0
    num_trips: int = 0
    until_s: float | None = None
    probe: str | None = None
    failed_s: float = 0.0

    @property
    def state(self) -> str:
        """closed, open, half_open (the next request is the probe) or probing (it is under way)."""
        if self.until_s is not None:
            return "open"
        if not self.num_trips:
            return "closed"
        return "half_open" if self.probe is None else "probing"

    @property
    def admits(self) -> bool:
        """Whether a new request may be sent there."""
        return self.state in {"closed", "half_open"}

    def sent(self, request_id: str) -> None:
        """Record a request sent there; it becomes the probe if one is due."""
        if self.state == "half_open":
            self.probe = request_id

    def succeeded(self) -> None:
        """Record that a request got a token from there."""
        self.num_failures = self.num_trips = 0
        self.until_s = self.probe = None

    def failed(self, now_s: float) -> None:
        """Record a failed request; an open breaker stays as it is."""
        self.failed_s = now_s
        self.num_failures += 1
        if self.until_s is None and (self.num_trips or self.num_failures >= THRESHOLD):
            self.until_s = now_s + min(FIRST_OPEN_S * 2.0**self.num_trips, MAX_OPEN_S)
            self.num_trips += 1
            self.probe = None

    def ended(self, request_id: str) -> None:
        """Record that a request has ended; a probe without a result has to be sent again."""
        if request_id == self.probe:
            self.probe = None

    def expire(self, now_s: float) -> None:
        """Become half open once the open period is over."""
        if self.until_s is not None and now_s >= self.until_s:
            self.until_s = None

    def is_forgotten(self, now_s: float) -> bool:
        """Return whether the last failure is so long ago that it does not matter."""
        return not self.num_failures or now_s - self.failed_s >= FORGET_S


class Breakers:
    """Breakers of every replica that has failed since it last gave a token."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}

    def __repr__(self) -> str:
        return f"Breakers({ {i: b.state for i, b in self._breakers.items()} })"

    def admits(self, incarnation: str) -> bool:
        """Return whether a new request may be sent to a replica."""
        breaker = self._breakers.get(incarnation)
        return breaker is None or breaker.admits

    def state(self, incarnation: str) -> str:
        """Return the state of a replica's breaker; see `Breaker.state`."""
        breaker = self._breakers.get(incarnation)
        return "closed" if breaker is None else breaker.state

    def until_s(self, incarnation: str) -> float | None:
        """Return the end of a breaker's open period; None if it is not open."""
        breaker = self._breakers.get(incarnation)
        return None if breaker is None else breaker.until_s

    @property
    def probes(self) -> list[tuple[str, str]]:
        """(incarnation, request id) of every probe that is under way."""
        return [(i, b.probe) for i, b in self._breakers.items() if b.probe is not None]

    def check_invariants(self, now_s: float) -> None:
        """Assert that no breaker is open past its end."""
        for incarnation, breaker in self._breakers.items():
            assert breaker.until_s is None or now_s <= breaker.until_s, f"{incarnation}: {breaker}"

    # Each method below returns whether the replica's `admits` has changed.

    def sent(self, incarnation: str, request_id: str) -> bool:
        """Record a request sent to a replica."""
        return self._tell(incarnation, lambda breaker: breaker.sent(request_id))

    def succeeded(self, incarnation: str) -> bool:
        """Record that a request got a token from a replica."""
        breaker = self._breakers.pop(incarnation, None)
        return breaker is not None and not breaker.admits

    def failed(self, incarnation: str, now_s: float) -> bool:
        """Record that a request failed on a replica: an error, or no answer."""
        self._breakers.setdefault(incarnation, Breaker())
        return self._tell(incarnation, lambda breaker: breaker.failed(now_s))

    def ended(self, incarnation: str, request_id: str) -> bool:
        """Record that a request has left a replica."""
        return self._tell(incarnation, lambda breaker: breaker.ended(request_id))

    def expire(self, now_s: float) -> bool:
        """Let probes go where the open period is over; forget old breakers."""
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
