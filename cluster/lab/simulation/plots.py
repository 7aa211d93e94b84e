"""Draws the plots of one run, and goodput against load of several runs.

Matplotlib is an extra and imported only when something is drawn. Figures use `Figure` directly,
without windows or global state. The same run gives the same bytes of SVG, on one version of
matplotlib.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cluster.lab.simulation.report import describe, describe_slo
from cluster.lab.simulation.summary import (
    Slo,
    attainment_curve,
    collect_samples,
    nearest_rank,
    slo_ratios,
    summarise,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from cluster.lab.simulation.records import EventRecord, RequestRecord, SimulationResult
    from cluster.lab.simulation.summary import Floats, PoolSummary, Samples, Summary

FORMATS: Final = ("png", "svg")
"""Every figure of a run is drawn in each of them."""

# Okabe and Ito's palette, which readers with any colour vision can tell apart; its yellow is too
# pale for a line. Line styles and markers say the same again, for a print without colour.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_LINES: Final = ("-", "--", "-.", ":")
_MARKERS: Final = ("o", "s", "^", "D")
_GREY: Final = "#6B6B6B"
_DOTTED: Final = (0, (1, 2))

_STYLE: Final[dict[str, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.labelcolor": "#222222",
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.dpi": 110,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "path.simplify": False,
    # Names of clip paths come from this, and are random without it.
    "svg.hashsalt": "ttserve",
    "xtick.color": _GREY,
    "xtick.labelcolor": "#222222",
    "ytick.color": _GREY,
    "ytick.labelcolor": "#222222",
}

_CHARACTERS_PER_IN: Final = 10
_NUM_CDF_POINTS: Final = 400
_NUM_TIMELINE_POINTS: Final = 600
_NUM_TIMELINE_BINS: Final = 120
_MAX_NAMED_BARS: Final = 24
_FAULT_NAME_SHARE: Final = 0.09
_FAULT_KINDS: Final = frozenset({"kill", "freeze", "slow", "drop_link", "corrupt", "partition"})


class MissingPlotLibraryError(Exception):
    """Matplotlib is not installed; the message says how to get it."""


def require_matplotlib() -> None:
    """Check that plots can be drawn: call it before a long run, not after.

    Raises:
        MissingPlotLibraryError: When matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise MissingPlotLibraryError(
            "plots need matplotlib, which is not installed: pip install matplotlib, "
            "or ttserve with its extra `plot`"
        ) from error


def plot_run(result: SimulationResult, folder: Path, *, slo: Slo | None = None) -> list[Path]:
    """Draw one run: latencies, attainment (with objectives), timeline, replicas.

    Args:
        result: The run.
        folder: Where the files go; made when it is not there.
        slo: Objectives, drawn with the latencies; without any there is no attainment to draw.

    Returns:
        The files, in the order of drawing; each figure in every one of `FORMATS`.

    Raises:
        MissingPlotLibraryError: When matplotlib is not installed.
    """
    slo = slo or Slo()
    summary = summarise(result, slo)
    figures: dict[str, Callable[[], Figure]] = {
        "latencies": lambda: _latencies(summary, collect_samples(result.records), slo),
        "timeline": lambda: _timeline(summary, result),
        "replicas": lambda: _replicas(summary),
    }
    if summary.goodput is not None:
        figures["attainment"] = lambda: _attainment(summary, result.records, slo)
    return [
        path
        for name, figure in figures.items()
        for path in _draw(figure, [folder / f"{name}.{suffix}" for suffix in FORMATS])
    ]


def plot_goodput(summaries: Sequence[Summary], path: Path) -> None:
    """Draw good requests against load, a line for each policy.

    Args:
        summaries: Runs of one workload at several speeds, on one cluster, with objectives.
        path: The file; its suffix says the format, its folder is made when it is not there.

    Raises:
        MissingPlotLibraryError: When matplotlib is not installed.
    """
    _draw(lambda: _goodput(summaries), [path])


def _draw(figure: Callable[[], Figure], paths: list[Path]) -> list[Path]:
    """Make a figure and write it to files."""
    require_matplotlib()
    from matplotlib import style

    # From matplotlib's defaults, not from a user's own settings: those would change the bytes.
    with style.context(["default", _STYLE]):
        drawn = figure()
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Leave out date and version, so that equal figures are equal files.
            nothing = ("Date", "Creator") if path.suffix == ".svg" else ("Software",)
            drawn.savefig(path, metadata=dict.fromkeys(nothing))
    return paths


