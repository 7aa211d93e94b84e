"""HAProxy itself as `ttserve-haproxy` starts it: other users of the host, and hostile clients."""

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from cluster.config.schema import IngressConfig
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
from tests.cluster.lifecycle import haproxy_world
from tests.cluster.lifecycle.haproxy_world import NOBODY, World, as_nobody

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not haproxy_world.is_available, reason="no HAProxy here"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
HI = {"prompt": "hi"}


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
def test_a_host_that_leaves_is_not_healthy_and_serves_on(shared, drains):
    with world(haproxy_world.serve_config(drains=drains), shared, make_app()) as front:
        statuses = {path: get(front.port, path) for path in ("/health", "/v1/models", "/live")}
    assert statuses == {"/health": 503 if drains else 200, "/v1/models": 200, "/live": 200}


def get(port, path):
    """The status of a GET."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as client:
        client.request("GET", path)
        return client.getresponse().status


def test_a_folder_that_others_can_write_is_refused(config, shared):
    folder = shared / "serve"
    folder.mkdir()
    folder.chmod(0o777)
    check_refused(World(folder, config, 1), f"{folder} can be written by other users")


def test_a_folder_that_others_can_write_within_one_that_they_cannot_enter_will_do(config, shared):
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
    check_refused(World(folder, config, 1), f"{folder} is not there", is_written=True)


@pytest.mark.parametrize(("host", "num_warnings"), [("0.0.0.0", 1), ("127.0.0.1", 0)])
def test_an_address_that_everybody_reaches_is_warned_of_at_the_start_alone(
    config, shared, host, num_warnings
):
    folder = shared / "serve"
    folder.mkdir(mode=0o755)
    # HAProxy only looks at it, and ends.
    front = World(folder, config.replace("bind 127.0.0.1:", f"bind {host}:"), 1)
    front.write()
    try:
        for more, expected in (((), num_warnings), (("-sf",), 0)):
            _, errors = front.start("-c", *more).communicate(timeout=20)
            assert errors.count("there are no API keys") == expected, errors
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


def test_a_reload_as_serve_does_it_takes_the_listeners_over_and_cuts_no_stream(config, shared):
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


def test_an_ingress_that_closes_a_connection_it_kept_costs_no_request(config, shared):
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


def test_a_stream_that_nobody_reads_frees_its_slot(config, shared):
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


def test_headers_of_serve_do_not_pass(config, shared):
    app = NamesOfHeaders()
    with world(config, shared, app) as front:
        assert ask(front.port, HI, headers=[*OF_SERVE, "x-mine: d"])[0] == 200
        assert ask(front.port, HI, headers=["x-request-id: job 7"])[0] == 200
    names = [name for name in app.seen if name.startswith((b"x", b"serve"))]
    assert sorted(set(names)) == [b"x-mine", b"x-request-id"]


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
