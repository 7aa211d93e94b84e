"""HAProxy itself as `ttserve-haproxy` starts it: other users of the host, and hostile clients."""

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.client_guard import ingress_middlewares
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from cluster.lifecycle import haproxy, supervisor
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
from tests.cluster.lifecycle import haproxy_world
from tests.cluster.lifecycle.haproxy_world import World, as_nobody
from tests.e2e.other_user import NOBODY

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not haproxy_world.is_available, reason="no HAProxy here"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
HI = {"prompt": "hi"}


@pytest.fixture(autouse=True)
def _ray_token(monkeypatch):
    """Give HAProxy and the client guard the token of one cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of this cluster")


@pytest.fixture(scope="module")
def config():
    return haproxy_world.serve_config()


@pytest.fixture
def shared():
    """A folder as /tmp is: everybody's, and sticky."""
    folder = Path(tempfile.mkdtemp(prefix="hp-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def world(config, shared, app, **options):
    """HAProxy in front of an app, its files where everybody may look."""
    folder = shared / "serve"
    folder.mkdir(mode=0o755)
    with serving(replica(app)) as backend_port:
        world = World(folder, config, backend_port, **options)
        try:
            world.run()
            yield world
        finally:
            world.close()


def replica(app):
    """An app as Serve runs it: with an answer to HAProxy's health checks."""

    async def answering(scope, receive, send):
        if scope.get("path") == "/-/healthz":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"success"})
        else:
            await app(scope, receive, send)

    return answering


def make_app(script=None, service=None):
    service = service or FakeBackend(script)
    return create_app(
        service, IngressConfig(max_body_bytes=2**23, request_timeout_s=60), version="0"
    )


# --- other users of the host -------------------------------------------------------------------


@needs_root
def test_another_user_cannot_reach_the_admin_socket(config, shared):
    with world(config, shared, make_app()) as front:

        def attack():
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(front.socket)
                client.sendall(b"disable server http-app/one\n")

        assert as_nobody(attack) == "PermissionError"
        assert stat.S_IMODE(os.stat(front.socket).st_mode) == 0o600
        assert ask(front.port, HI)[0] == 200


@needs_root
def test_a_folder_that_another_user_made_first_is_refused(config, shared):
    folder = shared / "serve"
    as_nobody(lambda: (os.umask(0), folder.mkdir(mode=0o777)))
    (folder / "node").mkdir()
    check_refused(World(folder / "node", config, 1), f"{folder} belongs to user {NOBODY}")


@pytest.mark.parametrize("drains", [False, True])
def test_a_leaving_host_is_unhealthy_and_continues_to_serve(shared, drains):
    with world(haproxy_world.serve_config(drains=drains), shared, make_app()) as front:
        statuses = {path: get(front.port, path) for path in ("/health", "/v1/models", "/live")}
    assert statuses == {"/health": 503 if drains else 200, "/v1/models": 200, "/live": 200}


