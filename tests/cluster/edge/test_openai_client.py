"""The real OpenAI client over a real socket, against the edge with a fake backend."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import openai
import pytest
import uvicorn

from cluster.config.schema import IngressConfig
from cluster.edge.routes import create_app
from cluster.errors import ReplicaLostError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend

MESSAGES = [{"role": "user", "content": "hello 你好"}]


@pytest.fixture(scope="module")
def service():
    service = FakeBackend()
    service.max_model_len = 256
    return service


@pytest.fixture(scope="module")
def port(service):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = create_app(
            service, IngressConfig(max_body_bytes=2**20, request_timeout_s=60), version="0"
        )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        poll(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(port):
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def poll(predicate):
    deadline = time.monotonic() + 10
    while not predicate():
        assert time.monotonic() < deadline, "the predicate never became true"
        time.sleep(0.002)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").root == "demo-folder"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_a_completion_with_a_stop_string_whole_and_streamed(client):
    options = {"model": "demo", "prompt": "one STOP two", "stop": "STOP", "seed": 3}
    whole = client.completions.create(**options, max_tokens=30)
    assert whole.choices[0].text == "one "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == "STOP"
    assert whole.usage.completion_tokens == 8
    stream = list(
        client.completions.create(
            **options, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in stream if c.choices) == "one "
    assert stream[-2].choices[0].finish_reason == "stop"
    assert stream[-1].choices == []
    assert stream[-1].usage == whole.usage


def test_a_conversation_whole_and_streamed(client):
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert whole.choices[0].message.content == "[user]hello 你好[assistant]"
    assert whole.choices[0].finish_reason == "length"
    stream = list(client.chat.completions.create(model="demo", messages=MESSAGES, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    assert "你" in pieces
    answer = whole.choices[0].message.model_dump()
    again = client.chat.completions.create(model="demo", messages=[*MESSAGES, answer])
    assert again.choices[0].message.content.startswith("[user]hello")


def test_the_client_reads_events_with_and_without_ids_alike(client):
    options = {"model": "demo", "messages": MESSAGES, "stream": True}
    options["stream_options"] = {"include_usage": True}
    plain = list(client.chat.completions.create(**options))
    with_ids = client.chat.completions.create(**options, extra_headers={"Last-Event-ID": "0"})
    assert with_ids.response.headers["content-type"].startswith("text/event-stream")
    assert [(c.choices, c.usage) for c in with_ids] == [(c.choices, c.usage) for c in plain]


def checked(answer):
    """An answer, once it has the very types that OpenAI documents."""
    return type(answer).model_validate(answer.to_dict(), strict=True)


def of_each_choice(stream):
    """The choices of a stream's chunks, apart, and the counts that it gave."""
    stream = list(stream)
    choices = [choice for chunk in stream for choice in chunk.choices]
    by_index = [[c for c in choices if c.index == index] for index in range(3)]
    return by_index, [chunk.usage for chunk in stream if chunk.usage is not None]


def test_three_completions_with_log_probabilities(client):
    options = {"model": "demo", "prompt": "hé", "n": 3, "logprobs": 2}
    whole = checked(client.completions.create(**options))
    assert [(c.index, c.text, c.finish_reason) for c in whole.choices] == [
        (index, "hé", "length") for index in range(3)
    ]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 9)
    expected = whole.choices[0].logprobs
    assert expected.tokens == ["h", "\\xc3", "\\xa9"]
    assert expected.text_offset == [0, 1, 2]
    assert expected.token_logprobs == [-0.5] * 3
    assert expected.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    choices, usages = of_each_choice(client.completions.create(**options, **counted))
    assert usages == [whole.usage]
    for own in choices:
        assert "".join(choice.text for choice in own) == "hé"
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
        parts = [checked(choice.logprobs) for choice in own]
        assert [t for part in parts for t in part.tokens] == expected.tokens
        assert [t for part in parts for t in part.text_offset] == expected.text_offset
        assert [t for part in parts for t in part.top_logprobs] == expected.top_logprobs


def test_three_chat_answers_with_log_probabilities(client):
    options = {"model": "demo", "messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 2}
    whole = checked(client.chat.completions.create(**options))
    text = "[user]hello 你好[assistant]"
    assert [(c.index, c.message.content, c.finish_reason) for c in whole.choices] == [
        (index, text, "length") for index in range(3)
    ]
    assert whole.usage.completion_tokens == 3 * len(text.encode())
    expected = whole.choices[2].logprobs.content
    assert bytes(b for token in expected for b in token.bytes).decode() == text
    assert (expected[0].token, expected[0].logprob) == ("[", -0.5)
    assert [top.logprob for top in expected[0].top_logprobs] == [-0.5, -1.5]
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    choices, usages = of_each_choice(client.chat.completions.create(**options, **counted))
    assert usages == [whole.usage]
    for own in ([checked(choice) for choice in each] for each in choices):
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(choice.delta.content or "" for choice in own) == text
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert [t for choice in own for t in choice.logprobs.content] == expected


def test_a_beam_search_gives_its_sequences_as_choices(client):
    extra = {"use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True}
    options = {"model": "demo", "n": 2, "max_tokens": 3, "logprobs": 1}
    whole = checked(client.completions.create(**options, prompt="ab", extra_body=extra))
    assert [(c.index, c.finish_reason) for c in whole.choices] == [(0, "length"), (1, "length")]
    # The backend's likeliest token is the first of the prompt, at every position.
    assert whole.choices[0].text == "aaa"
    assert whole.choices[0].logprobs.token_logprobs == [-0.5] * 3
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 6)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**options, prompt="ab", stream=True, extra_body=extra)
    assert refused.value.param == "stream"


def test_extension_fields_travel_in_the_extra_body(client):
    extra = {"return_token_ids": True, "ignore_eos": True, "top_k": 5}
    whole = client.completions.create(model="demo", prompt="ab", extra_body=extra)
    assert whole.choices[0].token_ids == whole.choices[0].prompt_token_ids


def test_bad_requests_become_the_clients_own_errors(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt="x", temperature=5)
    assert refused.value.param == "temperature"
    assert refused.value.code == "bad_request"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_an_error_mid_stream_is_raised_by_the_client(client, service):
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        raise ReplicaLostError("the replica died")

    with scripted(service, script):
        stream = client.completions.create(model="demo", prompt="x", stream=True)
        assert next(stream).choices[0].text == "he"
        with pytest.raises(openai.APIError, match="the replica died"):
            next(stream)


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_ends_the_request(port, service, stream):
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        await asyncio.Event().wait()

    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with scripted(service, script):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(head.encode() + body)
            poll(lambda: service.num_open == 1)
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        poll(lambda: service.num_open == 0)


@contextlib.contextmanager
def scripted(service, script):
    service.script = script
    try:
        yield
    finally:
        service.script = None
