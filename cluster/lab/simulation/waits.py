"""How long a request waits at most, and a watcher that holds every request to it.

`wait_limits` is the one place that says it, as a function of the configuration: whatever a
request waits for has a deadline in production, and a request that waits longer waits for nothing.
An engine that works has as long as its work takes, queue and prompt: that ends with the request's
own time alone, as does the sum of all waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cluster.config.schema import IngressConfig
from cluster.routing.leg import ANSWER_S
from replicas.dealer import SILENCE_S
from replicas.launch import LOOK_S
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    LoadKV,
    NotGreeted,
    Refused,
    TokenOutput,
    UtilityResult,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from cluster.config.schema import RouterConfig
    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.loop import VirtualLoop
    from cluster.lab.simulation.options import PoolSpec
    from replicas.messages import ClientMessage, EngineEvent, RequestMode

_SLACK_S = 0.1
"""What news takes on the network, and an engine to look at its clock."""


class WaitLimits(NamedTuple):
    """Seconds that a request waits at most, each time that it waits.

    Attributes:
        slot_s: To be let in and for a decode slot, before an engine is asked.
        answer_s: For an engine that was asked to say yes or no: it may stall meanwhile.
        hand_over_s: For KV that is computed to be where it is decoded from, or given up.
        request_s: For everything, what an engine computes or has before it in its queue included.
    """

    slot_s: float
    answer_s: float
    hand_over_s: float
    request_s: float


def wait_limits(router: RouterConfig, pools: Sequence[PoolSpec]) -> WaitLimits:
    """What a configuration promises to every request.

    Args:
        router: How requests are placed.
        pools: The engines, with the deadlines of their steps and hand-overs.
    """
    # One that falls silent is given up; one that hangs is ended by its parent, who looks now and
    # then and needs a look to see a hang begin.
    stuck_s = max(SILENCE_S, *(spec.step_timeout_s + 2 * LOOK_S for spec in pools))
    transfers = [spec.transfer for spec in pools]
    transfer_s = max(
        t.rendezvous_s + t.no_progress_s + t.no_data_s + t.closing_s for t in transfers
    )
    request_s = IngressConfig().request_timeout_s
    return WaitLimits(
        # Let in, it may still find that somebody else was faster.
        slot_s=min(_entry_s(router) + router.queue_timeout_s, request_s),
        # Asked anew how long it took when it stalled at the end of the first time.
        answer_s=min(2 * ANSWER_S + stuck_s, request_s),
        hand_over_s=min(stuck_s + transfer_s, request_s),
        request_s=request_s,
    )


def _entry_s(router: RouterConfig) -> float:
    """How long one waits to be let in."""
    if router.admission is None:
        return 0.0
    return router.queue_timeout_s if router.admission.ttft_s is None else router.admission.ttft_s


class WaitMonitor:
    """Holds every request of one ingress to `wait_limits`, by the messages that it sees.

    A request waits for a slot, or for one engine or two: the prompt is asked for with the slot.

    Owner: of what each request waits for now.
    """

    def __init__(self, loop: VirtualLoop, longest: WaitLimits) -> None:
        self._loop = loop
        self._longest = longest
        # For each request the alarms of what it waits for, by incarnation; of a slot by None.
        self._waits: dict[str, dict[str | None, asyncio.TimerHandle]] = {}
        # For each request the decode engine that has accepted it; and one that was asked since, for
        # which nothing waits but the hand-over, until it is to go on.
        self._accepted: dict[str, str] = {}
        self._successors: dict[str, str] = {}
        # For each request whose next engine goes on already, the quiet one that has it still.
        self._quiet: dict[str, str] = {}
        # For each request which part of it each engine was asked for last.
        self._modes: dict[str, dict[str, RequestMode]] = {}

    def began(self, request_id: str) -> None:
        """A request has come, or has to begin again."""
        self._clear(request_id)
        self._wait(request_id, "a slot", self._longest.slot_s)

    def sent(self, host: VirtualHost, message: ClientMessage) -> None:
        """A message was sent."""
        if isinstance(message, AddRequest):
            request_id = message.request.request_id
            self._stop(request_id, None)
            self._modes.setdefault(request_id, {})[host.incarnation] = message.mode
            if message.mode != "prefill" and request_id in self._accepted:
                self._successors[request_id] = host.incarnation
            self._wait(request_id, "an answer", self._longest.answer_s, host)
        elif isinstance(message, LoadKV):
            if self._successors.get(message.request_id) == host.incarnation:
                self._wait(message.request_id, "KV that is lent", self._longest.hand_over_s, host)
        elif isinstance(message, Activate):
            self._cancel(message.request_id)
            is_successor = self._successors.pop(message.request_id, None) == host.incarnation
            if is_successor and message.request_id in self._accepted:
                self._quiet[message.request_id] = self._accepted[message.request_id]
            self._accepted[message.request_id] = host.incarnation
            if any(message.token_ids):
                self._wait(message.request_id, "its KV", self._longest.hand_over_s, host)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._give_up(request_id, host.incarnation)
                self._forget(request_id, host.incarnation)

    def arrived(self, host: VirtualHost, event: EngineEvent) -> None:
        """An event has arrived."""
        if isinstance(event, UtilityResult | NotGreeted):
            return
        request_id = event.request_id
        mode = self._modes.get(request_id, {}).get(host.incarnation)
        is_successor = self._successors.get(request_id) == host.incarnation
        if isinstance(event, Accepted) and mode != "prefill" and not is_successor:
            self._accepted[request_id] = host.incarnation
        if host.incarnation not in self._waits.get(request_id, ()):
            return
        if mode == "prefill":
            if isinstance(event, Accepted):
                self._wait(request_id, "a first token", self._longest.request_s, host)
            elif isinstance(event, Refused | TokenOutput):
                # Whoever is asked next is asked at once, or there is a slot to wait for.
                self._give_up(request_id, host.incarnation)
            else:
                self._stop(request_id, host.incarnation)
        elif isinstance(event, Refused) and is_successor:
            self._stop(request_id, host.incarnation)
            self._forget(request_id, host.incarnation)
        elif isinstance(event, Refused):
            self.began(request_id)
        else:
            # From here on it waits for what is computed.
            self._stop(request_id, host.incarnation)

    def lost(self, incarnation: str) -> None:
        """The connection to an engine is gone."""
        for request_id in list(self._waits):
            self._give_up(request_id, incarnation)
        for request_id in [*self._accepted, *self._quiet]:
            self._forget(request_id, incarnation)

    def ended(self, request_id: str) -> None:
        """A request is over."""
        self._clear(request_id)
        self._modes.pop(request_id, None)

    def _clear(self, request_id: str) -> None:
        for engines in (self._accepted, self._successors, self._quiet):
            engines.pop(request_id, None)
        self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        """A request waits for nothing any more."""
        for alarm in self._waits.pop(request_id, {}).values():
            alarm.cancel()

    def died(self) -> None:
        """The ingress is gone."""
        for request_id in {*self._waits, *self._accepted, *self._modes}:
            self.ended(request_id)

    def _give_up(self, request_id: str, incarnation: str) -> None:
        """Nothing comes of what a request waits for from an engine."""
        is_successor = self._successors.get(request_id) == incarnation
        if self._accepted.get(request_id) == incarnation and request_id in self._quiet:
            # The quiet one has spoken, and goes on.
            is_successor, self._accepted[request_id] = True, self._quiet.pop(request_id)
        if self._stop(request_id, incarnation) and not is_successor and not self._waits[request_id]:
            # A decode engine that has accepted it may be told to go on with it all the same.
            self._wait(request_id, "a slot", self._longest.slot_s)

    def _forget(self, request_id: str, incarnation: str) -> None:
        """A request has nothing to do with a decode engine any more."""
        for engines in (self._accepted, self._successors, self._quiet):
            if engines.get(request_id) == incarnation:
                del engines[request_id]

    def _stop(self, request_id: str, incarnation: str | None) -> bool:
        """It does not wait for one thing any more; says whether it did."""
        alarm = self._waits.get(request_id, {}).pop(incarnation, None)
        if alarm is not None:
            alarm.cancel()
        return alarm is not None

    def _wait(
        self, request_id: str, what: str, longest_s: float, host: VirtualHost | None = None
    ) -> None:
        incarnation = None if host is None else host.incarnation
        self._stop(request_id, incarnation)
        self._waits.setdefault(request_id, {})[incarnation] = self._loop.call_later(
            longest_s + _SLACK_S, self._fail_wait, request_id, what, longest_s, host
        )

    def _fail_wait(
        self, request_id: str, what: str, longest_s: float, host: VirtualHost | None
    ) -> None:
        whom = "" if host is None else f" of {host!r}"
        raise AssertionError(f"{request_id} has waited {longest_s:g} s for {what}{whom}")
