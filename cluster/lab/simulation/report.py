"""Shows a run's progress and tables on the terminal, and writes its event log.

Rich is imported only when something is shown, so that programs that need only figures do not load
it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from cluster.lab.simulation.records import EventRecord
    from cluster.lab.simulation.summary import (
        Latencies,
        PoolSummary,
        ReplicaSummary,
        RequestSummary,
        Slo,
        Summary,
    )

MAX_WIDTH: Final = 100
"""Columns of the widest table."""
REFRESH_EVERY_S: Final = 0.1
"""Real seconds between two drawings of the progress bar."""
MAX_REPLICA_ROWS: Final = 16
"""A run with more starts of replicas than this shows its pools only; the JSON has them all."""

_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "max")
_MAX_SECONDS_WITH_DECIMALS: Final = 1e3


def print_summary(summary: Summary, *, wall_s: float, console: Console | None = None) -> None:
    """Show one run's numbers, and the real seconds that it took, in at most `MAX_WIDTH` columns.

    Without a console they go to standard output.
    """
    console = console or _console()
    # Names come from files: a bracket in one is no markup.
    console.print(describe(summary), style="bold", markup=False, highlight=False)
    latencies = _latency_table(summary.latencies)
    for table in (_overview(summary, wall_s), latencies, _pool_table(summary)):
        console.print()
        console.print(table, markup=False)


def write_events(events: Iterable[EventRecord], path: Path) -> None:
    """Write one JSON object for each event and line, keys sorted: the same bytes for the same run.

    `at_s` is always a number with a fraction, in the shortest form that reads back as itself.
    """
    encoder = msgspec.json.Encoder(order="sorted")
    with path.open("wb") as file:
        for event in events:
            # A whole number must not lose its fraction: 2.0 and 2 would be different bytes.
            line = msgspec.structs.replace(event, at_s=float(event.at_s))
            file.write(encoder.encode(line) + b"\n")


def describe(summary: Summary) -> str:
    """Return the configuration of a run in one line, for a heading."""
    replicas = "replica" if summary.num_replicas == 1 else "replicas"
    parts = [summary.workload, summary.policy, f"{summary.num_replicas:,} {replicas}"]
    if summary.speed_up != 1.0:
        parts.append(f"arrivals {summary.speed_up:g}x")
    parts.extend(str(summary.config[key]) for key in ("model", "board") if key in summary.config)
    return " · ".join([*parts, f"seed {summary.seed}"])


def describe_slo(slo: Slo) -> str:
    """Format objectives: "TTFT ≤ 500 ms, TPOT ≤ 50 ms"."""
    bounds = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{name} ≤ {1e3 * bound:,g} ms" for name, bound in bounds if bound is not None)


@contextlib.contextmanager
def progress_display(
    duration_s: float, total: int, stream: TextIO | None = None
) -> Iterator[Callable[[float, int, int], None]]:
    """Show a progress bar on a terminal, and nothing on other streams.

    It is drawn within an update, without a thread, and at most every `REFRESH_EVERY_S` real
    seconds, so a simulator may update it after every event.

    Args:
        duration_s: Virtual time at which the workload's last request arrives.
        total: Number of requests of the workload.
        stream: Stream to draw on; None for standard error.

    Yields:
        The update function, with arguments (virtual seconds, ended requests, handled events).
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield lambda _now_s, _done, _events: None
        return
    bar = _progress_bar(stream)
    task = bar.add_task("", total=total)
    started_s = next_s = time.monotonic()

    def update(virtual_now_s: float, done: int, events: int) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        # The last update is always drawn: the bar must not stop short of its end.
        if now_s < next_s and done < total:
            return
        next_s = now_s + REFRESH_EVERY_S
        rate = events / max(now_s - started_s, 1e-9)
        bar.update(
            task,
            completed=done,
            description=f"{done:,}/{total:,} requests {virtual_now_s:,.1f}/{duration_s:,.1f} s "
            f"virtual {rate:,.0f} events/s",
        )
        bar.refresh()

    with bar:
        yield update


def _show(value: float | None, num_decimals: int = 0, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:,.{num_decimals}f}"


