"""A digest of the simulator's results: eight scenarios, each reduced to one hash of its figures.

Equal digests before and after a change of engine or router mean equal results to the bit: every
request's outcome, engines and token times, every replica's steps, and the summary. The number of
the loop's events is left out, because it is no result. Arrivals and lengths are drawn from integers
and sums alone, so that no mathematical library of a machine takes part in them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from cluster.lab.simulation.command import load_cluster, pool_specs, seldom_collecting
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import SimulationOptions
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.simulation.summary import summarise, to_json
from cluster.lab.workloads.request import TraceRequest, Workload
from replicas.faults import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.lab.simulation.records import SimulationResult
    from cluster.lab.simulation.scaling import ClusterObservation
    from replicas.config import Role

CONFIGS = Path(__file__).parents[1] / "configs"
SEED = 7
BLOCK_TOKENS = 64
NUM_REQUESTS = 300


class Scenario(NamedTuple):
    """One run.

    Attributes:
        name: Of its digest.
        config: File of `configs/`.
        rate_rps: Requests per second.
        models_kv: See `SimulationOptions`.
        faults: Entries of a fault plan.
        scale: Replicas of pools by time, each entry holds until the next.
        ingresses: Number of ingresses.
    """

    name: str
    config: str
    rate_rps: float
    models_kv: bool = False
    faults: tuple[dict[str, object], ...] = ()
    scale: tuple[tuple[float, dict[Role, int]], ...] = ()
    ingresses: int = 1


SCENARIOS = (
    Scenario("n150", "sim-n150x4.yaml", 4.0),
    Scenario("n150, KV modelled", "sim-n150x4.yaml", 4.0, models_kv=True),
    Scenario("T3K, prefill to decode", "sim-t3k-2p2d.yaml", 8.0, ingresses=2),
    Scenario("T3K, KV modelled", "sim-t3k-2p2d.yaml", 8.0, models_kv=True),
    Scenario("Galaxy, four lanes", "sim-galaxy.yaml", 2.0),
    Scenario(
        "T3K, a stall and a migration",
        "sim-t3k-2p2d.yaml",
        8.0,
        models_kv=True,
        faults=(
            {"at_s": 10.0, "target": "decode/1", "kind": "hang", "duration_s": 20.0},
            {"at_s": 40.0, "target": "prefill/0", "kind": "slow", "duration_s": 5.0, "factor": 3.0},
        ),
    ),
    Scenario(
        "n150, a death",
        "sim-n150x4.yaml",
        4.0,
        faults=({"at_s": 15.0, "target": "both/1", "kind": "kill"},),
    ),
    Scenario(
        "T3K, scaled",
        "sim-t3k-2p2d.yaml",
        8.0,
        scale=((0.0, {"decode": 1}), (10.0, {"decode": 3}), (30.0, {"decode": 1, "prefill": 1})),
    ),
)


class ScalingPlan:
    """Numbers of replicas by time."""

    interval_s = 1.0

    def __init__(self, entries: tuple[tuple[float, dict[Role, int]], ...]) -> None:
        self._entries = entries

    def decide(self, seen: ClusterObservation) -> Mapping[Role, int]:
        """See `Scaler`."""
        begun = [counts for at_s, counts in self._entries if at_s <= seen.now_s]
        return begun[-1] if begun else {}


def workload(rate_rps: float, num_requests: int) -> Workload:
    """Return requests of different lengths, a third of which begin like others."""
    rng = np.random.Generator(np.random.Philox(SEED))
    gaps_s = rng.integers(0, 2 * 1024, num_requests) / (1024 * rate_rps)
    prompts = rng.integers(16, 2048, num_requests).tolist()
    outputs = rng.integers(1, 256, num_requests).tolist()
    groups = rng.integers(0, 30, num_requests).tolist()
    requests, now_s = [], 0.0
    for row in zip(gaps_s.tolist(), prompts, outputs, groups, strict=True):
        gap_s, prompt, output, group = row
        now_s += gap_s
        block_ids = tuple(range(100 * group, 100 * group + 8)) if group < 10 else ()
        requests.append(TraceRequest(now_s, prompt, output, block_ids))
    return Workload("digest", tuple(requests), BLOCK_TOKENS)


def run(
    scenario: Scenario, num_requests: int = NUM_REQUESTS, *, run_ahead: bool = True
) -> SimulationResult:
    """Run a scenario."""
    cluster = load_cluster(CONFIGS / scenario.config)
    options = SimulationOptions(
        seed=SEED,
        router=cluster.router,
        ingresses=scenario.ingresses,
        network=NetworkConfig(kv_bytes_per_s=float("inf")),
        faults=FaultPlan.parse(list(scenario.faults)),
        models_kv=scenario.models_kv,
        run_ahead=run_ahead,
    )
    simulation = Simulation(
        pool_specs(cluster),
        workload(scenario.rate_rps, num_requests),
        options,
        scaler=ScalingPlan(scenario.scale) if scenario.scale else None,
    )
    with seldom_collecting():
        return simulation.run()


def digest(result: SimulationResult) -> str:
    """Return the SHA-256 of a run's results, in hexadecimal."""
    replicas = [
        # Sums of step times depend on how many steps are added at once, in their last bits.
        msgspec.structs.replace(
            replica, busy_s=round(replica.busy_s, 9), slot_busy_s=round(replica.slot_busy_s, 9)
        )
        for replica in result.replicas
    ]
    summary = summarise(msgspec.structs.replace(result, replicas=replicas, num_events=0))
    hashed = hashlib.sha256(to_json(summary))
    for record in result.records:
        fields = msgspec.structs.asdict(record)
        token_times_s = fields.pop("token_times_s")
        hashed.update(msgspec.json.encode(fields, order="deterministic"))
        hashed.update(token_times_s.tobytes())
    return hashed.hexdigest()


def print_digests() -> None:
    """Run every scenario and print its digest; the last line is that of all together."""
    together = hashlib.sha256()
    for scenario in SCENARIOS:
        result = run(scenario)
        found = digest(result)
        together.update(found.encode())
        num_ok = sum(record.outcome == "ok" for record in result.records)
        print(f"{scenario.name:30}{num_ok:5} ok{result.wall_s:8.1f} s  {found}", flush=True)
    print(together.hexdigest())
