"""The stock Ray command line deploys a config file, with token authentication on."""

import contextlib
import copy
import os
import re
import signal
import socket
from pathlib import Path

import harness
import pytest
import yaml

from cluster.lifecycle import supervisor
from tests.cluster.lifecycle.haproxy_world import as_nobody

pytestmark = pytest.mark.ray

DEMO = harness.REPOSITORY / "configs" / "demo.yaml"
SERVE, RAY_SERVE = ("serve",), ("ray", "serve")


@pytest.fixture(scope="module")
def cluster(interrupted_server):
    """A Ray cluster that starts after a local server has run on the same machine."""
    interrupted_server.wait_gone()
    cluster = harness.RayCluster()
    yield cluster
    cluster.close()


@pytest.mark.parametrize("words", [SERVE, pytest.param(RAY_SERVE, marks=pytest.mark.slow)])
def test_deployed_config_serves_and_is_gone_after_shutdown_and_wrong_ones_give_the_reason(
    cluster, tmp_path, words
):
    file, port = demo_on_free_port()
    reasons = add_wrong(file)
    assert "Sent deploy request successfully" in deploy(cluster, words, tmp_path, file)
    url = f"http://127.0.0.1:{port}"
    harness.wait_for(lambda: have_ended(cluster.applications()), 240, "RUNNING or DEPLOY_FAILED")
    applications = cluster.status(*words, "status")
    assert applications.keys() == {"ttserve", *reasons}
    application = applications.pop("ttserve")
    assert application["status"] == "RUNNING", application
    assert {d["status"] for d in application["deployments"].values()} == {"HEALTHY"}
    for name, wrong in applications.items():
        assert wrong["status"] == "DEPLOY_FAILED", wrong
        assert reasons[name] in wrong["message"].splitlines()[-1]
    harness.wait_for(lambda: is_healthy(url), 30, "healthy endpoint")
    body = {"model": "demo", "prompt": "Return the", "max_tokens": 8, "stream": True}
    assert [*harness.stream_events(url, "/v1/completions", body)][-1] == "[DONE]"
    check_private(cluster)
    cluster.run(*words, "shutdown", "-y")
    harness.wait_for(lambda: not cluster.applications(), 60, "no application")
    harness.wait_for(lambda: not harness.is_listening(port), 20, "the port is closed")


def test_cluster_ends_by_its_process_id_and_leaves_nothing(cluster):
    cluster.stop()


def test_haproxy_ends_with_a_cluster_that_is_killed(tmp_path):
    """Kill it as `ray stop --force` does, which itself would end every Ray of this host."""
    cluster = harness.RayCluster()
    try:
        # Serve starts HAProxy whether an application can run or not.
        file, port = demo_on_free_port()
        file["applications"][0]["args"]["model"] = "/no/such/model"
        deploy(cluster, SERVE, tmp_path, file)
        harness.wait_for(lambda: harness.is_listening(port), 60, "HAProxy listens")
        killed = [
            process_id
            for process_id in cluster.footprint.look()
            if re.search(r"/raylet/raylet |^ray::ProxyActor", _command(process_id))
        ]
        assert len(killed) == 2
        # The raylet first: it would end what an actor that has died has started.
        for process_id in sorted(killed):
            os.kill(process_id, signal.SIGKILL)
        harness.wait_for(lambda: not harness.is_listening(port), 20, "the port is closed")
    finally:
        cluster.close()


def _command(process_id: int) -> str:
    """Command line of a process; "" of one that has ended."""
    process = harness.process_table().get(process_id)
    return "" if process is None else process.command


def check_private(cluster: harness.RayCluster) -> None:
    """Another user of this host cannot reach HAProxy's admin socket."""
    folder = Path(cluster.environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
    [path] = folder.rglob("admin.sock")
    assert path.stat().st_mode & 0o777 == 0o600

    def attack() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))

    attack()
    if os.geteuid() == 0:
        assert as_nobody(attack) == "PermissionError"


def demo_on_free_port():
    """A copy of the demo config on a port of its own, and the port."""
    file = yaml.safe_load(DEMO.read_text())
    port = supervisor.free_port()
    file["http_options"]["port"] = port
    return file, port


def add_wrong(file):
    """Add applications that cannot start; returns the reason of each by its name."""
    [right] = file["applications"]
    reasons = {}
    for change, reason in (
        ({"poools": {}}, "poools"),
        ({"engine": {"block_size": "many"}}, "args.engine.block_size"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ):
        name = f"wrong-{len(reasons)}"
        wrong = copy.deepcopy(right) | {"name": name, "route_prefix": f"/{name}"}
        wrong["args"].update(change)
        file["applications"].append(wrong)
        reasons[name] = reason
    return reasons


def deploy(cluster: harness.RayCluster, words: tuple[str, ...], folder: Path, file: object) -> str:
    """Deploy a config; returns what the command printed."""
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    return cluster.run(*words, "deploy", str(path))


def is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError):
        return harness.get_json(f"{url}/health")[0] == 200
    return False


def have_ended(applications: dict[str, dict]) -> bool:
    """Return whether there are applications, and each runs or has failed."""
    statuses = {application["status"] for application in applications.values()}
    return bool(statuses) and statuses <= {"RUNNING", "DEPLOY_FAILED"}
