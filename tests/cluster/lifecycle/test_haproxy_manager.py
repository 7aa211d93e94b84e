"""HAProxy starts with a private token alone, and ends with the process that started it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.edge.http_server import poll
from tests.cluster.lifecycle import haproxy_world
from tests.cluster.lifecycle.haproxy_world import World

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not haproxy_world.is_available, reason="no HAProxy here"),
]

MANAGE = """
import subprocess, sys
processes = [subprocess.Popen(sys.argv[1:])]
for line in sys.stdin:
    # As Serve reloads: the new one takes the listeners over, the old one keeps its connections.
    takes_over = ["-x", line.strip(), "-sf", str(processes[-1].pid)]
    processes.append(subprocess.Popen([*sys.argv[1:], *takes_over]))
"""


def test_it_does_not_start_with_a_token_that_others_can_read(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        token = folder / "token"
        token.write_text("secret")
        token.chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-m", "cluster.lifecycle.haproxy", "-f", str(tmp_path / "none")],
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
            check=False, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 1
    assert f"{token} can be used by other users (mode 0644)" in done.stderr


def has_ended(process_id):
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_haproxy_and_its_predecessor_end_with_their_manager(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as backend:
        world = World(tmp_path, haproxy_world.serve_config(), backend.getsockname()[1])
        world.write()
        command = [sys.executable, "-m", "cluster.lifecycle.haproxy", "-db", "-f"]
        manager = subprocess.Popen(
            [sys.executable, "-c", MANAGE, *command, str(tmp_path / "haproxy.cfg")],
            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        process_ids = []
        try:
            poll(world.pid, "HAProxy answers")
            process_ids.append(world.pid())
            # A connection with half a request keeps the first one after the reload.
            with socket.create_connection(("127.0.0.1", world.port)) as client:
                client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
                world.write()
                manager.stdin.write(f"{world.socket}\n")
                manager.stdin.flush()
                poll(lambda: world.pid() not in {None, *process_ids}, "the next one answers")
                process_ids.append(world.pid())
                assert not has_ended(process_ids[0])
                manager.kill()
                manager.wait()
                poll(lambda: all(map(has_ended, process_ids)), "both have ended")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", world.port))
        finally:
            manager.kill()
            manager.wait()
            manager.stdin.close()
            for process_id in process_ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
