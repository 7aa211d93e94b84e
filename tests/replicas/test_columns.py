"""Outputs in columns give a client the same events as single outputs."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replicas.codec import decode_engine_frame, encode
from replicas.columns import ColumnReader
from replicas.engine.outputs import ClientEvents
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


def sequence(number, client=A, request_id=None):
    request = EngineRequest(request_id or f"r{number}", [1], SamplingParams())
    seq = Sequence(request, "local", client, [1])
    seq.handle = number
    return seq


def accepted(seq, num_choices=1):
    return Accepted(seq.request_id, 0, 0, 0, seq.handle, num_choices)


def is_plain(output):
    """Return whether an output has only tokens."""
    has_more = output.finish_reason is not None or output.logprobs is not None
    return bool(output.token_ids) and not has_more


def add_output(events, seq, output):
    """Add an output to events: as a row if possible, as an engine does from the second on."""
    if seq.has_sent_tokens and is_plain(output):
        events.add_tokens(seq.client, seq.handle, output.token_ids)
    else:
        seq.has_sent_tokens = True
        events[seq.client].append(output)


def by_choice(events):
    """Each choice's events in order; of tokens and no more, those in a row as one."""
    result = {}
    for event in events:
        of_choice = result.setdefault((event.request_id, getattr(event, "choice", None)), [])
        last = of_choice[-1] if of_choice else None
        if all(type(e) is TokenOutput and is_plain(e) for e in (last, event)) and (
            last.index + len(last.token_ids) == event.index
        ):
            tokens = last.token_ids + event.token_ids
            of_choice[-1] = msgspec.structs.replace(last, token_ids=tokens)
        else:
            of_choice.append(event)
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
}
CHANGES = st.sampled_from(["plain", "plain", "plain", "other", "abort", "stop", *FIELDS])


class Exchange:
    """An engine's events to two clients, what they should read, and what they have read."""

    def __init__(self):
        self.events = ClientEvents()
        self.readers = {A: ColumnReader(), B: ColumnReader()}
        self.added = {A: [], B: []}
        self.seen = {A: [], B: []}
        # Live requests: for each live choice its sequence and the next index.
        self.live = {}
        self.next_handle = 1

    def read(self):
        for client, found in self.events.take().items():
            raw = encode(EngineFrame("e", found))
            self.seen[client] += self.readers[client].read(decode_engine_frame(raw).events)

    def accept(self, which, num_choices, start):
        client, first = A if which % 2 else B, self.next_handle
        seqs = [sequence(first + i, client, f"r{first}") for i in range(num_choices)]
        self.live[which] = {choice: (seq, start) for choice, seq in enumerate(seqs)}
        self.next_handle += num_choices
        self.tell(client, accepted(seqs[0], num_choices))

    def tell(self, client, event):
        for place in (self.events, self.added):
            place[client].append(event)

    def drop(self, which, choice, *, is_whole):
        """Abort a request, or one choice of it; tokens of it are on their way."""
        seq, _ = self.live[which][choice]
        self.read()
        if is_whole:
            self.readers[seq.client].drop_request(seq.request_id)
            del self.live[which]
        else:
            self.readers[seq.client].drop_choice(seq.request_id, choice)
            self.end(which, choice)
        for late in [TokenOutput(seq.request_id, 0, [8], choice=choice)] * seq.has_sent_tokens:
            add_output(self.events, seq, late)

    def end(self, which, choice):
        del self.live[which][choice]
        if not self.live[which]:
            del self.live[which]

    def change(self, which, choice, change, count):
        seq, index = self.live[which][choice]
        output = TokenOutput(seq.request_id, index, list(range(count)), num_cached_tokens=2)
        output = msgspec.structs.replace(output, choice=choice, **FIELDS.get(change, {}))
        if change in {"abort", "stop"}:
            self.drop(which, choice, is_whole=change == "abort")
        elif change == "other":
            self.tell(seq.client, KVLoaded(seq.request_id, 0, None))
        else:
            add_output(self.events, seq, output)
            self.added[seq.client].append(output)
            self.live[which][choice] = seq, index + count
            if change == "end":
                self.end(which, choice)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 2), CHANGES, st.integers(1, 3)), max_size=60
    ),
    st.data(),
)
def test_a_reader_sees_what_was_added_in_each_choices_order_for_every_client(changes, data):
    exchange = Exchange()
    live = exchange.live
    for which, wanted, change, count in changes:
        if which not in live:
            exchange.accept(which, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 5])))
        choice = sorted(live[which])[wanted % len(live[which])]
        exchange.change(which, choice, change, count)
        if data.draw(st.booleans()):
            exchange.read()
    exchange.read()
    seen, added = exchange.seen, exchange.added
    assert {c: by_choice(s) for c, s in seen.items()} == {c: by_choice(a) for c, a in added.items()}
    rows = [seq.client for choices in live.values() for seq, _ in choices.values()]
    assert {c: len(r) for c, r in exchange.readers.items()} == {A: rows.count(A), B: rows.count(B)}


def test_one_choice_ends_and_the_other_keeps_its_rows():
    reader = ColumnReader()
    reader.read(
        [Accepted("r", 0, 0, 0, 4, 2), TokenOutput("r", 0, [7]), TokenOutput("r", 0, [8], choice=1)]
    )
    read = reader.read([TokenOutput("r", 1, [7], "stop"), TokenColumns([4, 5], [1, 9])])
    assert read == [TokenOutput("r", 1, [7], "stop"), TokenOutput("r", 1, [9], choice=1)]
    reader.drop_request("r")
    assert len(reader) == 0


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
