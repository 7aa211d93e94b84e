"""The messages that wait for an engine's core in the simulator, and the door that they come by.

Owner of both queues: of what the core takes at its next turn, and of what stands before a door that
is shut because the first is full. What stands there keeps its order and is not lost: as with a
socket whose reader has no room, the sender's side holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.messages import ClientMessage

Item = tuple[bytes, "ClientMessage | None"]
"""A client's message; None: the client is gone."""


class VirtualInbox:
    """See the module docstring.

    Attributes:
        num_taken: How many messages each client's connection has brought in, by its id.
    """

    def __init__(self) -> None:
        self.num_taken: dict[bytes, int] = {}
        self._inside: list[Item] = []
        self._outside: list[Item] = []

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, inside or before the door."""
        return not self._inside and not self._outside

    def receive(self, client: bytes, message: ClientMessage, *, is_backpressured: bool) -> None:
        """A message arrives; it waits outside while there is no room, or somebody waits there."""
        if is_backpressured or self._outside:
            self._outside.append((client, message))
        else:
            self._let_in(client, message)

    def release_backpressure(self) -> None:
        """There is room again: everybody outside comes in, in order."""
        outside, self._outside = self._outside, []
        for client, message in outside:
            if message is not None:
                self._let_in(client, message)

    def note_gone(self, client: bytes) -> None:
        """The process has found that a client is gone; that does not come by the door."""
        self._inside.append((client, None))

    def take(self) -> list[Item]:
        """Take everything that is inside."""
        inside, self._inside = self._inside, []
        return inside

    def _let_in(self, client: bytes, message: ClientMessage) -> None:
        self.num_taken[client] = self.num_taken.get(client, 0) + 1
        self._inside.append((client, message))
