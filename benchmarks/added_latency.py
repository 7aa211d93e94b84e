"""Latency that router and ingress add to a first token, and an ingress's cost; vllm-router too.

Ours is all that `ttserve serve` starts (Ray, Serve, HAProxy, ingress, router) but for the device of
its engine, each of whose steps takes 10 ms (`benchmarks.timed_engine`). The added time of a request
is the client's, from its writing the request to the bytes of the first event, less the engine's,
from having read the request's message off its socket to having sent the frame with its first token.
So inside are, on the way there and back: the client's own time, loopback, HAProxy, Serve, the
ingress, encryption, and the engine's socket threads; outside are the engine's queue and steps.
Once through HAProxy and once to the ingress's own port.

Beside it, where a Python with vllm-router is named, that router before a server whose first event
comes at once and the next ones every 10 ms; its added time is the median through it less the median
without it (the client's own time and the mock's fall out there, and are inside ours). The row
"client and mock" says how much that is.

Levels: `1` is one stream; `32` is 32 in flight, each of which asks again when its last has ended,
after 16 to 48 tokens, so that requests come one by one; `32 at once` asks in waves.
What the ingress costs is CPU time of its process: of a request with one token, and of each further
one, with 32 streams through HAProxy.

    python -m benchmarks.added_latency [--peer-python /path/to/venv/bin/python] [--quick]

The last line is JSON: added milliseconds, medians and 99th percentiles, and CPU microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from benchmarks.online_vs_peers import read_stream
from benchmarks.ready import wait_ready
from benchmarks.timed_engine import FOLDER, STEP_S, read_times
from cluster.lifecycle import haproxy, supervisor
from cluster.lifecycle.listeners import read_listeners
from cluster.lifecycle.processes import process_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOST = "127.0.0.1"
STREAMS = 32
INPUT_TOKENS = 128
VOCABULARY = 4096
LENGTHS = range(16, 49)
ENGINE_ID_CHARS = 17
"""Suffix that an ingress appends to a client's request id."""


@dataclass(frozen=True)
class Repeats:
    """Numbers of repetitions.

    Attributes:
        alone: Requests of one stream.
        each: Requests of each of 32 streams.
        waves: Waves of 32.
        rounds: Of each stream with one token, and half as many with 33.
    """

    alone: int
    each: int
    waves: int
    rounds: int


FULL, QUICK = Repeats(400, 30, 20, 40), Repeats(100, 8, 6, 12)


@dataclass(frozen=True)
class Level:
    """One level's added times, in milliseconds."""

    p50: float
    p99: float

    @staticmethod
    def of(seconds: Iterable[float]) -> Level:
        """Summarise the added times of requests."""
        all_ms = sorted(1e3 * value for value in seconds)
        return Level(
            statistics.median(all_ms), all_ms[min(int(0.99 * len(all_ms)), len(all_ms) - 1)]
        )


# --- the client ----------------------------------------------------------------------------------


class Client:
    """Streams of one client process, each over its own connection, and their times.

    Args:
        port: Of the server.

    Attributes:
        first_s: Seconds to the first event, by the id that the request was given.
    """

    _ids = itertools.count()

    def __init__(self, port: int) -> None:
        self._port = port
        self._draw = random.Random(port)
        self.first_s: dict[str, float] = {}

    async def alone(self, count: int) -> None:
        """One stream, one request after the other."""
        await self._stream([4] * count)

    async def in_flight(self, each: int) -> None:
        """32 streams, each on its own."""
        lengths = [[self._draw.choice(LENGTHS) for _ in range(each)] for _ in range(STREAMS)]
        await asyncio.gather(*map(self._stream, lengths))

    async def at_once(self, waves: int, length: int = 16) -> None:
        """Waves of 32."""
        for _ in range(waves):
            await asyncio.gather(*(self._stream([length]) for _ in range(STREAMS)))

    async def _stream(self, lengths: list[int]) -> None:
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            for length in lengths:
                request_id = f"added-{next(self._ids)}"
                request = self._request(request_id, length)
                started_s = time.perf_counter()
                writer.write(request)
                data, first_s, _ = await read_stream(reader)
                if b'"finish_reason":"length"' not in data:
                    raise SystemExit(f"not a whole answer: {data[:300]!r} ... {data[-300:]!r}")
                self.first_s[request_id] = first_s - started_s
        finally:
            writer.close()

    def _request(self, request_id: str, length: int) -> bytes:
        prompt = [self._draw.randrange(100, VOCABULARY) for _ in range(INPUT_TOKENS)]
        body = json.dumps(
            {
                "model": "demo", "prompt": prompt, "max_tokens": length, "temperature": 0,
                "ignore_eos": True, "stream": True,
            }
        ).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{self._port}\r\n"
            f"X-Request-Id: {request_id}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def levels(port: int, repeats: Repeats, folder: Path | None) -> dict[str, Level]:
    """Measure every level of one server, less the engines' times if `folder` holds them."""

    async def run() -> dict[str, Client]:
        await Client(port).at_once(2)  # does not count: connections, first imports
        clients = {name: Client(port) for name in ("1", "32", "32 at once")}
        await clients["1"].alone(repeats.alone)
        await clients["32"].in_flight(repeats.each)
        await clients["32 at once"].at_once(repeats.waves)
        return clients

    clients = asyncio.run(run())
    engine_s = {} if folder is None else by_client_id(read_times(folder))
    return {
        name: Level.of(added_s(client.first_s, engine_s if folder else None))
        for name, client in clients.items()
    }


