"""A local server stops completely, by any signal: no process, port or shared memory is left.

The server that `make` starts has its private folder, with Ray's session and all logs, on a small
disk, which fills up before the server is stopped. A test that ends a shared server is the last one
of its file: here, in `test_fault_plan.py` (a second interrupt), and in `test_serving_losses.py` (a
killed supervisor).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import harness
import pytest

from cluster.lifecycle import supervisor

pytestmark = pytest.mark.ray

PROMPT = {"model": "demo", "prompt": "Return the", "temperature": 0}
BODY = PROMPT | {"max_tokens": 16}
HAS_NAMESPACES = (
    os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], check=False).returncode
)
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")

# Only its own processes see the disk. The folder's name is short, as the server asks for that.
DISK, DISK_MB = "/mnt", 48
ON_A_SMALL_DISK = f"""
mount -t tmpfs -o size={DISK_MB}m none {DISK} && export TMPDIR={DISK} && exec "$@"
"""


@pytest.fixture(scope="module")
def made_server(tmp_path_factory):
    """A server that `make` started, as a user does."""
    port = supervisor.free_port()
    makefile = tmp_path_factory.mktemp("made") / "Makefile"
    makefile.write_text(f"serve:\n\t@{harness.BINARIES / 'ttserve'} serve --port {port}\n")
    on_a_disk = ["unshare", "-m", "sh", "-c", ON_A_SMALL_DISK, "sh"] if HAS_NAMESPACES else []
    server = harness.LocalServer(["-f", str(makefile), "serve"], port, command=[*on_a_disk, "make"])
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@needs_make
def test_nothing_on_the_data_path_listens_beyond_loopback(made_server):
    family = made_server.footprint.look()
    table = harness.process_table()
    haproxy = {p for p in family if "haproxy -db" in table[p].command}
    engines = {p for p in family if "replicas.engine_process.process" in table[p].command}
    assert len(engines) == 2
    port = int(made_server.url.rpartition(":")[2])
    assert port in {port for _, port in harness.listening_ports(haproxy)}
    addresses = {address for address, _ in harness.listening_ports(haproxy | engines)}
    assert addresses == {"0100007F"}, "127.0.0.1 in the kernel's notation"


@needs_make
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs a mount namespace of its own")
@pytest.mark.slow
def test_a_full_disk_stops_no_request(made_server):
    server, disk = made_server, f"/proc/{made_server.process.pid}/root{DISK}"
    assert private_folder(server).parent == Path(DISK)
    url = f"{server.url}/v1/completions"
    before = harness.post_json(url, BODY)
    assert before[0] == 200
    fill = "import sys\nwith open(sys.argv[1], 'wb', 0) as f:\n while True: f.write(bytes(4096))"
    filled = subprocess.run(
        [sys.executable, "-c", fill, f"{disk}/fill"], check=False, capture_output=True
    )
    assert b"No space left" in filled.stderr
    answers = [harness.post_json(url, BODY) for _ in range(40)]
    texts = {answer["choices"][0]["text"] for status, answer in answers if status == 200}
    assert {status for status, _ in answers} == {200}
    assert texts == {before[1]["choices"][0]["text"]}
    # Bodies and streams of many kilobytes do not use the disk either.
    long = BODY | {"prompt": "Return the value of " * 150, "stream": True}
    assert list(harness.stream_events(server.url, "/v1/completions", long))[-1] == "[DONE]"
    assert harness.get_json(f"{server.url}/health")[0] == 200
    # Engines that are lost now are back at the latest when there is room again.
    server.footprint.look()
    engines = [
        process.process_id
        for process in server.footprint.processes_left()
        if "replicas.engine_process.process" in process.command
    ]
    assert engines
    for process_id in engines:
        os.kill(process_id, signal.SIGKILL)
    # A new request waits a minute for an engine, and may get one.
    harness.post_json(url, BODY, timeout_s=150)
    os.unlink(f"{disk}/fill")
    harness.wait_for(lambda: harness.post_json(url, BODY)[0] == 200, 180, "it serves again")


@needs_make
def test_interrupted_server_lets_its_stream_end_and_leaves_nothing(made_server):
    server = made_server
    status, body = harness.post_json(f"{server.url}/v1/completions", {**PROMPT, "max_tokens": 8})
    assert status == 200, body
    assert body["usage"]["completion_tokens"] > 0
    folder = private_folder(server)
    # An open file keeps the disk after all processes that saw it have ended.
    disk = os.open(f"/proc/{server.process.pid}/root{folder.parent}", os.O_RDONLY)
    try:
        assert folder.name in os.listdir(disk)
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
        assert folder.name not in os.listdir(disk)
    finally:
        os.close(disk)


def test_interrupt_while_it_starts_leaves_nothing(interrupted_server):
    interrupted_server.wait_gone(20)


def test_taken_port_is_refused_before_anything_starts():
    with harness.listener() as port:
        server = harness.LocalServer(["--port", str(port)], port)
        try:
            assert server.wait_gone() == 2
            assert f"127.0.0.1:{port}" in server.log
            assert "--port" in server.log
        finally:
            server.close()


def private_folder(server: harness.LocalServer) -> Path:
    """Return its driver's private folder; each server on this host has its own."""
    commands = (Path(f"/proc/{p}/cmdline").read_text() for p in server.footprint.look())
    [folder] = {Path(name) for c in commands for name in re.findall(r'"folder":"([^"]+)"', c)}
    return folder
