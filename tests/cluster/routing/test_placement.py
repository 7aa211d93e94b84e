"""Placement is a pure choice: valid or none, the same for equal views, the emptiest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.demand import Demand
from cluster.routing.placement import (
    ANY_GROUP,
    GroupView,
    LeastQueued,
    MostEmptySlots,
    Placement,
    RoundRobin,
    make_policies,
    place,
)
from tests.kv_groups import one_kv_group

INCARNATIONS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 2)
BLOCK_SIZE = 4
KV_GROUPS = one_kv_group(9, BLOCK_SIZE)


def needs(num_blocks):
    """A request that takes so many blocks to begin."""
    return Demand("r", [7] * (num_blocks * BLOCK_SIZE - 1))


def group_view(incarnation, dp_group, slots, blocks, active=0, index=0):
    """A DP group of a decode engine."""
    room = [blocks], blocks * BLOCK_SIZE
    return GroupView(
        incarnation, dp_group, "decode", KV_GROUPS, slots, *room, active, 0, 0.0, index
    )


def prefill_view(incarnation, queued_tokens, active, index=0):
    """A prefill engine as a whole."""
    return GroupView(
        incarnation, ANY_GROUP, "prefill", KV_GROUPS, 0, [0], 0, active, queued_tokens, 0.0, index
    )


def place_decode(num_blocks, views, refused=()):
    return place(MostEmptySlots(), needs(num_blocks), views, refused)


def place_prefill(views, refused=(), policy=None):
    placement = place(
        policy or LeastQueued(), needs(1), views, {Placement(i, ANY_GROUP) for i in refused}
    )
    return placement and placement.incarnation


@st.composite
def group_views(draw):
    keys = draw(st.lists(st.tuples(INCARNATIONS, st.integers(0, 2)), unique=True, max_size=9))
    return [
        group_view(name, group, draw(COUNTS), draw(COUNTS), draw(COUNTS), i)
        for i, (name, group) in enumerate(keys)
    ]


@st.composite
def prefill_views(draw):
    keys = draw(st.lists(INCARNATIONS, unique=True))
    return [prefill_view(name, draw(COUNTS), draw(COUNTS), i) for i, name in enumerate(keys)]


REFUSED = st.sets(st.builds(Placement, INCARNATIONS, st.integers(0, 2)), max_size=4)


@given(st.integers(1, 5), group_views(), REFUSED)
def test_decode_placement_fits_and_none_means_that_nothing_fits(num_blocks, views, refused):
    fitting = {
        Placement(v.incarnation, v.dp_group): v
        for v in views
        if v.num_empty_slots >= 1 and v.num_free_blocks >= [num_blocks]
    }
    allowed = {p: v for p, v in fitting.items() if p not in refused}
    placement = place_decode(num_blocks, views, refused)
    if placement is None:
        assert allowed == {}
        return
    chosen = allowed[placement]
    most = max(v.num_empty_slots for v in allowed.values())
    assert chosen.num_empty_slots == most, "the emptiest group steps next to nobody"
    assert chosen.num_free_blocks == max(
        v.num_free_blocks for v in allowed.values() if v.num_empty_slots == most
    )


@given(st.integers(1, 3), group_views(), REFUSED, st.randoms())
def test_decode_placement_does_not_depend_on_the_order_of_the_views(
    num_blocks, views, refused, random
):
    shuffled = random.sample(views, len(views))
    assert place_decode(num_blocks, shuffled, refused) == place_decode(num_blocks, views, refused)


def test_equal_groups_go_to_the_lowest_name():
    views = [
        group_view("b", 0, 2, 9), group_view("a", 1, 2, 9, 5), group_view("a", 0, 2, 9, 5),
    ]  # fmt: skip
    assert place_decode(1, views) == Placement("a", 0)


def test_refused_group_gives_way_to_the_next_one():
    views = [group_view("a", 0, 4, 9), group_view("a", 1, 3, 9)]
    assert place_decode(1, views, {Placement("a", 0)}) == Placement("a", 1)
    assert place_decode(1, views, {Placement("a", 0), Placement("a", 1)}) is None


@given(prefill_views(), st.sets(INCARNATIONS), st.randoms())
def test_prefill_placement_takes_the_least_work_in_front(views, refused, random):
    target = place_prefill(views, refused)
    allowed = {v.incarnation: v for v in views if v.incarnation not in refused}
    assert place_prefill(random.sample(views, len(views)), refused) == target
    if target is None:
        assert allowed == {}
        return
    work = {i: (v.num_queued_tokens, v.num_active) for i, v in allowed.items()}
    assert work[target] == min(work.values())


# --- policies that remember -----------------------------------------------------------------------


def groups(*slots, num_blocks=9):
    """One replica for each number of empty slots."""
    return [group_view(f"e{i}", 0, n, num_blocks, 0, i) for i, n in enumerate(slots)]


def decode_turns(policy, views, count, **options):
    placements = [place(policy, needs(1), views, **options) for _ in range(count)]
    return [p and p.incarnation for p in placements]


def test_round_robin_takes_the_groups_in_their_order():
    views = groups(1, 5, 2)
    assert decode_turns(RoundRobin(), views, 7) == ["e0", "e1", "e2", "e0", "e1", "e2", "e0"]
    keys = [("a", 0), ("a", 1), ("b", 0)]
    lanes = [group_view(name, group, 1, 9, 0, i) for i, (name, group) in enumerate(keys)]
    policy = RoundRobin()
    found = [place(policy, needs(1), lanes) for _ in range(3)]
    assert found == [Placement("a", 0), Placement("a", 1), Placement("b", 0)]


def test_round_robin_passes_over_groups_that_cannot_take_the_request():
    policy = RoundRobin()
    assert decode_turns(policy, groups(0, 1, 1), 3) == ["e1", "e2", "e1"]
    refused = {Placement("e2", 0)}
    assert decode_turns(policy, groups(1, 1, 1), 2, refused=refused) == ["e0", "e1"]
    views = [group_view("small", 0, 1, 2, 0, 0), group_view("large", 0, 1, 3, 0, 1)]
    assert place(RoundRobin(), needs(3), views) == Placement("large", 0)


def test_a_round_robin_that_finds_nothing_keeps_its_turn():
    policy = RoundRobin()
    assert decode_turns(policy, groups(1, 1, 1), 1) == ["e0"]
    assert decode_turns(policy, groups(0, 0, 0), 2) == [None, None]
    assert decode_turns(policy, [], 1) == [None]
    assert decode_turns(policy, groups(1, 1, 1), 1) == ["e1"]


def test_a_round_robin_goes_on_when_groups_have_gone():
    policy = RoundRobin()
    assert decode_turns(policy, groups(1, 1, 1, 1), 4)[-1] == "e3"
    assert decode_turns(policy, groups(1, 1), 2) == ["e0", "e1"]


def test_round_robin_of_prefill_engines_has_a_turn_of_its_own():
    decode, policy = make_policies("round_robin")
    engines = [prefill_view(f"p{i}", 100 * i, i, i) for i in range(3)]
    assert decode_turns(decode, groups(1, 1), 1) == ["e0"]
    found = [place_prefill(engines, policy=policy) for _ in range(4)]
    assert found == ["p0", "p1", "p2", "p0"]
    assert place_prefill(engines, {"p1"}, policy) == "p2"
    assert place_prefill(engines, {"p0", "p1", "p2"}, policy) is None
    assert place_prefill([], (), policy) is None
    assert place_prefill(engines, (), policy) == "p0"


@given(st.lists(st.tuples(st.integers(1, 3), group_views(), REFUSED), max_size=8))
def test_whatever_it_remembers_round_robin_finds_a_group_exactly_if_one_fits(calls):
    policy = RoundRobin()
    for num_blocks, views, refused in calls:
        placement = place(policy, needs(num_blocks), views, refused)
        assert (placement is None) == (place_decode(num_blocks, views, refused) is None)
        if placement is not None:
            chosen = {Placement(v.incarnation, v.dp_group): v for v in views}[placement]
            assert placement not in refused
            assert chosen.num_empty_slots >= 1
            assert chosen.num_free_blocks >= [num_blocks]


@given(st.integers(1, 6), st.integers(0, 20))
def test_a_round_robin_over_equal_groups_is_even(num_groups, num_before):
    policy, views = RoundRobin(), groups(*[3] * num_groups)
    decode_turns(policy, views, num_before)
    assert sorted(decode_turns(policy, views, num_groups)) == [v.incarnation for v in views]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("most_empty_slots", (MostEmptySlots, LeastQueued)),
        ("round_robin", (RoundRobin, RoundRobin)),
    ],
)
def test_policies_have_names_and_memories_of_their_own(name, kinds):
    one, other = make_policies(name), make_policies(name)
    assert tuple(map(type, one)) == tuple(map(type, other)) == kinds
    views = groups(1, 1)
    assert decode_turns(one.decode, views, 1) == decode_turns(other.decode, views, 1) == ["e0"]


# --- what is measured with what ------------------------------------------------------------------


def test_every_choice_takes_a_slot():
    three = Demand("r", [7], num_choices=3)
    assert place(MostEmptySlots(), three, groups(1, 2)) is None
    assert place(MostEmptySlots(), three, groups(1, 3)) == Placement("e1", 0)
