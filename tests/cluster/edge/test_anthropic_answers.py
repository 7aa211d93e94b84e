"""Answers of /v1/messages: blocks, events, ends, counts and errors."""

import itertools
import json
import re

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import errors
from cluster.edge.anthropic.answers import MessageWriter, error_body, whole_message
from cluster.edge.anthropic.blocks import block_id, model_call_id
from cluster.edge.families.formats import OutputContext
from cluster.edge.families.message import Tool
from cluster.edge.families.parser import OutputParser
from cluster.edge.families.table import REASONING_FORMATS, TOOL_FORMATS
from cluster.edge.openai import ResponseSpec, Usage
from replicas.output_processor import OutputDelta

USAGE = Usage(11, 5, 4)
TOOLS = {name: Tool(name, {"type": "object"}) for name in ("weather", "time")}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def spec(*, tools="hermes", reasoning="qwen3", prompt_end="<think>\n", **fields):
    def new_parser():
        context = OutputContext(TOOLS, prompt_end)
        own = REASONING_FORMATS[reasoning] if reasoning else None
        return OutputParser(TOOL_FORMATS[tools] if tools else None, own, context)

    if tools or reasoning:
        fields["new_parser"] = new_parser
    return ResponseSpec("id", 17, "demo", **fields)


def deltas(*texts, reason="stop", stop_reason=None):
    begin = [OutputDelta(0, text, [7]) for text in texts]
    return [*begin, OutputDelta(0, "", [], reason, stop_reason)]


def events_of(raw):
    """The data of a stream's events, whose names must be their types."""
    events = []
    for each in raw.decode().split("\n\n")[:-1]:
        name, data = re.fullmatch("event: (.*)\ndata: (.*)", each).groups()
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def streamed(own, *given_deltas):
    writer = MessageWriter(11, own)
    begin = b"".join(writer.add(delta) for delta in given_deltas)
    return events_of(begin + writer.finish(USAGE))


def without_ids(blocks):
    ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    assert all(re.fullmatch("toolu_[0-9a-f]{24}", own) for own in ids)
    assert len(set(ids)) == len(ids)
    return blocks


def whole(own, *given_deltas):
    body = whole_message(own, list(given_deltas), USAGE)
    return json.loads(orjson.dumps(body))


