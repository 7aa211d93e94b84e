"""Streams through our documented URL, `vllm serve` and ray.serve.llm, all under one client.

Servers run one after the other on the same cores and weights: ours as `ttserve serve` starts it,
vLLM's CPU build tuned (every core bound, its allocator and OpenMP preloaded), joined (preloaded,
not bound, its worker in the engine's process, so that one less waits busily) and as installed,
ray.serve.llm where a Python with it is named, and ours once more (A/A). Each gets waves of 1, 8, 32
and 128 requests at once: 128 random tokens in, 64 out, greedy, the end token ignored, streamed.
Ratios are of medians, above 1 ours is better; the first row, a server that answers at once, tells
what the client itself can take.

    python -m benchmarks.online_vs_peers --peer-python /path/to/venv/bin/python \
        --peer-preload /path/to/libtcmalloc_minimal.so.4:/path/to/libiomp5.so \
        [--ray-python /path/to/other/bin/python] [--config configs/single.yaml] [--quick]

The last line is JSON: ratios to the best of vLLM's variants, in each number, and to ray.serve.llm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ready import running
from cluster.lifecycle.supervisor import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "configs" / "demo-model"
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
VOCABULARY = 4096
LEVELS = (1, 8, 32, 128)
WAVES = {1: 40, 8: 10, 32: 6, 128: 3}
QUICK_WAVES = {1: 20, 8: 3, 32: 3, 128: 2}
BURST = 0.01
"""An answer whose tokens are so much closer to each other than to their request is no stream."""
HOST = "127.0.0.1"
_EVENT, _DONE = b"data: ", b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Measured:
    """Waves of one size.

    Attributes:
        ttft_ms: Median time to the first event.
        ttft_p99_ms: Its 99th percentile, the greatest of fewer than a hundred.
        tpot_ms: Median time from one token to the next.
        tokens_per_s: Of all streams together, median over the waves.
    """

    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Server:
    """Start arguments of one server.

    Attributes:
        name: In the tables.
        command: With "{port}" for the port.
        env: Variables besides those of this process.
        ready: Path that it answers with 200 once it serves.
    """

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    ready: str = "/health"


# --- the client ----------------------------------------------------------------------------------


class Client:
    """One connection, kept for all requests of its stream; times are of the bytes' arrival."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._draw = random.Random(seed)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self) -> tuple[float, float]:
        """One request; seconds to its first event, and from there to its last token."""
        request = self._request()
        if self._streams is not None:
            try:
                return await _ask(request, *self._streams)
            except NothingCameError:
                # Servers close a connection that has waited for the slowest of a wave.
                self.close()
        self._streams = await asyncio.open_connection(HOST, self._port)
        return await _ask(request, *self._streams)

    def close(self) -> None:
        """Leave."""
        if self._streams is not None:
            self._streams[1].close()

    def _request(self) -> bytes:
        body = json.dumps(
            {
                "model": "demo",
                "prompt": [self._draw.randrange(100, VOCABULARY) for _ in range(INPUT_TOKENS)],
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class NothingCameError(SystemExit):
    """The server closed the connection and had sent nothing of the answer."""


async def _ask(
    request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[float, float]:
    started_s = time.perf_counter()
    writer.write(request)
    data, first_s, last_s = await read_stream(reader)
    if f'"completion_tokens":{OUTPUT_TOKENS}'.encode() not in data.replace(b" ", b""):
        raise SystemExit(f"not {OUTPUT_TOKENS} tokens: {data[:300]!r} ... {data[-300:]!r}")
    return first_s - started_s, last_s - first_s


async def read_stream(reader: asyncio.StreamReader) -> tuple[bytes, float, float]:
    """An answer to its end, and when its first event and its last text came (`perf_counter`)."""
    data = b""
    first_s = last_s = 0.0
    while not data.endswith(b"\r\n0\r\n\r\n"):
        try:
            more = await reader.read(1 << 16)
        except ConnectionError:
            more = b""
        if not more:
            kind = SystemExit if data else NothingCameError
            raise kind(f"the server ended a stream early: {data[-300:]!r}")
        now_s = time.perf_counter()
        data += more
        if not first_s and _EVENT in data:
            first_s = now_s
        if b'"text":' in more:
            last_s = now_s
    return data, first_s, last_s


async def measure(port: int, waves: dict[int, int]) -> dict[int, Measured]:
    """Every level, after a wave of each that does not count: shapes may be prepared there."""
    for count in waves:
        await level(port, count, 1)
    return {count: await level(port, count, num) for count, num in waves.items()}


async def level(port: int, num_streams: int, num_waves: int) -> Measured:
    """Measure waves of one request in each stream."""
    timings: list[tuple[float, float]] = []
    rates: list[float] = []
    # Of their own for each level: servers close connections that are idle for some seconds.
    clients = [Client(port, seed) for seed in range(num_streams)]
    try:
        for _ in range(num_waves):
            started_s = time.perf_counter()
            timings += await asyncio.gather(*(client.run() for client in clients))
            rates.append(num_streams * OUTPUT_TOKENS / (time.perf_counter() - started_s))
    finally:
        for client in clients:
            client.close()
    firsts = sorted(1e3 * first_s for first_s, _ in timings)
    return Measured(
        statistics.median(firsts),
        firsts[min(int(0.99 * len(firsts)), len(firsts) - 1)],
        statistics.median(1e3 * rest_s / (OUTPUT_TOKENS - 1) for _, rest_s in timings),
        statistics.median(rates),
    )


# --- the servers ---------------------------------------------------------------------------------


async def serve_at_once(port: int) -> None:
    """Serve without computing, to measure the client's own time."""
    event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    end = f'data: {{"usage":{{"completion_tokens":{OUTPUT_TOKENS}}}}}\n\n'.encode() + _DONE

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"post"):
                    await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    for _ in range(OUTPUT_TOKENS):
                        writer.write(chunk(event))
                        await asyncio.sleep(0)
                    writer.write(chunk(end) + b"0\r\n\r\n")
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, HOST, port) as server:
        await server.serve_forever()


def servers(asked: argparse.Namespace) -> list[Server]:
    """All of them, in their order; ours first and last."""
    config = ("--config", str(asked.config.absolute())) if asked.config else ()
    ours = (sys.executable, "-m", "cluster.cli", "serve", "--port", "{port}", *config)
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    peer = {**quiet, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    preloaded = {**peer, **({"LD_PRELOAD": asked.peer_preload} if asked.peer_preload else {})}
    tuned = {**preloaded, "VLLM_CPU_OMP_THREADS_BIND": asked.peer_cores}
    num_cores = str(len(os.sched_getaffinity(0)))
    joined = {**preloaded, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": num_cores}
    vllm = (
        asked.peer_python or "", "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL),
        "--served-model-name", "demo", "--host", HOST, "--port", "{port}",
        "--max-model-len", "2048", "--disable-log-stats",
    )  # fmt: skip
    ray = (asked.ray_python or "", str(Path(__file__).with_name("ray_serve_llm.py")))
    at_once = (sys.executable, "-m", "benchmarks.online_vs_peers", "--serve-at-once", "{port}")
    found = [
        Server("client alone", at_once, {}),
        Server("ours", ours, quiet),
        Server("vllm tuned", vllm, tuned),
        Server("vllm joined", vllm, joined),
        Server("vllm installed", vllm, peer),
        Server("ray.serve.llm", (*ray, str(MODEL), "{port}"), peer, "/v1/models"),
        Server("ours again", ours, quiet),
    ]
    return [server for server in found if server.command[0]]


@contextlib.contextmanager
def serving(server: Server) -> Iterator[int]:
    """Start a server and yield its port; end all processes of its session afterwards."""
    port = free_port()
    command = [part.format(port=port) for part in server.command]
    cwd = ROOT if server.command[0] == sys.executable else None
    with running(command, f"http://{HOST}:{port}{server.ready}", cwd=cwd, env=server.env):
        yield port


# --- results -------------------------------------------------------------------------------------


def ratios(rows: dict[str, dict[int, Measured]]) -> dict[str, float | None]:
    """The JSON line: ours against the best of vLLM's variants, and against ray.serve.llm."""
    ours = rows["ours"]
    vllm = [row for name, row in rows.items() if name.startswith("vllm")]
    ray = rows.get("ray.serve.llm")
    # One that sends an answer in a burst takes no time from token to token.
    streaming = [row for row in vllm if row[1].tpot_ms > BURST * row[1].ttft_ms]

    def less(attribute: str, count: int, peers: list[dict[int, Measured]]) -> float:
        best = min(getattr(peer[count], attribute) for peer in peers)
        return float(round(best / getattr(ours[count], attribute), 2))

    def more(count: int, peers: list[dict[int, Measured]]) -> float:
        return round(ours[count].tokens_per_s / max(p[count].tokens_per_s for p in peers), 2)

    return {
        "ttft_1": less("ttft_ms", 1, vllm),
        "tpot_1": less("tpot_ms", 1, streaming) if streaming else None,
        "tps_32": more(32, vllm),
        "ttft_32": less("ttft_ms", 32, vllm),
        "tps_128": more(128, vllm),
        "ray_tps_32": more(32, [ray]) if ray else None,
        "ray_ttft_32": less("ttft_ms", 32, [ray]) if ray else None,
    }


def show(name: str, row: dict[int, Measured]) -> None:
    """One server's lines of the table."""
    for count, found in row.items():
        print(
            f"| {name} | {count} | {found.ttft_ms:.1f} | {found.ttft_p99_ms:.1f} "
            f"| {found.tpot_ms:.2f} | {found.tokens_per_s:,.0f} |",
            flush=True,
        )


def main() -> None:
    """Print the table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve-at-once", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", help="a Python that has vllm-cpu")
    parser.add_argument("--peer-preload", default="", help="LD_PRELOAD of its tuned variant")
    parser.add_argument("--peer-cores", default=f"0-{len(os.sched_getaffinity(0)) - 1}")
    parser.add_argument("--ray-python", help="a Python that has ray[llm] and vllm-cpu")
    parser.add_argument("--config", type=Path, help="of ours; what `ttserve serve` takes without")
    parser.add_argument("--only", action="append", help="measure these servers alone, no ratios")
    parser.add_argument("--quick", action="store_true", help="fewer waves")
    asked = parser.parse_args()
    if asked.serve_at_once:
        asyncio.run(serve_at_once(asked.serve_at_once))
        return
    if not asked.peer_python and not asked.only:
        parser.error("--peer-python: name a Python that has vllm-cpu, or --only servers")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| server | streams | TTFT, ms | p99 | TPOT, ms | tokens/s |\n|---|---|---|---|---|---|")
    rows = {}
    for server in servers(asked):
        if asked.only and server.name not in asked.only:
            continue
        with serving(server) as port:
            waves = QUICK_WAVES if asked.quick else WAVES
            rows[server.name] = asyncio.run(measure(port, waves))
        show(server.name, rows[server.name])
    if not asked.only:
        print(json.dumps(ratios(rows)))


if __name__ == "__main__":
    main()