def _percent(share: float | None) -> str:
    return _show(share, 1, 1e2)


def _overview(summary: Summary, wall_s: float) -> Table:
    table = _table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit")
    for row in (*_request_rows(summary.requests), *_reuse_rows(summary), *_goodput_rows(summary)):
        table.add_row(*row)
    table.add_row("duration", _show(summary.duration_s, 1), "s, virtual")
    rate = _show(summary.num_events / wall_s if wall_s > 0 else None)
    table.add_row("took", _show(wall_s, 2), f"s, {summary.num_events:,} events, {rate} /s")
    return table


def _request_rows(requests: RequestSummary) -> Iterator[tuple[str, str, str]]:
    yield "requests sent", _show(requests.num_sent), ""
    yield "requests ok", _show(requests.num_ok), ""
    yield "success rate", _percent(requests.success_rate), "% of those sent"
    for outcome, count in requests.failures.items():
        yield f"  {outcome}", _show(count), ""
    if requests.num_retries:
        yield "retries", _show(requests.num_retries), ""
    yield "arrivals", _show(requests.offered_per_s, 2), "requests/s"
    yield "completed", _show(requests.completed_per_s, 2), "requests/s"
    yield "output", _show(requests.output_tokens_per_s, 2), "tokens/s"


def _reuse_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    yield "prefix hits", _percent(summary.prefix.hit_share), "% of prompt tokens"
    transfers = summary.transfers
    if transfers.seconds.count:
        share = f"ms mean after the first token; {_percent(transfers.share_of_e2e)} % of E2E"
        yield "KV transfer", _show(transfers.seconds.mean, 2, 1e3), share


def _goodput_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    goodput = summary.goodput
    if goodput is not None:
        slo = describe_slo(goodput.slo)
        yield "SLO attainment", _percent(goodput.attainment), f"% of those sent keep {slo}"
        yield "goodput", _show(goodput.good_per_s, 2), "good requests/s"
        yield "90 % attainment", _show(goodput.scale_at_90, 2), "times these objectives"


def _latency_table(latencies: Latencies) -> Table:
    rows = {
        "TTFT": latencies.ttft_s,
        "TPOT": latencies.tpot_s,
        "ITL": latencies.itl_s,
        "TBT": latencies.tbt_s,
        "E2E": latencies.e2e_s,
        "queued": latencies.queued_s,
    }
    has_uncertain = any(d.uncertain for d in rows.values())
    # Latencies of an overloaded run are so large that decimals neither fit nor matter.
    longest_s = max((d.max for d in rows.values() if d.max is not None), default=0.0)
    num_decimals = 2 if longest_s < _MAX_SECONDS_WITH_DECIMALS else 0
    table = _table(caption="* fewer than 10 samples above it" if has_uncertain else None)
    table.add_column("ms", no_wrap=True)
    for heading in (*_STATISTICS, "samples"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, distribution in rows.items():
        cells = [
            # The mark is in front, so that digits stand below each other.
            ("*" if field in distribution.uncertain else "")
            + _show(getattr(distribution, field), num_decimals, 1e3)
            for field in _STATISTICS
        ]
        table.add_row(name, *cells, _show(distribution.count))
    return table


def _pool_table(summary: Summary) -> Table:
    table = _table()
    table.add_column("replicas", overflow="fold")
    for heading in ("count", "busy %", "slots %", "max/mean tokens", "preempted"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: list[tuple[str, str, str, PoolSummary | ReplicaSummary]] = [
        (pool.role, _show(pool.num_replicas), _show(pool.imbalance, 2), pool)
        for pool in summary.pools
    ]
    if 1 < len(summary.replicas) <= MAX_REPLICA_ROWS:
        rows += [(f"  {replica.name}", "", "", replica) for replica in summary.replicas]
    for name, count, imbalance, of in rows:
        busy, slots = _percent(of.utilisation), _percent(of.slot_occupancy)
        table.add_row(name, count, busy, slots, imbalance, _show(of.num_preemptions))
    return table


def _table(*, show_header: bool = True, caption: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=show_header,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # A file has no width: without this, a piped table would be cut to 80 columns.
    console.width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    return console


def _progress_bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
    )
