"""A hot prefix gets more places before its holders are full, and never without need."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.hot_prefixes import HOT_SHARE, HotPrefixes, copies_wanted

SLOTS = 32
ROOM = int(SLOTS * HOT_SHARE)
CHAIN = list(range(100, 116))
"""Names of sixteen blocks."""


def with_requests(*chains):
    hot = HotPrefixes()
    for chain in chains:
        hot.enter(chain)
    return hot


def test_a_hot_prefix_needs_a_copy_per_share_of_slots():
    assert [copies_wanted(n, SLOTS) for n in (0, 1, ROOM, ROOM + 1, 2 * ROOM, 2 * ROOM + 1)] == [
        1, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert copies_wanted(3, 1) == 3, "one slot is room for one"


def test_a_cold_prefix_counts_in_full():
    hot, held = with_requests(*[CHAIN] * ROOM), {"a": 16, "b": 3}
    assert hot.cool(CHAIN, held, SLOTS, 8) == held


def test_the_next_request_of_a_hot_prefix_goes_elsewhere_until_there_are_enough():
    hot = with_requests(*[CHAIN] * (ROOM + 1))
    assert set(hot.cool(CHAIN, {"a": 16}, SLOTS, 8).values()) <= {0}
    enough = {"a": 16, "b": 16}
    assert hot.cool(CHAIN, enough, SLOTS, 8) == enough
    assert hot.cool(CHAIN, {"a": 16}, SLOTS, 1) == {"a": 16}, "there is no other place"


def test_blocks_before_a_hot_prefix_count_where_enough_places_have_them():
    """All requests share two blocks that four places hold; one place has the hot rest."""
    chains = [[100, 101, *(1000 * i + k for k in range(14))] for i in range(3)]
    hot = with_requests(*[chains[0]] * (ROOM + 1), *chains[1:])
    held = {"a": 16, "b": 2, "c": 3, "d": 2}
    assert hot.cool(chains[0], held, SLOTS, 8) == {"a": 3, "b": 2, "c": 3, "d": 2}
    other = {"a": 2, "b": 2, "c": 2, "d": 16}
    assert hot.cool(chains[1], other, SLOTS, 8) == other, "not hot itself"


def test_a_burst_is_spread_over_as_many_places_as_needed():
    hot, held = HotPrefixes(), {}
    for _ in range(3 * ROOM):
        hot.enter(CHAIN)
        counts = hot.cool(CHAIN, held, SLOTS, 8)
        if not any(counts.values()):
            # By load: to a place that has none of it.
            held[f"place {len(held)}"] = len(CHAIN)
    assert len(held) == 3


chains = st.lists(st.sampled_from(range(4)), min_size=0, max_size=9).map(
    lambda digits: [hash(tuple(digits[: i + 1])) for i in range(len(digits))]
)


@given(st.lists(chains, max_size=30), st.data())
def test_nothing_is_left_of_requests_that_have_ended(entered, data):
    hot = with_requests(*entered)
    for chain in data.draw(st.permutations(entered)):
        hot.leave(chain)
    assert len(hot) == 0


@given(
    st.lists(chains, max_size=30),
    chains,
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9)),
    st.integers(1, 40),
    st.integers(4, 8),
)
def test_never_more_counts_than_is_held_and_less_only_where_copies_are_wanted(
    entered, chain, held, slots, num_places
):
    held = {place: min(num, len(chain)) for place, num in held.items() if chain}
    counts = with_requests(*entered).cool(chain, held, slots, num_places)
    assert all(counts.get(place, 0) <= num for place, num in held.items())
    cut = {place: num for place, num in held.items() if counts.get(place, 0) < num}
    if cut:
        depth = max(counts.values(), default=0) + 1
        name = chain[depth - 1] if counts else chain[0]
        num_requests = sum(name in other for other in entered)
        assert len(cut) < min(copies_wanted(num_requests, slots), num_places)
