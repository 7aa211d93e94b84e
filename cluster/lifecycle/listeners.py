"""Finds the sockets on which this user's clusters listen, and checks who can reach each.

`read_listeners` reads /proc, so it sees this user's processes only. It also reports unknown sockets
of processes that a cluster's process has started. `judge` and `judge_ray` are pure. `KNOWN_SOCKETS`
is the list in SECURITY.md; a test compares them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.config.front import is_loopback
from cluster.lifecycle.findings import Finding, Level
from cluster.lifecycle.processes import process_environ, process_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.lifecycle.processes import Process

Family = Literal["tcp", "unix", "abstract"]

_LISTEN = "0A"
_ACCEPTS_CONNECTIONS = 0x10000
_AUTH_VARIABLE = b"RAY_AUTH_MODE="
_RAY = re.compile(
    r"^ray::|^ray-dashboard-|/ray/core/src/ray/|/ray/dashboard/|/ray/autoscaler/|/ray/_private/|/ray/util/client/"
    r"|cluster\.lifecycle\.driver"
)
_RAY_WORKER_PORTS = range(10002, 20000)
_FIRST_PORT_OF_KERNEL = 32768


@dataclass(frozen=True, slots=True)
class KnownSocket:
    """One kind of socket that a cluster listens on.

    Attributes:
        name: Its name in `ttserve doctor`.
        process: Pattern of the command line of the process that has it.
        families: Its address families.
        where: The address that it listens on.
        who: The clients that are admitted, and how this is enforced.
    """

    name: str
    process: re.Pattern[str]
    families: frozenset[Family]
    where: str
    who: str


_TCP: frozenset[Family] = frozenset({"tcp"})
_HAPROXY = re.compile(r"^(\S*/)?haproxy ")
_FORK_SERVER = re.compile(r"multiprocessing\.forkserver")
_HTTP_OF_SERVE = re.compile(r"^ray::(ServeReplica:\S*:ingress|ProxyActor)\b")
_ADMIN = re.compile(r"^ray::ServeReplica:\S*:admin\b")
_ENGINE = re.compile(r"replicas\.(engine_process\.process|simulation\.faulty_process)")

KNOWN_SOCKETS = (
    KnownSocket(
        "engine",
        _ENGINE,
        _TCP,
        "loopback, or the address of `args.data_host`",
        "ingresses and engines that hold the deployment's secrets; `plain` KV: any ticket holder",
    ),
    KnownSocket(
        "engine-kv",
        _ENGINE,
        frozenset({"abstract"}),
        "`@ttserve-kv-…`, this host",
        "processes of the same user, as the kernel reports it",
    ),
    KnownSocket(
        "pool",
        re.compile(r"kv_transfer\.stores\.shm_server"),
        frozenset({"abstract"}),
        "`@ttserve-kv-store-…`, this host",
        "processes of the same user, as the kernel reports it",
    ),
    KnownSocket(
        "http",
        _HAPROXY,
        _TCP,
        "`http_options.host`; operations, statistics and metrics on loopback",
        "any client that reaches the address; with `args.ingress.api_keys`, with a key",
    ),
    KnownSocket(
        "http-admin",
        _HAPROXY,
        frozenset({"unix"}),
        "a private folder, mode 600",
        "the same user",
    ),
    KnownSocket(
        "http-behind",
        _HTTP_OF_SERVE,
        _TCP,
        "`http_options.host`: an ingress's own port (30000 and up), Serve's Python proxy (8500)",
        "any client that reaches the address, past HAProxy's limits: close it by firewall",
    ),
    KnownSocket(
        "admin",
        _ADMIN,
        _TCP,
        "`args.admin.host`, on the head's host; only if configured",
        "with `args.admin.api_keys`, any client with the key of an admin; without, this host",
    ),
    KnownSocket(
        "ray",
        _RAY,
        frozenset({"tcp"}),
        "loopback with `ttserve serve`; else Ray's node address, or every interface",
        "processes that have Ray's token; without token authentication, all that reach the address",
    ),
    KnownSocket(
        "ray-local",
        _RAY,
        frozenset({"unix", "abstract"}),
        "Ray's session folder, below the server's private one",
        "the same user",
    ),
)


@dataclass(frozen=True, slots=True)
class Socket:
    """A listening socket, as found in /proc.

    Attributes:
        family: Its address family.
        address: Its address in the form of `ss`: "127.0.0.1:8000", "[::]:8000", "@name" or a path.
        pid: The process that has it.
        command: That process's command line.
        has_token: Whether that process was started with Ray's token authentication.
        is_below: Whether that process descends from a process of a cluster.
    """

    family: Family
    address: str
    pid: int
    command: str
    has_token: bool
    is_below: bool = False

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return self.family != "tcp" or is_loopback(self.address.rpartition(":")[0])


@dataclass(frozen=True, slots=True)
class Listener:
    """The finding on one listening socket.

    Attributes:
        level: "ok"; "note" if other hosts can reach it; "missing" if they must not but can.
        socket: Name of a `KnownSocket`, or "unknown".
        address: The address that it listens on.
        pid: The process that has it.
        verdict: Who can reach it, in words.
    """

    level: Level
    socket: str
    address: str
    pid: int
    verdict: str


def judge(socket: Socket) -> Listener | None:
    """Return the finding on a socket; None if it does not belong to a cluster."""
    for known in KNOWN_SOCKETS:
        if _is_kind(known, socket):
            level, verdict = _verdict(known, socket)
            return Listener(level, known.name, socket.address, socket.pid, verdict)
    # Python puts a fork server's socket into a private folder.
    is_pythons = socket.family == "unix" and _FORK_SERVER.search(socket.command)
    if not is_pythons and (socket.is_below or _is_of_cluster(socket.command)):
        return Listener("note", "unknown", socket.address, socket.pid, "not expected")
    return None


def _is_of_cluster(command: str) -> bool:
    return any(known.process.search(command) for known in KNOWN_SOCKETS)


def _is_kind(known: KnownSocket, socket: Socket) -> bool:
    if socket.family not in known.families or not known.process.search(socket.command):
        return False
    return known.name not in {"http-behind", "admin"} or not _may_be_grpc(socket)


def _may_be_grpc(socket: Socket) -> bool:
    """Return whether a socket of one of Serve's HTTP processes may be one of Ray's gRPC sockets.

    gRPC binds IPv6 if the kernel has it, on an ephemeral port or one of Ray's worker ports.
    """
    host, _, port = socket.address.rpartition(":")
    is_grpc_port = int(port) in _RAY_WORKER_PORTS or int(port) >= _FIRST_PORT_OF_KERNEL
    return host.startswith("[") and is_grpc_port


_FROM_OTHER_HOSTS: dict[str, tuple[Level, str]] = {
    "http": ("note", "other hosts can reach it without an API key; put a gateway before it"),
    "http-behind": (
        "note",
        "other hosts can bypass HAProxy's limits here; close it with a firewall",
    ),
    "admin": ("ok", "other hosts can reach it, with the key of an admin"),
}
"""Findings on sockets that other hosts can reach, by the socket's name."""


