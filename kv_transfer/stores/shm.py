"""KV units shared by the engines of a node through shared memory: the client.

Values are copied once on the way in and read where they lie. The server is a process of its own,
started by the first client that finds none, so that a pool survives every engine that filled it.
"""

import errno
import fcntl
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_transfer.errors import SharedMemoryError, WireError
from kv_transfer.host_memory import require
from kv_transfer.peer_user import peer_user_id, receive_descriptor
from kv_transfer.store import (
    MAX_KEY_BYTES,
    Lease,
    PutOutcome,
    StoreConfig,
    StoreCounters,
)
from kv_transfer.stores.backoff import BackOff
from kv_transfer.stores.held import HeldLease
from kv_transfer.stores.shm_messages import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Begin,
    Commit,
    Count,
    Discard,
    Get,
    Greeting,
    Leased,
    NumPresent,
    Placed,
    PutEnded,
    Question,
    Release,
    Welcome,
    decode_answer,
    encode,
    socket_name,
)
from kv_transfer.stores.shm_server import CAPACITY_ADVICE, IDLE_S, SLAB_SEALS, bind

logger = logging.getLogger(__name__)

_AnswerT = TypeVar("_AnswerT", bound=Answer)

_LAUNCHER = "import os, sys; os.fork() or os.execv(sys.argv[1], sys.argv[1:])"
"""Script that starts a command as an orphan and exits."""


def ensure_server(config: StoreConfig, idle_s: float = IDLE_S) -> None:
    """Start a server of this node's store unless one runs or is starting; do not wait for it.

    It ends when no client has been connected for ``idle_s``. It is no child of this process and has
    a session of its own. So it outlives the engine that started it, even where all descendants of a
    process are killed with it, as Ray does.

    Raises:
        OSError: When no process can be started.
        SharedMemoryError: There is no memory for it; says both numbers.
    """
    try:
        # Binding the name is the lock, and the server inherits the socket: two never start.
        listener = bind(store_address(config))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return
    with listener:
        require(config.capacity_bytes, purpose="a KV pool", advice=CAPACITY_ADVICE)
        server = [sys.executable, "-m", "kv_transfer.stores.shm_server"]
        server += ["--listener", str(listener.fileno())]
        server += ["--capacity-bytes", str(config.capacity_bytes)]
        server += ["--lease-s", str(config.lease_s), "--idle-s", str(idle_s)]
        # Inherits no stream: a reader of this process's output would wait for the server's end.
        launched = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, *server],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
            check=False,
        )
    if launched.returncode:
        raise OSError(f"cannot start a KV store server: its launcher failed: {launched}")


def store_address(config: StoreConfig) -> str:
    """Return the address that tells this store of the node from others."""
    return config.address or config.name


