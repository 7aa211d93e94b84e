"""Cost of authentication and encryption of an engine's control sockets.

The same engine and client three times: with CurveZMQ, as it always is, and twice in plain, which
exists here alone. Rounds go over the three in turns, so that what the machine does besides hits all
of them; each figure is the median over rounds of the ratio, or difference, to the first plain one.
The second plain one shows what such a figure is worth. On a machine that others use too, the CPU
time of engine and client per token and the least time to a first token are worth more.

    python -m benchmarks.control_auth [--streams 32] [--rounds 15] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plain_engine import nothing
from cluster.config.resolve import demo_model_folder
from replicas import dealer, launch
from replicas.async_client import AsyncMPClient
from replicas.config import EngineConfig
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.launch import EngineHandle

KINDS = ("plain", "plain again", "curve")
NUM_TOKENS = 64
NUM_FIRST_TOKENS = 20
"""Requests, one after the other, whose first token is waited for in a round."""
_ids = itertools.count()


class End:
    """An engine and its client.

    Args:
        kind: One of `KINDS`.
        num_streams: For how many streams at once the engine has slots.
    """

    def __init__(self, kind: str, num_streams: int) -> None:
        self._is_plain = kind != "curve"
        config = EngineConfig(
            model=str(demo_model_folder()), dtype="float32", max_model_len=256, num_threads=1,
            max_batch_size=num_streams, num_blocks=num_streams * 8 + 1, block_size=32,
        )  # fmt: skip
        module = launch._ENGINE  # noqa: SLF001
        if self._is_plain:
            vars(launch).update(_ENGINE="benchmarks.plain_engine")
        try:
            self.handle: EngineHandle = launch.start_engine(config)
        finally:
            vars(launch).update(_ENGINE=module)
        self.client = AsyncMPClient(self.handle.keys)

    async def connect(self) -> None:
        """Connect the client."""
        secure = vars(dealer)["secure_client"]
        if self._is_plain:
            vars(dealer).update(secure_client=nothing)
        try:
            await self.client.connect(self.handle.description)
        finally:
            vars(dealer).update(secure_client=secure)

    async def run(self, num_tokens: int) -> float:
        """Run one request; seconds until its first token."""
        request_id = f"r{next(_ids)}"
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True)
        request = EngineRequest(request_id, [5 + next(_ids) % 90, 6, 7], sampling)
        start_s = time.perf_counter()
        first_s = 0.0
        incarnation = self.handle.description.incarnation
        stream = self.client.open_stream(incarnation, request_id, AddRequest(request))
        while True:
            event = await stream.get()
            if isinstance(event, TokenOutput):
                first_s = first_s or time.perf_counter() - start_s
                if event.finish_reason is not None:
                    stream.close(abort=False)
                    return first_s

    async def tokens_per_s(self, num_streams: int) -> tuple[float, float]:
        """Return the rate of so many streams together, and CPU microseconds for each token."""
        start_s, start_cpu_s = time.perf_counter(), self._cpu_s()
        await asyncio.gather(*(self.run(NUM_TOKENS) for _ in range(num_streams)))
        num_tokens = num_streams * NUM_TOKENS
        cpu_s = self._cpu_s() - start_cpu_s
        return num_tokens / (time.perf_counter() - start_s), 1e6 * cpu_s / num_tokens

    async def ttft_ms(self) -> list[float]:
        """Return the times of requests that come one after the other."""
        return [1000 * await self.run(2) for _ in range(NUM_FIRST_TOKENS)]

    def _cpu_s(self) -> float:
        """Return the CPU time of the engine and of this process, so far."""
        stat = Path(f"/proc/{self.handle.description.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + time.process_time()


class Figures:
    """Measurements of the rounds, by kind."""

    def __init__(self) -> None:
        self.speeds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        self.firsts: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}

    def more_than_base(self, kind: str) -> dict[str, float]:
        """Return a kind's costs over the first one."""
        pairs = list(zip(self.speeds[kind], self.speeds[KINDS[0]], strict=True))
        later = [
            statistics.median(a) - statistics.median(b)
            for a, b in zip(self.firsts[kind], self.firsts[KINDS[0]], strict=True)
        ]
        least = [min(itertools.chain(*self.firsts[k])) for k in (kind, KINDS[0])]
        return {
            "tokens_per_s_ratio": round(statistics.median(a[0] / b[0] for a, b in pairs), 4),
            "cpu_us_per_token_more": round(statistics.median(a[1] - b[1] for a, b in pairs), 1),
            "ttft_ms_more": round(statistics.median(later), 3),
            "least_ttft_ms_more": round(least[0] - least[1], 3),
        }

    def of_base(self) -> dict[str, float]:
        """The first kind's own."""
        speeds, firsts = self.speeds[KINDS[0]], self.firsts[KINDS[0]]
        return {
            "plain_tokens_per_s": round(statistics.median(a for a, _ in speeds), 1),
            "plain_cpu_us_per_token": round(statistics.median(b for _, b in speeds), 1),
            "plain_ttft_ms": round(statistics.median(itertools.chain(*firsts)), 3),
        }


async def compare(num_streams: int, num_rounds: int) -> dict[str, object]:
    """Measure; one row for each kind but the first, and the first one's own figures."""
    ends = {kind: End(kind, num_streams) for kind in KINDS}
    figures = Figures()
    try:
        for end in ends.values():
            await end.connect()
            await end.tokens_per_s(num_streams)
        for n in range(num_rounds):
            for kind in KINDS[n % 3 :] + KINDS[: n % 3]:
                figures.speeds[kind].append(await ends[kind].tokens_per_s(num_streams))
                figures.firsts[kind].append(await ends[kind].ttft_ms())
    finally:
        for end in ends.values():
            await end.client.close()
            end.handle.stop()
    _, again, curve = KINDS
    return {
        "streams": num_streams,
        "rounds": num_rounds,
        **figures.of_base(),
        "aa": figures.more_than_base(again),
        "curve": figures.more_than_base(curve),
    }


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    print(json.dumps(asyncio.run(compare(arguments.streams, rounds))))


if __name__ == "__main__":
    main()