def assembled(events):
    """The message that a client makes of events, whose order is checked."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    blocks = "(content_block_start( content_block_delta)+ content_block_stop )*"
    assert re.fullmatch(f"message_start {blocks}message_delta message_stop", " ".join(kinds))
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                assert all(delta.values()), "an empty delta"
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop" if arguments:
                message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message.update(event["delta"])
                message["usage"].update(event["usage"])
    return message


def test_the_events_of_an_answer_with_every_kind_of_block():
    texts = ("Hm", ".\n</think>\n\nSo", ",\n", WEATHER, "\n", TIME)
    events = streamed(spec(), *deltas(*texts))
    for event in events:
        without_ids([event.get("content_block", {"type": ""})])
    signature = events[5]["delta"].pop("signature")
    assert re.fullmatch("[0-9a-f]{32}", signature)
    end = {"stop_sequence": None, "stop_details": None, "container": None}
    counts = {
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "server_tool_use": None,
    }  # fmt: skip
    only_whole = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    use = {"type": "tool_use", "caller": {"type": "direct"}, "input": {}}

    def start(index, block):
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index, kind, **fields):
        fields = {"type": f"{kind}_delta", **fields}
        return {"type": "content_block_delta", "index": index, "delta": fields}

    def stop(index):
        return {"type": "content_block_stop", "index": index}

    assert events == [
        {"type": "message_start", "message": {
            "id": "msg_id", "type": "message", "role": "assistant", "model": "demo",
            "content": [], "stop_reason": None, **end,
            "usage": {"input_tokens": 11, "output_tokens": 0, **counts, **only_whole,
                      "output_tokens_details": {"thinking_tokens": 0}},
        }},
        {"type": "ping"},
        start(0, thinking), delta(0, "thinking", thinking="Hm"),
        delta(0, "thinking", thinking="."), delta(0, "signature"), stop(0),
        start(1, {"type": "text", "text": "", "citations": None}),
        delta(1, "text", text="So"), delta(1, "text", text=","), stop(1),
        start(2, {**use, "name": "weather"}),
        delta(2, "input_json", partial_json='{"city": "Bern"}'), stop(2),
        start(3, {**use, "name": "time"}), delta(3, "input_json", partial_json="{}"), stop(3),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", **end},
         "usage": {"input_tokens": 11, "output_tokens": 5, **counts,
                   "output_tokens_details": {"thinking_tokens": 1}}},
        {"type": "message_stop"},
    ]  # fmt: skip


PIECES = ["Hm.", "</think>", "\n\n", "So ", "<tool_", WEATHER, TIME, "é你", "<think>"]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    reasoning=st.sampled_from([None, "qwen3"]),
    tools=st.sampled_from([None, "hermes"]),
    is_shown=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    data=st.data(),
)
def test_any_division_of_an_answer_gives_the_blocks_of_the_whole(
    pieces, reasoning, tools, is_shown, reason, data
):
    text = "".join(pieces)
    own = spec(tools=tools, reasoning=reasoning, include_reasoning=is_shown)
    expected = whole(own, *deltas(text, reason=reason))
    without_ids(expected["content"])
    # Counts of reasoning are exact for deltas of one token alone.
    del expected["usage"]["output_tokens_details"]
    cuts = [0, *data.draw(st.lists(st.integers(0, len(text)), max_size=9).map(sorted)), len(text)]
    divisions = [text, [text[a:b] for a, b in itertools.pairwise(cuts)]]
    for division in divisions:
        given_deltas = deltas(*division, reason=reason)
        for message in (whole(own, *given_deltas), assembled(streamed(own, *given_deltas))):
            without_ids(message["content"])
            del message["usage"]["output_tokens_details"]
            assert message == expected
    thoughts = [block for block in expected["content"] if block["type"] == "thinking"]
    assert not thoughts or (is_shown and reasoning)


ENDS = [
    ("Hm.</think>So", "stop", None, "end_turn", None),
    ("Hm.</think>So", "stop", 13, "end_turn", None),
    ("Hm.</think>So", "stop", "X", "stop_sequence", "X"),
    ("Hm.</think>So", "length", None, "max_tokens", None),
    (f"</think>{WEATHER}", "stop", None, "tool_use", None),
    (f"</think>{WEATHER}", "stop", "X", "tool_use", None),
    (f"</think>{WEATHER}", "length", None, "max_tokens", None),
    ("", "stop", None, "end_turn", None),
]


@pytest.mark.parametrize(("text", "reason", "stop_reason", "expected", "sequence"), ENDS)
def test_the_reason_of_the_end(text, reason, stop_reason, expected, sequence):
    given_deltas = deltas(text, reason=reason, stop_reason=stop_reason)
    for message in (whole(spec(), *given_deltas), assembled(streamed(spec(), *given_deltas))):
        assert (message["stop_reason"], message["stop_sequence"]) == (expected, sequence)


MALFORMED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern]}\n</tool_call>'


@pytest.mark.parametrize(
    ("output", "reason", "stop_reason", "rest"),
    [
        (MALFORMED, "stop", "end_turn", [("text", MALFORMED)]),
        (MALFORMED[:-15], "length", "max_tokens", []),
    ],
)
def test_a_stream_ends_a_call_that_is_none_and_tells_its_text(output, reason, stop_reason, rest):
    events = streamed(spec(reasoning=None), *deltas(*output, reason=reason))
    starts = [event["content_block"] for event in events if "content_block" in event]
    assert [block["type"] for block in starts] == ["tool_use", *(kind for kind, _ in rest)]
    arguments = "".join(event.get("delta", {}).get("partial_json", "") for event in events)
    assert arguments.startswith('{"city": "Bern')
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    text = "".join(event.get("delta", {}).get("text", "") for event in events)
    message = whole(spec(reasoning=None), *deltas(output, reason=reason))
    assert [(block["type"], block["text"]) for block in message["content"]] == rest
    assert text == "".join(text for _, text in rest)
    assert events[-2]["delta"]["stop_reason"] == message["stop_reason"] == stop_reason


@pytest.mark.parametrize("last", [[], [OutputDelta(0, "", [])]])
def test_an_answer_without_end_is_an_error(last):
    with pytest.raises(errors.InternalError):
        whole(spec(), OutputDelta(0, "a", [1]), *last)
    with pytest.raises(errors.InternalError):
        streamed(spec(), OutputDelta(0, "a", [1]), *last)


def test_an_aborted_answer_is_an_error():
    with pytest.raises(errors.NotReadyError, match="send the request again"):
        whole(spec(), *deltas("a", reason="abort"))
    with pytest.raises(errors.NotReadyError):
        streamed(spec(), *deltas("a", reason="abort"))


def test_cached_tokens_are_not_input_tokens_if_clients_may_know_them():
    for message in (
        whole(spec(prompt_tokens_details=True), *deltas("a")),
        assembled(streamed(spec(prompt_tokens_details=True), *deltas("a"))),
    ):
        usage = message["usage"]
        names = ("input_tokens", "cache_read_input_tokens", "output_tokens")
        assert [usage[name] for name in names] == [7, 4, 5]


@pytest.mark.parametrize("own", ["functions.weather:0", "abcdefghi", "é你"])
def test_the_models_own_id_of_a_call_is_kept(own):
    given = block_id(own)
    assert re.fullmatch("toolu_[a-zA-Z0-9_-]+", given)
    assert model_call_id(given) == own


@pytest.mark.parametrize("given_id", ["toolu_01A", "call_1", "toolu_m_a", "toolu_m__w", "toolu_m_"])
def test_ids_of_other_servers_stay(given_id):
    assert model_call_id(given_id) == given_id


ERRORS = [
    (errors.BadRequestError("m"), "invalid_request_error"),
    (errors.NotFoundError("m"), "not_found_error"),
    (errors.MethodNotAllowedError("m"), "invalid_request_error"),
    (errors.PayloadTooLargeError(5), "request_too_large"),
    (errors.UnsupportedMediaTypeError("m"), "invalid_request_error"),
    (errors.QuotaError("m"), "rate_limit_error"),
    (errors.SaturatedError("m"), "overloaded_error"),
    (errors.OverloadedError("m"), "overloaded_error"),
    (errors.DeadlineError("m"), "timeout_error"),
    (errors.NotReadyError("m"), "overloaded_error"),
    (errors.ReplicaLostError("m"), "api_error"),
    (errors.InternalError("m"), "api_error"),
]


def test_threads_are_refused_so_that_clients_go_on_without_them():
    body = error_body(errors.ThreadsUnsupportedError(), "id")
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("error", "kind"), ERRORS)
def test_errors_have_types_by_what_a_client_can_do(error, kind):
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    assert error_body(error, "id") == {**body, "request_id": "id"}
    assert events_of(MessageWriter(11, spec()).fail(error)) == [error_body(error, "id")]
