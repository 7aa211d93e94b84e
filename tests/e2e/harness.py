"""Starts real servers and real Ray clusters, and checks that they leave nothing behind.

Each server or cluster runs in a session of its own. Its footprint is every process of the sessions
seen below it, their listening sockets, and the files of /dev/shm that they hold. Other programs on
the host do not count. Processes are ended by recorded id only. Linux only: reads /proc.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.lifecycle import supervisor
from cluster.lifecycle.ray_token import own_token
from tests.e2e.operations import operations_url
from tests.shared_memory import shared_memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
BINARIES = Path(sys.executable).parent
_POLL_S = 0.1
_LISTEN = "0A"


def wait_for(predicate: Callable[[], object], deadline_s: float, what: str) -> Any:
    """Poll until the predicate's value is true.

    Returns:
        That value.

    Raises:
        AssertionError: It never was within `deadline_s` seconds.
    """
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if value := predicate():
            return value
        time.sleep(_POLL_S)
    raise AssertionError(f"not within {deadline_s} s: {what}")


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    process_id: int
    parent_id: int
    session_id: int
    command: str


def process_table() -> dict[int, Process]:
    """Every process that is no zombie."""
    table = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if stat[0] != "Z":
                    process_id = int(entry.name)
                    table[process_id] = Process(
                        process_id, int(stat[1]), int(stat[3]), command[:120]
                    )
    return table


def listening_ports(process_ids: set[int]) -> set[tuple[str, int]]:
    """(hexadecimal address, port) of every TCP socket on which one of these processes listens."""
    return {(address, port) for address, port, _ in listening_sockets(process_ids)}


def listening_sockets(process_ids: set[int]) -> set[tuple[str, int, str]]:
    """Return the same with each socket's inode, which is unique even among sockets of one port."""
    inodes = set()
    for process_id in process_ids:
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process_id}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor.path))
    return {entry for entry in _sockets() if f"socket:[{entry[2]}]" in inodes}


