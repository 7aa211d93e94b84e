"""The stock Ray command line deploys a config file, with token authentication on."""

import contextlib
import copy
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import harness
import openai
import pytest
import yaml

from cluster.lifecycle import supervisor
from tests.cluster.lifecycle.haproxy_world import as_nobody

pytestmark = pytest.mark.ray

DEMO = harness.REPOSITORY / "configs" / "demo.yaml"
SERVE, RAY_SERVE = ("serve",), ("ray", "serve")
DRAIN_S = 30
MEDIUM, LONG = 400, 2000
"""Tokens of an answer that takes some seconds, and of one that outlasts the drain of an ingress."""


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
    harness.wait_for(lambda: is_healthy(url), 180, "healthy endpoint")
    body = {"model": "demo", "prompt": "Return the", "max_tokens": 8, "stream": True}
    assert [*harness.stream_events(url, "/v1/completions", body)][-1] == "[DONE]"
    check_private(cluster)
    cluster.run(*words, "shutdown", "-y")
    harness.wait_for(lambda: not cluster.applications(), 180, "no application")
    harness.wait_for(lambda: not harness.is_listening(port), 180, "the port is closed")


@pytest.mark.timeout(600)
def test_an_updated_ingress_loses_no_response_and_its_streams_can_be_continued(cluster, tmp_path):
    """An update of the only ingress, under a stream and a response that outlast its drain."""
    port = supervisor.free_port()
    url = f"http://127.0.0.1:{port}"
    deploy(cluster, SERVE, tmp_path, slow_application(port))
    harness.wait_for(lambda: is_healthy(url), 180, "healthy endpoint")
    stored = respond(url, input="one", max_output_tokens=4)
    background = respond(url, input="two", background=True, max_output_tokens=MEDIUM)
    body = {"prompt": "three", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    events = harness.events_with_ids(url, "/v1/completions", body, "0", 120)
    received = [next(events)]
    followed = []
    following = threading.Thread(target=follow, args=(url, background["id"], followed), daemon=True)
    following.start()
    harness.wait_for(lambda: followed, 60, "events of the response in the background")
    deploy(cluster, SERVE, tmp_path, slow_application(port, prompt_tokens_details=True))
    received += events
    _, last = received.pop()
    error = json.loads(last)["error"]
    assert error["code"] == "ingress_leaving", last
    [continued_id] = re.findall(r"Last-Event-ID: (\S+)$", error["message"])
    assert continued_id == received[-1][0]
    harness.wait_for(lambda: is_healthy(url), 180, "healthy endpoint")
    rest = harness.events_with_ids(url, "/v1/completions", body, continued_id, 120)
    next_id, _ = next(rest)
    rest.close()
    assert int(next_id.split("-")[2]) > int(continued_id.split("-")[2])
    assert get_response(url, stored) == stored
    respond(url, input="four", previous_response_id=stored["id"], max_output_tokens=4)

    def ended():
        found = get_response(url, background)
        return found if found["status"] != "in_progress" else None

    found = harness.wait_for(ended, 180, "the response in the background ends")
    assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", MEDIUM)
    following.join(timeout=180)
    assert [event.sequence_number for event in followed] == [*range(len(followed))]
    assert followed[-1].response.to_dict() == found
    text = "".join(each.delta for each in followed if each.type == "response.output_text.delta")
    assert text == found["output"][0]["content"][0]["text"]
    cluster.run(*SERVE, "shutdown", "-y")
    harness.wait_for(lambda: not cluster.applications(), 180, "no application")


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
        harness.wait_for(lambda: harness.is_listening(port), 180, "HAProxy listens")
        killed = [
            process_id
            for process_id in cluster.footprint.look()
            if re.search(r"/raylet/raylet |^ray::ProxyActor", _command(process_id))
        ]
        assert len(killed) == 2
        # The raylet first: it would end what an actor that has died has started.
        for process_id in sorted(killed):
            os.kill(process_id, signal.SIGKILL)
        harness.wait_for(lambda: not harness.is_listening(port), 180, "the port is closed")
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


def slow_application(port, **ingress):
    """A file with one replica on a simulated mesh, whose ingress drains for some seconds."""
    args = {
        "model": "demo",
        "engine": {
            "block_size": 64,
            "max_model_len": 2048,
            "max_batch_size": 4,
            "num_blocks": 128,
            "simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150"},
        },
        "ingress": {"drain_timeout_s": DRAIN_S, **ingress},
        # Serve replaces the engine, too, as the arguments of the application change.
        "pools": {"both": {"drain_timeout_s": 60}},
    }
    application = {
        "name": "ttserve",
        "import_path": "cluster.app:build",
        # Else Serve keeps an ingress for 30 s, longer than this drain.
        "runtime_env": {"env_vars": {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2"}},
        "args": args,
    }
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}


def respond(url, **body):
    """Return the answer of a request to /v1/responses."""
    status, answer = harness.post_json(
        f"{url}/v1/responses", {"model": "demo", "temperature": 0, "ignore_eos": True, **body}
    )
    assert status == 200, answer
    return answer


def follow(url, response_id, followed):
    """Append the events of a response to `followed`; resume a stream that breaks."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    deadline_s = time.monotonic() + 170
    while not (followed and followed[-1].type == "response.incomplete"):
        assert time.monotonic() < deadline_s, followed[-1:]
        after = {"starting_after": followed[-1].sequence_number} if followed else {}
        # As the only ingress is replaced, there is none for a time.
        with contextlib.suppress(openai.APIError):
            for event in client.responses.retrieve(response_id, stream=True, **after):
                followed.append(event)
        time.sleep(0.2)


def get_response(url, response):
    """Return a response as it is now."""
    status, found = harness.get_json(f"{url}/v1/responses/{response['id']}")
    assert status == 200, found
    return found


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
