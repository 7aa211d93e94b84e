"""The admin routes over a cluster that records what it is asked for."""

import asyncio
import json

import jsonschema
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.edge.admin import app as admin_app
from cluster.edge.admin.app import create_admin_app
from cluster.edge.admin.cluster import (
    ConflictError,
    OrderFailedError,
    ReplicaUnresponsiveError,
    ReplicaView,
    Target,
)
from cluster.edge.admin.routes import ROUTES, openapi_document
from cluster.edge.api_keys import ApiKeys, new_key
from cluster.errors import NotFoundError
from tests.cluster.edge.test_routes import Client

KEY, LINE = new_key()
ADMIN_KEY, ADMIN_LINE = new_key()
FILE = f"""
alice: {{keys: ["{LINE}"]}}
ops: {{keys: ["{ADMIN_LINE}"], admin: true}}
"""
D1 = ReplicaView(
    replica="decode-1", pool="decode", role="decode", next_role=None, state="ready",
    is_paused=False, slots=8, empty_slots=6, running=1, reserved=1, waiting=0,
)  # fmt: skip
ALL = Target()


class FakeCluster:
    """Records orders; answers with `error` if there is one."""

    def __init__(self, error=None, **changes):
        self.error = error
        self.view = msgspec.structs.replace(D1, **changes)
        self.orders = []

    async def _order(self, *order):
        self.orders.append(order)
        if self.error is not None:
            raise self.error
        return self.view

    async def replicas(self):
        return [self.view]

    async def pause(self, target, mode, *, clear_cache):
        await self._order("pause", target, mode, clear_cache)

    async def resume(self, target):
        await self._order("resume", target)

    async def is_paused(self, target):
        await self._order("is_paused", target)
        return {"decode-1": True, "decode-2": self.view.is_paused}

    async def reset_prefix_cache(self, target, *, reset_running_requests):
        await self._order("reset", target, reset_running_requests)

    async def profile(self, replica, seconds):
        await self._order("profile", replica, seconds)
        return "a;b 3\n"

    async def change_role(self, replica, role):
        return await self._order("role", replica, role)

    async def drain(self, replica):
        return await self._order("drain", replica)

    async def undrain(self, replica):
        return await self._order("undrain", replica)


@pytest.fixture
def api_keys(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return ApiKeys(str(path))


def call(cluster, method, path, body=b"", headers=(), *, api_keys=None, is_loopback=True):
    app = create_admin_app(cluster, api_keys=api_keys, is_loopback=is_loopback, version="1.2.3")
    return asyncio.run(Client(app).request(method, path, body, headers))


def bearer(key):
    return ("authorization", f"Bearer {key}")


def error_of(answer):
    error = answer.body["error"]
    return answer.status, error["code"]


# --- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "order", "status"),
    [
        ("/pause", ("pause", ALL, "abort", True), "paused"),
        ("/pause?mode=keep&clear_cache=false", ("pause", ALL, "keep", False), "paused"),
        ("/pause?pool=decode", ("pause", Target(pool="decode"), "abort", True), "paused"),
        ("/resume?replica=decode-1", ("resume", Target(replica="decode-1")), "resumed"),
        ("/reset_prefix_cache", ("reset", ALL, False), "reset"),
        ("/reset_prefix_cache?reset_running_requests=True", ("reset", ALL, True), "reset"),
    ],
)
def test_orders_to_engines_name_their_target_in_the_query(path, order, status):
    cluster = FakeCluster()
    answer = call(cluster, "POST", path)
    assert (answer.status, answer.body) == (200, {"status": status})
    assert cluster.orders == [order]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=nap", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
        ("/resume?replica=decode-1&pool=decode", "pool"),
        ("/replicas/decode-1/profile?seconds=0", "seconds"),
        ("/replicas/decode-1/profile?seconds=61", "seconds"),
        ("/replicas/decode-1/profile?seconds=nan", "seconds"),
        ("/replicas/decode-1/profile?seconds=long", "seconds"),
    ],
)
def test_orders_with_bad_parameters_are_refused(path, param):
    cluster = FakeCluster()
    answer = call(cluster, "POST", path)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert cluster.orders == []


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_cluster_is_paused_if_every_replica_is(is_paused):
    answer = call(FakeCluster(is_paused=is_paused), "GET", "/is_paused?pool=decode")
    assert answer.status == 200
    assert answer.body == {
        "is_paused": is_paused, "replicas": {"decode-1": True, "decode-2": is_paused}
    }  # fmt: skip


