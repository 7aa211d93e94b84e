"""A replica's life: forward only, from one state to the next, and dead at last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.life import Life, LifeError, LifeState

ORDER = list(LifeState)


def tried(life, state):
    try:
        life.become(state)
    except LifeError:
        return False
    return True


@given(st.lists(st.sampled_from(ORDER)))
def test_no_life_goes_back_or_drains_before_it_was_ready(wanted):
    life = Life()
    lived = [life.state]
    for state in wanted:
        if tried(life, state):
            lived.append(state)
        assert life.state is lived[-1]
    places = [ORDER.index(state) for state in lived]
    assert places == sorted(set(places))
    assert LifeState.DRAINING not in lived or LifeState.READY in lived


def test_a_whole_life_and_one_that_ends_before_it_began():
    whole, failed = Life(), Life()
    for state in ORDER[1:]:
        whole.become(state)
    failed.become(LifeState.DEAD)
    assert whole.state is failed.state is LifeState.DEAD
    with pytest.raises(LifeError, match="is dead cannot become ready"):
        failed.become(LifeState.READY)
