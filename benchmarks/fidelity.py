"""Accuracy of the simulator against a real cluster: torch engines, recorded, replayed, simulated.

For each cluster file, by turns and several times over:

1. record: real engine processes run a fitting workload, and each keeps a record of its turns;
2. replay: other engine processes of the same settings run two held-out workloads (another seed,
   other arrivals, other lengths) through the production's router and client, without HTTP.

Then every engine's timing, the network's delay and the KV link are fitted on the records, and the
simulator runs the held-out workloads. Rates are set so that the busiest engine is busy for about
half of the time, by the simulator's own account. Every process has one compute thread. Times run
from the call of the router to its outputs, in reality as in the simulator.

The A/A columns compare the replays with each other: no simulator can predict that difference.

    python -m benchmarks.fidelity [--quick] [--config configs/single.yaml ...] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.fitted_timing import (
    TERMS,
    Copy,
    EngineRecord,
    FittedTiming,
    StepModel,
    fit_medians,
    fit_timing,
    with_factors_of,
)
from cluster.config.resolve import resolve
from cluster.config.schema import RouterConfig
from cluster.config.serve_file import read_serve_file
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PoolSpec, SimulationOptions
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.workloads.load import load_workload
from cluster.lab.workloads.request import FIRST_PROMPT_TOKEN
from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.pools import Member
from cluster.routing.router import Router
from cluster.routing.tickets import TicketOffice
from kv_transfer.keys import KeyRing
from replicas.async_client import AsyncMPClient
from replicas.engine_process.parent import EngineArguments, EngineReport
from replicas.launch import EngineHandle
from replicas.messages import EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from numpy.typing import NDArray

    from cluster.lab.simulation.records import SimulationResult
    from cluster.lab.workloads.request import Workload
    from replicas.config import EngineConfig, Role

Spec = dict[str, dict[str, Any]]

ROUTER = RouterConfig(min_remote_prefill_tokens=0)
"""Every prompt takes the same path in reality and in the simulator."""
CONFIGS = (Path("configs/single.yaml"), Path("configs/demo.yaml"))
TARGET_BUSY = 0.55
"""Share of the time in which the busiest engine is busy, in the held-out workloads."""
FIRST_RPS = 6.0
"""The first fitting workload, on a machine of unknown speed, ends at this rate."""
FITTING_RATIO = 1.4
"""The others end at the rate of the held-out workloads times this."""
BARS = {"e2e_median": 0.05, "itl_median": 0.05, "ttft_median": 0.15}
_ENGINE = "benchmarks.recording_engine"
KEYS = KeyRing((secrets.token_bytes(32),))
"""Secret that seals one run's tickets."""

# Fitting: from nothing to do to more than can be done, short and long, shared beginnings.
FITTING: Spec = {
    "arrivals": {"kind": "ramp", "start_rps": 1.0, "end_rps": 1.0, "ramp_s": 1.0, "cv": 2.0},
    "prompt_tokens": {"kind": "lognormal", "mean": 200, "std": 220, "min": 8, "max": 1200},
    "output_tokens": {"kind": "lognormal", "mean": 40, "std": 40, "min": 1, "max": 250},
    "prefixes": {"groups": 6, "prefix_tokens": 96},
}
HELD_OUT: dict[str, Spec] = {
    "Poisson": {
        "arrivals": {"kind": "poisson", "rate_rps": 1.0},
        "prompt_tokens": {"kind": "uniform", "min": 32, "max": 700},
        "output_tokens": {"kind": "uniform", "min": 16, "max": 96},
        "prefixes": {"groups": 3, "prefix_tokens": 192},
    },
    "bursty": {
        "arrivals": {"kind": "gamma", "rate_rps": 1.0, "cv": 3.0},
        "prompt_tokens": {"kind": "lognormal", "mean": 300, "std": 150, "min": 16, "max": 900},
        "output_tokens": {"kind": "lognormal", "mean": 60, "std": 30, "min": 4, "max": 160},
    },
}
_WARM: Spec = {
    "arrivals": {"kind": "constant", "rate_rps": 1.0},
    "prompt_tokens": {"kind": "constant", "tokens": 64},
    "output_tokens": {"kind": "constant", "tokens": 8},
}
_FITTING_SEED, _HELD_OUT_SEED = 1000, 77


