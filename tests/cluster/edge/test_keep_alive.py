"""Comments on streams that have nothing to send, under a virtual clock and to a real client."""

import asyncio
import threading

import openai
import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from cluster.errors import NotReadyError
from cluster.lab.simulation.loop import VirtualLoop
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving
from tests.cluster.edge.test_routes import Client

COMMENT = b": keep-alive\n\n"
BODY = {"prompt": "hi", "stream": True, "max_tokens": 8}


def streamed(script, headers=()):
    """The client of a stream, with the virtual time of every chunk."""

    async def run():
        config = IngressConfig(stream_keep_alive_s=15.0)
        client = Client(create_app(FakeBackend(script), config, version="1"))
        client.times = []

        class Chunks(list):
            def append(self, chunk):
                client.times.append((asyncio.get_running_loop().time(), chunk == COMMENT))
                super().append(chunk)

        client.chunks = Chunks()
        await client.request("POST", "/v1/completions", BODY, headers)
        # Let cancelled tasks end.
        await asyncio.sleep(0.001)
        return client

    return VirtualLoop().run(run())


def pausing(*pauses_s, error=None):
    """A script that emits a token after each pause."""

    async def script(request, emit):
        del request
        for i, pause_s in enumerate(pauses_s):
            await asyncio.sleep(pause_s)
            if error is not None:
                raise error
            await emit(OutputDelta(0, "a", [1], "length" if i == len(pauses_s) - 1 else None))
        return Usage(1, len(pauses_s))

    return script


def test_a_silent_stream_sends_a_comment_after_each_interval():
    client = streamed(pausing(40.0, 10.0, 20.0))
    assert client.status == 200
    # The end comes with the last token.
    comments = [at_s for at_s, is_comment in client.times if is_comment]
    assert comments == [15.0, 30.0, 65.0]
    assert client.chunks[-1].endswith(b"data: [DONE]\n\n")


def test_a_stream_that_is_never_silent_has_no_comment():
    client = streamed(pausing(*[10.0] * 5))
    assert not any(is_comment for _, is_comment in client.times)


def test_an_error_is_a_status_until_the_first_comment():
    client = streamed(pausing(14.0, error=NotReadyError("nobody decodes")))
    assert client.status == 503
    assert COMMENT not in client.chunks


def test_an_error_after_a_comment_is_an_event():
    client = streamed(pausing(20.0, error=NotReadyError("nobody decodes")))
    assert client.status == 200
    assert client.chunks[0] == COMMENT
    assert b'"error"' in client.chunks[-1]
    assert b"[DONE]" not in client.chunks[-1]


def test_a_resumed_stream_sends_comments_while_tokens_are_computed_again():
    client = streamed(pausing(20.0), headers=[("last-event-id", "0")])
    assert [at_s for at_s, is_comment in client.times if is_comment] == [15.0]
    assert client.chunks[-1].endswith(b"data: [DONE]\n\n")


def test_the_openai_client_reads_past_comments():
    commented = threading.Event()

    async def waits(request, emit):
        del request
        await asyncio.to_thread(commented.wait, 20)
        await emit(OutputDelta(0, "ab", [1, 2], "length"))
        return Usage(1, 2)

    config = IngressConfig(stream_keep_alive_s=0.05)
    app = create_app(FakeBackend(waits), config, version="1")

    async def watched(scope, receive, send):
        async def note(message):
            await send(message)
            if message.get("body") == COMMENT:
                commented.set()

        await app(scope, receive, note if scope["type"] == "http" else send)

    with (
        serving(watched) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        chunks = list(client.completions.create(model="demo", prompt="hi", stream=True))
    assert commented.is_set()
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "ab"


@pytest.mark.parametrize("leaves_after_s", [1.0, 20.0])
def test_a_client_that_leaves_a_silent_stream_ends_it(leaves_after_s):
    async def run():
        service = FakeBackend(pausing(3600.0))
        client = Client(create_app(service, IngressConfig(), version="1"))
        asking = asyncio.ensure_future(client.request("POST", "/v1/completions", BODY))
        await asyncio.sleep(leaves_after_s)
        assert service.num_open == 1
        client.gone.set()
        await asking
        await asyncio.sleep(0.001)
        assert service.num_open == 0
        assert client.chunks.count(COMMENT) == (leaves_after_s > 15.0)

    VirtualLoop().run(run())
