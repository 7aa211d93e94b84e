"""Wait for a server that a benchmark has started."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

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