def get(port, path, headers=()):
    """The status of a GET."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as client:
        client.request("GET", path, headers=dict(headers))
        return client.getresponse().status


def test_a_folder_that_others_can_write_is_refused(config, shared):
    folder = shared / "serve"
    folder.mkdir()
    folder.chmod(0o777)
    check_refused(World(folder, config, 1), f"{folder} can be written by other users")


def test_a_writable_folder_within_a_private_one_is_accepted(config, shared):
    (shared / "mine").mkdir(mode=0o700)
    folder = shared / "mine" / "serve"
    folder.mkdir()
    folder.chmod(0o777)
    front = World(folder, config, 1)
    try:
        front.write()
        process = front.start()
        assert poll(lambda: front.pid() or process.poll(), "HAProxy answers") == process.pid
    finally:
        front.close()


@pytest.mark.parametrize("name", ["haproxy.cfg", "500.http", "admin.sock", "unavailable.http"])
def test_a_planted_link_is_refused(config, shared, name):
    folder = shared / "serve"
    folder.mkdir()
    front = World(folder, config, 1)
    front.write()
    victim = shared / "victim"
    victim.write_text((folder / "haproxy.cfg").read_text())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    before = victim.read_text()
    check_refused(front, f"{folder / name} is a symbolic link", is_written=True)
    assert victim.read_text() == before


@needs_root
def test_a_planted_configuration_is_refused(config, shared):
    folder = shared / "serve"
    folder.mkdir()
    front = World(folder, config, 1)
    front.write()
    os.chown(folder / "haproxy.cfg", NOBODY, NOBODY)
    check_refused(front, f"belongs to user {NOBODY}", is_written=True)


def test_a_folder_that_was_cleaned_away_is_named_with_what_to_do(config, shared):
    folder = shared / "serve" / "node"
    check_refused(World(folder, config, 1), f"{folder} does not exist", is_written=True)


@pytest.mark.parametrize(("host", "num_warnings"), [("0.0.0.0", 1), ("127.0.0.1", 0)])
def test_a_public_address_is_warned_of_only_at_the_start(config, shared, host, num_warnings):
    folder = shared / "serve"
    folder.mkdir(mode=0o755)
    # HAProxy only looks at it, and ends.
    front = World(folder, config.replace("bind 127.0.0.1:", f"bind {host}:"), 1)
    front.write()
    try:
        for more, expected in (((), num_warnings), (("-sf",), 0)):
            _, errors = front.start("-c", *more).communicate(timeout=20)
            assert errors.count("without API keys") == expected, errors
    finally:
        front.close()


def check_refused(front, reason, *, is_written=False):
    try:
        if not is_written:
            front.write()
        process = front.start()
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert reason in errors
        assert "ttserve environment" in errors
    finally:
        front.close()


def test_a_reload_takes_over_the_listeners_and_cuts_no_stream(config, shared):
    reloaded = threading.Event()

    async def waits(request, emit):
        del request
        await emit(OutputDelta(0, "a", [1]))
        await asyncio.to_thread(reloaded.wait, 20)
        await emit(OutputDelta(0, "b", [2], "length"))
        return Usage(1, 2)

    with (
        world(config, shared, make_app(waits)) as front,
        contextlib.closing(connect(front.port)) as client,
    ):
        client.sendall(request_bytes({**HI, "stream": True}))
        assert client.recv(1, socket.MSG_PEEK)
        front.write()
        old = front.processes[-1]
        new = front.start("-sf", str(old.pid), "-x", front.socket)
        poll(lambda: front.pid() == new.pid or new.poll() is not None, "the new one answers")
        reloaded.set()
        assert b"[DONE]" in answer(client)[1]
        old.wait(20)
        assert ask(front.port, HI)[0] == 200


class Leaver(http.server.BaseHTTPRequestHandler):
    """Answers one request of a connection, which it keeps open, and closes it at the next one."""

    protocol_version = "HTTP/1.1"
    is_first = True

    def do_GET(self):
        if self.is_first:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.close_connection = True
        self.is_first = False

    def log_message(self, *_):
        """Health checks would fill the log."""


def test_a_kept_connection_that_the_ingress_closes_costs_no_request(config, shared):
    folder = shared / "serve"
    folder.mkdir(mode=0o755)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Leaver) as backend:
        threading.Thread(target=backend.serve_forever, args=(0.05,)).start()
        front = World(folder, config, backend.server_address[1])
        try:
            front.run()
            assert [get(front.port, "/") for _ in range(5)] == [200] * 5
            kept = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
            with contextlib.closing(kept):
                for _ in range(5):
                    kept.request("GET", "/")
                    with kept.getresponse() as reply:
                        assert reply.status == 200
        finally:
            front.close()
            backend.shutdown()


# --- clients -----------------------------------------------------------------------------------


def test_slow_requests_get_408_and_never_reach_an_ingress(config, shared):
    service = FakeBackend()
    with (
        world(config, shared, make_app(service=service), request_timeout_s=2) as front,
        contextlib.ExitStack() as stack,
    ):
        slow = [stack.enter_context(contextlib.closing(connect(front.port))) for _ in range(1280)]
        for client in slow:
            client.sendall(request_bytes(b"{", length=500))
        assert ask(front.port, HI)[0] == 200
        statuses = [answer(client)[0] for client in slow[::20]]
        assert set(statuses) == {408}
        status, body = answer(slow[1])
        assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
        assert len(service.requests) == 1


def test_a_large_body_is_not_held_back(config, shared):
    body = json.dumps(HI).encode().ljust(2**23)
    with world(config, shared, make_app()) as front:
        assert ask(front.port, body)[0] == 200


def test_one_address_has_half_of_all_connections_at_most(config, shared):
    with (
        world(config.replace("maxconn 4096", "maxconn 40"), shared, make_app()) as front,
        contextlib.ExitStack() as stack,
    ):

        def hold():
            # The refusal may come before or after the handshake returns.
            try:
                greedy = connect(front.port, source="127.0.0.2")
            except ConnectionResetError:
                return []
            return [stack.enter_context(contextlib.closing(greedy))]

        held = [client for _ in range(25) for client in hold()]
        poll(lambda: len(held) - num_closed(held) == 20, "five too many are closed")
        assert ask(front.port, HI)[0] == 200


def num_closed(clients):
    """How many of them the other side has closed."""
    count = 0
    for client in clients:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                count += client.recv(1, socket.MSG_PEEK) == b""
            except ConnectionResetError:
                count += 1
    return count


def test_a_stream_that_is_not_read_frees_its_slot(config, shared):
    service = FakeBackend(flood)
    with (
        world(config, shared, make_app(service=service), client_timeout_s=1) as front,
        contextlib.closing(connect(front.port, receive_bytes=4096)) as client,
    ):
        client.sendall(request_bytes({**HI, "stream": True}))
        poll(lambda: service.num_open == 1, "it streams")
        poll(lambda: service.num_open == 0, "its slot is free")


def test_a_quiet_stream_outlives_the_timeout_for_clients(config, shared):
    async def pauses(request, emit):
        del request
        await asyncio.sleep(2.5)
        await emit(OutputDelta(0, "a", [1]))
        await asyncio.sleep(2.5)
        await emit(OutputDelta(0, "b", [2], "length"))
        return Usage(1, 2)

    app = make_app(pauses)
    with world(config, shared, app, request_timeout_s=1, client_timeout_s=1) as front:
        status, body = ask(front.port, {**HI, "stream": True})
        assert status == 200
        assert b"[DONE]" in body


def test_internal_headers_of_serve_are_removed(config, shared):
    app = NamesOfHeaders()
    with world(config, shared, app) as front:
        assert ask(front.port, HI, headers=[*OF_SERVE, "x-mine: d"])[0] == 200
        assert ask(front.port, HI, headers=["x-request-id: job 7"])[0] == 200
    names = [name for name in app.seen if name.startswith((b"x", b"serve"))]
    ours = [b"x-ttserve-bound", b"x-ttserve-front", b"x-ttserve-source"]
    assert sorted(set(names)) == [b"x-mine", b"x-request-id", *ours]


# --- listeners, sources and methods --------------------------------------------------------------


def behind_guard(app):
    """An app behind the client guard of an ingress."""
    [middleware] = ingress_middlewares()
    return middleware.cls(app, *middleware.args, **middleware.kwargs)


def test_operations_routes_are_only_on_the_operations_listener(config, shared):
    forged = {"x-ttserve-listener": "operations", "X-TTServe-Listener": "operations"}
    paths = ["/metrics", "/kv", "/debug/slots", "/health_generate"]
    encoded = ["/%6detrics", "//metrics", "/metrics/", "/./metrics", "/metrics?x=1", "/METRICS"]
    with world(config, shared, behind_guard(make_app())) as front:
        for path in [*paths, *encoded]:
            assert get(front.port, path, forged) in {307, 404}, path
        for path in paths[:3]:
            assert get(front.operations_port, path) == 200
        for port in (front.port, front.operations_port):
            assert [get(port, path) for path in ("/health", "/live", "/version")] == [200] * 3


def test_an_ingress_trusts_internal_headers_from_haproxy_only(config, shared):
    with world(config, shared, behind_guard(make_app())) as front:
        assert get(front.operations_port, "/metrics") == 200
        assert get(front.port, "/metrics") == 404
    # Its own port, past HAProxy: a gateway on this host that forwards a client, and a page.
    forged = {"x-ttserve-listener": "operations", "x-ttserve-front": "guessed"}
    with serving(behind_guard(make_app())) as port:
        assert get(port, "/metrics", {**forged, "X-Forwarded-For": "192.0.2.1"}) == 404
        assert get(port, "/v1/models", {**forged, "Host": "evil.example"}) == 421
        assert get(port, "/v1/models") == 200


def test_dns_rebinding_to_loopback_reads_nothing(config, shared):
    """DNS rebinding: the browser sends the page's own name in `Host`."""
    with world(config, shared, behind_guard(make_app())) as front:
        for port in (front.port, front.operations_port):
            rebound = f"evil.example:{port}"
            assert get(port, "/version", {"Host": rebound}) == 421
            assert get(port, "/version", {"Host": f"localhost:{port}"}) == 200


