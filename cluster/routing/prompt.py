"""The prompt of one request on prefill engines.

Owner: the request's `Run`. If an engine refuses, dies or stalls before the first token, the prompt
is asked of another engine with another ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cluster.routing.leg import LegState
from cluster.routing.placement import ANY_GROUP, Placement
from replicas.errors import EngineDeadError, EngineLateError, EngineStalledError
from replicas.messages import AddRequest, Refused, TokenOutput

if TYPE_CHECKING:
    from cluster.config.schema import RouterConfig
    from cluster.routing.cost import Policies
    from cluster.routing.demand import Demand
    from cluster.routing.leg import Leg, Legs
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.pools import PoolState
    from cluster.routing.prefixes import Prefixes
    from cluster.routing.slot_moments import SlotMoments
    from cluster.routing.tickets import TicketOffice
    from replicas.messages import EngineRequest


@dataclass(slots=True)
class _PrefillAttempt:
    """A prefill engine that was asked for the prompt.

    Attributes:
        placement: The engine's place.
        leg: The leg on that engine; None if it could not be asked.
        ticket: The ticket with which the decode engine fetches the KV.
        outputs: First tokens of choices, so far.
    """

    placement: Placement
    leg: Leg | None = None
    ticket: bytes = b""
    outputs: list[TokenOutput] = field(default_factory=list)


class PromptContext(Protocol):
    """The parts of the router that a `Prompt` uses."""

    config: RouterConfig
    metrics: RouterMetrics
    moments: SlotMoments | None
    policies: Policies
    prefixes: Prefixes
    tickets: TicketOffice


class Prompt:
    """The prefill of one request.

    Args:
        context: Parts of the router.
        pools: The pool state that holds the prefill leg.
        request: The request.
        demand: Its demand.
        legs: Its legs.

    Attributes:
        request: As given.
        epoch: Number of the last transfer; events of earlier ones must not end the current one.
    """

    def __init__(
        self,
        context: PromptContext,
        pools: PoolState,
        request: EngineRequest,
        demand: Demand,
        legs: Legs,
    ) -> None:
        self._context = context
        self._pools = pools
        self.request = request
        self._demand = demand
        self._legs = legs
        self._asked: _PrefillAttempt | None = None
        # Engines that had not answered when a decode engine was lost: they are asked last.
        self._unheard: set[Placement] = set()
        self.epoch = -1

    @property
    def is_under_way(self) -> bool:
        """Whether an engine was asked whose tokens have not been waited for to the end."""
        return self._asked is not None

    def new_epoch(self) -> int:
        """Return the number of this request's next transfer."""
        self.epoch += 1
        return self.epoch

    def ask(self, consumer: str) -> None:
        """Ask a prefill engine before the decode engine has answered.

        Args:
            consumer: Incarnation of the decode engine; "" for any.
        """
        self._asked = self._ask(consumer, set())

    def drop(self) -> None:
        """Drop a prompt whose KV only a decode engine that was lost or refused may fetch."""
        leg = self._legs.prefill
        if leg is None or leg.offer is None:
            self._asked = None
            self._drop_leg()

    def stop(self) -> None:
        """Drop the prompt: it is not needed any more. Idempotent."""
        self._asked = None
        self._drop_leg()

    def began(self) -> None:
        """Record that the first token was delivered."""
        if self._context.moments is not None:
            now_s = asyncio.get_running_loop().time()
            self._context.moments.computed(self.request.request_id, now_s)

    def _drop_leg(self) -> None:
        """Close the leg of an engine that should not compute the prompt any more."""
        self._legs.drop_prefill(abort=True)
        if self._context.moments is not None:
            self._context.moments.dropped(self.request.request_id)

    def passes_over_unheard(self) -> None:
        """Prefer other engines, from now on, to the current one if it has not answered."""
        leg = self._asked.leg if self._asked is not None else None
        if self._asked is not None and leg is not None and leg.state is not LegState.OPEN:
            self._unheard.add(self._asked.placement)

    async def tokens(self, consumer: Leg | None) -> list[TokenOutput]:
        """Wait for the engine that was asked, and ask others if it fails.

        Args:
            consumer: The decode leg that the KV is for; None for any.

        Returns:
            The first tokens of every choice; empty if no prefill engine gave any.

        Raises:
            DecodeLostError: The consumer's engine died.
            DecodeLeftError: It stalls or drains, and another one can take over.
            ReplicaLostError: As many engines were lost as a request may lose.
            ServingError: An engine gave the request up.
        """
        tried: set[Placement] = set()
        for _ in range(self._context.config.max_attempts):
            self._legs.check_lost(self._context.config.max_attempts)
            name = "" if consumer is None else consumer.incarnation
            asked = self._asked = self._asked or self._ask(name, tried)
            if asked is None:
                break
            outputs = await self._wait(asked, consumer)
            self._asked = None
            if outputs:
                return outputs
            tried.add(asked.placement)
            self._context.metrics.retries.labels("prefill").inc()
        self._legs.check_lost(self._context.config.max_attempts)
        return []

    def _ask(self, consumer: str, tried: set[Placement]) -> _PrefillAttempt | None:
        """Ask the next engine, for one decode engine or "" for any; return None if none is left."""
        placement = self._place(consumer, tried)
        if placement is None:
            return None
        asked = _PrefillAttempt(placement)
        member = self._pools.member(placement.incarnation)
        if member is None or not member.description.kv_endpoints:
            return asked
        tickets = self._context.tickets
        transfer = tickets.begin(self.request, self.new_epoch(), member.description)
        asked.ticket = tickets.seal(transfer, consumer)
        message = AddRequest(self.request, "prefill", ANY_GROUP, asked.ticket)
        self._pools.hold(self._demand, placement)
        offer = None if consumer else transfer
        with contextlib.suppress(EngineDeadError):
            asked.leg = self._legs.ask_to_prefill(placement, message, offer)
            now_s = asyncio.get_running_loop().time()
            if self._context.moments is not None:
                self._context.moments.asked(self._demand, placement.incarnation, now_s)
            self._context.prefixes.note_routed(self._demand, placement, now_s)
        return asked

    def _place(self, consumer: str, tried: set[Placement]) -> Placement | None:
        views = self._pools.prefill_views()
        # After a change of role the consumer may be listed as a prefill engine too.
        consumers = {Placement(consumer, ANY_GROUP)}.intersection(views.placements)
        place = self._context.policies.prefill.place
        found = place(self._demand, views, tried, consumers | (self._unheard - tried))
        if found is None and self._unheard:
            found = place(self._demand, views, tried, consumers)
        return found

    async def _wait(self, asked: _PrefillAttempt, consumer: Leg | None) -> list[TokenOutput]:
        """Return the first tokens from one engine; empty if it refuses, dies or stalls."""
        outputs: list[TokenOutput] = []
        # If it was lost while the decode engine was waited for, the leg has been dropped.
        if asked.leg is not None and asked.leg is self._legs.prefill:
            if consumer is not None:
                consumer.load(self._ticket(asked, asked.leg, consumer.incarnation), self.epoch)
            with contextlib.suppress(EngineDeadError, EngineLateError, EngineStalledError):
                outputs = await self._first_tokens(asked.leg, asked.outputs)
        if not outputs:
            self._drop_leg()
        return outputs

    def _ticket(self, asked: _PrefillAttempt, leg: Leg, consumer: str) -> bytes:
        """Return the ticket for a decode engine; from now on the transfer ends with that engine."""
        if leg.offer is not None:
            asked.ticket = self._context.tickets.seal(leg.offer, consumer)
            leg.offer = None
        return asked.ticket

    async def _first_tokens(self, leg: Leg, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Wait for the first tokens of every choice; empty if the engine refuses."""
        while len({output.choice for output in outputs}) < self.request.sampling.n:
            event = await self._legs.next_of(leg)
            leg.answered()
            if isinstance(event, Refused):
                self._context.metrics.refusals.labels(event.reason).inc()
                return []
            if isinstance(event, TokenOutput):
                outputs.append(event)
        return outputs
