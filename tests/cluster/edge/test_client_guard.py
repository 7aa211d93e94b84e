"""Slow, greedy and lying clients against the client guard, on a real socket."""

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import threading
import warnings

import pytest
from starlette.responses import Response

from cluster.config.schema import IngressConfig
from cluster.edge.boundary import with_boundary
from cluster.edge.client_guard import (
    ClientLimits,
    ingress_middlewares,
    proxy_middlewares,
    source_of,
)
from cluster.edge.headers import DISABLE_SERVE_WATCH
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend, flood
from tests.cluster.edge.http_server import (
    OF_SERVE,
    NamesOfHeaders,
    answer,
    ask,
    connect,
    poll,
    request_bytes,
    serving,
)

HI = {"prompt": "hi"}
LARGE_ANSWER = 12 * 2**20
"""More than the kernel keeps for a client that does not read."""
QUICK = ClientLimits(body_timeout_s=1.0, write_timeout_s=0.5)


def make_app(service, *, max_body_bytes=2**20, request_timeout_s=60):
    return create_app(
        service,
        IngressConfig(max_body_bytes=max_body_bytes, request_timeout_s=request_timeout_s),
        version="0",
    )


@contextlib.contextmanager
def serve_guarded(make_middlewares, app, limits=QUICK):
    """Built as Serve does, but for the limits."""
    [middleware] = make_middlewares()
    guard = middleware.cls(app, limits, **middleware.kwargs)
    with serving(guard) as port:
        yield guard, port


