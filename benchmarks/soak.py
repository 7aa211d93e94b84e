"""Soak test of a cluster that serves for long: memory, descriptors, blocks, answers.

Starts `ttserve serve` as a user would, lets 64 clients send ten requests a second and give up on
every fifth, and looks at every process of the cluster every few seconds. After a warm-up of ten
minutes no process of ours may change by more than 1 %, and once the load is over nothing may be
held. Equal requests must have equal answers; in bfloat16 a near tie may go either way, so that a
share of them may differ there.

    python -m benchmarks.soak --minutes 60 --samples soak.jsonl
    python -m benchmarks.soak --quick
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import IO

import msgspec
import yaml

from benchmarks.ready import wait_ready
from benchmarks.soaking.growth import ProcessGrowth, Sample, judge, mb_per_1000_requests, table
from benchmarks.soaking.leaks import held
from benchmarks.soaking.load import Load, Tally
from benchmarks.soaking.processes import ProcessSampler
from cluster.config.resolve import resolve
from cluster.config.serve_file import read_serve_file
from cluster.lifecycle.supervisor import free_port

WARM_UP_S = 600.0
SAMPLE_S = 5.0
SETTLE_S = 60.0
"""How long leases and the like may take to lapse once the load is over."""
MAX_CHANGED_SHARE = 0.05
"""Of whole answers, those that may differ from the first to the same request."""
QUICK_S = 45.0
_STOP_S = 30.0


class Outcome(msgspec.Struct, frozen=True):
    """Result of a run.

    Attributes:
        tally: How the requests ended.
        held: Resources that the cluster still held when all were over.
        grown: Growth of each process.
    """

    tally: Tally
    held: dict[str, int]
    grown: list[ProcessGrowth]

    @property
    def leaked(self) -> int:
        """Return the number of resources that were still held."""
        return sum(abs(count) for count in self.held.values())

    def summary(self) -> dict[str, float]:
        """The line that a run ends with."""
        return {
            "requests": self.tally.requests,
            "ok": self.tally.ok,
            "errors": self.tally.errors,
            "leaked": self.leaked,
            "growth_mb_per_1000_requests": round(mb_per_1000_requests(self.grown), 3),
        }

    def problems(self, *, is_long: bool) -> list[str]:
        """Return the violations; growth counts only where there was time to warm up."""
        found = [f"{self.tally.errors} errors: {note}" for note in self.tally.notes]
        found += [f"{count} {name} still held" for name, count in self.held.items()]
        if self.tally.changed > MAX_CHANGED_SHARE * self.tally.ok:
            found.append(f"{self.tally.changed} of {self.tally.ok} answers changed")
        if is_long:
            found += [f"{g.process} is not flat" for g in self.grown if g.is_ours and not g.is_flat]
        return found


def server_file(config: Path, port: int, folder: Path) -> Path:
    """Copy a Serve config file, with another port."""
    content = yaml.safe_load(config.read_text())
    content.setdefault("http_options", {})["port"] = port
    copy = folder / config.name
    copy.write_text(yaml.safe_dump(content))
    return copy


async def sample_forever(
    sampler: ProcessSampler, tally: Tally, samples: list[Sample], log: IO[bytes] | None
) -> None:
    """Look at the processes every `SAMPLE_S` seconds, until cancelled."""
    begin_s = time.monotonic()
    for count in range(sys.maxsize):
        await asyncio.sleep(max(begin_s + count * SAMPLE_S - time.monotonic(), 0.0))
        looked = await asyncio.to_thread(
            sampler.look, round(time.monotonic() - begin_s, 3), tally.requests
        )
        samples += looked
        if log is not None:
            log.writelines(msgspec.json.encode(sample) + b"\n" for sample in looked)
            log.flush()


async def soak(
    load: Load, sampler: ProcessSampler, load_s: float, log: IO[bytes] | None
) -> list[Sample]:
    """Run the load and sample beside it."""
    samples: list[Sample] = []
    sampling = asyncio.create_task(sample_forever(sampler, load.tally, samples, log))
    try:
        await load.run(load_s)
    finally:
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
    return samples


def settle(url: str) -> dict[str, int]:
    """Wait until nothing is held; return what still is after at most `SETTLE_S`."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            left = held(reply.read().decode())
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(1.0)


def run(config: Path, load_s: float, samples_path: Path | None) -> Outcome:
    """Start a server, soak it, stop it."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, contextlib.ExitStack() as stack:
        log = stack.enter_context(samples_path.open("wb")) if samples_path is not None else None
        path = server_file(config, free_port(), Path(folder))
        file = read_serve_file(path)
        output = stack.enter_context(Path(folder, "log").open("wb"))
        server = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "serve", "--config", str(path)],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_ready(f"{file.url}/health", server)
            load = Load(file.url, resolve(file.args).served_model_name)
            samples = asyncio.run(soak(load, ProcessSampler(server.pid), load_s, log))
            left = settle(f"http://127.0.0.1:{file.http_options.port + 1}")
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(_STOP_S)
    return Outcome(load.tally, left, judge(samples, min(WARM_UP_S, load_s / 3)))


def main() -> int:
    """Parse arguments, run, print a table and one JSON object as the last line.

    Returns:
        Exit code: 1 if something was wrong, leaked or not flat.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about 75 seconds; judges no growth")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the load runs")
    parser.add_argument("--config", type=Path, default=Path("configs/2p2d.yaml"))
    parser.add_argument("--samples", type=Path, help="file for every sample, as JSON lines")
    arguments = parser.parse_args()
    load_s = QUICK_S if arguments.quick else arguments.minutes * 60.0
    outcome = run(arguments.config.absolute(), load_s, arguments.samples)
    problems = outcome.problems(is_long=load_s > 2 * WARM_UP_S)
    print(table(outcome.grown))
    print(f"{outcome.tally.aborted} requests given up by their clients")
    print(f"{outcome.tally.changed} answers differ from the first to the same request")
    print("\n".join(problems) or "nothing wrong, nothing leaked")
    print(json.dumps(outcome.summary()))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
