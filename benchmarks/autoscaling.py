"""Goodput per replica-hour of ways to scale a cluster, in virtual time: the same on every machine.

Conversations (log-normal, the mean lengths of Azure's conversation trace: 1,155 prompt and 211
output tokens) on configs/sim-t3k-2p2d.yaml, but one replica a pool at first; a new one takes
requests 73 s after it was wanted. *Goodput* is requests that keep both objectives; a replica costs
from when it is wanted until it has drained.

`ramp` is a day and a night in an hour; `bursts` are four times as many for four minutes, at random.

`ttserve` is `cluster.scaling`. `serve` is Ray Serve's own policy, by requests under way in each
pool, with its own delays, at several targets; the first is its default. `oracle` knows every
arrival and length: it starts each replica just in time, and never stops one that it would have to
start again. Several headrooms are tried; the best that keeps the objectives for 97 % of all
requests counts. `fixed` never scales.

The last line is one JSON object: the share of the oracle's goodput per replica-hour that `ttserve`
gets, and the ratio of its own to the best of Serve's, of each the lesser of both workloads.

    python -m benchmarks.autoscaling --quick --seed 7
    python -m benchmarks.autoscaling
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.serve import autoscaling_policy as serve_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from benchmarks.overload import CONFIG, SLO, lengths
from cluster.config.schema import AdmissionConfig, RouterConfig
from cluster.lab.simulation.command import load_cluster, pool_specs, seldom_collecting
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import SimulationOptions
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.simulation.summary import summarise
from cluster.lab.workloads.request import TraceRequest, Workload
from cluster.routing.traffic import Traffic
from cluster.scaling.capacity import Engine, Objectives
from cluster.scaling.policy import DECISION_INTERVAL_S, Autoscaler, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from cluster.lab.simulation.options import PoolSpec
    from cluster.lab.simulation.scaling import ClusterObservation, Scaler
    from replicas.config import Role

    Seconds = npt.NDArray[np.float64]

ROUTER = RouterConfig(admission=AdmissionConfig(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s))
PROMPT_TOKENS = (1155.0, 1100.0, 16, 8000)
OUTPUT_TOKENS = (211.0, 160.0, 1, 1000)
"""Mean, standard deviation, least and most."""
LEAST, MOST = 1, 16
"""Replicas of a pool."""
KEPT = 0.97
"""Share of requests that an oracle's schedule has to serve in time."""
HEADROOMS = (0.7, 0.85, 1.0, 1.2, 1.4, 1.7)
SERVE_TARGETS = ((2.0, 2.0), (1.0, 40.0), (2.0, 40.0), (4.0, 40.0))
"""Serve's targets for running requests of a prefill and of a decode replica."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        good: Requests that kept both objectives.
        share: Of all requests.
        hours: Of replicas.
    """

    policy: str
    good: int
    share: float
    hours: float
    num_starts: int

    @property
    def per_hour(self) -> float:
        """Good requests for each replica-hour."""
        return self.good / self.hours


def ramp(rng: np.random.Generator, span_s: float) -> Seconds:
    """Poisson arrivals whose rate rises from 0.5/s to 6/s and falls again."""

    def rate(at_s: Seconds) -> Seconds:
        wave: Seconds = 0.5 + 5.5 * (1.0 - np.cos(2.0 * np.pi * at_s / span_s)) / 2.0
        return wave

    return _thinned(rng, rate, 6.0, span_s)


def bursts(rng: np.random.Generator, span_s: float) -> Seconds:
    """Poisson arrivals of 1.5/s, and of 6/s for four minutes of about every fourteen."""
    starts_s = np.cumsum(240.0 + rng.exponential(600.0, int(span_s / 240.0) + 1)) - 240.0

    def rate(at_s: Seconds) -> Seconds:
        since_s = at_s[:, None] - starts_s
        is_burst = ((since_s >= 0.0) & (since_s < 240.0)).any(axis=1)
        return np.where(is_burst, 6.0, 1.5)

    return _thinned(rng, rate, 6.0, span_s)