@dataclass(frozen=True)
class Scale:
    """Numbers and lengths of workloads.

    Attributes:
        rounds: How many held-out workloads of each kind; each is replayed twice, with fitting
            workloads between them: what else the machine does meets all of them.
        round_s: Length of each workload.
    """

    rounds: int
    round_s: float


QUICK = Scale(rounds=2, round_s=2.0)
FULL = Scale(rounds=6, round_s=2.5)


@dataclass(frozen=True)
class Answer:
    """One request of a replay: when it was asked, and when its tokens came; monotonic seconds."""

    request_id: str
    asked_s: float
    token_times_s: list[float]


# --- engines -------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A started engine process.

    Attributes:
        role: Its pool.
        config: Its configuration.
        handle: The process.
        record: Where it leaves its record.
    """

    role: Role
    config: EngineConfig
    handle: EngineHandle
    record: Path


def start_engine(role: Role, config: EngineConfig, record: Path) -> Engine:
    """Start an engine that records its turns; see `replicas.launch.start_engine`."""
    incarnation = secrets.token_hex(8)
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", _ENGINE, str(record)], stdin=subprocess.PIPE, pass_fds=(write_fd,)
    )
    os.close(write_fd)
    assert process.stdin is not None
    arguments = EngineArguments(
        config=config, incarnation=incarnation, host="127.0.0.1", ready_fd=write_fd
    )
    process.stdin.write(msgspec.json.encode(arguments) + b"\n")
    process.stdin.flush()
    with os.fdopen(read_fd, "rb") as lines:
        for line in lines:
            report = msgspec.json.decode(line, type=EngineReport)
            if report.ready is not None:
                return Engine(
                    role, config, EngineHandle(process, report.ready, config.keys), record
                )
            if report.failed is not None:
                break
    process.kill()
    process.communicate()
    raise SystemExit(f"an engine did not start: {role}")


@contextlib.contextmanager
def running(pools: Sequence[tuple[Role, EngineConfig]], folder: Path) -> Iterator[list[Engine]]:
    """Start the engines of a cluster side by side; end them all, which makes them write."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(pools)) as threads:
        engines = list(
            threads.map(
                lambda i: start_engine(*pools[i], folder / f"{i}.msgpack"), range(len(pools))
            )
        )
    try:
        yield engines
    finally:
        for engine in engines:
            engine.handle.stop()


class Ingress:
    """The production's router over real connections, as `Ingress` has it."""

    def __init__(self) -> None:
        self.fleet = Fleet(partial(AsyncMPClient, KEYS), KEYS)
        metrics = RouterMetrics("fidelity")
        self.router = Router(self.fleet, ROUTER, metrics, TicketOffice(KEYS))


@contextlib.asynccontextmanager
async def connected(engines: Sequence[Engine]) -> AsyncIterator[Ingress]:
    """An ingress that knows the engines."""
    ingress = Ingress()
    try:
        for engine in engines:
            description = engine.handle.description
            await ingress.fleet.connect(Member(engine.role, engine.role, description))
        yield ingress
    finally:
        await ingress.fleet.client.close()


_runs = itertools.count()


async def replay(ingress: Ingress, workload: Workload, label: str) -> list[Answer]:
    """Run a workload; requests that fail end the benchmark.

    Its prompts have token ids that no other run's have at their places, so that the prefix cache
    knows no more of them than in the simulator.
    """
    shift = next(_runs)
    vocab_size = ingress.fleet.pools.members()[0].description.vocab_size
    requests = [
        EngineRequest(
            f"{label}-{i}",
            [
                FIRST_PROMPT_TOKEN + (t + shift) % (vocab_size - FIRST_PROMPT_TOKEN)
                for t in workload.prompt(i, vocab_size)
            ],
            SamplingParams(
                max_tokens=r.num_output_tokens, temperature=0.0, seed=i, ignore_eos=True
            ),
        )
        for i, r in enumerate(workload.requests)
    ]

    async def ask(request: EngineRequest) -> Answer:
        answer = Answer(request.request_id, time.monotonic(), [])

        async def emit(output: TokenOutput) -> bool:
            answer.token_times_s.extend([time.monotonic()] * len(output.token_ids))
            return True

        await ingress.router.run(request, emit)
        return answer

    gc.collect()
    gc.freeze()
    started_s = time.monotonic()
    tasks = []
    for request, traced in zip(requests, workload.requests, strict=True):
        await asyncio.sleep(traced.arrival_s - (time.monotonic() - started_s))
        tasks.append(asyncio.create_task(ask(request)))
    return await asyncio.gather(*tasks)