@pytest.fixture(autouse=True)
def _no_ray_token(monkeypatch):
    """Leave out the proof that a request came through HAProxy, which is not here."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture(
    params=[proxy_middlewares, ingress_middlewares], ids=["of a proxy", "of an ingress"]
)
def guarded(request):
    def make(limits=QUICK, app=None):
        return serve_guarded(request.param, app or make_app(FakeBackend()), limits)

    return make


def test_hundreds_of_slow_bodies_get_408_and_leave_others_served(guarded):
    with guarded() as (guard, port), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(contextlib.closing(connect(port))) for _ in range(400)]
        for client in slow:
            client.sendall(request_bytes(b"{", length=500))
        poll(lambda: guard.num_bodies > 0, "bodies are read")
        assert ask(port, HI)[0] == 200
        answers = [answer(client) for client in slow]
        assert {status for status, _ in answers} == {408}
        error = json.loads(answers[0][1])["error"]
        assert (error["type"], error["code"]) == ("TimeoutError", "body_timeout")
        poll(lambda: guard.num_bodies == 0, "no body is left")


def test_a_refused_body_gives_its_share_back_before_its_rest_is_read(guarded):
    limits = ClientLimits(max_body_bytes=150_000, free_bytes=1000, body_timeout_s=20)
    with guarded(limits) as (guard, port), contextlib.closing(connect(port)) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head + b"30000\r\n" + b"x" * 0x20000)
        poll(lambda: guard.num_shared_bytes > 0, "its bytes are counted")
        client.sendall(b"x" * 0x10000)
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert (guard.num_bodies, guard.num_shared_bytes) == (0, 0)
        client.sendall(b"x" * 5)  # the connection is open: the rest is read


def test_a_body_reaches_the_application_only_when_it_is_whole(guarded):
    reached = []
    app = make_app(FakeBackend())

    async def watched(scope, receive, send):
        reached.append(scope["type"])
        await app(scope, receive, send)

    with (
        guarded(ClientLimits(), watched) as (guard, port),
        contextlib.closing(connect(port)) as client,
    ):
        whole = request_bytes(HI)
        client.sendall(whole[:-3])
        poll(lambda: guard.num_bodies == 1, "the body is awaited")
        assert "http" not in reached
        client.sendall(whole[-3:])
        assert answer(client)[0] == 200


def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(guarded):
    with guarded(ClientLimits()) as (guard, port):
        with contextlib.closing(connect(port)) as client:
            client.sendall(request_bytes(b"x" * 200_000, length=300_000))
            poll(lambda: guard.num_shared_bytes > 0, "its bytes are counted")
        poll(lambda: (guard.num_bodies, guard.num_shared_bytes) == (0, 0), "all is given back")


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_request_whose_client_left_while_the_loop_was_busy_is_not_started(how):
    reached, is_busy, have_left = [], threading.Event(), threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            reached.append(scope)
            if not is_busy.is_set():
                is_busy.set()
                have_left.wait(20)
            await Response(b"x")(scope, receive, send)

    with (
        serve_guarded(ingress_middlewares, app, ClientLimits()) as (_, port),
        contextlib.closing(connect(port)) as first,
    ):
        first.sendall(request_bytes(HI))
        assert is_busy.wait(20)
        for _ in range(20):
            with contextlib.closing(connect(port)) as client:
                if how == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(request_bytes(HI))
        have_left.set()
        assert answer(first) == (200, b"x")
        assert ask(port, HI) == (200, b"x")
    assert len(reached) == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_however_it_is_sent(guarded, chunked):
    limits = ClientLimits(max_body_bytes=1000, body_timeout_s=1.0)
    body = b"x" * 1001
    with guarded(limits) as (_, port), contextlib.closing(connect(port)) as client:
        if chunked:
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(head.encode() + b"3e9\r\n" + body + b"\r\n0\r\n\r\n")
        else:
            client.sendall(request_bytes(b"", length=1001))
        status, text = answer(client)
        assert status == 413
        assert json.loads(text)["error"]["code"] == "payload_too_large"


def test_large_bodies_share_bytes_that_small_bodies_do_not_use(guarded):
    limits = ClientLimits(free_bytes=1000, shared_bytes=100_000, num_sources=1)
    with guarded(limits) as (guard, port), contextlib.ExitStack() as stack:
        large = [stack.enter_context(contextlib.closing(connect(port))) for _ in range(2)]
        large[0].sendall(request_bytes(b" " * 90_000, length=95_000))
        poll(lambda: guard.num_shared_bytes == 89_000, "the first is being read")
        large[1].sendall(request_bytes(b" " * 90_000))
        status, text = answer(large[1])
        assert status == 429
        assert json.loads(text)["error"]["code"] == "saturated"
        assert ask(port, HI)[0] == 200
        assert guard.num_shared_bytes == 89_000


def from_address(address):
    """As HAProxy says it of a client."""
    return [f"x-ttserve-source: {address}"]


@pytest.fixture
def behind_haproxy():
    def make(limits):
        app = create_app(FakeBackend(), IngressConfig(), version="0")
        return serve_guarded(ingress_middlewares, app, limits)

    return make


def test_one_source_gets_only_a_part_of_the_shared_bytes(behind_haproxy):
    limits = ClientLimits(free_bytes=1000, shared_bytes=100_000, num_sources=4)
    greedy, honest = from_address("192.0.2.1"), from_address("192.0.2.2")
    with behind_haproxy(limits) as (guard, port), contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(connect(port))) for _ in range(2)]
        held[0].sendall(request_bytes(b" " * 20_000, length=30_000, headers=greedy))
        poll(lambda: guard.num_shared_bytes == 19_000, "the first is being read")
        held[1].sendall(request_bytes(b" " * 20_000, headers=greedy))
        status, text = answer(held[1])
        assert (status, json.loads(text)["error"]["code"]) == (429, "saturated")
        large = json.dumps(HI).encode().ljust(20_000)
        assert ask(port, large, headers=honest)[0] == 200


def test_one_source_has_a_part_of_all_bodies(behind_haproxy):
    greedy, honest = from_address("192.0.2.1"), from_address("192.0.2.2")
    with (
        behind_haproxy(ClientLimits(max_bodies=8, num_sources=4)) as (guard, port),
        contextlib.ExitStack() as stack,
    ):
        held = [stack.enter_context(contextlib.closing(connect(port))) for _ in range(2)]
        for client in held:
            client.sendall(request_bytes(b"{", length=10, headers=greedy))
        poll(lambda: guard.num_bodies == 2, "they are awaited")
        assert ask(port, HI, headers=greedy)[0] == 429
        assert ask(port, HI, headers=honest)[0] == 200


def test_a_delivered_body_uses_no_shared_bytes(behind_haproxy):
    taken, done = threading.Event(), threading.Event()

    async def takes(scope, receive, send):
        if scope["type"] != "http":
            return
        assert len((await receive())["body"]) == 20_000
        taken.set()
        await asyncio.to_thread(done.wait, 20)
        for message in whole_answer():
            await send(message)

    with (
        serve_guarded(ingress_middlewares, takes, ClientLimits(free_bytes=1000)) as (guard, port),
        contextlib.closing(connect(port)) as client,
    ):
        client.sendall(request_bytes(b" " * 20_000))
        assert taken.wait(20)
        held = guard.num_shared_bytes
        done.set()
        assert answer(client) == (200, b"x")
        assert held == 0


def test_an_ingress_reads_no_body_that_its_application_would_refuse(monkeypatch):
    monkeypatch.setenv("TTSERVE_INGRESS", '{"max_body_bytes": 1000}')
    [middleware] = ingress_middlewares()
    guard = middleware.cls(NamesOfHeaders(), *middleware.args, **middleware.kwargs)
    with serving(guard) as port, contextlib.closing(connect(port)) as client:
        client.sendall(request_bytes(b" " * 1001))
        assert answer(client)[0] == 413


ORIGIN = "https://chat.example.com"
SETTINGS = {"cors_origins": [ORIGIN], "root_path": "/llm", "max_body_bytes": 1000}


@contextlib.contextmanager
def of_web_pages(monkeypatch, app, limits=None):
    """The port of a guarded application whose answers web pages may read, below a root path."""
    monkeypatch.setenv("TTSERVE_INGRESS", json.dumps(SETTINGS))
    [middleware] = ingress_middlewares()
    args = middleware.args if limits is None else (limits,)
    with serving(middleware.cls(app, *args, **middleware.kwargs)) as port:
        yield port


def whole_answer_of(port, body, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        named = {"content-type": "application/json", "origin": ORIGIN, **headers}
        connection.request("POST", path, body, named)
        reply = connection.getresponse()
        return reply, json.loads(reply.read())


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize(
    ("path", "error_type", "ids"),
    [
        ("/v1/completions", "BadRequestError", {"x-request-id"}),
        ("/v1/messages", "request_too_large", {"x-request-id", "request-id"}),
        ("/v1/messages/count_tokens", "request_too_large", {"x-request-id", "request-id"}),
    ],
)
def test_a_refusal_has_the_form_of_any_other_error(monkeypatch, root, path, error_type, ids):
    with of_web_pages(monkeypatch, NamesOfHeaders()) as port:
        reply, body = whole_answer_of(port, b" " * 1001, root + path, **{"x-request-id": "job-7"})
    assert (reply.status, body["error"]["type"]) == (413, error_type)
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert reply.headers["connection"] == "close"
    assert {reply.headers[name] for name in ids} == {"job-7"}
    assert body.get("request_id", "job-7") == "job-7"


def test_an_answer_that_cannot_be_held_is_refused_in_the_same_form(monkeypatch):
    async def answers_much(scope, receive, send):
        await Response(b"x" * LARGE_ANSWER)(scope, receive, send)

    app = with_boundary(answers_much, [ORIGIN], "/llm")
    limits = ClientLimits(shared_bytes=LARGE_ANSWER, num_sources=1)
    with (
        of_web_pages(monkeypatch, app, limits) as port,
        contextlib.closing(connect(port, receive_bytes=4096)) as other,
    ):
        other.sendall(request_bytes(b"{}"))
        assert other.recv(1) == b"H"  # Its answer is held until it is read.
        reply, body = whole_answer_of(port, b"{}", "/llm/v1/messages", **{"x-request-id": "job-7"})
    assert (reply.status, body["error"]["type"], body["request_id"]) == (
        529, "overloaded_error", "job-7",
    )  # fmt: skip
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert reply.headers.get_all("x-request-id") == ["job-7"]


class Scopes:
    """An application that answers everything, and keeps each request's scope."""

    def __init__(self):
        self.seen = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            self.seen.append(scope)
            for message in whole_answer():
                await send(message)