class ShmStore:
    """``KVStore`` in shared memory. Owner of the connection: the thread that calls.

    A call that is not answered in time closes the connection, so that a late answer is never taken
    for that of a later call. The server then frees what this client held.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Try to connect, which starts the server where there is none.

        Raises:
            SharedMemoryError: There is no server, and no memory for one; says both numbers.
        """
        self._config = config
        self._name = socket_name(store_address(config), os.getuid())
        self._counters = StoreCounters()
        self._connection: socket.socket | None = None
        self._slab: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._back_off = BackOff()
        self._is_closed = False
        self._connect(self._deadline_s())

    # ---- KVStore

    def num_present(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored."""
        deadline_s = self._deadline_s()
        num_present = 0
        for batch in _batches(keys):
            answer = self._ask(NumPresent(batch), Count, deadline_s)
            num_present += min(answer.count, len(batch)) if answer is not None else 0
            if answer is None or answer.count < len(batch):
                break
        self._counters.misses += len(keys) - num_present
        return num_present

    def get(self, keys: Sequence[bytes]) -> list[Lease]:
        """Lease values, which lie in the slab."""
        deadline_s = self._deadline_s()
        leases: list[Lease] = []
        for batch in _batches(keys):
            found = self._get(batch, deadline_s)
            leases += found
            if len(found) < len(batch):
                break
        self._counters.hits += len(leases)
        self._counters.misses += len(keys) - len(leases)
        return leases

    def put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        """Copy a value into the slab."""
        outcome = self._put(key, value) if _is_usable(key) else "dropped"
        self._counters.puts += outcome == "stored"
        self._counters.drops += outcome == "dropped"
        return outcome

    def discard(self, key: bytes) -> None:
        """Remove the key."""
        if _is_usable(key):
            self._ask(Discard(key), Count, self._deadline_s())

    def counters(self) -> StoreCounters:
        """Return the totals."""
        return self._counters

    def close(self) -> None:
        """Disconnect, which frees what this client holds. The server stays for other clients."""
        self._is_closed = True
        self._disconnect()

    # ---- calls

    def _get(self, keys: tuple[bytes, ...], deadline_s: float) -> list[Lease]:
        answer = self._ask(Get(keys), Leased, deadline_s)
        if answer is None:
            return []
        in_slab = all(offset + size <= len(self._slab) for _, offset, size in answer.leases)
        if len(answer.leases) > len(keys) or not in_slab:
            self._lose("it leased values outside its slab, or more than asked for")
            return []
        return [
            HeldLease(
                self._slab[offset : offset + size],
                partial(self._release, lease_id, self._connection),
            )
            for lease_id, offset, size in answer.leases
        ]

    def _release(self, lease_id: int, connection: socket.socket | None) -> bool:
        """End a lease and return whether it had lasted; False if its connection has been lost.

        The server ends all leases of a lost connection, and may then have reused their memory.
        """
        if connection is None or connection is not self._connection:
            return False
        answer = self._ask(Release(lease_id), Count, self._deadline_s())
        return answer is not None and answer.count == 1

    def _put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        deadline_s = self._deadline_s()
        answer = self._ask(Begin(key, value.nbytes), Placed, deadline_s)
        if answer is None:
            return "dropped"
        if answer.outcome is not None:
            return answer.outcome
        place = self._slab[answer.offset : answer.offset + value.nbytes]
        if len(place) != value.nbytes:
            self._lose("it placed a value outside its slab")
            return "dropped"
        began_s = time.monotonic()
        place[...] = value
        deadline_s += time.monotonic() - began_s  # Copying does not count as waiting.
        ended = self._ask(Commit(answer.put_id), PutEnded, deadline_s)
        return ended.outcome if ended is not None else "dropped"

    def _ask(
        self, question: Question, expected: type[_AnswerT], deadline_s: float
    ) -> _AnswerT | None:
        """Return the server's answer; None without one in time."""
        try:
            self._connect(deadline_s)
        except SharedMemoryError as error:
            self._lose(error)
        if self._connection is None:
            return None
        try:
            self._connection.settimeout(max(0.0, deadline_s - time.monotonic()))
            self._connection.send(encode(question))
            answer = decode_answer(self._connection.recv(MAX_MESSAGE_BYTES + 1))
        except (OSError, WireError) as error:
            self._lose(error)
            return None
        if not isinstance(answer, expected):
            self._lose(f"it answered a {type(question).__name__} with a {type(answer).__name__}")
            return None
        self._back_off.succeed()
        return answer

    # ---- connection

    def _deadline_s(self) -> float:
        return time.monotonic() + self._config.timeout_s

    def _connect(self, deadline_s: float) -> bool:
        """Return whether there is a connection, after an attempt if one is due.

        Raises:
            SharedMemoryError: See ``ensure_server``.
        """
        if self._connection is not None:
            return True
        if self._is_closed or not self._back_off.is_due(time.monotonic()):
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(max(0.0, deadline_s - time.monotonic()))
            connection.connect(self._name)
            self._slab = _fetch_slab(connection)
        except (OSError, WireError, ValueError) as error:
            connection.close()
            self._on_unreachable(error)
            return False
        self._connection = connection
        return True

    def _on_unreachable(self, error: Exception) -> None:
        if isinstance(error, ConnectionRefusedError):  # No server listens.
            self._back_off.fail(time.monotonic())
            try:
                ensure_server(self._config)
            except OSError:
                logger.exception("cannot start a KV store server; trying again later")
        else:
            self._lose(error)

    def _lose(self, reason: Exception | str) -> None:
        """Close a connection that is of no more use, and back off."""
        logger.warning(
            "lost the KV store server, treating its values as misses: %s",
            reason or "it closed the connection",
        )
        self._counters.errors += 1
        self._disconnect()
        self._back_off.fail(time.monotonic())

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._slab = np.empty(0, np.uint8)


def _batches(keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Split keys into batches, up to the first key that no store can hold."""
    usable = tuple(takewhile(_is_usable, keys))
    for first in range(0, len(usable), MAX_KEYS):
        yield usable[first : first + MAX_KEYS]


def _is_usable(key: bytes) -> bool:
    return 0 < len(key) <= MAX_KEY_BYTES


def _fetch_slab(connection: socket.socket) -> NDArray[np.uint8]:
    """Greet the server and map its slab.

    Raises:
        OSError: When it does not answer, or the memory cannot be mapped.
        WireError: When it is another user's, or its slab differs from its description.
        ValueError: When the slab cannot be mapped.
    """
    if peer_user_id(connection) != os.getuid():
        raise WireError("a process of another user has bound the name of the KV store server")
    connection.send(encode(Greeting(PROTOCOL_VERSION)))
    packet, descriptor = receive_descriptor(connection, MAX_MESSAGE_BYTES + 1)
    if descriptor is None:
        raise WireError("the KV store server sent no descriptor of its memory")
    try:
        answer = decode_answer(packet)
        if not isinstance(answer, Welcome):
            raise WireError("the KV store server did not answer with Welcome")
        _check_slab(descriptor, answer.capacity_bytes)
        memory = mmap.mmap(descriptor, answer.capacity_bytes)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8)


def _check_slab(descriptor: int, capacity_bytes: int) -> None:
    """Check size and seals of the slab, so that no access to it can fault.

    Raises:
        WireError: When the size is wrong or may change.
    """
    has_size = os.fstat(descriptor).st_size == capacity_bytes
    if not has_size or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SLAB_SEALS != SLAB_SEALS:
        raise WireError("the server's memory has another size than it says, or may change it")
