"""Which engines one ingress should leave alone, as they failed: the promise of circuit breakers.

Counted here anew, by what passes between them, so that a breaker that does nothing is found out.
Owner of the counts of one ingress. Only broken connections are failures here; production knows more
of them, and so opens its breakers at least as early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.routing.breaker import FIRST_OPEN_S, FORGET_S, MAX_OPEN_S, THRESHOLD

if TYPE_CHECKING:
    from cluster.lab.simulation.loop import VirtualLoop
    from replicas.messages import RequestMode


class MisroutedRequest(NamedTuple):
    """A request that was sent to an engine that is to be left alone."""

    incarnation: str
    mode: RequestMode


@dataclass(slots=True)
class _EngineFailures:
    """What has become of one engine.

    Attributes:
        num_failures: Since its last token.
        num_trips: How often it was to be left alone since then.
        failed_s: When it last failed.
        shut_s: Since when it is to be left alone.
        shut_until_s: And until when.
    """

    num_failures: int = 0
    num_trips: int = 0
    failed_s: float = 0.0
    shut_s: float = 0.0
    shut_until_s: float = float("-inf")


class FailureTracker:
    """See the module docstring.

    Attributes:
        shunned: Requests that went where none should, unless all others have failed as well.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._engines: dict[str, _EngineFailures] = {}
        self._succeeded_s: dict[str, float] = {}
        self.misrouted: list[MisroutedRequest] = []

    def has_failed(self, incarnation: str) -> bool:
        """Whether an engine has failed since it last gave a token."""
        return incarnation in self._engines

    def failed(self, incarnation: str) -> None:
        """The connection to an engine has broken."""
        now_s = self._loop.time()
        if self._succeeded_s.get(incarnation) == now_s:
            return  # Whoever waits for the token hears of it only now.
        engine = self._engines.setdefault(incarnation, _EngineFailures())
        engine.num_failures += 1
        engine.failed_s = now_s
        # At the end of that time to the moment either may come first.
        if now_s > engine.shut_until_s and engine.num_failures >= THRESHOLD:
            open_s = min(FIRST_OPEN_S * 2.0**engine.num_trips, MAX_OPEN_S)
            engine.shut_s, engine.shut_until_s = now_s, now_s + open_s
            engine.num_trips += 1

    def succeeded(self, incarnation: str) -> None:
        """An engine has given a token."""
        self._engines.pop(incarnation, None)
        self._succeeded_s[incarnation] = self._loop.time()

    def sent(self, incarnation: str, mode: RequestMode) -> None:
        """A request goes to an engine."""
        now_s = self._loop.time()
        engine = self._engines.get(incarnation)
        if engine is None:
            return
        if now_s - engine.failed_s >= FORGET_S:
            del self._engines[incarnation]
        elif engine.shut_s < now_s < engine.shut_until_s:
            # In the very moment in which it fails it may have been chosen already.
            self.misrouted.append(MisroutedRequest(incarnation, mode))
