"""The pool state of an ingress: snapshots of replicas, less requests sent since."""

import itertools

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.routing.breaker import FIRST_OPEN_S, THRESHOLD
from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.learned_costs import LearnedCosts
from cluster.routing.placement import ANY_GROUP, Placement
from cluster.routing.pools import PoolState
from replicas.messages import EngineSnapshot, GroupSnapshot, StepWork
from tests.cluster.engines import make_member
from tests.kv_groups import one_kv_group

BLOCK_SIZE = 32
INCARNATIONS = ("p0", "p1", "d0", "d1", "b0")
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
NUM_GROUPS = 2
COUNTS = st.integers(0, 3)


def role_of(incarnation):
    return ROLES[incarnation[0]]


def snapshot(
    seq,
    groups,
    *,
    role="decode",
    draining=False,
    num_waiting=0,
    num_waiting_tokens=0,
    **steps,
):
    numbers = num_waiting, num_waiting_tokens, 0
    return EngineSnapshot(seq, draining, *numbers, groups, role, **steps)


def idle(seq=0, num_slots=2, num_blocks=8, role="decode"):
    return snapshot(seq, [GroupSnapshot(num_slots, [num_blocks], 0, 0, 0)] * NUM_GROUPS, role=role)


def asks(request_id, num_blocks):
    """Return a request that needs this many blocks to start."""
    return Demand(request_id, [7] * (num_blocks * BLOCK_SIZE - 1))


def hold_decode(pools, request_id, placement, num_blocks):
    pools.hold(asks(request_id, num_blocks), placement)


def hold_prefill(pools, request_id, incarnation, num_tokens):
    pools.hold(Demand(request_id, [7] * num_tokens), Placement(incarnation, ANY_GROUP))


class PoolStateMachine(RuleBasedStateMachine):
    """The pool state against a model with the newest snapshot and open holds of each replica."""

    holds = Bundle("holds")

    def __init__(self):
        super().__init__()
        self.pools = PoolState()
        self.snapshots = {}
        self.held = {}
        self.num_requests = 0

    @rule(incarnation=st.sampled_from(INCARNATIONS))
    def add(self, incarnation):
        self.pools.add(make_member(role_of(incarnation), incarnation))
        self.snapshots.setdefault(incarnation, None)
        self.held.setdefault(incarnation, {})

    @rule(incarnation=st.sampled_from(INCARNATIONS))
    def remove(self, incarnation):
        self.pools.remove(incarnation)
        self.snapshots.pop(incarnation, None)
        self.held.pop(incarnation, None)

    @rule(
        incarnation=st.sampled_from(INCARNATIONS),
        seq=st.integers(0, 9),
        groups=st.lists(
            st.builds(GroupSnapshot, COUNTS, COUNTS.map(lambda n: [n]), COUNTS, COUNTS, COUNTS),
            min_size=NUM_GROUPS,
            max_size=NUM_GROUPS,
        ),
        draining=st.booleans(),
        waiting=COUNTS,
        role=st.none() | st.sampled_from(sorted(ROLES.values())),
        step_s=st.none() | st.floats(0.01, 1.0),
    )
    def take_snapshot(self, incarnation, seq, groups, draining, waiting, role, step_s):
        new = snapshot(
            seq,
            groups,
            role=role or role_of(incarnation),
            draining=draining,
            num_waiting=waiting,
            num_waiting_tokens=waiting * 7,
            decode_step=None if step_s is None else StepWork(2, 9, 5, 0, 0, 0, step_s),
        )
        self.pools.take_snapshot(incarnation, new)
        old = self.snapshots.get(incarnation)
        if incarnation in self.snapshots and (old is None or seq >= old.seq):
            self.snapshots[incarnation] = new

    @rule(
        target=holds,
        incarnation=st.sampled_from(INCARNATIONS),
        group=st.integers(0, NUM_GROUPS - 1),
        size=st.integers(1, 4),
    )
    def hold(self, incarnation, group, size):
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        if role_of(incarnation) == "prefill":
            hold_prefill(self.pools, request_id, incarnation, size)
            kept = (ANY_GROUP, 1, size)
        else:
            hold_decode(self.pools, request_id, Placement(incarnation, group), size)
            kept = (group, size, size * BLOCK_SIZE - 1)
        if incarnation in self.held:
            self.held[incarnation][request_id] = kept
        return request_id, incarnation

    @rule(hold=consumes(holds), times=st.integers(1, 2))
    def release(self, hold, times):
        for _ in range(times):
            self.pools.release(*hold)
        self.held.get(hold[1], {}).pop(hold[0], None)

    @rule()
    def what_is_kept_of_snapshots_is_what_they_say(self):
        """Cached values equal new ones to the last bit. Called seldom, as it renews the caches."""
        self.pools.check_invariants()

    def teardown(self):
        self.pools.check_invariants()

    @invariant()
    def views_are_the_snapshots_less_the_holds(self):
        decode = [
            (
                incarnation,
                g,
                taken.role,
                max(group.num_empty_slots - group.num_waiting - len(sizes), 0),
                [max(num_free - sum(sizes), 0) for num_free in group.num_free_blocks],
                group.num_running + group.num_reserved + group.num_waiting + len(sizes),
                taken.num_waiting_tokens,
            )
            for incarnation, taken in self.open_replicas()
            if taken.role != "prefill"
            for g, group in enumerate(taken.groups)
            for sizes in [[size for at, size, _ in self.held[incarnation].values() if at == g]]
        ]
        views = self.pools.decode_views()
        assert [
            (v.incarnation, v.dp_group, self.pools.snapshot(v.incarnation).role, v.num_empty_slots,
             v.num_free_blocks, v.num_active, v.num_queued_tokens)
            for v in views
        ] == decode, "also in the order of adding"  # fmt: skip
        prefill = [
            (
                incarnation,
                taken.num_waiting_tokens + sum(n for _, _, n in self.held[incarnation].values()),
                taken.num_waiting
                + sum(g.num_running for g in taken.groups)
                + len(self.held[incarnation]),
            )
            for incarnation, taken in self.open_replicas()
            if taken.role == "prefill"
        ]
        engines = self.pools.prefill_views()
        assert [(v.incarnation, v.num_queued_tokens, v.num_active) for v in engines] == prefill
        for listed in (views, engines):
            assert [v.index for v in listed] == list(range(len(listed)))
        held = [(i, r) for i, holds in self.held.items() for r in holds]
        assert sorted(self.pools.holds()) == sorted(held)

    @invariant()
    def members_are_those_added_and_not_removed(self):
        assert {m.description.incarnation for m in self.pools.members()} == set(self.snapshots)
        for pool in ROLES.values():
            is_open = any(role_of(i) == pool for i, _ in self.open_replicas())
            assert self.pools.has_open(pool) == is_open
        roles = {taken.role for _, taken in self.open_replicas()}
        assert self.pools.may_decode == bool(roles & {"decode", "both"})
        assert self.pools.can_prefill == ("prefill" in roles)

    def open_replicas(self):
        return [(i, s) for i, s in self.snapshots.items() if s is not None and not s.draining]


