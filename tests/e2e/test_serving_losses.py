"""Effects of deaths on the server of `test_serving.py`: a decode engine, all, its supervisor."""

import contextlib
import functools
import http.client
import itertools
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import harness
import pytest
from tiny_server import MODEL, labels_of, total, wait_idle, wait_whole

from replicas.dealer import SILENCE_S

pytestmark = pytest.mark.ray

NUM_STREAMS, NUM_TOKENS = 32, 600
SEEDED = {"temperature": 0.9, "top_p": 0.95}


def decode_engines(server):
    """Process ids of the decode pool's engines: the children of its replicas."""
    table = harness.process_table()
    return [
        process_id
        for process_id in server.footprint.look()
        if "replicas.engine" in table[process_id].command
        and ":decode" in table[table[process_id].parent_id].command
    ]


def cpu_ticks(process_id):
    """Return a process's CPU time since its start."""
    with open(f"/proc/{process_id}/stat", encoding="ascii") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


class Stream(threading.Thread):
    """One streamed answer, read to its end.

    Attributes:
        token_ids: The received tokens.
        times_s: When each event with tokens came.
        usage: The usage that ends the stream.
        error: The error that ended it early.
    """

    def __init__(self, server, number):
        super().__init__()
        draws = SEEDED | {"seed": 40 + number} if number % 2 else {"temperature": 0}
        self._url = server.url
        self._body = {
            "model": MODEL, "prompt": [2 + (number + 7 * i) % 250 for i in range(20 + number)],
            "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **draws,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.token_ids, self.times_s, self.usage, self.error = [], [], None, "it broke off"
        self.start()

    def run(self):
        for event in harness.stream_events(self._url, "/v1/completions", self._body):
            if event == "[DONE]":
                self.error = None
                return
            chunk = json.loads(event)
            if "error" in chunk:
                self.error = chunk["error"]
                return
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self.token_ids += choice["token_ids"]
                self.times_s.append(time.monotonic())

    @property
    def longest_gap_s(self):
        """The longest wait for a next token."""
        return max(later - earlier for earlier, later in itertools.pairwise(self.times_s))


def read_all(streams):
    """Return the tokens of all streams; none may have failed, or have counted a token twice."""
    for stream in streams:
        stream.join()
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert {stream.usage["completion_tokens"] for stream in streams} == {NUM_TOKENS}
    return [stream.token_ids for stream in streams]


def test_streams_of_a_killed_decode_engine_go_on_with_the_tokens_of_an_undisturbed_run(server):
    wait_whole(server)
    expected = read_all([Stream(server, number) for number in range(NUM_STREAMS)])
    assert {len(token_ids) for token_ids in expected} == {NUM_TOKENS}
    migrations = functools.partial(total, name="ttserve_router_migrations_total", reason="lost")
    num_migrated, num_before = 0, migrations(wait_idle(server))
    # An engine may have finished streams of which the clients have read only a few tokens.
    for _ in range(5):
        before = {process_id: cpu_ticks(process_id) for process_id in decode_engines(server)}
        streams = [Stream(server, number) for number in range(NUM_STREAMS)]
        harness.wait_for(lambda s=streams: sum(len(x.token_ids) > 2 for x in s) > 3, 180, "tokens")
        busiest = max(before, key=lambda process_id: cpu_ticks(process_id) - before[process_id])
        os.kill(busiest, signal.SIGKILL)
        assert read_all(streams) == expected
        num_migrated = migrations(wait_idle(server)) - num_before
        if num_migrated:
            break
        wait_whole(server)
    assert 0 < num_migrated <= NUM_STREAMS
    print(f"\n{num_migrated:.0f} of {NUM_STREAMS} streams migrated; the longest gap is "
          f"{max(stream.longest_gap_s for stream in streams):.2f} s")  # fmt: skip


def ingress(server):
    """Process id of the only ingress."""
    table = harness.process_table()
    [process_id] = [
        process_id
        for process_id in server.footprint.look()
        if re.match(r"ray::ServeReplica:[^:]*:ingress", table[process_id].command)
    ]
    return process_id


def test_a_client_of_a_killed_ingress_gets_every_token_once_from_the_next_one(server):
    """The client chose no seed: the ids of the events carry that of the first ingress."""
    wait_whole(server)
    body = {
        "model": MODEL, "prompt": "come back", "max_tokens": NUM_TOKENS, "ignore_eos": True,
        "stream": True, "return_token_ids": True, **SEEDED,
    }  # fmt: skip

    def token_ids(data):
        return [token for choice in json.loads(data)["choices"] for token in choice["token_ids"]]

    whole = [*harness.events_with_ids(server.url, "/v1/completions", body, "0")]
    *expected, (_, done) = whole
    assert done == "[DONE]"
    first_id, first = whole[0]
    got, last_id = token_ids(first), first_id
    events = harness.events_with_ids(server.url, "/v1/completions", body, last_id)
    with contextlib.suppress(OSError, http.client.HTTPException):
        for number, (event_id, data) in enumerate(events):
            last_id = event_id
            got += token_ids(data)
            if number == 5:
                os.kill(ingress(server), signal.SIGKILL)
    assert len(got) < NUM_TOKENS, "it was cut"
    deadline_s = time.monotonic() + 60
    while True:
        try:
            rest = [*harness.events_with_ids(server.url, "/v1/completions", body, last_id)]
            break
        except (AssertionError, OSError, http.client.HTTPException):
            assert time.monotonic() < deadline_s, "no ingress took over"
            time.sleep(0.1)
    for _, data in rest[:-1]:
        got += token_ids(data)
    assert got == [token for _, data in expected for token in token_ids(data)]
    assert (len(got), rest[-1][1]) == (NUM_TOKENS, "[DONE]")
    wait_idle(server)


def test_an_ingress_that_was_stopped_refuses_nobody_while_a_replica_says_nothing(server):
    wait_whole(server)
    engines = decode_engines(server)
    # Its engine keeps serving, but after a lost connection only the stopped actor has its address.
    silent = harness.process_table()[engines[0]].parent_id
    stopped = ingress(server)
    body = {"model": MODEL, "prompt": "wait", "max_tokens": 12, "ignore_eos": True}
    with ThreadPoolExecutor(8) as threads:
        try:
            os.kill(silent, signal.SIGSTOP)
            os.kill(stopped, signal.SIGSTOP)
            url = f"{server.url}/v1/completions"
            answers = [threads.submit(harness.post_json, url, body) for _ in range(8)]
            time.sleep(SILENCE_S + 1.5)
            os.kill(stopped, signal.SIGCONT)
            assert [answer.result()[0] for answer in answers] == [200] * len(answers)
        finally:
            for process_id in (stopped, silent):
                os.kill(process_id, signal.SIGCONT)
    wait_whole(server)
    assert set(decode_engines(server)) == set(engines)
    wait_idle(server)


def test_streams_wait_for_decode_engines_that_were_all_killed_and_go_on(server):
    wait_whole(server)
    expected = read_all([Stream(server, number) for number in range(NUM_STREAMS)])
    before = wait_idle(server)
    streams = [Stream(server, number) for number in range(NUM_STREAMS)]
    harness.wait_for(lambda: all(len(s.token_ids) > 2 for s in streams), 180, "all have tokens")
    for process_id in decode_engines(server):
        os.kill(process_id, signal.SIGKILL)
    assert read_all(streams) == expected

    wait_whole(server)
    status, answer = harness.post_json(
        f"{server.url}/v1/completions",
        {"model": MODEL, "prompt": "again", "max_tokens": 12, "temperature": 0, "ignore_eos": True},
    )
    assert (status, answer["usage"]["completion_tokens"]) == (200, 12)
    after = wait_idle(server)
    replicas = [
        {replica for pool, replica in labels_of(s, "ttserve_slots", "pool", "replica") if pool == p}
        for p in ("prefill", "decode")
        for s in (before, after)
    ]
    assert replicas[0] == replicas[1], "the prefill replica is the same"
    assert replicas[2].isdisjoint(replicas[3]), "the decode replicas are new ones"


def test_killed_supervisor_takes_its_cluster_along(server):
    server.footprint.look()
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait_gone(20)
