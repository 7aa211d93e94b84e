"""Finds a successor for a stream while its decode engine continues to decode it.

Owner: the request's `Run`; of the task that waits for a slot.

For an engine that drains: the request keeps its place in the slot queue. Its engine is left only
once another one has accepted the request and has fetched the KV that it can (`Lending`). A
successor that refuses, dies or stalls costs the stream nothing; the request waits for another slot.

For an engine that is silent, which may be gone or just late: its KV cannot be fetched, so the
successor computes the tokens so far. The engine that gives the next token keeps the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from cluster.errors import QueueTimeoutError
from cluster.routing.leg import DecodeLeftError, LegState
from replicas.errors import EngineDeadError
from replicas.messages import Accepted, AddRequest, KVLoaded, Refused, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.routing.leg import Leg, Legs
    from cluster.routing.lending import Lending
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.placement import Placement
    from cluster.routing.progress import Progress
    from cluster.routing.slot_queue import SlotQueue, Waiter
    from cluster.routing.slot_waits import SlotWaits
    from replicas.messages import EngineEvent
    from replicas.streams import News


class HandOverContext(Protocol):
    """The parts of the router that a `HandOver` uses."""

    metrics: RouterMetrics
    queue: SlotQueue
    waits: SlotWaits

    def capacity_changed(self) -> None:
        """Wake waiting requests; see `Router.capacity_changed`."""


class HandOver:
    """The search for one stream's next decode engine.

    Args:
        context: Parts of the router.
        legs: The request's legs; the successor is `heir` from the moment it is asked.
        progress: Knows whether there is a stream.
        lending: Transfers the stream's KV.
        new_waiter: Returns the request's place in the slot queue.
        max_attempts: Number of engines that may refuse or fail before it stops looking. The request
            then migrates once its engine is gone.
    """

    def __init__(
        self,
        context: HandOverContext,
        legs: Legs,
        progress: Progress,
        lending: Lending,
        new_waiter: Callable[[], Waiter],
        max_attempts: int,
    ) -> None:
        self._context = context
        self._legs = legs
        self._progress = progress
        self._lending = lending
        self._new_waiter = new_waiter
        self._num_attempts_left = max_attempts
        self._task: asyncio.Task[None] | None = None
        self._waiter: Waiter | None = None
        self._placement: Placement | None = None
        self._accepted: Accepted | None = None
        legs.hands_over, legs.on_heir = self.begin, self.hear

    def begin(self) -> bool:
        """Look for another engine if there is a stream; return whether there is one. Idempotent.

        Raises:
            DecodeLeftError: The successor waits for KV from an engine that is stalled or silent.
        """
        decode = self._legs.decode
        if decode is not None and self._lending.is_under_way and decode.stream.still is not None:
            raise DecodeLeftError("leaving", str(decode.stream.still))
        if self._progress.has_tokens and self._task is None and self._num_attempts_left:
            self._task = asyncio.create_task(self._ask())
        return self._progress.has_tokens

    def spoke(self) -> None:
        """Note that the stream's engine has given tokens; end the search if it is not needed."""
        decode = self._legs.decode
        if decode is None:
            return
        heir = self._legs.heir
        is_behind = heir is not None and heir.state is LegState.ACTIVATED
        if self._task is not None and (is_behind or decode.stream.leaving is None):
            self._give_up()
        if decode.stream.leaving is not None:
            self.begin()

    def hear(self, event: EngineEvent | News) -> None:
        """Handle an event of the successor.

        Raises:
            DecodeLeftError: The stream should move now. Either its engine drains, and the successor
                has accepted and has the KV that it can get; or its engine is still silent, and the
                successor has given a token.
        """
        heir, decode = self._legs.heir, self._legs.decode
        assert heir is not None
        assert decode is not None, "the successor is adopted when the decode leg is left"
        stream = decode.stream
        if isinstance(event, Accepted):
            self._accepted = event
            if stream.leaving is not None:
                num_tokens = self._legs.demand.num_prompt_tokens
                is_still = stream.still is not None
                if is_still or not self._lending.begin(decode, heir, event, num_tokens):
                    raise DecodeLeftError("leaving", str(stream.leaving))
                self._context.capacity_changed()
                return
            if stream.quiet is None:
                self._give_up()
            else:
                heir.activate(self._progress.tokens, self._progress.ended)
                self._context.capacity_changed()
            return
        if isinstance(event, KVLoaded):
            self.hear_of_kv(event)
            return
        # An engine that is paused may drop a successor ("abort"), which is a kind of refusal.
        if isinstance(event, TokenOutput) and event.finish_reason not in {"error", "abort"}:
            if stream.quiet is None:
                self._give_up()
                return
            heir.keep(event)
            raise DecodeLeftError("quiet", str(stream.quiet))
        if isinstance(event, Refused):
            self._context.metrics.refusals.labels(event.reason).inc()
        assert self._waiter is not None
        assert self._placement is not None
        self._legs.drop_heir()
        self._lending.stop()
        self._context.queue.refuse(self._waiter, self._placement)
        self._task = self._accepted = None
        self._num_attempts_left -= 1
        self.begin()
        # Other requests may fit where this one was held.
        self._context.capacity_changed()

    def hear_of_kv(self, event: KVLoaded) -> None:
        """Handle the end of a transfer, as reported by either engine.

        Raises:
            DecodeLeftError: It was the transfer of the stream's KV, so the successor can continue.
        """
        if self._lending.ended(event.epoch, event.failure):
            raise DecodeLeftError(
                "leaving", event.failure or "its KV was transferred to the next replica"
            )

    @property
    def is_accepted(self) -> bool:
        """Whether a successor has accepted and can continue once the current engine is left."""
        return self._accepted is not None

    def take(self) -> tuple[Leg, Placement, Accepted] | None:
        """Make an accepted successor the decode leg; return it, its place and its answer."""
        if self._accepted is None or self._placement is None:
            return None
        taken = self._legs.adopt(), self._placement, self._accepted
        self.stop()
        return taken

    def stop(self) -> None:
        """Stop looking, and release a successor that was not taken. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        if self._waiter is not None:
            self._context.waits.abandon(self._waiter)
        self._legs.drop_heir()
        self._lending.stop()
        self._task = self._waiter = self._placement = self._accepted = None

    def _give_up(self) -> None:
        """Stay with the current engine, which is not silent any more.

        A successor that was asked uses up an attempt.
        """
        self._num_attempts_left -= self._legs.heir is not None
        self.stop()
        self._context.capacity_changed()

    @property
    def _is_wanted(self) -> bool:
        stream = self._legs.decode.stream if self._legs.decode is not None else None
        return stream is not None and (stream.leaving is not None or stream.quiet is not None)

    async def _ask(self) -> None:
        """Wait for a slot without a limit, and ask its engine."""
        while True:
            if self._waiter is None:
                self._waiter = self._new_waiter()
            try:
                placement = await self._context.waits.wait(self._waiter)
            except QueueTimeoutError:
                self._waiter = None  # The stream continues meanwhile.
                continue
            if not self._is_wanted:
                # The place may even be on the current engine, which has given tokens again.
                self._legs.give_back(placement)
                self._task = self._waiter = None
                self._context.capacity_changed()
                return
            request = self._lending.request
            # Send the tokens that the demand, and so the hold, already includes. Those of several
            # choices follow with the activation.
            known = self._legs.demand.prompt_token_ids[len(request.prompt_token_ids) :]
            tokens = [[*known]] if request.sampling.n == 1 else []
            message = AddRequest(request, "decode", placement.dp_group, token_ids=tokens)
            with contextlib.suppress(EngineDeadError):
                self._legs.ask_heir(placement, message)
                self._placement = placement
                return
            self._context.queue.refuse(self._waiter, placement)
