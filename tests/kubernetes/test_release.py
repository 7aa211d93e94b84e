"""The installed chart: requests, upgrades, refusals, and access to its ports."""

import json

import pytest

from tests.kubernetes.cluster import Release, wait_until
from tests.kubernetes.conftest import LAPTOP

ABSENT_MODEL = "/models/absent"
NUM_STREAMS, NUM_TOKENS = 16, 1500


def values_file(path, values):
    """A values file; JSON is YAML."""
    path.write_text(json.dumps(values))
    return path


def application(release):
    """Return the RayService's status of the application."""
    statuses = release.service()["status"]["activeServiceStatus"]["applicationStatuses"]
    return statuses["ttserve"]


def test_helm_test_passes(release):
    said = release.cluster.helm("test", release.name, "-n", release.namespace).stdout
    assert "Phase:          Succeeded" in said


@pytest.mark.parametrize("component", ["head", "worker"])
def test_doctor_passes_inside_the_pods(release, component):
    for pod in release.pods(component):
        command = ["-n", release.namespace, "exec", pod, "-c", f"ray-{component}", "--"]
        print(release.cluster.kubectl(*command, "ttserve", "doctor").stdout)


def test_an_upgrade_of_a_runtime_knob_loses_neither_pods_nor_streams(release, client, changed_file):
    before = {pod["metadata"]["uid"] for pod in release.pods().values()}
    streams = client.streams(release.url, NUM_STREAMS, NUM_TOKENS)
    file = changed_file({"router": {"policy": "round_robin", "queue_timeout_s": 45}})
    release.upgrade("--set-file", f"serveConfig={file}")
    wait_until(lambda: "round_robin" in release.ray("serve", "config").stdout, "the changed router")
    assert streams.are_running, "the streams ended before the change: they show nothing"
    results = streams.results()
    release.wait_ready()
    assert {pod["metadata"]["uid"] for pod in release.pods().values()} == before
    assert [result["error"] for result in results] == [None] * NUM_STREAMS
    assert [result["tokens"] for result in results] == [NUM_TOKENS] * NUM_STREAMS
    assert all(result["is_done"] for result in results)


def test_a_broken_file_is_refused_before_anything_changes(release, client, changed_file):
    served = release.service()["spec"]
    broken = changed_file({"model": ABSENT_MODEL})
    done = release.upgrade("--set-file", f"serveConfig={broken}", check=False)
    assert done.returncode != 0
    assert ABSENT_MODEL in done.stdout + done.stderr
    assert release.service()["spec"] == served
    assert_serves(release, client)


def test_a_broken_file_that_nobody_checked_leaves_the_service_running(
    release, client, changed_file
):
    broken = changed_file({"model": ABSENT_MODEL})
    release.upgrade("--set-file", f"serveConfig={broken}", "--set", "validate.enabled=false")
    try:
        wait_until(lambda: application(release)["status"] == "DEPLOY_FAILED", "the failure")
        describe = release.cluster.kubectl(
            "-n", release.namespace, "describe", "rayservice", release.name
        ).stdout
        assert ABSENT_MODEL in describe
        assert ABSENT_MODEL in release.ray("serve", "status").stdout
        assert_serves(release, client)
    finally:
        release.upgrade()
    wait_until(lambda: application(release)["status"] == "RUNNING", "the file of before")
    release.wait_ready()
    assert_serves(release, client)


def assert_serves(release, client):
    results = client.streams(release.url, 2, 16).results()
    assert [(result["error"], result["tokens"]) for result in results] == [(None, 16)] * 2


def test_a_privileged_pod_beside_the_release_is_refused(cluster, image, tmp_path):
    container = {"name": "loose", "image": image, "securityContext": {"privileged": True}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "loose"},
        "spec": {"containers": [container]},
    }
    values = {"extraObjects": [pod], "validate": {"enabled": False}}
    file = values_file(tmp_path / "values.yaml", values)
    release = Release(cluster, image, "loosened", ["-f", file])
    with cluster.namespace(release.namespace):
        done = cluster.helm("install", *release.arguments(), check=False)
        assert done.returncode != 0
        assert 'violates PodSecurity "restricted' in done.stderr
        release.uninstall()


def test_pods_of_a_release_that_loosens_them_are_refused(cluster, image, tmp_path):
    volumes = [{"name": "host", "hostPath": {"path": "/"}}]
    values = {"extraVolumes": volumes, "validate": {"enabled": False}}
    file = values_file(tmp_path / "values.yaml", values)
    release = Release(cluster, image, "loosened", [*LAPTOP, "-f", file])
    with cluster.namespace(release.namespace) as namespace:
        cluster.helm("install", *release.arguments())

        def refusals():
            events = cluster.get("events", None, namespace)
            return [event for event in events if "violates PodSecurity" in event["message"]]

        assert "hostPath" in wait_until(refusals, "an event")[0]["message"]
        assert not release.pods()
        release.uninstall()


def test_what_is_bound_to_loopback_refuses_other_pods(release, client):
    (worker,) = release.pods("worker").values()
    address = worker["status"]["podIP"]
    assert client.connects(address, 8000)
    listening = listeners(release, worker["metadata"]["name"])
    loopback = {port for host, port in listening if host.startswith("127.")}
    assert {8404, 9101} <= loopback, "HAProxy's statistics and metrics"
    everywhere = {port for host, port in listening if not host.startswith("127.")}
    assert [port for port in sorted(loopback - everywhere) if client.connects(address, port)] == []


def listeners(release, pod):
    """Addresses and ports that processes of a pod listen on over TCP, as the kernel has them."""
    program = """
import json, socket

found = []
for file, family in ("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6):
    for line in open(file).readlines()[1:]:
        _, local, _, state = line.split()[:4]
        host, port = local.split(":")
        words = [bytes.fromhex(host)[i : i + 4][::-1] for i in range(0, len(host) // 2, 4)]
        if state == "0A":
            found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
print(json.dumps(found))
"""
    command = ["-n", release.namespace, "exec", "-i", pod, "-c", "ray-worker", "--", "python3", "-"]
    return json.loads(release.cluster.kubectl(*command, input=program).stdout)