TestPoolState = PoolStateMachine.TestCase


def decode_pool():
    pools = PoolState()
    pools.add(make_member("decode", "d0"))
    pools.take_snapshot("d0", idle())
    return pools


def test_holding_twice_on_one_replica_is_a_bug():
    pools = decode_pool()
    hold_decode(pools, "r", Placement("d0", 0), 1)
    with pytest.raises(AssertionError, match="held twice"):
        hold_decode(pools, "r", Placement("d0", 1), 1)


# --- views that are kept -------------------------------------------------------------------------


def order(pools):
    return [(v.incarnation, v.dp_group) for v in pools.decode_views()]


def three_replicas():
    pools = PoolState()
    for role, incarnation in (("decode", "d0"), ("prefill", "p0"), ("both", "b0")):
        pools.add(make_member(role, incarnation))
        pools.take_snapshot(incarnation, idle(role=role))
    return pools


def test_snapshots_are_in_the_views_once_settled():
    """So that no request waits while earlier snapshots are worked out."""
    pools = three_replicas()
    views = pools.decode_views()
    pools.take_snapshot("d0", idle(seq=1, num_slots=1))
    pools.settle()
    assert [view.num_empty_slots for view in views] == [1, 1, 2, 2]


def test_costs_do_not_depend_on_when_snapshots_settle():
    step = StepWork(4, 400, 100, 0, 0, 0, 0.02)
    snapshots = [msgspec.structs.replace(idle(seq=seq), decode_step=step) for seq in (1, 2)]
    told = []
    for settles in (True, False):
        pools = three_replicas()
        for name in ("d0", "b0"):
            for snapshot in snapshots:
                pools.take_snapshot(name, snapshot)
                if settles:
                    pools.settle()
        told.append((pools.num_steps_learned, pools.pool_costs, list(pools.decode_views())))
    assert told[0] == told[1]
    assert told[0][0] == 2


