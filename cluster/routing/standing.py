"""A request's place in the slot queue, and the decode engines that it has left.

Owner: the request's `SlotSearch`. A request that loses its slot returns to its old place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.slot_queue import SlotQueue, Waiter


class Standing:
    """One request's position in the slot queue.

    Args:
        queue: The slot queue.
        pools: The places of the engines that it has left.

    Attributes:
        left: Decode engines that were lost or left: a last resort of the next reservation.
    """

    def __init__(self, queue: SlotQueue, pools: PoolState) -> None:
        self._queue = queue
        self._pools = pools
        self._order: int | None = None
        self.left: set[str] = set()

    def new_waiter(
        self,
        demand: Demand,
        spared: set[Placement],
        *,
        is_promised: bool,
        has_stream: bool = False,
        is_due: bool = True,
    ) -> Waiter:
        """Return the request's place in the queue, with `spared` places as a last resort.

        So are the places of the engines that it has left.
        """
        waiter = self._queue.new_waiter(
            demand,
            is_promised=is_promised,
            has_stream=has_stream,
            is_due=is_due,
            order=self._order,
        )
        self._order = waiter.order
        waiter.spared |= spared
        if self.left:
            places = self._pools.decode_views().placements
            waiter.spared |= {place for place in places if place.incarnation in self.left}
        return waiter
