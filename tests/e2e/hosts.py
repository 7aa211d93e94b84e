"""Several hosts on one machine, as far as the kernel is concerned, and a Ray cluster over them.

Each host has a network, a process table, a folder and a shared memory of its own; they are joined
by a bridge. A host ends with its first process, and everything in it: nothing is left to clean up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

import harness
import pytest

from cluster.lifecycle import supervisor

_FIRST = """
mount -t proc proc /proc && mount -t tmpfs none /dev/shm && mount -t tmpfs -o mode=700 none "$1" &&
ip link set lo up && echo here && exec cat
"""
GCS_PORT, DASHBOARD_PORT = 6379, 8265


def skip_without_hosts() -> None:
    """Skip where this process may not make namespaces."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this host")
    if os.geteuid() != 0:
        pytest.skip("hosts of one's own need root")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            _namespaces(folder), stdin=subprocess.DEVNULL,
            check=False, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")


def _namespaces(folder: str) -> list[str]:
    flags = ["--net", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
    return ["unshare", *flags, "sh", "-c", _FIRST, "sh", folder]


class Host:
    """One host.

    Attributes:
        address: In the network of all hosts.
    """

    def __init__(self, address: str, folder: Path) -> None:
        """Start it.

        Args:
            address: For it alone.
            folder: Every host sees one of its own there.
        """
        self.address = address
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._holder = subprocess.Popen(
            _namespaces(str(folder)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"here\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.first = children.split()[0]

    def command(self, *command: str) -> list[str]:
        """Return a command that runs another one there, in the repository."""
        enter = ["nsenter", "-t", self.first, "-n", "-i", "-p", "-m"]
        # Another mount namespace is entered at its root.
        return [*enter, "env", f"--chdir={harness.REPOSITORY}", *command]

    def run(
        self, *command: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*command),
            env=environment, timeout=300, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def start(
        self, *command: str, environment: dict[str, str], output: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Start a command whose standard input is a pipe; it ends with the host."""
        process = subprocess.Popen(
            self.command(*command), env=environment,
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(process)
        return process

    @property
    def is_alive(self) -> bool:
        """Return whether it has not been closed."""
        return self._holder.poll() is None

    def close(self) -> None:
        """End it with all its processes, as by a loss of power."""
        for process in (self._holder, *self._started):
            # Unsent input of a command whose host has ended is discarded.
            with contextlib.suppress(BrokenPipeError), process:
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()


class RayHosts:
    """A Ray cluster with token authentication over hosts that it makes.

    Attributes:
        head: Where its control plane runs.
        workers: The other hosts, by name.
        environment: For every command that talks to the cluster.
    """

    def __init__(self) -> None:
        self._exits = contextlib.ExitStack()
        self._logs = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        self._folder = folder
        token = self._logs / "token"
        self.environment = {
            **os.environ,
            **supervisor.environment(folder, str(harness.BINARIES / "ttserve-haproxy")),
            "PATH": f"{harness.BINARIES}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.workers: dict[str, Host] = {}
        self._num_hosts = 0
        try:
            token.write_text("0123456789abcdef" * 4)
            self.head = self._host()
            self.environment["RAY_DASHBOARD_ADDRESS"] = (
                f"http://{self.head.address}:{DASHBOARD_PORT}"
            )
            self._ray(
                self.head, "head", "--head", f"--port={GCS_PORT}", "--num-cpus=0",
                f"--temp-dir={folder / 'r'}", "--dashboard-host=0.0.0.0",
                f"--dashboard-port={DASHBOARD_PORT}",
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def add(self, name: str, *options: str) -> Host:
        """Start a worker host and its Ray node; returns when it has joined."""
        host = self.workers[name] = self._host()
        self._ray(host, name, f"--address={self.head.address}:{GCS_PORT}", *options)
        return host

    def close(self) -> None:
        """End every host."""
        self._exits.close()

    def _host(self) -> Host:
        self._num_hosts += 1
        number = self._num_hosts
        # Addresses of a network that is reserved for examples.
        host = Host(f"192.0.2.{number}", self._folder)
        self._exits.callback(host.close)
        bridge = ["nsenter", "-t", (self.head if number > 1 else host).first, "-n", "ip"]
        if number == 1:
            _run(*bridge, "link", "add", "cable", "type", "bridge")
        else:
            port = f"port{number}"
            _run(*bridge, "link", "add", port, "type", "veth",
                 "peer", "name", "cable", "netns", host.first)  # fmt: skip
            _run(*bridge, "link", "set", port, "master", "cable", "up")
        _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", "cable"))
        _run(*host.command("ip", "link", "set", "cable", "up"))
        return host

    def _ray(self, host: Host, name: str, *options: str) -> None:
        log = self._logs / name
        with log.open("wb") as output:
            process = host.start(
                "ray", "start", "--block", "--disable-usage-stats",
                f"--node-ip-address={host.address}", "--object-store-memory=100000000", *options,
                environment=self.environment, output=output,
            )  # fmt: skip

        def has_started() -> bool:
            said = log.read_text(errors="replace")
            assert process.poll() is None, said
            return "Ray runtime started" in said

        harness.wait_for(has_started, 180, f"ray start on {name}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
