"""Limits of a request's waits, and a monitor that enforces them.

`wait_limits` derives them from the configuration. Everything that a request waits for has a
deadline in production, so a longer wait is a bug. The work of an engine, queue and prompt, and the
sum of all waits are limited by the request's own timeout only.
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
    from replicas.messages import ClientMessage, EngineEvent, KVLoaded, RequestMode

_SLACK_S = 0.1
"""Allowance for the network's delay and for engines checking their deadlines."""


class WaitLimits(NamedTuple):
    """The most seconds that each kind of wait may take.

    Attributes:
        slot_s: Admission and a decode slot, before an engine is asked.
        answer_s: An engine's acceptance or refusal; the engine may stall meanwhile.
        hand_over_s: The transfer of computed KV to the decode engine, or its failure.
        request_s: The whole request, including an engine's queue and computation.
    """

    slot_s: float
    answer_s: float
    hand_over_s: float
    request_s: float


def wait_limits(router: RouterConfig, pools: Sequence[PoolSpec]) -> WaitLimits:
    """Return the limits that follow from a configuration.

    Args:
        router: The router's configuration.
        pools: The pools, with the deadlines of their steps and hand-overs.
    """
    # A silent engine is given up. A hung one is ended by its parent, which checks every `LOOK_S`
    # and needs one check to notice the start of a hang.
    stuck_s = max(SILENCE_S, *(spec.step_timeout_s + 2 * LOOK_S for spec in pools))
    transfers = [spec.transfer for spec in pools]
    transfer_s = max(
        t.rendezvous_s + t.no_progress_s + t.no_data_s + t.closing_s for t in transfers
    )
    request_s = IngressConfig().request_timeout_s
    return WaitLimits(
        # An admitted request may lose the slot to another one, and then waits in the queue.
        slot_s=min(_entry_s(router) + router.queue_timeout_s, request_s),
        # An engine that stalls at the end of the first `ANSWER_S` gets the time once more.
        answer_s=min(2 * ANSWER_S + stuck_s, request_s),
        hand_over_s=min(stuck_s + transfer_s, request_s),
        request_s=request_s,
    )


def _entry_s(router: RouterConfig) -> float:
    """Return the longest wait for admission."""
    if router.admission is None:
        return 0.0
    return router.queue_timeout_s if router.admission.ttft_s is None else router.admission.ttft_s


class WaitMonitor:
    """Enforces `wait_limits` for every request of one ingress, from its messages.

    A request waits for a slot or for one or two engines: prefill starts while the slot is reserved.
    """

    def __init__(self, loop: VirtualLoop, longest: WaitLimits) -> None:
        self._loop = loop
        self._longest = longest
        # For each request, the alarm of each of its waits, by incarnation; None for a slot.
        self._waits: dict[str, dict[str | None, asyncio.TimerHandle]] = {}
        # For each request, the decode engine that accepted it, and its successor: an engine asked
        # later, for which only the hand-over waits until it is activated.
        self._accepted: dict[str, str] = {}
        self._successors: dict[str, str] = {}
        # For each request that a successor continues, the silent engine that still has it.
        self._quiet: dict[str, str] = {}
        # For each request, the mode in which each engine was last asked for it.
        self._modes: dict[str, dict[str, RequestMode]] = {}
        # For each request, the choices of which each prefill engine still owes the first token.
        self._owed: dict[str, dict[str, set[int]]] = {}

    def began(self, request_id: str) -> None:
        """Record that a request arrived or starts again: it waits for a slot."""
        self._clear(request_id)
        self._wait(request_id, "a slot", self._longest.slot_s)

    def sent(self, host: VirtualHost, message: ClientMessage) -> None:
        """A message was sent."""
        if isinstance(message, AddRequest):
            request_id = message.request.request_id
            self._stop(request_id, None)
            self._modes.setdefault(request_id, {})[host.incarnation] = message.mode
            choices = set(range(message.request.sampling.n))
            self._owed.setdefault(request_id, {})[host.incarnation] = choices
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
        elif isinstance(message, Abort) and not message.choices:
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
            self._prefill_answered(host, event)
        elif isinstance(event, Refused) and is_successor:
            self._stop(request_id, host.incarnation)
            self._forget(request_id, host.incarnation)
        elif isinstance(event, Refused):
            self.began(request_id)
        else:
            # From now on the request waits for computation, which has no limit of its own.
            self._stop(request_id, host.incarnation)

    def _prefill_answered(
        self, host: VirtualHost, event: Accepted | Refused | KVLoaded | TokenOutput
    ) -> None:
        request_id = event.request_id
        if isinstance(event, Accepted):
            self._wait(request_id, "first tokens", self._longest.request_s, host)
        elif isinstance(event, TokenOutput):
            owed = self._owed[request_id][host.incarnation]
            owed.discard(event.choice)
            if not owed or event.finish_reason == "error":
                self._give_up(request_id, host.incarnation)
        elif isinstance(event, Refused):
            # The next engine is asked at once, or the request waits for a slot.
            self._give_up(request_id, host.incarnation)
        else:
            self._stop(request_id, host.incarnation)

    def lost(self, incarnation: str) -> None:
        """Record that the connection to an engine is gone."""
        for request_id in list(self._waits):
            self._give_up(request_id, incarnation)
        for request_id in [*self._accepted, *self._quiet]:
            self._forget(request_id, incarnation)

    def ended(self, request_id: str) -> None:
        """Record that a request has ended."""
        self._clear(request_id)
        self._modes.pop(request_id, None)
        self._owed.pop(request_id, None)

    def _clear(self, request_id: str) -> None:
        for engines in (self._accepted, self._successors, self._quiet):
            engines.pop(request_id, None)
        self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        """Cancel all alarms of a request."""
        for alarm in self._waits.pop(request_id, {}).values():
            alarm.cancel()

    def died(self) -> None:
        """Record that the ingress died."""
        for request_id in {*self._waits, *self._accepted, *self._modes}:
            self.ended(request_id)

    def _give_up(self, request_id: str, incarnation: str) -> None:
        """Record that a request no longer waits for an engine, which refused, failed or ended."""
        is_successor = self._successors.get(request_id) == incarnation
        if self._accepted.get(request_id) == incarnation and request_id in self._quiet:
            # The silent engine has sent something and continues the request.
            is_successor, self._accepted[request_id] = True, self._quiet.pop(request_id)
        if self._stop(request_id, incarnation) and not is_successor and not self._waits[request_id]:
            # A decode engine that has accepted the request may still be activated meanwhile.
            self._wait(request_id, "a slot", self._longest.slot_s)

    def _forget(self, request_id: str, incarnation: str) -> None:
        """Remove a decode engine from a request."""
        for engines in (self._accepted, self._successors, self._quiet):
            if engines.get(request_id) == incarnation:
                del engines[request_id]

    def _stop(self, request_id: str, incarnation: str | None) -> bool:
        """Cancel one alarm of a request; return whether there was one."""
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
        source = "" if host is None else f" from {host!r}"
        raise AssertionError(f"{request_id} has waited {longest_s:g} s for {what}{source}")
