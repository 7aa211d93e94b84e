"""Checks the circuit breakers of one ingress: requests must avoid engines that failed repeatedly.

Counts failures independently, from the messages that it sees, so that a breaker without effect is
detected. Only broken connections count as failures here. Production counts further kinds, so it
opens its breakers at least as early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.routing.breaker import FIRST_OPEN_S, FORGET_S, MAX_OPEN_S, THRESHOLD

if TYPE_CHECKING:
    from cluster.lab.simulation.loop import VirtualLoop
    from replicas.messages import RequestMode


class MisroutedRequest(NamedTuple):
    """A request that was sent to an engine whose breaker should be open."""

    incarnation: str
    mode: RequestMode


@dataclass(slots=True)
class _EngineFailures:
    """The failures of one engine.

    Attributes:
        num_failures: Failures since its last token.
        num_trips: Times that its breaker should have opened since then.
        failed_s: Time of the last failure.
        shut_s: Start of the time in which its breaker should be open.
        shut_until_s: End of that time.
    """

    num_failures: int = 0
    num_trips: int = 0
    failed_s: float = 0.0
    shut_s: float = 0.0
    shut_until_s: float = float("-inf")


class FailureTracker:
    """The failures of all engines, as seen by one ingress.

    Attributes:
        misrouted: Requests to engines to avoid; allowed only if all other engines failed too.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._engines: dict[str, _EngineFailures] = {}
        self._succeeded_s: dict[str, float] = {}
        self.misrouted: list[MisroutedRequest] = []

    def has_failed(self, incarnation: str) -> bool:
        """Return whether an engine has failed since its last token."""
        return incarnation in self._engines

    def failed(self, incarnation: str) -> None:
        """Record that the connection to an engine broke."""
        now_s = self._loop.time()
        if self._succeeded_s.get(incarnation) == now_s:
            return  # A token of this instant is still being delivered.
        engine = self._engines.setdefault(incarnation, _EngineFailures())
        engine.num_failures += 1
        engine.failed_s = now_s
        # At exactly `shut_until_s`, the failure and the end of the time may come in either order.
        if now_s > engine.shut_until_s and engine.num_failures >= THRESHOLD:
            open_s = min(FIRST_OPEN_S * 2.0**engine.num_trips, MAX_OPEN_S)
            engine.shut_s, engine.shut_until_s = now_s, now_s + open_s
            engine.num_trips += 1

    def succeeded(self, incarnation: str) -> None:
        """Record that an engine produced a token."""
        self._engines.pop(incarnation, None)
        self._succeeded_s[incarnation] = self._loop.time()

    def sent(self, incarnation: str, mode: RequestMode) -> None:
        """Record that a request is sent to an engine."""
        now_s = self._loop.time()
        engine = self._engines.get(incarnation)
        if engine is None:
            return
        if now_s - engine.failed_s >= FORGET_S:
            del self._engines[incarnation]
        elif engine.shut_s < now_s < engine.shut_until_s:
            # Strictly later: at the instant of the failure the engine may have been chosen already.
            self.misrouted.append(MisroutedRequest(incarnation, mode))
