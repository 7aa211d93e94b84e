"""Requests that stay on a stalled or draining decode engine because no other has room. Pure.

Owner: one ingress's event loop; of these requests, each of which is woken once there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.routing.demand import Demand
    from cluster.routing.slot_queue import SlotQueue
    from replicas.streams import EngineStream


class Stalls:
    """Requests that wait for room elsewhere while their engine stalls or drains.

    Args:
        queue: The slot queue; requests that wait in it go first.
    """

    def __init__(self, queue: SlotQueue) -> None:
        self._queue = queue
        self._staying: dict[EngineStream, Demand] = {}

    def has_room(self, demand: Demand) -> bool:
        """Return whether a request that leaves its engine would get another slot at once."""
        return self._queue.has_room(demand)

    def stay(self, stream: EngineStream, demand: Demand) -> None:
        """Register a stream whose request leaves once another engine has room for it."""
        self._staying[stream] = demand

    def forget(self, stream: EngineStream) -> None:
        """Forget a stream that is not read any more. Idempotent."""
        self._staying.pop(stream, None)

    def check_invariants(self) -> None:
        """Assert that each request is woken by the time that another engine has room."""
        for stream, demand in self._staying.items():
            assert stream.away is None or not self._queue.has_room(demand), (
                f"{demand} was not told that another engine has room"
            )

    def capacity_changed(self) -> None:
        """Wake every request with room elsewhere; a request that is too large blocks no other."""
        for stream, demand in list(self._staying.items()):
            if stream.away is not None:
                if not self._queue.has_room(demand):
                    continue
                stream.put(stream.away)
            del self._staying[stream]
