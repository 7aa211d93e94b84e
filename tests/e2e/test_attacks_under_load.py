"""A whole server under 32 streams and under attack from another user of its host.

Both ways to start one: `ttserve serve`, and stock `ray start` with `serve deploy`. The streams and
each attack run in processes of their own; the last test checks that the attacks leave nothing.
`benchmarks.attacks` measures the effect of attacks over HTTP on times to a first token.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

import harness
import msgspec
import pytest
import yaml
from tiny_server import is_idle, metrics

from cluster.lifecycle import haproxy, supervisor
from tests.cluster.engines import prompts
from tests.e2e import attacker, http_attacks, steady_streams, vitals
from tests.e2e.long_model import MAX_MODEL_LEN, long_model_folder
from tests.e2e.operations import operations_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(haproxy.real_binary() is None, reason="no HAProxy here"),
]

MODEL = "tiny"
NUM_STREAMS = 32
NUM_ENGINES = 2
START_S = 400
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
PROBES = [
    steady_streams.Probe("body", {"prompt": "hi", "user": "u" * 100_000, **ONE_TOKEN}),
    steady_streams.Probe("long", {"prompt": "the quick brown fox " * 220, **ONE_TOKEN}),
]
MOST_MIB = 600
"""Memory of an ingress under any of these attacks."""
IS_ROOT = os.geteuid() == 0


class Recorder:
    """A record of each loopback connection's first bytes; only root may capture them.

    Owner: its thread has the table until `stop` returns.
    """

    MOST_BYTES = 16_384
    BUFFERED_BYTES = 64 << 20
    """The kernel drops packets that this thread is too slow for and that do not fit here."""
    RCVBUFFORCE = 33
    IP = 0x0800
    SYN = 2

    def __init__(self) -> None:
        self._flows: dict[tuple[int, int], bytearray] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def stop(self) -> None:
        """Stop recording."""
        self._is_over.set()
        self._thread.join()

    def sent_to(self, ports: set[int]) -> list[tuple[int, bytes]]:
        """Port and bytes of each connection to one of these ports."""
        return [(to, bytes(raw)) for (_, to), raw in self._flows.items() if to in ports]

    def _listen(self) -> None:
        if not IS_ROOT:
            return
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(self.IP)) as wire:
            wire.setsockopt(socket.SOL_SOCKET, self.RCVBUFFORCE, self.BUFFERED_BYTES)
            wire.bind(("lo", 0))
            wire.settimeout(0.2)
            while not self._is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    packet = wire.recv(1 << 17)
                    if packet[9] == socket.IPPROTO_TCP:
                        self._take(packet[(packet[0] & 15) * 4 :])

    def _take(self, segment: bytes) -> None:
        pair = int.from_bytes(segment[:2], "big"), int.from_bytes(segment[2:4], "big")
        if segment[13] & self.SYN:
            self._flows[pair] = bytearray()
        kept = self._flows.get(pair)
        if kept is not None and len(kept) < self.MOST_BYTES:
            kept += segment[(segment[12] >> 4) * 4 :]


class Front(NamedTuple):
    """A server, however it was started.

    Attributes:
        url: Of its endpoint.
        port: Of its endpoint.
        footprint: Its processes.
    """

    url: str
    port: int
    footprint: harness.Footprint

    @property
    def operations_url(self) -> str:
        return operations_url(self.url)

    def engines(self) -> set[int]:
        return vitals.processes(self.footprint, "replicas.engine")

    def ingress(self) -> int:
        [process_id] = vitals.processes(self.footprint, vitals.INGRESS)
        return process_id

    def haproxy(self) -> int:
        # One that a reload replaced may still drain.
        found = vitals.processes(self.footprint, vitals.HAPROXY)
        [process_id] = {p for p in found if harness.listening_ports({p})}
        return process_id

    def serving(self) -> tuple[set[int], int, int]:
        """The processes that must outlive every attack."""
        return self.engines(), self.ingress(), self.haproxy()

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return harness.get_json(f"{self.url}/health") == (200, "")
        return False


@contextlib.contextmanager
def served(path: Path, port: int) -> Iterator[Front]:
    """`ttserve serve`."""
    server = harness.LocalServer(["--config", str(path)], port)
    try:
        server.wait_ready()
        yield Front(server.url, port, server.footprint)
    finally:
        server.close()


@contextlib.contextmanager
def deployed(path: Path, port: int) -> Iterator[Front]:
    """Stock `ray start` with the variables of `ttserve environment`, and `serve deploy`."""
    cluster = harness.RayCluster()
    try:
        said = cluster.run("serve", "deploy", str(path))
        assert "Sent deploy request successfully" in said, said
        front = Front(f"http://127.0.0.1:{port}", port, cluster.footprint)
        harness.wait_for(front.is_healthy, START_S, "healthy endpoint")
        yield front
    finally:
        cluster.close()


@pytest.fixture(scope="module", params=[served, deployed], ids=["ttserve serve", "serve deploy"])
def front(request, tmp_path_factory):
    """A prefill and a decode engine behind HAProxy, and the first bytes sent to them."""
    file = yaml.safe_load((harness.REPOSITORY / "configs" / "demo.yaml").read_text())
    port = file["http_options"]["port"] = supervisor.free_port()
    args = file["applications"][0]["args"]
    # The demo model's bfloat16 does not give the same tokens in every batch.
    args |= {"model": str(long_model_folder()), "model_name": MODEL}
    args["engine"]["dtype"] = "float32"
    args["pools"]["decode"]["engine"]["max_batch_size"] = NUM_STREAMS + 2 * attacker.NUM_UNREAD
    path = tmp_path_factory.mktemp("attacked") / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    recorder = Recorder()
    try:
        with request.param(path, port) as front:
            harness.wait_for(lambda: len(front.engines()) == NUM_ENGINES, 180, "every engine")
            body = {"model": MODEL, "prompt": "recorded", "max_tokens": 4, "stream": True}
            for _ in range(4):
                assert [*harness.stream_events(front.url, "/v1/completions", body)][-1] == "[DONE]"
            recorder.stop()
            yield front, recorder
    finally:
        recorder.stop()


class Honest:
    """The process with the streams."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def report(self) -> steady_streams.Report:
        """Return the report since the last one."""
        send(self._process, "report")
        return self._read()

    def stop(self) -> None:
        """Wait until every stream has ended; none may have failed."""
        self._process.stdin.close()
        assert not self._read().failures

    def _read(self) -> steady_streams.Report:
        return msgspec.json.decode(self._process.stdout.readline(), type=steady_streams.Report)

    def check(self, num_more: int) -> None:
        """Wait until some more streams have ended; none may have failed so far."""
        end = self.report().num_done + num_more

        def reached() -> bool:
            report = self.report()
            assert not report.failures, report.failures[:5]
            return report.num_done >= end

        harness.wait_for(reached, 180, "streams go on")


