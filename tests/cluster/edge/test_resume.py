"""Resumed streams: event ids, and every token exactly once."""

import json
import re

import pytest

from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import call

PROMPT = "héllo 你好, wörld"
BODY = {"prompt": PROMPT, "stream": True, "max_tokens": 60}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
ID = re.compile(r"id: (\S+)\n")


def stream(path, body, last_event_id=None, service=None):
    """The blocks of a stream, each as (id or None, data)."""
    headers = [] if last_event_id is None else [("last-event-id", last_event_id)]
    client = call(service or FakeBackend(), "POST", path, body, headers=headers)
    if client.status != 200:
        return client.body
    blocks = b"".join(client.chunks).decode().split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        match = ID.match(block)
        data = block[match.end() :] if match else block
        assert data.startswith("data: ")
        found.append((match and match[1], data[6:]))
    return found


def text(blocks):
    pieces = []
    for _, data in blocks:
        if data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content")
                pieces.append(piece or "")
    return "".join(pieces)


def test_events_have_ids_only_on_request():
    assert {id_ for id_, _ in stream("/v1/completions", BODY)} == {None}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_resumes_after_any_event_without_gaps_or_repeats(path, body, usage, logprobs):
    if logprobs:
        own = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True}
        body = {**body, **own}
    if usage:
        body = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    whole = stream(path, body, "0")
    ids = [id_ for id_, _ in whole if id_ is not None]
    assert len(set(ids)) == len(ids) > 5
    assert ids[-1].endswith(".end")
    for count, (id_, _) in enumerate(whole, start=1):
        if id_ is None:
            continue
        rest = stream(path, body, id_)
        assert [i for i, _ in rest] == [i for i, _ in whole[count:]]
        assert text(whole[:count]) + text(rest) == text(whole)
        assert rest[-1][1] == "[DONE]"

        def without_time(blocks):
            bodies = [data if data == "[DONE]" else json.loads(data) for _, data in blocks]
            kept = {"choices", "usage", "object", "model"}
            return [b if b == "[DONE]" else {k: b[k] for k in b.keys() & kept} for b in bodies]

        assert without_time(rest) == without_time(whole[count:])


def test_the_seed_that_a_request_was_given_comes_back_with_its_id():
    service = FakeBackend()
    ids = [id_ for id_, _ in stream("/v1/completions", BODY, "0", service)]
    stream("/v1/completions", BODY, ids[2], service)
    stream("/v1/completions", {**BODY, "seed": -5}, ids[2], service)
    first, second, third = (request.sampling.seed for request in service.requests)
    assert first == second == third
    [*_, (id_, _), _] = stream("/v1/completions", {**BODY, "seed": -5}, "0", service)
    stream("/v1/completions", {**BODY, "seed": -5}, id_, service)
    assert [request.sampling.seed for request in service.requests[-2:]] == [-5, -5]


@pytest.mark.parametrize("end", ["", ".end"])
def test_a_rerun_with_other_tokens_fails_without_events(end):
    """As where bfloat16 rounds a near tie otherwise."""
    ids = [id_ for id_, _ in stream("/v1/completions", BODY, "0")]
    head, checksum = ids[3].rsplit("-", 1)
    other = f"{head}-{int(checksum, 16) ^ 1:08x}{end}"
    answer = stream("/v1/completions", BODY, other)
    assert answer["error"]["code"] == "tokens_differ"
    assert answer["error"]["param"] == "last-event-id"


def test_a_shorter_rerun_is_a_different_answer():
    [*_, id_, _, _] = [id_ for id_, _ in stream("/v1/completions", BODY, "0")]
    head, num_tokens, checksum = id_.rsplit("-", 2)
    more = f"{head}-{int(num_tokens) + 10}-{checksum}"
    assert stream("/v1/completions", BODY, more)["error"]["code"] == "tokens_differ"


@pytest.mark.parametrize("place", ["0-deadbeef", "0-00000000", "0-00000000.end", "61-00000000"])
def test_an_id_of_an_impossible_position_is_refused(place):
    service = FakeBackend()
    first, *_ = [id_ for id_, _ in stream("/v1/completions", BODY, "0", service)]
    digest, seed, *_ = first.split("-")
    answer = stream("/v1/completions", BODY, f"{digest}-{seed}-{place}", service)
    assert answer["error"]["code"] == "bad_request"
    assert answer["error"]["param"] == "last-event-id"
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("change", "given", "wrong"),
    [
        ({}, "nonsense", "'nonsense' is not an event id"),
        ({"prompt": "another"}, None, "last-event-id is of another request"),
        ({"temperature": 0.5}, None, "last-event-id is of another request"),
        ({"max_tokens": 7}, None, "last-event-id is of another request"),
    ],
)
def test_an_id_is_good_for_its_own_request_alone(change, given, wrong):
    first, *_ = stream("/v1/completions", BODY, "0")
    answer = stream("/v1/completions", {**BODY, **change}, given or first[0])
    assert answer["error"]["code"] == "bad_request"
    assert answer["error"]["param"] == "last-event-id"
    assert wrong in answer["error"]["message"]
