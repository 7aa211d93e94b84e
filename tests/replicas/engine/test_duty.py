"""The part of requests that an engine takes, for every order of role changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.requests import Duty

MODES = ("local", "prefill", "decode")


def taken(duty):
    return {mode for mode in MODES if duty.takes(mode)}


@pytest.mark.parametrize(
    ("role", "modes"),
    [("prefill", {"prefill"}), ("decode", {"decode", "local"}), ("both", set(MODES))],
)
def test_each_role_takes_its_part_of_requests(role, modes):
    assert taken(Duty(role)) == modes


def test_a_role_changes_once_nothing_is_left_of_the_old_one():
    duty = Duty("decode")
    duty.change("prefill")
    duty.settle(1)
    assert (duty.role, duty.epoch, duty.is_draining, duty.hands_over) == ("decode", 0, True, True)
    assert not taken(duty)
    duty.settle(0)
    assert (duty.role, duty.epoch, duty.is_draining, duty.hands_over) == (
        "prefill",
        1,
        False,
        False,
    )
    assert taken(duty) == {"prefill"}


def test_a_change_can_be_taken_back_and_is_another_epoch():
    duty = Duty("decode")
    duty.change("prefill")
    duty.change("decode")
    assert (duty.role, duty.epoch, duty.is_draining, duty.hands_over) == ("decode", 1, False, False)


def test_an_engine_that_is_to_end_changes_no_more():
    duty = Duty("decode")
    duty.change("prefill")
    duty.end()
    duty.settle(0)
    duty.change("prefill")
    duty.settle(0)
    assert (duty.role, duty.epoch, duty.is_draining) == ("decode", 0, True)


def test_the_role_that_it_has_is_no_change():
    duty = Duty("prefill")
    duty.change("prefill")
    assert (duty.epoch, duty.is_draining, duty.hands_over) == (0, False, False)


steps = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(["prefill", "decode"])),
    st.tuples(st.just("settle"), st.integers(0, 2)),
    st.tuples(st.just("end")),
    st.tuples(st.just("hand_over")),
)


@given(st.sampled_from(["prefill", "decode"]), st.lists(steps, max_size=30))
def test_whatever_happens_a_role_changes_only_between_epochs_and_with_nothing_left(role, said):
    duty = Duty(role)
    for name, *values in said:
        before = (duty.role, duty.epoch, duty.is_draining)
        getattr(duty, name)(*values)
        assert duty.epoch in {before[1], before[1] + 1}
        if duty.role != before[0]:
            assert (name, values, duty.epoch) == ("settle", [0], before[1] + 1)
        if before[2] and not duty.is_draining:
            assert duty.epoch == before[1] + 1
            assert not duty.hands_over
        assert bool(taken(duty)) != duty.is_draining
