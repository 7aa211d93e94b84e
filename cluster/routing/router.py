"""Router: which engines run a request, in which order, and what happens when one is lost.

Owner: one ingress's event loop. A story tells what happens to a request, and reads from top to
bottom: `tell`, made of the words of `Run`. What `router.order` decides is when the slot is asked
for: with the prompt (`decode_first`: no finished prefill waits for a decoder), after its first
token (`prefill_first`: no slot waits for a prefill), or in between, when it is due (`predicted`).

A prefill engine that refuses, dies or stalls before the first token costs another ticket, at last a
local prefill on the decode engine; one that dies later costs the decode engine the prompt. A decode
engine that dies, or is left because it stalls, costs a new reservation: the story begins again,
what the client has stays, and another engine goes on from there (the request *migrates*, if it had
tokens of the one that was left). Losses of either kind count against `max_attempts`, as engines may
die of a request; stalls do not: they have as many of their own, less one, and the last engine is
waited for. The prompt's KV stays only if it was
offered to whichever decode engine comes and none has begun to fetch it: the end of a consumer ends
its transfer, and the next decode engine computes prompt and tokens again, or ends the request where
its configuration forbids that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from cluster.errors import ReplicaLostError, ServingError
from cluster.routing.admission import Admission
from cluster.routing.admission_waits import AdmissionWaits
from cluster.routing.conditional_prefill import ConditionalPrefill
from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.explain import Routes
from cluster.routing.forecast import Lengths
from cluster.routing.hand_over import HandOver
from cluster.routing.leg import DecodeLeftError, DecodeLostError, Leg, Legs, LegState
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
    from replicas.messages import EngineRequest, RequestMode

    Emit = Callable[[TokenOutput], Awaitable[bool]]
    """Takes an output; says whether more is wanted: not once stop strings ended all choices."""


class Part(NamedTuple):
    """What one engine does for one request; times on the event loop's clock."""

    demand: Demand
    incarnation: str
    mode: RequestMode
    state: str
    asked_s: float


class Router:
    """Places requests and runs them; see the module docstring.

    Args:
        fleet: The engines of this ingress.
        config: Bounds and thresholds.
        metrics: Counts what is decided.
        tickets: Seals what lets a decode engine fetch from a prefill engine.
        seed: Of what its policies draw.

    Attributes:
        traffic: What was asked so far.
        lengths: Of prompts and answers, of late.
        routes: Where requests went, and why.
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
            # Whoever is let in has nearly nobody before its prompt.
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
        """Call when a slot may be free: whoever waits for one goes first."""
        self.waits.capacity_changed()
        self.stalls.capacity_changed()
        if self.admission is not None:
            self.admission.capacity_changed()

    async def run(self, request: EngineRequest, emit: Emit) -> None:
        """Run a request; its outputs go to `emit` in order, each choice's last with its reason.

        When it ends early, cancelled or because no more is wanted, the request is aborted
        wherever it is.

        Raises:
            ServingError: It cannot run, or stopped midway.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        with self.routes.follow(request.request_id, num_prompt_tokens) as route:
            run = Run(self, request, emit, route)
            self.traffic.come(num_prompt_tokens)
            self.lengths.prompts.add(num_prompt_tokens)
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
        """What engines do now for the requests of this ingress."""
        return [part for run in self._runs for part in run.parts()]