# --- workloads -----------------------------------------------------------------------------------


def draw(spec: Spec, rate_rps: float | None, duration_s: float, seed: int) -> Workload:
    """A workload of a specification; at another rate than it says, if one is given.

    As many requests as the rate gives on average, at least six.
    """
    arrivals = {**spec["arrivals"]}
    length: dict[str, float] = {"duration_s": duration_s}
    if rate_rps is not None:
        arrivals["rate_rps"] = rate_rps
        length = {"num_requests": max(6, round(rate_rps * duration_s))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps({**spec, "arrivals": arrivals, **length}))
        return load_workload(path, format="distributions", seed=seed)


# --- the model of a cluster ----------------------------------------------------------------------


@dataclass
class Recording:
    """Records of a cluster's fitting runs.

    Attributes:
        records: By engine.
        answers: The client's measurements of the same runs.
    """

    records: list[EngineRecord]
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """A fitted cluster."""

    pools: list[PoolSpec]
    network: NetworkConfig

    def on_machine_of(self, recording: Recording) -> Model:
        """Return the same costs, with the waits for processors that other runs recorded."""
        pools = []
        for pool, record in zip(self.pools, recording.records, strict=True):
            assert isinstance(pool.timing, FittedTiming)
            pools.append(pool._replace(timing=with_factors_of(pool.timing, record)))
        network = msgspec.structs.replace(self.network, latency_s=sum(latencies_s(recording)) / 2)
        return Model(pools, network)

    def simulate(self, workload: Workload, salt: int = 0) -> SimulationResult:
        """Run a workload in the simulator; with another salt, steps have other luck."""
        options = SimulationOptions(router=ROUTER, network=self.network)
        pools = []
        for pool in self.pools:
            assert isinstance(pool.timing, FittedTiming)
            pools.append(pool._replace(timing=dataclasses.replace(pool.timing, salt=salt)))
        return Simulation(pools, workload, options).run()


def fit(engines: Sequence[tuple[Role, EngineConfig]], recording: Recording) -> Model:
    """Fit engines, network and link."""
    pools = []
    for (role, config), record in zip(engines, recording.records, strict=True):
        assert record.facts is not None
        timing = fit_timing(record, config.block_size)
        pools.append(PoolSpec(role, 1, config, timing, record.facts))
    return Model(pools, fit_network(recording))


def fit_network(recording: Recording) -> NetworkConfig:
    """The delay between router and engine (mean of both ways), and the wire of KV."""
    ways_s = latencies_s(recording)
    wire = kv_wire(recording.records)
    bytes_per_s = 1e12
    if len(wire) > 1:
        sizes = np.array([[1.0, num_bytes] for num_bytes, _ in wire])
        _, byte_s = fit_medians(sizes, np.array([max(s, 1e-6) for _, s in wire]))
        bytes_per_s = 1.0 / max(float(byte_s), 1e-12)
    return NetworkConfig(latency_s=sum(ways_s) / 2, kv_bytes_per_s=bytes_per_s)


def latencies_s(recording: Recording) -> tuple[float, float]:
    """Medians: from the router's call to an engine's inbox, and from its outbox to the output.

    The way in is that of the first engine that a request reaches.
    """
    received: dict[str, float] = {}
    sent: dict[tuple[str, int], float] = {}
    for record in recording.records:
        for request_id, at_s in record.received.items():
            received[request_id] = min(at_s, received.get(request_id, at_s))
        for request_id, index, at_s in record.sent:
            sent[request_id, index] = at_s
    there = [received[a.request_id] - a.asked_s for a in recording.answers]
    back = [
        at_s - sent[a.request_id, i]
        for a in recording.answers
        for i, at_s in enumerate(a.token_times_s)
        if (a.request_id, i) in sent
    ]
    return float(np.median(there)), float(np.median(back))


