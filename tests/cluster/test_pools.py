"""What an ingress believes: snapshots of the replicas, less what it has sent since."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.placement import GroupView, Placement, PrefillView
from cluster.pools import PoolState
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import make_member

INCARNATIONS = ("p0", "p1", "d0", "d1", "b0")
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
NUM_GROUPS = 2
COUNTS = st.integers(0, 3)


def role_of(incarnation):
    return ROLES[incarnation[0]]


def snapshot(seq, groups, *, draining=False, num_waiting=0, num_waiting_tokens=0):
    return EngineSnapshot(seq, draining, num_waiting, num_waiting_tokens, 0, groups)


def idle(seq=0, num_slots=2, num_blocks=8):
    return snapshot(seq, [GroupSnapshot(num_slots, num_blocks, 0, 0, 0)] * NUM_GROUPS)


class PoolStateMachine(RuleBasedStateMachine):
    """Against a model that keeps, per replica, the newest snapshot and the open holds."""

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
            st.builds(GroupSnapshot, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS),
            min_size=NUM_GROUPS,
            max_size=NUM_GROUPS,
        ),
        draining=st.booleans(),
        waiting=COUNTS,
    )
    def take_snapshot(self, incarnation, seq, groups, draining, waiting):
        new = snapshot(
            seq, groups, draining=draining, num_waiting=waiting, num_waiting_tokens=waiting * 7
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
            self.pools.hold_prefill(request_id, incarnation, size)
            kept = (-1, size)
        else:
            self.pools.hold_decode(request_id, Placement(incarnation, group), size)
            kept = (group, size)
        if incarnation in self.held:
            self.held[incarnation][request_id] = kept
        return request_id, incarnation

    @rule(hold=consumes(holds), times=st.integers(1, 2))
    def release(self, hold, times):
        for _ in range(times):
            self.pools.release(*hold)
        self.held.get(hold[1], {}).pop(hold[0], None)

    @rule(hold=consumes(holds))
    def release_everywhere(self, hold):
        self.pools.release_everywhere(hold[0])
        self.held.get(hold[1], {}).pop(hold[0], None)

    @invariant()
    def views_are_the_snapshots_less_the_holds(self):
        self.pools.check_invariants()
        decode = [
            GroupView(
                incarnation,
                g,
                max(group.num_empty_slots - group.num_waiting - len(sizes), 0),
                max(group.num_free_blocks - sum(sizes), 0),
                group.num_running + group.num_reserved + group.num_waiting + len(sizes),
            )
            for incarnation, taken in self.open_replicas()
            if role_of(incarnation) != "prefill"
            for g, group in enumerate(taken.groups)
            for sizes in [[size for at, size in self.held[incarnation].values() if at == g]]
        ]
        assert sorted(self.pools.decode_views(), key=repr) == sorted(decode, key=repr)
        prefill = [
            PrefillView(
                incarnation,
                taken.num_waiting_tokens + sum(size for _, size in self.held[incarnation].values()),
                taken.num_waiting
                + sum(g.num_running for g in taken.groups)
                + len(self.held[incarnation]),
            )
            for incarnation, taken in self.open_replicas()
            if role_of(incarnation) == "prefill"
        ]
        assert sorted(self.pools.prefill_views(), key=repr) == sorted(prefill, key=repr)

    @invariant()
    def members_are_those_added_and_not_removed(self):
        assert {m.description.incarnation for m in self.pools.members()} == set(self.snapshots)
        for role in ROLES.values():
            is_open = any(role_of(i) == role for i, _ in self.open_replicas())
            assert self.pools.has_open((role,)) == is_open

    def open_replicas(self):
        return [(i, s) for i, s in self.snapshots.items() if s is not None and not s.draining]


TestPoolState = PoolStateMachine.TestCase


def decode_pool():
    pools = PoolState()
    pools.add(make_member("decode", "d0"))
    pools.take_snapshot("d0", idle())
    return pools


def test_replica_without_a_snapshot_takes_no_requests():
    pools = PoolState()
    pools.add(make_member("decode", "d0"))
    assert not pools.has_open(("decode",))
    assert pools.decode_views() == []


def test_stale_snapshot_does_not_replace_a_newer_one():
    pools = decode_pool()
    pools.take_snapshot("d0", idle(seq=5, num_slots=1))
    pools.take_snapshot("d0", idle(seq=4, num_slots=2))
    assert [v.num_empty_slots for v in pools.decode_views()] == [1, 1]


def test_hold_counts_through_snapshots_until_it_is_released():
    pools = decode_pool()
    pools.hold_decode("r", Placement("d0", 1), 3)
    pools.take_snapshot("d0", idle(seq=1))
    assert [(v.num_empty_slots, v.num_free_blocks) for v in pools.decode_views()] == [
        (2, 8),
        (1, 5),
    ]
    pools.release("r", "d0")
    assert [(v.num_empty_slots, v.num_free_blocks) for v in pools.decode_views()] == [
        (2, 8),
        (2, 8),
    ]


def test_holding_twice_on_one_replica_is_a_bug():
    pools = decode_pool()
    pools.hold_decode("r", Placement("d0", 0), 1)
    with pytest.raises(AssertionError, match="held twice"):
        pools.hold_decode("r", Placement("d0", 1), 1)


def test_replica_that_comes_back_starts_without_holds():
    pools = decode_pool()
    pools.hold_decode("r", Placement("d0", 0), 1)
    pools.remove("d0")
    pools.add(make_member("decode", "d0"))
    pools.take_snapshot("d0", idle())
    assert [v.num_empty_slots for v in pools.decode_views()] == [2, 2]
