"""Slots are free once or taken once, and stay in their group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.kv_cache import SlotTable


def test_lowest_free_slot_of_the_group_is_taken_first():
    slots = SlotTable(dp_groups=2, slots_per_group=2)
    assert [slots.take(1), slots.take(0), slots.take(1)] == [2, 0, 3]
    slots.give_back(2)
    assert slots.take(1) == 2


def test_slot_goes_back_to_its_own_group():
    slots = SlotTable(dp_groups=2, slots_per_group=2)
    slots.give_back(slots.take(1))
    assert [slots.num_empty(0), slots.num_empty(1)] == [2, 2]


def test_slot_that_is_not_taken_cannot_be_given_back():
    slots = SlotTable(dp_groups=1, slots_per_group=2)
    with pytest.raises(AssertionError, match="not taken"):
        slots.give_back(0)


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_slots_in_use_are_distinct_and_all_come_back(groups, per_group, data):
    slots = SlotTable(groups, per_group)
    taken: list[int] = []
    for _ in range(20):
        group = data.draw(st.integers(0, groups - 1))
        if taken and data.draw(st.booleans()):
            slots.give_back(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        elif slots.num_empty(group):
            slot = slots.take(group)
            assert slot // per_group == group
            taken.append(slot)
        assert len(set(taken)) == len(taken)
        slots.check_invariants()
    for slot in taken:
        slots.give_back(slot)
    assert [slots.num_empty(g) for g in range(groups)] == [per_group] * groups
