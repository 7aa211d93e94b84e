"""Waiting for a decode slot: the shell around the slot queue that wakes whoever has a place.

Owner: one ingress's event loop; of the futures of those who wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.routing.slot_queue import not_ready

if TYPE_CHECKING:
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.slot_queue import SlotQueue, Waiter


class SlotWaits:
    """See the module docstring.

    Args:
        queue: Who is next.
        pools: Where the queue holds what it assigns.
    """

    def __init__(self, queue: SlotQueue, pools: PoolState) -> None:
        self._queue = queue
        self._pools = pools
        self._futures: dict[Waiter, asyncio.Future[Placement]] = {}
        # What is held for those whose tasks have yet to run.
        self._assigned: dict[Waiter, Placement] = {}

    async def wait(self, waiter: Waiter) -> Placement:
        """Wait, in order, for a DP group with room; it is held for the request from then on.

        Raises:
            NotReadyError: No replica can decode now, and it was promised nothing.
            SaturatedError: The queue is full.
            QueueTimeoutError: No room within the deadline.
        """
        loop = asyncio.get_running_loop()
        placement = self._queue.enter(waiter, loop.time())
        if placement is not None:
            # Whoever comes back from a replica that refused it has left room there.
            self.capacity_changed()
            return placement
        future: asyncio.Future[Placement] = loop.create_future()
        self._futures[waiter] = future
        assert waiter.deadline_s is not None
        # Why no asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
        timer = loop.call_at(waiter.deadline_s, self._expire, waiter.deadline_s)
        self.capacity_changed()
        try:
            placement = await future
            self._assigned.pop(waiter, None)
            return placement
        except asyncio.CancelledError:
            # It may have been assigned a place in the moment in which its client left.
            self.abandon(waiter)
            raise
        finally:
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
        if not self._queue.is_ready:
            for waiter in self._queue.clear():
                self._futures.pop(waiter).set_exception(not_ready())
        for waiter, placement in self._queue.assign():
            self._assigned[waiter] = placement
            self._futures.pop(waiter).set_result(placement)

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
