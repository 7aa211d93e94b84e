"""The end of an ingress: where its responses go, and what becomes of open requests."""

import asyncio
import json

import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.departure import Departure
from cluster.edge.openai import Usage
from cluster.edge.responses import archive as archive_module
from cluster.edge.responses.archive import response_archive
from cluster.edge.routes import create_app
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_background_responses import SlowBackend, settle, texts
from tests.cluster.edge.test_responses import PATH
from tests.cluster.edge.test_routes import Client
from tests.cluster.edge.test_tool_calls import EchoBackend

COMPLETION = {"prompt": "hello", "stream": True, "max_tokens": 5}


class Ingresses:
    """Peers of several archives; `ask_one` asks one that does not leave, as Serve does."""

    def __init__(self):
        self.archives = []

    async def ask_all(self, question, payload, timeout_s):
        return [await archive.answer(payload) for archive in self.archives]

    async def ask_one(self, question, payload, timeout_s):
        if not self.archives:
            return b""
        return await self.archives[0].take_over(payload)


class Application:
    """An ingress without engines."""

    def __init__(self, backend, peers, **ingress):
        self.archive = response_archive(2**20, 100.0, peers)
        self.departure = Departure(drain_s=100.0)
        self._app = create_app(
            backend, IngressConfig(**ingress), version="1", responses=self.archive,
            departure=self.departure,
        )  # fmt: skip

    def send(self, method, path, body=b"", headers=()):
        return asyncio.ensure_future(Client(self._app).request(method, path, body, headers))

    async def ask(self, method, path, body=b"", status=200):
        client = await self.send(method, path, body)
        assert client.status == status, client.body
        return client.body


class ContinuingBackend(FakeBackend):
    """A model that ends "he" with "llo", and says both to a request that it has not begun."""

    async def generate(self, request, emit, known=None, token_ids=()):
        self.requests.append((request, list(token_ids)))
        await emit(OutputDelta(0, "he", [1]))
        await emit(OutputDelta(0, "llo", [2], "stop"))
        return Usage(len(request.prompt_token_ids), 2)


def test_a_response_in_the_background_continues_at_another_ingress():
    async def run():
        peers = Ingresses()
        backend, successor = SlowBackend(), ContinuingBackend()
        old, new = Application(backend, peers), Application(successor, peers)
        body = {"model": "demo", "input": "hi", "background": True, "metadata": {"a": "b"}}
        started = await old.ask("POST", PATH, body)
        backend.may_begin.set()
        await settle()
        assert not await old.archive.hand_over(), "there is no other ingress"
        assert backend.num_open == 1, "it runs on"
        peers.archives = [new.archive]
        assert await old.archive.hand_over()
        assert backend.num_open == 0
        assert await old.ask("GET", "/load") == {"server_load": 0}
        [asked], [(request, token_ids)] = backend.requests, successor.requests
        assert token_ids == [1]
        assert request.sampling == asked.sampling
        assert (request.prompt_token_ids, request.tenant) == (asked.prompt_token_ids, asked.tenant)
        assert request.request_id != asked.request_id
        assert 0 < request.timeout_s <= asked.timeout_s
        await settle()
        ended = await old.ask("GET", f"{PATH}/{started['id']}")
        assert (ended["status"], texts(ended)) == ("completed", ["hello"])
        assert {**started, **{name: ended[name] for name in ("status", "output", "usage")}} | {
            "completed_at": ended["completed_at"]
        } == ended
        assert await new.ask("GET", "/load") == {"server_load": 0}

    asyncio.run(run())


def test_a_response_that_ends_during_an_offer_moves_finished():
    async def run():
        peers = Ingresses()
        backend, successor = SlowBackend(), ContinuingBackend()
        old, new = Application(backend, peers), Application(successor, peers)
        body = {"model": "demo", "input": "hi", "background": True}
        started = [await old.ask("POST", PATH, body) for _ in range(2)]
        backend.may_begin.set()
        await settle()

        class Peer:
            async def take_over(self, payload):
                backend.may_end.set()
                await settle()
                return await new.archive.take_over(payload)

        peers.archives = [Peer()]
        while not await old.archive.hand_over():
            pass
        assert len(successor.requests) <= 1, "only the first one was offered while it ran"
        await settle()
        peers.archives = [new.archive]
        for response in started:
            ended = await new.ask("GET", f"{PATH}/{response['id']}")
            assert ended["status"] == "completed"
            assert texts(ended) == texts(await new.ask("GET", f"{PATH}/{started[1]['id']}"))

    asyncio.run(run())


