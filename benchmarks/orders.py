"""Effect of the moment at which a decode slot is reserved, for every `router.order`: one table.

Bursty code completion as in `benchmarks.overload`, and the scenarios of `benchmarks.policies` with
separate prefill pools; the default policy, no admission, virtual time, so the numbers are the same
on every machine. *Held* is the time that reservations stood before their prompts were computed, and
*late* the time that computed prompts waited for a slot; both are divided by the number of requests.

    python -m benchmarks.orders --traces traces/ [--only NAME]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec

from benchmarks import overload, policies
from cluster.config.schema import OrderName
from cluster.lab.simulation.command import SimulateOptions, load_cluster, load_trace, run_cluster
from cluster.lab.simulation.summary import Slo, summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cluster.config.resolve import ClusterConfig
    from cluster.lab.simulation.records import EventRecord
    from cluster.lab.workloads.request import Workload

ORDERS: tuple[OrderName, ...] = get_args(OrderName)
BURSTS = ("gamma", "spikes")
BURST_LOADS = (0.25, 0.5, 1.0, 2.0)
APART = tuple(name for name in policies.SCENARIOS if name.endswith("-pd"))


class Run(NamedTuple):
    """A workload at one load, and its objectives."""

    cluster: ClusterConfig
    requests: Workload
    slo: Slo


class Waits(NamedTuple):
    """Times that slots waited for prompts, and prompts for slots.

    Attributes:
        held_s: Of each reservation, from its engine's yes to the first token of the prompt.
        late_s: Of each prompt that was computed elsewhere and had no slot then, the time to one.
    """

    held_s: list[float]
    late_s: list[float]


def bursts(name: str) -> Iterator[Run]:
    """Code completion at every load."""
    cluster, most_rps = load_cluster(overload.CONFIG), overload.capacity_rps()
    for load in BURST_LOADS:
        yield Run(cluster, overload.workload(name, load * most_rps, overload.SPAN_S), overload.SLO)


def scenario(name: str, traces: Path) -> Iterator[Run]:
    """A trace at every speed."""
    of = policies.SCENARIOS[name]
    cluster = load_cluster(of.config, replicas=of.replicas)
    for speed_up in of.speed_ups:
        options = SimulateOptions(trace=traces / of.trace, limit=of.limit, speed_up=speed_up)
        yield Run(cluster, load_trace(options), Slo(ttft_s=of.ttft_s, tpot_s=of.tpot_s))


def waits(events: Iterable[EventRecord]) -> Waits:
    """Reduce recorded events to the waits of slots and of prompts."""
    prefill: dict[str, str] = {}
    accepted_s: dict[str, float] = {}
    computed_s: dict[str, float] = {}
    found = Waits([], [])
    for at_s, kind, request, detail in map(msgspec.structs.astuple, events):
        if kind == "place" and detail[0] == "prefill":
            prefill[request] = detail[1]
        elif kind == "accept" and detail[0] != prefill.get(request):
            accepted_s[request] = at_s
            if request in computed_s:
                found.late_s.append(at_s - computed_s.pop(request))
        elif kind == "tokens" and detail[1] == 0 and detail[0] == prefill.pop(request, None):
            if request in accepted_s:
                found.held_s.append(at_s - accepted_s[request])
            else:
                computed_s[request] = at_s
    return found


def line(order: OrderName, run: Run) -> str:
    """Simulate, and reduce to a row in Markdown."""
    router = msgspec.structs.replace(run.cluster.router, order=order, min_remote_prefill_tokens=0)
    cluster = dataclasses.replace(run.cluster, router=router)
    result = run_cluster(cluster, run.requests, keeps_events=True)
    summary, waited = summarise(result, run.slo), waits(result.events)
    assert summary.goodput is not None
    ttft_s, tpot_s = summary.latencies.ttft_s, summary.latencies.tpot_s
    num_requests = len(result.records)
    span_s = run.requests.requests[-1].arrival_s
    cells = (
        f"{num_requests / span_s:.2f}",
        order,
        f"{100 * (summary.requests.success_rate or 0):.1f}",
        f"{100 * summary.goodput.num_good / num_requests:.1f}",
        f"{summary.goodput.num_good / span_s:.2f}",
        f"{ttft_s.mean or 0:.2f}, {ttft_s.p99 or 0:.2f}",
        f"{1e3 * (tpot_s.mean or 0):.0f}, {1e3 * (tpot_s.p99 or 0):.0f}",
        f"{sum(waited.held_s) / num_requests:.2f}",
        f"{sum(waited.late_s) / num_requests:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Parse arguments, run, print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    names = (*BURSTS, *APART)
    parser.add_argument("--only", choices=names, action="append", help="this workload alone")
    parser.add_argument("--order", choices=ORDERS, action="append", help="this order alone")
    arguments = parser.parse_args()
    for name in arguments.only or names:
        print(f"\n## {name}\n\n{_HEAD}", flush=True)
        runs = bursts(name) if name in BURSTS else scenario(name, arguments.traces)
        for run in runs:
            for order in arguments.order or ORDERS:
                print(line(order, run), flush=True)


_HEAD = (
    "| arrivals /s | order | ok % | good % | good /s | TTFT mean, p99 s | TPOT mean, p99 ms "
    "| held s | late s |\n" + "|---" * 9 + "|"
)

if __name__ == "__main__":
    main()
