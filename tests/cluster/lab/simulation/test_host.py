"""One engine process in virtual time: turns, sleep, and what a freeze or an end does to them."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from cluster.lab.simulation.client import NOTICE_S, VirtualClient
from cluster.lab.simulation.host import VirtualHost
from cluster.lab.simulation.loop import VirtualLoop
from cluster.lab.simulation.network import Network, NetworkConfig
from cluster.lab.simulation.simulated_replicas import KEYS
from replicas.engine_process.server import SNAPSHOT_S
from replicas.errors import EngineDeadError
from replicas.faults import FaultPlan
from replicas.messages import (
    Abort,
    Accepted,
    AddRequest,
    EngineRequest,
    Refused,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from replicas.simulation.virtual_engine import VirtualDevice
from tests.cluster.lab.simulation.clusters import (
    LATENCY_S,
    decode_turn_s,
    fault,
    pool,
    prefill_turn_s,
)

START_S = 1.0
"""Requests of these tests come at this time; the first snapshot is there long before."""


class Bench:
    """A host, a client that is connected to it, and what the client has heard."""

    def __init__(self, spec=None, *, run_ahead=False, faults=(), role="both"):
        spec = spec or pool(role)
        self.loop = VirtualLoop()
        rng = np.random.Generator(np.random.Philox(0))
        self.network = Network(self.loop, NetworkConfig(latency_s=LATENCY_S), rng)
        plan = FaultPlan.parse(list(faults)).for_target("both/0")
        device = VirtualDevice(
            timing=spec.timing, facts=spec.facts, faults=plan, models_kv=True, run_ahead=run_ahead
        )
        self.host = VirtualHost(
            name="both/0", role="both", incarnation="both-0.1",
            config=msgspec.structs.replace(spec.engine, keys=KEYS),
            device=device, faults=plan, network=self.network,
        )  # fmt: skip
        self.network.attach(self.host)
        self.heard = []
        self.snapshots = []
        self.dead = []
        self.moves = []
        self.client = self.new_client("ingress")

    def new_client(self, name):
        client = VirtualClient(
            name,
            self.network,
            {self.host.incarnation: self.host},
            self,
            on_snapshot=lambda _, snapshot: self.snapshots.append(
                (self.loop.time(), name, snapshot)
            ),
            on_dead=lambda *told: self.dead.append((self.loop.time(), *told)),
            on_moves=lambda *told: self.moves.append((self.loop.time(), *told)),
            on_kv_events=lambda *_: False,
        )
        self.connect(client)
        return client

    def connect(self, client):
        self.loop.create_task(client.connect(self.host.engine.description))

    # --- Observer

    def became_unresponsive(self, host):
        pass

    def snapshot_received(self, host, snapshot):
        pass

    def sent(self, host, message, *, is_stalled):
        pass

    def arrived(self, host, event):
        self.heard.append((self.loop.time(), event))

    # --- what tests do

    def at(self, when_s, callback, *args):
        self.loop.call_at(when_s, callback, *args)

    def request(self, when_s, request_id, num_prompt, num_output, client=None):
        params = SamplingParams(max_tokens=num_output, temperature=0.0, seed=0, ignore_eos=True)
        request = EngineRequest(request_id, list(range(20, 20 + num_prompt)), params)
        opens = (client or self.client).open_stream
        self.at(when_s, opens, "both-0.1", request_id, AddRequest(request))

    def run(self, until_s=10.0):
        self.loop.run(asyncio.sleep(until_s - self.loop.time()))

    def tokens(self, request_id):
        """(time, how many) of each output of a request."""
        return [
            (at_s, len(e.token_ids))
            for at_s, e in self.heard
            if isinstance(e, TokenOutput) and e.request_id == request_id
        ]


def test_a_client_is_greeted_with_a_snapshot():
    bench = Bench()
    bench.run(0.5)
    [(at_s, _, snapshot)] = bench.snapshots
    assert at_s == 2 * LATENCY_S
    assert (snapshot.groups[0].num_empty_slots, snapshot.groups[0].num_free_blocks) == (2, [32])


def test_an_idle_host_has_nothing_to_do():
    bench = Bench()
    bench.run(5.0)
    num_events = bench.loop.num_events
    bench.run(5000.0)
    assert bench.loop.num_events < num_events + 10
    assert (bench.host.core.num_turns, bench.host.core.busy_s) == (0, 0.0)


def test_a_run_of_steps_is_one_frame_with_the_times_of_its_steps():
    bench = Bench(run_ahead=True)
    bench.request(START_S, "r", 40, 6)
    bench.run()
    first_s = START_S + 2 * LATENCY_S + prefill_turn_s(40)
    last_s = first_s + sum(decode_turn_s(40 + i) for i in range(1, 6))
    assert bench.tokens("r")[0] == (first_s, 1)
    assert bench.tokens("r")[-1][0] == pytest.approx(last_s, abs=1e-12)
    assert len(bench.tokens("r")) < 5
    times_s = bench.client.token_times_s["r", 0]
    assert times_s[-1] == pytest.approx(last_s - LATENCY_S, abs=1e-12)
    assert len(times_s) == bench.tokens("r")[-1][1]
    assert bench.host.core.num_turns == 6


def test_a_second_message_does_not_lengthen_a_run_that_was_cut():
    bench = Bench(run_ahead=True)
    bench.request(START_S, "r", 40, 50)
    for i in range(5):
        bench.request(START_S + 0.25 + 0.0001 * i, f"s{i}", 16, 1)
    bench.run()
    assert bench.tokens("s0")[0][0] < START_S + 0.3
    assert [type(e) for _, e in bench.heard].count(Refused) == 4


def test_a_message_that_comes_just_as_a_step_ends_is_in_time_for_the_next():
    bench = Bench()
    bench.request(START_S, "r", 40, 1)
    bench.run(0.5)
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    message = AddRequest(EngineRequest("s", list(range(20, 36)), params))
    end_s = START_S + LATENCY_S + prefill_turn_s(40)
    bench.at(end_s, bench.host.receive, next(iter(bench.host.links)), message)
    bench.run()
    assert bench.tokens("s") == [(end_s + prefill_turn_s(16) + LATENCY_S, 1)]


def test_running_ahead_does_not_change_when_clients_learn_of_changes():
    """Of blocks that a run begins with, and of what a message did in the middle of one."""
    told = []
    for run_ahead in (True, False):
        bench = Bench(run_ahead=run_ahead)
        bench.new_client("other")
        bench.request(START_S, "r", 20, 120)
        bench.request(START_S + 0.1, "s", 31, 120)
        bench.at(START_S + 0.9, bench.client.send, "both-0.1", Abort(["s"]))
        bench.request(START_S + 1.0, "t", 7, 1)
        bench.run()
        told.append([(at_s, name, s.groups) for at_s, name, s in bench.snapshots])
    assert told[0] == told[1]
    assert len(told[0]) > 12


def test_clients_without_outputs_soon_learn_of_a_change():
    bench = Bench()
    other = bench.new_client("other")
    bench.run(0.5)
    assert bench.host.incarnation in other.incarnations
    bench.request(START_S, "r", 40, 100)
    bench.run(START_S + 1.0)
    told = [(at_s, s) for at_s, name, s in bench.snapshots if name == "other" and at_s > START_S]
    first_s, snapshot = told[0]
    assert snapshot.groups[0].num_empty_slots == 1
    assert first_s <= START_S + 2 * LATENCY_S + prefill_turn_s(40) + SNAPSHOT_S + decode_turn_s(41)


def test_a_frozen_host_does_nothing_until_it_thaws_and_then_everything_in_order():
    bench = Bench()
    bench.at(0.5, bench.host.freeze)
    bench.request(START_S, "r", 40, 1)
    bench.request(START_S + 0.25, "s", 16, 1)
    bench.at(4.0, bench.host.thaw)
    bench.run(3.5)
    assert bench.heard == []
    assert not bench.host.is_answering
    bench.run()
    assert bench.host.is_answering
    assert bench.tokens("r") == bench.tokens("s") == [(4.0 + LATENCY_S + prefill_turn_s(40, 16), 1)]
    assert [e.slot for _, e in bench.heard if isinstance(e, Accepted)] == [-1, -1]


def test_a_killed_host_sends_nothing():
    bench = Bench()
    bench.request(START_S, "r", 16, 100)
    bench.at(START_S + 0.5, bench.host.kill)
    bench.run()
    assert bench.host.stopped_s == START_S + 0.5
    assert not bench.host.is_alive
    # A frame that had left is on its way.
    assert bench.tokens("r")[-1][0] < START_S + 0.5 + LATENCY_S
    num_events = bench.loop.num_events
    bench.run(100.0)
    assert bench.loop.num_events < num_events + 10


def test_a_lost_client_is_dropped_with_its_requests():
    bench = Bench()
    bench.request(START_S, "r", 16, 400)
    bench.at(2.0, bench.client.lose, "both-0.1", "a test")
    bench.run(2.0 + NOTICE_S / 2)
    assert bench.dead == [(2.0, "both-0.1", "a test")]
    assert bench.host.engine.num_live == 1
    bench.run(2.0 + NOTICE_S + 0.125)
    assert bench.host.engine.num_live == 0
    assert bench.host.links == {}
    with pytest.raises(EngineDeadError, match="not connected"):
        bench.client.send("both-0.1", Abort(["r"]))
    bench.client.lose("both-0.1", "again")
    assert len(bench.dead) == 1


def test_a_client_that_comes_back_is_a_new_one():
    bench = Bench()
    bench.run(0.5)
    bench.client.lose("both-0.1", "a test")
    bench.connect(bench.client)
    bench.request(START_S, "r", 16, 2)
    bench.run()
    assert len(bench.tokens("r")) == 2
    assert len(bench.host.links) == 1


def test_seconds_of_work_and_of_taken_slots_are_counted():
    bench = Bench()
    bench.request(START_S, "r", 40, 3)
    bench.run()
    bench.host.finish()
    worked_s = prefill_turn_s(40) + decode_turn_s(41) + decode_turn_s(42)
    assert bench.host.core.busy_s == pytest.approx(worked_s, rel=1e-12)
    # From the frame that shows the slot as taken, to the one that shows it as free.
    assert bench.host.slot_busy_s == pytest.approx(worked_s - prefill_turn_s(40), rel=1e-12)


def test_a_host_that_is_cut_off_is_not_answering():
    bench = Bench(faults=[fault(1.0, "both/0", "partition", 2.0)])
    bench.run(0.5)
    assert bench.host.is_answering
    bench.run(1.5)
    assert (bench.host.is_answering, bench.host.is_alive) == (False, True)
    bench.run(3.0)
    assert bench.host.is_answering


def test_invariants_of_engine_and_transport_are_checked():
    bench = Bench(pool("decode"))
    bench.run(0.1)
    bench.host.check_invariants()
    scheduler = bench.host.engine._core._scheduler
    scheduler.table.queue.num_tokens += 1
    with pytest.raises(AssertionError):
        bench.host.check_invariants()


def test_an_unresponsive_engine_counts_as_stalled_until_its_next_heartbeat():
    bench = Bench()
    bench.at(1.0, bench.client.mark_unresponsive, "both-0.1")
    bench.at(2.0, bench.host.send_heartbeat)
    bench.run(3.0)
    assert bench.moves == [(1.0, "both-0.1", False), (2.0 + LATENCY_S, "both-0.1", True)]
