"""Responses in the background, their input items, and responses of other ingresses."""

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.resolve import resolve
from cluster.config.schema import IngressConfig
from cluster.edge.openai import Usage
from cluster.edge.responses.archive import QUESTION, Lookup, Origin, response_archive
from cluster.edge.responses.input_items import input_items, item_page
from cluster.edge.routes import create_app
from cluster.errors import BadRequestError, ReplicaLostError
from cluster.ingress import Ingress
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_responses import PATH, Server
from tests.cluster.edge.test_routes import Client
from tests.cluster.edge.test_tool_calls import EchoBackend, ToolBackend
from tests.cluster.engines import KEYS, model_folder


class SlowBackend(FakeBackend):
    """A model that says "he", and "llo" once it may."""

    def __init__(self):
        super().__init__(self.say)
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()
        self.has_ended = asyncio.Event()
        self.error = None

    async def say(self, request, emit):
        await self.may_begin.wait()
        await emit(OutputDelta(0, "he", [1]))
        try:
            await self.may_end.wait()
        finally:
            self.has_ended.set()
        if self.error is not None:
            raise self.error
        await emit(OutputDelta(0, "llo", [2], "stop"))
        return Usage(len(request.prompt_token_ids), 2)


class Ingresses:
    """Peers of several archives."""

    def __init__(self):
        self.archives = []
        self.num_questions = 0

    async def ask_all(self, question, payload, timeout_s):
        assert question == QUESTION
        self.num_questions += 1
        return [await archive.answer(payload) for archive in self.archives]


class Application:
    """An application in the running event loop."""

    def __init__(self, backend, archive=None, **ingress):
        self.archive = archive or response_archive(2**20, 100.0)
        self._app = create_app(
            backend, IngressConfig(**ingress), version="1", responses=self.archive
        )

    async def ask(self, method, path, body=b"", status=200):
        client = await Client(self._app).request(method, path, body)
        assert client.status == status, client.body
        return client.body

    async def start(self, **fields):
        body = {"model": "demo", "input": "hi", "background": True, **fields}
        return await self.ask("POST", PATH, body)


def two_ingresses(backend, peers):
    """Return applications that ask each other, one with the model and one beside it."""
    found = [
        Application(each, response_archive(2**20, 100.0, peers))
        for each in (backend, FakeBackend())
    ]
    peers.archives = [each.archive for each in found]
    return found


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def texts(response):
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_a_response_in_the_background_is_read_until_it_is_complete():
    async def run():
        backend = SlowBackend()
        app = Application(backend)
        started = await app.start(metadata={"a": "b"})
        assert (started["status"], started["background"]) == ("queued", True)
        assert (started["output"], started["usage"]) == ([], None)
        path = f"{PATH}/{started['id']}"
        assert await app.ask("GET", path) == started
        backend.may_begin.set()
        await settle()
        running = await app.ask("GET", path)
        assert (running["status"], texts(running)) == ("in_progress", [])
        continued = {"model": "demo", "input": "x", "previous_response_id": started["id"]}
        refused = await app.ask("POST", PATH, continued, 400)
        assert refused["error"]["param"] == "previous_response_id"
        assert "in_progress" in refused["error"]["message"]
        backend.may_end.set()
        await settle()
        ended = await app.ask("GET", path)
        assert (ended["status"], texts(ended)) == ("completed", ["hello"])
        assert ended["usage"]["output_tokens"] == 2
        assert await app.ask("POST", f"{path}/cancel") == ended
        await app.ask("POST", PATH, continued)

    asyncio.run(run())


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("action", ["cancel", "delete", "close"])
def test_a_response_in_the_background_can_be_ended(action, has_begun):
    async def run():
        backend = SlowBackend()
        app = Application(backend)
        path = f"{PATH}/{(await app.start())['id']}"
        if has_begun:
            backend.may_begin.set()
        await settle()
        assert backend.num_open == 1
        if action == "delete":
            assert (await app.ask("DELETE", path))["deleted"] is True
            await app.ask("GET", path, status=404)
        else:
            if action == "cancel":
                cancelled = await app.ask("POST", f"{path}/cancel")
            else:
                await app.archive.close()
                cancelled = await app.ask("GET", path)
            assert (cancelled["status"], cancelled["completed_at"]) == ("cancelled", None)
            assert texts(cancelled) == (["he"] if has_begun else [])
            assert await app.ask("GET", path) == cancelled
            assert await app.ask("POST", f"{path}/cancel") == cancelled
        assert backend.num_open == 0
        assert await app.ask("GET", "/load") == {"server_load": 0}

    asyncio.run(run())


