"""What a death costs the server of `test_serving.py`: its decode engine, then its supervisor."""

import json
import os
import signal

import harness
import pytest
from tiny_server import GREEDY, LONG, MODEL, labels_of, wait_idle

pytestmark = pytest.mark.ray


def decode_engine(server):
    """Process id of the decode pool's engine: the child of its replica."""
    table = harness.process_table()
    (found,) = [
        process_id
        for process_id in server.footprint.look()
        if "replicas.engine" in table[process_id].command
        and ":decode" in table[table[process_id].parent_id].command
    ]
    return found


def test_killed_decode_engine_is_one_typed_error_and_comes_back(server, client):
    before = wait_idle(server)
    body = {"model": MODEL, "prompt": "fate", "max_tokens": LONG, "temperature": 0}
    events = harness.stream_events(
        server.url, "/v1/completions", {**body, "stream": True, "ignore_eos": True}, timeout_s=5
    )
    for _ in range(3):
        assert "error" not in json.loads(next(events))
    os.kill(decode_engine(server), signal.SIGKILL)
    # The socket's timeout is what "within 5 s" means; the stream ends by itself.
    rest = [*events]
    assert "[DONE]" not in rest
    errors = [json.loads(event)["error"] for event in rest if "error" in json.loads(event)]
    assert [error["type"] for error in errors] == ["ReplicaLostError"]
    assert "error" in json.loads(rest[-1])

    def is_back():
        return harness.get_json(f"{server.url}/health")[0] == 200

    harness.wait_for(is_back, 40, "healthy again")
    answer = client.completions.create(model=MODEL, prompt="again", **GREEDY)
    assert answer.usage.completion_tokens == 12
    after = wait_idle(server)
    replicas = [
        {replica for pool, replica in labels_of(s, "ttserve_slots", "pool", "replica") if pool == p}
        for p in ("prefill", "decode")
        for s in (before, after)
    ]
    assert replicas[0] == replicas[1], "the prefill replica is the same"
    assert len(replicas[3]) == 1
    assert replicas[2] != replicas[3], "the decode replica is a new one"


def test_killed_supervisor_takes_its_cluster_along(server):
    server.footprint.look()
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait_gone(20)
