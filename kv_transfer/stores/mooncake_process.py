"""Talk to a Mooncake cluster for one engine: a process of its own.

Why: the library holds the interpreter lock while it joins or leaves, for ever when its master is
frozen; in the engine's process that would stop the engine. The engine asks over a socket pair, one
question at a time, and kills this process when it ends; the kernel does when it dies first.
"""

import ctypes
import importlib
import os
import signal
import socket
import sys
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np

_STAGING_BYTES = 256 << 20
"""Memory through which values pass on their way; the largest value is somewhat smaller."""

MAX_MESSAGE_BYTES = _STAGING_BYTES + 4096

_OK = 0
_UNREACHABLE = (-900, -901)
"""What the library returns when the master refuses or does not answer."""
_SET_DEATH_SIGNAL = 1


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A question. ``value`` is of a put only; only ``present`` has other than one name."""

    what: Literal["present", "get", "put", "discard"]
    names: tuple[str, ...]
    value: memoryview = memoryview(b"")


class Told(msgspec.Struct, frozen=True, array_like=True):
    """The answer: how many are present, a value (None: missing), or whether a put went well."""

    count: int = 0
    value: memoryview | None = None
    error: str = ""
    """What went wrong with the cluster; then the rest means nothing."""


class Member:
    """This process's membership of the cluster. Owner: the main thread."""

    def __init__(self, master: tuple[str, int], capacity_bytes: int) -> None:
        """Join.

        Raises:
            ImportError: When the package or a library that it loads is missing.
            OSError: When the master refuses.
        """
        # Only this process loads it: its native libraries are none of the engine's.
        library = importlib.import_module("mooncake.store")
        self._store: Any = library.MooncakeDistributedStore()
        code = self._store.setup(
            _own_address(master),
            "P2PHANDSHAKE",
            capacity_bytes,
            _STAGING_BYTES,
            "tcp",
            "",
            f"{master[0]}:{master[1]}",
        )
        if code != _OK:
            raise OSError(f"cannot join the mooncake cluster of {master}: error {code}")

    def answer(self, ask: Ask) -> Told:
        """Carry out what is asked, or tell why the cluster does not."""
        try:
            return self._answer(ask)
        except OSError as error:
            return Told(error=str(error))

    def _answer(self, ask: Ask) -> Told:
        if ask.what == "present":
            return Told(self._num_present(ask.names))
        (name,) = ask.names
        if ask.what == "get":
            staged = self._store.get_buffer(name)
            return Told(value=memoryview(staged).cast("B") if staged is not None else None)
        if ask.what == "put":
            code = _checked(self._store.put(name, np.frombuffer(ask.value, np.uint8)))
            return Told(int(code == _OK))
        _checked(self._store.remove(name, True))
        return Told()

    def _num_present(self, names: tuple[str, ...]) -> int:
        found = self._store.batch_is_exist(list(names)) if names else []
        return sum(1 for code in takewhile(bool, found) if _checked(code))


def _checked(code: int) -> int:
    if code in _UNREACHABLE:
        raise OSError(f"the mooncake master does not answer: error {code}")
    return code


def _own_address(master: tuple[str, int]) -> str:
    """Return the address of this host on the way to the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(master)  # Sends nothing.
        return str(probe.getsockname()[0])


def _die_with(parent: int) -> None:
    """End when the parent does, or now if it has; for that no signal would ever come."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int, engine: int, host: str, port: int, capacity_bytes: int) -> None:
    """Answer until the engine hangs up, or something goes wrong that a new process may not have.

    Args:
        descriptor: Of the socket to the engine.
        engine: Process id of the engine.
        host: Where the master is.
        port: The master's.
        capacity_bytes: Memory to contribute.
    """
    _die_with(engine)
    connection = Connection(descriptor)
    decoder = msgspec.msgpack.Decoder(Ask)
    try:
        member = Member((host, port), capacity_bytes)
        connection.send_bytes(msgspec.msgpack.encode(Told()))
        while True:
            ask = decoder.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))
            connection.send_bytes(msgspec.msgpack.encode(member.answer(ask)))
    except EOFError:
        pass
    except (OSError, ImportError) as error:
        connection.send_bytes(msgspec.msgpack.encode(Told(error=str(error))))
    os._exit(0)  # Leaving in order could take for ever, too.


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
