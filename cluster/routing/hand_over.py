"""A stream's next decode engine, found while the one that hands over goes on with the stream.

Owner: the request's `Run`; of the task that waits for a slot. The request stands in the slot queue
where it came, and loses nothing meanwhile: only once another engine has accepted it is the one that
it has let go of. An engine that refuses, dies or stalls costs it nothing either; it waits on.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from cluster.errors import QueueTimeoutError
from cluster.routing.leg import DecodeLeftError
from replicas.errors import EngineDeadError
from replicas.messages import Accepted, AddRequest, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.routing.leg import Leg, Legs
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.placement import Placement
    from cluster.routing.progress import Progress
    from cluster.routing.slot_queue import SlotQueue, Waiter
    from cluster.routing.slot_waits import SlotWaits
    from replicas.messages import EngineEvent, EngineRequest
    from replicas.streams import News


class Means(Protocol):
    """What a hand-over needs of the router that placed its request."""

    metrics: RouterMetrics
    queue: SlotQueue
    waits: SlotWaits


class HandOver:
    """See the module docstring.

    Args:
        means: What this ingress places requests with.
        request: Whose stream.
        legs: Where the next leg is, as `heir`, from the moment in which its engine is asked.
        progress: Says whether there is a stream.
        new_waiter: Makes the request's place in the slot queue anew.
        max_attempts: How many engines may refuse it, or fail, before it looks no further: it then
            migrates like others once its engine is gone.
    """

    def __init__(
        self,
        means: Means,
        request: EngineRequest,
        legs: Legs,
        progress: Progress,
        new_waiter: Callable[[], Waiter],
        max_attempts: int,
    ) -> None:
        self._means = means
        self._request = request
        self._legs = legs
        self._progress = progress
        self._new_waiter = new_waiter
        self._num_attempts_left = max_attempts
        self._task: asyncio.Task[None] | None = None
        self._waiter: Waiter | None = None
        self._placement: Placement | None = None
        self._accepted: Accepted | None = None
        legs.hands_over, legs.on_heir = self.begin, self.hear

    def begin(self) -> bool:
        """Look for another engine if there is a stream; says whether there is. Idempotent."""
        if self._progress.has_tokens and self._task is None and self._num_attempts_left:
            self._task = asyncio.create_task(self._ask())
        return self._progress.has_tokens

    def hear(self, event: EngineEvent | News, why: str) -> None:
        """The engine that was asked says something, or something is heard of it.

        Raises:
            DecodeLeftError: It has accepted: this is the moment to leave the other one, which is
                left for the reason `why`.
        """
        if isinstance(event, Accepted):
            self._accepted = event
            raise DecodeLeftError("leaving", why)
        if isinstance(event, Refused):
            self._means.metrics.refusals.labels(event.reason).inc()
        assert self._waiter is not None
        assert self._placement is not None
        self._legs.drop_heir()
        self._means.queue.refuse(self._waiter, self._placement)
        self._task = None
        self._num_attempts_left -= 1
        self.begin()

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
            self._means.waits.abandon(self._waiter)
        self._legs.drop_heir()
        self._task = self._waiter = self._placement = self._accepted = None

    async def _ask(self) -> None:
        """Wait for a slot, however long that takes, and ask for it."""
        while True:
            if self._waiter is None:
                self._waiter = self._new_waiter()
            try:
                placement = await self._means.waits.wait(self._waiter)
            except QueueTimeoutError:
                self._waiter = None  # Its stream goes on all the while.
                continue
            message = AddRequest(self._request, "decode", placement.dp_group)
            with contextlib.suppress(EngineDeadError):
                self._legs.ask_heir(placement, message)
                self._placement = placement
                return
            self._means.queue.refuse(self._waiter, placement)
