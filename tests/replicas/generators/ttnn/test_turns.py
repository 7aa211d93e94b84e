"""No set of semaphores is taken twice in a row, for any order of replays."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.generators.ttnn.turns import NUM_SETS, Turns


def sets_of(turns, num_collectives):
    turns.begin_call()
    return [turns.next_set() for _ in range(num_collectives)]


def differ(taken):
    return all(first != second for first, second in pairwise(taken))


@given(lengths=st.lists(st.integers(2, 9), min_size=1), order=st.lists(st.integers(0, 50)))
def test_captured_calls_may_follow_each_other_in_any_order(lengths, order):
    turns = Turns()
    captured = [sets_of(turns, length) for length in lengths]
    replayed = [taken for which in order for taken in captured[which % len(captured)]]
    assert differ(replayed)
    # Calls outside of a capture take the same sets as captured ones.
    assert captured == [sets_of(turns, length) for length in lengths]
    assert all(0 <= taken < NUM_SETS for call in captured for taken in call)


def test_every_set_is_used():
    assert set(sets_of(Turns(), 3)) == set(range(NUM_SETS))


def test_calls_without_any_come_between():
    turns = Turns()
    taken = [*sets_of(turns, 2), *sets_of(turns, 0), *sets_of(turns, 2)]
    assert differ(taken)


def test_a_call_of_one_would_take_the_next_ones_first():
    turns = Turns()
    sets_of(turns, 1)
    with pytest.raises(AssertionError, match="one collective"):
        turns.begin_call()
