"""A host leaves a Ray cluster of several while streams run: not one of them fails."""

import json
import re
import subprocess
import sys
import threading

import harness
import hosts
import msgspec
import pytest
import yaml

from cluster.lifecycle import haproxy
from tests.e2e import steady_streams

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(haproxy.real_binary() is None, reason="no HAProxy here"),
]

NUM_STREAMS = 6
DRAIN_S = 60
FILE = {
    "http_options": {"host": "0.0.0.0", "port": 8000},
    "proxy_location": "EveryNode",
    "applications": [
        {
            "name": "ttserve",
            "import_path": "cluster.app:build",
            "args": {
                "data_host": "node",
                "engine": {
                    "max_model_len": 4096,
                    "simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150"},
                },
                "ingress": {"replicas": 2, "resources": {"edge": 1}},
                "pools": {
                    "both": {"replicas": 2, "resources": {"board": 1}, "drain_timeout_s": DRAIN_S}
                },
            },
        }
    ],
}
"""A replica of each kind fits on a host."""
ROOM = ("--num-cpus=2", '--resources={"edge": 1, "board": 1}')


class Streams:
    """`steady_streams` on a host, against one HAProxy."""

    def __init__(self, cluster, host, url, max_tokens=100):
        prompts = [[n + 2, *range(20, 200)] for n in range(NUM_STREAMS)]
        task = steady_streams.Task(url, "demo", prompts, max_tokens)
        self._process = host.start(
            sys.executable, "-m", "tests.e2e.steady_streams",
            environment=cluster.environment, output=subprocess.PIPE,
        )  # fmt: skip
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")

    def report(self):
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._read()

    def end(self):
        self._process.stdin.close()
        return self._read()

    def _read(self):
        line = self._process.stdout.readline()
        # Anything else is the error that ended it.
        assert line.startswith(b"{"), (line + self._process.communicate()[0]).decode()
        return msgspec.json.decode(line, type=steady_streams.Report)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three hosts beside the head, two of which have replicas."""
    hosts.skip_without_hosts()
    path = tmp_path_factory.mktemp("leave") / "serve.yaml"
    path.write_text(yaml.safe_dump(FILE))
    cluster = hosts.RayHosts()
    try:
        for name in ("one", "two"):
            cluster.add(name, *ROOM)
        said = cluster.head.run("serve", "deploy", str(path), environment=cluster.environment)
        assert "Sent deploy request successfully" in said.stdout, said.stdout
        for host in cluster.workers.values():
            harness.wait_for(lambda host=host: health(cluster, host)[0] == 200, 400, host.address)
        cluster.add("three", *ROOM)
        yield cluster
    finally:
        cluster.close()


def health(cluster, host):
    """Status and text of /health of the HAProxy on a host."""
    url = f"http://{host.address}:8000/health"
    command = ["curl", "-s", "-m", "5", "-w", "\n%{http_code}", url]
    text, _, code = cluster.head.run(*command).stdout.rpartition("\n")
    return int(code), text


def status(cluster):
    return cluster.head.run("ttserve", "status", environment=cluster.environment)


def test_status_says_that_all_runs(cluster):
    done = status(cluster)
    assert done.returncode == 0, done.stdout
    assert "both: HEALTHY, 2 running" in done.stdout
    assert len(re.findall("host 192.0.2.[0-9]+: HTTP healthy", done.stdout)) == 3


def test_the_head_does_not_leave(cluster):
    done = cluster.head.run("ttserve", "leave", environment=cluster.environment)
    assert (done.returncode, done.stdout) == (
        1, "ttserve: the head node cannot leave: it runs the control planes of Ray and Serve\n",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["one", "two"])
def test_no_stream_fails_when_a_host_leaves(cluster, name, tmp_path):
    """The first time another host has room for its replicas; the second time none has."""
    host = cluster.workers[name]
    streams = Streams(cluster, cluster.head, f"http://{cluster.head.address}:8000")
    harness.wait_for(lambda: streams.report().num_done >= NUM_STREAMS, 300, "streams run")
    done = []

    def leave():
        command = ["ttserve", "leave", "--seconds", str(2 * DRAIN_S)]
        done.append(host.run(*command, environment=cluster.environment))

    leaving = threading.Thread(target=leave)
    # Requests that a load balancer sent to this host before it left.
    through = long_streams(cluster, host, tmp_path)
    leaving.start()
    harness.wait_for(lambda: health(cluster, host)[0] == 503, 180, "the host is not ready")
    assert json.loads(health(cluster, host)[1])["reason"] == "this host leaves"
    said = status(cluster)
    assert re.search(rf"host {re.escape(host.address)}: HTTP draining, leaves within", said.stdout)
    leaving.join()
    assert done[0].returncode == 0, done[0].stdout
    for process, path in through:
        assert process.wait(10) == 0
        assert path.read_bytes().rstrip().endswith(b"data: [DONE]")
    before = streams.report()
    host.close()
    harness.wait_for(
        lambda: streams.report().num_done >= before.num_done + NUM_STREAMS, 300, "streams go on"
    )
    report = streams.end()
    assert report.failures == []
    for other in cluster.workers.values():
        if other is not host and other.is_alive:
            assert health(cluster, other) == (200, "")


def long_streams(cluster, host, folder):
    """Open streams through a host's HAProxy; return processes and outputs once each has a token."""
    body = {"model": "demo", "prompt": "Return the", "max_tokens": 600, "ignore_eos": True}
    body = json.dumps(body | {"stream": True})
    address = f"http://{host.address}:8000/v1/completions"
    command = ["curl", "-sSN", "-H", "Content-Type: application/json", "-d", body, address]
    paths = [folder / str(n) for n in range(NUM_STREAMS)]
    streams = []
    for path in paths:
        with path.open("wb") as output:
            process = cluster.head.start(*command, environment=cluster.environment, output=output)
        streams.append((process, path))
    harness.wait_for(lambda: all(path.stat().st_size for path in paths), 180, "first tokens")
    return streams
