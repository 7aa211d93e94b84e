"""Router: which engines run a request, in which order, and what happens when one is lost.

Owner: one ingress's event loop. Two stories tell what happens to a disaggregated request, and read
from top to bottom: `decode_first`, in which a finished prefill never waits for a decoder, and
`prefill_first`, in which no decode slot waits for a prefill. Both are made of the words of `Run`.

A prefill engine that refuses, dies or stalls before the first token costs another ticket, at last a
local prefill on the decode engine; one that dies later costs the decode engine the prompt. A decode
engine that dies, or is left because it stalls, costs a new reservation as long as it has generated
nothing: the story begins again, and what the client has stays. Losses count against
`max_attempts`, stalls do not: they have as many of their own, less one, and the last engine is
waited for. Its KV stays only if it was offered to whichever decode
engine comes and none has begun to fetch it: the end of a consumer ends its transfer, and the next
decode engine computes the prompt again, or ends the request where its configuration forbids that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.errors import (
    BadRequestError,
    ReplicaLostError,
    SaturatedError,
)
from cluster.routing.demand import Demand
from cluster.routing.leg import DecodeLostError, DecodeStalledError, Leg, Legs, LegState
from cluster.routing.placement import make_policies
from cluster.routing.prompt import Prompt
from cluster.routing.slot_queue import RETRY_AFTER_S, SlotQueue
from cluster.routing.slot_waits import SlotWaits
from cluster.routing.stalls import Stalls
from replicas.errors import EngineDeadError
from replicas.messages import (
    Accepted,
    AddRequest,
    KVLoaded,
    Refused,
    TokenOutput,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cluster.config.schema import RouterConfig
    from cluster.routing.fleet import Connections, Fleet
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.placement import Placement
    from cluster.routing.tickets import TicketOffice
    from replicas.messages import EngineRequest, RequestMode

    Emit = Callable[[TokenOutput], Awaitable[bool]]
    """Takes an output; says whether more is wanted: not once stop strings ended all choices."""
    Story = Callable[["Run"], Awaitable[None]]

_NO_ROOM = frozenset({"no_slot", "no_blocks", "queue_full"})
"""Refusals that mean that somebody else was faster: the request waits on, where it stood."""


class Router:
    """Places requests and runs them; see the module docstring.

    Args:
        fleet: The engines of this ingress.
        config: Bounds and thresholds.
        metrics: Counts what is decided.
        tickets: Seals what lets a decode engine fetch from a prefill engine.
    """

    def __init__(
        self,
        fleet: Fleet[Connections],
        config: RouterConfig,
        metrics: RouterMetrics,
        tickets: TicketOffice,
    ) -> None:
        self.fleet = fleet
        self.config = config
        self.metrics = metrics
        self.tickets = tickets
        self.policies = make_policies(config.policy)
        self.queue = SlotQueue(
            fleet.pools, self.policies.decode, config.max_queued_requests, config.queue_timeout_s
        )
        self.waits = SlotWaits(self.queue, fleet.pools)
        self.stalls = Stalls(self.queue)
        fleet.on_change = self.capacity_changed

    def capacity_changed(self) -> None:
        """Call when a slot may be free: whoever waits for one goes first."""
        self.waits.capacity_changed()
        self.stalls.capacity_changed()

    async def run(self, request: EngineRequest, emit: Emit) -> None:
        """Run a request; its outputs go to `emit` in order, each choice's last with its reason.

        When it ends early, cancelled or because no more is wanted, the request is aborted
        wherever it is.

        Raises:
            ServingError: It cannot run, or stopped midway.
        """
        run = Run(self, request, emit)
        story = prefill_first if self.config.order == "prefill_first" else decode_first
        try:
            while run.num_lost < self.config.max_attempts:
                if await run.survives(story):
                    return
            raise ReplicaLostError(
                f"{self.config.max_attempts} decode replicas were lost one after the other",
                retry_after_s=RETRY_AFTER_S,
            )
        finally:
            run.close()
            self.capacity_changed()


async def decode_first(run: Run) -> None:
    """Slot, prompt, first token, the rest: nothing is computed for whoever sees no free slot.

    The prompt is asked for together with the slot; an engine that refuses it costs a prompt that
    was begun for nothing, where the views were behind.
    """
    decode = await run.reserve()
    first = await run.prefill(decode) if decode.mode == "decode" and not run.has_tokens else []
    await run.start(decode, first)
    await run.follow(decode)


async def prefill_first(run: Run) -> None:
    """Prompt, first token, slot, the rest: the KV waits with prefill, the client does not."""
    if run.is_remote and not run.has_tokens:
        run.check_open()
        await run.deliver(await run.prefill(None))
    if not run.is_over:
        decode = await run.reserve()
        run.activate(decode)
        await run.follow(decode)


class Run:
    """One request on its way through the engines: its legs, and what its client has.

    Owner: the coroutine of the request. A decode leg of mode "decode" waits to be activated, once.

    Args:
        router: What this ingress places requests with.
        request: What to run.
        emit: Gets its outputs.

    Attributes:
        tokens: For each choice, the tokens that the client has, or gets next: with them another
            engine can go on from where a lost one was.
        is_over: Whether there is nothing left to do.
        num_lost: Decode engines that were lost; those that were left because they stall are none.
    """

    def __init__(self, router: Router, request: EngineRequest, emit: Emit) -> None:
        self._router = router
        self._pools = router.fleet.pools
        self._request = request
        self._emit = emit
        self._demand = Demand.of(request, asyncio.get_running_loop().time())
        self._legs = Legs(
            router.fleet.client,
            router.fleet.pools,
            router.metrics,
            router.stalls,
            self._demand,
            max_leaves=router.config.max_attempts - 1,
        )
        self._prompt = Prompt(router, self._pools, request, self._demand, self._legs)
        self._num_unfinished = request.sampling.n
        # Decode engines that gave no token: the last resort of the next reservation.
        self._left: set[str] = set()
        self.tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.is_over = False
        self.num_lost = 0

    def __repr__(self) -> str:
        return f"Run({self._request.request_id}, {self._legs!r})"

    # --- the words of the stories --------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt has been computed, and the client has something."""
        return any(self.tokens)

    @property
    def is_remote(self) -> bool:
        """Whether a prefill engine takes prompts, and this one is long enough to move."""
        is_long = self._demand.num_prompt_tokens >= self._router.config.min_remote_prefill_tokens
        return is_long and self._pools.can_prefill

    def check_open(self) -> None:
        """Raise, before any work is done, if there will be no decode slot.

        Raises:
            ServingError: See `SlotQueue.check_open`.
        """
        self._router.queue.check_open()

    async def reserve(self) -> Leg:
        """Get a decode slot; its engine computes the prompt at once if nobody else will.

        Whoever else will has been asked when it returns: nobody's answer waits for another's.

        Raises:
            ServingError: There is none to be had.
        """
        now_s = asyncio.get_running_loop().time
        started_s = now_s()
        waiter = self._router.queue.new_waiter(self._demand, is_promised=self.has_tokens)
        views = self._pools.decode_views()
        waiter.refused |= {view.placement for view in views if view.incarnation in self._left}
        num_failures = 0
        while True:
            placement = await self._router.waits.wait(waiter)
            answer = await self._ask_to_decode(placement)
            if isinstance(answer, Leg):
                self._router.metrics.queue_time.observe(now_s() - started_s)
                return answer
            self._router.queue.refuse(waiter, placement)
            if isinstance(answer, Refused):
                self._router.metrics.refusals.labels(answer.reason).inc()
                if answer.reason == "invalid":
                    raise BadRequestError(answer.message, param="prompt")
                if answer.reason in _NO_ROOM:
                    continue
            if isinstance(answer, DecodeStalledError):
                continue
            num_failures += 1
            if num_failures < self._router.config.max_attempts:
                continue
            kind, why = (
                (SaturatedError, answer.message)
                if isinstance(answer, Refused)
                else (ReplicaLostError, answer)
            )
            raise kind(
                f"{num_failures} placements were refused or lost; the last: {why}",
                retry_after_s=RETRY_AFTER_S,
            )

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
        if decode.mode != "decode" or self.is_over:
            return
        offer = self._legs.prefill.offer if self._legs.prefill is not None else None
        if offer is not None:
            ticket = self._router.tickets.seal(offer, decode.incarnation)
            decode.load(ticket, offer.epoch)
        decode.activate(self.tokens if self.has_tokens else [])

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
            DecodeStalledError: It stalls before its first token, and there is another one.
            ServingError: It says that the request failed.
        """
        while not self.is_over:
            event = await self._legs.next_of(decode)
            if isinstance(event, TokenOutput):
                if self._note(event):
                    self._legs.drop_decode(abort=False)
                if not await self._emit(event):
                    return
            elif isinstance(event, KVLoaded) and event.epoch == self._prompt.epoch:
                self._legs.drop_prefill(abort=event.failure is not None)
                if event.failure is not None:
                    self._router.metrics.retries.labels("kv_" + event.failure).inc()

    async def survives(self, story: Story) -> bool:
        """Live a story to its end; False if another decode engine has to take over.

        Raises:
            ServingError: The request cannot run, or stopped midway.
        """
        try:
            await story(self)
        except DecodeStalledError:
            self._leave_decode()
            self._router.metrics.retries.labels("decode_stalled").inc()
            return False
        except DecodeLostError as error:
            self.num_lost += 1
            if self._leave_decode().has_tokens:
                raise ReplicaLostError(
                    f"the decode replica was lost mid-request: {error}"
                ) from None
            self._router.metrics.retries.labels("decode_lost").inc()
            return False
        return True

    def _leave_decode(self) -> Leg:
        """Drop the decode engine, and the transfer that only it could fetch."""
        decode = self._legs.decode
        assert decode is not None, "only an engine that was asked can be left"
        self._left.add(decode.incarnation)
        self._drop_decode(abort=True)
        return decode

    def _drop_decode(self, *, abort: bool) -> None:
        """Let go of the decode leg, and of a prompt whose KV only its engine may fetch."""
        self._legs.drop_decode(abort=abort)
        self._prompt.drop()

    def close(self) -> None:
        """Abort what is still open and drop every hold. Idempotent."""
        self._legs.drop_decode(abort=True)
        self._legs.drop_prefill(abort=True)

    # --- questions to engines ------------------------------------------------------------------

    async def _ask_to_decode(self, placement: Placement) -> Leg | Refused | Exception:
        """Send the request to a decode engine, and wait for its answer: or why there is none.

        A prompt that it leaves to others is asked for meanwhile.
        """
        mode = self._mode(placement)
        if mode == "decode" and not self.has_tokens:
            # First: the client waits for the prompt.
            self._prompt.ask(placement.incarnation)
        try:
            message = AddRequest(self._request, mode, placement.dp_group)
            leg = self._legs.ask_to_decode(placement, message)
            answer = await self._answer(leg)
        except (EngineDeadError, DecodeLostError, DecodeStalledError) as error:
            if not isinstance(error, EngineDeadError):  # the others took their time
                self._prompt.passes_over_unheard()
            # It may still live, and get on some time.
            self._drop_decode(abort=True)
            return error
        if isinstance(answer, Refused):
            # Nobody else is placed there before this request stands in the queue again.
            self._drop_decode(abort=False)
            return answer
        leg.answered()
        self._router.capacity_changed()
        return leg

    def _mode(self, placement: Placement) -> RequestMode:
        """Whether a decode engine waits to be activated or computes the prompt at once."""
        if self.has_tokens:
            return "decode"
        snapshot = self._pools.snapshot(placement.incarnation)
        is_decode = snapshot is not None and snapshot.role == "decode"
        # In the other order prefill engines have been asked, and gave nothing.
        is_first = self._router.config.order == "decode_first"
        return "decode" if is_decode and is_first and self.is_remote else "local"

    async def _answer(self, leg: Leg) -> Accepted | Refused:
        while True:
            event = await self._legs.next_of(leg)
            if isinstance(event, Accepted | Refused):
                return event

    # --- events --------------------------------------------------------------------------------

    def _note(self, output: TokenOutput) -> bool:
        """Keep what the client gets; says whether that was all."""
        tokens = self.tokens[output.choice]
        assert output.index <= len(tokens), f"tokens before index {output.index} are missing"
        tokens += output.token_ids[len(tokens) - output.index :]
        if output.finish_reason is not None:
            self._num_unfinished -= 1
            self.is_over = not self._num_unfinished
        return self.is_over
