import json

import pytest

from cluster.edge.openai import ResponseSpec, Usage
from cluster.edge.openai_responses import ChatShape, ChunkWriter, CompletionShape, whole_body
from cluster.errors import InternalError
from replicas.messages import EngineRequest, TokenLogprob
from replicas.output_processor import OutputDelta
from replicas.sampling_params import SamplingParams
from tests.cluster.edge.fake_backend import likely, make_tokenizer

TOKENIZER = make_tokenizer()
COMPLETION, CHAT = CompletionShape(TOKENIZER), ChatShape(TOKENIZER)
DELTAS = [
    OutputDelta(0, "", [1]),
    OutputDelta(0, "he", [2]),
    OutputDelta(0, "", [3]),
    OutputDelta(0, "llo", [4], "stop", "END"),
]
COUNTS = Usage(5, 4, cached_tokens=2)
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
}


def request(**sampling):
    return EngineRequest("unique", [9, 8, 7, 6, 5], SamplingParams(**sampling))


def spec(**options):
    return ResponseSpec("r1", 17, "demo", **options)


def whole(shape, **options):
    return whole_body(shape, request(), spec(**options), DELTAS, COUNTS)


def chunks(shape, **options):
    writer = ChunkWriter(shape, request(), spec(stream=True, **options))
    return events(b"".join(writer.add(delta) for delta in DELTAS) + writer.finish(COUNTS))


def events(stream):
    """The bodies of a whole stream."""
    *bodies, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(body.startswith("data: ") for body in bodies)
    return [json.loads(body[6:]) for body in bodies]


def test_a_completion_body():
    assert whole(COMPLETION) == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": 17,
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "text": "hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "END",
            }
        ],
        "usage": USAGE,
    }


def test_a_chat_completion_body():
    body = whole(CHAT)
    assert (body["id"], body["object"]) == ("chatcmpl-r1", "chat.completion")
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert body["choices"][0]["message"] == message


