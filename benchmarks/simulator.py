"""The simulator at scale, beside Dynamo's mocker: wall time, prefix reuse, TTFT and ITL.

2,000 requests of a Mooncake trace on N = 4 to 1,000 colocated replicas, load scaled with N (N = 4
gets the trace as it is), under the step times and settings of Dynamo's mocker, so that its figures
should come out. With `--peer-python`, an interpreter that has ai-dynamo 1.6.1, the peer replays
the same arrivals in the same run. The A/A row is the first one again: results must be equal, wall
times tell the machine's noise.

The last line is one JSON object about round robin on the most replicas. An *event* is one callback
of the simulator's loop: a message that arrives, a turn of an engine that ends, a step of a
request's coroutine. A turn may pass over many decode steps at once, so that steps of engines per
second, also printed, are a number of their own.

`--digest` prints hashes of the results of eight small scenarios instead, see `simulator_digest`.

    python -m benchmarks.simulator --quick
    python -m benchmarks.simulator --digest
    python -m benchmarks.simulator --trace conversation_trace.jsonl --peer-python PATH
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.polynomial_timing import PolynomialTiming
from benchmarks.simulator_digest import print_digests
from cluster.config.schema import RouterConfig
from cluster.lab.simulation.command import seldom_collecting
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PoolSpec, SimulationOptions
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.simulation.summary import Slo, summarise
from cluster.lab.workloads.load import load_workload
from replicas.config import EngineConfig
from replicas.kv_groups import KVGroup, KVSpec
from replicas.simulation.virtual_engine import ModelFacts

if TYPE_CHECKING:
    from cluster.config.schema import PolicyName
    from cluster.lab.simulation.records import SimulationResult
    from cluster.lab.workloads.request import Workload

QUICK = (4, 64, 1000)
FULL = (4, 16, 64, 256, 1000)
REPLICAS_OF_TRACE = 4
NUM_REQUESTS = 2000
BUILT_IN = Path(__file__).parent / "mooncake_shaped.yaml"

BLOCK_SIZE = 64
NUM_BLOCKS = 16384
"""Defaults of Dynamo's mocker; it has no longest sequence but what its blocks hold."""

PEER_ROUTERS: dict[PolicyName, str] = {
    "round_robin": "round_robin",
    "least_delay": "kv_router",
}
"""The peer's policy beside each of ours: the same rule, and each side's own design."""
SLO = Slo(ttft_s=1.0, tpot_s=0.015)
"""Objectives of good requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Results of one run, ours or the peer's."""

    wall_s: float
    num_ok: int
    reuse: float
    ttft_ms_mean: float
    ttft_ms_p99: float
    itl_ms_mean: float
    good: float
    events: int = 0
    steps: int = 0


def simulate(workload: Workload, replicas: int, policy: PolicyName) -> SimulationResult:
    """Run a workload, sped up with the number of replicas, under the peer's settings."""
    max_len = longest(workload)
    engine = EngineConfig(
        model="virtual",
        max_batch_size=256,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8192,
        max_num_waiting=0,
        max_model_len=max_len,
    )
    group = KVGroup(
        layers=(0,),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS + 1,
        spec=KVSpec(heads=1, width=1, dtype="bfloat16"),
    )
    facts = ModelFacts(
        max_position_embeddings=max_len,
        vocab_size=4096,
        eos_token_ids=[0],
        kv_groups=(group,),
        supports_mixed_batch=True,
        supports_chunked_prefill=True,
        supports_prefix_caching=True,
    )
    options = SimulationOptions(
        # The peer has no limit on its queue, and its clients never time out.
        router=RouterConfig(policy=policy, max_queued_requests=10**9, queue_timeout_s=1e9),
        network=NetworkConfig(latency_s=0.0),
    )
    pool = PoolSpec("both", replicas, engine, PolynomialTiming(NUM_BLOCKS * BLOCK_SIZE), facts)
    simulation = Simulation([pool], workload.speed_up(replicas / REPLICAS_OF_TRACE), options)
    with seldom_collecting():
        return simulation.run()


def longest(workload: Workload) -> int:
    """Tokens of the longest request, so that none is refused or cut off that the peer serves.

    Raises:
        ValueError: It has no room in the KV cache that both have.
    """
    tokens = max(r.num_prompt_tokens + r.num_output_tokens for r in workload.requests)
    if tokens > NUM_BLOCKS * BLOCK_SIZE:
        raise ValueError(
            f"a request of {tokens:,} tokens has no room in {NUM_BLOCKS * BLOCK_SIZE:,} of KV"
        )
    return tokens


def figures(result: SimulationResult) -> Figures:
    """Reduce a run to the compared figures."""
    summary = summarise(result, SLO)
    assert summary.goodput is not None
    ttft, itl = summary.latencies.ttft_s, summary.latencies.itl_s
    return Figures(
        wall_s=result.wall_s,
        num_ok=summary.requests.num_ok,
        reuse=summary.prefix.hit_share or 0.0,
        ttft_ms_mean=1e3 * (ttft.mean or 0.0),
        ttft_ms_p99=1e3 * (ttft.p99 or 0.0),
        itl_ms_mean=1e3 * (itl.mean or 0.0),
        good=summary.goodput.attainment or 0.0,
        events=result.num_events,
        steps=sum(replica.num_steps for replica in result.replicas),
    )


