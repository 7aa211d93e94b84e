"""The router: runs each request on engines, from its arrival to its last token.

Owner: one ingress's event loop. `tell` is the life of a request from top to bottom; `Run` has its
steps. `router.order` decides when the decode slot is asked for:

- `decode_first`: with the prompt, so no finished prefill waits for a decode slot
- `prefill_first`: after the first token, so no slot waits for a prefill
- `predicted`: shortly before the prompt is expected to be computed

When engines fail:

- A prefill engine that refuses, dies or stalls before the first token is replaced. The last resort
  is a local prefill on the decode engine.
- If a prefill engine dies after the first token, the decode engine computes the prompt.
- If a decode engine dies, or is left because it stalls, another one continues the stream. This is a
  migration if the first engine had given tokens.
- Each lost replica uses one of `max_attempts`, because the request itself may be what kills it.
- Stalls have a budget of their own (`max_attempts - 1`). After that the request stays where it is.

The prompt's KV outlives a lost decode engine only if it was offered to any decode engine and no
engine had begun to fetch it. Otherwise the next decode engine computes prompt and tokens again, or
fails the request where its configuration forbids that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from cluster.errors import BadRequestError, ReplicaLostError, ServingError
from cluster.routing.admission import Admission
from cluster.routing.admission_waits import AdmissionWaits
from cluster.routing.conditional_prefill import ConditionalPrefill
from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.explain import Routes
from cluster.routing.forecast import Lengths
from cluster.routing.hand_over import HandOver
from cluster.routing.leg import (
    DecodeLeftError,
    DecodeLostError,
    Leg,
    Legs,
    LegState,
    ReservationEndedError,
)
from cluster.routing.lending import Lending
from cluster.routing.progress import Progress
from cluster.routing.prompt import Prompt
from cluster.routing.prompt_side import PromptSide
from cluster.routing.slot_moments import SlotMoments
from cluster.routing.slot_queue import RETRY_AFTER_S, SlotQueue
from cluster.routing.slot_search import SlotSearch
from cluster.routing.slot_waits import SlotWaits
from cluster.routing.stalls import Stalls
from cluster.routing.traffic import Traffic
from replicas.messages import KVLoaded, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from cluster.config.schema import RouterConfig
    from cluster.routing.explain import Route
    from cluster.routing.fleet import Connections, Fleet
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.progress import Seam
    from cluster.routing.slot_queue import Waiter
    from cluster.routing.tickets import TicketOffice
    from replicas.messages import EngineRequest, FinishReason, RequestMode

    Emit = Callable[[TokenOutput], Awaitable[bool]]
    """Receives an output. Returns whether more of its choice is wanted: False once that has ended,
    by its engine or by a stop string."""


class Part(NamedTuple):
    """One engine's part in one request; times are on the event loop's clock."""

    demand: Demand
    incarnation: str
    mode: RequestMode
    state: str
    asked_s: float


class Router:
    """Places the requests of one ingress on engines and runs them.

    Args:
        fleet: The engines that this ingress knows.
        config: Limits, thresholds and policies.
        metrics: Counts decisions.
        tickets: Seals tickets with which decode engines fetch KV from prefill engines.
        seed: Seed of the policies' random numbers.

    Attributes:
        traffic: Counts of requests and tokens since the start.
        lengths: Recent mean lengths of prompts and answers.
        routes: Records of where requests went, and why.
    """

    def __init__(
        self,
        fleet: Fleet[Connections],
        config: RouterConfig,
        metrics: RouterMetrics,
        tickets: TicketOffice,
        seed: int = 0,
    ) -> None:
        self.fleet = fleet
        self.config = config
        self.metrics = metrics
        self.tickets = tickets
        self.prefixes = fleet.prefixes
        self.routes = Routes(metrics)
        self.policies = make_policies(
            config.policy, fleet.prefixes.cached_tokens, seed, self.routes
        )
        self.queue = SlotQueue(
            fleet.pools, self.policies.decode, config.max_queued_requests, config.queue_timeout_s
        )
        self.moments: SlotMoments | None = None
        if config.order == "predicted" and config.admission is None:
            # Not with admission: an admitted request has almost nothing before its prompt.
            self.moments = SlotMoments(fleet.pools)
        self.waits = SlotWaits(self.queue, fleet.pools, self.moments)
        self.stalls = Stalls(self.queue)
        self.traffic, self.lengths = Traffic(), Lengths()
        self.conditional: ConditionalPrefill | None = None
        if config.min_remote_prefill_tokens is None:
            self.conditional = ConditionalPrefill(
                fleet.pools, fleet.prefixes.cached_tokens, self.lengths, self.routes
            )
        self.admission: AdmissionWaits | None = None
        if config.admission is not None:
            core = Admission(config.admission, config.max_queued_requests, config.queue_timeout_s)
            self.admission = AdmissionWaits(core, fleet.pools)
        self._runs: dict[Run, None] = {}
        fleet.on_change = self.capacity_changed

    def capacity_changed(self) -> None:
        """Wake waiting requests; call it when a slot may have become free."""
        self.waits.capacity_changed()
        self.stalls.capacity_changed()
        if self.admission is not None:
            self.admission.capacity_changed()

    async def run(self, request: EngineRequest, emit: Emit, token_ids: Sequence[int] = ()) -> None:
        """Run a request and pass its outputs to `emit` in order.

        The last output of each choice has its finish reason. A choice of which no more is wanted is
        dropped by its engine. If the call ends early, cancelled or because no more of any choice is
        wanted, the request is aborted on its engines.

        Args:
            request: The request.
            emit: Receives its outputs.
            token_ids: Output that the client already has, of a request with one choice: engines
                continue after it, as after a migration.

        Raises:
            ServingError: The request cannot run, or failed midway.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        with self.routes.follow(request.request_id, num_prompt_tokens) as route:
            run = Run(self, request, emit, route)
            self.traffic.come(num_prompt_tokens)
            self.lengths.prompts.add(num_prompt_tokens)
            if token_ids:
                run.continue_after(token_ids)
            try:
                await self._live(run)
            finally:
                route.num_tokens = sum(map(len, run.progress.tokens))
                self.traffic.end(num_prompt_tokens, route.num_tokens)
                if route.num_tokens:
                    self.lengths.outputs.add(route.num_tokens)

    async def _live(self, run: Run) -> None:
        try:
            await run.enter()
        except ServingError as error:
            self.metrics.turned_away.labels(error.code).inc()
            raise
        self._runs[run] = None
        try:
            while not await run.survives():
                pass
        finally:
            del self._runs[run]
            run.close()
            self.capacity_changed()

    def parts(self) -> list[Part]:
        """Return what engines currently do for the requests of this ingress."""
        return [part for run in self._runs for part in run.parts()]


