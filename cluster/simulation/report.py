"""Show a run to a person, and write it to files: tables, progress, JSON, event log.

Owner of the terminal while a simulation runs: the progress display. Rich is imported when something
is shown, so that a program that only wants numbers does not pay for it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from cluster.simulation.summary import Distribution, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import TextIO

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from cluster.simulation.records import EventRecord
    from cluster.simulation.summary import Goodput, Slo, Summary

MAX_WIDTH: Final = 100
"""Columns of the widest table."""
REFRESH_EVERY_S: Final = 0.1
"""Real seconds between two drawings of the progress bar."""
MAX_REPLICA_ROWS: Final = 16
"""A run with more lives of replicas than this shows its pools only; the JSON has them all."""

_NONE = "-"
_MAX_SECONDS_WITH_DECIMALS: Final = 1e3


def print_summary(
    summary: Summary, *, wall_s: float | None = None, console: Console | None = None
) -> None:
    """Show one run's numbers as tables of at most `MAX_WIDTH` columns.

    Args:
        summary: The run.
        wall_s: Real seconds that it took, to show with it.
        console: Where to; standard output when None.
    """
    console = console or _console()
    # Names come from files: a bracket in one is no markup.
    console.print(describe(summary), style="bold", markup=False, highlight=False)
    for table in (_overview(summary, wall_s), _latency_table(summary), _pool_table(summary)):
        console.print()
        console.print(table, markup=False)


def write_summary(summary: Summary, path: Path) -> None:
    """Write the summary's JSON: the same bytes for the same run."""
    path.write_bytes(to_json(summary))


def write_events(events: Iterable[EventRecord], path: Path) -> None:
    """Write one JSON object for each event and line, keys sorted: the same bytes for the same run.

    `at_s` is always a number with a fraction, in the shortest form that reads back as itself.
    """
    with path.open("wb") as file:
        file.writelines(_event_lines(events))


def describe(summary: Summary) -> str:
    """The configuration of a run in one line, for a heading."""
    replicas = "replica" if summary.num_replicas == 1 else "replicas"
    parts = [summary.workload, summary.policy, f"{summary.num_replicas:,} {replicas}"]
    if summary.speed_up != 1.0:
        parts.append(f"arrivals {summary.speed_up:g}x")
    parts.extend(str(summary.config[key]) for key in ("model", "board") if key in summary.config)
    return " · ".join([*parts, f"seed {summary.seed}"])


def describe_slo(slo: Slo) -> str:
    """Objectives as a reader would write them: "TTFT ≤ 500 ms, TPOT ≤ 50 ms"."""
    bounds = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{name} ≤ {1e3 * bound:,g} ms" for name, bound in bounds if bound is not None)