def by_client_id(engine_s: dict[str, float]) -> dict[str, float]:
    """Return the same times, by the clients' request ids."""
    return {request_id[:-ENGINE_ID_CHARS]: taken_s for request_id, taken_s in engine_s.items()}


def added_s(client_s: dict[str, float], engine_s: dict[str, float] | None) -> list[float]:
    """Return each request's time less its engine's; fail if no engine knows a request."""
    if engine_s is None:
        return list(client_s.values())
    return [taken_s - engine_s[request_id] for request_id, taken_s in client_s.items()]


# --- our server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """A running server of ours.

    Attributes:
        port: HAProxy's.
        ingress_port: The ingress's own.
        ingress_pid: Its process.
        folder: Where engines write their times.
    """

    port: int
    ingress_port: int
    ingress_pid: int
    folder: Path


def config(port: int) -> dict[str, object]:
    """One replica that does everything, on a simulated mesh."""
    engine = {
        "block_size": 32,
        "max_batch_size": STREAMS,
        "simulated_mesh": {"model": "Llama-3.2-1B", "board": "n150"},
    }
    args = {"model": "demo", "pools": {"both": {"replicas": 1, "engine": engine}}}
    application = {
        "name": "ttserve", "route_prefix": "/", "import_path": "cluster.app:build", "args": args,
    }  # fmt: skip
    return {"http_options": {"host": HOST, "port": port}, "applications": [application]}


@contextlib.contextmanager
def ours() -> Iterator[Ours]:
    """Start our server, and end all of its processes afterwards."""
    folder, port = supervisor.private_folder(), supervisor.free_port()
    script = haproxy.find_script()
    if script is None:
        raise SystemExit("HAProxy is not available here")
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config(port)), encoding="utf-8")
    options = supervisor.ServeOptions(config=str(file), folder=str(folder))
    driver = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--drive", msgspec.json.encode(options).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **supervisor.environment(folder, script), FOLDER: str(folder)},
        start_new_session=True,
    )
    try:
        wait_ready(f"http://{HOST}:{port}/health", driver)
        ingress_port, ingress_pid = _find_ingress(driver.pid)
        yield Ours(port, ingress_port, ingress_pid, folder)
    finally:
        assert driver.stdin is not None
        driver.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _find_ingress(session_id: int) -> tuple[int, int]:
    processes = process_table()
    for listener in read_listeners():
        is_ours = processes[listener.pid].session_id == session_id
        if (
            is_ours
            and listener.socket == "http-behind"
            and ":ingress" in processes[listener.pid].command
        ):
            return int(listener.address.rpartition(":")[2]), listener.pid
    raise SystemExit("no process of an ingress listens")


def drive(options: str) -> int:
    """Be the driver of `ttserve serve`, with replicas whose engines are timed."""
    # Imported here, because only this process needs Ray and Serve.
    from benchmarks.timed_replica import TimedReplica
    from cluster.lifecycle import deployments, driver

    vars(deployments).update(PoolReplica=TimedReplica)
    sys.argv[1:] = [options]
    return driver.main()


def cpu_us(server: Ours, rounds: int) -> tuple[float, float]:
    """CPU microseconds of the ingress for a request with one token, and for each further token."""
    client = Client(server.port)

    def spent(waves: int, length: int) -> float:
        began_s = _cpu_s(server.ingress_pid)
        asyncio.run(client.at_once(waves, length))
        return 1e6 * (_cpu_s(server.ingress_pid) - began_s) / (waves * STREAMS)

    per_request = spent(rounds, 1)
    return per_request, (spent(max(rounds // 2, 1), 33) - per_request) / 32


def _cpu_s(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# --- the peer ------------------------------------------------------------------------------------


async def mock(port: int) -> None:
    """A server whose first event comes at once, the others every `STEP_S`."""

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    event = b'data: {"id":"1","object":"text_completion","choices":[{"index":0,"text":"a",%b}]}\n\n'
    more, last = (
        chunk(event % b'"finish_reason":null'),
        chunk(event % b'"finish_reason":"length"') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not head.startswith(b"post"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    continue
                size = int(head.partition(b"content-length: ")[2].split()[0])
                asked = json.loads(await reader.readexactly(size))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n"
                )
                for _ in range(asked["max_tokens"] - 1):
                    writer.write(more)
                    await asyncio.sleep(STEP_S)
                writer.write(last)

    async with await asyncio.start_server(answer, HOST, port) as server:
        await server.serve_forever()


@contextlib.contextmanager
def started(command: list[str], port: int) -> Iterator[int]:
    """A server's port, until the body ends."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_ready(f"http://{HOST}:{port}/health", process)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def peer(python: str | None, repeats: Repeats) -> dict[str, dict[str, Level]]:
    """The mock alone, and behind vllm-router."""
    mock_port = supervisor.free_port()
    alone = [sys.executable, "-m", __spec__.name, "--mock", str(mock_port)]
    with started(alone, mock_port):
        found = {"client and mock": levels(mock_port, repeats, None)}
        if python is not None:
            port, metrics_port = supervisor.free_port(), supervisor.free_port()
            router = [
                python, "-m", "vllm_router.launch_router", "--host", HOST, "--port", str(port),
                "--worker-urls", f"http://{HOST}:{mock_port}", "--policy", "round_robin",
                "--prometheus-host", HOST, "--prometheus-port", str(metrics_port),
            ]  # fmt: skip
            with started(router, port):
                found["vllm-router before it"] = levels(port, repeats, None)
        return found