def test_a_response_that_is_cancelled_at_once_is_ended():
    async def run():
        app = Application(SlowBackend())
        started = await app.start()
        path = f"{PATH}/{started['id']}"
        assert (await app.ask("POST", f"{path}/cancel"))["status"] == "cancelled"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "code"),
    [(ReplicaLostError("the replica died"), "replica_lost"), (None, "request_timeout")],
)
def test_a_response_in_the_background_that_fails_shows_its_error(error, code):
    async def run():
        backend = SlowBackend()
        app = Application(backend, request_timeout_s=60 if error else 0.01)
        path = f"{PATH}/{(await app.start())['id']}"
        backend.may_begin.set()
        if error is not None:
            backend.error = error
            backend.may_end.set()
        await backend.has_ended.wait()
        await settle()
        failed = await app.ask("GET", path)
        assert (failed["status"], texts(failed)) == ("failed", ["he"])
        assert failed["error"]["code"] == code
        assert backend.num_open == 0

    asyncio.run(run())


def test_responses_in_the_background_count_as_open_requests():
    async def run():
        backend = SlowBackend()
        app = Application(backend, max_ongoing_requests=2)
        first = await app.start()
        assert await app.ask("GET", "/load") == {"server_load": 1}
        body = {"model": "demo", "input": "hi", "background": True}
        await app.ask("POST", PATH, body, 429)
        await app.ask("POST", f"{PATH}/{first['id']}/cancel")
        await app.start()

    asyncio.run(run())


def test_the_background_needs_a_stored_answer():
    error = Server(FakeBackend()).refusal(background=True, store=False)
    assert error["param"] == "background"
    assert "store" in error["message"]


def test_an_answer_that_is_larger_than_the_store_is_read_as_failed():
    async def run():
        backend = ToolBackend("x" * 5000, size=1000)
        app = Application(backend, response_archive(4500, 100.0))
        first = await app.start()
        await settle()
        found = await app.ask("GET", f"{PATH}/{first['id']}")
        assert (found["status"], found["output"], found["store"]) == ("failed", [], True)
        assert found["error"]["code"] == "response_too_large"
        error = (await app.ask("POST", PATH, too_large, 400))["error"]
        assert error["param"] == "background"
        assert len(backend.requests) == 1

    too_large = {"model": "demo", "input": "y" * 3500, "background": True}
    asyncio.run(run())


def test_a_large_answer_in_the_background_is_kept_without_its_conversation():
    async def run():
        app = Application(ToolBackend("x" * 5000, size=1000), response_archive(15_000, 100.0))
        first = await app.start()
        await settle()
        path = f"{PATH}/{first['id']}"
        found = await app.ask("GET", path)
        assert (found["status"], texts(found)) == ("completed", ["x" * 5000])
        error = (await app.ask("GET", f"{path}/input_items", status=404))["error"]
        assert "without its conversation" in error["message"]
        body = {"model": "demo", "input": "more", "previous_response_id": first["id"]}
        error = (await app.ask("POST", PATH, body, 400))["error"]
        assert error["param"] == "previous_response_id"
        assert "send the whole conversation" in error["message"]

    asyncio.run(run())


# --- several ingresses ----------------------------------------------------------------------------


