import pytest

from cluster.errors import ReplicaLostError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend, make_tokenizer
from tests.cluster.edge.test_routes import call

PATH = "/inference/v1/generate"
A, B, C = make_tokenizer().encode("abc")


def generate(service, sampling=None, **fields):
    body = {"token_ids": [A, B, C], "sampling_params": sampling or {}, **fields}
    return call(service, "POST", PATH, body, headers=[("x-request-id", "r1")])


def test_token_ids_come_in_and_go_out():
    service = FakeBackend()
    answer = generate(service, {"max_tokens": 2, "temperature": 0.5, "stop": ["x"]})
    choice = {"index": 0, "token_ids": [A, B], "logprobs": None, "finish_reason": "length"}
    assert answer.body["choices"] == [{**choice, "stop_reason": None}]
    assert (answer.body["request_id"], answer.body["output_mode"]) == ("r1", "tokens")
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert answer.body["usage"] == usage
    [request] = service.requests
    assert request.prompt_token_ids == [A, B, C]
    assert (request.sampling.temperature, request.sampling.stop) == (0.5, ("x",))


def test_without_a_limit_the_output_has_the_room_that_the_prompt_leaves():
    service = FakeBackend()
    generate(service)
    assert service.requests[0].sampling.max_tokens == service.max_model_len - 3


def test_a_stream_has_an_event_for_each_delta_and_one_end():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = generate(FakeBackend(), {"max_tokens": 2}, **options).events
    found = [event["choices"][0] for event in events]
    assert [(c["token_ids"], c["finish_reason"]) for c in found] == [([A], None), ([B], "length")]
    assert usage["usage"]["total_tokens"] == 5
    assert done == "[DONE]"


def test_a_stream_may_have_several_tokens_in_an_event_and_counts_in_each():
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    sampling = {"max_tokens": 3, "stream_interval": 2}
    *events, _ = generate(FakeBackend(), sampling, **options).events
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sizes == [1, 2]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_the_prompt_come_if_they_are_asked_for(stream):
    answer = generate(
        FakeBackend(), {"max_tokens": 1}, output_mode="text", return_token_ids=True, stream=stream
    )
    body = answer.events[0] if stream else answer.body
    assert body["choices"][0]["text"] == "a"
    assert body["prompt_token_ids"] == [A, B, C]


def test_log_probabilities_name_tokens_by_their_ids():
    answer = generate(FakeBackend(), {"max_tokens": 1, "logprobs": 2})
    [entry] = answer.body["choices"][0]["logprobs"]["content"]
    assert (entry["token_id"], entry["rank"], entry["logprob"]) == (A, 1, -0.5)
    assert [token["token_id"] for token in entry["top_logprobs"]] == [A, A, A + 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [A, 256]}, "token_ids[1]"),
        ({"token_ids": [A, "b"]}, "token_ids[1]"),
        ({"token_ids": [A] * 64}, "token_ids"),
        ({"token_ids": [A] * 65}, "token_ids"),
        ({"sampling_params": {"max_tokens": 65}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"sampling_params": {"n": 2, "temperature": 0}}, "sampling_params.n"),
        ({"output_mode": "sound"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_errors_name_the_field_of_this_body(fields, param):
    service = FakeBackend()
    answer = generate(service, **fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert service.requests == []


def test_both_parts_of_a_body_are_required():
    answer = call(FakeBackend(), "POST", PATH, {"token_ids": [A]})
    assert (answer.status, answer.body["error"]["param"]) == (400, "sampling_params")


def test_a_stream_that_fails_has_no_done():
    async def script(request, emit):
        await emit(OutputDelta(0, "", [A]))
        raise ReplicaLostError("gone")

    answer = generate(FakeBackend(script), stream=True)
    assert answer.events[-1]["error"]["code"] == "replica_lost"
