"""Frames to an engine's clients: their events at once, a change of the snapshot soon."""

from __future__ import annotations

import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.curve import server_public_key
from kv_transfer.keys import KeyRing
from replicas.columns import ColumnReader
from replicas.engine.core import EngineCore
from replicas.engine.role_state import RoleState
from replicas.engine_process.server import SNAPSHOT_S, EngineServer, describe
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AddRequest,
    EngineFrame,
    EngineRequest,
    EngineSnapshot,
    GroupSnapshot,
    Hello,
    NotGreeted,
    Refused,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.replicas.engine.virtual import CountingClock, OneWorker, virtual_worker
from tests.replicas.generators.simulated.engines import simulated_config

HELLO = Hello(PROTOCOL_VERSION)
A, B = b"a", b"b"
KEYS = KeyRing((b"a secret of sixteen bytes or more",))


class Core:
    """A core with scripted answers.

    Attributes:
        num_empty_slots: In its snapshots.
        num_free_blocks: In its snapshots.
        num_steps: In its snapshots.
        events: The next result of `take_events`.
        handled: Every message with its client and time.
        gone: Clients that were dropped.
    """

    def __init__(self):
        self.num_empty_slots = 4
        self.num_free_blocks = 9
        self.num_steps = 0
        self.events = {}
        self.handled = []
        self.gone = []
        self.deadline_s = None
        self.num_live = 0
        self.is_paused = False
        self.role_state = RoleState("both")

    def snapshot(self, seq):
        group = GroupSnapshot(self.num_empty_slots, [self.num_free_blocks], 0, 0, 0)
        is_closed = self.is_paused or self.role_state.is_draining
        return EngineSnapshot(seq, is_closed, 0, 0, self.num_steps, [group])

    def state(self):
        return (self.is_paused, self.role_state.is_draining, self.num_empty_slots), [
            [self.num_free_blocks]
        ]

    def handle(self, client, message, now_s):
        self.handled.append((client, message, now_s))

    def client_gone(self, client):
        self.gone.append(client)
        return 2

    def take_events(self):
        events, self.events = self.events, {}
        return events

    def next_deadline_s(self):
        return self.deadline_s


def served(*clients, now_s=0.0):
    """A server that has greeted these clients, and sent them their first frames."""
    core = Core()
    server = EngineServer(core, "e.1")
    for client in clients:
        server.take(client, HELLO, now_s)
    server.frames(now_s)
    return core, server


def sent(server, now_s):
    """(client, number of events, empty slots of the snapshot or None) of every frame."""
    return [
        (client, len(frame.events), frame.snapshot and frame.snapshot.groups[0].num_empty_slots)
        for client, frame in server.frames(now_s)
    ]


def token(request_id="r"):
    return TokenOutput(request_id, 0, [7])


def test_a_greeting_is_answered_with_the_snapshot():
    core = Core()
    server = EngineServer(core, "e.1")
    server.take(A, HELLO, 0.0)
    [(client, frame)] = server.frames(0.0)
    assert (client, frame.incarnation, frame.events) == (A, "e.1", [])
    assert frame.snapshot == core.snapshot(0)
    assert server.frames(0.0) == []


def test_a_client_that_greets_again_gets_the_snapshot_again():
    _, server = served(A)
    server.take(A, HELLO, 1.0)
    assert sent(server, 1.0) == [(A, 0, 4)]


def test_messages_of_a_greeted_client_reach_the_core():
    core, server = served(A)
    server.take(A, Abort(["r"]), 1.5)
    assert core.handled == [(A, Abort(["r"]), 1.5)]


def test_a_client_of_another_protocol_stays_a_stranger(caplog):
    core, server = served()
    with caplog.at_level(logging.ERROR):
        server.take(A, Hello(PROTOCOL_VERSION + 1), 0.0)
    assert f"protocol {PROTOCOL_VERSION + 1}" in caplog.text
    server.take(A, Abort(["r"]), 0.0)
    assert (core.handled, server.frames(0.0)) == ([], [(A, EngineFrame("e.1", [NotGreeted()]))])


def test_events_leave_at_once_with_the_snapshot_if_it_has_changed():
    core, server = served(A, now_s=1.0)
    core.events = {A: [token()]}
    assert sent(server, 1.0) == [(A, 1, None)]
    core.num_empty_slots = 3
    core.events = {A: [token(), token()]}
    assert sent(server, 1.0) == [(A, 2, 3)]
    core.events = {A: [token()]}
    assert sent(server, 1.0) == [(A, 1, None)], "this one has it already"