def kv_wire(records: Sequence[EngineRecord]) -> list[tuple[int, float]]:
    """(bytes, seconds) of KV messages, from the copy out of a cache to the consumer's wake-up.

    Chunks of a transfer arrive in the order in which they were read, and are written in that order.
    """
    if len(records) != 2:
        return []
    producer, consumer = records
    reads: list[Copy] = [c for c in producer.copies if c.direction == "read"]
    writes: list[Copy] = [c for c in consumer.copies if c.direction == "write"]
    wakes_s = np.array(consumer.wakes_s)
    wire = []
    for read, write in zip(reads, writes, strict=False):
        if read.num_bytes != write.num_bytes:
            break
        i = int(np.searchsorted(wakes_s, read.end_s))
        if i < len(wakes_s) and wakes_s[i] <= write.start_s:
            wire.append((read.num_bytes, float(wakes_s[i]) - read.end_s))
    return wire


def rate_for(model: Model, spec: Spec, duration_s: float) -> float:
    """The rate at which the busiest engine is busy for `TARGET_BUSY` of the time.

    The median over workloads as short as those that are replayed, and not the same.
    """
    low, high = 0.2, 100.0
    for _ in range(9):
        rate_rps = (low * high) ** 0.5
        workloads = [draw(spec, rate_rps, duration_s, seed) for seed in range(9)]
        busy = np.median([busy_share(model.simulate(workload)) for workload in workloads])
        low, high = (low, rate_rps) if busy > TARGET_BUSY else (rate_rps, high)
    return float((low * high) ** 0.5)


def busy_share(result: SimulationResult) -> float:
    """Return the share of time in which the busiest engine is busy."""
    return float(max(replica.busy_s for replica in result.replicas) / result.duration_s)


# --- figures -------------------------------------------------------------------------------------


def figures(
    asked_s: Sequence[float], times_s: Sequence[Sequence[float] | NDArray[np.float64]]
) -> dict[str, float]:
    """Milliseconds of a run."""
    e2e = np.array([t[-1] - a for a, t in zip(asked_s, times_s, strict=True)]) * 1e3
    ttft = np.array([t[0] - a for a, t in zip(asked_s, times_s, strict=True)]) * 1e3
    itl = np.concatenate([np.diff(t) for t in times_s]) * 1e3
    return {
        "e2e_median": float(np.median(e2e)),
        "e2e_mean": float(e2e.mean()),
        "itl_median": float(np.median(itl)),
        "itl_mean": float(itl.mean()),
        "ttft_median": float(np.median(ttft)),
        "ttft_mean": float(ttft.mean()),
        "ttft_p90": float(np.quantile(ttft, 0.9)),
    }


def of_answers(answers: Sequence[Answer]) -> dict[str, float]:
    """Figures of a replay."""
    return figures([a.asked_s for a in answers], [a.token_times_s for a in answers])


def of_simulations(results: Sequence[SimulationResult]) -> dict[str, float]:
    """Figures of simulations, all requests together."""
    records = [record for result in results for record in result.records]
    assert all(record.outcome == "ok" for record in records)
    return figures([r.arrival_s for r in records], [r.token_times_s for r in records])