def test_any_ingress_has_the_responses_of_all():
    async def run():
        peers = Ingresses()
        backends = [EchoBackend(), EchoBackend()]
        apps = [Application(each, response_archive(2**20, 100.0, peers)) for each in backends]
        peers.archives = [app.archive for app in apps]
        one, other = apps
        first = await one.ask("POST", PATH, {"model": "demo", "input": "one"})
        path = f"{PATH}/{first['id']}"
        assert await other.ask("GET", path) == first
        second = {"model": "demo", "input": "two", "previous_response_id": first["id"]}
        second = await other.ask("POST", PATH, second)
        assert texts(second) == ["[user]one[assistant][user]one[assistant][user]two[assistant]"]
        reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
        await other.ask("POST", PATH, {"model": "demo", "input": reference})
        assert len((await one.ask("GET", f"{PATH}/{second['id']}/input_items"))["data"]) == 3
        await other.ask("DELETE", path)
        await one.ask("GET", path, status=404)
        num_questions = peers.num_questions
        await one.ask("GET", f"{PATH}/made-up", status=404)
        assert peers.num_questions == num_questions
        # A lost ingress loses its responses.
        peers.archives.remove(other.archive)
        await one.ask("GET", f"{PATH}/{second['id']}", status=404)

    asyncio.run(run())


def test_any_ingress_cancels_a_response_in_the_background():
    async def run():
        peers = Ingresses()
        backend = SlowBackend()
        one, other = two_ingresses(backend, peers)
        path = f"{PATH}/{(await one.start())['id']}"
        await settle()
        assert (await other.ask("GET", path))["status"] == "queued"
        assert (await other.ask("POST", f"{path}/cancel"))["status"] == "cancelled"
        assert backend.num_open == 0

    asyncio.run(run())


async def test_an_ingress_answers_its_peers_about_responses():
    config = resolve({"model": str(model_folder()), "pools": {"both": {}}})
    ingress = Ingress(config, KEYS)
    response_id = f"resp_{'a' * 32}"
    try:
        ingress.responses.keep(Origin("own", response_id), {"output": []})
        for tenant, is_found in (("own", True), ("other", False)):
            payload = msgspec.msgpack.encode(Lookup("read", tenant, response_id))
            assert bool(await ingress.answer_peer(QUESTION, payload)) is is_found
    finally:
        await ingress.close()


# --- input items ----------------------------------------------------------------------------------


def test_input_items_are_those_of_the_whole_conversation():
    server = Server(EchoBackend())
    first = server.answer(input="one", instructions="Brief.", max_output_tokens=5)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    second = server.answer(input=items, previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    page = server.request("GET", path, headers=()).body
    key = second["id"].removeprefix("resp_")
    assert page == {
        "object": "list",
        "data": [
            {
                "id": f"msg_{key}_in_2",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": "two"}],
            },
            first["output"][0],
            {
                "id": f"msg_{key}_in_0",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": "one"}],
            },
        ],
        "first_id": f"msg_{key}_in_2",
        "last_id": f"msg_{key}_in_0",
        "has_more": False,
    }
    assert server.request("GET", f"{path}?order=asc&limit=1").body["has_more"] is True
    assert server.request("GET", f"{PATH}/resp_1/input_items").status == 404


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit", "0"), ("limit", "101"), ("limit", "x"), ("limit", ""), ("order", "up"),
     ("after", "msg_none")],
)  # fmt: skip
def test_a_wrong_page_of_input_items_is_refused(name, value):
    with pytest.raises(BadRequestError) as raised:
        item_page([{"id": "a"}], {name: value})
    assert raised.value.param == name


@given(
    num=st.integers(0, 30),
    num_outputs=st.integers(0, 3),
    limit=st.integers(1, 10),
    order=st.sampled_from(["asc", "desc"]),
)
def test_pages_give_every_input_item_once(num, num_outputs, limit, order):
    every = [{"role": "user", "content": str(i)} for i in range(num + num_outputs)]
    items = input_items([json.dumps(every).encode()], num_outputs, "resp_a")
    seen, query = [], {"limit": str(limit), "order": order}
    while True:
        page = item_page(items, query)
        seen += page["data"]
        assert len(page["data"]) <= limit
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert seen == (items if order == "asc" else items[::-1])
    assert [item["content"][0]["text"] for item in items] == [str(i) for i in range(num)]
