"""The code between the cores and Ray Serve, on one Ray cluster with two applications.

One has tenants, two ingresses, an admin server, and replicas whose roles change under streams. The
other has a pool that Serve scales. Every engine runs on a simulated mesh, whose tokens depend on
all of its KV.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import harness
import msgspec
import pytest
import yaml
from operations import operations_url

from cluster.edge.api_keys import new_key
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
def admin(cluster):
    """The admin server of the application with roles, as it will be deployed."""
    return Admin(cluster.folder / "admin-keys.yaml")


class Admin:
    """An admin server's configuration, and a client of it.

    Attributes:
        section: The section `args.admin`.
    """

    def __init__(self, path):
        self._key, line = new_key()
        path.write_text(f'ops: {{keys: ["{line}"], admin: true}}')
        self.section = {"port": supervisor.free_port(), "api_keys": str(path)}

    def call(self, method, path, body=None, *, key=None):
        """Return the status and the body of an answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.section['port']}{path}",
            data=json.dumps(body or {}).encode() if method == "POST" else None,
            headers={
                "Authorization": f"Bearer {key or self._key}", "Content-Type": "application/json"
            },
            method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def states(self):
        """State of each replica, by name; none while the server does not answer."""
        with contextlib.suppress(OSError):
            status, body = self.call("GET", "/replicas")
            if status == 200:
                return {replica["replica"]: replica["state"] for replica in body["replicas"]}
        return {}

    def wait_ready(self):
        """Wait until all three replicas are ready; return those of the pool decode."""
        harness.wait_for(lambda: [*self.states().values()] == ["ready"] * 3, 180, "all are ready")
        return sorted(name for name in self.states() if name.startswith("decode-"))


@pytest.fixture(scope="module")
def url(cluster, admin):
    """The endpoint of both applications, once both run."""
    port = supervisor.free_port()
    ROLES["args"]["admin"] = admin.section
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


# --- the admin server ----------------------------------------------------------------------------


def actor(cluster, deployment):
    """Process id of a replica of the application with roles."""
    [found] = cluster.applications()["roles"]["deployments"][deployment]["replicas"]
    return found["pid"]


def audited(cluster):
    """The audit lines of all admin servers that have run."""
    lines = []
    for path in cluster.folder.glob("r/session_*/logs/serve/replica_roles_admin_*.log"):
        for line in path.read_text().splitlines():
            _, found, text = line.partition("admin call ")
            lines += [json.loads(text)] if found else []
    return [(line["call"], line["tenant"], line["status"]) for line in lines]


def test_a_drained_replica_loses_no_token_of_any_stream(cluster, url, admin, streams):
    drained, kept = admin.wait_ready()
    num_before = streams().num_done
    assert admin.call("POST", f"/replicas/{drained}/drain", key="wrong")[0] == 401
    assert admin.call("POST", f"/replicas/{drained}/drain")[0] in {200, 202}
    harness.wait_for(lambda: admin.states()[drained] == "drained", 180, "it has no request")
    status, body = admin.call("POST", f"/replicas/{kept}/drain")
    assert (status, body["error"]["code"]) == (409, "conflict")
    harness.wait_for(lambda: streams().num_done > num_before + 16, 180, "streams go on")
    assert admin.states()[drained] == "drained"
    assert admin.call("POST", f"/replicas/{drained}/undrain")[0] == 200
    admin.wait_ready()
    assert streams().failures == []
    calls = audited(cluster)
    for order, tenant, status in [
        (f"{drained}/drain", "", {401}), (f"{drained}/drain", "ops", {200, 202}),
        (f"{kept}/drain", "ops", {409}), (f"{drained}/undrain", "ops", {200}),
    ]:  # fmt: skip
        call = f"POST /replicas/{order}"
        assert any(c == call and t == tenant and s in status for c, t, s in calls), (call, calls)


def test_requests_wait_while_all_engines_are_paused(url, admin):
    admin.wait_ready()
    assert admin.call("POST", "/pause?mode=keep") == (200, {"status": "paused"})
    assert admin.call("GET", "/is_paused")[1]["is_paused"]
    body = {**LONG, "max_tokens": 5}
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(harness.post_json(f"{url}/v1/completions", body, 180))
    )
    asking.start()

    def num_queued():
        _, view = harness.get_json(f"{operations_url(url)}/debug/slots")
        return view["num_queued"] + view["num_awaiting_admission"]

    harness.wait_for(num_queued, 50, "it waits")
    assert answers == []
    assert admin.call("POST", "/resume") == (200, {"status": "resumed"})
    asking.join()
    assert [status for status, _ in answers] == [200]
    assert not admin.call("GET", "/is_paused")[1]["is_paused"]


def test_a_role_is_changed_over_http_and_back(url, admin):
    changed, _ = admin.wait_ready()
    for role, counts in [
        ("prefill", {"prefill": 2, "decode": 1}), ("decode", {"prefill": 1, "decode": 2})
    ]:  # fmt: skip
        status, _ = admin.call("POST", f"/replicas/{changed}/role", {"role": role})
        assert status in {200, 202}
        assert wait_roles(url, counts)[changed] == role
        admin.wait_ready()


def test_the_death_of_the_admin_server_leaves_streams_alone_and_it_returns(
    cluster, url, admin, streams
):
    admin.wait_ready()
    dead, num_before = actor(cluster, "admin"), streams().num_done
    os.kill(dead, signal.SIGKILL)
    harness.wait_for(lambda: streams().num_done > num_before + 16, 180, "streams go on")
    admin.wait_ready()
    assert actor(cluster, "admin") != dead
    assert streams().failures == []


def test_a_frozen_replica_ends_calls_in_an_error_that_names_it(cluster, url, admin):
    admin.wait_ready()
    [frozen] = [name for name in admin.states() if name.startswith("prefill-")]
    process_id = actor(cluster, "prefill")
    os.kill(process_id, signal.SIGSTOP)
    try:
        status, body = admin.call("POST", f"/replicas/{frozen}/role", {"role": "decode"})
    finally:
        os.kill(process_id, signal.SIGCONT)
    assert (status, body["error"]["code"]) == (503, "replica_unresponsive"), body
    assert frozen in body["error"]["message"]
    admin.wait_ready()


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
