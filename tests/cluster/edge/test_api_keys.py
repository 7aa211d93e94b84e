import asyncio
import contextlib
import json
import os

import pytest

from cluster.config.schema import IngressConfig
from cluster.edge import api_keys as api_keys_module
from cluster.edge.api_keys import ApiKeys, new_key, parse_keys, shared_key_entry
from cluster.edge.client_guard import ClientGuard
from cluster.edge.route_table import ROUTES
from cluster.edge.routes import create_app
from cluster.errors import AuthenticationError, ClusterConfigError
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import ask, connect, poll, request_bytes, serving
from tests.cluster.edge.test_routes import OPERATOR, Client

KEY, LINE = new_key()
ADMIN_KEY, ADMIN_LINE = new_key()
OTHER_KEY, OTHER_LINE = new_key()
FILE = f"""
alice: {{keys: ["{LINE}"], models: [demo]}}
bob: {{keys: ["{OTHER_LINE}"], models: [adapter]}}
ops: {{keys: ["{ADMIN_LINE}"], admin: true}}
"""
UNAUTHORIZED = {
    "error": {
        "message": "no valid API key; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        "type": "AuthenticationError",
        "param": None,
        "code": "invalid_api_key",
    }
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    return file


@pytest.fixture
def api_keys(path):
    return ApiKeys(str(path))


def bearer(key):
    return ("authorization", f"Bearer {key}")


def call(api_keys, method, target, headers=(), service=None, body=b""):
    app = create_app(service or FakeBackend(), IngressConfig(), version="1", api_keys=api_keys)
    return asyncio.run(Client(app).request(method, target, body, headers))


# --- which key a request shows --------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", f"Bearer {KEY}")],
        [(b"authorization", f"bearer   {KEY} ")],
        [(b"x-api-key", KEY)],
        [(b"authorization", "Basic abc"), (b"x-api-key", KEY)],
        [(b"authorization", f"Bearer {KEY}"), (b"x-api-key", "wrong")],
        [(b"authorization", f"Bearer {KEY}")] * 2,
    ],
)
def test_a_key_is_found_in_either_header(api_keys, headers):
    assert api_keys.authenticate([(n, v.encode()) for n, v in headers]).name == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
        [(b"authorization", b"Bearer " + LINE.encode())],
        [(b"authorization", b"Bearer \xff")],
        [(b"x-api-key", KEY.encode() * 1000)],
        [(b"x-api-key", KEY.encode()), (b"x-api-key", OTHER_KEY.encode())],
        [(b"authorization", b"Bearer wrong"), (b"x-api-key", KEY.encode())],
    ],
)
def test_a_wrong_missing_or_malformed_key_gets_one_answer(api_keys, headers):
    with pytest.raises(AuthenticationError) as caught:
        api_keys.authenticate(headers)
    assert caught.value.message == UNAUTHORIZED["error"]["message"]


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "must map names"),
        ("[]", "must map names"),
        ("a: [", "this is not YAML"),
        (f"a: {{keys: ['{LINE}']}}\na: {{keys: ['{OTHER_LINE}']}}", "a name twice"),
        (f"a: {{keys: ['{LINE}']}}\nb: {{keys: ['{LINE}']}}", "b.keys[0] is there twice"),
        (f"a: {{keys: ['{LINE[:-1]}']}}", "a.keys[0] must be sha256:"),
        (f"a: {{keys: ['{KEY}']}}", "a.keys[0] must be sha256:"),
        ("a: {}", "missing required field `keys`"),
        (f"a: {{keys: ['{LINE}'], wizard: true}}", "unknown field `wizard`"),
        (f"1: {{keys: ['{LINE}']}}", "name has 1 to 128"),
        (f"'a b': {{keys: ['{LINE}']}}", "name has 1 to 128"),
        (f"2024-13-45: {{keys: ['{LINE}']}}", "this is not YAML"),
        (f"a: {{keys: ['{LINE}'], max_requests: {'9' * 5000}}}", "this is not YAML"),
        (f"a: {{keys: ['{LINE}'], admin: !!bool maybe}}", "this is not YAML"),
        ("[" * 1_000_000, "this is not YAML"),
        ("- " * 1_000_000, "this is not YAML"),
    ],
    ids=range(16),  # each process has other keys
)
def test_a_bad_file_is_refused_and_its_keys_are_not_shown(text, part):
    with pytest.raises(ClusterConfigError) as caught:
        parse_keys(text, "keys.yaml")
    assert part in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_file_that_others_can_change_is_refused(path):
    path.chmod(0o666)
    with pytest.raises(ClusterConfigError, match="other users can change it"):
        ApiKeys(str(path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ClusterConfigError, match="No such file"):
        ApiKeys(str(tmp_path / "none"))


def test_a_changed_file_acts_and_a_broken_one_keeps_the_keys(path, api_keys):
    def is_valid(key):
        with contextlib.suppress(AuthenticationError):
            return api_keys.authenticate([(b"x-api-key", key.encode())]).name
        return None

    def write(text):
        new = path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, path)
        api_keys.refresh()

    write(f"carol: {{keys: ['{OTHER_LINE}']}}")
    assert (is_valid(KEY), is_valid(OTHER_KEY)) == (None, "carol")
    write("carol: {keys: [")
    api_keys.refresh()
    assert (is_valid(OTHER_KEY), api_keys.num_failed_reads) == ("carol", 1)
    path.unlink()
    api_keys.refresh()
    assert (is_valid(OTHER_KEY), api_keys.num_failed_reads) == ("carol", 2)
    write(FILE)
    assert (is_valid(KEY), is_valid(OTHER_KEY)) == ("alice", "bob")


