"""The queue in front of the decode slots: whoever came first is placed first.

Owner: one ingress's event loop. It decides who is next and when somebody has waited too long; where
there is room, placement says over the pools' views. A replica may still refuse what was held here:
then the request comes back to the place that it had.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from typing import TYPE_CHECKING

from cluster.errors import NotReadyError, QueueTimeoutError, SaturatedError
from cluster.placement import place_decode

if TYPE_CHECKING:
    from cluster.config.schema import Role
    from cluster.placement import Placement, PlacementPolicy
    from cluster.pools import PoolState

RETRY_AFTER_S = 1
"""What a client that is turned away is told to wait."""

_DECODING: tuple[Role, ...] = ("decode", "both")


class QueuePlace:
    """A request's place in the queue, kept when an engine has no room for it after all.

    Attributes:
        order: When it came, among the requests of this ingress.
        refused: Placements that had no room for it just now.
        num_snapshots: Snapshots that the pools had taken when it was last placed.
        news: Set when it is its turn and something has changed, or when it waited too long.
        deadline_s: When it has waited too long, on the event loop's clock; None before it waits.
        is_late: Whether it has.
        num_blocks: KV blocks that it waits for; 0 before it waits.
        is_promised: Whether it may wait although the queue is full.
    """

    def __init__(self, order: int, *, is_promised: bool) -> None:
        self.order = order
        self.is_promised = is_promised
        self.refused: set[Placement] = set()
        self.num_snapshots = 0
        self.news = asyncio.Event()
        self.deadline_s: float | None = None
        self.is_late = False
        self.num_blocks = 0

    def __repr__(self) -> str:
        return f"QueuePlace({self.order}, {self.num_blocks} blocks, refused by {self.refused})"

    def expire(self) -> None:
        """Wake the request to tell it that it has waited too long."""
        self.is_late = True
        self.news.set()


class SlotQueue:
    """Requests that wait for a decode slot; see the module docstring.

    Args:
        pools: Where the slots are, as far as this ingress knows.
        policy: Which of them a request gets.
        max_queued_requests: Most that may wait.
        timeout_s: How long one may wait.
    """

    def __init__(
        self, pools: PoolState, policy: PlacementPolicy, max_queued_requests: int, timeout_s: float
    ) -> None:
        self._pools = pools
        self._policy = policy
        self._max_queued_requests = max_queued_requests
        self._timeout_s = timeout_s
        # In the order in which they came; only the first may take a slot.
        self._queue: list[QueuePlace] = []
        self._orders = itertools.count()

    def __len__(self) -> int:
        return len(self._queue)

    def new_place(self, *, is_promised: bool = False) -> QueuePlace:
        """A place behind everybody who came before.

        Args:
            is_promised: Whether the request was let in by `check_open`: work has been done for it,
                and it may wait whoever has come since.
        """
        return QueuePlace(next(self._orders), is_promised=is_promised)

    def check_open(self) -> None:
        """Whether a request that will want a slot later should be let in.

        Raises:
            NotReadyError: No replica can decode now.
            SaturatedError: The queue is full.
        """
        self._check_ready()
        if len(self._queue) >= self._max_queued_requests and self._queue:
            raise self._full()

    def capacity_changed(self) -> None:
        """Call when a slot may be free: a new snapshot, a dropped hold, a replica came or went."""
        if self._queue:
            self._queue[0].news.set()

    def check_invariants(self) -> None:
        """The queue is in order, and once every wake-up has been followed its head has no room."""
        orders = [place.order for place in self._queue]
        assert orders == sorted(set(orders)), f"{orders=}"
        if not self._queue or self._queue[0].news.is_set():
            return
        head = self._queue[0]
        room = place_decode(head.num_blocks, self._pools.decode_views(), head.refused)
        assert room is None, f"{head!r} waits although {room} has room"

    async def hold(self, request_id: str, num_blocks: int, place: QueuePlace) -> Placement:
        """Wait for a DP group with room and hold it, in the order of arrival.

        Args:
            request_id: Names the hold.
            num_blocks: KV blocks that the request needs to start.
            place: Where it stands.

        Raises:
            NotReadyError: No replica can decode now.
            SaturatedError: The queue is full.
            QueueTimeoutError: No room within the deadline.
        """
        if not self._queue or place.order < self._queue[0].order:
            placement = self._try_hold(request_id, num_blocks, place)
            if placement is not None:
                return placement
        loop = asyncio.get_running_loop()
        if place.deadline_s is None:
            if len(self._queue) >= self._max_queued_requests and not place.is_promised:
                raise self._full()
            place.deadline_s = loop.time() + self._timeout_s
        place.num_blocks = num_blocks
        bisect.insort(self._queue, place, key=lambda p: p.order)
        if place.refused and place.num_snapshots != self._pools.num_snapshots:
            # What changed while it was being refused woke nobody: it was not queued then.
            place.news.set()
        # Why no asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
        timer = loop.call_at(place.deadline_s, place.expire)
        try:
            return await self._hold_in_turn(request_id, num_blocks, place)
        finally:
            timer.cancel()
            self._queue.remove(place)
            self.capacity_changed()

    async def _hold_in_turn(self, request_id: str, num_blocks: int, place: QueuePlace) -> Placement:
        while True:
            await place.news.wait()
            place.news.clear()
            if place.is_late:
                raise QueueTimeoutError(
                    f"no decode slot became free within {self._timeout_s:g} s",
                    retry_after_s=RETRY_AFTER_S,
                )
            if self._queue[0] is not place:
                continue
            # Whoever refused may have room by now.
            place.refused.clear()
            placement = self._try_hold(request_id, num_blocks, place)
            if placement is not None:
                return placement

    def _full(self) -> SaturatedError:
        return SaturatedError(
            f"all decode slots are taken and {len(self._queue)} requests wait; retry later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _check_ready(self) -> None:
        if not self._pools.has_open(_DECODING):
            raise NotReadyError(
                "no replica is ready to decode; retry soon", retry_after_s=RETRY_AFTER_S
            )

    def _try_hold(self, request_id: str, num_blocks: int, place: QueuePlace) -> Placement | None:
        self._check_ready()
        placement = self._policy.place_decode(num_blocks, self._pools.decode_views(), place.refused)
        if placement is not None:
            place.num_snapshots = self._pools.num_snapshots
            self._pools.hold_decode(request_id, placement, num_blocks)
        return placement
