"""Frames reach the streams that they are for, and a lost engine reaches all of them."""

from __future__ import annotations

import asyncio
import itertools
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.errors import (
    EngineDeadError,
    EngineLeavingError,
    EngineQuietError,
    EngineStalledError,
)
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AddRequest,
    BlockStored,
    EngineDescription,
    EngineFrame,
    EngineRequest,
    EngineSnapshot,
    Hello,
    KVEventBatch,
    KVLoaded,
    Refused,
    TokenColumns,
    TokenOutput,
    UtilityResult,
)
from replicas.sampling_params import SamplingParams
from replicas.streams import StreamTable
from tests.kv_groups import one_kv_group

DESCRIPTION = EngineDescription(
    incarnation="e.1", public_key="", input_endpoint="", output_endpoint="", kv_endpoints=None,
    kv_layout_hash=None, kv_groups=one_kv_group(10, 1), model="none", max_model_len=9, vocab_size=9,
    eos_token_ids=[0], dp_groups=1, slots_per_group=1,
    max_num_batched_tokens=9, pid=0,
)  # fmt: skip
SNAPSHOT = EngineSnapshot(3, False, 0, 0, 0, [])


class Client:
    """A table of streams, its sent messages, and its reported snapshots."""

    def __init__(self):
        self.sent = []
        self.seen = []
        self.moves = []
        self.handles = itertools.count(100)
        self.table = StreamTable(
            DESCRIPTION,
            self.sent.append,
            lambda *a: self.seen.append(a),
            lambda *a: self.moves.append(a),
        )

    def ask(self, request_id, inbox=None):
        message = AddRequest(EngineRequest(request_id, [1], SamplingParams()))
        return self.table.open(request_id, message, inbox)

    def open(self, request_id, inbox=None):
        """One that the engine has taken; that it has is read."""
        stream = self.ask(request_id, inbox)
        self.table.hand_out([], [Accepted(request_id, 0, 0, 0, next(self.handles))])
        stream._inbox._queue.pop()
        return stream

    def take(self, *events, snapshot=None, stalled_s=0.0):
        frame = EngineFrame("e.1", list(events), snapshot, stalled_s)
        self.table.deliver([frame])


@pytest.fixture
def client():
    return Client()


def token(request_id, index=0):
    return TokenOutput(request_id, index, [7])


def get_now(stream):
    """The next event, which must be there."""
    return asyncio.run(asyncio.wait_for(stream.get(), 5.0))


def test_opening_sends_the_message_and_listens(client):
    stream = client.ask("r")
    assert [type(m) for m in client.sent] == [AddRequest]
    assert (stream.request_id, stream.incarnation, len(client.table)) == ("r", "e.1", 1)
    client.take(Accepted("r", 0, 0, 0, 1), token("r"))
    assert [type(get_now(stream)) for _ in range(2)] == [Accepted, TokenOutput]


def test_nothing_is_kept_of_a_message_that_could_not_be_sent():
    def refuse(_message):
        raise EngineDeadError("gone")

    table = StreamTable(DESCRIPTION, refuse, lambda *_: None, lambda *_: None)
    with pytest.raises(EngineDeadError):
        table.open("r", Abort([]), None)
    assert len(table) == 0


def test_a_request_is_open_once(client):
    client.open("r")
    with pytest.raises(AssertionError, match=r"r is open on e\.1"):
        client.open("r")
    assert len(client.sent) == 1


def test_events_go_to_their_requests_only(client):
    one, other = client.open("one"), client.open("other")
    client.take(token("other", 1), token("one", 2), token("unknown", 3), token("other", 4))
    assert get_now(one).index == 2
    assert [get_now(other).index for _ in range(2)] == [1, 4]


def test_streams_may_share_an_inbox_that_tells_them_apart(client):
    inbox = asyncio.Queue()
    one, other = client.open("one", inbox), client.open("other", inbox)
    client.take(token("other"), token("one"))
    assert [inbox.get_nowait()[0] for _ in range(2)] == [other, one]