def _new_figure(title: str, subtitle: str, size_in: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spacing = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=size_in, layout=spacing)
    num_columns = int(_CHARACTERS_PER_IN * size_in[0])
    # Lines break between two facts, not within one.
    heading = "\n".join(
        textwrap.fill(line.replace(" ", "\u00a0").replace("·\u00a0", "· "), num_columns)
        for line in (title, subtitle)
        if line
    )
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10.5, linespacing=1.5)
    return figure


# --- latencies ---


def _latencies(summary: Summary, samples: Samples, slo: Slo) -> Figure:
    figure = _new_figure(f"Latency · {describe(summary)}", "", (11, 3.9))
    panels = (
        ("Time to first token", "TTFT (ms)", samples.ttft_s, slo.ttft_s, "requests"),
        ("Inter-token latency", "ITL (ms)", samples.itl_s, None, "gaps"),
        ("End to end", "E2E (ms)", samples.e2e_s, slo.e2e_s, "requests"),
    )
    for axes, (title, label, seconds, bound_s, noun) in zip(
        figure.subplots(1, len(panels)), panels, strict=True
    ):
        axes.set_title(f"{title}  ({seconds.size:,} {noun})")
        axes.set_xlabel(label)
        axes.set_ylabel(f"{noun} at or below (%)")
        if bound_s is not None:
            bound = f"SLO  {1e3 * bound_s:,g} ms"
            axes.axvline(1e3 * bound_s, color=_GREY, linewidth=1, linestyle="--", label=bound)
        _cdf(axes, 1e3 * seconds)
    return figure


def _cdf(axes: Axes, values: Floats) -> None:
    axes.set_ylim(0, 102)
    if not values.size:
        _say_none(axes)
        return
    ascending = np.sort(values)
    # For values that span some of it; zeros have no place on one.
    if ascending[0] > 0 and ascending[-1] > 4 * ascending[0]:
        _log_axis(axes)
    # Ranks, denser towards both ends; the tail is what one looks for. All of them when few.
    ends = (1 - np.cos(np.linspace(0, np.pi, _NUM_CDF_POINTS))) / 2
    ranks = np.unique(np.rint(ends * (ascending.size - 1)).astype(np.int64))
    shares = 100 * (ranks + 1) / ascending.size
    x = np.concatenate([ascending[ranks[:1]], ascending[ranks]])
    y = np.concatenate([[0.0], shares])
    axes.plot(x, y, color=_COLOURS[0], drawstyle="steps-post")
    for percent, marker in ((50, "o"), (90, "s"), (99, "^")):
        at = nearest_rank(ascending, percent)
        label = f"P{percent}  {_short(at)} ms"
        axes.plot([at], [percent], marker, color=_COLOURS[1], label=label)
    axes.legend(loc="lower right", handletextpad=0.3)


