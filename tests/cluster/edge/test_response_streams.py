"""Events of stored and running responses, read from any number on."""

import asyncio
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import IngressConfig
from cluster.edge.families.message import ArgumentsPiece, CallEnd, CallStart, ContentPiece
from cluster.edge.openai import Usage
from cluster.edge.responses.archive import response_archive
from cluster.edge.responses.recording import (
    KnownOutput,
    Part,
    decode_parts,
    encode_part,
    pages,
    part_of,
)
from cluster.edge.routes import create_app
from cluster.errors import ReplicaLostError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving
from tests.cluster.edge.test_background_responses import (
    Application,
    Ingresses,
    SlowBackend,
    settle,
    two_ingresses,
)
from tests.cluster.edge.test_departure import Application as Ingress
from tests.cluster.edge.test_departure import ContinuingBackend
from tests.cluster.edge.test_departure import Ingresses as EndingIngresses
from tests.cluster.edge.test_openai_responses_client import ANSWER, TOOL
from tests.cluster.edge.test_responses import PATH
from tests.cluster.edge.test_routes import Client
from tests.cluster.edge.test_tool_calls import ToolBackend

BODY = {"model": "demo", "input": "hi"}


def split_events(chunks):
    """The events of a stream: each one's number, type, and whole text."""
    *events, end = b"".join(chunks).decode().split("\n\n")
    assert end == ""
    found = []
    for event in events:
        data = event.partition("data: ")[2]
        body = {} if data == "[DONE]" else json.loads(data)
        found.append((body.get("sequence_number"), body.get("type", data), event))
    return found


class Reader:
    """A client that reads a response's events in a task."""

    def __init__(self, app, path):
        self._client = Client(app._app)
        self.task = asyncio.create_task(self._client.request("GET", path))

    @property
    def events(self):
        return split_events(self._client.chunks)

    @property
    def kinds(self):
        return [kind.removeprefix("response.") for _, kind, _ in self.events]

    async def has(self, num_events):
        for _ in range(20000):
            if len(self.events) >= num_events:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(self.events)

    async def end(self):
        await asyncio.wait_for(self.task, 30)
        return self.events


class DividedBackend(ToolBackend):
    """A model that says its answer in many deltas."""

    def __init__(self, size, reason="stop"):
        super().__init__(ANSWER, size=size)
        self.reason = reason


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40), st.sampled_from(["stop", "length"]), st.booleans(), st.booleans(), st.data()
)
def test_what_is_replayed_from_any_event_continues_the_stream(
    size, reason, is_background, is_streamed, data
):
    async def run():
        app = Application(DividedBackend(size, reason), response_archive(2**20, 100.0))
        client = Client(app._app)
        body = {**BODY, "tools": [TOOL], "stream": is_streamed, "background": is_background}
        await client.request("POST", PATH, body)
        assert client.status == 200
        if is_streamed:
            whole = split_events(client.chunks)
            response_id = json.loads(whole[0][2].partition("data: ")[2])["response"]["id"]
        else:
            response_id = client.body["id"]
            await settle()
            whole = await Reader(app, f"{PATH}/{response_id}?stream=true").end()
        numbers = [number for number, _, _ in whole[:-1]]
        assert numbers == list(range(len(numbers)))
        assert whole[-1][1] == "[DONE]"
        after = data.draw(st.integers(0, len(numbers) - 1))
        path = f"{PATH}/{response_id}?stream=true&starting_after={after}"
        assert await Reader(app, path).end() == whole[after + 1 :]
        stored = await app.ask("GET", f"{PATH}/{response_id}")
        last = json.loads(whole[-2][2].partition("data: ")[2])
        assert last["response"] == stored

    asyncio.run(run())