WORKLOADS: dict[str, Callable[[np.random.Generator, float], Seconds]] = {
    "ramp": ramp,
    "bursts": bursts,
}


def workload(name: str, span_s: float, seed: int) -> Workload:
    """Requests, the same for every policy."""
    rng = np.random.Generator(np.random.Philox(seed))
    arrivals_s = WORKLOADS[name](rng, span_s)
    prompts = lengths(rng, arrivals_s.size, *PROMPT_TOKENS)
    outputs = lengths(rng, arrivals_s.size, *OUTPUT_TOKENS)
    rows = zip(arrivals_s.tolist(), prompts, outputs, strict=True)
    return Workload(name, tuple(TraceRequest(*row) for row in rows))


class Ours:
    """The policy of `cluster.scaling`."""

    interval_s = DECISION_INTERVAL_S

    def __init__(self, pools: list[PoolSpec], restart_s: float) -> None:
        objectives = Objectives(SLO.ttft_s or math.inf, SLO.tpot_s or math.inf)
        self._autoscaler = Autoscaler(objectives)
        self._pools = {
            spec.role: Pool(1, LEAST, MOST, engine_of(spec), restart_s + spec.timing.warm_up_s())
            for spec in pools
        }

    def decide(self, seen: ClusterObservation) -> Mapping[Role, int]:
        """See `Scaler`."""
        pools = {
            role: pool._replace(num_replicas=seen.num_replicas[role])
            for role, pool in self._pools.items()
        }
        # `ROUTER` does, from the same time on.
        return self._autoscaler.decide(
            seen.now_s, seen.counted, seen.costs, pools, refuses_late=True
        )


class Serve:
    """Ray Serve's policy for each deployment, with its delays, under virtual time.

    Args:
        targets: Requests under way that a replica of each pool is to have.
    """

    interval_s = DECISION_INTERVAL_S

    def __init__(self, targets: Mapping[Role, float]) -> None:
        self._configs = {
            role: AutoscalingConfig(
                min_replicas=LEAST, max_replicas=MOST, target_ongoing_requests=target
            )
            for role, target in targets.items()
        }
        self._states: dict[Role, dict[str, Any]] = {role: {} for role in targets}
        self._look_back: list[tuple[float, Traffic]] = []

    def decide(self, seen: ClusterObservation) -> Mapping[Role, int]:
        """See `Scaler`."""
        self._look_back.append((seen.now_s, sum(seen.counted.values(), Traffic())))
        since_s = seen.now_s - next(iter(self._configs.values())).look_back_period_s
        self._look_back = [look for look in self._look_back if look[0] > since_s]
        looks = [traffic for _, traffic in self._look_back]
        ongoing: dict[Role, float] = {
            "prefill": float(np.mean([traffic.num_waiting for traffic in looks])),
            "decode": float(np.mean([traffic.num_decoding for traffic in looks])),
        }
        targets: dict[Role, int] = {}
        for role, config in self._configs.items():
            current = seen.num_replicas[role]
            unseen: dict[str, Any] = dict.fromkeys(_CONTEXT)
            context = AutoscalingContext(
                **unseen,
                current_num_replicas=current,
                target_num_replicas=current,
                total_num_requests=ongoing[role],
                config=config,
            )
            desired, _ = serve_policy.replica_queue_length_autoscaling_policy(context)
            scaled = serve_policy._apply_scaling_factors(desired, current, config)  # noqa: SLF001
            decided, self._states[role] = serve_policy._apply_delay_logic(  # noqa: SLF001
                scaled, current, config, self._states[role], seen.now_s
            )
            targets[role] = min(max(decided, LEAST), MOST)
        return targets


