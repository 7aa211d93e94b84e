"""What the files of this folder share: `harness` by its bare name, and a server started once."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

from cluster.lifecycle import supervisor


@pytest.fixture(scope="session")
def interrupted_server():
    """A local server that was told to stop while it started; it may still be ending."""
    port = supervisor.free_port()
    server = harness.LocalServer(["--port", str(port)], port)
    try:
        harness.wait_for(lambda: "Starting Ray Serve" in server.log, 60, "Serve starts")
        server.signal_group(signal.SIGINT)
        yield server
    finally:
        server.close()
