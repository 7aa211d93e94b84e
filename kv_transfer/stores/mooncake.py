"""KV units shared by all engines of a cluster through a Mooncake store.

Needs a running ``mooncake_master`` and the package ``mooncake-transfer-engine`` (or its variant
without CUDA). Each engine contributes ``capacity_bytes`` of memory, whose values are lost with it.
Mooncake grants leases itself, of a length that only its master knows, and cannot report whether one
has lapsed; so a value is copied out before it is returned. It has no authentication: use it in a
closed network only.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.errors import TransferError
from kv_transfer.store import Lease, PutOutcome, StoreConfig, StoreCounters
from kv_transfer.stores.backoff import CallThread
from kv_transfer.stores.held import HeldLease
from kv_transfer.stores.mooncake_process import MAX_MESSAGE_BYTES, MooncakeReply, MooncakeRequest

_ResultT = TypeVar("_ResultT")


class _ClusterError(Exception):
    """Error reported by the process of a store: it works, and the cluster does not."""


class MooncakeStore:
    """``KVStore`` in a Mooncake cluster, joined by a process of its own.

    Calls run on a thread of their own. A call can take up to half a minute when the master freezes
    and some seconds when it dies; the first call lasts as long as the master is frozen or absent.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Start the thread; the first call starts the process.

        Raises:
            TransferError: When the package is missing or the address has no port.
        """
        host, _, port = config.address.rpartition(":")
        if not host or not port.isdecimal():
            raise TransferError(
                f"kv_store address {config.address!r}: mooncake needs host:port of its master"
            )
        if not _is_installed():
            raise TransferError(
                "the mooncake store needs the package mooncake-transfer-engine, or "
                "mooncake-transfer-engine-non-cuda: pip install 'ttserve[mooncake]'"
            )
        self._arguments = [host, port, str(config.capacity_bytes)]
        self._counters = StoreCounters()
        self._thread = CallThread("kv-store-mooncake", config.timeout_s, self._counters)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    # ---- KVStore

    def num_present(self, keys: Sequence[bytes]) -> int:
        """Return how many keys are stored, all of which Mooncake leases for a moment."""
        names = tuple(key.hex() for key in keys)
        num_present = self._call(lambda _: self._ask(MooncakeRequest("present", names)).count, 0)
        self._counters.misses += len(keys) - num_present
        return num_present

    def get(self, keys: Sequence[bytes]) -> list[Lease]:
        """Copy values out, up to the first that is missing."""
        values: list[NDArray[np.uint8]] = []
        values = self._call(lambda end_s: self._get(keys, end_s), values)
        self._counters.hits += len(values)
        self._counters.misses += len(keys) - len(values)
        return [HeldLease(value, _was_protected) for value in values]

    def put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        """Copy a value in."""
        dropped: PutOutcome = "dropped"
        put = self._with_process(lambda end_s: self._put(key, value, end_s))
        outcome = self._thread.put(put, dropped, value.nbytes)
        self._counters.puts += outcome == "stored"
        self._counters.drops += outcome == "dropped"
        return outcome

    def discard(self, key: bytes) -> None:
        """Remove a value, leased or not: a reader has its own copy already, or its read fails."""
        self._call(lambda _: self._ask(MooncakeRequest("discard", (key.hex(),))).count, 0)

    def counters(self) -> StoreCounters:
        """Return the totals."""
        return self._counters

    def close(self) -> None:
        """End the process, which loses the values in its memory."""
        process = self._process  # The thread may set the field to None at any moment.
        if process is not None:
            process.kill()  # Ends the call that the thread may wait in.
        self._thread.close(self._end)

    # ---- the thread

    def _call(self, function: Callable[[float], _ResultT], default: _ResultT) -> _ResultT:
        return self._thread.call(self._with_process(function), default)

    def _with_process(self, function: Callable[[float], _ResultT]) -> Callable[[float], _ResultT]:
        def run(end_s: float) -> _ResultT:
            try:
                return function(end_s)
            except (OSError, EOFError, msgspec.DecodeError):
                self._end()
                raise

        return run

    def _start(self) -> Connection:
        """Start the process and wait until it has joined."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "kv_transfer.stores.mooncake_process"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._connection = Connection(ours.detach())
        try:
            self._listen(self._connection)
        except _ClusterError:  # The process ends after it has sent an error.
            self._end()
            raise
        return self._connection

    def _ask(self, ask: MooncakeRequest) -> MooncakeReply:
        connection = self._connection or self._start()
        connection.send_bytes(msgspec.msgpack.encode(ask))
        return self._listen(connection)

    def _listen(self, connection: Connection) -> MooncakeReply:
        """Return the process's answer.

        Raises:
            _ClusterError: When the cluster does not work.
            OSError, EOFError: When the process has ended.
            msgspec.DecodeError: When it is no answer.
        """
        told = msgspec.msgpack.decode(connection.recv_bytes(MAX_MESSAGE_BYTES), type=MooncakeReply)
        if told.error:
            raise _ClusterError(told.error)
        return told

    def _end(self) -> None:
        """Kill the process, if there is one, and close the connection to it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _get(self, keys: Sequence[bytes], end_s: float) -> list[NDArray[np.uint8]]:
        values: list[NDArray[np.uint8]] = []
        for key in keys:
            value = self._ask(MooncakeRequest("get", (key.hex(),))).value
            if value is None or time.monotonic() >= end_s:
                break
            values.append(np.frombuffer(value, np.uint8))
        return values

    def _put(self, key: bytes, value: NDArray[np.uint8], end_s: float) -> PutOutcome:
        name = key.hex()
        if self._ask(
            MooncakeRequest("present", (name,))
        ).count:  # Mooncake reports a second put as stored.
            return "present"
        if not 0 < value.nbytes < MAX_MESSAGE_BYTES // 2:
            return "dropped"
        ask = MooncakeRequest("put", (name,), memoryview(value.tobytes()))
        if time.monotonic() >= end_s:  # The caller waits no longer and may change the value.
            return "dropped"
        return "stored" if self._ask(ask).count else "dropped"


def _is_installed() -> bool:
    """Return whether the package exists, without loading its native libraries into the engine."""
    return importlib.util.find_spec("mooncake") is not None


def _was_protected() -> bool:
    """Return True: the value is a copy and cannot change."""
    return True
