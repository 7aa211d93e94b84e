"""The harness reports remains of its own process tree, and nothing of other programs."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys

import harness
import pytest

pytestmark = pytest.mark.process

HOLD = """
import mmap, socket, sys, time
with open(sys.argv[1], "wb") as file:
    file.truncate(4096)
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
print(listener.getsockname()[1], flush=True)
time.sleep(60)
"""
IN_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@contextlib.contextmanager
def holder(path, *, in_a_child=False, port=0):
    """A process, or the child of one, that maps a file and listens; yields it and its port."""
    words = ["-c", IN_A_CHILD] if in_a_child else []
    process = subprocess.Popen(
        [sys.executable, *words, *([] if in_a_child else ["-c"]), HOLD, path, str(port)],
        stdout=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        yield process, int(process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@pytest.fixture
def paths():
    return [f"/dev/shm/test-harness-{secrets.token_hex(8)}" for _ in range(2)]


def test_a_segment_that_a_child_leaves_is_reported_after_its_death(paths):
    with holder(paths[0], in_a_child=True) as (process, _):
        footprint = harness.Footprint(process.pid)
        footprint.look()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        harness.wait_for(lambda: not footprint.processes_left(), 180, "both have ended")
        assert footprint.left() == {"shared memory": {paths[0]}}
        os.unlink(paths[0])
        assert footprint.left() == {}


def test_segments_and_ports_of_other_programs_are_not_reported(paths):
    with holder(paths[0]) as (process, port):
        footprint = harness.Footprint(process.pid)
        footprint.look()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.unlink(paths[0])
        # The port may be given to another program next.
        with holder(paths[1], port=port):
            assert footprint.left() == {}


def test_a_port_that_a_tree_still_listens_on_is_reported(paths):
    with holder(paths[0], in_a_child=True) as (process, port):
        footprint = harness.Footprint(process.pid)
        footprint.look()
        assert footprint.left()["ports"] == {port}