def _sockets() -> Iterator[tuple[str, int, str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTEN:
                address, _, port = columns[1].partition(":")
                yield address, int(port, 16), columns[9]


@dataclass
class Footprint:
    """Resources of a process tree, all of which must be gone at the end; grows with every `look`.

    Attributes:
        root: Process id at the top of the tree, a session leader.
        sessions: Session ids of the tree.
        sockets: TCP sockets on which the tree has listened.
        shared_memory: Files of /dev/shm that the tree has held.
    """

    root: int
    sessions: set[int] = field(default_factory=set)
    sockets: set[tuple[str, int, str]] = field(default_factory=set)
    shared_memory: set[str] = field(default_factory=set)

    def look(self) -> set[int]:
        """Add the tree's present resources; return its process ids."""
        table = process_table()
        self.sessions.add(self.root)
        family = {self.root}
        while True:
            more = {
                process.process_id
                for process in table.values()
                if process.parent_id in family or process.session_id in self.sessions
            } - family
            if not more:
                break
            family |= more
            self.sessions |= {table[process_id].session_id for process_id in more}
        self.sockets |= listening_sockets(family)
        self.shared_memory |= shared_memory_of(family)
        return family

    def processes_left(self) -> list[Process]:
        """Processes of the tree's sessions that still run."""
        return [p for p in process_table().values() if p.session_id in self.sessions]

    def left(self) -> dict[str, object]:
        """Return the remaining resources by kind, without empty kinds."""
        found = {
            "processes": self.processes_left(),
            "ports": {port for _, port, _ in self.sockets.intersection(_sockets())},
            "shared memory": {path for path in self.shared_memory if os.path.exists(path)},
        }
        return {name: value for name, value in found.items() if value}

    def kill(self) -> None:
        """Kill the remaining processes one by one; a test's last resort."""
        for process in self.processes_left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.process_id, signal.SIGKILL)


class LocalServer:
    """One `ttserve serve` (or `make serve`) in a process group of its own.

    Attributes:
        url: Address of its endpoint, without a path.
        operations_url: Address of its operations listener.
        footprint: Its resources.
    """

    def __init__(
        self,
        arguments: list[str],
        port: int,
        *,
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            arguments: Arguments after the command.
            port: The server's port, for `url`.
            command: Command in place of `ttserve serve`.
            environment: Variables to set for it.
        """
        self.url = f"http://127.0.0.1:{port}"
        self.operations_url = operations_url(self.url)
        self._log_folder = Path(tempfile.mkdtemp(prefix="e2e-"))
        self._log = self._log_folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*(command or [str(BINARIES / "ttserve"), "serve"]), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.footprint = Footprint(self.process.pid)

    @property
    def log(self) -> str:
        """Return its whole output."""
        return self._log.read_text(errors="replace")

    def wait_ready(self, deadline_s: float = 300.0) -> None:
        """Wait until it reports that it is ready.

        Raises:
            AssertionError: It ended, or the deadline passed; with its output.
        """

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return "Ready: " in self.log

        wait_for(is_ready, deadline_s, f"ready; it said:\n{self.log}")
        self.footprint.look()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, as a terminal does."""
        self.footprint.look()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_gone(self, deadline_s: float = 20.0) -> int:
        """Wait until nothing is left; return the exit code.

        Raises:
            AssertionError: Resources remain; lists them.
        """

        def is_gone() -> bool:
            return self.process.poll() is not None and not self.footprint.left()

        try:
            wait_for(is_gone, deadline_s, "nothing left")
        except AssertionError:
            raise AssertionError(f"left: {self.footprint.left()}\n{self.log}") from None
        return self.process.wait()

    def close(self) -> None:
        """End whatever is left and remove the log."""
        if self.process.poll() is None:
            self.signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.footprint.look()
        self.footprint.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        shutil.rmtree(self._log_folder, ignore_errors=True)


class RayCluster:
    """One `ray start --head --block` with token authentication, in a private folder.

    Attributes:
        environment: For every `ray` and `serve` command that talks to it.
        footprint: Its resources.
    """

    def __init__(self) -> None:
        """Start it and wait until it runs."""
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        dashboard = supervisor.free_port()
        self.environment = {
            **own_token(self.folder, os.environ),
            **supervisor.environment(self.folder, str(BINARIES / "ttserve-haproxy")),
            **self._documented(),
            "PATH": f"{BINARIES}:{os.environ['PATH']}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
        }
        self._token = Path(self.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        self._log = self.folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "ray", "start", "--head", "--block", "--disable-usage-stats",
                    f"--temp-dir={self.folder / 'r'}", f"--port={supervisor.free_port()}",
                    f"--dashboard-port={dashboard}", "--object-store-memory=100000000",
                    f"--ray-client-server-port={supervisor.free_port()}",
                ],
                env=self.environment, cwd=REPOSITORY, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, umask=0o077,
            )  # fmt: skip
        self.footprint = Footprint(self.process.pid)
        wait_for(
            lambda: "Ray runtime started" in self._log.read_text(errors="replace"), 180, "ray start"
        )

    def _documented(self) -> dict[str, str]:
        """The variables that the README's `eval` sets."""
        done = subprocess.run(
            [str(BINARIES / "ttserve"), "environment"], check=True, capture_output=True, text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )  # fmt: skip
        words = [shlex.split(line) for line in done.stdout.splitlines()]
        assert words.pop(0) == ["umask", "077"]
        assert all(export == "export" for export, _ in words)
        return dict(assignment.split("=", 1) for _, assignment in words)

    def run(self, *command: str) -> str:
        """Run a `ray` or `serve` command against this cluster; return its output."""
        done = subprocess.run(
            command, env=self.environment, cwd=REPOSITORY, timeout=120, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.stdout

    def status(self, *command: str) -> dict[str, Any]:
        """The applications that a command shows, `serve status` or `ray serve status`."""
        import yaml

        text = self.run(*command)
        start = text.find("proxies:")
        assert start >= 0, text
        applications: dict[str, Any] = yaml.safe_load(text[start:])["applications"]
        return applications

    def applications(self) -> dict[str, Any]:
        """Return the same from the dashboard, as a command would cost seconds of processor time."""
        request = urllib.request.Request(
            f"{self.environment['RAY_DASHBOARD_ADDRESS']}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            applications: dict[str, Any] = json.loads(reply.read())["applications"]
        return applications

    def stop(self, deadline_s: float = 45.0) -> None:
        """End it by its recorded process id.

        Raises:
            AssertionError: Resources remain; lists them.
        """
        self.footprint.look()
        self.process.terminate()
        self.process.wait(deadline_s)
        wait_for(lambda: not self.footprint.left(), 180, f"nothing left of {self.footprint.left()}")

    def close(self) -> None:
        """End whatever is left and remove the private folder."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(45)
        self.footprint.look()
        self.footprint.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        shutil.rmtree(self.folder, ignore_errors=True)


def get_json(url: str, timeout_s: float = 30.0) -> tuple[int, Any]:
    """Return status and JSON body of a GET; the text if it is not JSON."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode()


def post_json(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
    """Status and JSON body of a POST."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def stream_events(
    base_url: str, path: str, body: dict[str, Any], timeout_s: float = 60.0
) -> Iterator[str]:
    """The data of each server-sent event of a POST, as it comes."""
    for _, data in events_with_ids(base_url, path, body, None, timeout_s):
        yield data


def events_with_ids(
    base_url: str,
    path: str,
    body: dict[str, Any],
    last_event_id: str | None,
    timeout_s: float = 60.0,
) -> Iterator[tuple[str, str]]:
    """The id, "" where it has none, and the data of each server-sent event of a POST."""
    address = base_url.removeprefix("http://")
    headers = {"Content-Type": "application/json"}
    if last_event_id is not None:
        headers["Last-Event-ID"] = last_event_id
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        event_id = ""
        for line in reply:
            if line.startswith(b"id: "):
                event_id = line[4:].strip().decode()
            elif line.startswith(b"data: "):
                yield event_id, line[6:].strip().decode()
                event_id = ""
    finally:
        connection.close()


def is_listening(port: int) -> bool:
    """Return whether a loopback port accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """Hold a loopback port; yields it."""
    with socket.create_server(("127.0.0.1", supervisor.free_port())) as server:
        yield server.getsockname()[1]
