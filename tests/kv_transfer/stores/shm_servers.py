"""Servers of the shared-memory store for tests: in a thread, or in a process to be killed."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kv_transfer.store import StoreConfig
from kv_transfer.stores.shm import ShmStore
from kv_transfer.stores.shm_messages import socket_name
from kv_transfer.stores.shm_server import ShmServer, bind

VALUE_BYTES = 1 << 20
NUM_SLOTS = 4


def config(address: str, **changes: object) -> StoreConfig:
    settings = {"capacity_bytes": NUM_SLOTS * VALUE_BYTES, "timeout_s": 5.0, **changes}
    return StoreConfig(backend="shm", address=address, **settings)


def new_address() -> str:
    return f"test-{uuid.uuid4().hex}"


def value(number: int, size: int = VALUE_BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def eventually(condition: Callable[[], object], deadline_s: float = 120.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.01)


def connect(address: str, **changes: object) -> ShmStore:
    store = ShmStore(config(address, **changes))
    eventually(lambda: store._connect(time.monotonic() + 5))
    return store


@contextlib.contextmanager
def server_thread(
    capacity_bytes: int = NUM_SLOTS * VALUE_BYTES, lease_s: float = 60.0
) -> Iterator[str]:
    """Serve until every client has disconnected; yields the address."""
    address = new_address()
    server = ShmServer(bind(address), capacity_bytes, lease_s, idle_s=600.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield address
    finally:
        server._idle_s = 0.0
        server_pid(address)  # Wakes it.
        thread.join(30)
        assert not thread.is_alive(), "the server does not end"
        server.close()


def start_server(
    address: str, lease_s: float = 60.0, idle_s: float = 30.0
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "kv_transfer.stores.shm_server", "--address", address]
    command += ["--capacity-bytes", str(NUM_SLOTS * VALUE_BYTES)]
    command += ["--lease-s", str(lease_s), "--idle-s", str(idle_s)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def server_process(lease_s: float = 60.0) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Serve in a process; ends it, and any that a client started in its stead."""
    address = new_address()
    process = start_server(address, lease_s)
    try:
        eventually(lambda: server_pid(address))
        yield address, process
    finally:
        process.kill()
        process.wait()
        end_started(address)


def server_pid(address: str) -> int | None:
    """Return the id of the process that listens under this address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        if connection.connect_ex(socket_name(address, os.getuid())):
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[0])


def end_started(address: str) -> None:
    """End the server of this address if a client has started one, or is starting one."""
    with contextlib.suppress(OSError):
        bind(address).close()
        return
    eventually(lambda: server_pid(address))
    os.kill(server_pid(address), signal.SIGKILL)
