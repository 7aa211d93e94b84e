"""Which messages a conversation that is too long may lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.edge.responses.truncation import possible_begins, without_oldest


def conversation(roles):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "begins"),
    [
        ("u", [0]),
        ("su", [1]),
        ("suauau", [1, 3, 5]),
        ("uau", [0, 2]),
        ("suatt", [1, 2]),
        ("suauatt", [1, 3, 4]),
        ("uaua", [0, 2, 3]),
        ("susu", [1, 3]),
        ("s", [1]),
        ("st", [1]),
    ],
)
def test_a_conversation_begins_at_its_users_or_with_its_last_turn(roles, begins):
    assert possible_begins(conversation(roles)) == begins


@given(st.text("suat", min_size=1, max_size=30))
def test_instructions_and_the_last_message_stay_and_the_order_too(roles):
    messages = conversation(roles)
    begins = possible_begins(messages)
    assert begins == sorted(set(begins))
    assert without_oldest(messages, begins[0]) == messages
    for begin in begins:
        kept = without_oldest(messages, begin)
        assert kept[-1] == messages[-1]
        assert kept == messages[len(messages) - len(kept) :] or kept[0] == messages[0]
        if roles[0] == "s":
            assert kept[0] == messages[0]
        assert begin == begins[0] or messages[begin]["role"] != "tool"
