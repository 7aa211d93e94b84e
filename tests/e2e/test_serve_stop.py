"""A local server stops whole: no process, port or shared memory is left, however it is told.

Where a test ends a server that other tests have used, it is the last one of their file:
`test_fault_plan.py` (a second interrupt), `test_serving_losses.py` (a killed supervisor).
"""

import json
import re
import shutil
import signal
import threading
from pathlib import Path

import harness
import pytest

from cluster.lifecycle import supervisor

pytestmark = pytest.mark.ray

PROMPT = {"model": "demo", "prompt": "Return the", "temperature": 0}


@pytest.fixture
def made_server(tmp_path):
    """A server that `make` started, as a user does."""
    port = supervisor.free_port()
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"serve:\n\t@{harness.BINARIES / 'ttserve'} serve --port {port}\n")
    server = harness.LocalServer(["-f", str(makefile), "serve"], port, command=["make"])
    yield server
    server.close()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_interrupted_server_lets_its_stream_end_and_leaves_nothing(made_server):
    server = made_server
    server.wait_ready()
    check_listeners(server)
    status, body = harness.post_json(f"{server.url}/v1/completions", {**PROMPT, "max_tokens": 8})
    assert status == 200, body
    assert body["usage"]["completion_tokens"] > 0
    folder = private_folder(server)
    assert folder.exists()
    long = {**PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    stream = harness.stream_events(server.url, "/v1/completions", long)
    assert json.loads(next(stream))["object"] == "text_completion"
    rest = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    server.signal_group(signal.SIGINT)
    server.wait_gone(20)
    reader.join(1)
    assert rest[-1] == "[DONE]"
    assert not folder.exists()


def test_interrupt_while_it_starts_leaves_nothing(interrupted_server):
    interrupted_server.wait_gone(20)


def test_taken_port_is_refused_before_anything_starts(tmp_path):
    with harness.listener() as port:
        server = harness.LocalServer(["--port", str(port)], port)
        try:
            assert server.wait_gone() == 2
            assert f"127.0.0.1:{port}" in server.log
            assert "--port" in server.log
        finally:
            server.close()


def check_listeners(server: harness.LocalServer) -> None:
    """HAProxy has the endpoint, and nothing on the data path listens beyond loopback."""
    family = server.footprint.look()
    table = harness.process_table()
    haproxy = {p for p in family if "haproxy -db" in table[p].command}
    engines = {p for p in family if "replicas.engine.process" in table[p].command}
    assert len(engines) == 2
    port = int(server.url.rpartition(":")[2])
    assert port in {port for _, port in harness.listening_ports(haproxy)}
    addresses = {address for address, _ in harness.listening_ports(haproxy | engines)}
    assert addresses == {"0100007F"}, "127.0.0.1 in the kernel's notation"


def private_folder(server: harness.LocalServer) -> Path:
    """The folder that its driver was told to use; another server on this host has another one."""
    commands = (Path(f"/proc/{p}/cmdline").read_text() for p in server.footprint.look())
    [folder] = {Path(name) for c in commands for name in re.findall(r'"folder":"([^"]+)"', c)}
    return folder
