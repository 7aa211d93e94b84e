"""Web pages of other origins: none by default, those of `cors_origins` with it."""

import asyncio

import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.route_table import ROUTES
from cluster.edge.routes import create_app
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import OPERATOR, Client

ORIGIN = "https://chat.example.com"
PREFLIGHT = [
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type"),
]


def ask(origin, method="POST", headers=(), origins=(ORIGIN,)):
    app = create_app(FakeBackend(), IngressConfig(cors_origins=list(origins)), version="1")
    named = [("origin", origin), *headers]
    return asyncio.run(Client(app).request(method, "/v1/completions", {"prompt": "hi"}, named))


def test_a_browser_may_ask_and_read_for_a_page_of_a_named_origin():
    preflight = ask(ORIGIN, "OPTIONS", PREFLIGHT)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = ask(ORIGIN)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]


def test_a_page_of_another_origin_gets_no_permission():
    assert ask("https://evil.example", "OPTIONS", PREFLIGHT).status == 400
    assert "access-control-allow-origin" not in ask("https://evil.example").headers


def test_without_origins_nothing_speaks_cors():
    assert ask(ORIGIN, "OPTIONS", PREFLIGHT, origins=()).status == 405
    answer = ask(ORIGIN, origins=())
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_error_can_be_read_too():
    app = create_app(FakeBackend(), IngressConfig(cors_origins=[ORIGIN]), version="1")
    client = Client(app)
    asyncio.run(client.request("POST", "/v1/completions", {"prompt": 1.5}, [("origin", ORIGIN)]))
    assert (client.status, client.headers["access-control-allow-origin"]) == (400, ORIGIN)


OPERATIONS_ROUTES = [spec for spec in ROUTES if spec.listener == "operations"]


@pytest.mark.parametrize(("origin", "root_path"), [(ORIGIN, "/llm"), ("*", "")])
def test_no_page_may_use_a_route_of_operators(origin, root_path):
    ingress = IngressConfig(cors_origins=[origin], root_path=root_path)
    app = create_app(FakeBackend(), ingress, version="1")

    async def check(path, method, headers):
        named = [("origin", ORIGIN), *OPERATOR, *headers]
        answer = await Client(app).request(method, path, b"", named)
        assert not [name for name in answer.headers if name.startswith("access-control")], path
        assert (answer.status == 405) == (method == "OPTIONS"), path

    async def check_all():
        for spec in OPERATIONS_ROUTES:
            path = root_path + spec.path.replace("{request_id:path}", "a/b")
            await check(path, spec.method, ())
            await check(path, "OPTIONS", PREFLIGHT)

    asyncio.run(check_all())


def test_a_page_may_read_the_names_of_ignored_fields_and_both_ids_of_a_request():
    exposed = ask(ORIGIN).headers["access-control-expose-headers"].split(", ")
    assert {"x-ttserve-ignored-fields", "request-id", "x-request-id"} <= set(exposed)
