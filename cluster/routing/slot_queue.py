"""The queue for decode slots: first come, first served within a priority. Pure.

Owner: one ingress's event loop. The queue decides which request is next and which has expired; the
placement policy decides where there is room, by the pools' views. `assign` says which requests have
a place now, and `slot_waits` wakes them. A replica may still refuse what was held here: then the
request returns to its old place in the queue.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import NotReadyError, QueueTimeoutError, SaturatedError
from cluster.routing.placement import fits
from cluster.routing.views import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.routing.cost import PlacementPolicy
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.views import Views

RETRY_AFTER_S = 1
"""Seconds after which a refused client should retry."""


def not_ready() -> NotReadyError:
    """Return the error for a request while no replica decodes and none is looked for."""
    return NotReadyError(
        "no replica is ready to decode; try again in some seconds (/health says what is missing)",
        retry_after_s=RETRY_AFTER_S,
    )


@dataclass(slots=True, eq=False)
class Waiter:
    """A request's place in the queue, which it keeps when an engine refuses it.

    Owner: the queue that made it.

    Attributes:
        demand: The request.
        order: Position by arrival among the requests of this ingress.
        is_promised: Whether work has been done for it, because `check_open` admitted it or it has
            lost a slot. It may then wait beyond the limit of the queue, and while no replica is
            ready.
        has_stream: Whether another engine still decodes it until it has this slot. It then blocks
            no other request while there is no room for it.
        is_due: Whether it wants a slot now. Otherwise its prompt is under way, and it only keeps
            its place.
        due_s: Time at which it became due.
        deadline_s: Time at which it expires; None until it is entered and due.
        refused: Places that refused it and have not changed since.
        spared: Places that it gets only if no other can take it.
        num_snapshots: Snapshots that the pools had taken when it was last placed.
        num_changes: Changes of the pools up to which `refused` and `spared` are valid.
    """

    demand: Demand
    order: int
    is_promised: bool
    has_stream: bool = False
    is_due: bool = True
    due_s: float = 0.0
    deadline_s: float | None = None
    refused: set[Placement] = field(default_factory=set)
    spared: set[Placement] = field(default_factory=set)
    num_snapshots: int = 0
    num_changes: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Position in the queue; the lowest is next."""
        return self.demand.priority, self.order