def ours(scope):
    return {k.decode(): v.decode() for k, v in scope["headers"] if k.startswith(b"x-ttserve-")}


def test_behind_haproxy_the_source_is_the_one_haproxy_reports():
    app = Scopes()
    told = ["x-ttserve-source: 192.0.2.1", "x-ttserve-listener: operations"]
    with serve_guarded(ingress_middlewares, app) as (_, port):
        ask(port, HI, headers=told)
    assert app.seen[0]["client"][0] == "192.0.2.1"
    assert ours(app.seen[0])["x-ttserve-listener"] == "operations"


async def test_without_haproxy_this_host_alone_may_use_the_operations_routes():
    app = Scopes()
    [middleware] = proxy_middlewares()

    async def stays():
        await asyncio.Event().wait()

    async def swallow(message):
        pass

    async def ask_from(peer, server="10.0.0.5", headers=()):
        guard = middleware.cls(app, QUICK, **middleware.kwargs)
        scope = {"type": "http", "path": "/", "headers": [*headers], "client": (peer, 1)}
        scope["server"] = (server, 80)
        await guard(scope, stays, swallow)
        return ours(app.seen[-1])

    forged = [(b"x-ttserve-listener", b"operations"), (b"x-ttserve-source", b"192.0.2.9")]
    assert await ask_from("192.0.2.1", headers=forged) == {}
    assert await ask_from("127.0.0.1") == {"x-ttserve-listener": "operations"}
    # A proxy on this host that passes on what another host sent.
    forwarded = [(b"x-forwarded-for", b"192.0.2.1")]
    assert await ask_from("127.0.0.1", headers=forwarded) == {}
    assert "x-ttserve-bound" in await ask_from("127.0.0.1", server="127.0.0.1")


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("unix", "unix"),
        ("", ""),
    ],
)
def test_an_ipv6_network_of_64_bits_is_one_source(address, source):
    assert source_of(address) == source