def _log_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0,), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    """Three digits that count: 1,234; 56.7; 0.89."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


# --- attainment ---


def _attainment(summary: Summary, records: Sequence[RequestRecord], slo: Slo) -> Figure:
    from matplotlib.ticker import NullLocator

    subtitle = f"Objectives at scale 1: {describe_slo(slo)}"
    figure = _new_figure(f"SLO attainment · {describe(summary)}", subtitle, (7.5, 4.4))
    axes = figure.subplots()
    curves = [("all objectives", slo)]
    single = [
        (f"{name.split('_')[0].upper()} alone", Slo(**{name: getattr(slo, name)}))
        for name in ("ttft_s", "tpot_s", "e2e_s")
        if getattr(slo, name) is not None
    ]
    curves += single if len(single) > 1 else []
    scales = np.geomspace(1 / 8, 8, _NUM_CDF_POINTS)
    for i, (label, objectives) in enumerate(curves):
        axes.plot(
            scales,
            100 * attainment_curve(slo_ratios(records, objectives), scales),
            label=label,
            color=_COLOURS[i],
            linestyle=_LINES[i],
            linewidth=2.4 if i == 0 else 1.5,
            zorder=3 if i == 0 else 2,
        )
    _mark_success(axes, summary.requests.success_rate)
    axes.axvline(1, color=_GREY, linewidth=0.9)
    axes.set_ylim(0, 102)
    axes.set_xlim(1 / 8, 8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("scale of the objectives (looser to the right)")
    axes.set_ylabel("good requests (% of those sent)")
    axes.legend(loc="lower right")
    return figure


def _mark_success(axes: Axes, share: float | None) -> None:
    """Where attainment must end: what failed keeps no objective, however loose."""
    if share is None or share == 1:
        return
    at = 100 * share
    axes.axhline(at, color=_GREY, linewidth=0.9, linestyle=_DOTTED)
    axes.annotate(
        f"{at:.1f} % ended well",
        (1 / 8, at),
        (3, -3),
        textcoords="offset points",
        va="top",
        color=_GREY,
        fontsize=8,
    )


# --- timeline ---


def _timeline(summary: Summary, result: SimulationResult) -> Figure:
    figure = _new_figure(f"Timeline · {describe(summary)}", "", (11, 5.2))
    all_axes = figure.subplots(2, 1, sharex=True)
    rates, in_flight = all_axes
    _draw_rates(rates, result)
    _draw_in_flight(in_flight, result)
    # One planned for after the end is no part of the picture.
    faults = [e for e in result.events if e.kind in _FAULT_KINDS and e.at_s <= result.duration_s]
    for axes in all_axes:
        for fault in faults:
            axes.axvline(fault.at_s, color=_GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.6)
    _name_faults(rates, faults, _FAULT_NAME_SHARE * result.duration_s)
    in_flight.set_xlabel("virtual time (s)")
    in_flight.set_xlim(0, _end_s(result))
    return figure


def _draw_rates(axes: Axes, result: SimulationResult) -> None:
    # A few arrivals in each bin, or the rates are all noise.
    num_bins = min(_NUM_TIMELINE_BINS, max(8, len(result.records) // 5))
    edges = np.linspace(0, _end_s(result), num_bins + 1)
    arrivals = [r.arrival_s for r in result.records]
    ends = [r.finished_s for r in result.records]
    for i, (label, times) in enumerate((("arrivals", arrivals), ("ends", ends))):
        rates = np.histogram(times, edges)[0] / (edges[1] - edges[0])
        y = [*rates, rates[-1]]
        axes.step(edges, y, _LINES[i], where="post", label=label, color=_COLOURS[i], linewidth=1.2)
    axes.set_ylabel("requests/s")


def _draw_in_flight(axes: Axes, result: SimulationResult) -> None:
    times = np.linspace(0, _end_s(result), _NUM_TIMELINE_POINTS)
    # Who never reached a replica waited until the end.
    starts = (
        r.finished_s
        if r.replica is None and r.prefill_replica is None
        else min(r.arrival_s + r.queued_s, r.finished_s)
        for r in result.records
    )
    num_arrived = _num_until(times, (r.arrival_s for r in result.records))
    num_started = _num_until(times, starts)
    num_ended = _num_until(times, (r.finished_s for r in result.records))
    running, queued = num_started - num_ended, num_arrived - num_started
    axes.plot(times, running, label="running", color=_COLOURS[2], linewidth=1.4)
    axes.plot(times, queued, label="queued", color=_COLOURS[1], linestyle="--", linewidth=1.4)
    axes.set_ylabel("requests")


def _num_until(times: Floats, events: Iterable[float]) -> NDArray[np.int64]:
    """How many of the events had happened at each time."""
    return np.searchsorted(np.sort(np.fromiter(events, dtype=np.float64)), times, side="right")


def _name_faults(axes: Axes, faults: Iterable[EventRecord], room_s: float) -> None:
    """Write names above; one needs room to its right, so of a dense bunch the first is named."""
    free_from_s = 0.0
    for fault in faults:
        if fault.at_s < free_from_s:
            continue
        free_from_s = fault.at_s + room_s
        axes.annotate(
            f"{fault.kind} {fault.subject}",
            (fault.at_s, 1.0),
            (2, 1),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=7.5,
            color=_GREY,
            annotation_clip=False,
        )


def _end_s(result: SimulationResult) -> float:
    return max(result.duration_s, 1e-9)


# --- replicas ---


def _replicas(summary: Summary) -> Figure:
    num_bars = len(summary.replicas)
    is_named = num_bars <= _MAX_NAMED_BARS
    height_in = 1.5 + (0.26 * num_bars if is_named else 2.8)
    pools = "   ".join(_pool_line(pool) for pool in summary.pools)
    figure = _new_figure(f"Replicas · {describe(summary)}", pools, (11, max(2.2, height_in)))
    busy: dict[str, list[tuple[str, float]]] = defaultdict(list)
    tokens: dict[str, Counter[str]] = defaultdict(Counter)
    for r in summary.replicas:
        busy[r.role].append((r.name, 100 * (r.utilisation or 0.0)))
        tokens[r.role][r.name] += r.num_prompt_tokens + r.num_output_tokens
    loads = {
        role: [(name, n / (by_name.total() / len(by_name))) for name, n in by_name.items()]
        for role, by_name in tokens.items()
        if by_name.total()
    }
    left, right = figure.subplots(1, 2)
    left.set_title("Utilisation")
    right.set_title("Load: prompt and output tokens computed")
    draw, mean_line = (_bars, right.axvline) if is_named else (_curves, right.axhline)
    draw(left, busy, "time in steps (% of life)")
    draw(right, loads, "tokens / mean of the pool")
    mean_line(1, color=_GREY, linewidth=0.9)
    return figure


def _pool_line(pool: PoolSummary) -> str:
    busy = "-" if pool.utilisation is None else f"{100 * pool.utilisation:.1f} %"
    uneven = "-" if pool.imbalance is None else f"{pool.imbalance:.2f}"
    return f"{pool.role}: {busy} busy, largest load / mean {uneven}"


def _bars(axes: Axes, by_role: dict[str, list[tuple[str, float]]], label: str) -> None:
    """A bar with its name for each replica, in the colour of its role."""
    axes.set_xlabel(label)
    bars = [
        (name, value, _COLOURS[i])
        for i, role in enumerate(sorted(by_role))
        for name, value in by_role[role]
    ]
    if not bars:
        _say_none(axes)
        return
    names, values, colours = zip(*bars, strict=True)
    axes.barh(range(len(bars)), values, color=colours, height=0.7)
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _curves(axes: Axes, by_role: dict[str, list[tuple[str, float]]], label: str) -> None:
    """A curve for each role over its replicas' ranks."""
    axes.set_ylabel(label)
    for i, (role, named) in enumerate(sorted(by_role.items())):
        values = sorted((value for _, value in named), reverse=True)
        ranks = 100 * (np.arange(len(values)) + 0.5) / len(values)
        name = f"{role} ({len(values):,})"
        axes.plot(ranks, values, _LINES[i], color=_COLOURS[i], label=name)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("replicas, busiest first (% of the pool)")
    axes.legend(loc="upper right")


