"""The slot queue of an ingress alone: which request is placed or woken, and when."""

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.errors import NotReadyError, QueueTimeoutError, SaturatedError
from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.placement import Placement
from cluster.routing.pools import PoolState
from cluster.routing.slot_queue import SlotQueue
from cluster.routing.slot_waits import SlotWaits
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import BLOCK_SIZE, make_member

TIMEOUT_S = 5.0


def snapshot(seq, num_slots=1, num_blocks=8):
    return EngineSnapshot(seq, False, 0, 0, 0, [GroupSnapshot(num_slots, [num_blocks], 0, 0, 0)])


def asks(request_id, num_blocks=1, **fields):
    """Return a request that needs this many blocks to start."""
    return Demand(request_id, [7] * (num_blocks * BLOCK_SIZE - 1), **fields)


def one_engine(num_slots=1):
    pools = PoolState()
    pools.add(make_member("decode", "one"))
    pools.take_snapshot("one", snapshot(0, num_slots))
    return pools


def make(pools, max_queued_requests=4, timeout_s=TIMEOUT_S):
    queue = SlotQueue(
        pools, make_policies("most_empty_slots").decode, max_queued_requests, timeout_s
    )
    return queue, SlotWaits(queue, pools)


def position(waiter):
    """Return where a request stands: by priority, then by arrival."""
    return waiter.demand.priority, waiter.order


# --- the core against a model --------------------------------------------------------------------


class SlotQueueMachine(RuleBasedStateMachine):
    """Engines of one slot each, against a list in order and a set of free engines."""

    waiting = Bundle("waiting")

    def __init__(self):
        super().__init__()
        self.pools = PoolState()
        self.queue, _ = make(self.pools, max_queued_requests=3, timeout_s=10.0)
        self.now_s = 0.0
        self.seq = 0
        # The model: reported slots of each engine, their holders, and the queue.
        self.slots = {}
        self.held = {}
        self.line = []
        self.num_requests = 0
        for name in ("e0", "e1"):
            self.pools.add(make_member("decode", name))
            self.say(name, 0)

    def say(self, engine, num_slots):
        self.seq += 1
        self.pools.take_snapshot(engine, snapshot(self.seq, num_slots))
        self.slots[engine] = num_slots

    def room(self):
        taken = list(self.held.values())
        return sum(max(n - taken.count(e), 0) for e, n in self.slots.items())

    def settle(self):
        """Check that every due request with room is placed, in order."""
        for waiter, placement in self.queue.assign():
            assert self.due()[0] is waiter
            self.line.remove(waiter)
            self.held[waiter] = placement.incarnation

    def due(self):
        return [waiter for waiter in self.line if waiter.is_due]

    @rule(target=waiting, priority=st.integers(0, 1))
    def enter_early(self, priority):
        """Queue a request that is not due: it keeps its place even if there is room."""
        self.num_requests += 1
        demand = asks(f"r{self.num_requests}", priority=priority)
        waiter = self.queue.new_waiter(demand, is_promised=True, is_due=False)
        assert self.queue.enter(waiter, self.now_s) is None
        self.line = sorted([*self.line, waiter], key=position)
        self.settle()
        assert waiter in self.line
        return waiter

    @rule(waiter=waiting)
    def come_due(self, waiter):
        if waiter in self.line:
            was_due_s = waiter.due_s if waiter.is_due else self.now_s
            self.queue.set_due(waiter, self.now_s)
            assert (waiter.due_s, waiter.deadline_s) >= (was_due_s, was_due_s)
            self.settle()

    @rule(target=waiting, priority=st.integers(0, 1), patience_s=st.none() | st.integers(1, 20))
    def enter(self, priority, patience_s):
        self.num_requests += 1
        deadline_s = None if patience_s is None else self.now_s + patience_s
        demand = asks(f"r{self.num_requests}", priority=priority, deadline_s=deadline_s)
        waiter = self.queue.new_waiter(demand)
        is_next = not self.due() or position(waiter) < position(self.due()[0])
        has_room = is_next and self.room() > 0
        num_early = sum(not waiter.is_due for waiter in self.line)
        num_waiting = len(self.line) - min(num_early, self.room())
        try:
            placement = self.queue.enter(waiter, self.now_s)
        except SaturatedError:
            assert num_waiting >= 3
            assert not has_room
            return waiter
        assert (placement is not None) == has_room
        if placement is not None:
            self.held[waiter] = placement.incarnation
        else:
            assert num_waiting < 3
            self.line = sorted([*self.line, waiter], key=position)
            limit_s = self.now_s + 10.0
            assert waiter.deadline_s == (
                limit_s if deadline_s is None else min(deadline_s, limit_s)
            )
        return waiter

    @rule(engine=st.sampled_from(["e0", "e1"]), num_slots=st.integers(0, 2))
    def free(self, engine, num_slots):
        self.say(engine, num_slots)
        self.settle()

    @rule(waiter=waiting)
    def refuse(self, waiter):
        """Refuse a placed request before a snapshot comes: it returns to its place."""
        engine = self.held.pop(waiter, None)
        if engine is None:
            return
        self.pools.release(waiter.demand.request_id, engine)
        self.queue.refuse(waiter, Placement(engine, 0))
        # However many wait by now: it keeps the place that it had.
        placement = self.queue.enter(waiter, self.now_s)
        if placement is not None:
            assert placement.incarnation != engine or waiter.num_snapshots < self.pools.num_changes
            self.held[waiter] = placement.incarnation
        else:
            self.line = sorted([*self.line, waiter], key=position)
        # The place that refused it is free for other requests.
        self.settle()

    @rule(waiter=consumes(waiting))
    def leave(self, waiter):
        engine = self.held.pop(waiter, None)
        if engine is not None:
            self.pools.release(waiter.demand.request_id, engine)
        self.queue.leave(waiter)
        self.queue.leave(waiter)
        if waiter in self.line:
            self.line.remove(waiter)
        self.settle()

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds):
        self.now_s += seconds
        late = [w for w in self.due() if w.deadline_s <= self.now_s]
        assert self.queue.expire(self.now_s) == late
        self.line = [w for w in self.line if w not in late]
        self.settle()

    @invariant()
    def nobody_waits_for_whom_there_is_room_and_the_order_holds(self):
        self.queue.check_invariants()
        assert len(self.queue) == len(self.line)
        assert sorted(self.pools.holds()) == sorted(
            (engine, w.demand.request_id) for w, engine in self.held.items()
        )


