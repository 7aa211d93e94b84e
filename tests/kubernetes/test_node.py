"""The kit's node leaves nothing on the host, in whatever way it ends."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.kubernetes.cluster import NODE, environment_cluster, wait_until

pytestmark = pytest.mark.skipif(
    environment_cluster() is not None or os.geteuid() != 0,
    reason="no node of the kit's own: it needs root, and no KUBECONFIG",
)

PAUSE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "pause"},
    "spec": {
        "automountServiceAccountToken": False,
        "containers": [{"name": "pause", "image": "localhost/pause:1", "imagePullPolicy": "Never"}],
    },
}


class Node:
    """A node beside the session's: `name` is found in everything that it makes."""

    def __init__(self, state):
        self.state = state
        self.name = f"left-{os.getpid()}"
        self._environment = os.environ | {"NAME": self.name, "STATE": str(state)}

    def start(self, *command):
        return subprocess.Popen([NODE, *command], env=self._environment, stdout=subprocess.DEVNULL)

    def run(self, *command, **options):
        subprocess.run([NODE, *command], env=self._environment, check=True, **options)

    def traces(self):
        """Return the node's processes, files and interfaces on the host."""
        found = [
            *Path("/etc/netns").glob(f"{self.name}*"),
            *Path("/run/netns").glob(f"{self.name}*"),
            *Path("/var/lib/cni").rglob(f"{self.name}*"),
            *Path("/sys/fs/cgroup").glob(f"**/{self.name}"),
            *([self.state] if self.state.exists() else []),
        ]
        mounts = Path("/proc/mounts").read_text().splitlines()
        found += [line for line in mounts if str(self.state) in line or self.name in line]
        return [*map(str, found), *self._processes()]

    def _processes(self):
        marks = [f"NAME={self.name}".encode(), f"{self.state}/".encode()]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                said = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                if any(mark in said for mark in marks):
                    yield said.decode(errors="replace").replace("\0", " ")


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path / "node")
    yield node
    node.run("down")


def test_down_leaves_nothing_of_a_node_with_a_pod(node):
    node.run("up")
    kubectl = ("exec", "kubectl")
    node.run(*kubectl, "apply", "-f", "-", input=json.dumps(PAUSE), text=True)
    node.run(*kubectl, "wait", "pod/pause", "--for=condition=Ready", "--timeout=120s")
    traces = "\n".join(node.traces())
    assert all(sign in traces for sign in ("/sys/fs/cgroup", "/run/netns", "ray-operator", "shim"))
    node.run("down")
    assert node.traces() == []


@pytest.mark.parametrize("reached", ["log/etcd.log", "containerd.sock", "log/kubelet.log"])
def test_down_leaves_nothing_of_a_node_whose_start_was_killed(node, reached):
    up = node.start("up")
    wait_until((node.state / reached).exists, reached)
    up.send_signal(signal.SIGKILL)
    up.wait()
    assert node.traces() != []
    node.run("down")
    assert node.traces() == []


def test_a_guarded_node_ends_with_the_process_that_wanted_it(node):
    wanting = subprocess.Popen(["sleep", "infinity"])
    guard = node.start("guard", str(wanting.pid))
    node.run("up")
    wanting.kill()
    wanting.wait()
    assert guard.wait(120) == 0
    assert node.traces() == []
