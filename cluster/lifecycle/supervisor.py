"""Runs the local server in a session of its own, handles signals, and cleans up at the end.

Ray's daemons are in the process group of the process that starts them. A SIGTERM to that group ends
them before the applications on top, which then hang. Therefore `ttserve serve` is two processes:
this one in the terminal's group, and in a new session the driver (`cluster.lifecycle.driver`) with
all processes that Ray starts. Whatever happens to the driver, the session's processes and the
private folder are gone when this returns.

Owns the driver process and the private folder of one `ttserve serve`. It restarts nothing: a server
that fails reports the reason and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from cluster.config.environment import process_environment
from cluster.config.front import CORS_ORIGINS_VARIABLE, FrontSettings
from cluster.config.serve_file import read_faults, read_serve_file
from cluster.edge.api_keys import shared_key_entry
from cluster.errors import ClusterConfigError
from cluster.lifecycle import haproxy
from cluster.lifecycle.local_nodes import ON_LOOPBACK
from cluster.lifecycle.private_files import UnsafeFileError
from cluster.lifecycle.processes import process_table
from cluster.lifecycle.ray_token import own_token

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from cluster.config.serve_file import ServeFile
    from cluster.lifecycle.processes import Process

STOP_DEADLINE_S = 14.0
"""Seconds that the driver has for a clean stop after the first signal."""

API_KEY_VARIABLES = ("TTSERVE_API_KEY", "VLLM_API_KEY")
"""Variables with a key that all clients share; no process of the server inherits them."""

_KILL_DEADLINE_S = 4.0
_POLL_S = 0.1
_FIRST_PORT, _LAST_PORT = 20000, 29999
# A Unix socket's path has at most 107 bytes. The longest paths below the folder are Ray's
# object-store socket and HAProxy's admin socket during a reload: 84 bytes after the folder's name.
_MAX_FOLDER_BYTES = 107 - 84


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's options, passed as one JSON argument.

    Attributes:
        config: Serve config file, absolute.
        model: Model folder or "demo", instead of the file's; None keeps the file's.
        host: Address of the HTTP endpoint, instead of the file's.
        port: Port of the HTTP endpoint, instead of the file's.
        faults: Path of a fault plan, absolute; None keeps the file's.
        api_keys: Path of a file of API keys; None keeps the file's.
        folder: Private folder of this server, for Ray's session and HAProxy's files.
        has_haproxy: Whether the HTTP front is HAProxy; else it is Serve's own proxy.
    """

    config: str
    model: str | None = None
    host: str | None = None
    port: int | None = None
    faults: str | None = None
    api_keys: str | None = None
    folder: str = ""
    has_haproxy: bool = True

    def read(self) -> ServeFile:
        """Read the file and apply the options to it.

        Raises:
            ClusterConfigError: A file cannot be read, or a key outside of its `args` is invalid.
        """
        file = read_serve_file(self.config)
        faults = None if self.faults is None else read_faults(self.faults)
        return file.override(
            args={
                "model": self.model,
                "faults": faults,
                "ingress": {"api_keys": self.api_keys} if self.api_keys else None,
            },
            http_options={"host": self.host, "port": self.port},
        )