def test_who_has_no_events_gets_a_change_at_the_latest_after_the_interval():
    core, server = served(A, B, b"c", now_s=1.0)
    core.num_empty_slots = 3
    assert sent(server, 1.0) == [(A, 0, 3), (B, 0, 3), (b"c", 0, 3)], "nothing was sent just before"
    core.num_empty_slots = 2
    core.events = {B: [token()]}
    assert sent(server, 1.001) == [(B, 1, 2)]
    assert server.next_deadline_s() == 1.0 + SNAPSHOT_S
    core.num_empty_slots = 1
    assert sent(server, 1.002) == []
    assert sent(server, server.next_deadline_s()) == [(A, 0, 1), (B, 0, 1), (b"c", 0, 1)]
    assert server.next_deadline_s() is None


def test_a_step_that_changes_nothing_else_is_no_news():
    core, server = served(A)
    core.num_steps = 17
    assert sent(server, 5.0) == []
    assert server.next_deadline_s() is None


def test_free_blocks_alone_are_told_of_once_in_an_interval():
    core, server = served(A, now_s=1.0)
    snapshots = []
    for step in range(100):
        core.num_free_blocks = 1000 - step
        core.events = {A: [token()]}
        [(_, frame)] = server.frames(1.0 + step * SNAPSHOT_S / 10)
        snapshots += [frame.snapshot] if frame.snapshot else []
    assert 9 <= len(snapshots) <= 11
    core.num_empty_slots = 3
    core.events = {A: [token()]}
    [(_, frame)] = server.frames(1.0 + 99.5 * SNAPSHOT_S / 10)
    assert frame.snapshot == core.snapshot(frame.snapshot.seq), "a slot is told of at once"


CHANGES = st.lists(
    st.tuples(
        st.floats(0.0, 2 * SNAPSHOT_S),
        st.sampled_from(["num_free_blocks", "num_empty_slots", "num_steps"]),
        st.integers(0, 3),
        st.sets(st.sampled_from([A, B])),
    ),
    max_size=20,
)


@given(CHANGES)
def test_in_the_end_everybody_knows_what_is_so_within_the_interval(changes):
    core, server = served(A, B, now_s=1.0)
    told, now_s = dict.fromkeys((A, B), core.snapshot(0)), 1.0

    def hear():
        for client, frame in server.frames(now_s):
            told[client] = frame.snapshot or told[client]

    for later_s, name, value, speakers in changes:
        now_s += later_s
        setattr(core, name, value)
        core.events = {client: [token()] for client in speakers}
        hear()
    changed_s = now_s
    while (deadline_s := server.next_deadline_s()) is not None:
        assert now_s < deadline_s <= changed_s + SNAPSHOT_S
        now_s = deadline_s
        hear()
    for snapshot in told.values():
        assert snapshot.groups == core.snapshot(0).groups


def test_snapshots_are_numbered():
    core, server = served(A)
    numbers = []
    for now_s in range(1, 4):
        core.num_empty_slots -= 1
        numbers += [frame.snapshot.seq for _, frame in server.frames(float(now_s))]
        assert server.frames(now_s + 0.5) == []
    assert numbers == [1, 2, 3]


@given(st.floats(0.0, 1e6), st.floats(0.0, 0.02))
def test_a_deadline_is_one_to_the_bit(flushed_s, later_s):
    """A thread that wakes at the deadline must find it reached, or it never sleeps again."""
    core, server = served(A, B)
    core.num_empty_slots = 3
    server.frames(flushed_s + SNAPSHOT_S)
    core.num_empty_slots = 2
    now_s = flushed_s + SNAPSHOT_S + later_s
    if not server.frames(now_s):
        assert len(server.frames(server.next_deadline_s())) == 2
    assert server.next_deadline_s() is None


def test_the_earlier_deadline_counts():
    core, server = served(A, now_s=1.0)
    core.deadline_s = 2.0
    assert server.next_deadline_s() == 2.0
    core.num_empty_slots = 3
    server.frames(1.0)
    core.num_empty_slots = 2
    server.frames(1.001)
    assert server.next_deadline_s() == 1.0 + SNAPSHOT_S
    core.deadline_s = 1.0005
    assert server.next_deadline_s() == 1.0005