_CONTEXT = (
    "deployment_id", "deployment_name", "app_name", "running_replicas", "total_queued_requests",
    "aggregated_metrics", "raw_metrics", "capacity_adjusted_min_replicas",
    "capacity_adjusted_max_replicas", "policy_state", "last_scale_up_time",
    "last_scale_down_time", "current_time",
)  # fmt: skip
"""Fields that Serve's policy ignores."""


class Oracle:
    """A policy that knows all arrivals, and starts replicas so that they are ready in time.

    Prompts: no stretch of time may bring more work than can be done within it and the time to a
    first token. Decoding: the sequences that are under way at a time, if none has to wait.

    Args:
        headroom: Factor on the replicas that are needed.
    """

    interval_s = DECISION_INTERVAL_S

    def __init__(
        self, pools: list[PoolSpec], requests: Workload, restart_s: float, headroom: float
    ) -> None:
        by_role = {spec.role: spec for spec in pools}
        end = math.ceil(requests.requests[-1].arrival_s) + 60
        needed = {
            "prefill": _needed_prompts(by_role["prefill"], requests, end),
            "decode": _needed_decodes(by_role["decode"], requests, end),
        }
        self._wanted: dict[Role, npt.NDArray[np.int64]] = {}
        for spec in pools:
            counts = np.clip(np.ceil(needed[spec.role] * headroom), LEAST, MOST).astype(int)
            # Keep a replica whose idle time is shorter than a start.
            ahead = math.ceil(restart_s + spec.timing.warm_up_s() + DECISION_INTERVAL_S)
            padded = np.concatenate([counts, np.full(ahead, counts[-1])])
            windows = np.lib.stride_tricks.sliding_window_view(padded, ahead + 1)
            self._wanted[spec.role] = windows.max(axis=1)

    def decide(self, seen: ClusterObservation) -> Mapping[Role, int]:
        """See `Scaler`."""
        second = int(seen.now_s)
        return {role: int(wanted[min(second, len(wanted) - 1)]) for role, wanted in
                self._wanted.items()}  # fmt: skip


class Fixed:
    """A policy with a constant number of replicas for each pool."""

    interval_s = DECISION_INTERVAL_S

    def __init__(self, counts: Mapping[Role, int]) -> None:
        self._counts = counts

    def decide(self, _seen: ClusterObservation) -> Mapping[Role, int]:
        """See `Scaler`."""
        return self._counts


def _needed_prompts(spec: PoolSpec, requests: Workload, end: int) -> Seconds:
    """Return for each second the most replicas that any interval around it needs."""
    work_s = np.zeros(end)
    for request in requests.requests:
        seconds = spec.timing.prefill_s([(0, 0, request.num_prompt_tokens)]) + spec.timing.host_s
        work_s[int(request.arrival_s)] += seconds
    total_s = np.concatenate([[0.0], np.cumsum(work_s)])
    needed = np.zeros(end)
    slack_s = (SLO.ttft_s or math.inf) - 1.0
    for length in (1, 2, 3, 5, 8, 12, 20, 30, 60):
        rates = (total_s[length:] - total_s[:-length]) / (length + slack_s)
        for offset in range(length):
            part = needed[offset : offset + len(rates)]
            np.maximum(part, rates, out=part)
    return needed


def _needed_decodes(spec: PoolSpec, requests: Workload, end: int) -> Seconds:
    """Return for each second the running sequences, divided by the slots of a replica."""
    engine = engine_of(spec)
    rows = engine.dp_groups * engine.slots_per_group
    step_s = spec.timing.decode_s([(i % engine.dp_groups, 1500) for i in range(rows)])
    changes = np.zeros(end + 1)
    for request in requests.requests:
        last_s = request.arrival_s + 1.0 + request.num_output_tokens * step_s
        changes[int(request.arrival_s)] += 1
        changes[min(math.ceil(last_s), end)] -= 1
    needed: Seconds = np.cumsum(changes)[:end] / rows
    return needed