def test_an_error_of_any_kind_does_not_end_the_rereading(path, api_keys, monkeypatch):
    class Stopped(BaseException):
        pass

    checks = iter([OSError("disk"), None, Stopped()])

    path.write_text(f"carol: {{keys: ['{OTHER_LINE}']}}")
    monkeypatch.setattr("time.sleep", lambda _: None)
    refresh = api_keys.refresh

    def refresh_or_fail():
        error = next(checks)
        if error is not None:
            raise error
        refresh()

    monkeypatch.setattr(api_keys, "refresh", refresh_or_fail)
    with pytest.raises(Stopped):
        api_keys.follow()
    assert api_keys.num_failed_reads == 1
    assert api_keys.authenticate([(b"x-api-key", OTHER_KEY.encode())]).name == "carol"


def test_a_refused_file_is_read_again_when_its_mode_is_mended(path, api_keys):
    new = path.with_suffix(".new")
    new.write_text(f"carol: {{keys: ['{OTHER_LINE}']}}")
    new.chmod(0o660)
    os.replace(new, path)
    api_keys.refresh()
    assert api_keys.num_failed_reads == 1
    path.chmod(0o640)
    api_keys.refresh()
    assert api_keys.authenticate([(b"x-api-key", OTHER_KEY.encode())]).name == "carol"


def test_a_read_that_failed_is_tried_again(path, api_keys, monkeypatch):
    read = api_keys_module.read_keys
    path.write_text(f"carol: {{keys: ['{OTHER_LINE}']}}")

    def fails(where):
        raise ClusterConfigError(f"{where}: Input/output error")

    monkeypatch.setattr(api_keys_module, "read_keys", fails)
    for _ in range(2):
        api_keys.refresh()
    assert api_keys.num_failed_reads == 1  # of one version of the file
    monkeypatch.setattr(api_keys_module, "read_keys", read)
    api_keys.refresh()
    assert api_keys.authenticate([(b"x-api-key", OTHER_KEY.encode())]).name == "carol"


@pytest.mark.parametrize("key", [" a", "a ", "a\tb", "a" * 257, "ü", "a\nb", "\n"])
def test_a_shared_key_that_no_request_can_show_is_refused(key):
    with pytest.raises(ClusterConfigError, match="an API key must have"):
        shared_key_entry(key)


