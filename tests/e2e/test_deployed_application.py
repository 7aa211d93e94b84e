"""The code between the cores and Ray Serve, on one Ray cluster with two applications.

One has tenants, two ingresses and replicas whose roles change under streams. The other has a pool
that Serve scales. Every engine runs on a simulated mesh, whose tokens depend on all of its KV.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import urllib.request

import harness
import msgspec
import pytest
import yaml
from operations import operations_url

from cluster.lifecycle import supervisor
from tests.e2e import steady_streams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

TENANT, QUOTA, OTHER = "x-tenant", "one-at-a-time", "another"
NUM_INGRESSES = 2
ENGINE = {
    "block_size": 32, "max_model_len": 4096,
    "simulated_mesh": {"model": "Llama-3.2-1B", "board": "n150"},
}  # fmt: skip
ROLES = {
    "name": "roles",
    "route_prefix": "/",
    "import_path": "cluster.app:build",
    "args": {
        "engine": ENGINE,
        "ingress": {"replicas": NUM_INGRESSES},
        "router": {
            "admission": {
                "ttft_s": 30.0,
                "tenant_header": TENANT,
                "tenants": {QUOTA: {"max_requests": 1}},
            }
        },
        "pools": {"prefill": {}, "decode": {"replicas": 2}},
    },
}
SCALED = {
    "name": "scaled",
    "route_prefix": "/scaled",
    "import_path": "cluster.app:build",
    "autoscaling_policy": {"policy_function": "cluster.lifecycle.autoscaling:ApplicationPolicy"},
    "args": {
        "engine": {**ENGINE, "max_batch_size": 4},
        "pools": {"both": {"replicas": 1, "max_replicas": 2}},
    },
    # The policy runs as often as ingresses report, every ten seconds by default.
    "deployments": [
        {
            "name": "ingress",
            "autoscaling_config": {
                "min_replicas": 1, "max_replicas": 1, "metrics_interval_s": 1.0,
                "look_back_period_s": 5.0,
            },
        }
    ],
}  # fmt: skip
LONG = {"model": "demo", "prompt": "Return the", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster to which this module has deployed nothing yet."""
    cluster = harness.RayCluster()
    yield cluster
    # With applications running, Ray takes half a minute to end.
    cluster.run("serve", "shutdown", "-y")
    cluster.close()


@pytest.fixture(scope="module")
def url(cluster):
    """The endpoint of both applications, once both run."""
    port = supervisor.free_port()
    file = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [ROLES, SCALED]}
    path = cluster.folder / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    assert "Sent deploy request successfully" in cluster.run("serve", "deploy", str(path))
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        found = cluster.applications()
        failed = {n: a["message"] for n, a in found.items() if a["status"] == "DEPLOY_FAILED"}
        assert not failed, failed
        return all(is_healthy(f"{url}{prefix}/health") for prefix in ("", "/scaled"))

    harness.wait_for(is_ready, 240, "both applications answer")
    wait_roles(url, {"prefill": 1, "decode": 2})
    harness.wait_for(
        lambda: num_running(cluster, "roles", "ingress") == NUM_INGRESSES, 180, "all ingresses run"
    )
    return url


def is_healthy(url):
    with contextlib.suppress(OSError):
        return harness.get_json(url)[0] == 200
    return False


def roles(url):
    """Role of each replica that an ingress knows, by name."""
    _, view = harness.get_json(f"{operations_url(url)}/debug/slots")
    return {replica["replica"]: replica["role"] for replica in view["replicas"]}


def wait_roles(url, counts):
    """Wait until `counts` replicas have each role; return the roles."""

    def found():
        now = roles(url)
        return now if {r: list(now.values()).count(r) for r in now.values()} == counts else None

    return harness.wait_for(found, 180, f"roles {counts}, last {roles(url)}")


def num_running(cluster, application, deployment):
    """Replicas of a deployment that Serve runs now."""
    found = cluster.applications()[application]["deployments"][deployment]["replicas"]
    return sum(replica["state"] == "RUNNING" for replica in found)


# --- admission -----------------------------------------------------------------------------------