async def tell(run: Run) -> None:
    """Slot, prompt, first token, the rest: nothing is computed for whoever sees no free slot.

    The prompt is asked for together with the slot; an engine that refuses it costs a prompt that
    was begun for nothing, where the views were behind. Where the slot would wait too long, the
    prompt is asked for before, and its first token may come before the slot: then its KV waits with
    prefill, the client does not.
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
    """One request on its way through the engines: its legs, and what its client has.

    Owner: the coroutine of the request. A decode leg of mode "decode" waits to be activated, once.

    Args:
        router: What this ingress places requests with.
        request: What to run.
        emit: Gets its outputs.
        route: Keeps what came true of its placements.

    Attributes:
        progress: What the client has, or gets next.
        is_over: Whether there is nothing left to do.
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

    # --- the words of the stories --------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt has been computed, and the client has something."""
        return self.progress.has_tokens

    @property
    def is_early(self) -> bool:
        """Whether the prompt is to be asked for before the slot."""
        if self.has_tokens or self._prompt.is_under_way or not self._pools.may_decode:
            return False
        is_early = self._router.moments is not None or self._router.config.order == "prefill_first"
        return is_early and self._side.is_remote

    async def enter(self) -> None:
        """Wait to be let in, where there is somebody who decides that.

        Raises:
            ServingError: See `AdmissionWaits.enter`.
        """
        if self._router.admission is not None:
            let_in = await self._router.admission.enter(self._legs.demand)
            self._legs.on_prompt = let_in.asked
            self._side.let_in = let_in

    def check_open(self) -> None:
        """Raise, before any work is done, if there will be no decode slot.

        Raises:
            ServingError: See `SlotQueue.check_open`.
        """
        self._router.queue.check_open()

    def ask_for_prompt(self) -> None:
        """Ask for the prompt, whichever decode engine comes."""
        self._prompt.ask("")

    async def reserve(self) -> Leg | None:
        """Get a decode slot; its engine computes the prompt at once if nobody else will.

        Whoever else will has been asked when it returns: nobody's answer waits for another's.

        Returns:
            The slot's leg; None if the prompt has come before, and that was all.

        Raises:
            ServingError: There is none to be had.
        """
        taken = self._hand_over.take()
        if taken is None:
            return await self._search.slot(self)
        heir, its_place, accepted = taken
        self._search.has_slot(its_place, accepted)
        return heir

    def _heir_waiter(self) -> Waiter:
        """The place in the slot queue of whoever goes on with it while it still runs."""
        self._grow()
        return self._search.new_waiter(has_stream=True)

    async def prefill(self, consumer: Leg | None) -> list[TokenOutput]:
        """Have the prompt computed by the prefill pool; see `Prompt.tokens`."""
        outputs = await self._prompt.tokens(consumer)
        for output in outputs:
            self._note(output)
        return outputs

    def activate(self, decode: Leg) -> None:
        """Let a reservation go on from the tokens so far, with the KV if prefill offers it.

        An engine that gets no KV, or finds that the transfer is over, computes the prompt itself.
        """
        is_needed = decode.mode == "decode" and decode.state is not LegState.ACTIVATED
        if not is_needed or self.is_over:
            return
        offer = self._legs.prefill.offer if self._legs.prefill is not None else None
        if offer is not None:
            ticket = self._router.tickets.seal(offer, decode.incarnation)
            decode.load(ticket, offer.epoch)
        decode.activate(self.progress.tokens if self.has_tokens else [])

    async def start(self, decode: Leg, first: Sequence[TokenOutput]) -> None:
        """Pass on what prefill gave, then `activate`: at once for a client that does not read."""
        activating = asyncio.get_running_loop().call_soon(self.activate, decode)
        try:
            await self.deliver(first)
        finally:
            activating.cancel()
        if decode.state is LegState.OPEN:
            self.activate(decode)

    async def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Pass on what prefill gave."""
        for output in outputs:
            if not await self._emit(output):
                self.is_over = True

    async def follow(self, decode: Leg) -> None:
        """Pass on the decode engine's outputs to the end; meanwhile let go of the prefill side.

        Raises:
            DecodeLostError: The decode engine died.
            DecodeLeftError: It stalls, and there is another one; or it hands over or is quiet, and
                another one goes on.
            ServingError: It says that the request failed.
        """
        while not self.is_over:
            event = await self._legs.next_of(decode)
            if isinstance(event, TokenOutput):
                self._heard()
                self._hand_over.spoke()
                if self._note(event):
                    # What it lends to an heir is to be taken back: it may never be fetched.
                    self._legs.drop_decode(abort=self._lending.is_under_way)
                if not await self._emit(event):
                    self.is_over = True
            elif isinstance(event, KVLoaded):
                self._hand_over.hear_of_kv(event)
                if event.epoch != self._prompt.epoch:
                    continue
                self._legs.drop_prefill(abort=event.failure is not None)
                if event.failure is not None:
                    self._router.metrics.retries.labels("kv_" + event.failure).inc()

    async def survives(self) -> bool:
        """Live its story to the end; False if another decode engine has to take over.

        Raises:
            ServingError: The request cannot run, or stopped midway.
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
        except ServingError as error:
            seam = self.progress.seam
            if seam is None or self._legs.decode is not None:
                raise
            raise _nobody_goes_on(seam, error) from error
        return True

    def _leave_decode(self, reason: str, error: Exception) -> None:
        """Drop the decode engine, and the transfer that only it could fetch."""
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
        """Whoever goes on with it computes its output too."""
        demand = self._legs.demand
        self._legs.demand = demand.with_output(self._request, self.progress.longest)

    def parts(self) -> Iterator[Part]:
        """What engines do for it now."""
        for leg in (self._legs.prefill, self._legs.decode, self._legs.heir):
            if leg is not None:
                demand = self._legs.demand
                yield Part(demand, leg.incarnation, leg.mode, leg.state.value, leg.asked_s)

    def close(self) -> None:
        """Abort what is still open, drop every hold, and be under way no more. Idempotent."""
        self._hand_over.stop()
        self._legs.drop_decode(abort=True, reason="stop" if self.is_over else "abort")
        self._prompt.stop()
        self._side.over()
        if self.is_over:
            self._search.over()
        if self._side.let_in is not None:
            # What another engine went on with says nothing of how fast they are.
            is_usual = self.is_over and not self._search.has_left
            self._side.let_in.end(len(self.progress.tokens[0]) if is_usual else 0)
        self._router.prefixes.end(self._legs.demand)

    def _heard(self) -> None:
        """The decode engine has given tokens; of one that goes on with a stream, the first."""
        now_s = self._route.last_s = asyncio.get_running_loop().time()
        seam = self.progress.heard(now_s)
        if seam is not None:
            self._router.metrics.migrated(seam.reason, seam.kv, now_s - seam.heard_s)

    def _note(self, output: TokenOutput) -> bool:
        """Keep what the client gets; says whether that was all."""
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


def _nobody_goes_on(seam: Seam, error: ServingError) -> ServingError:
    """What a stream ends with that broke off."""
    return ReplicaLostError(
        f"the decode replica was lost mid-request ({seam.why}) and no other could continue it: "
        f"{error}",
        retry_after_s=RETRY_AFTER_S,
    )
