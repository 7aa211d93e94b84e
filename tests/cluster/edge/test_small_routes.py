"""Probes under other names, the load, and paths below a root path."""

import asyncio

import pytest

from cluster.errors import ReplicaLostError
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import OPERATOR, Client, call, make_app


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/ping"), ("POST", "/ping"), ("GET", "/v2/health/ready"), ("GET", "/v2/health/live")],
)
def test_other_names_of_the_probes(method, path):
    service = FakeBackend()
    assert call(service, method, path).status == 200
    service.ready = (False, "no replica")
    assert call(service, method, path).status == (200 if path.endswith("live") else 503)


async def test_the_load_is_the_number_of_open_requests():
    opened, release = asyncio.Event(), asyncio.Event()

    async def script(request, emit):
        opened.set()
        await release.wait()
        raise ReplicaLostError("gone")

    app = make_app(FakeBackend(script))
    asking = asyncio.create_task(Client(app).request("POST", "/v1/completions", {"prompt": "a"}))
    await opened.wait()
    assert (await Client(app).request("GET", "/load")).body == {"server_load": 1}
    release.set()
    await asking
    assert (await Client(app).request("GET", "/load")).body == {"server_load": 0}


@pytest.mark.parametrize("path", ["/llm/v1/completions", "/v1/completions"])
def test_a_path_is_served_with_the_root_path_and_without_it(path):
    answer = call(FakeBackend(), "POST", path, {"prompt": "a"}, root_path="/llm")
    assert answer.body["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("path", "root_path", "status"),
    [
        ("/llm/health", "/llm", 200),
        ("/llm/health", "", 404),
        ("/llmx/health", "/llm", 404),
        ("/llm/llm/health", "/llm", 404),
        ("/llm/metrics", "/llm", 404),
        ("/llm", "/llm", 404),
    ],
    ids=["below", "no-root-path", "other", "twice", "operations", "root"],
)
def test_only_what_is_below_the_root_path_is_served_there(path, root_path, status):
    assert call(FakeBackend(), "GET", path, root_path=root_path).status == status


def test_operators_and_the_document_know_the_root_path():
    answer = call(FakeBackend(), "GET", "/llm/metrics", headers=OPERATOR, root_path="/llm")
    assert answer.status == 200
    document = call(FakeBackend(), "GET", "/llm/openapi.json", root_path="/llm").body
    assert document["servers"] == [{"url": "/llm"}]
    assert "servers" not in call(FakeBackend(), "GET", "/openapi.json").body


def test_errors_below_the_root_path_have_the_form_of_their_api():
    answer = call(FakeBackend(), "POST", "/llm/v1/messages", {}, root_path="/llm")
    assert (answer.status, answer.body["type"]) == (400, "error")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/llm/v1/completions/"), ("GET", "/health/"), ("GET", "/docs/")]
)
def test_no_path_with_a_final_slash_is_redirected(method, path):
    answer = call(FakeBackend(), method, path, {}, root_path="/llm")
    assert (answer.status, "location" in answer.headers) == (404, False)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("PUT", "/ping", "GET, HEAD, POST"),
        ("GET", "/v1/completions", "POST"),
    ],
)
def test_a_wrong_method_is_answered_with_all_methods_of_its_path(method, path, allowed):
    answer = call(FakeBackend(), method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
