"""When a request wants its slot: not while its prompt is queued, and in time for its KV."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.placement import ANY_GROUP, Placement
from cluster.routing.pools import PoolState
from cluster.routing.slot_moments import ROUND_TRIP_STEPS, SOON_S, SlotMoments
from cluster.routing.slot_queue import SlotQueue
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import make_member

TOKEN_S = 1e-3
STEP_S = 0.05
STEP_TOKENS = make_member("prefill", "p").description.max_num_batched_tokens
EARLY_S = STEP_TOKENS * TOKEN_S + ROUND_TRIP_STEPS * STEP_S
"""A step of the prefill engine, and two of a decode engine."""


def asks(name, num_tokens=1000, **fields):
    return Demand(name, [7] * num_tokens, **fields)


class World:
    """Prefill engines that take 1 ms for a token, and slots on one decode engine."""

    def __init__(self, num_slots=64, num_empty_slots=64, engines=("p",), learned=True):
        self.pools = PoolState()
        for engine in engines:
            self.pools.add(make_member("prefill", engine))
            self.tell(engine, "prefill", [GroupSnapshot(16, [10_000], 0, 0, 0)])
        self.pools.add(make_member("decode", "d", slots_per_group=num_slots))
        self.slots(num_slots, num_empty_slots)
        self.has_free_slots = num_empty_slots > 0
        self.queue = SlotQueue(self.pools, make_policies("least_delay").decode, 1000, 60.0)
        self.moments = SlotMoments(self.pools)
        self.now_s = 0.0
        if learned:
            for length in (500, 1000, 2000, 4000, 8000):
                for _ in range(2):  # A completed prompt is learned with the next one.
                    self.moments.asked(asks("known", length), engines[0], self.now_s)
                    self.now_s += length * TOKEN_S
                    self.moments.computed("known", self.now_s)
            self.moments.asked(asks("last", 1), engines[0], self.now_s)
            self.now_s += TOKEN_S
            self.moments.computed("last", self.now_s)

    def tell(self, engine, role, groups, step_s=0.0, seq=0):
        said = EngineSnapshot(seq, False, 0, 0, 0, groups, role, step_s)
        self.pools.take_snapshot(engine, said)

    def slots(self, num_slots, num_empty_slots, seq=0):
        num_running = num_slots - num_empty_slots
        groups = [GroupSnapshot(num_empty_slots, [10_000], num_running, 0, 0)]
        self.tell("d", "decode", groups, STEP_S, seq)

    def come(self, name, num_tokens=1000, engine="p"):
        """Queue a request whose prompt is asked for now and that is not due."""
        demand = asks(name, num_tokens)
        self.pools.hold(demand, Placement(engine, ANY_GROUP))
        self.moments.asked(demand, engine, self.now_s)
        waiter = self.queue.new_waiter(demand, is_promised=True, is_due=False)
        assert self.queue.enter(waiter, self.now_s) is None
        return waiter

    def due(self):
        due, next_s = self.moments.due(self.queue.waiters, self.now_s)
        return [waiter.demand.request_id for waiter in due], next_s

    def moments_of(self, names, others_s=0.0):
        """Return when each request becomes due while the engine computes prompts in order.

        Prompts of other ingresses come first. A request that is due gets a slot if one is free.
        """
        found = {}
        end_s, ends = self.now_s + others_s, []
        for waiter in self.queue.waiters:
            end_s += waiter.demand.num_prompt_tokens * TOKEN_S
            ends.append((end_s, waiter.demand.request_id))
        while len(found) < len(names):
            due, next_s = self.due()
            found |= dict.fromkeys(due, self.now_s)
            for waiter in [*self.queue.waiters]:
                waiter.is_due |= waiter.demand.request_id in due
                if waiter.is_due and self.has_free_slots:
                    self.queue.leave(waiter)
            if len(found) == len(names):
                break
            assert next_s > self.now_s, "a due request is returned at once"
            self.now_s = min([next_s, *(at_s for at_s, _ in ends)])
            while ends and ends[0][0] <= self.now_s:
                self.moments.computed(ends.pop(0)[1], self.now_s)
            assert self.now_s < 1e6, f"only {found} become due"
        return found


def test_before_anything_is_known_a_slot_is_wanted_at_once():
    world = World(learned=False)
    for i in range(5):
        world.come(f"r{i}", 8000)
    assert world.due()[0] == [f"r{i}" for i in range(5)]


def test_no_slot_is_wanted_while_the_prompt_is_queued():
    world = World()
    start_s = world.now_s
    names = [f"r{i}" for i in range(20)]
    for name in names:
        world.come(name)
    moments_s = world.moments_of(names)
    for i, name in enumerate(names):
        begins_s = start_s + i * 1000 * TOKEN_S
        wanted_s = max(begins_s - EARLY_S, start_s)
        assert abs(moments_s[name] - wanted_s) < SOON_S + 1e-6, f"{name} wants it {moments_s[name]}"


def test_an_early_prompt_makes_later_requests_due_earlier():
    world = World()
    waiters = [world.come(f"r{i}", 4000) for i in range(3)]
    for waiter in waiters[:2]:
        waiter.is_due = True
    _, before_s = world.due()
    world.now_s += 1.0
    world.moments.computed("r0", world.now_s)
    assert abs(world.due()[1] - (before_s - 3.0)) < 1e-6


def test_a_late_engine_makes_later_requests_due_later():
    world = World()
    waiters = [world.come(f"r{i}", 4000) for i in range(3)]
    for waiter in waiters[:2]:
        waiter.is_due = True
    _, before_s = world.due()
    world.now_s = before_s  # The first should have been done long ago, and the second nearly.
    due, next_s = world.due()
    assert due == []
    assert abs(next_s - (world.now_s + 4.0 - EARLY_S)) < 1e-6


def test_prompts_of_other_ingresses_make_requests_due_later():
    alone, beside = World(), World()
    # Another ingress has asked for so many; the engine says that they wait there.
    said = EngineSnapshot(
        1, False, 8, 8000, 0, [GroupSnapshot(16, [10_000], 0, 0, 0)], "prefill", 0.0
    )
    beside.pools.take_snapshot("p", said)
    for world in (alone, beside):
        world.come("first", 2000)
        world.come("second", 2000)
    first_s = alone.moments_of(["first", "second"])
    put_off_s = beside.moments_of(["first", "second"], others_s=8.0)
    assert put_off_s["first"] - first_s["first"] > 7.0
    assert put_off_s["second"] - first_s["second"] > 5.0


def test_a_request_is_due_earlier_by_its_expected_wait_for_a_slot():
    moments_s = []
    for num_empty_slots in (8, 0):
        world = World(num_slots=8, num_empty_slots=num_empty_slots)
        world.moments.saw_slot(8.0, 100)  # One becomes free each second.
        names = [f"r{i}" for i in range(4)]
        for name in names:
            world.come(name, 4000)
        moments_s.append(world.moments_of(names))
    free, taken = moments_s
    early_s = [free[name] - taken[name] for name in names]
    # The second request waits for two slots to become free, and so on.
    assert early_s == pytest.approx([0.0, 2.0, 3.0, 4.0], abs=SOON_S)


def test_a_request_whose_prompt_was_dropped_is_due_at_once():
    world = World()
    for i in range(6):
        world.come(f"r{i}", 8000)
    world.moments.dropped("r5")
    world.moments.dropped("r5")
    assert "r5" in world.due()[0], "no engine has its prompt, so it is due"
    for i in range(5):
        world.moments.computed(f"r{i}", world.now_s)
        world.moments.computed(f"r{i}", world.now_s)
    world.moments.check_empty()


def test_the_last_engine_asked_counts():
    world = World(engines=("p", "q"))
    for i in range(6):
        world.come(f"r{i}", 8000)
    assert "r5" not in world.due()[0]
    demand = next(w.demand for w in world.queue.waiters if w.demand.request_id == "r5")
    world.moments.asked(demand, "q", world.now_s)
    assert "r5" in world.due()[0], "its prompt is first there"


def test_behind_a_late_engine_due_is_not_polled_for_ever():
    world = World()
    world.come("late", 1000)
    world.come("behind", round((EARLY_S + SOON_S / 2) / TOKEN_S))
    world.come("last", 1000)
    world.now_s += 5.0
    for _ in range(100):
        due, next_s = world.due()
        if "last" in due:
            return
        world.now_s = next_s
    pytest.fail("it never wants its slot, and is asked for it all the time")


lengths = st.lists(st.integers(1, 8000), min_size=1, max_size=12)


@given(lengths=lengths, num_empty_slots=st.integers(0, 8), slot_s=st.floats(0.0, 30.0))
def test_requests_become_due_in_order_before_their_prompts_begin(lengths, num_empty_slots, slot_s):
    world = World(num_slots=8, num_empty_slots=num_empty_slots)
    world.moments.saw_slot(slot_s, 10)
    start_s = world.now_s
    names = [f"r{i}" for i in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        world.come(name, length)
    begins_s = world.moments._backlog.begins_s("p", 0, start_s)
    assert [*begins_s] == names
    assert all(before <= after for before, after in pairwise(begins_s.values()))
    moments_s = world.moments_of(names)
    assert set(moments_s) == set(names), "every request becomes due"
    for name in names:
        assert moments_s[name] <= max(begins_s[name], start_s) + 1e-6


def test_engines_that_come_and_go_leave_no_state():
    world = World()
    for number in range(50):
        engine = f"new{number}"
        world.pools.add(make_member("prefill", engine))
        world.tell(engine, "prefill", [GroupSnapshot(16, [10_000], 0, 0, 0)])
        world.moments.asked(asks(engine), engine, world.now_s)
        world.moments.computed(engine, world.now_s)
        world.pools.remove(engine)
    assert len(world.moments._backlog._work) <= 3
