"""The part of requests that an engine takes, for every order of role changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.role_state import RoleState

MODES = ("local", "prefill", "decode")


def taken(state):
    return {mode for mode in MODES if state.accepts(mode)}


@pytest.mark.parametrize(
    ("role", "modes"),
    [("prefill", {"prefill"}), ("decode", {"decode", "local"}), ("both", set(MODES))],
)
def test_each_role_takes_its_part_of_requests(role, modes):
    assert taken(RoleState(role)) == modes


def test_a_role_changes_once_nothing_is_left_of_the_old_one():
    state = RoleState("decode")
    state.change("prefill")
    state.settle(1)
    assert (state.role, state.epoch, state.is_draining, state.hands_over) == (
        "decode",
        0,
        True,
        True,
    )
    assert not taken(state)
    state.settle(0)
    assert (state.role, state.epoch, state.is_draining, state.hands_over) == (
        "prefill",
        1,
        False,
        False,
    )
    assert taken(state) == {"prefill"}


def test_a_change_can_be_taken_back_and_is_another_epoch():
    state = RoleState("decode")
    state.change("prefill")
    state.change("decode")
    assert (state.role, state.epoch, state.is_draining, state.hands_over) == (
        "decode",
        1,
        False,
        False,
    )


def shown(state):
    return state.epoch, state.is_draining, state.hands_over


def test_an_evacuated_engine_takes_nothing_until_it_is_reopened_which_is_another_epoch():
    state = RoleState("decode")
    state.reopen()
    assert shown(state) == (0, False, False)
    state.evacuate()
    state.settle(0)
    assert (taken(state), shown(state)) == (set(), (0, True, True))
    state.reopen()
    assert (taken(state), shown(state)) == ({"decode", "local"}, (1, False, False))


def test_a_change_of_role_under_way_ends_without_a_reopening_if_the_engine_is_evacuated():
    state = RoleState("decode")
    state.change("prefill")
    state.evacuate()
    state.settle(0)
    assert (state.role, state.next_role, shown(state)) == ("prefill", None, (1, True, True))
    state.reopen()
    assert (taken(state), shown(state)) == ({"prefill"}, (2, False, False))
    state.evacuate()
    state.change("decode")
    state.reopen()
    assert (taken(state), state.next_role) == (set(), "decode")


def test_an_engine_that_is_to_end_is_not_reopened():
    state = RoleState("decode")
    state.evacuate()
    state.end()
    state.reopen()
    assert taken(state) == set()


def test_an_engine_that_is_to_end_changes_no_more():
    state = RoleState("decode")
    state.change("prefill")
    state.end()
    state.settle(0)
    state.change("prefill")
    state.settle(0)
    assert (state.role, state.epoch, state.is_draining) == ("decode", 0, True)


def test_the_role_that_it_has_is_no_change():
    state = RoleState("prefill")
    state.change("prefill")
    assert (state.epoch, state.is_draining, state.hands_over) == (0, False, False)


steps = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(["prefill", "decode"])),
    st.tuples(st.just("settle"), st.integers(0, 2)),
    st.tuples(st.just("end")),
    st.tuples(st.just("hand_over")),
)


@given(st.sampled_from(["prefill", "decode"]), st.lists(steps, max_size=30))
def test_whatever_happens_a_role_changes_only_between_epochs_and_with_nothing_left(role, said):
    state = RoleState(role)
    for name, *values in said:
        before = (state.role, state.epoch, state.is_draining)
        getattr(state, name)(*values)
        assert state.epoch in {before[1], before[1] + 1}
        if state.role != before[0]:
            assert (name, values, state.epoch) == ("settle", [0], before[1] + 1)
        if before[2] and not state.is_draining:
            assert state.epoch == before[1] + 1
            assert not state.hands_over
        assert bool(taken(state)) != state.is_draining