@dataclass(frozen=True)
class Comparison:
    """One workload on one cluster; figures in milliseconds.

    Attributes:
        title: Cluster and workload.
        rate_rps: Requests per second.
        busy: Share of the time in which the busiest engine works, in the simulator.
        halves: Of the first replay of every workload, and of the second.
        real: Of both.
        simulated: Of the simulations.
        hindsight: Of simulations that know how long the replays' processes waited for processors:
            the machine does not cause the remaining difference. A diagnosis, without a bar.
    """

    title: str
    rate_rps: float
    busy: float
    halves: tuple[dict[str, float], ...]
    real: dict[str, float]
    simulated: dict[str, float]
    hindsight: dict[str, float]

    def errors(self) -> dict[str, float]:
        """Simulated over real, minus 1."""
        return {key: self.simulated[key] / value - 1.0 for key, value in self.real.items()}

    def noise(self) -> dict[str, float]:
        """The first replays over the second ones, minus 1."""
        first, second = self.halves
        return {key: first[key] / second[key] - 1.0 for key in first}

    def table(self) -> str:
        """Markdown."""
        real, errors, noise = self.real, self.errors(), self.noise()
        knowing = {key: self.hindsight[key] / value - 1.0 for key, value in real.items()}
        lines = [
            f"{self.title}: {self.rate_rps:.1f} requests/s, busiest engine {self.busy:.0%}",
            "",
            "| ms | real | simulated | difference | A/A | difference in hindsight |",
            "|---|---|---|---|---|---|",
        ]
        lines.extend(
            f"| {key.replace('_', ' ')} | {real[key]:.2f} | {self.simulated[key]:.2f} "
            f"| {errors[key]:+.1%} | {noise[key]:+.1%} | {knowing[key]:+.1%} |"
            for key in real
        )
        return "\n".join(lines)


def describe(model: Model, recording: Recording) -> str:
    """The fit, for a person."""
    lines = []
    for pool, record in zip(model.pools, recording.records, strict=True):
        timing = pool.timing
        assert isinstance(timing, FittedTiming)
        lines.append(f"{pool.role}: {len(record.turns)} turns, host {timing.host_s * 1e6:.0f} us")
        for name in ("decode", "mixed"):
            step: StepModel = getattr(timing, name)
            costs = ", ".join(
                f"{c * 1e6:.3g} per {term}"
                for c, term in zip(step.coefficients, TERMS, strict=False)
                if c
            )
            spread = np.quantile(step.factors, (0.05, 0.5, 0.95))
            lines.append(f"  {name} us: {costs}; factors {np.round(spread, 2).tolist()}")
        if record.copies:
            link = timing.link
            lines.append(
                f"  link: {link.setup_s * 1e6:.0f} us + bytes at {link.bytes_per_s / 1e9:.2f} GB/s"
            )
    there_s, back_s = latencies_s(recording)
    lines.append(
        f"network: {there_s * 1e6:.0f} us there, {back_s * 1e6:.0f} us back; KV at "
        f"{model.network.kv_bytes_per_s / 1e9:.2f} GB/s"
    )
    return "\n".join(lines)


def summary(comparisons: Sequence[Comparison]) -> dict[str, object]:
    """The worst of each figure that has a bar, and its noise."""

    def worst(values: Sequence[float]) -> float:
        return round(max(abs(value) for value in values), 4)

    errors = [c.errors() for c in comparisons]
    noise = [c.noise() for c in comparisons]
    return {
        "e2e_median_error": worst([e["e2e_median"] for e in errors]),
        "itl_error": worst([e["itl_median"] for e in errors]),
        "ttft_error": worst([e["ttft_median"] for e in errors]),
        "aa_e2e": worst([n["e2e_median"] for n in noise]),
        "aa_itl": worst([n["itl_median"] for n in noise]),
        "aa_ttft": worst([n["ttft_median"] for n in noise]),
        "holds": {
            c.title: all(abs(c.errors()[key]) <= bar for key, bar in BARS.items())
            for c in comparisons
        },
    }


# --- one cluster ---------------------------------------------------------------------------------


def engine_configs(config: Path) -> list[tuple[Role, EngineConfig]]:
    """One engine for each pool of a file, with one compute thread."""
    cluster = resolve(read_serve_file(config).args)
    roles: list[Role] = [r for r in ("both", "prefill", "decode") if r in cluster.pools]
    return [
        (role, msgspec.structs.replace(cluster.engines[role], num_threads=1, niceness=0, keys=KEYS))
        for role in roles
    ]


