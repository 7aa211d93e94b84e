"""Which messages a conversation that is too long may lose. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = dict[str, Any]


def without_oldest(messages: Sequence[Message], begin: int) -> list[Message]:
    """Return a conversation that keeps its instructions and its messages from an index on."""
    head = _num_instructions(messages)
    return [*messages[:head], *messages[max(begin, head) :]]


def possible_begins(messages: Sequence[Message]) -> list[int]:
    """Return the indices at which a shortened conversation may begin behind its instructions.

    The first one drops nothing, and the last one all but the instructions and the last message.
    Others are at messages of the user, as many chat templates need one first. Results of tools stay
    with the message that has the calls.
    """
    head = _num_instructions(messages)
    last = len(messages) - 1
    while last > head and messages[last]["role"] == "tool":
        last -= 1
    users = [i for i in range(head + 1, last) if messages[i]["role"] == "user"]
    return [head, *users, last] if last > head else [head]


def _num_instructions(messages: Sequence[Message]) -> int:
    """Return 1 if the conversation begins with instructions, which are one message, else 0."""
    return int(messages[0]["role"] == "system")