class SlotQueue:
    """Requests that want a decode slot, in order.

    Args:
        pools: This ingress's view of the replicas; holds are taken there.
        policy: Chooses a DP group for a request.
        max_queued_requests: Limit of queued requests.
        timeout_s: Time after which a queued request expires.

    Attributes:
        timeout_s: As given.
    """

    def __init__(
        self,
        pools: PoolState,
        policy: PlacementPolicy,
        max_queued_requests: int,
        timeout_s: float,
    ) -> None:
        self._pools = pools
        self._policy = policy
        self._max_queued_requests = max_queued_requests
        self.timeout_s = timeout_s
        self._waiters: list[Waiter] = []
        self._orders = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    def __repr__(self) -> str:
        return f"SlotQueue({self._waiters})"

    @property
    def waiters(self) -> Sequence[Waiter]:
        """All queued requests in order; read-only."""
        return self._waiters

    @property
    def is_stranded(self) -> bool:
        """Whether no open replica decodes, not even a stalled one, and none is looked for."""
        return self._pools.is_stranded

    def has_room(self, demand: Demand) -> bool:
        """Return whether a request that arrived now would be placed at once."""
        return self._first_in_need() is None and self._has_room_somewhere(demand)

    def check_open(self) -> None:
        """Raise if a request that will want a slot later must be refused.

        Raises:
            NotReadyError: No replica decodes, and discovery is not looking for one.
            SaturatedError: The queue is full.
        """
        self._check_ready()
        if any(not waiter.has_stream for waiter in self._waiters):
            self._check_room()

    def new_waiter(
        self,
        demand: Demand,
        *,
        is_promised: bool = False,
        has_stream: bool = False,
        is_due: bool = True,
        order: int | None = None,
    ) -> Waiter:
        """Return a place behind all earlier requests; see `Waiter`.

        Args:
            demand: The request.
            is_promised: See `Waiter`.
            has_stream: See `Waiter`.
            is_due: See `Waiter`.
            order: The old position of a request that lost its slot.
        """
        order = next(self._orders) if order is None else order
        return Waiter(demand, order, is_promised, has_stream, is_due)

    def enter(self, waiter: Waiter, now_s: float) -> Placement | None:
        """Place a request at once if it is due, next, and there is room; otherwise queue it.

        Raises:
            NotReadyError: No replica decodes, discovery is not looking for one, and no work has
                been done for the request.
            SaturatedError: The queue is full.
        """
        is_new = waiter.deadline_s is None
        if is_new and waiter.is_due:
            self.set_due(waiter, now_s)
        if not waiter.is_promised:
            self._check_ready()
        # Streams before it have no room now: `assign` would have placed them.
        before = self._first_in_need()
        if waiter.is_due and (before is None or waiter.key < before.key):
            placement = self._place(waiter)
            if placement is not None:
                return placement
        if is_new and not waiter.is_promised:
            # A request that a replica refused may return, however full the queue is by now.
            self._check_room()
        bisect.insort(self._waiters, waiter, key=lambda w: w.key)
        return None

    def set_due(self, waiter: Waiter, now_s: float) -> None:
        """Let a request want a slot from now on, and set its deadline. Idempotent."""
        waiter.is_due = True
        if waiter.deadline_s is None:
            asked_s = waiter.demand.deadline_s
            limit_s = now_s + self.timeout_s
            waiter.deadline_s = limit_s if asked_s is None else min(asked_s, limit_s)
            waiter.due_s = now_s

    def refuse(self, waiter: Waiter, placement: Placement) -> None:
        """Record that a replica refused a request; the caller has dropped its hold."""
        waiter.refused.add(placement)
        if waiter.num_snapshots == self._pools.num_snapshots:
            # Without a new snapshot only the hold has changed, so the refusal is still valid.
            waiter.num_changes = self._pools.num_changes

    def leave(self, waiter: Waiter) -> None:
        """Remove a request from the queue. Idempotent."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def assign(self) -> list[tuple[Waiter, Placement]]:
        """Place requests in their order as long as there is room, and hold it for them.

        A request without a stream that does not fit ends the walk, so that later ones cannot starve
        it. A stream that does not fit is passed over: it is still decoded elsewhere. Call it
        whenever the pools have changed or a request has left the queue.

        Returns:
            Each request that was placed, which has left the queue, and its placement.
        """
        assigned = []
        at = 0
        while at < len(self._waiters):
            waiter = self._waiters[at]
            # The cheap test first: a replica that drains may hand over hundreds of streams.
            may_fit = not waiter.has_stream or self._has_room_somewhere(waiter.demand)
            placement = self._place(waiter) if waiter.is_due and may_fit else None
            if placement is not None:
                assigned.append((self._waiters.pop(at), placement))
            elif waiter.is_due and not waiter.has_stream:
                break
            else:
                at += 1
        return assigned

    def expire(self, now_s: float) -> list[Waiter]:
        """Remove and return requests that have waited too long."""
        late = [w for w in self._waiters if w.deadline_s is not None and w.deadline_s <= now_s]
        for waiter in late:
            self._waiters.remove(waiter)
        return late

    def clear(self) -> list[Waiter]:
        """Remove and return requests for which no work has been done."""
        waiters = [waiter for waiter in self._waiters if not waiter.is_promised]
        self._waiters = [waiter for waiter in self._waiters if waiter.is_promised]
        return waiters

    def check_time(self, waiter: Waiter, now_s: float) -> None:
        """Raise if a request that a replica refused must not be placed again.

        Raises:
            QueueTimeoutError: Its deadline has passed.
        """
        if waiter.deadline_s is not None and waiter.deadline_s <= now_s:
            raise self.too_late()

    def too_late(self) -> QueueTimeoutError:
        """Return the error for a request that has waited too long."""
        return QueueTimeoutError(
            f"no decode slot became free within {self.timeout_s:g} s; retry later",
            retry_after_s=RETRY_AFTER_S,
        )

    def check_invariants(self) -> None:
        """Assert the order, and that after `assign` no request that may be placed has room.

        These are the first request without a stream, and every stream in front of it.
        """
        keys = [waiter.key for waiter in self._waiters]
        assert keys == sorted(set(keys)), f"{keys=}"
        for waiter in self._waiters:
            if not waiter.is_due:
                continue
            for view in self._pools.decode_views():
                has_room = fits(waiter.demand, view)
                has_room &= view.placement not in waiter.refused | waiter.spared
                has_room &= not self._pools.is_held(waiter.demand.request_id, view.placement)
                assert not has_room, f"{waiter!r} is queued although {view} has room"
            if not waiter.has_stream:
                break

    def _first_in_need(self) -> Waiter | None:
        """Return the first request that is due and gets no tokens from another engine meanwhile."""
        return next((w for w in self._waiters if w.is_due and not w.has_stream), None)

    def _has_room_somewhere(self, demand: Demand) -> bool:
        return bool(self._pools.decode_views().fitting(demand).any())

    def _place(self, waiter: Waiter) -> Placement | None:
        views = self._pools.decode_views()
        placement = self._find(waiter, views)
        is_barred = bool(waiter.refused or waiter.spared)
        if placement is None and is_barred and self._pools.num_changes != waiter.num_changes:
            waiter.refused.clear()
            waiter.spared.clear()
            placement = self._find(waiter, views)
        if placement is not None:
            self._pools.hold(waiter.demand, placement)
            waiter.num_snapshots = self._pools.num_snapshots
            waiter.num_changes = self._pools.num_changes
        return placement

    def _find(self, waiter: Waiter, views: Views) -> Placement | None:
        demand, refused, spared = waiter.demand, waiter.refused, waiter.spared - waiter.refused
        placement = self._policy.place(demand, views, refused, spared)
        while placement is not None and self._pools.is_held(demand.request_id, placement):
            # The engine was asked for this prompt, and has changed its role since.
            engine = placement.incarnation
            spared = spared | {p for p in views.placements if p.incarnation == engine}
            placement = self._policy.place(demand, views, refused, spared)
        return placement

    def _check_ready(self) -> None:
        if self.is_stranded:
            raise not_ready()

    def _check_room(self) -> None:
        if len(self._waiters) < self._max_queued_requests:
            return
        num_waiting = sum(not waiter.has_stream for waiter in self._waiters)
        # A request that is not due and could have a slot now is not counted as queued.
        num_early = sum(not waiter.is_due for waiter in self._waiters)
        empty_slots = self._pools.decode_views().column(Column.EMPTY_SLOTS)
        num_waiting -= min(num_early, int(empty_slots.sum()))
        if num_waiting >= self._max_queued_requests:
            raise SaturatedError(
                f"all decode slots are taken and {num_waiting} requests are queued; retry later",
                retry_after_s=RETRY_AFTER_S,
            )
