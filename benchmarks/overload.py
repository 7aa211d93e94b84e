"""Goodput against load, from half of what a cluster can do to four times that, for each policy.

Bursty code completion on configs/sim-t3k-2p2d.yaml, in virtual time, so the numbers are the same on
every machine. Capacity is what the prefill pool can do at best: its replicas over the mean time of
a prompt. *Goodput* is requests that keep both objectives, for each second in which requests come;
one that is refused or late counts nothing. Lengths are log-normal with the means of Azure's code
completion trace (2,048 prompt and 28 output tokens).

`gamma` has gaps with a coefficient of variation of 4; `spikes` is Poisson, but that for 3 s of each
minute ten times as many come. `admission` is the default policy with objectives in the
configuration, the others are today's policies without.

*Fairness*: one tenant asks for a quarter of the capacity, alone and beside another that asks for
twice all of it; the first one's times to a first token, and how many of each are served.

The last line is one JSON object: the most goodput with admission, and the least share of it at any
higher load, each of the worse workload.

    python -m benchmarks.overload --quick
    python -m benchmarks.overload
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.config.schema import AdmissionConfig, RouterConfig
from cluster.lab.simulation.command import load_cluster, pool_specs, run_cluster
from cluster.lab.simulation.records import OK
from cluster.lab.simulation.summary import Slo, summarise
from cluster.lab.workloads.request import TraceRequest, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from cluster.lab.simulation.records import RequestRecord, SimulationResult

    Seconds = npt.NDArray[np.float64]

CONFIG = Path(__file__).parent.parent / "configs/sim-t3k-2p2d.yaml"
SLO = Slo(ttft_s=3.0, tpot_s=0.1)
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
QUICK_LOADS = (0.5, 1.0, 4.0)
SPAN_S, FAIR_SPAN_S = 300.0, 1800.0
PROMPT_TOKENS = (2048.0, 1900.0, 16, 7437)
OUTPUT_TOKENS = (28.0, 45.0, 1, 500)
"""Mean, standard deviation, least and most."""
REFUSED_S = 0.05
"""A refused request should get its answer within this time."""

ADMISSION = "admission"
ROUTERS = {
    "round_robin": RouterConfig(policy="round_robin", min_remote_prefill_tokens=0),
    "most_empty_slots": RouterConfig(policy="most_empty_slots", min_remote_prefill_tokens=0),
    ADMISSION: RouterConfig(admission=AdmissionConfig(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s)),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        load: Of the capacity.
        offered_per_s: Requests.
        good_per_s: Goodput.
        good_share: Of all requests.
        late_share: Of those that were served to the end, how many missed an objective.
        refused_share: Of all requests, those that were refused with a retry time.
        late_refusals: Of those, how many got the answer later than `REFUSED_S`.
        busy: Share of the time in which prefill replicas computed.
    """

    load: float
    offered_per_s: float
    good_per_s: float
    good_share: float
    late_share: float
    refused_share: float
    late_refusals: float
    ttft_p99_s: float
    busy: float


def gamma(rng: np.random.Generator, rate_rps: float, span_s: float) -> Seconds:
    """Arrivals with gaps of a coefficient of variation of 4."""
    shape = 1 / 4**2
    gaps_s = rng.gamma(shape, 1 / (rate_rps * shape), int(3 * rate_rps * span_s) + 100)
    return _within(np.cumsum(gaps_s), span_s)


def spikes(rng: np.random.Generator, rate_rps: float, span_s: float) -> Seconds:
    """Poisson arrivals, ten times as many as in the mean for 3 s of each minute."""
    minute_s, spike_s = 60.0, 3.0
    calm_rps = rate_rps * (minute_s - 10 * spike_s) / (minute_s - spike_s)
    at_s = np.cumsum(rng.exponential(0.1 / rate_rps, int(12 * rate_rps * span_s) + 100))
    is_spike = at_s % minute_s >= minute_s - spike_s
    kept = at_s[is_spike | (rng.random(at_s.size) < calm_rps / (10 * rate_rps))]
    return _within(kept, span_s)


WORKLOADS: dict[str, Callable[[np.random.Generator, float, float], Seconds]] = {
    "gamma": gamma,
    "spikes": spikes,
}


def workload(name: str, rate_rps: float, span_s: float) -> Workload:
    """Requests of one load; the same for every policy."""
    rng = np.random.Generator(np.random.Philox(7))
    arrivals_s = WORKLOADS[name](rng, rate_rps, span_s)
    prompts = lengths(rng, arrivals_s.size, *PROMPT_TOKENS)
    outputs = lengths(rng, arrivals_s.size, *OUTPUT_TOKENS)
    rows = zip(arrivals_s.tolist(), prompts, outputs, strict=True)
    return Workload(name, tuple(TraceRequest(*row) for row in rows))


def lengths(
    rng: np.random.Generator, count: int, mean: float, std: float, least: int, most: int
) -> list[int]:
    """Log-normal lengths, cut off at both ends."""
    variance = np.log1p((std / mean) ** 2)
    drawn = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
    cut: list[int] = np.clip(np.rint(drawn), least, most).astype(int).tolist()
    return cut


def capacity_rps() -> float:
    """Requests per second that keep every prefill replica busy."""
    [prefill] = [spec for spec in pool_specs(load_cluster(CONFIG)) if spec.role == "prefill"]
    sample = lengths(np.random.Generator(np.random.Philox(8)), 4000, *PROMPT_TOKENS)
    mean_s = float(np.mean([prefill.timing.prefill_s([(0, 0, n)]) for n in sample]))
    return prefill.replicas / (mean_s + prefill.timing.host_s)