def test_bodies_beyond_the_limit_get_429(guarded):
    with (
        guarded(ClientLimits(max_bodies=1)) as (guard, port),
        contextlib.closing(connect(port)) as first,
    ):
        first.sendall(request_bytes(b"{", length=10))
        poll(lambda: guard.num_bodies == 1, "the first is awaited")
        assert ask(port, HI)[0] == 429


def test_a_large_body_arrives_unchanged(guarded):
    text, service = "x" * 200_000, FakeBackend()
    service.max_model_len = 2**18
    with guarded(app=make_app(service)) as (guard, port):
        status, body = ask(port, {"prompt": text}, path="/tokenize")
        assert (status, json.loads(body)["count"]) == (200, len(text))
        poll(lambda: guard.num_shared_bytes == 0, "all is given back")


def test_an_unread_stream_is_aborted(guarded):
    service = FakeBackend(flood)
    with (
        guarded(app=make_app(service)) as (_, port),
        contextlib.closing(connect(port, receive_bytes=4096)) as client,
    ):
        client.sendall(request_bytes({**HI, "stream": True}))
        poll(lambda: service.num_open == 1, "it streams")
        poll(lambda: service.num_open == 0, "its slot is free")


async def answers_much(scope, receive, send):
    if scope["type"] == "http":
        await Response(b"x" * LARGE_ANSWER)(scope, receive, send)


def test_unread_large_answers_use_the_shared_bytes():
    limits = ClientLimits(shared_bytes=6 * LARGE_ANSWER, num_sources=4)
    greedy, honest = from_address("192.0.2.1"), from_address("192.0.2.2")
    with serve_guarded(ingress_middlewares, answers_much, limits) as (guard, port):
        with contextlib.closing(connect(port, receive_bytes=4096)) as client:
            client.sendall(request_bytes(HI, headers=greedy))
            poll(lambda: guard.num_shared_bytes > 0, "its answer is counted")
            status, text = ask(port, HI, headers=greedy)
            assert (status, json.loads(text)["error"]["code"]) == (429, "saturated")
            status, text = ask(port, HI, headers=honest)
            assert (status, len(text)) == (200, LARGE_ANSWER)
        poll(lambda: guard.num_shared_bytes == 0, "all is given back")
        assert ask(port, HI, headers=greedy)[0] == 200