def test_a_response_that_is_offered_twice_runs_once():
    async def run():
        peers = Ingresses()
        backend, successor = SlowBackend(), ContinuingBackend()
        old, new = Application(backend, peers), Application(successor, peers)
        started = await old.ask("POST", PATH, {"model": "demo", "input": "hi", "background": True})
        backend.may_begin.set()
        await settle()

        class Peer:
            async def take_over(self, payload):
                await asyncio.gather(*(new.archive.take_over(payload) for _ in range(2)))
                return await new.archive.take_over(payload)

        peers.archives = [Peer()]
        assert await old.archive.hand_over()
        await settle()
        assert len(successor.requests) == 1
        assert (await new.ask("GET", "/load")) == {"server_load": 0}
        peers.archives = [new.archive]
        assert (await new.ask("GET", f"{PATH}/{started['id']}"))["status"] == "completed"

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{"top_logprobs": 1}, {}])
def test_an_answer_with_log_probabilities_is_computed_again(fields):
    async def run():
        peers = Ingresses()
        backend, successor = SlowBackend(), ContinuingBackend()
        old, new = Application(backend, peers), Application(successor, peers)
        peers.archives = [new.archive]
        await old.ask("POST", PATH, {"model": "demo", "input": "x", "background": True, **fields})
        backend.may_begin.set()
        await settle()
        assert await old.archive.hand_over()
        assert successor.requests[0][1] == ([] if fields else [1])

    asyncio.run(run())


def test_a_conversation_continues_after_its_ingress_has_left():
    async def run():
        peers = Ingresses()
        old, new = (Application(EchoBackend(), peers) for _ in range(2))
        first = await old.ask("POST", PATH, {"model": "demo", "input": "one"})
        reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
        peers.archives = [new.archive]
        assert await old.archive.hand_over()
        assert old.archive.is_empty
        assert await new.ask("GET", f"{PATH}/{first['id']}") == first
        second = {"model": "demo", "input": "two", "previous_response_id": first["id"]}
        second = await new.ask("POST", PATH, second)
        assert texts(second) == ["[user]one[assistant][user]one[assistant][user]two[assistant]"]
        await old.ask("POST", PATH, {"model": "demo", "input": reference})

    asyncio.run(run())


@pytest.mark.parametrize("has_reference", [False, True])
def test_a_continued_conversation_in_the_background_moves_whole(has_reference):
    async def run():
        peers = Ingresses()
        successor = FakeBackend()
        old, new = Application(EchoBackend(), peers), Application(successor, peers)
        first = await old.ask("POST", PATH, {"model": "demo", "input": "one"})
        waiting = SlowBackend()
        other = Application(waiting, peers)
        peers.archives = [old.archive]
        body = {"model": "demo", "input": "x", "background": True}
        if has_reference:
            body["input"] = [{"type": "item_reference", "id": first["output"][0]["id"]}]
        else:
            body["previous_response_id"] = first["id"]
        started = await other.ask("POST", PATH, body)
        await settle()
        # What it continues is forgotten meanwhile.
        await old.ask("DELETE", f"{PATH}/{first['id']}")
        peers.archives = [new.archive]
        assert await other.archive.hand_over()
        await settle()
        [request], [asked] = successor.requests, waiting.requests
        assert request.prompt_token_ids == asked.prompt_token_ids
        ended = await new.ask("GET", f"{PATH}/{started['id']}")
        assert ended["status"] in {"completed", "incomplete"}
        assert ended["previous_response_id"] == body.get("previous_response_id")

    asyncio.run(run())


def test_an_ingress_without_room_takes_no_response():
    async def run():
        peers = Ingresses()
        old = Application(SlowBackend(), peers)
        full = Application(HalfBackend(), peers, max_ongoing_requests=1)
        peers.archives = [full.archive]
        body = {"model": "demo", "input": "hi", "background": True}
        running = full.send("POST", "/v1/completions", COMPLETION)
        await settle()
        started = await old.ask("POST", PATH, body)
        assert not await old.archive.hand_over()
        assert (await old.ask("GET", f"{PATH}/{started['id']}"))["status"] == "queued"
        await old.archive.close()
        full.departure.end_requests()
        await running

    asyncio.run(run())


def test_an_ingress_without_engines_takes_no_response_in_the_background():
    async def run():
        peers = Ingresses()
        backend, successor = SlowBackend(), ContinuingBackend()
        successor.ready = (False, "no replica yet in pool both")
        old, new = Application(backend, peers), Application(successor, peers)
        peers.archives = [new.archive]
        await old.ask("POST", PATH, {"model": "demo", "input": "hi", "background": True})
        await settle()
        assert not await old.archive.hand_over()
        assert backend.num_open == 1
        successor.ready = (True, "")
        assert await old.archive.hand_over()
        assert len(successor.requests) == 1

    asyncio.run(run())


def test_an_ingress_that_leaves_takes_no_response():
    async def run():
        peers = Ingresses()
        old, other = (Application(EchoBackend(), peers) for _ in range(2))
        peers.archives = [other.archive]
        await old.ask("POST", PATH, {"model": "demo", "input": "one"})
        peers.archives = []
        assert await other.archive.hand_over(), "it has nothing"
        peers.archives = [other.archive]
        assert not await old.archive.hand_over()

    asyncio.run(run())


