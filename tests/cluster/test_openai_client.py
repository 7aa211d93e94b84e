"""The real OpenAI client over a real socket, against the ingress with a fake service."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import openai
import pytest
import uvicorn

from cluster.errors import ReplicaLostError
from cluster.ingress import create_app
from cluster.openai import TextDelta
from tests.cluster.fake_service import FakeService

MESSAGES = [{"role": "user", "content": "hello 你好"}]


@pytest.fixture(scope="module")
def service():
    service = FakeService()
    service.max_model_len = 256
    return service


@pytest.fixture(scope="module")
def port(service):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            create_app(service, version="0"), log_level="warning", timeout_graceful_shutdown=1
        )
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


def test_a_completion_whole_and_streamed_with_a_stop_string(client):
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
    async def script(request):
        yield TextDelta("he", (1,))
        raise ReplicaLostError("the replica died")

    with scripted(service, script):
        stream = client.completions.create(model="demo", prompt="x", stream=True)
        assert next(stream).choices[0].text == "he"
        with pytest.raises(openai.APIError, match="the replica died"):
            next(stream)


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_closes_the_generator(port, service, stream):
    async def script(request):
        yield TextDelta("he", (1,))
        await asyncio.Event().wait()

    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
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