TestSlotQueue = SlotQueueMachine.TestCase


def test_a_request_that_is_not_due_blocks_no_other_and_keeps_its_place():
    pools = one_engine(num_slots=0)
    queue, _ = make(pools)
    early = queue.new_waiter(asks("early"), is_promised=True, is_due=False)
    later = queue.new_waiter(asks("later"))
    for waiter in (early, later):
        assert queue.enter(waiter, 0.0) is None
    assert (early.deadline_s, later.deadline_s) == (None, TIMEOUT_S)
    pools.take_snapshot("one", snapshot(1))
    assert [waiter for waiter, _ in queue.assign()] == [later]
    queue.set_due(early, 2.0)
    assert early.deadline_s == 2.0 + TIMEOUT_S, "it waits for a slot since then"
    pools.take_snapshot("one", snapshot(2, num_slots=2))
    assert [waiter for waiter, _ in queue.assign()] == [early]


# --- the shell -----------------------------------------------------------------------------------


async def test_slot_that_came_free_while_the_request_was_being_refused_is_found():
    pools = one_engine()
    queue, waits = make(pools)
    waiter = queue.new_waiter(asks("a"))
    placement = await waits.wait(waiter)
    # The engine says no; before the request is back in the queue, its snapshot says room.
    pools.release("a", "one")
    pools.take_snapshot("one", snapshot(1))
    waits.capacity_changed()
    queue.refuse(waiter, placement)
    assert await waits.wait(waiter) == placement


async def test_refused_request_does_not_ask_again_before_something_has_changed():
    pools = one_engine()
    queue, waits = make(pools)
    waiter = queue.new_waiter(asks("a"))
    placement = await waits.wait(waiter)
    pools.release("a", "one")
    queue.refuse(waiter, placement)
    waiting = asyncio.ensure_future(waits.wait(waiter))
    for _ in range(3):
        await asyncio.sleep(0)
        waits.capacity_changed()
    assert not waiting.done()
    pools.take_snapshot("one", snapshot(1))
    waits.capacity_changed()
    assert await waiting == placement


