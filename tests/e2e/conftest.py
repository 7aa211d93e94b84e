"""Fixtures of this folder: its modules by their bare names, and servers."""

import shutil
import signal
import sys
import tempfile
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import tiny_server

from cluster.lifecycle import supervisor


@pytest.fixture(scope="session")
def interrupted_server():
    """A local server that was stopped while it started, and may still be ending."""
    port = supervisor.free_port()
    server = harness.LocalServer(["--port", str(port)], port)
    try:
        harness.wait_for(lambda: "Starting Ray Serve" in server.log, 180, "Serve starts")
        server.signal_group(signal.SIGINT)
        yield server
    finally:
        server.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """One prefill engine and two decode engines with two lanes, behind HAProxy and Serve.

    Its caller's environment and home are as `test_serving_closed_to_users.py` needs them. All of
    `test_serving*.py` share it, because a host holds one cluster at a time. They run in this order:
    answers, hostile clients, deaths; the server's own death is the last.
    """
    port = supervisor.free_port()
    path = tmp_path_factory.mktemp("serving") / "serve.yaml"
    path.write_text(tiny_server.serve_file(port))
    home = Path(tempfile.mkdtemp(prefix="home-", dir="/tmp"))
    # Every user may enter this home; compiled code stays in its usual folder.
    home.chmod(0o755)
    (home / ".cache").symlink_to(Path.home() / ".cache")
    environment = {"HOME": str(home), "RAY_AUTH_MODE": "disabled"}
    server = harness.LocalServer(["--config", str(path)], port, environment=environment)
    try:
        server.wait_ready()
        tiny_server.wait_whole(server)
        yield server
    finally:
        server.close()
        shutil.rmtree(home)


@pytest.fixture(scope="package")
def client(server):
    """An OpenAI client of that server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
