"""Placement is a pure choice: valid or none, the same for equal views, the emptiest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import (
    GroupView,
    MostEmptySlots,
    Placement,
    PrefillView,
    RoundRobin,
    make_policy,
    place_decode,
    place_prefill,
)

INCARNATIONS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 2)


@st.composite
def group_views(draw):
    keys = draw(st.lists(st.tuples(INCARNATIONS, st.integers(0, 2)), unique=True, max_size=9))
    return [GroupView(i, g, draw(COUNTS), draw(COUNTS), draw(COUNTS)) for i, g in keys]


@st.composite
def prefill_views(draw):
    keys = draw(st.lists(INCARNATIONS, unique=True))
    return [PrefillView(i, draw(COUNTS), draw(COUNTS)) for i in keys]


REFUSED = st.sets(st.builds(Placement, INCARNATIONS, st.integers(0, 2)), max_size=4)


@given(st.integers(1, 5), group_views(), REFUSED)
def test_decode_placement_fits_and_none_means_that_nothing_fits(num_blocks, views, refused):
    fitting = {
        Placement(v.incarnation, v.dp_group): v
        for v in views
        if v.num_empty_slots >= 1 and v.num_free_blocks >= num_blocks
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
    views = [GroupView("b", 0, 2, 9, 0), GroupView("a", 1, 2, 9, 5), GroupView("a", 0, 2, 9, 5)]
    assert place_decode(1, views) == Placement("a", 0)


def test_refused_group_gives_way_to_the_next_one():
    views = [GroupView("a", 0, 4, 9, 0), GroupView("a", 1, 3, 9, 0)]
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
    return [GroupView(f"e{i}", 0, n, num_blocks, 0) for i, n in enumerate(slots)]


def decode_turns(policy, views, count, **options):
    placements = [policy.place_decode(1, views, **options) for _ in range(count)]
    return [p and p.incarnation for p in placements]


def test_round_robin_takes_the_groups_in_their_order():
    views = groups(1, 5, 2)
    assert decode_turns(RoundRobin(), views, 7) == ["e0", "e1", "e2", "e0", "e1", "e2", "e0"]
    lanes = [GroupView("a", 0, 1, 9, 0), GroupView("a", 1, 1, 9, 0), GroupView("b", 0, 1, 9, 0)]
    policy = RoundRobin()
    found = [policy.place_decode(1, lanes) for _ in range(3)]
    assert found == [Placement("a", 0), Placement("a", 1), Placement("b", 0)]


def test_round_robin_passes_over_groups_that_cannot_take_the_request():
    policy = RoundRobin()
    assert decode_turns(policy, groups(0, 1, 1), 3) == ["e1", "e2", "e1"]
    refused = {Placement("e2", 0)}
    assert decode_turns(policy, groups(1, 1, 1), 2, refused=refused) == ["e0", "e1"]
    views = [GroupView("small", 0, 1, 2, 0), GroupView("large", 0, 1, 3, 0)]
    assert RoundRobin().place_decode(3, views) == Placement("large", 0)


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
    policy = RoundRobin()
    engines = [PrefillView(f"p{i}", 100 * i, i) for i in range(3)]
    assert decode_turns(policy, groups(1, 1), 1) == ["e0"]
    found = [policy.place_prefill(engines) for _ in range(4)]
    assert found == ["p0", "p1", "p2", "p0"]
    assert policy.place_prefill(engines, {"p1"}) == "p2"
    assert policy.place_prefill(engines, {"p0", "p1", "p2"}) is None
    assert policy.place_prefill([]) is None
    assert policy.place_prefill(engines) == "p0"


@given(st.lists(st.tuples(st.integers(1, 3), group_views(), REFUSED), max_size=8))
def test_whatever_it_remembers_round_robin_finds_a_group_exactly_if_one_fits(calls):
    policy = RoundRobin()
    for num_blocks, views, refused in calls:
        placement = policy.place_decode(num_blocks, views, refused)
        assert (placement is None) == (place_decode(num_blocks, views, refused) is None)
        if placement is not None:
            chosen = {Placement(v.incarnation, v.dp_group): v for v in views}[placement]
            assert placement not in refused
            assert chosen.num_empty_slots >= 1
            assert chosen.num_free_blocks >= num_blocks


@given(st.integers(1, 6), st.integers(0, 20))
def test_a_round_robin_over_equal_groups_is_even(num_groups, num_before):
    policy, views = RoundRobin(), groups(*[3] * num_groups)
    decode_turns(policy, views, num_before)
    assert sorted(decode_turns(policy, views, num_groups)) == [v.incarnation for v in views]


@given(st.integers(1, 3), group_views(), REFUSED, prefill_views(), st.sets(INCARNATIONS))
def test_most_empty_slots_is_the_functions(num_blocks, views, refused, engines, tried):
    policy = MostEmptySlots()
    assert policy.place_decode(num_blocks, views, refused) == place_decode(
        num_blocks, views, refused
    )
    assert policy.place_prefill(engines, tried) == place_prefill(engines, tried)


@pytest.mark.parametrize(
    ("name", "kind"), [("most_empty_slots", MostEmptySlots), ("round_robin", RoundRobin)]
)
def test_policies_have_names_and_memories_of_their_own(name, kind):
    one, other = make_policy(name), make_policy(name)
    assert type(one) is type(other) is kind
    views = groups(1, 1)
    assert decode_turns(one, views, 1) == decode_turns(other, views, 1) == ["e0"]