def test_a_running_response_is_followed_at_any_ingress(monkeypatch):
    monkeypatch.setattr("cluster.edge.responses.archive._POLL_S", 0.001)

    async def run():
        peers = Ingresses()
        backend = SlowBackend()
        one, other = two_ingresses(backend, peers)
        path = f"{PATH}/{(await one.start())['id']}?stream=true"
        readers = [Reader(app, path) for app in (one, other)]
        await settle()
        assert [reader.kinds for reader in readers] == [["created", "queued"]] * 2
        assert await one.ask("GET", "/load") == {"server_load": 2}
        backend.may_begin.set()
        await readers[1].has(6)
        assert readers[0].kinds[2:] == [
            "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        ]  # fmt: skip
        readers.append(Reader(other, f"{path}&starting_after=4"))
        backend.may_end.set()
        local, remote, late = [await reader.end() for reader in readers]
        assert local == remote
        assert late == local[5:]
        assert local[-2:][0][1] == "response.completed"
        assert await one.ask("GET", "/load") == {"server_load": 0}

    asyncio.run(run())


def test_a_streamed_response_in_the_background_outlives_its_client():
    async def run():
        backend = SlowBackend()
        app = Application(backend)
        client = Client(app._app)
        body = {**BODY, "background": True, "stream": True}
        request = asyncio.create_task(client.request("POST", PATH, body))
        await settle()
        [(_, _, created), _] = split_events(client.chunks)
        response_id = json.loads(created.partition("data: ")[2])["response"]["id"]
        client.gone.set()
        await asyncio.wait({request})
        assert backend.num_open == 1
        backend.may_begin.set()
        backend.may_end.set()
        path = f"{PATH}/{response_id}?stream=true&starting_after=1"
        events = await Reader(app, path).end()
        assert events[0][:2] == (2, "response.in_progress")
        assert events[-2][1] == "response.completed"

    asyncio.run(run())


@pytest.mark.parametrize("status", ["cancelled", "failed", "deleted"])
def test_a_stream_ends_as_its_response(status):
    async def run():
        backend = SlowBackend()
        app = Application(backend)
        path = f"{PATH}/{(await app.start())['id']}"
        backend.may_begin.set()
        reader = Reader(app, f"{path}?stream=true")
        await settle()
        if status == "failed":
            backend.error = ReplicaLostError("gone")
            backend.may_end.set()
        elif status == "cancelled":
            await app.ask("POST", f"{path}/cancel")
        else:
            await app.ask("DELETE", path)
        events = await reader.end()
        ends = {
            "cancelled": ["response.cancelled", "[DONE]"],
            "failed": ["error", "response.failed"],
            "deleted": ["response.cancelled", "[DONE]"],
        }[status]
        assert [kind for _, kind, _ in events][6:] == ends
        if status != "deleted":
            assert await Reader(app, f"{path}?stream=true&starting_after=4").end() == events[5:]

    asyncio.run(run())


def test_a_stream_continues_at_the_ingress_that_takes_its_response_over(monkeypatch):
    monkeypatch.setattr("cluster.edge.responses.archive._POLL_S", 0.001)

    async def run():
        peers = EndingIngresses()
        backend, successor = SlowBackend(), ContinuingBackend()
        old, new = Ingress(backend, peers), Ingress(successor, peers)
        started = await old.ask("POST", PATH, {**BODY, "background": True})
        backend.may_begin.set()
        reader = Reader(old, f"{PATH}/{started['id']}?stream=true")
        await settle()
        assert reader.kinds[-1] == "output_text.delta"
        peers.archives = [new.archive]
        assert await old.archive.hand_over()
        events = await reader.end()
        assert [number for number, _, _ in events[:-1]] == list(range(len(events) - 1))
        deltas = [
            json.loads(event.partition("data: ")[2])["delta"]
            for _, kind, event in events
            if kind == "response.output_text.delta"
        ]
        assert deltas == ["he", "llo"], "what the successor says again is not sent again"
        path = f"{PATH}/{started['id']}?stream=true"
        assert await Reader(new, path).end() == events

    asyncio.run(run())


def test_streams_leave_room_for_other_questions(monkeypatch):
    monkeypatch.setattr("cluster.edge.responses.archive._POLL_S", 0.001)

    class Peers(Ingresses):
        most = open = 0

        async def ask_all(self, question, payload, timeout_s):
            self.open += 1
            self.most = max(self.most, self.open)
            await asyncio.sleep(0.01)
            self.open -= 1
            return await super().ask_all(question, payload, timeout_s)

    async def run():
        peers = Peers()
        backend = SlowBackend()
        one, other = two_ingresses(backend, peers)
        path = f"{PATH}/{(await one.start())['id']}"
        readers = [Reader(other, f"{path}?stream=true") for _ in range(100)]
        assert (await other.ask("GET", path))["status"] == "queued"
        await readers[-1].has(2)
        backend.may_begin.set()
        backend.may_end.set()
        ended = [await reader.end() for reader in readers]
        assert all(events == ended[0] for events in ended)
        assert peers.most <= 3, "two of streams, one of the GET"

    asyncio.run(run())


def test_other_requests_run_while_a_long_response_is_replayed():
    async def run():
        backend = ToolBackend("x" * 4000, size=1)
        backend.max_model_len = 8192
        app = Application(backend, response_archive(2**24, 100.0))
        client = Client(app._app)
        await client.request("POST", PATH, {**BODY, "stream": True})
        whole = split_events(client.chunks)
        response = json.loads(whole[0][2].partition("data: ")[2])["response"]
        readers = [Reader(app, f"{PATH}/{response['id']}?stream=true") for _ in range(3)]
        turns = 0
        while not all(reader.task.done() for reader in readers):
            turns += 1
            await asyncio.sleep(0)
        assert turns > 3 * 4000 / 64, "each turn has a page of one stream"
        assert all(reader.events == whole for reader in readers)

    asyncio.run(run())


def test_a_stream_that_breaks_says_where_to_go_on():
    async def run():
        backend = SlowBackend()
        app = Ingress(backend, EndingIngresses())
        started = await app.ask("POST", PATH, {**BODY, "background": True})
        reader = Reader(app, f"{PATH}/{started['id']}?stream=true")
        await settle()
        app.departure.end_requests()
        *_, (number, kind, event) = await reader.end()
        assert (number, kind) == (1, "error")
        assert "starting_after=1" in event

    asyncio.run(run())


def test_a_stream_behind_what_there_is_waits_for_it():
    """A response that has moved may have fewer events than its client, until they come again."""

    async def run():
        backend = SlowBackend()
        app = Application(backend)
        path = f"{PATH}/{(await app.start())['id']}?stream=true"
        early = Reader(app, f"{path}&starting_after=3")
        await settle()
        backend.may_begin.set()
        backend.may_end.set()
        assert await early.end() == (await Reader(app, path).end())[4:]

    asyncio.run(run())


def test_a_stream_has_no_more_than_what_is_offered_to_another_ingress(monkeypatch):
    """The other one records what follows in pieces of its own."""
    monkeypatch.setattr("cluster.edge.responses.archive._POLL_S", 0.001)

    class OtherPieces(FakeBackend):
        async def generate(self, request, emit, known=None, token_ids=()):
            await emit(OutputDelta(0, "h", [3]))
            await emit(OutputDelta(0, "ello", [4], "stop"))
            return Usage(len(request.prompt_token_ids), 2)

    async def run():
        peers = EndingIngresses()
        backend = SlowBackend()
        old, new = Ingress(backend, peers), Ingress(OtherPieces(), peers)
        started = await old.ask("POST", PATH, {**BODY, "background": True})
        reader = Reader(old, f"{PATH}/{started['id']}?stream=true")
        await settle()
        peers.archives = [new.archive]
        ask_one = peers.ask_one

        async def ask_slowly(*question):
            """Let the model continue between the offer and its answer."""
            offered = await ask_one(*question)
            backend.may_begin.set()
            await settle()
            return offered

        peers.ask_one = ask_slowly
        assert await old.archive.hand_over()
        events = await reader.end()
        assert [number for number, _, _ in events[:-1]] == list(range(len(events) - 1))
        path = f"{PATH}/{started['id']}?stream=true"
        assert await Reader(new, path).end() == events

    asyncio.run(run())


def test_wrong_numbers_and_parameters_are_refused():
    async def run():
        backend = SlowBackend()
        app = Application(backend, max_ongoing_requests=2)
        path = f"{PATH}/{(await app.start())['id']}"
        for query, param in {
            "stream=true&starting_after=-1": "starting_after",
            "stream=true&starting_after=x": "starting_after",
            "stream=true&starting_after=" + "9" * 400: "starting_after",
            "starting_after=1": "starting_after",
            "stream=perhaps": "stream",
            "stream=true&include_obfuscation=x": "include_obfuscation",
        }.items():
            refused = await app.ask("GET", f"{path}?{query}", status=400)
            assert refused["error"]["param"] == param, query
        missing = await app.ask("GET", f"{PATH}/resp_{'0' * 32}?stream=true", status=404)
        assert missing["error"]["param"] == "response_id"
        readers = [Reader(app, f"{path}?stream=true&include_obfuscation=false")]
        await settle()
        # Each stream counts as an open request.
        await app.ask("GET", f"{path}?stream=true", status=429)
        backend.may_begin.set()
        backend.may_end.set()
        events = await readers[0].end()
        after = len(events) - 2
        assert await Reader(app, f"{path}?stream=true&starting_after={after}").end() == events[-1:]
        await app.ask("GET", f"{path}?stream=true&starting_after={after + 1}", status=400)

    asyncio.run(run())


class PausingBackend(FakeBackend):
    """A model that says three words."""

    async def say(self, request, emit):
        for i, word in enumerate(("one ", "two ", "three")):
            await emit(OutputDelta(0, word, [i + 1], "stop" if i == 2 else None))
            await asyncio.sleep(0)
        return Usage(len(request.prompt_token_ids), 3)


def test_the_openai_client_resumes_a_stream():
    service = PausingBackend()
    service.script = service.say
    app = create_app(service, IngressConfig(), version="0")
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            with client.responses.create(**BODY, background=True, stream=True) as stream:
                begin = [next(stream) for _ in range(3)]
            response_id = begin[0].response.id
            assert [event.type for event in begin[:2]] == ["response.created", "response.queued"]
            events = client.responses.retrieve(response_id, stream=True, starting_after=2)
            whole = begin + list(events)
            assert [event.sequence_number for event in whole] == list(range(len(whole)))
            assert whole[-1].response.output_text == "one two three"
            # The client's helper builds the answer from the events.
            with client.responses.stream(response_id=response_id, starting_after=0) as again:
                assert [event.sequence_number for event in again] == list(range(1, len(whole)))
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(f"resp_{'0' * 32}", stream=True, starting_after=2)


TEXTS = st.lists(st.text(min_size=1, max_size=5), max_size=6)


@given(TEXTS, st.integers(0, 30), st.data())
def test_output_that_is_made_again_adds_only_what_is_new(texts, known_size, data):
    """Known and new pieces divide the same output in different ways."""
    text = "".join(texts)
    cut = min(known_size, len(text))
    known, left = [], text[:cut]
    while left:
        size = data.draw(st.integers(1, len(left)))
        known.append(Part("content", left[:size]))
        left = left[size:]
    output = KnownOutput(known)
    new = [output.new_part(Part("content", each)) for each in texts]
    assert "".join(part.text for part in new if part is not None) == text[cut:]


@given(st.lists(st.text(max_size=5), max_size=20), st.integers(1, 7))
def test_the_pages_of_a_recording_have_all_of_its_parts_in_order(texts, num_parts):
    parts = [Part("content", text) for text in texts]
    found = [decode_parts(page) for page in pages(b"".join(map(encode_part, parts)), num_parts)]
    assert [part for page in found for part in page] == parts
    assert all(len(page) == num_parts for page in found[:-1])


def test_a_call_that_is_made_again_keeps_its_first_id():
    call = [CallStart(0, "f", "call_1"), ArgumentsPiece(0, '{"a": 1}'), CallEnd(0)]
    known = [part_of(piece, [], {}) for piece in call[:2]]
    output = KnownOutput([Part("begin"), *known])
    again = [CallStart(0, "f", "call_2"), ArgumentsPiece(0, '{"a": 1}'), CallEnd(0)]
    parts = [Part("begin"), *(part_of(piece, [], {}) for piece in [*again, ContentPiece("x")])]
    assert [output.new_part(part) for part in parts] == [
        None, None, None, Part("end"), Part("content", "x"),
    ]  # fmt: skip