def run(router: RouterConfig, requests: Workload) -> SimulationResult:
    """Simulate the cluster with a router."""
    return run_cluster(dataclasses.replace(load_cluster(CONFIG), router=router), requests)


def row_of(result: SimulationResult, load: float) -> Row:
    """Reduce a run to its row."""
    summary = summarise(result, SLO)
    assert summary.goodput is not None
    records, num_good = result.records, summary.goodput.num_good
    refused = [r for r in records if r.outcome in ("OverloadedError", "SaturatedError")]
    num_ok = sum(r.outcome == OK for r in records)
    [busy] = [pool.utilisation for pool in summary.pools if pool.role == "prefill"]
    return Row(
        load,
        len(records) / SPAN_S,
        num_good / SPAN_S,
        num_good / len(records),
        1 - num_good / max(num_ok, 1),
        len(refused) / len(records),
        sum(r.finished_s - r.arrival_s > REFUSED_S for r in refused) / max(len(refused), 1),
        summary.latencies.ttft_s.p99 or 0.0,
        busy or 0.0,
    )


def fairness(span_s: float) -> None:
    """Print one tenant's results alone, and beside a tenant that floods the cluster."""
    rng = np.random.Generator(np.random.Philox(9))

    def asks(tenant: str, load: float) -> list[TraceRequest]:
        rate_rps = load * capacity_rps()
        gaps_s = rng.exponential(1 / rate_rps, int(2 * rate_rps * span_s))
        arrivals_s = _within(np.cumsum(gaps_s), span_s)
        prompts = lengths(rng, arrivals_s.size, *PROMPT_TOKENS)
        outputs = lengths(rng, arrivals_s.size, *OUTPUT_TOKENS)
        rows = zip(arrivals_s.tolist(), prompts, outputs, strict=True)
        return [TraceRequest(*row, tenant=tenant) for row in rows]

    few, many = asks("few", 0.25), asks("many", 2.0)
    both = sorted(few + many, key=lambda request: request.arrival_s)
    print(f"\n## fairness\n\n{_FAIR_HEAD}")
    for policy in ("most_empty_slots", ADMISSION):
        for beside, requests in (("alone", few), ("beside a flood", both)):
            result = run(ROUTERS[policy], Workload(beside, tuple(requests)))
            pairs = list(zip(requests, result.records, strict=True))
            own = [record for request, record in pairs if request.tenant == "few"]
            others = [record for request, record in pairs if request.tenant == "many"]
            ttft_s = [r.token_times_s[0] - r.arrival_s for r in own if r.outcome == OK]
            p50_s, p99_s = np.percentile(ttft_s, (50, 99))
            mine = f"{len(own)} | {_ok_percent(own):.1f} | {p50_s:.2f} | {p99_s:.2f}"
            theirs = f"{len(others)} | {_ok_percent(others):.1f}"
            print(f"| {policy} | {beside} | {mine} | {theirs} |", flush=True)


def _ok_percent(records: Sequence[RequestRecord]) -> float:
    return 100 * sum(r.outcome == OK for r in records) / max(len(records), 1)


def least_share(rows: Sequence[Row]) -> tuple[float, float]:
    """The most goodput over load, and the least share of it at that load or any higher one."""
    best = max(rows, key=lambda row: row.good_per_s)
    above = [row.good_per_s for row in rows if row.load >= best.load]
    return best.good_per_s, min(above) / best.good_per_s


def main() -> None:
    """Parse arguments, run, print tables and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three loads, with admission only")
    arguments = parser.parse_args()
    loads = QUICK_LOADS if arguments.quick else LOADS
    most_rps = capacity_rps()
    print(f"capacity {most_rps:.2f} requests/s, objectives {SLO.ttft_s:g} s and {SLO.tpot_s:g} s")
    results = []
    for name in WORKLOADS:
        print(f"\n## {name}\n\n{_HEAD}")
        for policy, router in ROUTERS.items():
            if arguments.quick and policy != ADMISSION:
                continue
            rows = []
            for load in loads:
                requests = workload(name, load * most_rps, SPAN_S)
                rows.append(row_of(run(router, requests), load))
                print(_line(policy, rows[-1]), flush=True)
            if policy == ADMISSION:
                results.append(least_share(rows))
    if not arguments.quick:
        fairness(FAIR_SPAN_S)
    peak, share = min(results, key=lambda result: result[1])
    print(
        json.dumps({"peak_goodput": round(peak, 3), "min_share_above_peak_load": round(share, 3)})
    )


_FAIR_HEAD = (
    "| policy | tenant | its requests | served % | TTFT p50 s | p99 s | the other's | served % |\n"
    + "|---" * 8
    + "|"
)
_HEAD = (
    "| policy | load | arrivals /s | good /s | good % | late % of served | refused % "
    "| of these after 50 ms % | TTFT p99 s | prefill busy % |\n" + "|---" * 10 + "|"
)


def _line(policy: str, row: Row) -> str:
    cells = (
        policy,
        f"{row.load:g}",
        f"{row.offered_per_s:.2f}",
        f"{row.good_per_s:.2f}",
        f"{100 * row.good_share:.1f}",
        f"{100 * row.late_share:.1f}",
        f"{100 * row.refused_share:.1f}",
        f"{100 * row.late_refusals:.1f}",
        f"{row.ttft_p99_s:.1f}",
        f"{100 * row.busy:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _within(arrivals_s: Seconds, span_s: float) -> Seconds:
    return arrivals_s[arrivals_s < span_s]


if __name__ == "__main__":
    main()
