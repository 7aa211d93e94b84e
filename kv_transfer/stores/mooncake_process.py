"""Process that talks to a Mooncake cluster for one engine.

The library holds the interpreter lock while it joins or leaves, for ever when its master is frozen.
In the engine's process that would stop the engine. The engine asks over a socket pair, one question
at a time, and kills this process when it closes the store; the kernel kills it when the engine dies
first.
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
"""Memory through which values pass; the largest value is somewhat smaller."""

MAX_MESSAGE_BYTES = _STAGING_BYTES + 4096

_OK = 0
_UNREACHABLE = (-900, -901)
"""Codes of the library when the master refuses or does not answer."""
_SET_DEATH_SIGNAL = 1


class MooncakeRequest(msgspec.Struct, frozen=True, array_like=True):
    """Question of the engine; ``value`` is for puts, and only ``present`` takes several names."""

    what: Literal["present", "get", "put", "discard"]
    names: tuple[str, ...]
    value: memoryview = memoryview(b"")


class MooncakeReply(msgspec.Struct, frozen=True, array_like=True):
    """Answer: how many are present, a value (None: missing), or whether a put succeeded."""

    count: int = 0
    value: memoryview | None = None
    error: str = ""
    """Failure of the cluster; the other fields then mean nothing."""


class MooncakeMember:
    """Membership of this process in the cluster. Owner: the main thread."""

    def __init__(self, master: tuple[str, int], capacity_bytes: int) -> None:
        """Join the cluster.

        Raises:
            ImportError: When the package or a library that it loads is missing.
            OSError: When the master refuses.
        """
        # Loaded in this process only, to keep its native libraries out of the engine.
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
            raise OSError(
                f"cannot join the mooncake cluster: error {code}; is a master running at "
                f"{master[0]}:{master[1]}?"
            )

    def answer(self, ask: MooncakeRequest) -> MooncakeReply:
        """Carry out a question; a failure of the cluster is an answer with ``error``."""
        try:
            return self._answer(ask)
        except OSError as error:
            return MooncakeReply(error=str(error))

    def _answer(self, ask: MooncakeRequest) -> MooncakeReply:
        if ask.what == "present":
            return MooncakeReply(self._num_present(ask.names))
        (name,) = ask.names
        if ask.what == "get":
            staged = self._store.get_buffer(name)
            return MooncakeReply(value=memoryview(staged).cast("B") if staged is not None else None)
        if ask.what == "put":
            code = _checked(self._store.put(name, np.frombuffer(ask.value, np.uint8)))
            return MooncakeReply(int(code == _OK))
        _checked(self._store.remove(name, True))
        return MooncakeReply()

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
    """Let the kernel kill this process when its parent ends; exit if the parent is gone already."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the signal was requested.
        os._exit(1)


def main(descriptor: int, engine: int, host: str, port: int, capacity_bytes: int) -> None:
    """Answer until the engine hangs up, or an error occurs that a new process may not have.

    Args:
        descriptor: Descriptor of the socket to the engine.
        engine: Process id of the engine.
        host: Host of the master.
        port: Port of the master.
        capacity_bytes: Memory to contribute.
    """
    _die_with(engine)
    connection = Connection(descriptor)
    decoder = msgspec.msgpack.Decoder(MooncakeRequest)
    try:
        member = MooncakeMember((host, port), capacity_bytes)
        connection.send_bytes(msgspec.msgpack.encode(MooncakeReply()))
        while True:
            ask = decoder.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))
            connection.send_bytes(msgspec.msgpack.encode(member.answer(ask)))
    except EOFError:
        pass
    except (OSError, ImportError) as error:
        connection.send_bytes(msgspec.msgpack.encode(MooncakeReply(error=str(error))))
    os._exit(0)  # A regular exit leaves the cluster, which can hang for ever.


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