def test_answers_that_come_together_are_each_its_own(client):
    client.ask("r").close(abort=True)
    stream = client.ask("r")
    client.take(
        Accepted("r", 0, 0, 0, 1), TokenColumns([1], [8]),
        Accepted("r", 0, 0, 0, 2), TokenColumns([2, 1], [9, 8]),
    )  # fmt: skip
    assert [get_now(stream), get_now(stream).token_ids] == [Accepted("r", 0, 0, 0, 2), [9]]
    assert stream._inbox.empty()
    assert len(client.table._columns) == 1


@given(st.lists(st.sampled_from(["ask", "close", "accept", "refuse", "rows"]), max_size=40))
def test_every_stream_gets_its_own_answer_and_nothing_is_kept(acts):
    """Compare with a list of requests, which an engine answers in order."""
    client = Client()
    asked, answered, stream, accepted = [], 0, None, {}
    for act in acts:
        wanted = []
        if act == "ask" and stream is None:
            stream = client.ask("r")
            asked.append(stream)
        elif act == "close" and stream is not None:
            stream.close(abort=True)
            stream = None
        elif act in ("accept", "refuse") and answered < len(asked):
            of = asked[answered]
            answered += 1
            answer = Refused("r", "draining", "")
            if act == "accept":
                answer = Accepted("r", 0, 0, 0, answered)
                accepted[answered] = of
            client.take(answer)
            wanted = [answer] * (of is stream)
        elif act == "rows" and answered in accepted:
            # Rows of closed streams are on their way until the engine has read the abort.
            client.take(KVLoaded("r", 0, None), TokenColumns(list(accepted), [5] * len(accepted)))
            if stream in accepted.values():
                wanted = [KVLoaded("r", 0, None), TokenOutput("r", ANY, [5])]
        assert [get_now(stream) for _ in wanted] == wanted
        assert all(each._inbox.empty() for each in asked)
        assert len(client.table._columns) <= (stream is not None)
    unanswered = sum(each is not stream for each in asked[answered:])
    assert sum(client.table._unanswered.values()) == unanswered


def test_a_snapshot_is_delivered_before_the_events_that_it_includes(client):
    order = []
    client.table._on_snapshot = lambda *a: order.append(a)
    stream = client.open("r")
    stream.put = order.append
    client.take(token("r"), snapshot=SNAPSHOT)
    assert order == [("e.1", SNAPSHOT), token("r")]
    client.take(token("r"))
    assert len(order) == 3


def test_closing_ends_listening_and_aborts_if_asked(client):
    stream, other = client.open("r"), client.open("s")
    stream.close(abort=True)
    assert client.sent[2:] == [Abort(["r"])]
    other.close(abort=False)
    assert len(client.sent) == 3
    client.take(token("r"), token("s"))
    assert stream._inbox.empty()
    assert len(client.table) == 0


def test_closing_twice_aborts_once(client):
    stream = client.open("r")
    for abort in (False, True):
        stream.close(abort=abort)
    assert len(client.sent) == 1
    again = client.open("r")
    for _ in range(2):
        again.close(abort=True)
    assert client.sent[2:] == [Abort(["r"])]


def test_one_choice_is_stopped_and_the_others_are_heard(client):
    stream = client.ask("r")
    client.take(Accepted("r", 0, 0, 0, 1, 2), TokenColumns([1, 2], [5, 6]))
    stream.stop_choice(0)
    assert client.sent[1:] == [Abort(["r"], "stop", [0])]
    client.take(TokenColumns([1, 2], [7, 8]))
    client.take(TokenOutput("r", 2, [9], "length", choice=1))
    heard = [get_now(stream) for _ in range(5)][1:]
    assert [(o.choice, o.token_ids) for o in heard] == [(0, [5]), (1, [6]), (1, [8]), (1, [9])]
    assert len(client.table._columns) == 0


def test_closing_says_what_the_request_counts_as(client):
    client.open("r").close(abort=True, reason="stop")
    assert client.sent[-1] == Abort(["r"], "stop")


def test_every_stream_ends_with_an_error_when_its_engine_is_lost(client):
    one, other = client.open("one"), client.open("other")
    client.take(token("one"))
    client.table.fail("it was unplugged")
    assert get_now(one) == token("one")
    for stream in (one, other):
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"e\.1 is gone: it was unplugged"):
                get_now(stream)
    assert len(client.table) == 0
    one.close(abort=True)
    assert len(client.sent) == 2, "nobody is there to be told"


