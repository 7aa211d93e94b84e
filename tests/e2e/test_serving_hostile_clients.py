"""The server of `test_serving.py` under hostile clients, and without its HAProxy.

Each way in is attacked: HAProxy, the proxy that Serve keeps beside it, and the port of the ingress
replica itself.
"""

import contextlib
import http.client
import itertools
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

import harness
import pytest
import tiny_server
from tiny_server import LONG, MODEL

from cluster.lifecycle import haproxy
from tests.cluster.edge.http_server import answer, ask, connect, request_bytes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(haproxy.real_binary() is None, reason="no HAProxy here"),
]

SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def ways(server):
    """Every port that a client can reach the application by, but for the operations listener."""
    family = server.footprint.look()
    table = harness.process_table()
    names = ("haproxy -db", "ServeReplica:ttserve:ingress", "ProxyActor")
    listening = {
        name: {
            port
            for process_id in family
            if name in table[process_id].command
            for _, port in harness.listening_ports({process_id})
            if is_way(port) and not server.operations_url.endswith(f":{port}")
        }
        for name in names
    }
    assert all(len(ports) == 1 for ports in listening.values()), listening
    return {name: ports.pop() for name, ports in listening.items()}


def is_way(port):
    with contextlib.suppress(OSError, ValueError):
        client = connect(port)
        client.settimeout(2)
        with contextlib.closing(client):
            client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status, body = answer(client)
            return status == 200 and b"version" in body
    return False


@pytest.fixture
def many_files():
    """Raise this process's limit of open files to the maximum."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_hundreds_of_slow_bodies_leave_others_served(ways):
    """All kinds at once, so that their time passes once."""
    haproxy_port, ingress_port = ways["haproxy -db"], ways["ServeReplica:ttserve:ingress"]
    first_byte, more_than_haproxy_holds = 1, 40_000
    with contextlib.ExitStack() as stack:
        slow = {}
        for kind in itertools.product(
            (haproxy_port, ingress_port), (first_byte, more_than_haproxy_holds)
        ):
            port, sent = kind
            for _ in range(300):
                slow[kind] = stack.enter_context(contextlib.closing(connect(port)))
                slow[kind].sendall(request_bytes(b" " * sent, length=sent + 1000))
        time.sleep(0.5)  # as long as an attacker needs to see them all accepted
        for port in (haproxy_port, ingress_port):
            answers = [ask(port, SHORT) for _ in range(5)]
            assert [status for status, _ in answers] == [200] * 5, (port, answers)
        for kind, client in slow.items():
            reply = http.client.HTTPResponse(client)
            reply.begin()
            code = json.loads(reply.read())["error"]["code"]
            assert (reply.status, code) == (408, "body_timeout"), kind
            # HAProxy lets an answered client send for another 30 s; the test does not wait for it.
            assert kind == (haproxy_port, more_than_haproxy_holds) or client.recv(1) == b"", kind


@pytest.mark.parametrize(
    "header",
    [
        "x-request-timeout-seconds: 0.001",
        "serve_multiplexed_model_id: \xff",
        "x-session-id: \xff",
        "x-request-id: \xff",
    ],
)
def test_headers_of_serve_change_nothing_by_any_way(ways, header):
    for way, port in ways.items():
        status, body = ask(port, SHORT, headers=[header])
        assert status == 200, (way, body)


def test_a_full_ingress_answers_its_probes_and_refuses_in_openais_form(server, ways):
    """With Serve's own limit of requests, probes waited until a stream ended."""
    port = ways["haproxy -db"]
    body = {**SHORT, "max_tokens": LONG, "stream": True}
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(tiny_server.MAX_ONGOING):
            streams.append(stack.enter_context(contextlib.closing(connect(port))))
            streams[-1].sendall(request_bytes(body))
        # Each has a slot. A request that came before the last of them would take its place.
        assert {stream.recv(12) for stream in streams} == {b"HTTP/1.1 200"}
        status, text = ask(port, SHORT)
        assert status == 429
        error = json.loads(text)["error"]
        assert (error["type"], error["code"]) == ("RateLimitError", "saturated")
        for url in (server.url, server.operations_url):
            for path in ("/health", "/live", "/version"):
                assert harness.get_json(f"{url}{path}")[0] == 200
        assert "ttserve_slots" in harness.get_json(f"{server.operations_url}/metrics")[1]
        status, _ = harness.get_json(f"{server.url}/metrics")
        assert status == 404
    tiny_server.wait_idle(server)


def test_haproxy_that_is_killed_under_load_comes_back(server, ways):
    """In some 5 s; with Serve's own health period in 24 at best."""
    port, stop = ways["haproxy -db"], threading.Event()

    def load():
        while not stop.is_set():
            with contextlib.suppress(OSError, ValueError):
                ask(port, {**SHORT, "max_tokens": 64})
            time.sleep(0.05)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        [process_id] = haproxies(server)
        os.kill(process_id, signal.SIGKILL)
        killed_s = time.monotonic()
        harness.wait_for(lambda: is_answered(port), 240, "HAProxy answers again")
        print(f"HAProxy was away for {time.monotonic() - killed_s:.1f} s")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def haproxies(server):
    """Process ids of those that serve; one that a reload replaced may still drain."""
    table = harness.process_table()
    found = {p for p in server.footprint.look() if "haproxy -db" in table[p].command}
    return {p for p in found if harness.listening_ports({p})}


def is_answered(port):
    with contextlib.suppress(OSError, ValueError):
        return ask(port, SHORT)[0] == 200
    return False


def test_files_of_haproxy_are_in_a_private_folder(server):
    [process_id] = haproxies(server)
    arguments = Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    folder = Path(arguments[arguments.index("-f") + 1]).parent
    assert (folder / "admin.sock").stat().st_mode & 0o777 == 0o600
    assert any(part.stat().st_mode & 0o077 == 0 for part in folder.parents[:2])