def engine_of(spec: PoolSpec) -> Engine:
    """Return the engine that bounds how much a replica of a pool decodes at a time."""
    groups = spec.engine.tt_data_parallel
    return Engine(groups, spec.engine.max_batch_size // groups)


def run(policy: str, scaler: Scaler, pools: list[PoolSpec], requests: Workload) -> Row:
    """Simulate the cluster with a way to scale it."""
    options = SimulationOptions(router=ROUTER, network=NetworkConfig(latency_s=1e-4))
    with seldom_collecting():
        result = Simulation(pools, requests, options, scaler=scaler).run()
    summary = summarise(result, SLO)
    assert summary.goodput is not None
    good = summary.goodput.num_good
    return Row(
        policy,
        good,
        good / len(result.records),
        result.replica_seconds / 3600.0,
        len(result.replicas) - len(pools),
    )


def compare(name: str, span_s: float, seed: int, *, is_quick: bool) -> tuple[float, float]:
    """Print a table; shares of the oracle's and of Serve's goodput per replica-hour."""
    requests = workload(name, span_s, seed)
    pools = [spec._replace(replicas=1) for spec in pool_specs(load_cluster(CONFIG))]
    restart_s = SimulationOptions().restart_s
    print(f"\n## {name}\n\n{len(requests.requests)} requests in {span_s:g} s\n\n{_HEAD}")

    def row(policy: str, scaler: Scaler) -> Row:
        made = run(policy, scaler, pools, requests)
        print(_line(made), flush=True)
        return made

    ours = row("ttserve", Ours(pools, restart_s))
    targets = SERVE_TARGETS[2:3] if is_quick else SERVE_TARGETS
    serves = [
        row(f"serve, {p:g} and {d:g}", Serve({"prefill": p, "decode": d})) for p, d in targets
    ]
    headrooms = HEADROOMS[1:3] if is_quick else HEADROOMS
    oracles = [row(f"oracle, {h:g}", Oracle(pools, requests, restart_s, h)) for h in headrooms]
    if not is_quick:
        for count in (2, 4, 6):
            row(f"fixed, {count} and {count}", Fixed({"prefill": count, "decode": count}))
    kept = [o for o in oracles if o.share >= KEPT] or [max(oracles, key=lambda o: o.share)]
    return (
        ours.per_hour / max(o.per_hour for o in kept),
        ours.per_hour / max(s.per_hour for s in serves),
    )


def main() -> None:
    """Parse arguments, run, print tables and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the time, fewer rivals")
    parser.add_argument("--seed", type=int, default=11, help="of arrivals and lengths")
    arguments = parser.parse_args()
    span_s = 900.0 if arguments.quick else 3600.0
    shares = [compare(name, span_s, arguments.seed, is_quick=arguments.quick) for name in WORKLOADS]
    of_oracle, of_serve = (min(share) for share in zip(*shares, strict=True))
    print(
        json.dumps({"share_of_oracle": round(of_oracle, 3), "ratio_to_serve": round(of_serve, 3)})
    )


_HEAD = (
    "| policy | good | of all % | replica-hours | good per replica-hour | starts |\n"
    + "|---" * 6
    + "|"
)


def _line(row: Row) -> str:
    cells = (
        row.policy,
        str(row.good),
        f"{100 * row.share:.1f}",
        f"{row.hours:.2f}",
        f"{row.per_hour:.0f}",
        str(row.num_starts),
    )
    return f"| {' | '.join(cells)} |"


def _thinned(
    rng: np.random.Generator, rate: Callable[[Seconds], Seconds], most: float, span_s: float
) -> Seconds:
    """Poisson arrivals of a rate that changes, by leaving out some of the highest rate's."""
    at_s = np.cumsum(rng.exponential(1.0 / most, int(1.2 * most * span_s) + 100))
    kept: Seconds = at_s[(at_s < span_s) & (rng.random(at_s.size) < rate(at_s) / most)]
    return kept


if __name__ == "__main__":
    main()