def test_a_profile_is_a_file_to_download():
    cluster = FakeCluster()
    answer = call(cluster, "POST", "/replicas/decode-1/profile?seconds=0.5")
    assert (answer.status, b"".join(answer.chunks)) == (200, b"a;b 3\n")
    assert answer.headers["content-disposition"] == 'attachment; filename="profile.folded"'
    assert cluster.orders == [("profile", "decode-1", 0.5)]


def test_replicas_are_shown_all_together_and_one_by_one():
    whole = call(FakeCluster(), "GET", "/replicas")
    assert (whole.status, whole.body) == (200, {"replicas": [msgspec.to_builtins(D1)]})
    assert call(FakeCluster(), "GET", "/replicas/decode-1").body == msgspec.to_builtins(D1)
    assert error_of(call(FakeCluster(), "GET", "/replicas/decode-9")) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "body", "view", "order", "status"),
    [
        ("drain", b"", {"state": "draining"}, ("drain", "decode-1"), 202),
        ("drain", b"", {"state": "drained"}, ("drain", "decode-1"), 200),
        ("undrain", b"", {}, ("undrain", "decode-1"), 200),
        (
            "role", {"role": "prefill"}, {"next_role": "prefill"},
            ("role", "decode-1", "prefill"), 202,
        ),
        ("role", {"role": "decode"}, {}, ("role", "decode-1", "decode"), 200),
    ],
)  # fmt: skip
def test_a_change_answers_with_the_replica_and_says_whether_it_is_complete(
    path, body, view, order, status
):
    cluster = FakeCluster(**view)
    answer = call(cluster, "POST", f"/replicas/decode-1/{path}", body)
    assert (answer.status, answer.body) == (status, msgspec.to_builtins(cluster.view))
    assert cluster.orders == [order]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"role": "both"}', b'{"role": 1}', b'{"role": "decode", "now": true}',
     b"\xff", b"[" * 60_000],
)  # fmt: skip
def test_a_body_that_is_no_role_is_refused(body):
    cluster = FakeCluster()
    answer = call(cluster, "POST", "/replicas/decode-1/role", body)
    assert error_of(answer) == (400, "bad_request")
    assert cluster.orders == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFoundError("no replica"), 404, "not_found"),
        (ConflictError("another change"), 409, "conflict"),
        (ReplicaUnresponsiveError("silent"), 503, "replica_unresponsive"),
        (OrderFailedError("one did not"), 503, "order_failed"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
def test_errors_of_the_cluster_have_their_status_and_code(error, status, code):
    assert error_of(call(FakeCluster(error), "POST", "/pause")) == (status, code)
    assert error_of(call(FakeCluster(error), "POST", "/replicas/d/drain")) == (status, code)


# --- the checks before every route ----------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_but_liveness_needs_the_key_of_an_admin(api_keys, route):
    cluster = FakeCluster(state="drained")
    path = route.path.replace("{replica}", "decode-1")
    body = {"role": "decode"} if route.body else b""
    found = [
        call(cluster, route.method, path, body, headers, api_keys=api_keys).status
        for headers in ([], [bearer("wrong")], [bearer(KEY)], [bearer(ADMIN_KEY)])
    ]
    of_user = 200 if route.is_for_all_keys else 403
    assert found == ([200] * 4 if route.is_open else [401, 401, of_user, 200])
    assert len(cluster.orders) <= 1


@pytest.mark.parametrize(
    ("host", "is_loopback", "status"),
    [
        ("localhost:8002", True, 200),
        ("[::1]:8002", True, 200),
        ("evil.example", True, 421),
        ("evil.example", False, 200),
    ],
)
def test_a_loopback_server_answers_to_loopback_names_alone(host, is_loopback, status):
    answer = call(FakeCluster(), "POST", "/pause", b"", [("host", host)], is_loopback=is_loopback)
    assert answer.status == status


def test_what_a_web_page_can_send_without_asking_is_refused():
    cluster = FakeCluster()
    form = [("content-type", "text/plain")]
    for path in ("/pause", "/replicas/decode-1/drain"):
        assert error_of(call(cluster, "POST", path, b"", form)) == (415, "unsupported_media_type")
    page = call(cluster, "GET", "/replicas", headers=[("origin", "https://evil.example")])
    assert "access-control-allow-origin" not in page.headers
    assert cluster.orders == []


def test_wrong_methods_and_paths_have_the_form_of_other_errors():
    answer = call(FakeCluster(), "GET", "/pause")
    assert error_of(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    assert error_of(call(FakeCluster(), "POST", "/replicas")) == (405, "method_not_allowed")
    assert error_of(call(FakeCluster(), "GET", "/v1/models")) == (404, "not_found")
    assert error_of(call(FakeCluster(), "GET", "/replicas/")) == (404, "not_found")


def test_a_body_that_is_too_large_is_refused():
    cluster = FakeCluster()
    large = b" " * (admin_app.MAX_BODY_BYTES + 1)
    assert error_of(call(cluster, "POST", "/pause", large)) == (413, "payload_too_large")
    assert cluster.orders == []


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(admin_app, "BODY_S", 0.01)

    async def slow():
        app = create_admin_app(FakeCluster(), api_keys=None, is_loopback=True, version="1")
        client = Client(app)

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            client.status = message.get("status", client.status)

        scope = {
            "type": "http", "method": "POST", "path": "/pause", "raw_path": b"/pause",
            "root_path": "", "query_string": b"", "scheme": "http", "http_version": "1.1",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await app(scope, receive, send)
        return client.status

    assert asyncio.run(slow()) == 408


# --- the audit log --------------------------------------------------------------------------------


def logged(caplog):
    return [
        json.loads(record.getMessage().removeprefix("admin call "))
        for record in caplog.records
        if record.name == "ttserve.audit"
    ]


@pytest.mark.parametrize(
    ("headers", "tenant", "status"),
    [
        ([bearer(ADMIN_KEY)], "ops", 503),
        ([bearer(KEY)], "alice", 403),
        ([bearer("wrong")], "", 401),
        ([], "", 401),
    ],
)
def test_a_call_that_changes_the_cluster_is_logged_also_if_refused(
    api_keys, caplog, headers, tenant, status
):  # fmt: skip
    cluster = FakeCluster(OrderFailedError("one did not"))
    named = [*headers, ("x-request-id", "r1")]
    answer = call(cluster, "POST", "/pause?mode=keep", b'"secret"', named, api_keys=api_keys)
    assert answer.status == status
    [line] = logged(caplog)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "tenant": tenant, "source": "test", "request_id": "r1",
        "call": "POST /pause?mode=keep", "status": status,
    }  # fmt: skip
    assert "secret" not in caplog.text
    assert ADMIN_KEY not in caplog.text


def test_the_line_of_a_change_of_role_names_the_role(api_keys, caplog):
    body = {"role": "prefill"}
    call(FakeCluster(), "POST", "/replicas/d/role", body, [bearer(ADMIN_KEY)], api_keys=api_keys)
    [line] = logged(caplog)
    assert (line["call"], line["role"]) == ("POST /replicas/d/role", "prefill")


def test_calls_that_change_nothing_are_not_logged(caplog):
    for path in ("/replicas", "/is_paused", "/live", "/openapi.json"):
        assert call(FakeCluster(), "GET", path).status == 200
    assert logged(caplog) == []


# --- metrics --------------------------------------------------------------------------------------


def test_calls_are_counted_by_route_and_status(api_keys):
    cluster = FakeCluster(ConflictError("another change"))
    app = create_admin_app(cluster, api_keys=api_keys, is_loopback=True, version="1")

    def get(method, path, *headers):
        return asyncio.run(Client(app).request(method, path, b"", headers))

    for key in (KEY, ADMIN_KEY, ADMIN_KEY):
        get("POST", "/replicas/decode-1/drain", bearer(key))
    get("GET", "/replicas", bearer(ADMIN_KEY))
    get("GET", "/replicas/made-up/path", bearer(ADMIN_KEY))
    answer = get("GET", "/metrics", bearer(KEY))
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(b"".join(answer.chunks).decode())
    counted = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "ttserve_admin_requests_total"
    }
    assert counted == {("drain", "403"): 1, ("drain", "409"): 2, ("replicas", "200"): 1}


# --- the document ---------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_answers_and_errors_are_as_documented(route):
    document = openapi_document("1", has_keys=False)
    operation = document["paths"][route.path][route.method.lower()]
    path = route.path.replace("{replica}", "decode-1")
    body = {"role": "decode"} if route.body else b""
    for error in (None, NotFoundError("none"), ReplicaUnresponsiveError("silent")):
        for state in ("draining", "drained"):
            answer = call(FakeCluster(error, state=state), route.method, path, body)
            content = operation["responses"][str(answer.status)].get("content")
            if content is not None:
                schema = content["application/json"]["schema"]
                whole = {**schema, "components": document["components"]}
                jsonschema.validate(answer.body, whole)
