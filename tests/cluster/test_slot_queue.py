"""The queue of an ingress alone: who is woken, and when."""

import asyncio

from cluster.placement import MostEmptySlots
from cluster.pools import PoolState
from cluster.slot_queue import SlotQueue
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import make_member


def snapshot(seq):
    return EngineSnapshot(seq, False, 0, 0, 0, [GroupSnapshot(1, 8, 0, 0, 0)])


def test_slot_that_came_free_while_the_request_was_being_refused_is_found():
    pools = PoolState()
    pools.add(make_member("decode", "one"))
    pools.take_snapshot("one", snapshot(0))

    async def run():
        queue = SlotQueue(pools, MostEmptySlots(), max_queued_requests=4, timeout_s=5.0)
        place = queue.new_place()
        placement = await queue.hold("a", 1, place)
        # The engine says no; before the request is back in the queue, its snapshot says room.
        pools.release("a", "one")
        pools.take_snapshot("one", snapshot(1))
        queue.capacity_changed()
        place.refused.add(placement)
        assert await queue.hold("a", 1, place) == placement

    asyncio.run(run())
