"""A stream's next decode engine, found while the one that hands over goes on with the stream.

Owner: the request's `Run`; of the task that waits for a slot. The request stands in the slot queue
where it came, and loses nothing meanwhile: only once another engine has accepted it, and has
fetched what KV it can (`Lending`), is the one that it has let go of. An engine that refuses, dies
or stalls costs it nothing either; it waits on.

So it is with an engine that is quiet, which may be gone or only late: nothing can be had of it, the
next one begins to compute where the stream stands, and whoever speaks first goes on with it.
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
    """What a hand-over needs of the router that placed its request."""

    metrics: RouterMetrics
    queue: SlotQueue
    waits: SlotWaits

    def capacity_changed(self) -> None:
        """See `Router.capacity_changed`."""


class HandOver:
    """See the module docstring.

    Args:
        context: What this ingress places requests with.
        legs: Where the next leg is, as `heir`, from the moment in which its engine is asked.
        progress: Says whether there is a stream.
        lending: The way of its KV; knows whose stream it is.
        new_waiter: Makes the request's place in the slot queue anew.
        max_attempts: How many engines may refuse it, or fail, before it looks no further: it then
            migrates like others once its engine is gone.
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
        """Look for another engine if there is a stream; says whether there is. Idempotent.

        Raises:
            DecodeLeftError: Another engine waits for KV of one that neither moves nor speaks.
        """
        decode = self._legs.decode
        if decode is not None and self._lending.is_under_way and decode.stream.still is not None:
            raise DecodeLeftError("leaving", str(decode.stream.still))
        if self._progress.has_tokens and self._task is None and self._num_attempts_left:
            self._task = asyncio.create_task(self._ask())
        return self._progress.has_tokens

    def spoke(self) -> None:
        """The engine that has the stream has given tokens: what it was to be left for is past."""
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
        """The engine that was asked says something, or something is heard of it.

        Raises:
            DecodeLeftError: This is the moment to leave the other one: it hands over, and this one
                has accepted, and what KV it can have; or it is quiet still, and this one has a
                token.
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
                heir.activate(self._progress.tokens)
                self._context.capacity_changed()
            return
        if isinstance(event, KVLoaded):
            self.hear_of_kv(event)
            return
        if isinstance(event, TokenOutput) and event.finish_reason != "error":
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
        # Others may have room where this one was held.
        self._context.capacity_changed()

    def hear_of_kv(self, event: KVLoaded) -> None:
        """One of both engines says how a transfer ended.

        Raises:
            DecodeLeftError: It was that of the stream's KV: the other one can go on.
        """
        if self._lending.ended(event.epoch, event.failure):
            raise DecodeLeftError(
                "leaving", event.failure or "its KV was transferred to the next replica"
            )

    @property
    def is_accepted(self) -> bool:
        """Whether another engine goes on with the stream as soon as the one it has is left."""
        return self._accepted is not None

    def take(self) -> tuple[Leg, Placement, Accepted] | None:
        """The leg that was accepted, where and how: the decode leg from now on."""
        if self._accepted is None or self._placement is None:
            return None
        taken = self._legs.adopt(), self._placement, self._accepted
        self.stop()
        return taken

    def stop(self) -> None:
        """Look no further, and let go of an engine that has not been taken. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        if self._waiter is not None:
            self._context.waits.abandon(self._waiter)
        self._legs.drop_heir()
        self._lending.stop()
        self._task = self._waiter = self._placement = self._accepted = None

    def _give_up(self) -> None:
        """Stay: whoever was quiet speaks. An engine that was asked counts as an attempt."""
        self._num_attempts_left -= self._legs.heir is not None
        self.stop()
        self._context.capacity_changed()

    @property
    def _is_wanted(self) -> bool:
        stream = self._legs.decode.stream if self._legs.decode is not None else None
        return stream is not None and (stream.leaving is not None or stream.quiet is not None)

    async def _ask(self) -> None:
        """Wait for a slot, however long that takes, and ask for it."""
        while True:
            if self._waiter is None:
                self._waiter = self._new_waiter()
            try:
                placement = await self._context.waits.wait(self._waiter)
            except QueueTimeoutError:
                self._waiter = None  # Its stream goes on all the while.
                continue
            if not self._is_wanted:
                # It may be the very engine, which has spoken.
                self._legs.give_back(placement)
                self._task = self._waiter = None
                self._context.capacity_changed()
                return
            request = self._lending.request
            # As many as it has room for, of those that there are by now.
            known = self._legs.demand.prompt_token_ids[len(request.prompt_token_ids) :]
            message = AddRequest(request, "decode", placement.dp_group, token_ids=[[*known]])
            with contextlib.suppress(EngineDeadError):
                self._legs.ask_heir(placement, message)
                self._placement = placement
                return
            self._context.queue.refuse(self._waiter, placement)
