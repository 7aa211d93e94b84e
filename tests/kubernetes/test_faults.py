"""Pods of a release die, or are taken away, under 32 streams.

After any fault, a stream that ends normally has every token, and the right ones. Any other stream
ends with an error, and its tokens before that are right.
"""

import subprocess
import threading
import time

import pytest
import yaml

from tests.kubernetes.cluster import NODE, is_ready, wait_until
from tests.kubernetes.conftest import SIMULATED

NUM_STREAMS, NUM_TOKENS = 32, 600
REDIS = {"repository": "localhost/redis", "tag": "test"}
REDIS_FILE = """
FROM localhost/debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server
"""
SMALL = {"rayCPUs": 2, "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}}
VALUES = {
    "head": {"resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}},
    "workers": {
        "prefill": None,
        "decode": None,
        "both": None,
        "ingress": {**SMALL, "replicas": 2},
        # One pod has half of each pool.
        "engines": {**SMALL, "roles": ["prefill", "decode"], "replicas": 2},
    },
    "gcsFaultTolerance": {"enabled": True},
}


@pytest.fixture(scope="module")
def redis(cluster):
    """Values that name an image with Redis."""
    if not cluster.is_kit:
        return {}
    name = f"{REDIS['repository']}:{REDIS['tag']}"
    buildah = ["buildah", "--storage-driver", "overlay"]
    build = [*buildah, "bud", "--quiet", "--layers", "--isolation", "chroot", "-t", name, "-"]
    subprocess.run(build, input=REDIS_FILE, text=True, check=True)
    push = [*buildah, "push", "--quiet", name, f"docker-archive:/dev/stdout:{name}"]
    with subprocess.Popen(push, stdout=subprocess.PIPE) as pushing:
        subprocess.run([NODE, "load"], stdin=pushing.stdout, check=True)
    assert pushing.returncode == 0
    return {"image": REDIS}


@pytest.fixture(scope="module")
def release(make_release, redis, tmp_path_factory):
    """Two pods with engines, two with an ingress, a head that may die."""
    path = tmp_path_factory.mktemp("faults") / "values.yaml"
    tolerant = {**VALUES["gcsFaultTolerance"], **redis}
    path.write_text(yaml.safe_dump({**VALUES, "gcsFaultTolerance": tolerant}))
    return make_release("faults", "-f", path, "--set-file", f"serveConfig={SIMULATED}")


@pytest.fixture(scope="module")
def expected(release, client):
    """The result of each stream without a fault."""
    results = client.streams(release.url, NUM_STREAMS, NUM_TOKENS).results()
    assert [result["error"] for result in results] == [None] * NUM_STREAMS
    assert {len(result["token_ids"]) for result in results} == {NUM_TOKENS}
    return [result["token_ids"] for result in results]


class Traffic:
    """Batches of streams in a thread, one after the other until `end`.

    Attributes:
        num_begun: Batches all streams of which have had a token.
    """

    def __init__(self, client, url):
        self._client, self._url = client, url
        self._is_over = threading.Event()
        self._results = []
        self.num_begun = 0
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()
        wait_until(lambda: self.num_begun, "the first streams")

    def end(self):
        """Stop, and return every stream's result, in batches."""
        self._is_over.set()
        self._thread.join()
        return self._results

    def _go_on(self):
        while not self._is_over.is_set():
            streams = self._client.streams(self._url, NUM_STREAMS, NUM_TOKENS)
            self.num_begun += 1
            self._results.append(streams.results())


def check(results, expected):
    """No token is wrong, none is missing silently; returns the errors."""
    for result, tokens in zip(results, expected, strict=True):
        if result["is_done"] and not result["error"]:
            assert result["token_ids"] == tokens
        else:
            assert result["token_ids"] == tokens[: len(result["token_ids"])]
    return [result["error"] for result in results if result["error"]]


def kill(release, name):
    """Delete a pod as if its host were gone."""
    force = ["--grace-period=0", "--force", "--wait=false"]
    release.cluster.kubectl("-n", release.namespace, "delete", "pod", name, *force)


def wait_healed(release, before):
    """Wait until there are as many pods as before, all ready, and Serve has all its replicas."""

    def is_healed():
        pods = release.pods()
        return len(pods) == len(before) and pods.keys() != before.keys()

    wait_until(is_healed, "another pod", 900)
    release.wait_ready(900)
    wait_until(lambda: status(release).returncode == 0, "all replicas", 600)


def status(release):
    return release.ray("ttserve", "status", check=False)


def of_group(pods, group):
    """Names of the pods of a group."""
    return [n for n, p in pods.items() if p["metadata"]["labels"].get("ttserve.io/group") == group]


@pytest.mark.parametrize("group", ["engines", "ingress"])
def test_a_worker_pod_dies(release, client, expected, group):
    before = release.pods()
    name = of_group(before, group)[0]
    streams = client.streams(release.url, NUM_STREAMS, NUM_TOKENS)
    start_s = time.monotonic()
    kill(release, name)
    assert streams.are_running, "the streams ended before the fault: they show nothing"
    errors = check(streams.results(), expected)
    wait_healed(release, before)
    healed_s = time.monotonic() - start_s
    print(f"\n{group} pod deleted: {len(errors)} of {NUM_STREAMS} streams failed, "
          f"healed after {healed_s:.0f} s; {set(map(str, errors))}")  # fmt: skip
    if group == "engines":
        # The decode replica of the other pod continues all streams.
        assert errors == []
    else:
        assert 0 < len(errors) < NUM_STREAMS, "those that went through it, and no others"
    assert check(client.streams(release.url, NUM_STREAMS, NUM_TOKENS).results(), expected) == []


def test_a_drained_pod_goes_without_a_failed_request(release, client, expected):
    before = release.pods()
    name, other = of_group(before, "engines")
    node = before[name]["spec"]["nodeName"]
    kubectl = release.cluster.kubectl
    kubectl("-n", release.namespace, "label", "pod", name, "drained=yes")
    drain = ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data"]
    traffic = Traffic(client, release.url)
    start_s = time.monotonic()
    try:
        kubectl(*drain, "--pod-selector=drained=yes", "--timeout=900s", timeout_s=1000)
        drained_s = time.monotonic() - start_s
        # The pod that follows the first one is not ready, and no budget counts it.
        kubectl("-n", release.namespace, "label", "pod", other, "drained=too")
        second = kubectl(*drain, "--pod-selector=drained=too", "--timeout=15s", check=False)
        assert "violate the pod's disruption budget" in second.stderr
    finally:
        kubectl("uncordon", node)
    wait_healed(release, before)
    healed_s = time.monotonic() - start_s
    batches = traffic.end()
    print(f"\npod drained in {drained_s:.0f} s, healed after {healed_s:.0f} s; "
          f"{len(batches) * NUM_STREAMS} streams")  # fmt: skip
    assert [check(results, expected) for results in batches] == [[]] * len(batches)


def test_the_head_dies_and_streams_go_on(release, client, expected):
    before = release.pods()
    (head,) = release.pods("head")
    workers = release.pods("worker").keys()
    running = client.streams(release.url, NUM_STREAMS, NUM_TOKENS)
    start_s = time.monotonic()
    kill(release, head)
    begun = client.streams(release.url, NUM_STREAMS, NUM_TOKENS)
    assert not any(map(is_ready, release.pods("head").values())), "the head is back already"
    errors = [check(streams.results(), expected) for streams in (running, begun)]
    wait_healed(release, before)
    print(f"\nhead pod deleted: control back after {time.monotonic() - start_s:.0f} s at most")
    assert errors == [[], []]
    assert release.pods("worker").keys() == workers, "workers were started anew"