def test_the_newline_of_a_secrets_file_is_no_part_of_a_shared_key():
    assert shared_key_entry("a b\r\n") == shared_key_entry("a b")


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ROUTES, ids=lambda spec: spec.path)
def test_every_route_but_health_checks_needs_a_key(api_keys, spec):
    target = spec.path.replace("{model_id:path}", "demo").replace("{request_id:path}", "r")
    client = call(api_keys, spec.method, target, OPERATOR)
    probes = {"/health", "/live", "/ping", "/v2/health/ready", "/v2/health/live"}
    assert (client.status == 401) == (spec.path not in probes)
    if client.status == 401:
        # Other APIs have errors of other forms.
        message = UNAUTHORIZED["error"]["message"]
        assert client.body["error"]["message"] == message
        assert client.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("target", "status", "admin_status"),
    [("/debug/slots", 403, 200), ("/kv", 403, 200), ("/metrics", 200, 200), ("/version", 200, 200)],
)
def test_operations_routes_but_metrics_need_an_admins_key(api_keys, target, status, admin_status):
    assert call(api_keys, "GET", target, [*OPERATOR, bearer(KEY)]).status == status
    assert call(api_keys, "GET", target, [*OPERATOR, bearer(ADMIN_KEY)]).status == admin_status


def test_a_tenant_sees_and_uses_its_models_only(api_keys):
    def answer(key, method, target, **body):
        service = FakeBackend(adapters=["adapter"])
        client = call(api_keys, method, target, [bearer(key)], service, json.dumps(body).encode())
        return client.status, client.body

    def models(key):
        return [card["id"] for card in answer(key, "GET", "/v1/models")[1]["data"]]

    assert [models(key) for key in (KEY, OTHER_KEY, ADMIN_KEY)] == [
        ["demo"], ["adapter"], ["demo", "adapter"]
    ]  # fmt: skip
    for target in ("/v1/completions", "/tokenize"):
        assert answer(KEY, "POST", target, model="demo", prompt="hi")[0] == 200
        refused = answer(KEY, "POST", target, model="adapter", prompt="hi")
        unknown = answer(KEY, "POST", target, model="missing", prompt="hi")
        assert refused[0] == unknown[0] == 404
        assert refused[1]["error"]["message"] == unknown[1]["error"]["message"].replace(
            "missing", "adapter"
        )
    status, body = answer(OTHER_KEY, "POST", "/v1/completions", prompt="hi")
    assert (status, body["model"]) == (200, "adapter")
    assert answer(KEY, "GET", "/v1/models/adapter")[0] == 404


def test_the_tenant_of_a_key_reaches_the_router_and_salts_its_cache(api_keys):
    requests = []
    for key in (KEY, ADMIN_KEY):
        service = FakeBackend()
        headers = [bearer(key), ("x-account", "mallory")]
        assert (
            call(api_keys, "POST", "/v1/completions", headers, service, b'{"prompt":"hi"}').status
            == 200
        )
        requests += service.requests
    assert [request.tenant for request in requests] == ["alice", "ops"]
    assert len({request.cache_salt for request in requests}) == 2


# --- before the body ------------------------------------------------------------------------------


def guarded(api_keys, service):
    app = create_app(service, IngressConfig(), version="1", api_keys=api_keys)
    return ClientGuard(app, is_ingress=True, is_behind_haproxy=True, proof="p", api_keys=api_keys)


def test_a_request_without_a_key_is_answered_before_its_body_arrives(api_keys):
    guard = guarded(api_keys, FakeBackend())
    with serving(guard) as port, contextlib.closing(connect(port)) as client:
        client.sendall(request_bytes(b"", length=10_000_000))
        head = client.recv(4096)
        assert head.startswith(b"HTTP/1.1 401")
        assert (guard.num_bodies, guard.num_shared_bytes) == (0, 0)


def test_a_request_with_a_key_is_served_over_http(api_keys):
    service = FakeBackend()
    with serving(guarded(api_keys, service)) as port:
        status, _ = ask(port, {"prompt": "hi"}, headers=[f"Authorization: Bearer {KEY}"])
        assert status == 200
        poll(lambda: service.requests)
        assert ask(port, {"prompt": "hi"})[0] == 401
    assert [request.tenant for request in service.requests] == ["alice"]


def test_an_open_route_takes_a_body_without_a_key(api_keys):
    with serving(guarded(api_keys, FakeBackend())) as port:
        assert ask(port, {}, path="/ping")[0] == 200


def test_a_key_without_models_is_named_as_the_reason(path):
    path.write_text(f"none: {{keys: ['{LINE}'], models: []}}")
    body = b'{"prompt": "hi"}'
    answer = call(ApiKeys(str(path)), "POST", "/v1/completions", [bearer(KEY)], body=body)
    assert answer.status == 404
    assert answer.body["error"]["message"] == "this API key may use no model that is served here"
