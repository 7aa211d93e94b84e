"""Finds the decode slot of one request: waits for a place and asks its engine.

Owner: the request's `Run`; of the time of its first slot. The prompt may be under way meanwhile. If
its first token comes before the slot does, the client gets it. If an engine refuses because its
room was taken meanwhile, this costs no attempt: the request returns to its place in the queue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import BadRequestError, ReplicaLostError, SaturatedError, ServingError
from cluster.routing.leg import DecodeLeftError, DecodeLostError, Leg
from cluster.routing.slot_queue import RETRY_AFTER_S
from cluster.routing.standing import Standing
from replicas.errors import EngineDeadError
from replicas.messages import AddRequest, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config.schema import RouterConfig
    from cluster.routing.leg import Legs
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.prefixes import Prefixes
    from cluster.routing.progress import Progress
    from cluster.routing.prompt import Prompt
    from cluster.routing.prompt_side import PromptSide
    from cluster.routing.slot_moments import SlotMoments
    from cluster.routing.slot_queue import SlotQueue, Waiter
    from cluster.routing.slot_waits import SlotWaits
    from replicas.messages import Accepted, TokenOutput

_NO_ROOM = frozenset({"no_slot", "no_blocks", "queue_full", "draining"})
"""Refusals that mean that the room was taken meanwhile.

An engine that drains refuses only once: later requests are not sent there.
"""


class SlotSearchContext(Protocol):
    """The parts of the router that a `SlotSearch` uses."""

    config: RouterConfig
    metrics: RouterMetrics
    moments: SlotMoments | None
    prefixes: Prefixes
    queue: SlotQueue
    waits: SlotWaits

    def capacity_changed(self) -> None:
        """Wake waiting requests; see `Router.capacity_changed`."""


class Story(Protocol):
    """The steps of a request that a `SlotSearch` may take before there is a slot."""

    is_over: bool

    async def prefill(self, consumer: Leg | None) -> list[TokenOutput]:
        """Have the prompt computed; see `Run.prefill`."""

    async def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Pass first tokens on to the client; see `Run.deliver`."""


