"""Outputs in columns give a client the same events as single outputs."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replicas.codec import decode_engine_frame, encode
from replicas.columns import ColumnReader
from replicas.engine.events import ClientEvents
from replicas.engine.sequence import Sequence
from replicas.messages import (
    Accepted,
    EngineFrame,
    EngineRequest,
    KVLoaded,
    TokenColumns,
    TokenLogprob,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams

A, B = b"a", b"b"


def sequence(number, client=A):
    request = EngineRequest(f"r{number}", [1], SamplingParams())
    seq = Sequence(request, "local", client, [1])
    seq.handle = number
    return seq


def accepted(seq):
    return Accepted(seq.request_id, 0, 0, 0, seq.handle)


def is_plain(output):
    """Return whether an output has only tokens."""
    has_more = output.finish_reason is not None or output.logprobs is not None or output.choice
    return bool(output.token_ids) and not has_more


def add_output(events, seq, output):
    """Add an output to events: as a row if possible, as an engine does from the second on."""
    if seq.is_told and is_plain(output):
        events.add_tokens(seq.client, seq.handle, output.token_ids)
    else:
        seq.is_told |= not output.choice
        events[seq.client].append(output)


def by_request(events):
    """Each request's events in order; of tokens and no more, those in a row as one."""
    result = {}
    for event in events:
        of_request = result.setdefault(event.request_id, [])
        last = of_request[-1] if of_request else None
        if all(type(e) is TokenOutput and is_plain(e) for e in (last, event)) and (
            last.index + len(last.token_ids) == event.index
        ):
            tokens = last.token_ids + event.token_ids
            of_request[-1] = msgspec.structs.replace(last, token_ids=tokens)
        else:
            of_request.append(event)
    return result


def told(num_requests):
    """Events after as many requests of one client have had their first tokens, and one more."""
    events, reader = ClientEvents(), ColumnReader()
    seqs = [sequence(i) for i in range(1, num_requests + 1)]
    for seq in seqs:
        events[A].append(accepted(seq))
        add_output(events, seq, TokenOutput(seq.request_id, 0, [7], num_cached_tokens=3))
    reader.read(events.take()[A])
    for seq in seqs:
        add_output(events, seq, TokenOutput(seq.request_id, 1, [9]))
    return seqs, events, reader


FIELDS = {
    "end": {"finish_reason": "length"},
    "logprobs": {"logprobs": [[TokenLogprob(1, -1.0, 1)]]},
    "choice": {"choice": 1},
}
CHANGES = st.sampled_from(["plain", "plain", "plain", "other", "abort", *FIELDS])


@given(st.lists(st.tuples(st.integers(1, 4), CHANGES, st.integers(1, 3)), max_size=60), st.data())
def test_a_reader_sees_what_was_added_in_each_requests_order_for_every_client(changes, data):
    events = ClientEvents()
    readers = {A: ColumnReader(), B: ColumnReader()}
    added = {A: [], B: []}
    seen = {A: [], B: []}
    live, next_handle = {}, 1

    def read():
        for client, found in events.take().items():
            raw = encode(EngineFrame("e", found))
            seen[client] += readers[client].read(decode_engine_frame(raw).events)

    for which, change, count in changes:
        if which not in live:
            seq = sequence(next_handle, A if which % 2 else B)
            live[which] = seq, data.draw(st.sampled_from([0, 5]))
            next_handle += 1
            events[seq.client].append(accepted(seq))
            added[seq.client].append(accepted(seq))
        seq, index = live[which]
        output = TokenOutput(seq.request_id, index, list(range(count)), num_cached_tokens=2)
        output = msgspec.structs.replace(output, **FIELDS.get(change, {}))
        if change == "abort":
            read()
            readers[seq.client].drop_request(seq.request_id)
            # It was on its way.
            for late in [output] * seq.is_told:
                add_output(events, seq, late)
        elif change == "other":
            events[seq.client].append(KVLoaded(seq.request_id, 0, None))
            added[seq.client].append(KVLoaded(seq.request_id, 0, None))
        else:
            add_output(events, seq, output)
            added[seq.client].append(output)
        live[which] = seq, index + count * (change not in {"choice", "other"})
        if change in {"end", "abort"}:
            del live[which]
        if data.draw(st.booleans()):
            read()
    read()
    assert {c: by_request(s) for c, s in seen.items()} == {
        c: by_request(a) for c, a in added.items()
    }
    assert {c: len(r) for c, r in readers.items()} == {
        c: sum(seq.client == c for seq, _ in live.values()) for c in readers
    }


def test_a_steady_step_is_one_event_of_two_numbers_for_each_request():
    _, events, reader = told(32)
    [columns] = events.take()[A]
    assert columns == TokenColumns(list(range(1, 33)), [9] * 32)
    assert [(o.request_id, o.index, o.token_ids) for o in reader.read([columns])][:2] == [
        ("r1", 1, [9]),
        ("r2", 1, [9]),
    ]
    assert len(encode(EngineFrame("e.1", [columns]))) < 110


def test_a_row_of_a_handle_that_is_gone_is_ignored():
    seqs, events, reader = told(2)
    reader.drop_request("r1")
    reader.drop_request("r1")
    assert [o.request_id for o in reader.read(events.take()[A])] == ["r2"]
    # The same id has another handle now, and late tokens of the first request are not taken for it.
    again = Accepted("r1", 0, 0, 0, 9)
    late = TokenColumns([seqs[0].handle, 9], [4, 5])
    assert reader.read([again, late]) == [again, TokenOutput("r1", 0, [5])]


def test_a_client_that_is_gone_is_owed_nothing():
    _, events, _ = told(1)
    events.pop(A)
    assert events.take() == {}


def test_frames_that_are_read_together_give_each_request_its_tokens_at_once():
    seqs, events, reader = told(2)
    [first] = events.take()[A]
    for seq in seqs:
        add_output(events, seq, TokenOutput(seq.request_id, 2, [4]))
    add_output(events, seqs[0], TokenOutput("r1", 3, [5], "length"))
    read = reader.read([first, *events.take()[A]])
    assert read == [
        TokenOutput("r1", 1, [9, 4], num_cached_tokens=3),
        TokenOutput("r2", 1, [9, 4], num_cached_tokens=3),
        TokenOutput("r1", 3, [5], "length"),
    ]