# --- results -------------------------------------------------------------------------------------


def show(name: str, row: dict[str, Level]) -> None:
    """One row of the table."""
    cells = " | ".join(f"{level.p50:.2f} | {level.p99:.2f}" for level in row.values())
    print(f"| {name} | {cells} |", flush=True)


def result(
    rows: dict[str, dict[str, Level]], per_request: float, per_token: float
) -> dict[str, float | None]:
    """The JSON line."""
    haproxy_row, ingress_row = rows["ours, added"], rows["ours without HAProxy, added"]
    direct, router = rows["client and mock"], rows.get("vllm-router before it")
    line: dict[str, float | None] = {}
    for name, key in (("1", "1"), ("32", "32"), ("32 at once", "32_at_once")):
        line[f"added_{key}_ms"] = round(haproxy_row[name].p50, 2)
        line[f"added_{key}_p99_ms"] = round(haproxy_row[name].p99, 2)
        line[f"ingress_{key}_ms"] = round(ingress_row[name].p50, 2)
        more = None if router is None else round(router[name].p50 - direct[name].p50, 2)
        line[f"vllm_router_{key}_ms"] = more
    return {**line, "request_cpu_us": round(per_request), "token_cpu_us": round(per_token, 1)}


def main() -> int:
    """Print the table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--mock", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", help="a Python that has vllm-router")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    asked = parser.parse_args()
    if asked.drive:
        return drive(asked.drive)
    if asked.mock:
        asyncio.run(mock(asked.mock))
    repeats = QUICK if asked.quick else FULL
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; milliseconds\n")
    print("| | 1 stream, p50 | p99 | 32 in flight, p50 | p99 | 32 at once, p50 | p99 |")
    print("|---|---|---|---|---|---|---|")
    rows: dict[str, dict[str, Level]] = {}
    with ours() as server:
        for name, port in (
            ("ours, added", server.port),
            ("ours without HAProxy, added", server.ingress_port),
        ):
            rows[name] = levels(port, repeats, server.folder)
            show(name, rows[name])
        per_request, per_token = cpu_us(server, repeats.rounds)
    for name, row in peer(asked.peer_python, repeats).items():
        rows[name] = row
        show(name, row)
    print(json.dumps(result(rows, per_request, per_token)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