class Sources:
    """An application that keeps from where each request came."""

    def __init__(self):
        self.seen = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            self.seen.append(scope["client"][0])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def test_a_client_cannot_choose_its_source(config, shared):
    app = Sources()
    headers = ["x-ttserve-source: 192.0.2.1", "x-forwarded-for: 192.0.2.1"]
    with world(config, shared, behind_guard(app)) as front:
        assert ask(front.port, HI, headers=headers)[0] == 200
    assert app.seen == ["127.0.0.1"]


def test_a_trusted_proxy_sets_the_source_and_has_no_connection_limit(config, shared):
    app = Sources()
    trusted = {"TTSERVE_TRUSTED_PROXIES": "127.0.0.3/32"}
    small = config.replace("maxconn 4096", "maxconn 40")
    with (
        world(small, shared, behind_guard(app), variables=trusted) as front,
        contextlib.ExitStack() as stack,
    ):
        gateway = [
            stack.enter_context(contextlib.closing(connect(front.port, source="127.0.0.3")))
            for _ in range(30)
        ]
        for i, client in enumerate(gateway):
            told = f"x-forwarded-for: 203.0.113.9, 198.51.100.{i}"
            client.sendall(request_bytes(HI, headers=[told]))
        assert {answer(client)[0] for client in gateway} == {200}
        with contextlib.closing(connect(front.port, source="127.0.0.3")) as client:
            client.sendall(request_bytes(HI, headers=["x-forwarded-for: 2001:db8:1:2:3::9"]))
            assert answer(client)[0] == 200
    assert sorted(app.seen[:30]) == sorted(f"198.51.100.{i}" for i in range(30))
    assert app.seen[30:] == ["2001:db8:1:2::"]


