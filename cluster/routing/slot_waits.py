"""Waiting for a decode slot: the shell around the slot queue that wakes whoever has a place.

Owner: one ingress's event loop; of the futures of those who wait.
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
    """See the module docstring.

    Args:
        queue: Who is next.
        pools: Where the queue holds what it assigns.
        moments: When those are due who come before they are; None: nobody does.
    """

    def __init__(
        self, queue: SlotQueue, pools: PoolState, moments: SlotMoments | None = None
    ) -> None:
        self._queue = queue
        self._pools = pools
        self._moments = moments
        # When somebody is due next.
        self._next: asyncio.TimerHandle | None = None
        self._futures: dict[Waiter, asyncio.Future[Placement]] = {}
        self._timers: dict[Waiter, asyncio.TimerHandle] = {}
        # What is held for those whose tasks have yet to run.
        self._assigned: dict[Waiter, Placement] = {}

    async def wait(self, waiter: Waiter) -> Placement:
        """Wait, in order, for a DP group with room; it is held for the request from then on.

        Raises:
            NotReadyError: No replica decodes, nor is looked for, and it was promised nothing.
            SaturatedError: The queue is full.
            QueueTimeoutError: No room within the deadline.
        """
        place = self.enter(waiter)
        try:
            return self.take(waiter, await place)
        finally:
            self.leave(waiter)

    def enter(self, waiter: Waiter) -> asyncio.Future[Placement]:
        """Begin to wait; whoever does has to `leave`, and takes before what it waited for.

        Raises:
            NotReadyError: See `wait`.
            SaturatedError: See `wait`.
        """
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Placement] = loop.create_future()
        # Whoever has had all that it wanted before does not ask what became of it.
        place.add_done_callback(lambda place: place.cancelled() or place.exception())
        placement = self._queue.enter(waiter, loop.time())
        if placement is None:
            self._futures[waiter] = place
            self._set_timer(waiter)
        else:
            self._assigned[waiter] = placement
            place.set_result(placement)
        # Whoever comes back from a replica that refused it has left room there.
        self.capacity_changed()
        return place

    def take(self, waiter: Waiter, placement: Placement) -> Placement:
        """Keep a place that was waited for; whoever does not lets go of it when it leaves."""
        del self._assigned[waiter]
        return placement

    def hurry(self, waiter: Waiter) -> None:
        """Let a request want its slot now: its prompt has come to an end."""
        if waiter in self._futures:
            self._set_due(waiter)
            self.capacity_changed()

    def leave(self, waiter: Waiter) -> None:
        """Wait no longer, and let go of what was not taken. Idempotent."""
        self.abandon(waiter)
        timer = self._timers.pop(waiter, None)
        if timer is not None:
            timer.cancel()
        self._futures.pop(waiter, None)
        self._queue.leave(waiter)
        self.capacity_changed()

    def abandon(self, waiter: Waiter) -> None:
        """Let go at once of what a waiter was assigned and has not taken. Idempotent.

        For whoever has cancelled a wait, and wants another place before that task has run.
        """
        placement = self._assigned.pop(waiter, None)
        if placement is not None:
            self._pools.end(waiter.demand.request_id, placement.incarnation)

    def capacity_changed(self) -> None:
        """Call when a slot may be free: a new snapshot, a dropped hold, a replica came or went."""
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
        """Let those want a slot whose moment has come, and look again at the next one's."""
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
        """Let whoever wants a slot learn when it has waited too long."""
        if waiter.deadline_s is not None and waiter not in self._timers:
            # Why no asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
            loop, deadline_s = asyncio.get_running_loop(), waiter.deadline_s
            self._timers[waiter] = loop.call_at(deadline_s, self._expire, deadline_s)

    def _drop_gone(self) -> None:
        """Take out whoever was cancelled in this turn of the loop: its task has yet to run."""
        for waiter in [waiter for waiter, future in self._futures.items() if future.done()]:
            del self._futures[waiter]
            self._queue.leave(waiter)

    def _expire(self, deadline_s: float) -> None:
        self._drop_gone()
        # A timer may come early by the clock's resolution.
        now_s = max(asyncio.get_running_loop().time(), deadline_s)
        for waiter in self._queue.expire(now_s):
            self._futures.pop(waiter).set_exception(self._queue.too_late())