def run_cluster(
    config: Path, scale: Scale, folder: Path
) -> tuple[Model, list[Comparison], Recording]:
    """Record, replay, fit and simulate one cluster."""
    pools = engine_configs(config)
    with running(pools, folder / "first") as engines:
        answers = asyncio.run(_record_once(engines, scale))
    recording = _read(engines, answers)
    first = fit(pools, recording)
    rates = {name: rate_for(first, spec, scale.round_s) for name, spec in HELD_OUT.items()}
    most_rps = FITTING_RATIO * max(rates.values())
    held_out = {
        name: [
            draw(spec, rates[name], scale.round_s, _HELD_OUT_SEED + i) for i in range(scale.rounds)
        ]
        for name, spec in HELD_OUT.items()
    }
    with running(pools, folder / "fit") as fitted, running(pools, folder / "real") as real:
        answers, replays = asyncio.run(_rounds(fitted, real, held_out, scale, most_rps))
    model = fit(pools, _read(fitted, answers))
    replayed = [a for halves in replays.values() for half in halves for a in half]
    known = model.on_machine_of(_read(real, replayed))
    comparisons = []
    for name, workloads in held_out.items():
        results = [model.simulate(workload, i) for i, workload in enumerate(workloads)]
        comparisons.append(
            Comparison(
                title=f"{config.stem}, {name}",
                rate_rps=rates[name],
                busy=float(np.median([busy_share(result) for result in results])),
                halves=tuple(of_answers(answers) for answers in replays[name]),
                real=of_answers([a for answers in replays[name] for a in answers]),
                simulated=of_simulations(results),
                hindsight=of_simulations(
                    [known.simulate(workload, i) for i, workload in enumerate(workloads)]
                ),
            )
        )
    return model, comparisons, _read(fitted, answers)


async def _record_once(engines: Sequence[Engine], scale: Scale) -> list[Answer]:
    async with connected(engines) as ingress:
        return await _fitting_run(ingress, scale, 0, FIRST_RPS)


async def _rounds(
    fitted: Sequence[Engine],
    real: Sequence[Engine],
    held_out: dict[str, list[Workload]],
    scale: Scale,
    most_rps: float,
) -> tuple[list[Answer], dict[str, tuple[list[Answer], list[Answer]]]]:
    """Fitting runs and replays by turns, so that both meet the same machine.

    Every held-out workload is replayed twice; gives all answers of the first and of the second.
    """
    answers: list[Answer] = []
    replays: dict[str, tuple[list[Answer], list[Answer]]] = {name: ([], []) for name in held_out}
    async with connected(fitted) as to_fitted, connected(real) as to_real:
        await replay(to_real, draw(_WARM, 20.0, 0.5, 5), "warm")
        for i in range(scale.rounds):
            for half in (0, 1):
                answers += await _fitting_run(to_fitted, scale, 2 * i + half + 1, most_rps)
                for name, workloads in held_out.items():
                    replays[name][half].extend(
                        await replay(to_real, workloads[i], f"{name}-{i}-{half}")
                    )
    return answers, replays


async def _fitting_run(
    ingress: Ingress, scale: Scale, number: int, most_rps: float
) -> list[Answer]:
    await replay(ingress, draw(_WARM, 20.0, 0.5, 5), f"warm-{number}")
    ramp = {"start_rps": most_rps / 10, "end_rps": most_rps, "ramp_s": scale.round_s}
    arrivals = {**FITTING["arrivals"], **ramp}
    workload = draw({**FITTING, "arrivals": arrivals}, None, scale.round_s, _FITTING_SEED + number)
    return await replay(ingress, workload, f"fit-{number}")


def _read(engines: Sequence[Engine], answers: list[Answer]) -> Recording:
    records = [
        msgspec.msgpack.decode(engine.record.read_bytes(), type=EngineRecord) for engine in engines
    ]
    return Recording(records, answers)


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under 90 seconds")
    parser.add_argument("--config", type=Path, nargs="+", default=list(CONFIGS))
    parser.add_argument("--keep", type=Path, help="a folder for the engines' records")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as temporary:
        for config in arguments.config:
            folder = (arguments.keep or Path(temporary)) / config.stem
            model, done, recording = run_cluster(config.absolute(), scale, folder)
            print(f"\n{describe(model, recording)}\n")
            for comparison in done:
                print(comparison.table(), end="\n\n")
            comparisons += done
    print(f"load {os.getloadavg()[0]:.1f}")
    print(json.dumps(summary(comparisons)))


if __name__ == "__main__":
    main()
