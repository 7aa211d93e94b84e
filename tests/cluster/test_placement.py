"""Placement is a pure choice: valid or none, the same for equal views, the emptiest first."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import GroupView, Placement, PrefillView, place_decode, place_prefill

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