async def test_full_queue_accepts_only_promised_requests():
    pools = PoolState()
    pools.add(make_member("decode", "one"))
    queue, waits = make(pools, max_queued_requests=1)
    with pytest.raises(NotReadyError):
        queue.check_open()
    pools.take_snapshot("one", snapshot(0, num_slots=0))
    queue.check_open()
    waiting = [asyncio.ensure_future(waits.wait(queue.new_waiter(asks("a"))))]
    await asyncio.sleep(0)
    with pytest.raises(SaturatedError):
        queue.check_open()
    with pytest.raises(SaturatedError):
        await waits.wait(queue.new_waiter(asks("b")))
    waiter = queue.new_waiter(asks("c"), is_promised=True)
    waiting.append(asyncio.ensure_future(waits.wait(waiter)))
    await asyncio.sleep(0)
    assert len(queue) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(queue) == 0


async def test_a_request_not_due_with_a_free_slot_does_not_fill_the_queue():
    pools = one_engine(num_slots=2)
    queue, waits = make(pools, max_queued_requests=1)
    early = [queue.new_waiter(asks(name), is_promised=True, is_due=False) for name in "abc"]
    for waiter in early[:2]:
        waits.enter(waiter)
        queue.check_open()
    waits.enter(early[2])
    with pytest.raises(SaturatedError, match="1 requests are queued"):
        queue.check_open()
    for waiter in early:
        waits.leave(waiter)


def test_queue_of_size_zero_accepts_requests_that_need_not_wait():
    make(one_engine(), max_queued_requests=0)[0].check_open()


async def test_one_snapshot_wakes_every_request_that_now_fits():
    pools = one_engine(num_slots=0)
    queue, waits = make(pools)
    waiting = [asyncio.ensure_future(waits.wait(queue.new_waiter(asks(f"r{i}")))) for i in range(3)]
    await asyncio.sleep(0)
    pools.take_snapshot("one", snapshot(1, num_slots=2))
    waits.capacity_changed()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    waiting[2].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_loss_of_the_last_decode_engine_ends_all_waits():
    pools = one_engine(num_slots=0)
    queue, waits = make(pools)
    waiting = [asyncio.ensure_future(waits.wait(queue.new_waiter(asks(n)))) for n in "ab"]
    await asyncio.sleep(0)
    pools.remove("one")
    waits.capacity_changed()
    for task in waiting:
        with pytest.raises(NotReadyError):
            await task
    assert len(queue) == 0


async def test_a_promised_request_waits_for_a_decode_engine_to_return():
    pools = one_engine(num_slots=0)
    queue, waits = make(pools)
    early = asyncio.ensure_future(waits.wait(queue.new_waiter(asks("a"), is_promised=True)))
    await asyncio.sleep(0)
    pools.remove("one")
    waits.capacity_changed()
    late = asyncio.ensure_future(waits.wait(queue.new_waiter(asks("b"), is_promised=True)))
    await asyncio.sleep(0)
    with pytest.raises(NotReadyError):
        await waits.wait(queue.new_waiter(asks("c")))
    assert len(queue) == 2
    pools.add(make_member("decode", "two"))
    pools.take_snapshot("two", snapshot(0, num_slots=2))
    waits.capacity_changed()
    assert [p.incarnation for p in await asyncio.gather(early, late)] == ["two"] * 2


@pytest.mark.parametrize("whose", ["queue", "request"])
async def test_a_request_that_waits_too_long_fails_and_the_next_is_tried(whose):
    pools = one_engine(num_slots=1)
    now_s = asyncio.get_running_loop().time()
    queue, waits = make(pools, timeout_s=0.05 if whose == "queue" else TIMEOUT_S)
    large = asks("large", 9, deadline_s=now_s + 0.05 if whose == "request" else None)
    first = asyncio.ensure_future(waits.wait(queue.new_waiter(large)))
    await asyncio.sleep(0.02)
    second = asyncio.ensure_future(waits.wait(queue.new_waiter(asks("small"))))
    with pytest.raises(QueueTimeoutError):
        await first
    assert (await second).incarnation == "one", "the large one was in its way"


async def test_client_that_leaves_at_its_placement_leaves_the_slot_to_the_next():
    pools = one_engine(num_slots=0)
    queue, waits = make(pools)
    leaver, other = (asyncio.ensure_future(waits.wait(queue.new_waiter(asks(n)))) for n in "ab")
    await asyncio.sleep(0)
    pools.take_snapshot("one", snapshot(1))
    waits.capacity_changed()
    assert pools.holds() == [("one", "a")]
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert (await other).incarnation == "one"
    assert pools.holds() == [("one", "b")]


