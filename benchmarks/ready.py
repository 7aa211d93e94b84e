"""Start a server for a benchmark, and wait for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

READY_S = 300.0


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return once a URL answers; end the benchmark if the server does, or takes too long."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    if server.poll() is not None:
        raise SystemExit(f"the server ended with {server.returncode} instead of getting ready")
    raise SystemExit(f"the server was not ready within {READY_S:g} s")


@contextlib.contextmanager
def running(
    command: Sequence[str],
    url: str,
    *,
    cwd: Path | None,
    env: Mapping[str, str],
    is_quiet: bool = True,
) -> Iterator[None]:
    """Start a server and wait until a URL answers; at the end, end all processes of its session.

    Args:
        command: The server's command line.
        url: Answers as soon as the server is ready.
        cwd: Its folder; None: this one.
        env: Its variables besides those of this process.
        is_quiet: Whether its output is dropped.
    """
    output = subprocess.DEVNULL if is_quiet else None
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_ready(url, process)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
