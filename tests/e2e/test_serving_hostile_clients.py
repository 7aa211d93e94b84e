"""A whole `ttserve serve` under clients that mean harm, and without its HAProxy.

One server for the module, with few places. Each way in is attacked: HAProxy, the proxy that Serve
keeps beside it, and the port of the ingress replica itself.
"""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import harness
import pytest
import yaml

from cluster.lifecycle import haproxy, supervisor
from tests.cluster.edge.http_server import answer, ask, connect, request_bytes
from tests.cluster.engines import model_folder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(haproxy.real_binary() is None, reason="no HAProxy here"),
]

SHORT = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 8000, "stream": True}
PLACES = 32
REQUEST_TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One engine that does both behind one ingress."""
    port = supervisor.free_port()
    args = {
        "model": str(model_folder()),
        "model_name": "tiny",
        "engine": {"dtype": "float32", "num_threads": 1, "num_blocks": 600},
        "pools": {"both": {"engine": {"max_batch_size": 8}}},
        "router": {"max_queued_requests": PLACES},
        "ingress": {"max_ongoing_requests": PLACES, "request_timeout_s": REQUEST_TIMEOUT_S},
    }
    path = tmp_path_factory.mktemp("hostile") / "serve.yaml"
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    file = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    path.write_text(yaml.safe_dump(file))
    server = harness.LocalServer(["--config", str(path)], port)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def ways(server):
    """Every port that a client can reach the application by."""
    family = server.footprint.look()
    table = harness.process_table()
    names = ("haproxy -db", "ServeReplica:ttserve:ingress", "ProxyActor")
    listening = {
        name: {
            port
            for process_id in family
            if name in table[process_id].command
            for _, port in harness.listening_ports({process_id})
            if is_way(port)
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
            client.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            status, body = answer(client)
            return status == 200 and b"version" in body
    return False


@pytest.mark.parametrize("sent", [1, 40_000], ids=["first byte", "more than HAProxy holds"])
@pytest.mark.parametrize("way", ["haproxy -db", "ServeReplica:ttserve:ingress"])
def test_hundreds_of_slow_bodies_leave_others_served(ways, way, sent):
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(contextlib.closing(connect(ways[way]))) for _ in range(300)]
        for client in slow:
            client.sendall(request_bytes(b" " * sent, length=sent + 1000))
        time.sleep(0.5)  # as long as an attacker needs to see them all accepted
        answers = [ask(ways[way], SHORT) for _ in range(5)]
        assert [status for status, _ in answers] == [200] * 5, answers
        status, body = answer(slow[0])
        assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")


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


def test_request_that_takes_too_long_ends_with_an_error_and_frees_its_slot(server):
    *_, last = harness.stream_events(server.url, "/v1/completions", LONG)
    assert json.loads(last)["error"]["code"] == "request_timeout"
    harness.wait_for(lambda: num_running(server) == 0, 20, "no request runs")


def num_running(server):
    """Requests that the engine has."""
    lines = harness.get_json(f"{server.url}/metrics")[1].splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running{"))


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