def test_utility_results_go_to_their_calls(client):
    async def call():
        first, second = client.table.expect(1), client.table.expect(2)
        client.take(UtilityResult(2, "two"), UtilityResult(9, "nobody's"))
        assert (first.done(), (await second).result) == (False, "two")
        client.take(UtilityResult(2, "again"))
        client.table.drop_call(1)
        client.table.drop_call(1)
        client.take(UtilityResult(1, "late"))
        assert not first.done()
        client.table.fail("gone")
        assert not first.done(), "nobody waits for it"
        assert (await second).result == "two"

    asyncio.run(call())


def test_calls_hear_of_the_end_too(client):
    async def call():
        future = client.table.expect(1)
        client.table.fail("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await future

    asyncio.run(call())


def test_an_engine_that_stalls_tells_every_stream_and_once_that_it_does_not_move(client):
    inbox = asyncio.Queue()
    early = client.open("a", inbox)
    client.take(stalled_s=5.5)
    late = client.open("b", inbox)
    client.take(stalled_s=5.75)
    client.take()
    client.open("c", inbox)
    told = [inbox.get_nowait() for _ in range(inbox.qsize())]
    assert [stream for stream, _ in told] == [early, late]
    assert {type(event) for _, event in told} == {EngineStalledError}
    assert client.moves == [("e.1", False), ("e.1", True)]


def test_an_engine_that_has_changed_its_role_hands_over_no_more(client):
    client.open("a")
    for seq, hands_over in ((4, True), (5, False)):
        client.take(snapshot=EngineSnapshot(seq, hands_over, 0, 0, 0, [], hands_over=hands_over))
        assert (client.open(f"r{seq}").leaving is not None) == hands_over


def test_a_handover_is_announced_once_to_every_stream(client):
    inbox = asyncio.Queue()
    stream = client.open("a", inbox)
    for seq in (4, 5):
        client.take(snapshot=EngineSnapshot(seq, True, 0, 0, 0, [], hands_over=True))
    client.take(token("a"))
    told = [inbox.get_nowait() for _ in range(inbox.qsize())]
    assert [(s, type(event)) for s, event in told] == [
        (stream, EngineLeavingError),
        (stream, TokenOutput),
    ]
    assert isinstance(stream.away, EngineLeavingError)
    assert client.moves == []


def test_a_quiet_engine_is_announced_once_to_every_stream(client):
    inbox = asyncio.Queue()
    stream = client.open("a", inbox)
    for _ in range(2):
        client.table.mark_quiet()
        client.table.mark_quiet()
        assert inbox.get_nowait() == (stream, stream.quiet)
        assert isinstance(stream.quiet, EngineQuietError)
        client.take()
        client.take()
        assert stream.quiet is None
    assert inbox.empty()
    assert client.moves == [("e.1", False), ("e.1", True)] * 2


def test_a_client_with_a_single_engine_waits_out_its_stall(client):
    stream = client.open("r")
    client.take(stalled_s=5.5)
    client.take(token("r"))
    assert get_now(stream) == token("r")


def test_a_follower_of_prefix_caches_greets_again_to_get_a_listing():
    sent, told, needs = [], [], []

    def take(incarnation, batches):
        told.append((incarnation, [batch.seq for batch in batches]))
        return bool(needs)

    def nobody(*_):
        pass

    table = StreamTable(DESCRIPTION, sent.append, nobody, nobody, take)
    table.greet()
    batches = [KVEventBatch(4, 0, [BlockStored([7])]), KVEventBatch(9, 1, [])]
    table.deliver([EngineFrame("e.1"), EngineFrame("e.1", kv_events=batches)])
    assert told == [("e.1", [4, 9])]
    assert sent == [Hello(PROTOCOL_VERSION, follows_prefixes=True)]
    needs.append("a batch was missed")
    table.deliver([EngineFrame("e.1", kv_events=batches)])
    assert sent == [Hello(PROTOCOL_VERSION, follows_prefixes=True)] * 2


def test_a_client_that_follows_no_prefix_caches_declares_it(client):
    client.table.greet()
    client.table.deliver([EngineFrame("e.1", kv_events=[KVEventBatch(1, 0, [])])])
    assert client.sent == [Hello(PROTOCOL_VERSION, follows_prefixes=False)]
