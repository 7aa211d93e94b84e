import pytest

from cluster.openai import Finished, GenerateRequest, TextDelta, Usage
from cluster.openai_responses import BodyWriter, ChatShape, ChunkWriter, CompletionShape
from replicas.sampling_params import SamplingParams

EVENTS = [
    TextDelta("", (1,)),
    TextDelta("he", (2,)),
    TextDelta("", (3,)),
    Finished("stop", "END", Usage(5, 4, cached_tokens=2), "llo", (4,)),
]
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def request(**options):
    return GenerateRequest("demo", [9, 8, 7, 6, 5], SamplingParams(), **options)


def whole(shape, **options):
    writer = BodyWriter(shape, request(**options), "r1", 17)
    for event in EVENTS:
        writer.add(event)
    return writer.finish()


def chunks(shape, **options):
    writer = ChunkWriter(shape, request(stream=True, **options), "r1", 17)
    return [chunk for event in EVENTS for chunk in writer.add(event)]


def test_a_completion_body():
    assert whole(CompletionShape()) == {
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
    body = whole(ChatShape())
    assert (body["id"], body["object"]) == ("chatcmpl-r1", "chat.completion")
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert body["choices"][0]["message"] == message


def test_token_ids_stand_where_vllm_puts_them():
    body = whole(CompletionShape(), return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert body["choices"][0]["prompt_token_ids"] == [9, 8, 7, 6, 5]
    body = whole(ChatShape(), return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert body["prompt_token_ids"] == [9, 8, 7, 6, 5]


@pytest.mark.parametrize("shape", [CompletionShape(), ChatShape()], ids=["completions", "chat"])
def test_chunks_carry_every_token_once_and_skip_events_without_text(shape):
    stream = chunks(shape, return_token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in stream] == [[1], [2], [3, 4]]
    holders = [c["choices"][0] if shape.prompt_token_ids_in_choice else c for c in stream]
    assert ["prompt_token_ids" in holder for holder in holders] == [True, False, False]


def test_only_the_last_choice_of_a_stream_has_reasons():
    choices = [chunk["choices"][0] for chunk in chunks(CompletionShape())]
    assert [choice["text"] for choice in choices] == ["", "he", "llo"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert choices[-1]["stop_reason"] == "END"


def test_the_first_chunk_of_a_chat_names_the_role():
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(ChatShape())]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": "llo"}]


def test_a_chat_that_ends_without_text_has_an_empty_last_delta():
    writer = ChunkWriter(ChatShape(), request(), "r1", 17)
    writer.add(TextDelta("a", (1,)))
    (last,) = writer.add(Finished("length", None, Usage(5, 1)))
    assert last["choices"][0]["delta"] == {}


def test_usage_comes_only_when_asked_for():
    assert all("usage" not in chunk for chunk in chunks(ChatShape()))
    stream = chunks(ChatShape(), include_usage=True)
    assert [chunk["usage"] for chunk in stream] == [None, None, None, USAGE]
    assert stream[-1]["choices"] == []
    stream = chunks(ChatShape(), continuous_usage_stats=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in stream] == [1, 2, 4]