def _say_none(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no samples", transform=axes.transAxes, ha="center", color=_GREY)


# --- several runs ---


def _goodput(summaries: Sequence[Summary]) -> Figure:
    first = summaries[0]
    assert first.goodput is not None, "no objectives"
    facts = [str(first.config[key]) for key in ("model", "board") if key in first.config]
    facts = ["Goodput against load", first.workload, *facts, f"{first.num_replicas:,} replicas"]
    subtitle = f"Good: {describe_slo(first.goodput.slo)}"
    figure = _new_figure(" · ".join(facts), subtitle, (7.5, 4.6))
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for s in summaries:
        good_per_s = s.goodput.good_per_s if s.goodput else None
        if s.requests.offered_per_s and good_per_s is not None:
            lines[s.policy].append((s.requests.offered_per_s, good_per_s))
    offered = [x for points in lines.values() for x, _ in points]
    ends = [min(offered, default=0.0), max(offered, default=0.0)]
    axes.plot(ends, ends, color=_GREY, linewidth=0.9, linestyle=_DOTTED, label="as offered")
    for i, (policy, points) in enumerate(lines.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            label=policy,
            color=_COLOURS[i],
            linestyle=_LINES[i],
            marker=_MARKERS[i],
            # Later lines are thinner: one that lies on another does not hide it.
            linewidth=max(1.2, 2.8 - 0.5 * i),
            markersize=max(4.0, 8.0 - 1.2 * i),
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("offered load (requests/s)")
    axes.set_ylabel("good requests/s")
    axes.legend(loc="upper left")
    return figure
