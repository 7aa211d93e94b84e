"""The asyncio shell around `SlotQueue`: wakes each request that gets a place or expires.

Owner: one ingress's event loop; of the futures of queued requests.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from cluster.routing.slot_queue import not_ready

if TYPE_CHECKING:
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.slot_moments import SlotMoments
    from cluster.routing.slot_queue import SlotQueue, Waiter


class SlotWaits:
    """Waits for decode slots.

    Args:
        queue: Decides which request is next.
        pools: The pool state in which the queue holds what it assigns.
        moments: Decides when early requests become due; None if there are none.
    """

    def __init__(
        self, queue: SlotQueue, pools: PoolState, moments: SlotMoments | None = None
    ) -> None:
        self._queue = queue
        self._pools = pools
        self._moments = moments
        # Calls `capacity_changed` when the next request becomes due.
        self._next: asyncio.TimerHandle | None = None
        self._futures: dict[Waiter, asyncio.Future[Placement]] = {}
        self._timers: dict[Waiter, asyncio.TimerHandle] = {}
        # Places held for requests whose tasks have yet to run.
        self._assigned: dict[Waiter, Placement] = {}

    async def wait(self, waiter: Waiter) -> Placement:
        """Wait, in order, for a place with room; it is held for the request from then on.

        Raises:
            NotReadyError: No replica decodes, discovery is not looking for one, and no work has
                been done for the request.
            SaturatedError: The queue is full.
            QueueTimeoutError: There was no room within the deadline.
        """
        place = self.enter(waiter)
        try:
            return self.take(waiter, await place)
        finally:
            self.leave(waiter)

    def enter(self, waiter: Waiter) -> asyncio.Future[Placement]:
        """Queue a request; the caller must `take` the place, if it keeps it, and then `leave`.

        Raises:
            NotReadyError: See `wait`.
            SaturatedError: See `wait`.
        """
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Placement] = loop.create_future()
        # A request that has finished meanwhile does not read the result: mark it as read.
        place.add_done_callback(lambda place: place.cancelled() or place.exception())
        placement = self._queue.enter(waiter, loop.time())
        if placement is None:
            self._futures[waiter] = place
            self._set_timer(waiter)
        else:
            self._assigned[waiter] = placement
            place.set_result(placement)
        # A request that a replica refused has left room there.
        self.capacity_changed()
        return place

    def take(self, waiter: Waiter, placement: Placement) -> Placement:
        """Keep a place that was waited for; one that is not taken is released by `leave`."""
        del self._assigned[waiter]
        return placement

    def hurry(self, waiter: Waiter) -> None:
        """Make a queued request due now, because its prompt has been computed or has failed."""
        if waiter in self._futures:
            self._set_due(waiter)
            self.capacity_changed()

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting, and release a place that was not taken. Idempotent."""
        self.abandon(waiter)
        timer = self._timers.pop(waiter, None)
        if timer is not None:
            timer.cancel()
        self._futures.pop(waiter, None)
        self._queue.leave(waiter)
        self.capacity_changed()

    def abandon(self, waiter: Waiter) -> None:
        """Release at once a place that was assigned and not taken. Idempotent.

        For a caller that has cancelled a wait and wants another place before that task has run.
        """
        placement = self._assigned.pop(waiter, None)
        if placement is not None:
            self._pools.end(waiter.demand.request_id, placement.incarnation)

    def capacity_changed(self) -> None:
        """Assign free slots; call it after a snapshot, a dropped hold or a change of replicas."""
        self._drop_gone()
        if not self._queue:
            return
        if self._queue.is_stranded:
            for waiter in self._queue.clear():
                self._futures.pop(waiter).set_exception(not_ready())
        self._look_who_is_due()
        for waiter, placement in self._queue.assign():
            self._assigned[waiter] = placement
            self._futures.pop(waiter).set_result(placement)

    def _look_who_is_due(self) -> None:
        """Make requests due whose time has come, and set a timer for the next one."""
        if self._moments is None:
            return
        loop = asyncio.get_running_loop()
        due, next_s = self._moments.due(self._queue.waiters, loop.time())
        for waiter in due:
            self._set_due(waiter)
        if self._next is not None:
            self._next.cancel()
        self._next = loop.call_at(next_s, self.capacity_changed) if next_s < math.inf else None

    def _set_due(self, waiter: Waiter) -> None:
        self._queue.set_due(waiter, asyncio.get_running_loop().time())
        self._set_timer(waiter)

    def _set_timer(self, waiter: Waiter) -> None:
        """Let a request that is due expire at its deadline."""
        if waiter.deadline_s is not None and waiter not in self._timers:
            # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
            loop, deadline_s = asyncio.get_running_loop(), waiter.deadline_s
            self._timers[waiter] = loop.call_at(deadline_s, self._expire, deadline_s)

    def _drop_gone(self) -> None:
        """Remove requests cancelled in this turn of the loop: their tasks have yet to run."""
        for waiter in [waiter for waiter, future in self._futures.items() if future.done()]:
            del self._futures[waiter]
            self._queue.leave(waiter)

    def _expire(self, deadline_s: float) -> None:
        self._drop_gone()
        # A timer may come early by the clock's resolution.
        now_s = max(asyncio.get_running_loop().time(), deadline_s)
        for waiter in self._queue.expire(now_s):
            self._futures.pop(waiter).set_exception(self._queue.too_late())