def test_token_ids_stand_where_vllm_puts_them():
    body = whole(COMPLETION, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert body["choices"][0]["prompt_token_ids"] == [9, 8, 7, 6, 5]
    body = whole(CHAT, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert body["prompt_token_ids"] == [9, 8, 7, 6, 5]


@pytest.mark.parametrize("shape", [COMPLETION, CHAT], ids=["completions", "chat"])
def test_chunks_carry_every_token_once_and_skip_events_without_text(shape):
    stream = chunks(shape, return_token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in stream] == [[1], [2], [3, 4]]
    holders = [c["choices"][0] if shape.prompt_token_ids_in_choice else c for c in stream]
    assert ["prompt_token_ids" in holder for holder in holders] == [True, False, False]


def test_the_first_chunk_of_a_chat_names_the_role():
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(CHAT)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": "llo"}]


def test_a_chat_that_ends_without_text_has_an_empty_last_delta():
    writer = ChunkWriter(CHAT, request(), spec())
    first = writer.add(OutputDelta(0, "a", [1]))
    writer.add(OutputDelta(0, "", [], "length"))
    _, last = events(first + writer.finish(Usage(5, 1)))
    assert last["choices"][0]["delta"] == {}


def test_cached_tokens_are_counted_only_where_that_is_configured():
    counted = {**USAGE, "prompt_tokens_details": {"cached_tokens": 2}}
    assert whole(COMPLETION, prompt_tokens_details=True)["usage"] == counted
    stream = chunks(CHAT, continuous_usage_stats=True, prompt_tokens_details=True)
    assert all("prompt_tokens_details" in chunk["usage"] for chunk in stream)
    stream = chunks(CHAT, include_usage=True, continuous_usage_stats=True)
    assert "prompt_tokens_details" not in str([whole(COMPLETION), stream])


def test_usage_comes_only_when_asked_for():
    assert all("usage" not in chunk for chunk in chunks(CHAT))
    stream = chunks(CHAT, include_usage=True)
    assert [chunk["usage"] for chunk in stream] == [None, None, None, USAGE]
    assert stream[-1]["choices"] == []
    stream = chunks(CHAT, continuous_usage_stats=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in stream] == [1, 2, 4]


SHAPES = pytest.mark.parametrize("shape", [COMPLETION, CHAT], ids=["completions", "chat"])
THREE = [
    OutputDelta(0, "a", [1]),
    OutputDelta(2, "b", [2]),
    OutputDelta(2, "", [3], "stop", "END"),
    OutputDelta(0, "", [4]),
    OutputDelta(1, "c", [5]),
    OutputDelta(0, "d", [6], "length"),
    OutputDelta(1, "", [7]),
    OutputDelta(1, "e", [8], "stop"),
]
"""Choices in turns; the last one is over long before the others."""


def three(shape, **options):
    """Return the chunks of `THREE`, and the end of the stream."""
    writer = ChunkWriter(shape, request(n=3), spec(stream=True, **options))
    return [writer.add(delta) for delta in THREE], writer.finish(Usage(5, 8, cached_tokens=2))


@SHAPES
def test_choices_come_in_turns_and_each_has_an_end(shape):
    sent, end = three(shape)
    assert [len(chunk) > 0 for chunk in sent] == [True] * 3 + [False] + [True] * 2 + [False] * 2
    choices = [chunk["choices"][0] for chunk in events(b"".join(sent) + end)]
    found = [(c["index"], c["finish_reason"], c.get("stop_reason", "none")) for c in choices]
    assert found == [
        (0, None, "none"),
        (2, None, "none"),
        (2, "stop", "END"),
        (1, None, "none"),
        (0, "length", None),
        (1, "stop", None),
    ]


def test_every_choice_of_a_chat_names_the_role_once():
    sent, end = three(CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(b"".join(sent) + end)]
    firsts = [delta["content"] for delta in deltas if "role" in delta]
    assert firsts == ["a", "b", "c"]


@SHAPES
def test_token_ids_wait_for_the_next_chunk_of_their_own_choice(shape):
    sent, end = three(shape, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in events(b"".join(sent) + end)]
    assert [(c["index"], c["token_ids"]) for c in choices] == [
        (0, [1]), (2, [2]), (2, [3]), (1, [5]), (0, [4, 6]), (1, [7, 8]),
    ]  # fmt: skip


@SHAPES
def test_usage_is_that_of_all_choices_and_comes_once(shape):
    sent, end = three(shape, include_usage=True)
    *chunks, counts = events(b"".join(sent) + end)
    assert [chunk["usage"] for chunk in chunks] == [None] * 6
    assert counts["choices"] == []
    assert (counts["usage"]["prompt_tokens"], counts["usage"]["completion_tokens"]) == (5, 8)
    sent, end = three(shape, continuous_usage_stats=True)
    usages = [chunk["usage"] for chunk in events(b"".join(sent) + end)]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 5, 6, 8]
    assert usages[-1] == counts["usage"]


@SHAPES
def test_a_body_has_every_choice_in_order(shape):
    body = whole_body(shape, request(n=3), spec(return_token_ids=True), THREE, Usage(5, 8))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in body["choices"]]
    assert texts == ["ad", "ce", "b"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop", "stop"]
    assert [choice["token_ids"] for choice in body["choices"]] == [[1, 4, 6], [5, 7, 8], [2, 3]]
    assert body["usage"]["completion_tokens"] == 8


@SHAPES
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_response_with_a_choice_that_has_not_ended_is_an_error(shape, missing):
    deltas = [d for d in THREE if d.choice != missing or d.finish_reason is None]
    writer = ChunkWriter(shape, request(n=3), spec())
    for delta in deltas:
        writer.add(delta)
    with pytest.raises(InternalError, match="without a finish reason"):
        writer.finish(Usage(5, 8))
    with pytest.raises(InternalError, match="without a finish reason"):
        whole_body(shape, request(n=3), spec(), deltas, Usage(5, 8))


def spelled(text):
    """Deltas whose tokens are the bytes of a text, each with the two likeliest tokens."""
    ids = TOKENIZER.encode(text)
    last = len(ids) - 1
    for i, token_id in enumerate(ids):
        shown = TOKENIZER.decode([token_id]).replace("\ufffd", "")
        reason = "stop" if i == last else None
        yield OutputDelta(0, shown, [token_id], reason, logprobs=[likely(token_id, 2)])


def logprobs(shape, deltas):
    """Return the log probabilities of the same deltas in a whole body and in a stream."""
    body = whole_body(shape, request(logprobs=2), spec(), deltas, COUNTS)
    writer = ChunkWriter(shape, request(logprobs=2), spec())
    stream = events(b"".join(map(writer.add, deltas)) + writer.finish(COUNTS))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in stream]
    return body["choices"][0]["logprobs"], streamed


def test_log_probabilities_of_a_completion():
    found, streamed = logprobs(COMPLETION, list(spelled("héa")))
    assert found == {
        "tokens": ["h", "\\xc3", "\\xa9", "a"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {"h": -0.5, "i": -1.5},
            {"\\xc3": -0.5, "\\xc4": -1.5},
            {"\\xa9": -0.5, "\\xaa": -1.5},
            {"a": -0.5, "b": -1.5},
        ],
        "text_offset": [0, 1, 2, 2],
    }
    assert [part["tokens"] for part in streamed] == [["h"], ["\\xc3", "\\xa9", "a"]]
    assert {kind: [v for part in streamed for v in part[kind]] for kind in found} == found


def test_log_probabilities_of_a_chat():
    found, streamed = logprobs(CHAT, list(spelled("hé")))
    assert found["content"][0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "i", "logprob": -1.5, "bytes": [105]},
        ],
    }
    assert bytes(b for token in found["content"] for b in token["bytes"]).decode() == "hé"
    assert [token for part in streamed for token in part["content"]] == found["content"]


@SHAPES
def test_a_token_of_no_probability_has_a_number_that_json_can_hold(shape):
    entries = [[TokenLogprob(104, -float("inf"), 256)]]
    found, streamed = logprobs(shape, [OutputDelta(0, "h", [104], "stop", logprobs=entries)])
    assert "-9999.0" in json.dumps(found)
    assert streamed == [found]