@contextlib.contextmanager
def running(name: str) -> Iterator[subprocess.Popen]:
    """A module of this folder as a process; it ends with its stdin."""
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.e2e.{name}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=harness.REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(harness.REPOSITORY)},
    ) as process:  # fmt: skip
        try:
            yield process
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def send(process: subprocess.Popen, what: object) -> None:
    """Write one line."""
    process.stdin.write(msgspec.json.encode(what).decode() + "\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def honest(front):
    """32 streams, checked and running."""
    with running("steady_streams") as process:
        task = steady_streams.Task(front[0].url, MODEL, prompts(NUM_STREAMS), 48, PROBES)
        streams = Honest(process)
        send(process, task)
        streams.check(NUM_STREAMS)
        yield streams


@pytest.fixture(scope="module")
def attackers(honest):
    """Processes of attackers, whose connections stay open until the end of the module."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def known(front, attackers):
    """An attacker's knowledge, and more; the processes that must outlive it."""
    server, recorder = front
    ports = {port for _, port in harness.listening_ports(server.engines())}
    assert len(ports) >= 2 * NUM_ENGINES
    recorded = [(port, raw) for port, raw in recorder.sent_to(ports) if len(raw) > 64]
    assert len(recorded) >= 2 * NUM_ENGINES or not IS_ROOT
    target = http_attacks.Target(server.port, server.port + 1, MODEL, MAX_MODEL_LEN)
    folder = str(vitals.haproxy_folder(server.haproxy()))
    return attacker.Attack("", target, sorted(ports), recorded, folder), server.serving()


def strangers_are_not_heard(came):
    assert came["frames"] == 0
    assert came["garbage"] > 0
    assert came["replayed"] > 0 or not IS_ROOT


def nothing_is_permitted(came):
    # The server's own user may read all of it, so there is nothing to try.
    assert came.keys() == {"PermissionError"}, came


def slow_clients_get_errors(came):
    assert came["slow 408"] == attacker.NUM_SLOW, came
    assert came["unread 200"] == attacker.NUM_UNREAD, came
    oversized = {what for what in came if what.startswith("oversized")}
    # A client that is cut off while it sends may lose the answer.
    assert "oversized 413" in oversized <= {"oversized 413", "oversized, cut off"}, came


def costly_bodies_are_refused(came):
    refused = {"stop-token-ids", "empty-messages", "deep", "wide"}
    assert {f"{name} 400" for name in refused} <= came.keys(), came
    others = {"detokenize 200", "detokenize 400", "detokenize 429", "/metrics 200", "/kv 200"}
    assert came.keys() <= {f"{name} 400" for name in refused} | others, came


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("engine_sockets", strangers_are_not_heard),
        pytest.param(
            "haproxy_files",
            nothing_is_permitted,
            marks=pytest.mark.skipif(not IS_ROOT, reason="only root can be another user"),
        ),
        ("slow_clients", slow_clients_get_errors),
        ("costly_bodies", costly_bodies_are_refused),
    ],
)
def test_attack_breaks_no_stream(front, honest, attackers, known, name, check):
    attack_and_check(front[0], honest, attackers, known, name, check)


def attack_and_check(server, honest, attackers, known, name, check):
    attack, serving = known
    process = attackers.enter_context(running("attacker"))
    send(process, msgspec.structs.replace(attack, name=name))
    told = process.stdout.readline()
    assert told, "the attacker failed"
    came = msgspec.json.decode(told, type=dict[str, int])
    peak_mib = vitals.peak_mib(server.ingress())
    print(name, came, f"ingress: {peak_mib} MiB at most")
    check(came)
    honest.check(NUM_STREAMS)
    assert server.serving() == serving, "none was replaced"
    ingresses = vitals.backends(vitals.haproxy_folder(server.haproxy()))
    assert [(i.status, i.num_down) for i in ingresses.values()] == [("UP", 0)], ingresses
    assert peak_mib < MOST_MIB


def methods_are_refused(came):
    assert came == {"405": http_attacks.NUM_METHODS}


@pytest.mark.parametrize("front", [served], ids=["ttserve serve"], indirect=True)
def test_unknown_methods_break_no_stream(front, honest, attackers, known):
    attack_and_check(front[0], honest, attackers, known, "unknown_methods", methods_are_refused)


def test_attacks_leave_nothing_behind(front, honest):
    """The attackers still hold their connections, such as unread streams."""
    server, _ = front
    honest.check(NUM_STREAMS)
    honest.stop()
    harness.wait_for(lambda: is_idle(metrics(server)), 180, "every slot, block and lease is free")
    assert server.is_healthy()