@contextlib.contextmanager
def stream(url, **headers):
    """A long stream that ends with the block; yields the answer, whose body is not read."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(
        "POST", "/v1/completions", json.dumps({**LONG, "stream": True}),
        {"Content-Type": "application/json", **named},
    )  # fmt: skip
    with contextlib.closing(connection), connection.getresponse() as answer:
        yield answer


def test_a_quota_of_one_admits_one_over_all_ingresses(url):
    def statuses():
        with contextlib.ExitStack() as opened:
            found = {QUOTA: [], OTHER: []}
            for tenant in (QUOTA, OTHER) * 6:
                answer = opened.enter_context(stream(url, x_tenant=tenant))
                found[tenant].append(answer.status)
                if answer.status != 200:
                    error = json.loads(answer.read())["error"]
                    assert (error["code"], tenant) == ("quota", QUOTA), error
                    assert int(answer.headers["Retry-After"]) > 0
        assert found[OTHER] == [200] * 6
        return found[QUOTA]

    # Ingresses that have just started need a second to find each other.
    harness.wait_for(
        lambda: statuses() == [200] + [429] * 5, 180, "one is admitted, whatever ingress"
    )


def test_every_ingress_finds_the_record_of_a_request(url):
    with stream(url, x_request_id="explain-me") as answer:
        assert answer.status == 200
    found = [
        harness.get_json(f"{operations_url(url)}/debug/routes/explain-me")[0] for _ in range(8)
    ]
    assert found == [200] * 8


def test_one_page_has_the_slots_and_the_metrics_of_all_ingresses(url):
    with contextlib.ExitStack() as opened:
        for _ in range(4):
            assert opened.enter_context(stream(url)).status == 200

        def attempts():
            _, view = harness.get_json(f"{operations_url(url)}/debug/slots")
            requests = {a["request"] for r in view["replicas"] for a in r["attempts"]}
            return len(requests), view["num_ingresses"]

        harness.wait_for(lambda: attempts() == (4, NUM_INGRESSES), 180, "all requests are shown")
        with urllib.request.urlopen(f"{operations_url(url)}/metrics", timeout=30) as answer:
            page = answer.read().decode()
    queued = re.findall(r'ttserve_router_queued_requests\{ingress="(\w+)"', page)
    assert len(set(queued)) == NUM_INGRESSES


def test_a_request_names_its_own_objective(url):
    with stream(url, x_slo_ttft_ms="soon") as answer:
        assert answer.status == 400
        assert "x-slo-ttft-ms" in json.loads(answer.read())["error"]["message"]


# --- roles ---------------------------------------------------------------------------------------


@pytest.fixture
def streams(url):
    """Streams that repeat in a process of their own; their first answers are the expected ones."""
    prompts = [[n + 2, *range(20, 150)] for n in range(6)]
    task = steady_streams.Task(url, "demo", prompts, 60)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.steady_streams"], cwd=harness.REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdin.write(msgspec.json.encode(task).decode() + "\n")

        def report():
            process.stdin.write("\n")
            process.stdin.flush()
            return msgspec.json.decode(process.stdout.readline(), type=steady_streams.Report)

        try:
            report()
            yield report
        finally:
            process.stdin.close()
            process.stdout.read()


def flip(cluster, replica, role):
    """Run `ttserve flip`; returns its exit code and its output."""
    done = subprocess.run(
        [str(harness.BINARIES / "ttserve"), "flip", replica, role, "--seconds", "30"],
        env=cluster.environment, cwd=harness.REPOSITORY, timeout=90, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_flip_changes_a_role_and_back_under_streams_and_no_stream_fails(cluster, url, streams):
    flipped, kept = (name for name, role in sorted(roles(url).items()) if role == "decode")
    for role in ("prefill", "decode"):
        num_before = streams().num_done
        code, said = flip(cluster, flipped, role)
        assert (code, said.splitlines()[-1]) == (0, f"ttserve: {flipped} has role {role}"), said
        counts = {"prefill": 2, "decode": 1} if role == "prefill" else {"prefill": 1, "decode": 2}
        assert wait_roles(url, counts)[flipped] == role
        if role == "prefill":
            code, said = flip(cluster, kept, "prefill")
            assert (code, "is the last engine with role decode" in said) == (1, True), said
        harness.wait_for(lambda n=num_before: streams().num_done > n + 16, 180, "streams go on")
    assert streams().failures == []


# --- scaling -------------------------------------------------------------------------------------


@contextlib.contextmanager
def load(url, num_streams):
    """Keep so many streams running until the block ends; yields failures."""
    is_over, failures = threading.Event(), []

    def run():
        while not is_over.is_set():
            body = {**LONG, "max_tokens": 100, "stream": True}
            try:
                *_, last = harness.stream_events(url, "/scaled/v1/completions", body)
                failures.extend([last] if last != "[DONE]" else [])
            except (OSError, AssertionError, http.client.HTTPException) as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_a_pool_grows_by_a_replica_under_load_and_shrinks_after_it(cluster, url):
    assert num_running(cluster, "scaled", "both") == 1
    with load(url, 8) as failures:
        harness.wait_for(lambda: num_running(cluster, "scaled", "both") == 2, 180, "it grows")
    assert failures == []
    harness.wait_for(lambda: num_running(cluster, "scaled", "both") == 1, 180, "it shrinks")
