"""Messages between an engine process and its parent, and the inbox of the core thread.

Separate from `replicas.engine_process.process`, so that a parent need not import the engine's
compute libraries, which would delay the start of an actor or a driver by seconds.

The inbox has messages of clients, orders of the parent and notices of the process itself. Clients'
messages are limited in number and size. When there is no room, the thread that reads the socket
waits, and TCP makes the clients wait, too.
"""

from __future__ import annotations

import queue
import threading
from typing import Final

import msgspec

from replicas.config import EngineConfig, Role
from replicas.messages import ClientMessage, EngineDescription

STOP_S = 5.0
"""Seconds that an engine without a mesh may take to end."""


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON on stdin.

    Attributes:
        config: The engine's configuration.
        incarnation: Random id of this start.
        host: Address to bind the two client sockets to, on free ports.
        ready_fd: Inherited descriptor for `EngineReport` lines.
        dump_fd: Inherited file that stacks are written to at `DUMP_SIGNAL`; with None the signal
            ends the process.
        stop_timeout_s: Seconds that the process may take to end.
    """

    config: EngineConfig
    incarnation: str
    host: str
    ready_fd: int
    dump_fd: int | None = None
    stop_timeout_s: float = STOP_S


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line on the ready descriptor; exactly one of stage, ready, failed and beat is set.

    Attributes:
        stage: Stage of the start.
        fraction: Finished part of the stage, 0 to 1.
        ready: Description of the engine, which is ready.
        warm_up_s: With `ready`: seconds of the warm-up.
        failed: Why the engine has failed, as text.
        is_drained: The engine drains, has no request left and no block lent.
        role: The engine accepts requests in this role, after an order to change.
        evacuated: Number of the `Evacuate` order after which no request and no lent block is left.
        beat: Progress of the core thread, see `Watchdog.count`.
        doing: With a beat of a stalled core: its present turn and remaining work, as text.
    """

    stage: str | None = None
    fraction: float = 0.0
    ready: EngineDescription | None = None
    warm_up_s: float = 0.0
    failed: str | None = None
    is_drained: bool = False
    role: Role | None = None
    evacuated: int | None = None
    beat: int | None = None
    doing: str = ""


MAX_MESSAGES: Final = 4096
MAX_BYTES: Final = 8 << 20
"""Size of the encoded messages; as Python objects they take up to eight times as much."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Order to accept no more requests, and to report when none is left."""


class HandOver(msgspec.Struct, frozen=True, tag="hand_over"):
    """Order after a drain: ask clients to move running requests, as the timeout is near."""


class ChangeRole(msgspec.Struct, frozen=True, tag="change_role"):
    """Order to change to another role once no request of this one is left, and to report it."""

    role: Role


class Evacuate(msgspec.Struct, frozen=True, tag="evacuate"):
    """Order to hand over all requests and accept none until `Reopen`; reports when none is left.

    Attributes:
        number: Number of the order, which the report has.
    """

    number: int


class Reopen(msgspec.Struct, frozen=True, tag="reopen"):
    """Order to accept requests again after `Evacuate`."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Order to run a step, even without a request; beats show whether it ends."""


Order = Drain | HandOver | ChangeRole | Evacuate | Reopen | Probe
"""Orders of the parent to a ready engine, each a line of JSON on stdin."""


class Wake(msgspec.Struct, frozen=True):
    """Notice that a step is due although no message came."""


class TurnDue(msgspec.Struct, frozen=True):
    """Notice that other ranks of the gang step, and this one must serve them."""


class ClientGone(msgspec.Struct, frozen=True):
    """Notice that the sender can no longer reach a client."""


class Stop(msgspec.Struct, frozen=True):
    """Order to end the process."""


class Profiled(msgspec.Struct, frozen=True):
    """Notice that a client's call for a profile is complete.

    Attributes:
        call_id: The call.
        profile: See `replicas.engine_process.profiler`.
    """

    call_id: int
    profile: str


class Unreadable(msgspec.Struct, frozen=True):
    """Notice of a client's request that could not be decoded.

    Attributes:
        request_id: The request.
        problem: The decoding error.
    """

    request_id: str
    problem: str


WAKE, TURN_DUE, GONE, STOP = Wake(), TurnDue(), ClientGone(), Stop()
Incoming = ClientMessage | Order | Wake | TurnDue | ClientGone | Stop | Unreadable | Profiled
InboxItem = tuple[bytes, Incoming]


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
