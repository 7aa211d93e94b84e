"""Which sockets this user's clusters listen on, what each is, and whether it may be where it is.

`read_listeners` reads /proc, so it sees the processes of this user alone; `judge` and `judge_ray`
are pure. `KNOWN_SOCKETS` is the list in SECURITY.md, which a test compares with it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.config.serve_file import is_loopback
from cluster.lifecycle.findings import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

Family = Literal["tcp", "unix", "abstract"]

_LISTEN = "0A"
_ACCEPTS_CONNECTIONS = 0x10000
_AUTH_VARIABLE = b"RAY_AUTH_MODE="
_RAY = re.compile(
    r"^ray::|/ray/core/src/ray/|/ray/dashboard/|/ray/autoscaler/|/ray/_private/|/ray/util/client/"
    r"|cluster\.lifecycle\.driver"
)


@dataclass(frozen=True, slots=True)
class KnownSocket:
    """One kind of socket that a cluster listens on.

    Attributes:
        name: What `ttserve doctor` calls it.
        process: Found in the command line of the process that has it.
        families: Kinds of address.
        where: Where it listens.
        who: Who may speak on it, and what sees to that.
    """

    name: str
    process: re.Pattern[str]
    families: frozenset[Family]
    where: str
    who: str


_TCP: frozenset[Family] = frozenset({"tcp"})
_HAPROXY = re.compile(r"^(\S*/)?haproxy ")
_ENGINE = re.compile(r"replicas\.engine\.process")

KNOWN_SOCKETS = (
    KnownSocket(
        "engine",
        _ENGINE,
        _TCP,
        "loopback, or the address of `args.data_host`",
        "ingresses and engines that hold the deployment's secrets",
    ),
    KnownSocket(
        "engine-kv",
        _ENGINE,
        frozenset({"abstract"}),
        "`@ttserve-kv-…`, this host",
        "processes of the same user, by the kernel's word",
    ),
    KnownSocket(
        "pool",
        re.compile(r"kv_transfer\.stores\.shm_server"),
        frozenset({"abstract"}),
        "`@ttserve-kv-store-…`, this host",
        "processes of the same user, by the kernel's word",
    ),
    KnownSocket(
        "http",
        _HAPROXY,
        _TCP,
        "`http_options.host`, its statistics and metrics there too",
        "everybody who reaches the address: there are no API keys",
    ),
    KnownSocket(
        "http-admin",
        _HAPROXY,
        frozenset({"unix"}),
        "a private folder, mode 600",
        "the same user",
    ),
    KnownSocket(
        "ray",
        _RAY,
        frozenset({"tcp"}),
        "Ray's node address, or every interface",
        "who has Ray's token; without one, everybody",
    ),
    KnownSocket(
        "ray-local",
        _RAY,
        frozenset({"unix", "abstract"}),
        "Ray's session folder",
        "processes of this host that may enter the folder",
    ),
)


@dataclass(frozen=True, slots=True)
class Socket:
    """A listening socket as /proc has it.

    Attributes:
        family: The kind of its address.
        address: As `ss` writes it: "127.0.0.1:8000", "[::]:8000", "@name" or a path.
        pid: The process that has it.
        command: That process's command line.
        has_token: Whether that process was started with Ray's token authentication.
    """

    family: Family
    address: str
    pid: int
    command: str
    has_token: bool

    @property
    def is_local(self) -> bool:
        """Whether it can be reached from this host alone."""
        return self.family != "tcp" or is_loopback(self.address.rpartition(":")[0])


@dataclass(frozen=True, slots=True)
class Listener:
    """What is to be said of one listening socket.

    Attributes:
        level: "ok"; "note" for one that other hosts reach; "missing" for one that it must not be.
        socket: Name of a `KnownSocket`.
        address: Where it listens.
        pid: The process that has it.
        verdict: What is so.
    """

    level: Level
    socket: str
    address: str
    pid: int
    verdict: str


def judge(socket: Socket) -> Listener | None:
    """What a socket is and whether it is expected; None if no cluster's."""
    for known in KNOWN_SOCKETS:
        if socket.family in known.families and known.process.search(socket.command):
            level, verdict = _verdict(known, socket)
            return Listener(level, known.name, socket.address, socket.pid, verdict)
    return None


def _verdict(known: KnownSocket, socket: Socket) -> tuple[Level, str]:
    if socket.is_local:
        return "ok", "this host only"
    if known.name == "http":
        return "note", "other hosts reach it, and there are no API keys; put a gateway before it"
    if known.name != "ray":
        return "note", "other hosts reach it; expected if data_host says so"
    if socket.has_token:
        return "ok", "other hosts reach it, and need Ray's token"
    return "missing", "other hosts reach it, and need no token"


def judge_ray(listeners: tuple[Listener, ...]) -> tuple[Finding, ...]:
    """The one finding of a Ray that anybody may use, or none."""
    is_open = [listener for listener in listeners if listener.level == "missing"]
    if not is_open:
        return ()
    return (
        Finding(
            "missing",
            "Ray",
            f"no token authentication on {len(is_open)} sockets that other hosts reach: whoever "
            "does can run any program as this user",
            (
                "on every node: `ray stop`, then `export RAY_AUTH_MODE=token`",
                "on the first one: `ray get-auth-token --generate`, and copy the token to others",
                "then `ray start` again; `serve` and `ray` commands need the same variable",
            ),
        ),
    )


def read_listeners(root: Path = Path("/proc")) -> tuple[Listener, ...]:
    """Every listening socket of this user's clusters; empty where there is no /proc."""
    found = [judge(socket) for socket in _sockets(root)]
    known = {listener for listener in found if listener is not None}
    return tuple(sorted(known, key=lambda listener: (listener.socket, listener.address)))


def _sockets(root: Path) -> Iterator[Socket]:
    listening = {**_tcp(root / "net/tcp"), **_tcp(root / "net/tcp6"), **_unix(root / "net/unix")}
    with contextlib.suppress(OSError):
        for process in root.iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    yield from _sockets_of(process, listening)


def _sockets_of(process: Path, listening: dict[str, tuple[Family, str]]) -> Iterator[Socket]:
    owned = []
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                owned.append(target[len("socket:[") : -1])
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    variables = (process / "environ").read_bytes().split(b"\0")
    modes = [v.removeprefix(_AUTH_VARIABLE) for v in variables if v.startswith(_AUTH_VARIABLE)]
    has_token = [mode.lower() for mode in modes] == [b"token"]
    for inode in owned:
        if inode in listening:
            family, address = listening[inode]
            yield Socket(family, address, int(process.name), command, has_token)


def _tcp(table: Path) -> dict[str, tuple[Family, str]]:
    """Inode to address of every listening TCP socket."""
    found: dict[str, tuple[Family, str]] = {}
    for line in _lines(table):
        columns = line.split()
        if len(columns) > 9 and columns[3] == _LISTEN:
            found[columns[9]] = "tcp", _tcp_address(columns[1])
    return found


def _tcp_address(text: str) -> str:
    """An address as the kernel writes it: 32-bit words in the host's order, then the port."""
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{int(port, 16)}"


def _unix(table: Path) -> dict[str, tuple[Family, str]]:
    """Inode to name of every listening Unix socket."""
    found: dict[str, tuple[Family, str]] = {}
    for line in _lines(table):
        columns = line.split(None, 7)
        if len(columns) == 8 and int(columns[3], 16) & _ACCEPTS_CONNECTIONS:
            name = columns[7].strip()
            found[columns[6]] = ("abstract" if name.startswith("@") else "unix"), name
    return found


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
