"""The inbox of an engine's core in the simulator.

Has two queues: messages that the core reads at its next turn, and messages held back while the
inbox is full (fault `backpressure`). Held messages keep their order and are not lost, like data in
a socket whose reader has no room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.messages import ClientMessage

Item = tuple[bytes, "ClientMessage | None"]
"""A client's id and message; None instead of a message means that the client is gone."""


class VirtualInbox:
    """The inbox of one engine's core.

    Attributes:
        num_taken: Messages accepted from each client, by client id.
    """

    def __init__(self) -> None:
        self.num_taken: dict[bytes, int] = {}
        self._inside: list[Item] = []
        self._outside: list[Item] = []

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits, accepted or held back."""
        return not self._inside and not self._outside

    def receive(self, client: bytes, message: ClientMessage, *, is_backpressured: bool) -> None:
        """Accept a message, or hold it back while the inbox is full or others are held back."""
        if is_backpressured or self._outside:
            self._outside.append((client, message))
        else:
            self._let_in(client, message)

    def release_backpressure(self) -> None:
        """Accept all messages that were held back, in order."""
        outside, self._outside = self._outside, []
        for client, message in outside:
            if message is not None:
                self._let_in(client, message)

    def note_gone(self, client: bytes) -> None:
        """Record that a client is gone; this is accepted even if the inbox is full."""
        self._inside.append((client, None))

    def take(self) -> list[Item]:
        """Remove and return all accepted messages."""
        inside, self._inside = self._inside, []
        return inside

    def _let_in(self, client: bytes, message: ClientMessage) -> None:
        self.num_taken[client] = self.num_taken.get(client, 0) + 1
        self._inside.append((client, message))