def test_an_answer_that_is_larger_than_the_part_of_its_source_arrives_alone():
    limits = ClientLimits(shared_bytes=LARGE_ANSWER, num_sources=4)
    with serve_guarded(ingress_middlewares, answers_much, limits) as (guard, port):
        status, text = ask(port, HI)
        assert (status, len(text)) == (200, LARGE_ANSWER)
        poll(lambda: guard.num_shared_bytes == 0, "all is given back")
        with contextlib.closing(connect(port, receive_bytes=4096)) as client:
            client.sendall(request_bytes(HI))
            poll(lambda: guard.num_shared_bytes == LARGE_ANSWER // 4, "its answer is counted")
            assert ask(port, HI)[0] == 429


def test_an_unread_large_answer_is_dropped():
    with (
        serve_guarded(ingress_middlewares, answers_much, QUICK) as (guard, port),
        contextlib.closing(connect(port, receive_bytes=4096)) as client,
    ):
        client.sendall(request_bytes(HI))
        poll(lambda: guard.num_shared_bytes > 0, "it is counted")
        poll(lambda: guard.num_shared_bytes == 0, "it is dropped")


def test_a_quiet_stream_outlives_the_time_for_writes(guarded):
    async def pauses(request, emit):
        del request
        await emit(OutputDelta(0, "a", [1]))
        await asyncio.sleep(4 * QUICK.write_timeout_s)
        await emit(OutputDelta(0, "b", [2], "length"))
        return Usage(1, 2)

    with guarded(app=make_app(FakeBackend(pauses))) as (_, port):
        status, body = ask(port, {**HI, "stream": True})
        assert status == 200
        assert b"data: [DONE]" in body


@pytest.mark.parametrize(
    ("make_middlewares", "ours"),
    [
        # Where clients connect to Serve's own proxy, the guard says what HAProxy would.
        (proxy_middlewares, [b"x-ttserve-bound", b"x-ttserve-listener"]),
        (ingress_middlewares, [name for name, _ in DISABLE_SERVE_WATCH]),
    ],
)
def test_headers_of_serve_do_not_pass(make_middlewares, ours):
    app = NamesOfHeaders()
    with serve_guarded(make_middlewares, app) as (_, port):
        assert ask(port, HI, headers=[*OF_SERVE, "x-mine: d"])[0] == 200
    theirs = [b"connection", b"content-length", b"content-type", b"host", b"x-mine"]
    assert sorted(app.seen) == sorted([*theirs, *ours])


def test_serve_understands_the_headers_that_disable_its_watch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Serve's own, while it is imported
        from ray.serve._private import http_util

    headers = dict(DISABLE_SERVE_WATCH)
    assert http_util.parse_disconnect_disabled_header(headers)
    assert http_util.parse_request_timeout_header(headers, 5.0) is None


def whole_answer():
    headers = [(b"content-length", b"1")]
    start = {"type": "http.response.start", "status": 200, "headers": headers}
    return start, {"type": "http.response.body", "body": b"x"}


def test_an_ingress_cancels_an_application_that_does_not_await_the_disconnect():
    running, ended = threading.Event(), threading.Event()

    async def deaf(scope, receive, send):
        if scope["type"] != "http":
            return
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with serve_guarded(ingress_middlewares, deaf) as (_, port):
        with contextlib.closing(connect(port)) as client:
            client.sendall(request_bytes(HI))
            assert running.wait(20)
        assert ended.wait(20)


@pytest.mark.parametrize("stream", [False, True])
def test_an_application_that_awaits_the_disconnect_ends_by_itself(stream, guarded):
    """Its answer does not reach the client, but access logs and metrics count it."""
    running, statuses = threading.Event(), []

    async def endless(request, emit):
        running.set()
        await asyncio.Event().wait()

    service = FakeBackend(endless)
    app = make_app(service)

    async def counted(scope, receive, send):
        async def note(message):
            statuses.append(message.get("status"))
            await send(message)

        try:
            await app(scope, receive, note if scope["type"] == "http" else send)
        except asyncio.CancelledError:  # as Serve does
            statuses.append("cancelled")

    with guarded(app=counted) as (_, port):
        with contextlib.closing(connect(port)) as client:
            client.sendall(request_bytes({**HI, "stream": stream}))
            assert running.wait(20)
        poll(lambda: statuses, "it is over")
        assert service.num_open == 0
    assert statuses[0] == 499


@pytest.mark.parametrize("make_middlewares", [proxy_middlewares, ingress_middlewares])
async def test_no_task_is_left_after_an_answer_to_a_client_that_stays(make_middlewares):
    [middleware] = make_middlewares()

    async def answers(scope, receive, send):
        for message in whole_answer():
            await send(message)

    async def stays():
        await asyncio.Event().wait()

    async def swallow(message):
        pass

    await middleware.cls(answers, **middleware.kwargs)(
        {"type": "http", "path": "/", "headers": []}, stays, swallow
    )
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_work_after_the_answer_is_not_cancelled_by_a_disconnect():
    written_down = threading.Event()

    async def slow_after_all(scope, receive, send):
        if scope["type"] != "http":
            return
        for message in whole_answer():
            await send(message)
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0.05)
        written_down.set()

    with serve_guarded(ingress_middlewares, slow_after_all) as (_, port):
        assert ask(port, HI) == (200, b"x")
        assert written_down.wait(20)


def test_a_request_without_a_body_has_an_empty_one(guarded):
    bodies = []

    async def reads(scope, receive, send):
        if scope["type"] != "http":
            return
        bodies.append(await receive())
        for message in whole_answer():
            await send(message)

    with guarded(app=reads) as (_, port), contextlib.closing(connect(port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert answer(client)[1] == b"x"
    assert bodies == [{"type": "http.request", "body": b"", "more_body": False}]


@pytest.mark.parametrize("num_events", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_aborted_with_a_typed_error(guarded, stream, num_events):
    async def endless(request, emit):
        assert request.timeout_s == 0.5
        for _ in range(num_events):
            await emit(OutputDelta(0, "x", [1]))
        await asyncio.Event().wait()

    service = FakeBackend(endless)
    with guarded(app=make_app(service, request_timeout_s=0.5)) as (_, port):
        status, body = ask(port, {**HI, "stream": stream})
        if stream and num_events:
            assert status == 200
            assert b"data: [DONE]" not in body
            error = json.loads(body.split(b"data: ")[-1].partition(b"\n")[0])["error"]
        else:
            assert status == 408
            error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("TimeoutError", "request_timeout")
        assert service.num_open == 0