def test_many_responses_move_in_parts(monkeypatch):
    monkeypatch.setattr(archive_module, "_HAND_OVER_BYTES", 1)

    async def run():
        peers = Ingresses()
        old, new = (Application(EchoBackend(), peers) for _ in range(2))
        peers.archives = [new.archive]
        made = [await old.ask("POST", PATH, {"model": "demo", "input": str(i)}) for i in range(3)]
        assert await old.archive.hand_over()
        for response in made:
            assert await new.ask("GET", f"{PATH}/{response['id']}") == response

    asyncio.run(run())


# --- open requests --------------------------------------------------------------------------------


class HalfBackend(FakeBackend):
    """An echo that stops after two tokens until it may end."""

    def __init__(self):
        super().__init__()
        self.may_end = asyncio.Event()

    async def generate(self, request, emit, known=None, token_ids=()):
        async def emit_slowly(delta):
            if self.num_tokens == 2:
                await self.may_end.wait()
            self.num_tokens += 1
            await emit(delta)

        self.num_tokens = 0
        return await super().generate(request, emit_slowly, known)


@pytest.mark.parametrize("last_event_id", [None, "0"])
def test_a_stream_that_outlasts_the_drain_ends_with_an_event_that_says_how_to_continue(
    last_event_id,
):
    headers = [] if last_event_id is None else [("last-event-id", last_event_id)]

    async def run():
        backend = HalfBackend()
        old = Application(backend, Ingresses())
        sent = old.send("POST", "/v1/completions", COMPLETION, headers)
        await settle()
        assert (backend.num_open, len(old.departure.open_requests)) == (1, 1)
        old.departure.end_requests()
        client = await sent
        assert (backend.num_open, len(old.departure.open_requests)) == (0, 0)
        *events, last = b"".join(client.chunks).decode().strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "ingress_leaving"
        if last_event_id is None:
            assert "Last-Event-ID" not in error["message"]
            return
        event_id = error["message"].rpartition(": ")[2]
        assert events[-1].startswith(f"id: {event_id}\n")
        new = Application(FakeBackend(), Ingresses())
        resumed = await new.send(
            "POST", "/v1/completions", COMPLETION, [("last-event-id", event_id)]
        )
        rest = b"".join(resumed.chunks).decode()
        assert "data: [DONE]" in rest
        texts = [
            json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            for block in [*events, *rest.split("\n\n")]
            for line in block.splitlines()
            if line.startswith("data: {")
        ]
        assert "".join(texts) == "hello"

    asyncio.run(run())


def test_a_whole_answer_that_outlasts_the_drain_is_a_503():
    async def run():
        old = Application(HalfBackend(), Ingresses())
        sent = old.send("POST", "/v1/completions", {**COMPLETION, "stream": False})
        await settle()
        old.departure.end_requests()
        client = await sent
        assert (client.status, client.body["error"]["code"]) == (503, "ingress_leaving")
        assert client.headers["retry-after"] == "1"

    asyncio.run(run())


# --- the drain ------------------------------------------------------------------------------------


class Archive:
    """An archive that another ingress takes over at the third offer."""

    def __init__(self, num_refusals=2):
        self.num_refusals = num_refusals
        self.num_offers = 0

    @property
    def is_empty(self):
        return self.num_offers > self.num_refusals

    async def hand_over(self):
        self.num_offers += 1
        return self.is_empty


class Clock:
    """Time that passes only in pauses."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        self._sleep = asyncio.sleep
        monkeypatch.setattr("cluster.edge.departure.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("cluster.edge.departure.asyncio.sleep", self.sleep)

    async def sleep(self, seconds):
        self.now_s += seconds
        await self._sleep(0)


@pytest.mark.parametrize(
    ("has_successor", "num_refusals", "num_offers"),
    [(True, 2, 3), (False, 2, 0), (True, 10**6, 200)],
)
def test_the_end_waits_for_a_successor_within_the_drain(
    monkeypatch, has_successor, num_refusals, num_offers
):
    Clock(monkeypatch)

    async def run():
        archive = Archive(num_refusals)
        departure = Departure(drain_s=100.0)

        async def has_other():
            return has_successor

        await departure.finish(archive, has_other)
        assert archive.num_offers == num_offers

    asyncio.run(run())


def test_requests_have_the_drain_time_to_end(monkeypatch):
    clock = Clock(monkeypatch)

    class Interrupt:
        def trigger(self, error):
            self.ended_s = clock.now_s

    async def run():
        departure = Departure(drain_s=10.0)
        interrupt = Interrupt()
        departure.open_requests.add(interrupt)
        archive = Archive()
        departure.begin(archive)
        departure.begin(archive)
        for _ in range(100):
            await clock._sleep(0)
        assert interrupt.ended_s == 10.0
        assert archive.num_offers == 22

    asyncio.run(run())