class ProgressDisplay:
    """A progress bar on a terminal, and nothing at all on anything else.

    A context manager. It draws from `update` only, without a thread, and at most every
    `REFRESH_EVERY_S` real seconds; so a simulator may call it after every event.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """Draw on this stream, standard error when None."""
        self._stream = sys.stderr if stream is None else stream
        self._progress: Progress | None = None
        self._next_s = 0.0
        self._started_s = 0.0

    def __repr__(self) -> str:
        return f"ProgressDisplay(drawing={self._progress is not None})"

    def __enter__(self) -> ProgressDisplay:
        if self._stream.isatty():
            self._started_s = time.monotonic()
            self._progress = _progress(self._stream)
            self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def update(
        self, virtual_now_s: float, duration_s: float, done: int, total: int, events: int
    ) -> None:
        """Show how far the run is.

        Args:
            virtual_now_s: The virtual clock.
            duration_s: When the workload's last request arrives, on that clock.
            done: Requests that have ended.
            total: Requests of the workload.
            events: Events handled.
        """
        if self._progress is None:
            return
        now_s = time.monotonic()
        # The last update is always drawn: the bar must not stop short of its end.
        if now_s < self._next_s and done < total:
            return
        self._next_s = now_s + REFRESH_EVERY_S
        rate = events / max(now_s - self._started_s, 1e-9)
        self._progress.update(
            self._progress.task_ids[0],
            total=total,
            completed=done,
            requests=f"{done:,}/{total:,} requests",
            clock=f"{virtual_now_s:,.1f}/{duration_s:,.1f} s virtual",
            rate=f"{rate:,.0f} events/s",
        )
        self._progress.refresh()


@dataclass(frozen=True, slots=True)
class _Unit:
    """How a number is shown: times a factor, with so many decimals."""

    factor: float = 1.0
    num_decimals: int = 0

    def show(self, value: float | None) -> str:
        if value is None:
            return _NONE
        return f"{self.factor * value:,.{self.num_decimals}f}"


_COUNT = _Unit()
_RATE = _Unit(num_decimals=2)
_RATIO = _Unit(num_decimals=2)
_SECONDS = _Unit(num_decimals=1)
_MS = _Unit(factor=1e3, num_decimals=2)
_PERCENT = _Unit(factor=1e2, num_decimals=1)


def _overview(summary: Summary, wall_s: float | None) -> Table:
    table = _table("", with_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit")
    for row in (*_request_rows(summary), *_reuse_rows(summary)):
        table.add_row(*row)
    if summary.goodput is not None:
        for row in _goodput_rows(summary.goodput):
            table.add_row(*row)
    table.add_row("duration", _SECONDS.show(summary.duration_s), "s, virtual")
    if wall_s is not None:
        rate = _COUNT.show(summary.num_events / wall_s if wall_s > 0 else None)
        table.add_row("took", _RATE.show(wall_s), f"s, {summary.num_events:,} events, {rate} /s")
    return table


def _request_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    requests = summary.requests
    yield "requests sent", _COUNT.show(requests.num_sent), ""
    yield "requests ok", _COUNT.show(requests.num_ok), ""
    yield "success rate", _PERCENT.show(requests.success_rate), "% of those sent"
    for outcome, count in requests.failures.items():
        yield f"  {outcome}", _COUNT.show(count), ""
    if requests.num_retries:
        yield "retries", _COUNT.show(requests.num_retries), ""
    yield "arrivals", _RATE.show(requests.offered_per_s), "requests/s"
    yield "completed", _RATE.show(requests.completed_per_s), "requests/s"
    yield "output", _RATE.show(requests.output_tokens_per_s), "tokens/s"


def _reuse_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    yield "prefix hits", _PERCENT.show(summary.prefix.hit_share), "% of prompt tokens"
    transfers = summary.transfers
    if transfers.seconds.count:
        share = f"ms mean after the first token; {_PERCENT.show(transfers.share_of_e2e)} % of E2E"
        yield "KV transfer", _MS.show(transfers.seconds.mean), share


def _goodput_rows(goodput: Goodput) -> Iterator[tuple[str, str, str]]:
    slo = describe_slo(goodput.slo)
    yield "SLO attainment", _PERCENT.show(goodput.attainment), f"% of those sent keep {slo}"
    yield "goodput", _RATE.show(goodput.good_per_s), "good requests/s"
    yield "90 % attainment", _RATIO.show(goodput.scale_at_90), "times these objectives"


def _latency_table(summary: Summary) -> Table:
    latencies = summary.latencies
    rows: list[tuple[str, Distribution]] = [
        ("TTFT", latencies.ttft_s),
        ("TPOT", latencies.tpot_s),
        ("ITL", latencies.itl_s),
        ("TBT", latencies.tbt_s),
        ("E2E", latencies.e2e_s),
        ("queued", latencies.queued_s),
    ]
    has_uncertain = any(d.uncertain for _, d in rows)
    # A run far beyond its capacity has numbers that leave no room for decimals, nor need them.
    longest_s = max((d.max for _, d in rows if d.max is not None), default=0.0)
    unit = _MS if longest_s < _MAX_SECONDS_WITH_DECIMALS else _Unit(factor=1e3)
    table = _table("", caption="* fewer than 10 samples above it" if has_uncertain else "")
    table.add_column("ms", no_wrap=True)
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    for name, d in rows:
        percentiles = (("p50", d.p50), ("p90", d.p90), ("p95", d.p95), ("p99", d.p99))
        table.add_row(
            name,
            unit.show(d.mean),
            # The mark is in front, so that digits stand below each other.
            *(("*" if p in d.uncertain else "") + unit.show(x) for p, x in percentiles),
            unit.show(d.max),
            _COUNT.show(d.count),
        )
    return table


def _pool_table(summary: Summary) -> Table:
    table = _table("")
    table.add_column("replicas", overflow="fold")
    for heading in ("count", "busy %", "slots %", "max/mean tokens", "preempted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in summary.pools:
        table.add_row(
            pool.role,
            _COUNT.show(pool.num_replicas),
            _PERCENT.show(pool.utilisation),
            _PERCENT.show(pool.slot_occupancy),
            _RATIO.show(pool.imbalance),
            _COUNT.show(pool.num_preemptions),
        )
    if 1 < len(summary.replicas) <= MAX_REPLICA_ROWS:
        for replica in summary.replicas:
            table.add_row(
                f"  {replica.name}",
                "",
                _PERCENT.show(replica.utilisation),
                _PERCENT.show(replica.slot_occupancy),
                "",
                _COUNT.show(replica.num_preemptions),
            )
    return table


def _event_lines(events: Iterable[EventRecord]) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    for event in events:
        line = {
            # A whole number must not lose its fraction: 2.0 and 2 would be different bytes.
            "at_s": float(event.at_s),
            "detail": event.detail,
            "kind": event.kind,
            "subject": event.subject,
        }
        yield encoder.encode(line) + b"\n"


def _table(title: str, *, with_header: bool = True, caption: str = "") -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=with_header,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # A file has no width of its own: without this, a piped table would be cut to 80 columns.
    width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    console.width = width
    return console


def _progress(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    progress = Progress(
        BarColumn(bar_width=30),
        TextColumn("{task.fields[requests]}"),
        TextColumn("{task.fields[clock]}"),
        TextColumn("{task.fields[rate]}"),
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
    )
    progress.add_task("simulate", total=None, requests="", clock="", rate="")
    return progress
