"""Who stays with a decode engine that stalls, or hands over, as nobody else has room. Pure.

Owner: one ingress's event loop; of who stays, and is told as soon as there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.routing.demand import Demand
    from cluster.routing.slot_queue import SlotQueue
    from replicas.streams import EngineStream


class Stalls:
    """See the module docstring.

    Args:
        queue: Whoever waits there for a slot goes first.
    """

    def __init__(self, queue: SlotQueue) -> None:
        self._queue = queue
        self._staying: dict[EngineStream, Demand] = {}

    def has_room(self, demand: Demand) -> bool:
        """Whether a request that leaves its engine would have another one at once."""
        return self._queue.has_room(demand)

    def stay(self, stream: EngineStream, demand: Demand) -> None:
        """Tell this stream once more to go as soon as another engine has room."""
        self._staying[stream] = demand

    def forget(self, stream: EngineStream) -> None:
        """Nobody listens to this stream any more. Idempotent."""
        self._staying.pop(stream, None)

    def check_invariants(self) -> None:
        """Nobody stays, who was not told, while another engine has room."""
        for stream, demand in self._staying.items():
            assert stream.away is None or not self._queue.has_room(demand), (
                f"{demand} was not told that another engine has room"
            )

    def capacity_changed(self) -> None:
        """Tell whoever has room elsewhere: one who needs more than there is keeps nobody here."""
        for stream, demand in list(self._staying.items()):
            if stream.away is not None:
                if not self._queue.has_room(demand):
                    continue
                stream.put(stream.away)
            del self._staying[stream]