@pytest.mark.parametrize("moment", ["room", "no decoder", "too late"])
async def test_client_that_left_in_the_same_turn_of_the_loop_is_given_nothing(moment):
    """Its future is cancelled at once, its task runs later: events may come in between."""
    pools = one_engine(num_slots=0)
    queue, waits = make(pools)
    leaver, other = (asyncio.ensure_future(waits.wait(queue.new_waiter(asks(n)))) for n in "ab")
    await asyncio.sleep(0)
    leaver.cancel()
    if moment == "room":
        pools.take_snapshot("one", snapshot(1))
    elif moment == "no decoder":
        pools.remove("one")
    if moment == "too late":
        waits._expire(asyncio.get_running_loop().time() + TIMEOUT_S)
    else:
        waits.capacity_changed()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    if moment == "room":
        assert (await other).incarnation == "one"
        assert pools.holds() == [("one", "b")]
    else:
        with pytest.raises((NotReadyError, QueueTimeoutError)):
            await other
    assert len(queue) == 0


def test_a_stream_without_room_blocks_no_other_request():
    """The stream is first in the queue, and is not urgent."""
    pools = one_engine(num_slots=0)
    queue, _ = make(pools, max_queued_requests=2)
    heirs = [
        queue.new_waiter(asks(f"heir {n}", 20), is_promised=True, has_stream=True) for n in range(3)
    ]
    for heir in heirs:
        assert queue.enter(heir, 0.0) is None
    queue.check_open()
    pools.take_snapshot("one", snapshot(1, num_slots=2))
    assert queue.assign() == []
    assert queue.has_room(asks("asks"))
    assert queue.enter(queue.new_waiter(asks("a")), 0.0) is not None
    assert queue.enter(queue.new_waiter(asks("b")), 0.0) is not None
    waiter = queue.new_waiter(asks("c"))
    assert queue.enter(waiter, 0.0) is None
    assert not queue.has_room(asks("asks"))
    queue.check_invariants()
    pools.release("a", "one")
    assert [w for w, _ in queue.assign()] == [waiter]
    pools.take_snapshot("one", snapshot(2, num_slots=5, num_blocks=100))
    assert [w for w, _ in queue.assign()] == heirs


@pytest.mark.parametrize("comes_late", [False, True])
def test_stream_that_does_not_fit_keeps_no_smaller_stream_from_moving(comes_late):
    pools = one_engine(num_slots=0)
    queue, _ = make(pools)
    large = queue.new_waiter(asks("large", 20), is_promised=True, has_stream=True)
    small = queue.new_waiter(asks("small", 1), is_promised=True, has_stream=True)
    assert queue.enter(large, 0.0) is None
    if comes_late:
        pools.take_snapshot("one", snapshot(1, num_slots=2, num_blocks=8))
        assert queue.assign() == []
        assert queue.enter(small, 0.0) is not None
    else:
        assert queue.enter(small, 0.0) is None
        pools.take_snapshot("one", snapshot(1, num_slots=2, num_blocks=8))
        assert [waiter for waiter, _ in queue.assign()] == [small]
    queue.check_invariants()
    assert queue.waiters == [large]


def test_invariants_find_a_stream_that_waits_although_there_is_room():
    pools = one_engine(num_slots=0)
    queue, _ = make(pools)
    for name, num_blocks in (("large", 20), ("small", 1)):
        queue.enter(queue.new_waiter(asks(name, num_blocks), is_promised=True, has_stream=True), 0)
    pools.take_snapshot("one", snapshot(1, num_slots=2, num_blocks=8))
    with pytest.raises(AssertionError, match="small"):
        queue.check_invariants()


async def test_an_abandoned_wait_releases_its_place_before_its_task_runs():
    pools = one_engine(num_slots=0)
    queue, waits = make(pools)
    waiter = queue.new_waiter(asks("r"), is_promised=True, has_stream=True)
    heir = asyncio.ensure_future(waits.wait(waiter))
    await asyncio.sleep(0)
    pools.take_snapshot("one", snapshot(1, num_slots=2))
    waits.capacity_changed()
    assert pools.holds() == [("one", "r")]
    heir.cancel()
    waits.abandon(waiter)
    assert pools.holds() == []
    # The same request, whose engine has just died.
    assert (await waits.wait(queue.new_waiter(asks("r"), is_promised=True))).incarnation
    with pytest.raises(asyncio.CancelledError):
        await heir
    assert pools.holds() == [("one", "r")], "a hold given up takes no other along"