def test_a_snapshot_that_cannot_be_learned_raises_once(monkeypatch):
    pools = three_replicas()
    pools.settle()
    learn = LearnedCosts.learn

    def learn_or_fail(self, pool, incarnation, steps):
        if incarnation == "d0":
            raise ArithmeticError("a step like no other")
        return learn(self, pool, incarnation, steps)

    monkeypatch.setattr(LearnedCosts, "learn", learn_or_fail)
    step = StepWork(4, 400, 100, 0, 0, 0, 0.02)
    for name in ("d0", "b0"):
        told = msgspec.structs.replace(idle(seq=1, num_slots=1), decode_step=step)
        pools.take_snapshot(name, told)
    with pytest.raises(ArithmeticError):
        pools.settle()
    assert [view.num_empty_slots for view in pools.decode_views()] == [1, 1, 1, 1]
    assert pools.num_steps_learned == 1
    for seq in (2, 3):
        step = msgspec.structs.replace(step, num_rows=4 + seq)
        pools.take_snapshot("d0", msgspec.structs.replace(idle(seq=seq), decode_step=step))
    with pytest.raises(ArithmeticError):
        pools.remove("d0")
    assert order(pools) == [("b0", 0), ("b0", 1)]
    assert pools.num_steps_learned == 1


def test_a_lost_replicas_steps_are_learned_before_it_is_forgotten():
    pools = three_replicas()
    step = StepWork(4, 400, 100, 0, 0, 0, 0.02)
    pools.take_snapshot("d0", msgspec.structs.replace(idle(seq=1), decode_step=step))
    pools.remove("d0")
    assert pools.num_steps_learned == 1
    assert order(pools) == [("b0", 0), ("b0", 1)]


def test_snapshots_are_counted_when_they_are_taken_over():
    pools = three_replicas()
    assert pools.num_snapshots == 3
    pools.take_snapshot("d0", idle(seq=5))
    pools.take_snapshot("d0", idle(seq=4))
    pools.take_snapshot("gone", idle())
    assert pools.num_snapshots == 4


def test_holds_are_counted_in_blocks_of_their_engine():
    pools = PoolState()
    for incarnation, block_size in (("small", 32), ("large", 64)):
        pools.add(make_member("decode", incarnation, kv_groups=one_kv_group(9, block_size)))
        pools.take_snapshot(incarnation, idle())
        pools.hold(Demand("r", [7] * 127), Placement(incarnation, 0))
    assert [(v.incarnation, v.num_free_blocks) for v in pools.decode_views()] == [
        ("small", [4]), ("small", [8]), ("large", [6]), ("large", [8]),
    ]  # fmt: skip


def pool_of(**engines):
    """Return decode engines of one slot: {name: (KV groups, free blocks of each)}."""
    pools = PoolState()
    for incarnation, (kv_groups, free_blocks) in engines.items():
        pools.add(make_member("decode", incarnation, kv_groups=kv_groups))
        group = GroupSnapshot(1, free_blocks, 0, 0, 0)
        pools.take_snapshot(incarnation, snapshot(0, [group]))
    return pools


def placed(demand, **engines):
    placement = make_policies("most_empty_slots").decode.place(
        demand, pool_of(**engines).decode_views()
    )
    return placement and placement.incarnation


def test_need_is_counted_in_the_blocks_of_the_group_that_is_looked_at():
    """Four blocks of 32 tokens, or two of 64."""
    demand = Demand("r", [7] * 127)
    small, large = (one_kv_group(9, 32), [3]), (one_kv_group(9, 64), [2])
    assert placed(demand, small=small) is None
    assert placed(demand, small=small, large=large) == "large"


def test_a_request_needs_its_blocks_in_every_kv_group():
    demand, both = Demand("r", [7] * 127), (*one_kv_group(9, 32), *one_kv_group(9, 64))
    for free_blocks in ([3, 2], [4, 1], [9, 0]):
        assert placed(demand, e=(both, free_blocks)) is None, free_blocks
    assert placed(demand, e=(both, [4, 2])) == "e"
    assert placed(demand, a=(both, [9, 2]), b=(both, [5, 3])) == "b", "no KV group is nearly full"


def test_a_hold_takes_its_blocks_in_every_kv_group():
    pools = pool_of(e=((*one_kv_group(9, 32), *one_kv_group(9, 64)), [8, 3]))
    for request_id, free_blocks, num_tokens in (("r", [4, 1], 64), ("s", [0, 0], 0)):
        pools.hold(Demand(request_id, [7] * 127), Placement("e", 0))
        [view] = pools.decode_views()
        assert (view.num_free_blocks, view.num_free_tokens) == (free_blocks, num_tokens)
    pools.check_invariants()