def test_an_haproxy_gateway_passes_the_source_on(config, shared, tmp_path):
    """Two HAProxies in a row: the outer one as a gateway writes `X-Forwarded-For`."""
    app = Sources()
    trusted = {"TTSERVE_TRUSTED_PROXIES": "127.0.0.4"}
    with world(config, shared, behind_guard(app), variables=trusted) as front:
        port = supervisor.free_port()
        (tmp_path / "gateway.cfg").write_text(
            "defaults\n  mode http\n  timeout client 10s\n  timeout connect 10s\n"
            "  timeout server 10s\n  option forwardfor\n"
            f"frontend gateway\n  bind 127.0.0.1:{port}\n  default_backend inner\n"
            f"backend inner\n  source 127.0.0.4\n  server one 127.0.0.1:{front.port}\n"
        )
        binary = haproxy.real_binary()
        gateway = subprocess.Popen([binary, "-db", "-f", str(tmp_path / "gateway.cfg")])
        try:
            poll(lambda: is_open(port), "the gateway listens")
            for source in ("127.0.0.7", "127.0.0.8"):
                with contextlib.closing(connect(port, source=source)) as client:
                    client.sendall(request_bytes(HI))
                    assert answer(client)[0] == 200
        finally:
            gateway.kill()
            gateway.wait()
    assert app.seen == ["127.0.0.7", "127.0.0.8"]


