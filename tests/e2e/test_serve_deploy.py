"""The stock Ray command line deploys a config file, with token authentication on."""

import signal
from pathlib import Path

import harness
import pytest
import yaml

from cluster.lifecycle import supervisor

pytestmark = pytest.mark.ray

DEMO = harness.REPOSITORY / "configs" / "demo.yaml"


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster that starts after a local server has run on the same machine."""
    port = supervisor.free_port()
    server = harness.LocalServer(["--port", str(port)], port)
    try:
        harness.wait_for(lambda: "Starting Ray Serve" in server.log, 60, "the local server starts")
        server.signal_group(signal.SIGINT)
        server.wait_gone()
    finally:
        server.close()
    cluster = harness.RayCluster()
    yield cluster
    cluster.close()


@pytest.mark.parametrize("words", [("serve",), ("ray", "serve")])
def test_deployed_config_serves_on_its_port_and_is_gone_after_shutdown(cluster, tmp_path, words):
    path, port = demo_on_free_port(tmp_path)
    assert "Sent deploy request successfully" in cluster.run(*words, "deploy", str(path))
    application = wait_for_end(cluster, words)
    assert application["status"] == "RUNNING", application
    assert {d["status"] for d in application["deployments"].values()} == {"HEALTHY"}
    url = f"http://127.0.0.1:{port}"
    harness.wait_for(lambda: harness.get_json(f"{url}/health")[0] == 200, 30, "healthy endpoint")
    body = {"model": "demo", "prompt": "Return the", "max_tokens": 8, "stream": True}
    assert [*harness.stream_events(url, "/v1/completions", body)][-1] == "[DONE]"
    cluster.run(*words, "shutdown", "-y")
    harness.wait_for(lambda: not cluster.applications(*words, "status"), 60, "no application")
    harness.wait_for(lambda: not harness.is_listening(port), 20, "the port is closed")


def test_wrong_args_fail_the_deployment_with_the_reason(cluster, tmp_path):
    deployed_s = 0.0
    for change, reason in (
        ({"poools": {}}, "poools"),
        ({"engine": {"block_size": "many"}}, "args.engine.block_size"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ):
        path, _ = demo_on_free_port(tmp_path, change)
        cluster.run("serve", "deploy", str(path))
        application = wait_for_end(cluster, ("serve",), deployed_s)
        assert application["status"] == "DEPLOY_FAILED", application
        assert reason in application["message"].splitlines()[-1]
        deployed_s = application["last_deployed_time_s"]
    cluster.run("serve", "shutdown", "-y")
    harness.wait_for(lambda: not cluster.applications(), 60, "no application")


def test_cluster_ends_by_its_process_id_and_leaves_nothing(cluster):
    cluster.stop()


def demo_on_free_port(folder: Path, change: dict[str, object] | None = None) -> tuple[Path, int]:
    """A copy of the demo config on a port of its own, its args changed."""
    file = yaml.safe_load(DEMO.read_text())
    port = supervisor.free_port()
    file["http_options"]["port"] = port
    file["applications"][0]["args"].update(change or {})
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    return path, port


def wait_for_end(
    cluster: harness.RayCluster, words: tuple[str, ...], after_s: float = 0.0
) -> dict[str, object]:
    """Poll until the application of a deploy later than `after_s` runs or has failed."""

    def ended() -> dict[str, object] | None:
        application = cluster.applications(*words, "status").get("ttserve")
        if not application or application["last_deployed_time_s"] <= after_s:
            return None
        return application if application["status"] in {"RUNNING", "DEPLOY_FAILED"} else None

    return harness.wait_for(ended, 120, "RUNNING or DEPLOY_FAILED")
