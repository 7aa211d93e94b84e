"""A simulated cluster whose decode replica is killed by a fault plan, again and again.

One server for the module; the last test ends it.
"""

import json
import signal

import harness
import pytest
import yaml

from cluster.lifecycle import supervisor
from examples import server_client

pytestmark = pytest.mark.ray

BODY = {"model": "demo", "prompt": "Return the", "max_tokens": 8, "temperature": 0}
DEATH = "decode: the engine process ended with code -9"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One prefill and two decode replicas; the same decode replica dies every 15 s."""
    folder = tmp_path_factory.mktemp("fault-plan")
    port = supervisor.free_port()
    engine = {
        "block_size": 64,
        "max_model_len": 2048,
        "max_batch_size": 4,
        "num_blocks": 64,
        "simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150"},
    }
    args = {
        "model": "demo",
        "engine": engine,
        "ingress": {"request_timeout_s": 8},
        "router": {"min_remote_prefill_tokens": 0},
        "pools": {"prefill": {}, "decode": {"replicas": 2}},
    }
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    config, plan = folder / "serve.yaml", folder / "faults.yaml"
    config.write_text(
        yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [application]})
    )
    plan.write_text(
        yaml.safe_dump(
            [{"at_s": at_s, "target": "decode/0", "kind": "kill"} for at_s in range(25, 240, 15)]
        )
    )
    server = harness.LocalServer(
        ["--config", str(config), "--faults", str(plan), "--port", str(port)], port
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def complete(server):
    """Text of a completion."""
    status, answer = harness.post_json(f"{server.url}/v1/completions", BODY)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def assert_requests_succeed_after_deaths(server, num_deaths):
    """Check that a request succeeds after each of the replica's next deaths."""
    text = complete(server)
    num_before = server.log.count(DEATH)
    for num_dead in range(num_before + 1, num_before + num_deaths + 1):
        harness.wait_for(lambda n=num_dead: server.log.count(DEATH) >= n, 180, "the replica dies")
        assert complete(server) == text
        assert server.process.poll() is None


def test_the_example_client_is_served(server):
    arguments = ["--num-requests", "4", "--concurrency", "4", "--max-tokens", "4"]
    assert server_client.main(["--url", server.url, *arguments]) == 0


def test_requests_succeed_after_the_death_of_a_decode_replica(server):
    assert_requests_succeed_after_deaths(server, 1)


def test_request_that_takes_too_long_ends_with_an_error_and_frees_its_slot(server):
    """The request's tokens would take a minute on any host."""
    body = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    *_, last = harness.stream_events(server.url, "/v1/completions", body)
    assert json.loads(last)["error"]["code"] == "request_timeout"
    harness.wait_for(lambda: num_running(server) == 0, 180, "no request runs")


def num_running(server):
    """Return the number of the engines' requests."""
    lines = harness.get_json(f"{server.operations_url}/metrics")[1].splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running{"))


@pytest.mark.slow
def test_a_replica_that_is_started_again_has_its_old_rank(server):
    """The same plan kills the replica a second time."""
    assert_requests_succeed_after_deaths(server, 2)


def test_second_interrupt_leaves_nothing_either(server):
    server.signal_group(signal.SIGINT)
    server.signal_group(signal.SIGINT)
    server.wait_gone(20)