def serve(
    options: ServeOptions,
    host: str,
    port: int,
    api_key: str = "",
    cors_origins: Sequence[str] = (),
) -> int:
    """Run the server until it ends or a signal arrives.

    The first SIGINT, SIGTERM or SIGHUP asks for a clean stop; a second one, or `STOP_DEADLINE_S`,
    kills.

    Args:
        options: What to serve; `folder` and `has_haproxy` are filled in here.
        host: Address of the endpoint.
        port: Port of the endpoint.
        api_key: Key that all clients share; "" without one.
        cors_origins: Origins of web pages that may read HAProxy's own errors.

    Returns:
        The driver's exit code, 0 after a clean stop; 1 if it had to be killed.

    Raises:
        ClusterConfigError: No request could show the key, a port is taken, a setting of the front
            is invalid, or other users can write to the folder in which the server's folder would
            be.
    """
    key_entry = shared_key_entry(api_key) if api_key else ""
    script = haproxy.find_script()
    front = FrontSettings.read(process_environment())
    front.require_haproxy(script is not None)
    if front.certificate is not None:
        haproxy.require_certificate(front.certificate)
    require_free_port(host, port)
    if script is not None:
        operations_host, _, operations_port = front.operations_address(port).rpartition(":")
        require_free_port(operations_host.strip("[]*"), int(operations_port))
    folder = private_folder()
    options = msgspec.structs.replace(options, folder=str(folder), has_haproxy=script is not None)
    if key_entry:
        # Only its hash leaves this process: arguments and variables can be read by others.
        path = folder / "api-keys.yaml"
        path.touch(mode=0o600)
        path.write_text(key_entry)
        options = msgspec.structs.replace(options, api_keys=str(path))
    signals = _SignalCount()
    try:
        # Ignore the caller's token: this server has a token of its own.
        variables = own_token(folder, process_environment())
        variables = {k: v for k, v in variables.items() if k not in API_KEY_VARIABLES}
        variables[CORS_ORIGINS_VARIABLE] = ",".join(cors_origins)
        # Closing the pipe stops the driver. The kernel closes it if this process is killed.
        argument = msgspec.json.encode(options).decode()
        driver = subprocess.Popen(
            [sys.executable, "-m", "cluster.lifecycle.driver", argument],
            stdin=subprocess.PIPE,
            env={**variables, **environment(folder, script), **ON_LOOPBACK},
            start_new_session=True,
            # Logs, sockets and state of Ray and Serve must be closed to other users.
            umask=0o077,
        )
        try:
            return _wait(driver, signals)
        finally:
            _end_session(driver)
    except UnsafeFileError as error:
        raise ClusterConfigError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signals.restore()


def environment(folder: Path, haproxy_script: str | None) -> dict[str, str]:
    """Return Serve settings that can only be set as environment variables, before Ray starts.

    Args:
        folder: Private folder for HAProxy's files.
        haproxy_script: Path of `ttserve-haproxy`, or None without HAProxy.

    Returns:
        Variables to add to the environment of the process that starts Ray.
    """
    variables = {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        # Wait for running requests only: no load balancer has to notice the stop.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    variables |= haproxy.environment(folder / "h", haproxy_script)
    if haproxy_script is not None:
        variables |= {
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        }
    return variables


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free, as is the next one.

    If the port becomes a public one, the next is the operations listener's. Ports above the range
    are ephemeral ones of Ray's processes and outgoing connections; those below it are defaults of
    Ray, Serve and their workers.

    Raises:
        ClusterConfigError: Every port of the range is taken.
    """
    first = random.randint(_FIRST_PORT, _LAST_PORT)
    for port in itertools.chain(range(first, _LAST_PORT + 1), range(_FIRST_PORT, first)):
        with socket.socket() as probe, socket.socket() as other, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
    raise ClusterConfigError(f"no free port on 127.0.0.1 from {_FIRST_PORT} to {_LAST_PORT}")


def require_free_port(host: str, port: int) -> None:
    """Check that an address of the endpoint can be bound.

    Raises:
        ClusterConfigError: It cannot; the message has the address and the option to change it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As HAProxy does: lingering connections of an earlier server do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port; "
                "the server also uses the port after it"
            ) from error


class _SignalCount:
    """A counter of the signals that request a stop; `restore` reinstalls the former handlers."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._former = {number: signal.signal(number, self._on_signal) for number in self._NUMBERS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)


def private_folder() -> Path:
    """Create a private folder whose path is short enough for the socket names below it."""
    base = tempfile.gettempdir()
    if len(base) + len("/ttserve-12345678") > _MAX_FOLDER_BYTES:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="ttserve-", dir=base))


def _wait(driver: subprocess.Popen[bytes], signals: _SignalCount) -> int:
    """Wait until the driver ends, or has to be killed; return the exit code."""
    deadline_s: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return driver.wait(_POLL_S)
        if signals.count and deadline_s is None:
            say("Stopping.")
            assert driver.stdin is not None
            driver.stdin.close()
            deadline_s = time.monotonic() + STOP_DEADLINE_S
        if signals.count > 1 or (deadline_s is not None and time.monotonic() > deadline_s):
            return 1


def _end_session(driver: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the driver's session, including those that start meanwhile."""
    deadline_s = time.monotonic() + _KILL_DEADLINE_S
    if driver.poll() is None:
        driver.kill()
        driver.wait(_KILL_DEADLINE_S)
    while (left := _session(driver.pid)) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.process_id, signal.SIGKILL)
        time.sleep(_POLL_S / 2)


def _session(session_id: int) -> list[Process]:
    return [process for process in process_table().values() if process.session_id == session_id]


def say(text: str) -> None:
    """Write a line to standard error; ignore errors."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)