def test_a_client_that_is_gone_gets_nothing_and_is_a_stranger(caplog):
    core, server = served(A, B, now_s=1.0)
    core.num_empty_slots = 3
    assert len(sent(server, 1.0)) == 2
    core.num_empty_slots = 2
    assert sent(server, 1.001) == [], "both are behind"
    with caplog.at_level(logging.WARNING):
        server.client_gone(A)
    assert "dropped its 2 requests" in caplog.text
    assert core.gone == [A]
    assert sent(server, 2.0) == [(B, 0, 2)]
    server.take(A, Abort(["r"]), 2.0)
    assert core.handled == []
    server.take(A, HELLO, 2.0)
    assert sent(server, 2.0) == [(A, 0, 2)]


@given(st.permutations([b"a", b"b", b"c", b"d"]))
def test_frames_leave_in_the_order_in_which_clients_came(clients):
    core, server = served(*clients)
    core.num_empty_slots = 3
    assert [client for client, _ in server.frames(9.0)] == clients


def test_drained_means_told_to_drain_with_nothing_left_and_nothing_lent():
    core, server = served(A)
    assert not server.is_drained
    core.is_paused = True
    server.frames(1.0)
    assert not server.is_drained
    core.num_live = 1
    core.role_state.end()
    server.frames(1.0)
    assert not server.is_drained
    core.num_live = 0
    assert server.is_drained


def test_a_stranger_is_told_so_once_a_turn_and_is_no_client_for_it():
    core, server = served(A)
    for _ in range(3):
        server.take(B, Abort(["r"]), 1.0)
    server.take_unreadable(B, "r", "bad")
    assert server.frames(1.0) == [(B, EngineFrame("e.1", [NotGreeted()]))]
    core.num_empty_slots = 1
    assert [client for client, _ in server.frames(2.0)] == [A]
    assert core.handled == []


def test_a_client_that_goes_after_it_greeted_gets_no_frame_of_that_greeting():
    _, server = served()
    server.take(A, HELLO, 0.0)
    server.client_gone(A)
    assert server.frames(0.0) == []


def test_a_request_that_cannot_be_read_is_refused():
    _, server = served(A)
    server.take_unreadable(A, "r", "bad")
    [(client, frame)] = server.frames(0.0)
    assert (client, frame.events) == (A, [Refused("r", "invalid", "bad")])


# --- over a real core ---------------------------------------------------------------------------


@pytest.fixture
def core():
    config = simulated_config(tt_data_parallel=2, max_batch_size=4)
    return EngineCore(config, OneWorker(virtual_worker(config, CountingClock())), "e.1")


def test_a_request_from_greeting_to_end(core):
    server = EngineServer(core, "e.1")
    server.take(A, HELLO, 0.0)
    server.take(B, HELLO, 0.0)
    server.frames(0.0)
    params = SamplingParams(max_tokens=3, temperature=0.0, seed=0, ignore_eos=True)
    server.take(A, AddRequest(EngineRequest("r", [20, 21], params)), 1.0)
    heard, views, columns = [], [], ColumnReader()
    for step in range(5):
        core.step(1.0 + step)
        for client, frame in server.frames(1.0 + step):
            assert not frame.events or client == A
            heard += columns.read(frame.events)
            if client == B and frame.snapshot is not None:
                views.append(sum(g.num_empty_slots for g in frame.snapshot.groups))
    assert [type(e) for e in heard] == [Accepted, TokenOutput, TokenOutput, TokenOutput]
    assert heard[-1].finish_reason == "length"
    assert views == [3, 4]


def test_an_engine_describes_itself(core):
    core.config = msgspec.structs.replace(core.config, keys=KEYS)
    description = describe(core, "e.1", "tcp://in", "tcp://out", 42)
    facts = core.facts
    assert msgspec.structs.asdict(description) == {
        "incarnation": "e.1", "public_key": server_public_key(KEYS, "e.1"),
        "input_endpoint": "tcp://in", "output_endpoint": "tcp://out",
        "kv_endpoints": None, "kv_layout_hash": None, "kv_groups": facts.kv_groups,
        "model": core.config.model, "max_model_len": 128, "vocab_size": facts.vocab_size,
        "eos_token_ids": facts.eos_token_ids, "dp_groups": 2,
        "slots_per_group": 2, "max_num_batched_tokens": 2048, "pid": 42,
        "max_logprobs": 20, "scheduling_policy": "fcfs",
        "logprobs_mode": "raw_logprobs",
    }  # fmt: skip
    [kv_group] = description.kv_groups
    assert (kv_group.block_size, kv_group.num_blocks) == (32, 64)
    assert kv_group.layers == tuple(range(len(kv_group.layers)))