def is_open(port):
    with contextlib.suppress(OSError), contextlib.closing(connect(port)):
        return True
    return False


def test_cleartext_http_2_is_refused(config, shared):
    """One connection of it would be a hundred requests."""
    app = Sources()
    with world(config, shared, app) as front, contextlib.closing(connect(front.port)) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0")
        status, _ = answer(client)
    assert status == 400
    assert app.seen == []


def make_certificate(folder):
    """Make a certificate of localhost, with its key in one file."""
    certificate, key, both = (str(folder / name) for name in ("c.pem", "k.pem", "tls.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-out", certificate, "-keyout", key],
        check=True, capture_output=True,
    )  # fmt: skip
    Path(both).touch(0o600)
    Path(both).write_text(Path(certificate).read_text() + Path(key).read_text())
    return both


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate")
def test_with_a_certificate_the_public_port_speaks_tls_and_the_operations_port_does_not(
    config, shared, tmp_path
):
    path = make_certificate(tmp_path)
    variables = {"TTSERVE_TLS_CERTIFICATE": path}
    context = ssl.create_default_context(cafile=path)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with world(config, shared, make_app(), variables=variables) as front:
        with (
            contextlib.closing(connect(front.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(request_bytes(HI))
            assert answer(client)[0] == 200
            assert client.selected_alpn_protocol() == "http/1.1"
            assert client.version() in {"TLSv1.2", "TLSv1.3"}
        with contextlib.closing(connect(front.port)) as plain:
            plain.sendall(request_bytes(HI))
            # HAProxy answers with an alert of TLS, or nothing.
            assert not plain.recv(65536).startswith(b"HTTP")
        assert get(front.operations_port, "/health") == 200


ORIGIN = "https://chat.example.com"


def headers_of(port, raw):
    """Status and headers of the answer to a request."""
    with contextlib.closing(connect(port)) as client:
        client.sendall(raw)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response.status, response.headers


@pytest.mark.parametrize(
    ("origins", "allowed", "vary"),
    [(f"https://other.example,{ORIGIN}", ORIGIN, "Origin"), ("*", "*", None)],
)
def test_a_page_of_a_named_origin_can_read_haproxys_own_errors(
    config, shared, origins, allowed, vary
):
    variables = {"TTSERVE_CORS_ORIGINS": origins}
    with world(
        config, shared, make_app(), variables=variables, request_timeout_s=1, client_timeout_s=2
    ) as front:
        page = [f"Origin: {ORIGIN}"]
        slow = request_bytes(b"{", length=500, headers=page)
        whole = request_bytes(HI, headers=page)
        # The ingress of this test has no `cors_origins`, and its answers stay as they are.
        status, headers = headers_of(front.port, whole)
        assert status == 200
        assert headers["access-control-allow-origin"] is headers["vary"] is None
        errors = {408: slow, 405: whole.replace(b"POST", b"BREW", 1)}
        for expected, raw in errors.items():
            check_readable(headers_of(front.port, raw), expected, allowed, vary)
        front.tell("disable server http-app/one")
        check_readable(headers_of(front.port, whole), 503, allowed, vary)
        _, headers = headers_of(front.operations_port, whole)
        assert headers["access-control-allow-origin"] is None
        for other in ("https://other.example.evil", "null"):
            raw = request_bytes(HI, headers=[f"Origin: {other}"])
            _, headers = headers_of(front.port, raw)
            assert headers["access-control-allow-origin"] == ("*" if allowed == "*" else None)
            assert headers["vary"] == vary


def check_readable(answered, status, allowed, vary):
    assert answered[0] == status
    headers = answered[1]
    assert headers["access-control-allow-origin"] == allowed, status
    assert headers["access-control-expose-headers"] == "retry-after"
    assert headers["vary"] == vary


def test_unknown_methods_become_no_metric_labels(config, shared):
    """Serve makes a label of each method that HAProxy logs for it."""
    app = make_app()
    with world(config, shared, app) as front:
        logged = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        logged.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        logged.bind(str(front.folder / "m.sock"))
        with contextlib.closing(logged):
            for i in range(3000):
                with contextlib.closing(connect(front.port)) as client:
                    client.sendall(f"M{i:06} / HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                    assert answer(client)[0] == 405
            assert get(front.port, "/live") == 200
            brewing = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
            with contextlib.closing(brewing):
                brewing.request("BREW", "/v1/completions")
                reply = brewing.getresponse()
                assert reply.headers["Allow"] == "DELETE, GET, HEAD, OPTIONS, POST"
                assert json.loads(reply.read())["error"]["code"] == "method_not_allowed"
            methods = {
                found for line in lines_of(logged) for found in re.findall(r'method="(\w+)"', line)
            }
    assert methods == {"GET"}


def lines_of(logged):
    """Datagrams that have come."""
    logged.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            yield logged.recv(65536).decode()


def test_an_idle_connection_is_closed_though_serve_would_keep_it(config, shared):
    with (
        world(config, shared, make_app(), keep_alive_s=1) as front,
        contextlib.closing(connect(front.port)) as client,
    ):
        client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        # Returns when the server closes the connection.
        assert answer(client)[0] == 200


class Dying:
    """A server that closes the connection of each POST without an answer, and counts them."""

    def __init__(self):
        self.num_posts = 0

    async def __call__(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            self.num_posts += 1
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()


@pytest.mark.parametrize(
    ("path", "is_repeated"),
    [("/v1/completions", True), ("/v1/chat/completions", True), ("/v1/files", False)],
)
def test_a_post_is_repeated_only_where_its_route_permits_that(config, shared, path, is_repeated):
    folder = shared / "serve"
    folder.mkdir(mode=0o755)
    server = Dying()
    with listening(server) as port:
        front = World(folder, config, port, variables={})
        try:
            front.run()
            status, _ = ask(front.port, HI, path=path)
        finally:
            front.close()
    assert status == 503
    assert (server.num_posts > 1) is is_repeated


@contextlib.contextmanager
def listening(server):
    """Run an asyncio server of a thread; yields its port."""
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listener.close()
        loop.close()


def named_by_serve(app):
    """An app under Serve's RequestIdMiddleware, which cannot be told to leave a name alone."""

    async def named(scope, receive, send):
        async def send_named(message):
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"X-Request-ID", b"serve")]}
            await send(message)

        await app(scope, receive, send_named)

    return named


def test_an_answer_names_its_request_once(config, shared):
    with world(config, shared, named_by_serve(make_app())) as front:
        client = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
        with contextlib.closing(client):
            client.request("GET", "/health", headers={"x-request-id": "job-7"})
            assert client.getresponse().headers.get_all("x-request-id") == ["job-7"]


def test_a_client_that_sends_a_body_that_is_too_large_gets_the_answer(config, shared, monkeypatch):
    """Before it reads, as most clients do; 9 MiB fit in no buffer on the way."""
    monkeypatch.setenv("TTSERVE_INGRESS", '{"max_body_bytes": 1000}')
    [middleware] = ingress_middlewares()
    app = middleware.cls(make_app(), *middleware.args, **middleware.kwargs)
    body = b" " * (9 * 2**20)
    with (
        world(config, shared, app) as front,
        contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
        ) as client,
    ):
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = client.getresponse()
        assert reply.status == 413
        assert json.loads(reply.read())["error"]["code"] == "payload_too_large"
