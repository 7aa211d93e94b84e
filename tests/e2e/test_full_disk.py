"""A server whose private folder, with Ray's session and all logs, is on a disk that fills up."""

import os
import signal
import subprocess
import sys

import harness
import pytest

from cluster.lifecycle import supervisor

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode,
        reason="needs a mount namespace of its own",
    ),
]

DISK_MB = 48
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=%dm none "$1" && export TMPDIR="$1" && shift && exec "$@"
"""
BODY = {"model": "demo", "prompt": "Return the", "max_tokens": 16, "temperature": 0}


@pytest.fixture
def server(tmp_path):
    """A server that sees a small disk at `disk`, which only its processes see."""
    disk = tmp_path.parent / "d"
    disk.mkdir()
    port = supervisor.free_port()
    script = ON_A_SMALL_DISK % DISK_MB
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(disk)]
    serve = [str(harness.BINARIES / "ttserve"), "serve"]
    server = harness.LocalServer(["--port", str(port)], port, command=[*command, *serve])
    server.disk = f"/proc/{server.process.pid}/root{disk}"
    try:
        yield server
    finally:
        server.close()


def test_a_full_disk_stops_no_request(server):
    server.wait_ready()
    url = f"{server.url}/v1/completions"
    before = harness.post_json(url, BODY)
    assert before[0] == 200
    fill = "import sys\nwith open(sys.argv[1], 'wb', 0) as f:\n while True: f.write(bytes(4096))"
    filled = subprocess.run(
        [sys.executable, "-c", fill, f"{server.disk}/fill"], check=False, capture_output=True
    )
    assert b"No space left" in filled.stderr
    answers = [harness.post_json(url, BODY) for _ in range(40)]
    texts = {answer["choices"][0]["text"] for status, answer in answers if status == 200}
    assert {status for status, _ in answers} == {200}
    assert texts == {before[1]["choices"][0]["text"]}
    # Bodies and streams of many kilobytes go nowhere near the disk either.
    long = BODY | {"prompt": "Return the value of " * 150, "stream": True}
    assert list(harness.stream_events(server.url, "/v1/completions", long))[-1] == "[DONE]"
    assert harness.get_json(f"{server.url}/health")[0] == 200
    # Engines that are lost now are back at the latest when there is room again.
    server.footprint.look()
    for process in server.footprint.processes_left():
        if "replicas.engine.process" in process.command:
            os.kill(process.process_id, signal.SIGKILL)
    harness.wait_for(lambda: harness.post_json(url, BODY)[0] != 200, 20, "the loss is seen")
    os.unlink(f"{server.disk}/fill")
    harness.wait_for(lambda: harness.post_json(url, BODY)[0] == 200, 60, "it serves again")
