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
"""Size of the encoded messages; as Python objects they take up to eight times as much."""


class Wake(msgspec.Struct, frozen=True):
    """Notice that a step is due although no message came."""


class TurnDue(msgspec.Struct, frozen=True):
    """Notice that other ranks of the gang step, and this one must serve them."""


class ClientGone(msgspec.Struct, frozen=True):
    """Notice that the sender can no longer reach a client."""


class Drain(msgspec.Struct, frozen=True):
    """Order of the parent to accept no more requests."""


class ChangeRole(msgspec.Struct, frozen=True):
    """Order of the parent to change to another role once no request of this one is left."""

    role: Role


class HandOverOrder(msgspec.Struct, frozen=True):
    """Order of the parent to move running requests elsewhere, as its timeout is near."""


class Probe(msgspec.Struct, frozen=True):
    """Order of the parent to run a step, even without a request."""


class Stop(msgspec.Struct, frozen=True):
    """Order to end the process."""


class Unreadable(msgspec.Struct, frozen=True):
    """Notice of a client's request that could not be decoded.

    Attributes:
        request_id: The request.
        problem: The decoding error.
    """

    request_id: str
    problem: str


WAKE, TURN_DUE, GONE, STOP = Wake(), TurnDue(), ClientGone(), Stop()
DRAIN, HAND_OVER, PROBE = Drain(), HandOverOrder(), Probe()
GATHER_S: Final = 0.002
"""Seconds for which an idle engine with lanes waits for more prompts."""


def gather_s(config: EngineConfig, said: Said) -> float:
    """Return how long an idle engine waits for more prompts before it begins a step.

    Lanes compute several prompts of one step in the time of one, but prompts that were sent
    together arrive one by one.
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
    """Queue of the core thread, bounded in clients' messages and their bytes.

    Args:
        max_messages: Most clients' messages that may wait.
        max_bytes: Their largest total size; a single larger message waits alone.
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
        """Add an order or notice of the process itself, which needs no room."""
        self._queue.put((item, 0))

    def put_message(self, item: InboxItem, num_bytes: int) -> None:
        """Add a client's message; wait for room, and drop it once the inbox is closed.

        Args:
            item: The message, with its client.
            num_bytes: Its encoded size, at least 1.
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
        """Remove and return the next item.

        Args:
            block: Whether to wait for one.
            timeout: Most seconds to wait; None has no limit.

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
        """Remove and return the next item; raises like `get` if there is none."""
        return self.get(block=False)

    def close(self) -> None:
        """Release threads that wait for room; later messages of clients are dropped."""
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
