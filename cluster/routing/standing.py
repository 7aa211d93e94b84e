"""Where one request stands among those who wait for a decode slot, and which engines it has left.

Owner: the request's `SlotSearch`. Whoever loses a slot comes back to the place that it had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.slot_queue import SlotQueue, Waiter


class Standing:
    """See the module docstring.

    Args:
        queue: Where it waits.
        pools: Where the engines that it has left are.

    Attributes:
        left: Decode engines that were lost or left: the last resort of the next reservation.
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
        """Its place in the queue; those that it has left and `spared` are its last resort."""
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
