"""The queue of an ingress alone: who is woken, and when."""

import asyncio

import pytest

from cluster.errors import NotReadyError, SaturatedError
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


def test_full_queue_lets_nobody_in_but_those_it_has_promised_to():
    pools = PoolState()
    pools.add(make_member("decode", "one"))
    full = EngineSnapshot(0, False, 0, 0, 0, [GroupSnapshot(0, 8, 0, 0, 0)])

    async def run():
        queue = SlotQueue(pools, MostEmptySlots(), max_queued_requests=1, timeout_s=5.0)
        with pytest.raises(NotReadyError):
            queue.check_open()
        pools.take_snapshot("one", full)
        queue.check_open()
        waiting = [asyncio.ensure_future(queue.hold("a", 1, queue.new_place()))]
        await asyncio.sleep(0)
        with pytest.raises(SaturatedError):
            queue.check_open()
        with pytest.raises(SaturatedError):
            await queue.hold("b", 1, queue.new_place())
        place = queue.new_place(is_promised=True)
        waiting.append(asyncio.ensure_future(queue.hold("c", 1, place)))
        await asyncio.sleep(0)
        assert len(queue) == 2
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())


def test_queue_without_room_for_anybody_still_lets_in_whoever_need_not_wait():
    pools = PoolState()
    pools.add(make_member("decode", "one"))
    pools.take_snapshot("one", snapshot(0))
    SlotQueue(pools, MostEmptySlots(), max_queued_requests=0, timeout_s=5.0).check_open()
