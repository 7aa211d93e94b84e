"""Start an engine process, follow its start, notice its end, stop it.

Owner of the child process: whoever holds the `EngineHandle`. Closing it closes the pipe that the
engine lives by, so an engine never outlives its parent, however the parent ends.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from replicas.engine.process import EngineArguments, EngineReport
from replicas.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replicas.config import EngineConfig
    from replicas.messages import EngineDescription

STOP_S = 5.0
"""How long a stopped engine may take before it is killed."""


class EngineHandle:
    """A started engine process.

    Attributes:
        description: What the engine is.
    """

    def __init__(self, process: subprocess.Popen[bytes], description: EngineDescription) -> None:
        self._process = process
        self.description = description

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Block until the process ends; its exit code."""
        return self._process.wait()

    def call_at_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread of its own once the process has ended."""

        def watch() -> None:
            callback(self._process.wait())

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def stop(self) -> None:
        """End the process: ask by closing its stdin, kill after `STOP_S`. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_engine(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
    progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> EngineHandle:
    """Start an engine and wait until it is ready.

    Args:
        config: The engine's configuration.
        host: Address of this host that the engine listens on.
        env: The child's whole environment (device binding, thread counts); None inherits.
        progress: Called with (stage, fraction done) as the engine reports it.

    Raises:
        EngineStartError: The engine failed, or ended, before it was ready; carries its reason.
    """
    incarnation = secrets.token_hex(8)
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "replicas.engine.process"],
            stdin=subprocess.PIPE,
            pass_fds=(write_fd,),
            env=dict(env) if env is not None else None,
        )
    finally:
        os.close(write_fd)
    assert process.stdin is not None
    arguments = EngineArguments(
        config=config, incarnation=incarnation, host=host, ready_fd=write_fd
    )
    try:
        process.stdin.write(msgspec.json.encode(arguments) + b"\n")
        process.stdin.flush()
        description = _await_ready(read_fd, process, progress)
    except BaseException:
        process.kill()
        process.communicate()  # Closes its stdin, broken or not, and reaps it.
        raise
    return EngineHandle(process, description)


def _await_ready(
    read_fd: int, process: subprocess.Popen[bytes], progress: Callable[[str, float], None]
) -> EngineDescription:
    with os.fdopen(read_fd, "rb") as lines:
        for line in lines:
            report = msgspec.json.decode(line, type=EngineReport)
            if report.failed is not None:
                raise EngineStartError(report.failed)
            if report.ready is not None:
                return report.ready
            if report.stage is not None:
                progress(report.stage, report.fraction)
    raise EngineStartError(
        f"the engine process ended with code {process.wait()} before it was ready; its log says why"
    )