def test_views_that_are_out_of_date_are_noticed():
    pools = three_replicas()
    pools.decode_views()
    pools._replicas["d0"].snapshot = idle(num_slots=1)
    with pytest.raises(AssertionError):
        pools.check_invariants()


def test_a_new_fit_changes_the_costs_of_the_whole_pool():
    pools, groups = PoolState(), idle().groups
    for incarnation in ("d0", "d1"):
        pools.add(make_member("decode", incarnation))
    seqs = itertools.count(1)
    for step_s in (0.1, 0.9, 0.9, 0.9, 0.9, 0.9):
        views = pools.decode_views()
        step = StepWork(2, 9, 5, 0, 0, 0, step_s)
        for incarnation in ("d0", "d1"):
            if incarnation == "d0" or step_s == 0.1:
                told = snapshot(next(seqs), groups, decode_step=step)
                pools.take_snapshot(incarnation, told)
    written = [view.next_step_s for view in views]
    assert len(written) == 2 * NUM_GROUPS
    assert min(written) == max(written) > 0.0, "costs are written before the views are read"
    pools.check_invariants()


def test_prompt_costs_are_those_of_the_prefill_pool():
    """A much slower prompt on a decode engine changes it as little as decode steps do."""
    pools, groups = PoolState(), idle().groups
    for role in ("prefill", "decode"):
        pools.add(make_member(role, role))
    decode_step, slow = StepWork(2, 9, 5, 0, 0, 0, 0.04), StepWork(0, 0, 0, 1, 4000, 8_000_000, 7.0)
    pools.take_snapshot("decode", snapshot(1, groups, decode_step=decode_step, prompt_step=slow))
    for seq in range(1, 60):
        tokens = 100 * (1 + seq % 9)
        step = StepWork(0, 0, 0, 1, tokens, tokens**2 // 2, 0.1 + 1e-4 * tokens)
        pools.take_snapshot("prefill", snapshot(seq, groups, role="prefill", prompt_step=step))
    costs = pools.pool_costs
    assert costs.prompts_s(1, 500, 125_000) == pytest.approx(0.15, rel=0.02)
    assert costs.prompts_s(1, 4000, 8_000_000) < 1.0
    assert costs.decode_step_s(2, 9, 5) == pytest.approx(0.04, rel=0.02)
    assert pools.num_steps_learned == 61


def in_views(pools):
    return {view.incarnation for view in (*pools.decode_views(), *pools.prefill_views())}


def with_replicas(*incarnations):
    pools = PoolState()
    for incarnation in incarnations:
        pools.add(make_member(role_of(incarnation), incarnation))
        pools.take_snapshot(incarnation, idle(role=role_of(incarnation)))
    return pools


def fail(pools, incarnation, now_s=0.0):
    for _ in range(THRESHOLD):
        pools.failed(incarnation, now_s)


def test_a_failing_replica_gets_no_requests_and_later_one_probe():
    pools = with_replicas("d0", "d1")
    fail(pools, "d0")
    assert in_views(pools) == {"d1"}
    assert not pools.expire(FIRST_OPEN_S / 2)
    assert pools.expire(FIRST_OPEN_S)
    assert in_views(pools) == {"d0", "d1"}
    hold_decode(pools, "probe", Placement("d0", 0), 1)
    assert in_views(pools) == {"d1"}
    pools.release("probe", "d0")  # it has answered, and has yet to give a token
    assert in_views(pools) == {"d1"}
    pools.succeeded("d0")
    assert in_views(pools) == {"d0", "d1"}


def test_a_probe_without_a_result_allows_another_probe():
    pools = with_replicas("d0", "d1")
    fail(pools, "d0")
    pools.expire(FIRST_OPEN_S)
    hold_decode(pools, "probe", Placement("d0", 0), 1)
    pools.end("probe", "d0")
    assert in_views(pools) == {"d0", "d1"}


@pytest.mark.parametrize("only", ["d0", "p0"])
def test_the_only_replica_of_a_side_is_never_shut_out(only):
    others = {"d0": "p0", "p0": "d0"}
    pools = with_replicas(only, others[only])
    fail(pools, only)
    assert in_views(pools) == {"p0", "d0"}
    assert pools.breakers.state(only) == "open"


def test_if_all_replicas_of_a_side_fail_all_stay_listed():
    pools = with_replicas("d0", "d1", "p0")
    fail(pools, "d0")
    fail(pools, "d1")
    assert in_views(pools) == {"d0", "d1", "p0"}
    pools.succeeded("d1")
    assert in_views(pools) == {"d1", "p0"}
    pools.remove("d1")
    assert in_views(pools) == {"d0", "p0"}