def _verdict(known: KnownSocket, socket: Socket) -> tuple[Level, str]:
    if socket.is_local:
        return "ok", "this host only"
    if known.name != "ray":
        return _FROM_OTHER_HOSTS.get(
            known.name,
            ("note", "other hosts can reach it; expected if data_host is set to its address"),
        )
    if socket.has_token:
        return "ok", "other hosts can reach it, with Ray's token"
    return "missing", "other hosts can reach it without a token"


def judge_ray(listeners: tuple[Listener, ...]) -> tuple[Finding, ...]:
    """Return one finding if other hosts can use Ray without a token, else none."""
    is_open = [listener for listener in listeners if listener.level == "missing"]
    if not is_open:
        return ()
    return (
        Finding(
            "missing",
            "Ray",
            f"no token authentication on {len(is_open)} sockets that other hosts can reach: their "
            "users can run any program as this user",
            (
                "on every node: `ray stop`, then `export RAY_AUTH_MODE=token`",
                "on the first: `ray get-auth-token --generate`; copy the token to the others",
                "then `ray start` again; `serve` and `ray` commands need the same variable",
            ),
        ),
    )


def read_listeners(root: Path = Path("/proc")) -> tuple[Listener, ...]:
    """Return the findings on all listening sockets of this user's clusters; needs /proc."""
    found = [judge(socket) for socket in _sockets(root)]
    known = {listener for listener in found if listener is not None}
    return tuple(sorted(known, key=lambda listener: (listener.socket, listener.address)))


def ray_environments(root: Path = Path("/proc")) -> list[dict[str, str]]:
    """Return the environments with which this user's Ray processes were started."""
    found = []
    for process_id, process in process_table(root).items():
        # The process may have ended since it was listed.
        with contextlib.suppress(OSError):
            is_mine = (root / str(process_id)).stat().st_uid == os.geteuid()
            if is_mine and _RAY.search(process.command):
                found.append(process_environ(process_id, root))
    return found


def _sockets(root: Path) -> Iterator[Socket]:
    listening = {**_tcp(root / "net/tcp"), **_tcp(root / "net/tcp6"), **_unix(root / "net/unix")}
    processes = process_table(root)
    for pid, process in processes.items():
        is_below = any(_is_of_cluster(above.command) for above in _above(process, processes))
        with contextlib.suppress(OSError):
            has_token = _has_token(root / str(pid))
            for inode in _inodes(root / str(pid)) & listening.keys():
                family, address = listening[inode]
                yield Socket(family, address, pid, process.command, has_token, is_below)


def _above(process: Process, processes: dict[int, Process]) -> Iterator[Process]:
    """Yield the ancestors of a process, its parent first."""
    seen = set()
    while process.parent_id in processes and process.parent_id not in seen:
        seen.add(process.parent_id)
        process = processes[process.parent_id]
        yield process


def _inodes(process: Path) -> set[str]:
    """Return the inodes of a process's open sockets."""
    found = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def _has_token(process: Path) -> bool:
    variables = (process / "environ").read_bytes().split(b"\0")
    modes = [v.removeprefix(_AUTH_VARIABLE) for v in variables if v.startswith(_AUTH_VARIABLE)]
    return [mode.lower() for mode in modes] == [b"token"]


def _tcp(table: Path) -> dict[str, tuple[Family, str]]:
    """Map the inode of each listening TCP socket to its address."""
    found: dict[str, tuple[Family, str]] = {}
    for line in _lines(table):
        columns = line.split()
        if len(columns) > 9 and columns[3] == _LISTEN:
            found[columns[9]] = "tcp", _tcp_address(columns[1])
    return found


def _tcp_address(text: str) -> str:
    """Parse an address of /proc/net/tcp: 32-bit words in the host's byte order, then the port."""
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{int(port, 16)}"


def _unix(table: Path) -> dict[str, tuple[Family, str]]:
    """Map the inode of each listening Unix socket to its name."""
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
