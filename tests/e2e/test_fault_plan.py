"""A simulated cluster whose decode replica is killed by a fault plan, again and again."""

import harness
import pytest
import yaml

from cluster.lifecycle import supervisor
from examples import server_client

pytestmark = pytest.mark.ray

BODY = {"model": "demo", "prompt": "Return the", "max_tokens": 8, "temperature": 0}
DEATH = "decode: the engine process ended with code -9"


@pytest.fixture
def server(tmp_path):
    """One prefill and two decode replicas; the same decode replica dies every 15 s."""
    port = supervisor.free_port()
    engine = {
        "block_size": 64,
        "max_model_len": 2048,
        "max_batch_size": 4,
        "num_blocks": 64,
        "simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150"},
    }
    args = {"model": "demo", "engine": engine, "pools": {"prefill": {}, "decode": {"replicas": 2}}}
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    config, plan = tmp_path / "serve.yaml", tmp_path / "faults.yaml"
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
    yield server
    server.close()


def complete(server):
    """Text of a completion."""
    status, answer = harness.post_json(f"{server.url}/v1/completions", BODY)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_requests_succeed_after_each_death_of_a_decode_replica(server):
    server.wait_ready(90)
    text = complete(server)
    arguments = ["--num-requests", "4", "--concurrency", "4", "--max-tokens", "4"]
    assert server_client.main(["--url", server.url, *arguments]) == 0
    for num_deaths in (1, 2):
        # The second one shows that a replica which is started again has its old rank.
        harness.wait_for(lambda n=num_deaths: server.log.count(DEATH) >= n, 90, "the replica dies")
        assert complete(server) == text
        assert server.process.poll() is None