def ask_peer(python: Path, trace: Path, replicas: int, policy: PolicyName) -> Figures:
    """Replay the same arrivals with the peer, in a process of its own."""
    script = Path(__file__).parent / "dynamo_replay.py"
    ratio = replicas / REPLICAS_OF_TRACE
    arguments = (trace, replicas, ratio, PEER_ROUTERS[policy], SLO.ttft_s, SLO.tpot_s)
    command = [str(part) for part in (python, script, *arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def write_mooncake(workload: Workload, path: Path) -> None:
    """Write a workload as the peer reads it; arrivals in ms with their fraction."""
    with path.open("w") as file:
        for i, request in enumerate(workload.requests):
            own = range(10**9 * (i + 1), 10**9 * (i + 2))
            blocks = -(-request.num_prompt_tokens // workload.block_tokens)
            known = request.block_ids[:blocks]
            row = {
                "timestamp": 1e3 * request.arrival_s,
                "input_length": request.num_prompt_tokens,
                "output_length": request.num_output_tokens,
                "hash_ids": [*known, *own[: blocks - len(known)]],
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse arguments, run, print the table and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three sizes, round robin only")
    parser.add_argument("--trace", type=Path, help="Mooncake trace; without, a built-in workload")
    parser.add_argument("--peer-python", type=Path, help="interpreter with ai-dynamo 1.6.1")
    parser.add_argument("--digest", action="store_true", help="hash the results of scenarios")
    arguments = parser.parse_args()
    if arguments.digest:
        print_digests()
        return
    workload = load_workload(arguments.trace or BUILT_IN).head(NUM_REQUESTS)
    sizes = QUICK if arguments.quick else FULL
    policies: tuple[PolicyName, ...] = ("round_robin",)
    if not arguments.quick:
        policies = ("round_robin", "least_delay")
    _print_head(workload)
    last = None
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_mooncake(workload, trace)
        for policy in policies:
            for replicas in sizes:
                ours = figures(simulate(workload, replicas, policy))
                peer = None
                if arguments.peer_python is not None:
                    peer = ask_peer(arguments.peer_python, trace, replicas, policy)
                print_rows(policy, replicas, ours, peer)
                if policy == "round_robin":
                    last = ours
                    if replicas == sizes[0] and not arguments.quick:
                        _print_again(workload, replicas, policy, ours)
    assert last is not None
    print(
        json.dumps(
            {
                "wall_s": round(last.wall_s, 3),
                "events_per_s": round(last.events / last.wall_s),
                "replicas": sizes[-1],
                "ttft_ms_mean": round(last.ttft_ms_mean, 3),
                "reuse": round(last.reuse, 5),
            }
        )
    )


_COLUMNS = "| {:16} | {:>5}" + " | {:>8}" * 8 + " |"


def _print_head(workload: Workload) -> None:
    requests = workload.requests
    prompts = sum(r.num_prompt_tokens for r in requests)
    outputs = sum(r.num_output_tokens for r in requests)
    print(
        f"{workload.name}: {len(requests):,} requests, {prompts / len(requests):,.0f} prompt and "
        f"{outputs / len(requests):,.0f} output tokens in the mean, "
        f"{100 * _ideal_reuse(workload):.1f} % ideal reuse"
    )
    print()
    names = (
        "policy",
        "N",
        "wall s",
        "ok",
        "reuse %",
        "TTFT ms",
        "p99 ms",
        "ITL ms",
        "good %",
        "steps/s",
    )
    print(_COLUMNS.format(*names))
    print(_COLUMNS.format(*("---" for _ in names)))


def print_rows(policy: PolicyName, replicas: int, ours: Figures, peer: Figures | None) -> None:
    """Print a run, the peer's, and by how much they differ."""
    _print_row(policy, replicas, ours)
    if peer is None:
        return
    _print_row(f"peer {PEER_ROUTERS[policy]}", replicas, peer)
    names = ("reuse", "ttft_ms_mean", "ttft_ms_p99", "itl_ms_mean", "good")
    shown = [difference(getattr(ours, name), getattr(peer, name)) for name in names]
    ratio = f"{ours.wall_s / peer.wall_s:.1f} x"
    print(_COLUMNS.format("difference", f"{replicas:,}", ratio, "", *shown, ""), flush=True)


def difference(ours: float, peer: float) -> str:
    """Return by how much ours exceeds the peer's, or no ratio if the peer has none."""
    if peer:
        return f"{100 * (ours / peer - 1):+.2f} %"
    return "none" if ours else "equal"


def _print_again(workload: Workload, replicas: int, policy: PolicyName, first: Figures) -> None:
    again = figures(simulate(workload, replicas, policy))
    assert dataclasses.replace(again, wall_s=first.wall_s) == first, "two runs differ"
    _print_row("A/A", replicas, again)


def _print_row(name: str, replicas: int, run: Figures) -> None:
    print(
        _COLUMNS.format(
            name, f"{replicas:,}", f"{run.wall_s:.2f}", f"{run.num_ok:,}",
            f"{100 * run.reuse:.2f}", f"{run.ttft_ms_mean:.2f}", f"{run.ttft_ms_p99:.0f}",
            f"{run.itl_ms_mean:.3f}", f"{100 * run.good:.2f}",
            f"{run.steps / run.wall_s:,.0f}" if run.steps else "",
        ),
        flush=True,
    )  # fmt: skip


def _ideal_reuse(workload: Workload) -> float:
    """Share of the prompt tokens that a single, endless cache would have."""
    seen: set[tuple[int, int]] = set()
    hits = tokens = 0
    for request in workload.requests:
        tokens += request.num_prompt_tokens
        for position, block_id in enumerate(request.block_ids):
            left = request.num_prompt_tokens - position * workload.block_tokens
            hits += min(left, workload.block_tokens) * ((position, block_id) in seen)
            seen.add((position, block_id))
    return hits / tokens


if __name__ == "__main__":
    main()
