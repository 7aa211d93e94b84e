"""Engines of tests as forks of an interpreter that has imported PyTorch already.

An engine process takes two seconds of CPU to import what it needs, and tests start hundreds. Here a
process that has imported it once, and has no threads, forks for each engine. The fork runs the
engine's own `main` and is a child of the test process, which waits for it, stops it and kills it as
any other. An engine whose environment differs is started as in production; so are all engines of
servers, examples and scripts that tests run.

Run as a program, this is that interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from replicas import launch

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT = Path(__file__).parents[1]
_MAX_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_UNREAD = ("PYTEST_", "TT_")
"""Prefixes of variables that PyTorch and the interpreter do not read when they start."""


class ForkedEngine(subprocess.Popen):
    """A child process that `Popen` did not start; everything else is Popen's.

    Args:
        pid: The child's id.
        stdin_fd: The write end of its standard input.
    """

    _child_created = True
    _communication_started = False
    _input = None
    _sigint_wait_secs = 0.25

    def __init__(self, pid: int, stdin_fd: int) -> None:
        self.args = ["engine"]
        self.pid = pid
        self.returncode = None
        self.stdin = os.fdopen(stdin_fd, "wb")
        self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()


class WarmInterpreter:
    """The interpreter, started with the first engine; it ends with this process."""

    def __init__(self) -> None:
        self._start_cold = launch.start_process
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._libc = ctypes.CDLL(None)

    def start_process(
        self, program: str, environment: Mapping[str, str], fds: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        """Start an engine process as `launch.start_process` does."""
        with self._lock:
            if self._connection is None:
                self._start(environment)
            if _read_at_start(environment) != self._environment:
                return self._start_cold(program, environment, fds)
            return self._fork(program, environment, fds)

    def _start(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_engines", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                cwd=_ROOT,
            )
        self._connection = ours
        self._environment = _read_at_start(environment)

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)

    def _fork(
        self, program: str, environment: Mapping[str, str], fds: tuple[int, ...]
    ) -> ForkedEngine:
        assert self._connection is not None
        read_fd, write_fd = os.pipe()
        request = {
            "program": program,
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "fds": [0, 1, 2, *fds],
        }
        # The engine's parent ends at once; orphans go to this process while it is a "subreaper".
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [read_fd, 1, 2, *fds])
            pid = int(self._connection.recv(64))
        finally:
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(read_fd)
        return ForkedEngine(pid, write_fd)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_UNREAD)}


def fork_on_request(connection: socket.socket) -> str | None:
    """Fork an engine for each request; return its program in it, None once the tests are over."""
    while True:
        message, given, _, _ = socket.recv_fds(connection, _MAX_BYTES, 16)
        if not message:
            return None
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                for fd in (told, tell, connection.detach()):
                    os.close(fd)
                request = json.loads(message)
                program: str = request.pop("program")
                _become(given, **request)
                return program
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.close(tell)
        # Its child has another parent from now on.
        os.waitpid(between, 0)
        with open(told, "rb") as reports:
            connection.send(reports.read())
        for fd in given:
            os.close(fd)


def _become(given: list[int], *, environment: dict[str, str], cwd: str, fds: list[int]) -> None:
    """Take on the descriptors, the folder and the environment of a new engine."""
    # Away from the numbers that they will have.
    moved = [os.dup(fd) for fd in given]
    while set(moved) & set(fds):
        moved = [os.dup(fd) for fd in moved]
    for source, target in zip(moved, fds, strict=True):
        os.dup2(source, target)
    for fd in {*range(3, max(moved) + 1)} - set(fds):
        with contextlib.suppress(OSError):
            os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)


def main() -> None:
    """Import what engines import, then fork them."""
    from replicas.generators.torch import generator  # noqa: F401
    from replicas.simulation import faulty_process  # noqa: F401 - it imports the usual one

    gc.collect()
    gc.freeze()
    program = fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        importlib.import_module(program).main()


if __name__ == "__main__":
    main()