class SlotSearch:
    """The search for one request's decode slot.

    Args:
        context: Parts of the router.
        pools: The engines.
        legs: The request's legs, and its demand.
        prompt: Asked for together with the slot at the latest.
        side: Decides which engine computes the prompt.
        progress: Outputs that the client has.
    """

    def __init__(
        self,
        context: SlotSearchContext,
        pools: PoolState,
        legs: Legs,
        prompt: Prompt,
        side: PromptSide,
        progress: Progress,
    ) -> None:
        self._context = context
        self._legs = legs
        self._prompt = prompt
        self._side = side
        self._progress = progress
        self._standing = Standing(context.queue, pools)
        self._slot_s: float | None = None

    def __repr__(self) -> str:
        return f"SlotSearch({self._legs.demand.request_id}, left={self._standing.left})"

    @property
    def has_left(self) -> bool:
        """Whether a decode engine of the request was lost or left."""
        return bool(self._standing.left)

    def new_waiter(self, *, has_stream: bool = False) -> Waiter:
        """Return the request's place in the slot queue; later calls return to the same place."""
        spared = self._side.look()
        is_under_way = self._prompt.is_under_way
        return self._standing.new_waiter(
            self._legs.demand,
            spared,
            is_promised=self._progress.has_tokens or is_under_way,
            has_stream=has_stream,
            is_due=not is_under_way or self._context.moments is None,
        )

    async def slot(self, story: Story) -> Leg | None:
        """Reserve a slot and ask for the prompt; see `Run.reserve`."""
        now_s = asyncio.get_running_loop().time
        waiter = self.new_waiter()
        num_failures = 0
        while True:
            placement = await self._wait_for_place(waiter, story)
            if placement is None:
                return None
            if self._side.let_in is not None:
                self._side.let_in.placed()
            answer = await self._ask(placement)
            if isinstance(answer, Leg):
                if not self.has_left:  # A migrating request was counted at its first slot.
                    self._context.metrics.queue_time.observe(now_s() - waiter.due_s)
                return answer
            self._context.queue.refuse(waiter, placement)
            if not _costs_nothing(self._context, answer, waiter):
                num_failures += 1
                if num_failures == self._context.config.max_attempts:
                    raise _no_place(num_failures, answer)

    def has_slot(self, placement: Placement, answer: Accepted) -> None:
        """Record that a decode engine has reserved a slot."""
        dp_group = answer.dp_group if answer.dp_group >= 0 else placement.dp_group
        now_s = asyncio.get_running_loop().time()
        self._slot_s = self._slot_s or now_s
        self._context.prefixes.note_routed(
            self._legs.demand, placement._replace(dp_group=dp_group), now_s
        )
        self._context.capacity_changed()

    def leave(self, decode: Leg) -> None:
        """Drop a decode engine that was lost or is left; it is a last resort of the next search."""
        self._standing.left.add(decode.incarnation)
        self._side.is_refused = False
        self._drop_decode()

    def over(self) -> None:
        """Learn how long the slot was held, as the request has finished normally."""
        if self._context.moments is not None and self._slot_s is not None:
            held_s = asyncio.get_running_loop().time() - self._slot_s
            self._context.moments.saw_slot(held_s, len(self._progress.longest))

    async def _wait_for_place(self, waiter: Waiter, story: Story) -> Placement | None:
        """Wait for a place, and deliver the prompt's tokens if they come first.

        Returns:
            The place; None if these tokens completed the request.
        """
        waits = self._context.waits
        if not self._prompt.is_under_way:
            return await waits.wait(waiter)
        if self._context.moments is None:
            await self._give_prompt(await story.prefill(None), story)
            return None if story.is_over else await waits.wait(waiter)
        place = waits.enter(waiter)
        try:
            if not place.done():
                await self._compute_until(place, waiter, story)
                if story.is_over:
                    return None
            return waits.take(waiter, await place)
        finally:
            waits.leave(waiter)

    async def _compute_until(
        self, place: asyncio.Future[Placement], waiter: Waiter, story: Story
    ) -> None:
        """Wait for the prompt until there is a place; deliver its tokens if they come first."""
        computing = asyncio.ensure_future(story.prefill(None))
        try:
            both: set[asyncio.Future[Any]] = {place, computing}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if computing.done():
                await self._give_prompt(computing.result(), story)
                self._context.waits.hurry(waiter)
        finally:
            # Later events of prefill are read by the wait for the slot's answer.
            computing.cancel()
            await asyncio.wait({computing})

    async def _give_prompt(self, outputs: list[TokenOutput], story: Story) -> None:
        """Deliver prefill's tokens; without any, the decode engine has to compute the prompt."""
        self._side.is_refused = not outputs
        await story.deliver(outputs)

    async def _ask(self, placement: Placement) -> Leg | Refused | Exception:
        """Ask a decode engine and return the leg that it accepted, or the reason why not.

        Unless its engine computes the prompt itself, the prompt is asked for meanwhile.
        """
        mode = self._side.mode_at(placement)
        if mode == "local":
            self._prompt.stop()
        elif not self._progress.has_tokens and not self._prompt.is_under_way:
            # Ask for the prompt before the slot: the client waits for it.
            self._prompt.ask(placement.incarnation)
        try:
            message = AddRequest(self._prompt.request, mode, placement.dp_group)
            leg = self._legs.ask_to_decode(placement, message)
            self._side.asked(placement, mode)
            answer = await self._legs.answer_of(leg)
        except (EngineDeadError, DecodeLostError, DecodeLeftError) as error:
            if not isinstance(error, EngineDeadError):  # Other errors mean that time has passed.
                self._prompt.passes_over_unheard()
            # The engine may still be alive: abort the request there.
            self._drop_decode()
            return error
        if isinstance(answer, Refused):
            # The refusal may answer an earlier question, and the engine may still accept this one.
            self._drop_decode()
            return answer
        leg.answered()
        self.has_slot(placement, answer)
        return leg

    def _drop_decode(self) -> None:
        """Drop the decode leg, and a prompt whose KV only its engine may fetch."""
        self._legs.drop_decode(abort=True)
        self._prompt.drop()
        self._side.over()


def _costs_nothing(context: SlotSearchContext, answer: Refused | Exception, waiter: Waiter) -> bool:
    """Return whether an engine that did not take the request costs it no attempt.

    Raises:
        ServingError: Another engine would not take it either.
    """
    if isinstance(answer, Refused):
        context.metrics.refusals.labels(answer.reason).inc()
        if answer.reason == "invalid":
            raise BadRequestError(answer.message, param="prompt")
        if answer.reason in _NO_ROOM:
            context.queue.check_time(waiter, asyncio.get_running_loop().time())
            return True
    return isinstance(answer, DecodeLeftError)


def _no_place(num_failures: int, last: Refused | Exception) -> ServingError:
    """Return the error for a request that too many decode engines did not take."""
    kind = SaturatedError if isinstance(last, Refused) else ReplicaLostError
    why = last.message if isinstance(last, Refused) else last
    return kind(
        f"{num_failures} attempts to place the request were refused or lost; the last: {why}",
        retry_after_s=RETRY_AFTER_S,
    )
