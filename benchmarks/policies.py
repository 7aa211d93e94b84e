"""Results of each placement policy on traces, against load: docs/policies-results.md.

Each scenario is a Serve config and a trace at several speeds, run under every policy; the same as
`ttserve simulate CONFIG --trace … --policy … --speed-up …` row by row. Results are the same on
every machine.

    python -m benchmarks.policies --traces traces/ --plots docs/images/ [--only NAME]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cluster.lab.simulation.command import SimulateOptions, load_cluster, load_trace, run_cluster
from cluster.lab.simulation.plots import plot_goodput
from cluster.lab.simulation.summary import Slo, summarise

if TYPE_CHECKING:
    from cluster.config.resolve import ClusterConfig
    from cluster.lab.simulation.summary import Distribution, PoolSummary, Summary

SHOWN = ("round_robin", "most_empty_slots", "least_delay")
"""Those with a row for each load in every table; of the others it is good requests alone."""
POLICIES = (*SHOWN, "waiting_and_running", "prefix_aware", "cache_and_load")
ALL_MOVED = "least_delay, all moved"
"""Where prefill is apart: every prompt goes there, however long others wait."""
HERE = Path(__file__).parent / "policies"
CONFIGS = Path(__file__).parent.parent / "configs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """One table and one plot.

    Attributes:
        config: A Serve config file.
        replicas: How many of its replicas; None takes the file's.
        trace: Under the folder of traces; an absolute path is a workload of our own.
        limit: Requests.
        speed_ups: Of the trace, for each row.
        ttft_s: Objective.
        tpot_s: Objective.
    """

    config: Path
    replicas: int | None = None
    trace: str | Path
    limit: int
    speed_ups: tuple[float, ...]
    ttft_s: float
    tpot_s: float


_MOONCAKE = "mooncake/conversation_trace.jsonl"
_AZURE = "azure2023/AzureLLMInferenceTrace_conv.csv"
_SERVEGEN = "servegen/language/m-large"
_TT = "tt/ci_mooncake.jsonl"

SCENARIOS = {
    "mooncake-t3k": Scenario(
        config=HERE / "t3k-long.yaml", trace=_MOONCAKE, limit=600,
        speed_ups=(0.05, 0.1, 0.15, 0.2, 0.3), ttft_s=20.0, tpot_s=0.2,
    ),
    "mooncake-t3k-pd": Scenario(
        config=HERE / "t3k-long-pd.yaml", trace=_MOONCAKE, limit=600,
        speed_ups=(0.05, 0.1, 0.15, 0.2, 0.3), ttft_s=20.0, tpot_s=0.2,
    ),
    "mooncake-galaxy": Scenario(
        config=HERE / "galaxy-long.yaml", trace=_MOONCAKE, limit=400,
        speed_ups=(0.05, 0.1, 0.15, 0.2), ttft_s=20.0, tpot_s=0.2,
    ),
    "mooncake-galaxy-pd": Scenario(
        config=HERE / "galaxy-long-pd.yaml", trace=_MOONCAKE, limit=400,
        speed_ups=(0.05, 0.1, 0.15, 0.2), ttft_s=20.0, tpot_s=0.2,
    ),
    "azure-n150": Scenario(
        config=CONFIGS / "sim-n150x4.yaml", replicas=8, trace=_AZURE, limit=600,
        speed_ups=(0.4, 0.6, 0.8, 1.0), ttft_s=5.0, tpot_s=0.15,
    ),
    "azure-t3k-pd": Scenario(
        config=CONFIGS / "sim-t3k-2p2d.yaml", trace=_AZURE, limit=600,
        speed_ups=(0.4, 0.7, 1.0, 1.3), ttft_s=5.0, tpot_s=0.15,
    ),
    "servegen-n150": Scenario(
        config=CONFIGS / "sim-n150x4.yaml", replicas=8, trace=_SERVEGEN, limit=600,
        speed_ups=(0.02, 0.04, 0.06, 0.08), ttft_s=5.0, tpot_s=0.15,
    ),
    "servegen-t3k-pd": Scenario(
        config=CONFIGS / "sim-t3k-2p2d.yaml", trace=_SERVEGEN, limit=600,
        speed_ups=(0.02, 0.04, 0.08, 0.12), ttft_s=5.0, tpot_s=0.15,
    ),
    "tt-n150": Scenario(
        config=CONFIGS / "sim-n150x4.yaml", trace=_TT, limit=64,
        speed_ups=(0.03, 0.06, 0.1, 0.2), ttft_s=5.0, tpot_s=0.15,
    ),
    "tt-t3k-pd": Scenario(
        config=CONFIGS / "sim-t3k-2p2d.yaml", trace=_TT, limit=64,
        speed_ups=(0.03, 0.06, 0.1, 0.2), ttft_s=5.0, tpot_s=0.15,
    ),
    "prefix-n150": Scenario(
        config=CONFIGS / "sim-n150x4.yaml", replicas=8, trace=HERE / "shared-prefix.yaml",
        limit=600, speed_ups=(0.3, 0.6, 1.0, 1.5), ttft_s=10.0, tpot_s=0.3,
    ),
    "prefix-t3k-pd": Scenario(
        config=CONFIGS / "sim-t3k-2p2d.yaml", trace=HERE / "shared-prefix.yaml",
        limit=600, speed_ups=(1.0, 1.5, 2.0, 3.0), ttft_s=10.0, tpot_s=0.3,
    ),
    "azure-t3k-lanes": Scenario(
        config=HERE / "t3k-lanes.yaml", trace=_AZURE, limit=600,
        speed_ups=(1.0, 1.5, 2.0, 2.5), ttft_s=5.0, tpot_s=0.15,
    ),
    "prefix-t3k-lanes": Scenario(
        config=HERE / "t3k-lanes.yaml", trace=HERE / "shared-prefix.yaml", limit=600,
        speed_ups=(1.0, 2.0, 3.0, 4.0), ttft_s=10.0, tpot_s=0.3,
    ),
    "azure-galaxy-lanes": Scenario(
        config=HERE / "galaxy-lanes.yaml", trace=_AZURE, limit=400,
        speed_ups=(0.05, 0.1, 0.15, 0.2), ttft_s=10.0, tpot_s=0.3,
    ),
}  # fmt: skip


def sweep(name: str, scenario: Scenario, traces: Path) -> list[Summary]:
    """Run a scenario: every policy at every speed."""
    slo = Slo(ttft_s=scenario.ttft_s, tpot_s=scenario.tpot_s)
    summaries = []
    for policy, cluster in _clusters(scenario).items():
        for speed_up in scenario.speed_ups:
            options = SimulateOptions(
                trace=traces / scenario.trace, limit=scenario.limit, speed_up=speed_up
            )
            result = run_cluster(cluster, load_trace(options), speed_up=speed_up)
            summaries.append(msgspec.structs.replace(summarise(result, slo), policy=policy))
    return summaries


def _clusters(scenario: Scenario) -> dict[str, ClusterConfig]:
    clusters = {
        policy: load_cluster(scenario.config, replicas=scenario.replicas, policy=policy)
        for policy in POLICIES
    }
    ours = clusters["least_delay"]
    if "prefill" in ours.pools:
        router = msgspec.structs.replace(ours.router, min_remote_prefill_tokens=0)
        clusters[ALL_MOVED] = dataclasses.replace(ours, router=router)
    return clusters


def table(summaries: list[Summary]) -> str:
    """A scenario's rows in Markdown."""
    lines = [
        "| policy | arrivals /s | ok % | TTFT mean, p99 s | TPOT mean, p99 ms | ITL p99 ms "
        "| good % | good /s | hits % | busy % | max/mean |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        assert s.goodput is not None
        latencies = s.latencies
        cells = (
            s.policy,
            f"{s.requests.offered_per_s or 0:.2f}",
            f"{100 * (s.requests.success_rate or 0):.1f}",
            _mean_and_p99(latencies.ttft_s, 1.0, 2),
            _mean_and_p99(latencies.tpot_s, 1e3, 0),
            f"{1e3 * (latencies.itl_s.p99 or 0):,.0f}",
            f"{100 * _attainment(s):.1f}",
            f"{s.goodput.good_per_s or 0:.2f}",
            f"{100 * (s.prefix.hit_share or 0):.1f}",
            " + ".join(f"{100 * (pool.utilisation or 0):.0f}" for pool in _prefill_first(s)),
            " + ".join(f"{pool.imbalance or 0:.2f}" for pool in _prefill_first(s)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison(summaries: list[Summary]) -> str:
    """Good requests in % of every policy, a line for each load, in Markdown."""
    good: dict[str, list[float]] = {s.policy: [] for s in summaries}
    for s in summaries:
        good[s.policy].append(100 * _attainment(s))
    loads = [s.requests.offered_per_s or 0 for s in summaries if s.policy == POLICIES[0]]
    lines = [f"| arrivals /s | {' | '.join(good)} |", "|---" * (len(good) + 1) + "|"]
    for i, load in enumerate(loads):
        best = max(shares[i] for shares in good.values())
        cells = [f"**{s[i]:.1f}**" if s[i] == best else f"{s[i]:.1f}" for s in good.values()]
        lines.append(f"| {load:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, run, print tables, draw plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="this scenario alone")
    arguments = parser.parse_args()
    for name in arguments.only or SCENARIOS:
        summaries = sweep(name, SCENARIOS[name], arguments.traces)
        shown = [s for s in summaries if s.policy in (*SHOWN, ALL_MOVED)]
        print(f"\n## {name}\n\n{table(shown)}\n\n{comparison(summaries)}", flush=True)
        if arguments.plots is not None:
            _plot(name, shown, arguments.plots)


def _attainment(summary: Summary) -> float:
    assert summary.goodput is not None
    assert summary.goodput.attainment is not None
    return summary.goodput.attainment


def _mean_and_p99(values: Distribution, factor: float, decimals: int) -> str:
    mean, p99 = (factor * (x or 0.0) for x in (values.mean, values.p99))
    return f"{mean:,.{decimals}f}, {p99:,.{decimals}f}"


def _prefill_first(summary: Summary) -> list[PoolSummary]:
    return sorted(summary.pools, key=lambda pool: pool.role != "prefill")


def _plot(name: str, summaries: list[Summary], folder: Path) -> None:
    most = max(s.requests.offered_per_s or 0.0 for s in summaries)
    # Where there is a knee; far below it all curves are one line.
    shown = [s for s in summaries if 4 * (s.requests.offered_per_s or 0.0) >= most]
    plot_goodput(shown, folder / f"policies-{name}.png")


if __name__ == "__main__":
    main()