async def tell(run: Run) -> None:
    """Run a request once: slot, prompt, first token, other tokens.

    No engine computes anything for a request while no free slot is in view. The prompt is asked for
    together with the slot, so if an outdated view led to a refusal, that prompt was begun for
    nothing. Where a slot would be held too long, the prompt is asked for first. If its first token
    comes before there is a slot, the client gets it and the KV waits on the prefill engine.
    """
    if run.is_early:
        run.check_open()
        run.ask_for_prompt()
    decode = await run.reserve()
    if decode is not None:
        first = await run.prefill(decode) if decode.mode == "decode" and not run.has_tokens else []
        await run.start(decode, first)
        await run.follow(decode)


class Run:
    """One running request: its legs and the outputs that the client has.

    Owner: the coroutine of the request. A decode leg of mode "decode" waits to be activated, once.

    Args:
        router: The router that places the request.
        request: The request.
        emit: Receives its outputs.
        route: Records its placements and their results.

    Attributes:
        progress: Outputs that the client has, or gets next.
        is_over: Whether nothing is left to do.
    """

    def __init__(self, router: Router, request: EngineRequest, emit: Emit, route: Route) -> None:
        self._router = router
        self._route = route
        self._pools = router.fleet.pools
        self._request = request
        self._emit = emit
        demand = Demand.of(request, asyncio.get_running_loop().time())
        self._legs = Legs(
            router.fleet.client,
            router.fleet.pools,
            router.metrics,
            router.stalls,
            demand,
            max_leaves=router.config.max_attempts - 1,
        )
        self._prompt = Prompt(router, self._pools, request, demand, self._legs)
        self.progress = Progress(request.sampling.n)
        self._side = PromptSide(router, self._pools, self._legs, self.progress)
        self._search = SlotSearch(
            router, self._pools, self._legs, self._prompt, self._side, self.progress
        )
        self._lending = Lending(router, self._pools, request, self._prompt.new_epoch)
        self._hand_over = HandOver(
            router, self._legs, self.progress, self._lending, self._heir_waiter,
            max_attempts=router.config.max_attempts,
        )  # fmt: skip
        self.is_over = False

    def __repr__(self) -> str:
        return f"Run({self._request.request_id}, {self._legs!r})"

    # --- steps of `tell` --------------------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt has been computed and the client has tokens."""
        return self.progress.has_tokens

    @property
    def is_early(self) -> bool:
        """Whether the prompt should be asked for before the slot."""
        if self.has_tokens or self._prompt.is_under_way or not self._pools.may_decode:
            return False
        is_early = self._router.moments is not None or self._router.config.order == "prefill_first"
        return is_early and self._side.is_remote

    def continue_after(self, token_ids: Sequence[int]) -> None:
        """Begin after the output that another router has had for the same request."""
        request = self._request
        output = TokenOutput(request.request_id, 0, list(token_ids))
        self._note(output)
        self._grow()

    async def enter(self) -> None:
        """Wait for admission, where it is configured.

        Raises:
            ServingError: See `AdmissionWaits.enter`; or it has more choices than any engine's DP
                group has decode slots.
        """
        self._check_choices()
        if self._router.admission is not None:
            let_in = await self._router.admission.enter(self._legs.demand)
            self._legs.on_prompt = let_in.asked
            self._side.let_in = let_in

    def _check_choices(self) -> None:
        num_choices = self._request.sampling.n
        engines = self._pools.decode_views().engines if num_choices > 1 else ()
        members = filter(None, map(self._pools.member, engines))
        most = max((m.description.slots_per_group for m in members), default=num_choices)
        if num_choices > most:
            raise BadRequestError(
                f"n is {num_choices}, and no replica runs more than {most} choices of a request; "
                f"ask for at most {most} at once",
                param="n",
            )

    def check_open(self) -> None:
        """Raise, before any work is done, if the slot queue would refuse the request.

        Raises:
            ServingError: See `SlotQueue.check_open`.
        """
        self._router.queue.check_open()

    def ask_for_prompt(self) -> None:
        """Ask a prefill engine for the prompt, for any decode engine."""
        self._prompt.ask("")

    async def reserve(self) -> Leg | None:
        """Reserve a decode slot; its engine computes the prompt if no prefill engine was asked.

        A prefill engine has been asked by the time this returns: neither answer waits for the
        other.

        Returns:
            The leg that has the slot; None if the first tokens came before and completed the
            request.

        Raises:
            ServingError: No slot can be had.
        """
        taken = self._hand_over.take()
        if taken is None:
            return await self._search.slot(self)
        heir, its_place, accepted = taken
        self._search.has_slot(its_place, accepted)
        return heir

    def _heir_waiter(self) -> Waiter:
        """Return a place in the slot queue for the engine that takes the stream over."""
        self._grow()
        return self._search.new_waiter(has_stream=True)

    async def prefill(self, consumer: Leg | None) -> list[TokenOutput]:
        """Have the prompt computed by the prefill pool; see `Prompt.tokens`."""
        outputs = await self._prompt.tokens(consumer)
        for output in outputs:
            self._note(output)
        return outputs

    def activate(self, decode: Leg) -> None:
        """Let a reservation continue after the tokens so far, with the KV if prefill offers it.

        An engine without KV, or whose transfer is over, computes the prompt itself.
        """
        is_needed = decode.mode == "decode" and decode.state is not LegState.ACTIVATED
        if not is_needed or self.is_over:
            return
        offer = self._legs.prefill.offer if self._legs.prefill is not None else None
        if offer is not None:
            ticket = self._router.tickets.seal(offer, decode.incarnation)
            decode.load(ticket, offer.epoch)
        tokens = self.progress.tokens if self.has_tokens else []
        decode.activate(tokens, self.progress.ended)

    async def start(self, decode: Leg, first: Sequence[TokenOutput]) -> None:
        """Pass on the first tokens and `activate`, without waiting for a client that is slow."""
        activating = asyncio.get_running_loop().call_soon(self.activate, decode)
        try:
            await self.deliver(first)
        finally:
            activating.cancel()
        if decode.state is LegState.OPEN:
            self.activate(decode)

    async def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Pass the first tokens on to the client."""
        for output in outputs:
            await self._pass_on(output)

    async def _pass_on(self, output: TokenOutput) -> None:
        """Pass an output on to the client; end its choice if no more of it is wanted."""
        if await self._emit(output) or not self.progress.end(output.choice):
            return
        self.is_over = self.progress.is_finished
        decode = self._legs.decode
        # A reserved engine learns it from its activation.
        if not self.is_over and decode is not None and decode.has_tokens:
            decode.stop_choice(output.choice)

    async def follow(self, decode: Leg) -> None:
        """Pass on the decode engine's outputs to the end.

        The prefill leg is released as soon as the KV has arrived.

        Raises:
            DecodeLostError: The decode engine died.
            DecodeLeftError: Another engine takes over, as this one stalls, drains or is silent.
            ServingError: The engine reports that the request failed.
        """
        while not self.is_over:
            event = await self._legs.next_of(decode)
            if isinstance(event, TokenOutput):
                self._heard()
                self._hand_over.spoke()
                if self._note(event):
                    # A successor may never fetch the KV that this engine keeps for it: abort to
                    # release it.
                    self._legs.drop_decode(abort=self._lending.is_under_way)
                await self._pass_on(event)
            elif isinstance(event, KVLoaded):
                self._hand_over.hear_of_kv(event)
                if event.epoch != self._prompt.epoch:
                    continue
                self._legs.drop_prefill(abort=event.failure is not None)
                if event.failure is not None:
                    self._router.metrics.retries.labels("kv_" + event.failure).inc()

    async def survives(self) -> bool:
        """Run `tell` once; return False if another decode engine has to take over.

        Raises:
            ServingError: The request cannot run, or failed midway.
        """
        try:
            await tell(self)
        except DecodeLeftError as error:
            self._leave_decode(error.reason, error)
            return False
        except DecodeLostError as error:
            self._leave_decode("lost", error)
            self._legs.check_lost(self._router.config.max_attempts)
            return False
        except ReservationEndedError as error:
            await self._end_unfinished(error.reason)
        except ServingError as error:
            seam = self.progress.seam
            if seam is None or self._legs.decode is not None:
                raise
            raise _not_continued(seam, error) from error
        return True

    async def _end_unfinished(self, reason: FinishReason) -> None:
        """Pass on the end of each choice that has none, after the tokens that the client has.

        The request has not finished normally: `close` aborts it, and learns nothing from it.
        """
        request_id = self._request.request_id
        for choice, tokens in enumerate(self.progress.tokens):
            if choice not in self.progress.ended:
                await self._emit(TokenOutput(request_id, len(tokens), [], reason, choice=choice))

    def _leave_decode(self, reason: str, error: Exception) -> None:
        """Drop the decode engine, and a transfer that only it could fetch."""
        decode = self._legs.decode
        assert decode is not None, "there is a decode leg to leave"
        kv = self._lending.kv
        if not self._hand_over.is_accepted:
            self._hand_over.stop()
        self._search.leave(decode)
        if not decode.has_tokens:
            self._router.metrics.retries.labels(f"decode_{reason}").inc()
            return
        self.progress.break_off(reason, str(error), kv)
        self._grow()

    def _grow(self) -> None:
        """Extend the demand by the output so far, which the next engine has to compute too."""
        demand = self._legs.demand
        self._legs.demand = demand.with_output(self._request, self.progress.longest)

    def parts(self) -> Iterator[Part]:
        """Yield what engines currently do for this request."""
        for leg in (self._legs.prefill, self._legs.decode, self._legs.heir):
            if leg is not None:
                demand = self._legs.demand
                yield Part(demand, leg.incarnation, leg.mode, leg.state.value, leg.asked_s)

    def close(self) -> None:
        """Abort what is still open and release every hold. Idempotent."""
        self._hand_over.stop()
        self._legs.drop_decode(abort=True, reason="stop" if self.is_over else "abort")
        self._prompt.stop()
        self._side.over()
        if self.is_over:
            self._search.over()
        if self._side.let_in is not None:
            # A migrated stream says nothing about how fast engines are.
            is_usual = self.is_over and not self._search.has_left
            self._side.let_in.end(len(self.progress.tokens[0]) if is_usual else 0)
        self._router.prefixes.end(self._legs.demand)

    def _heard(self) -> None:
        """Record that the decode engine has given tokens; count a migration that this completes."""
        now_s = self._route.last_s = asyncio.get_running_loop().time()
        seam = self.progress.heard(now_s)
        if seam is not None:
            self._router.metrics.migrated(seam.reason, seam.kv, now_s - seam.heard_s)

    def _note(self, output: TokenOutput) -> bool:
        """Record an output; return whether it completed the request."""
        if output.token_ids and not self.has_tokens:
            num_prompt_tokens = len(self._request.prompt_token_ids)
            self._router.traffic.begin(num_prompt_tokens, output.num_cached_tokens)
            self._side.over()
            self._prompt.began()
            self._route.began(output.num_cached_tokens, asyncio.get_running_loop().time())
        self.progress.note(output)
        if self._side.let_in is not None:
            self._side.let_in.saw_token()
        self.is_over = self.progress.is_finished
        return self.is_over


def _not_continued(seam: Seam, error: ServingError) -> ServingError:
    """Return the error for a stream that was interrupted and that no engine could continue."""
    return ReplicaLostError(
        f"the decode replica was lost mid-request ({seam.why}) and no other could continue it: "
        f"{error}",
        retry_after_s=RETRY_AFTER_S,
    )
