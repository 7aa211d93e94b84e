"""Inbox of the engine's core thread: messages of clients and orders of the process.

Owns both bounds: clients' messages are limited in number and size. When there is no room, the
thread that reads the socket waits, and TCP makes the clients wait, too.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from replicas.config import Role
from replicas.messages import AddRequest, ClientMessage

if TYPE_CHECKING:
    from replicas.config import EngineConfig

MAX_MESSAGES: Final = 4096
MAX_BYTES: Final = 8 << 20
"""Of messages as they came; as Python's objects they take up to eight times as much."""


class Wake(msgspec.Struct, frozen=True):
    """A step is due although no message came."""


class TurnDue(msgspec.Struct, frozen=True):
    """The other ranks of the gang step: this one is to serve them."""


class ClientGone(msgspec.Struct, frozen=True):
    """The sender cannot reach a client any more."""


class Drain(msgspec.Struct, frozen=True):
    """The parent says: take no more requests."""


class ChangeRole(msgspec.Struct, frozen=True):
    """The parent says: take another role once nothing is left of this one."""

    role: Role


class HandOverOrder(msgspec.Struct, frozen=True):
    """The parent has little patience left with what runs."""


class Probe(msgspec.Struct, frozen=True):
    """The parent wants to see a step, also where there is no request."""


class Stop(msgspec.Struct, frozen=True):
    """End the process."""


class Unreadable(msgspec.Struct, frozen=True):
    """A client asked for a request in a way that nobody can read.

    Attributes:
        request_id: The request.
        problem: What is wrong with it.
    """

    request_id: str
    problem: str


WAKE, TURN_DUE, GONE, STOP = Wake(), TurnDue(), ClientGone(), Stop()
DRAIN, HAND_OVER, PROBE = Drain(), HandOverOrder(), Probe()
GATHER_S: Final = 0.002
"""How long a prompt that comes to an idle engine with lanes waits for others."""


def gather_s(config: EngineConfig, said: Said) -> float:
    """How long an idle engine waits for more like this before it begins a step.

    Lanes compute prompts beside each other, in the time of one, if they are in one step: those that
    are sent together come one by one.
    """
    has_lanes = config.tt_data_parallel > 1 and not config.mixed_batches
    is_prompt = isinstance(said, AddRequest) and said.mode != "decode"
    return GATHER_S if has_lanes and is_prompt else 0.0


Said = (
    ClientMessage
    | Wake
    | TurnDue
    | ClientGone
    | Drain
    | ChangeRole
    | HandOverOrder
    | Probe
    | Stop
    | Unreadable
)
InboxItem = tuple[bytes, Said]


class Inbox:
    """See the module docstring.

    Args:
        max_messages: How many of clients' messages may wait.
        max_bytes: How large they may be together; one that is larger waits alone.
    """

    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._queue: queue.SimpleQueue[tuple[InboxItem, int]] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._num_messages = 0
        self._num_bytes = 0
        self._is_closed = False

    def put(self, item: InboxItem) -> None:
        """Add what the process itself says; there is always room for it."""
        self._queue.put((item, 0))

    def put_message(self, item: InboxItem, num_bytes: int) -> None:
        """Add what a client says; waits for room, and drops it once the inbox is closed.

        Args:
            item: The message, with its client.
            num_bytes: How large it was, at least 1.
        """
        with self._room:
            while not self._is_closed and not self._has_room(num_bytes):
                self._room.wait()
            if self._is_closed:
                return
            self._num_messages += 1
            self._num_bytes += num_bytes
        self._queue.put((item, num_bytes))

    def get(self, *, block: bool = True, timeout: float | None = None) -> InboxItem:
        """Take the next item.

        Args:
            block: Whether to wait for one.
            timeout: For how long, in seconds; None: until one comes.

        Raises:
            queue.Empty: There is none.
        """
        item, num_bytes = self._queue.get(block=block, timeout=timeout)
        if num_bytes:
            with self._room:
                self._num_messages -= 1
                self._num_bytes -= num_bytes
                self._room.notify()
        return item

    def get_nowait(self) -> InboxItem:
        """Take the next item; raises like `get` if there is none."""
        return self.get(block=False)

    def close(self) -> None:
        """Let nobody wait for room any more: nothing is taken from now on."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        if not self._num_messages:
            return True
        return (
            self._num_messages < self._max_messages
            and self._num_bytes + num_bytes <= self._max_bytes
        )
