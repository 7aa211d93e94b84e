import asyncio
import json

import pytest

from cluster.edge.batch import run_batch
from cluster.edge.openai import Usage
from cluster.edge.openai_limits import MAX_PROMPTS
from cluster.edge.run_all import run_all
from cluster.errors import QuotaError, ReplicaLostError
from replicas.messages import EngineRequest
from replicas.output_processor import OutputDelta
from replicas.sampling_params import SamplingParams
from tests.cluster.edge.fake_backend import FakeBackend, make_tokenizer
from tests.cluster.edge.test_routes import Client, call, make_app

PATH = "/v1/completions"
A, B, C, D, E, Z = make_tokenizer().encode("abcdez")


def complete(service, **fields):
    return call(service, "POST", PATH, fields)


def choices(answer):
    return [(choice["index"], choice["text"]) for choice in answer.body["choices"]]


@pytest.mark.parametrize("prompt", [["ab", "c"], [[A, B], [C]]], ids=["texts", "tokens"])
def test_every_prompt_has_its_choices_in_order(prompt):
    service = FakeBackend()
    answer = complete(service, prompt=prompt, n=2, temperature=1)
    assert choices(answer) == [(0, "ab"), (1, "ab"), (2, "c"), (3, "c")]
    # Every choice of a prompt is an echo of it: 2 * 2 and 2 * 1 tokens.
    counts = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert answer.body["usage"] == counts
    assert [request.prompt_token_ids for request in service.requests] == [[A, B], [C]]
    assert len({request.request_id for request in service.requests}) == 2


def test_a_stream_interleaves_the_prompts_and_has_one_end():
    answer = complete(
        FakeBackend(), prompt=["ab", "cd"], n=2, temperature=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *events, counts, _done = answer.events
    texts = {}
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert len([e for e in events if e["choices"][0]["finish_reason"]]) == 4
    assert (counts["usage"]["prompt_tokens"], counts["usage"]["completion_tokens"]) == (4, 8)


def test_echo_token_ids_and_log_probabilities_are_those_of_each_prompt():
    fields = {"prompt": ["ab", "cde"], "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = complete(FakeBackend(), **fields, return_token_ids=True)
    assert choices(answer) == [(0, "aba"), (1, "cdec")]
    found = [choice["prompt_token_ids"] for choice in answer.body["choices"]]
    assert found == [[A, B], [C, D, E]]
    found = [choice["logprobs"]["tokens"] for choice in answer.body["choices"]]
    assert found == [["a", "b", "a"], ["c", "d", "e", "c"]]
    streamed = complete(FakeBackend(), prompt=["ab", "cde"], max_tokens=1, echo=True, stream=True)
    texts = {
        event["choices"][0]["index"]: event["choices"][0]["text"] for event in streamed.events[:-1]
    }
    assert texts == {0: "aba", 1: "cdec"}


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["ok", "x" * 64], "prompt[1]"),
        (["ok", ""], "prompt[1]"),
        (["ok", 7], "prompt[1]"),
        ([[1], [2, 256]], "prompt[1][1]"),
        ([[1], ["a"]], "prompt[1][0]"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
    ],
    ids=["too-long", "empty", "wrong-type", "vocabulary", "token-type", "too-many"],
)
def test_one_wrong_prompt_refuses_all_before_any_runs(prompt, param):
    service = FakeBackend()
    answer = complete(service, prompt=prompt)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert service.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_one_prompt_ends_all_and_leaves_nothing(stream):
    async def script(request, emit):
        if request.prompt_token_ids == [B]:
            raise QuotaError("no more", retry_after_s=3)
        await asyncio.Event().wait()

    service = FakeBackend(script)
    answer = complete(service, prompt=["a", "b", "c"], stream=stream)
    assert (answer.status, answer.body["error"]["code"]) == (429, "quota")
    assert service.num_open == 0


def test_a_failure_of_one_prompt_in_a_stream_is_its_only_end():
    async def script(request, emit):
        await emit(OutputDelta(0, "x", [1]))
        if request.prompt_token_ids == [B]:
            raise ReplicaLostError("gone")
        await asyncio.Event().wait()

    service = FakeBackend(script)
    answer = complete(service, prompt=["a", "b"], stream=True)
    assert [event["choices"][0]["index"] for event in answer.events[:-1]] == [0, 1]
    assert answer.events[-1]["error"]["code"] == "replica_lost"
    assert service.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_prompts(stream):
    client = None

    async def script(request, emit):
        if service.num_open == 3:
            client.gone.set()
        await asyncio.Event().wait()

    service = FakeBackend(script)
    client = Client(make_app(service))
    body = {"prompt": ["a", "b", "c"], "stream": stream}
    await client.request("POST", PATH, body)
    assert len(service.requests) == 3
    assert service.num_open == 0


async def test_a_failure_waits_for_the_event_that_is_being_sent():
    sending, sent = asyncio.Event(), []

    async def generate(request, emit):
        if request.prompt_token_ids == [B]:
            await sending.wait()
            raise ReplicaLostError("gone")
        await emit(OutputDelta(0, "x", [1]))

    async def emit(delta):
        sending.set()
        for piece in "abc":
            await asyncio.sleep(0)
            sent.append(piece)

    requests = [EngineRequest(str(t), [t], SamplingParams()) for t in (A, B)]
    with pytest.raises(ReplicaLostError):
        await run_batch(generate, requests, emit)
    assert sent == ["a", "b", "c"]


@pytest.mark.parametrize(("num_prompts", "status"), [(4, 200), (5, 429), (6, 400)])
async def test_every_prompt_counts_as_an_open_request(num_prompts, status):
    """One other request is open, of at most five."""
    opened, release = asyncio.Event(), asyncio.Event()

    async def script(request, emit):
        if request.prompt_token_ids == [Z]:
            opened.set()
            await release.wait()
        await emit(OutputDelta(0, "", [1], "stop"))
        return Usage(1, 1)

    app = make_app(FakeBackend(script), max_ongoing_requests=5)
    waiting = asyncio.create_task(Client(app).request("POST", PATH, {"prompt": "z"}))
    await opened.wait()
    answer = await Client(app).request("POST", PATH, {"prompt": ["a"] * num_prompts})
    assert answer.status == status
    release.set()
    await waiting
    again = await Client(app).request("POST", PATH, {"prompt": ["a"] * 5})
    assert again.status == 200


def test_a_stream_of_several_prompts_cannot_be_resumed():
    headers = [("last-event-id", "0")]
    answer = call(
        FakeBackend(), "POST", PATH, {"prompt": ["a", "b"], "stream": True}, headers=headers
    )
    assert (answer.status, answer.body["error"]["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(("n", "best_of", "status"), [(2, 2, 200), (2, 1, 200), (1, 2, 400)])
def test_best_of_can_only_ask_for_what_is_shown(n, best_of, status):
    answer = complete(FakeBackend(), prompt="a", n=n, best_of=best_of, temperature=1)
    assert answer.status == status
    assert status == 200 or answer.body["error"]["param"] == "best_of"


async def test_coroutines_end_together():
    ended = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fail():
        await asyncio.sleep(0)
        raise KeyError

    with pytest.raises(KeyError):
        await run_all([wait(), fail(), wait()])
    assert ended == ["cancelled", "cancelled"]


def test_a_long_list_is_encoded_in_threads_with_the_same_result():
    prompts = ["p" * 40] * 200
    answer = complete(FakeBackend(), prompt=prompts, max_tokens=1)
    assert [text for _, text in choices(answer)] == ["p"] * 200
    assert json.dumps(answer.body["usage"]["prompt_tokens"]) == "8000"
