"""Draw the curves of one run, or of several side by side, as PNG and SVG.

Owner: nobody; a figure lives from its first line to its file. Matplotlib is an extra and imported
when something is drawn. No window, no global figure: everything goes through `Figure`. The same
run gives the same bytes of SVG, on one version of matplotlib.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cluster.simulation.report import describe, describe_slo
from cluster.simulation.summary import (
    Slo,
    attainment_curve,
    collect_samples,
    slo_ratios,
    summarise,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from cluster.simulation.records import RequestRecord, SimulationResult
    from cluster.simulation.summary import PoolSummary, Samples, Summary

FORMATS: Final = ("png", "svg")

# Okabe and Ito's palette, which readers with any colour vision can tell apart; its yellow is too
# pale for a line. Line styles and markers say the same again, for a print without colour.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES: Final = ("-", "--", "-.", ":")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_GREY: Final = "#6B6B6B"

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


def plot_run(
    result: SimulationResult,
    folder: Path,
    *,
    slo: Slo | None = None,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Draw one run: latencies, attainment (with objectives), timeline, replicas.

    Args:
        result: The run.
        folder: Where the files go; made when it is not there.
        slo: Objectives, drawn with the latencies; without any there is no attainment to draw.
        formats: "png", "svg".

    Returns:
        The files, in the order of drawing.

    Raises:
        MissingPlotLibraryError: When matplotlib is not installed.
    """
    slo = slo or Slo()
    summary = summarise(result, slo)
    draws: dict[str, Callable[[], Figure]] = {
        "latencies": lambda: _latencies(summary, collect_samples(result.records), slo),
        "timeline": lambda: _timeline(summary, result),
        "replicas": lambda: _replicas(summary),
    }
    if summary.goodput is not None:
        draws["attainment"] = lambda: _attainment(summary, result.records, slo)
    return _draw_all(draws, folder, formats)


def plot_comparison(
    summaries: Sequence[Summary], folder: Path, *, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw several runs against what differs between them: load, replicas, or only the policy.

    Args:
        summaries: The runs, of one workload for the picture to make sense; at least one.
        folder: Where the files go; made when it is not there.
        formats: "png", "svg".

    Returns:
        The files, in the order of drawing.

    Raises:
        MissingPlotLibraryError: When matplotlib is not installed.
    """
    assert summaries, "nothing to compare"
    draws: dict[str, Callable[[], Figure]] = {}
    if len({s.requests.offered_per_s for s in summaries}) > 1:
        draws["goodput"] = lambda: _goodput_by_load(summaries)
    if len({s.num_replicas for s in summaries}) > 1:
        draws["scale"] = lambda: _by_replicas(summaries)
    if not draws:
        draws["policies"] = lambda: _by_policy(summaries)
    return _draw_all(draws, folder, formats)


def _draw_all(
    draws: dict[str, Callable[[], Figure]], folder: Path, formats: Sequence[str]
) -> list[Path]:
    require_matplotlib()
    from matplotlib import style

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    # From matplotlib's defaults, not from a user's own settings: those would change the bytes.
    with style.context(["default", _STYLE]):
        for name, draw in draws.items():
            figure = draw()
            for suffix in formats:
                path = folder / f"{name}.{suffix}"
                # No date and no version: the file says what was drawn, not when or with what.
                nothing = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
                figure.savefig(path, metadata=nothing)
                paths.append(path)
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


# --- one run ---


def _latencies(summary: Summary, samples: Samples, slo: Slo) -> Figure:
    figure = _new_figure(_title("Latency", summary), "", (11, 3.9))
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


def _cdf(axes: Axes, values: NDArray[np.float64]) -> None:
    axes.set_ylim(0, 102)
    if not values.size:
        _say_none(axes)
        return
    ascending = np.sort(values)
    _log_if_positive(axes, ascending)
    # Ranks, denser towards both ends; the tail is what one looks for. All of them when few.
    ends = (1 - np.cos(np.linspace(0, np.pi, _NUM_CDF_POINTS))) / 2
    ranks = np.unique(np.rint(ends * (ascending.size - 1)).astype(np.int64))
    shares = 100 * (ranks + 1) / ascending.size
    x = np.concatenate([ascending[ranks[:1]], ascending[ranks]])
    y = np.concatenate([[0.0], shares])
    axes.plot(x, y, color=_COLOURS[0], drawstyle="steps-post")
    for percent, where in ((50, "o"), (90, "s"), (99, "^")):
        at = ascending[-(-percent * ascending.size // 100) - 1]
        axes.plot(
            [at], [percent], where, color=_COLOURS[1], label=f"P{percent}  {_short(float(at))} ms"
        )
    axes.legend(loc="lower right", handletextpad=0.3)


def _attainment(summary: Summary, records: Sequence[RequestRecord], slo: Slo) -> Figure:
    figure = _new_figure(
        _title("SLO attainment", summary), f"Objectives at scale 1: {describe_slo(slo)}", (7.5, 4.4)
    )
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
            linestyle=_LINES[i % len(_LINES)],
            linewidth=2.4 if i == 0 else 1.5,
            zorder=3 if i == 0 else 2,
        )
    success = summary.requests.success_rate
    if success is not None and success < 1:
        axes.axhline(100 * success, color=_GREY, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(
            f"{100 * success:.1f} % ended well",
            (1 / 8, 100 * success),
            (3, -3),
            textcoords="offset points",
            va="top",
            color=_GREY,
            fontsize=8,
        )
    axes.axvline(1, color=_GREY, linewidth=0.9)
    axes.set_ylim(0, 102)
    axes.set_xlim(1 / 8, 8)
    _log2_axis(axes, [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.set_xlabel("scale of the objectives (looser to the right)")
    axes.set_ylabel("good requests (% of those sent)")
    axes.legend(loc="lower right")
    return figure


def _timeline(summary: Summary, result: SimulationResult) -> Figure:
    figure = _new_figure(_title("Timeline", summary), "", (11, 5.2))
    all_axes = figure.subplots(2, 1, sharex=True)
    for axes, draw in zip(all_axes, (_draw_rates, _draw_in_flight), strict=True):
        draw(axes, result)
        _mark_faults(axes, result, is_named=axes is all_axes[0])
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.6)
    all_axes[-1].set_xlabel("virtual time (s)")
    all_axes[-1].set_xlim(0, max(result.duration_s, 1e-9))
    return figure


def _draw_rates(axes: Axes, result: SimulationResult) -> None:
    # A few arrivals in each bin, or the rates are all noise.
    num_bins = min(_NUM_TIMELINE_BINS, max(8, len(result.records) // 5))
    edges = np.linspace(0, max(result.duration_s, 1e-9), num_bins + 1)
    width_s = edges[1] - edges[0]
    arrivals = np.array([r.arrival_s for r in result.records])
    ends = np.array([r.finished_s for r in result.records])
    for times, label, colour, line in (
        (arrivals, "arrivals", _COLOURS[0], "-"),
        (ends, "ends", _COLOURS[1], "--"),
    ):
        counts, _ = np.histogram(times, edges)
        rates = counts / width_s
        axes.step(
            edges,
            [*rates, rates[-1]],
            where="post",
            label=label,
            color=colour,
            linestyle=line,
            linewidth=1.2,
        )
    axes.set_ylabel("requests/s")


def _draw_in_flight(axes: Axes, result: SimulationResult) -> None:
    times = np.linspace(0, max(result.duration_s, 1e-9), _NUM_TIMELINE_POINTS)
    arrivals = _ascending(r.arrival_s for r in result.records)
    ends = _ascending(r.finished_s for r in result.records)
    # Who never reached a replica waited until the end.
    starts = _ascending(
        r.finished_s
        if r.replica is None and r.prefill_replica is None
        else min(r.arrival_s + r.queued_s, r.finished_s)
        for r in result.records
    )
    num_started = np.searchsorted(starts, times, side="right")
    running = num_started - np.searchsorted(ends, times, side="right")
    queued = np.searchsorted(arrivals, times, side="right") - num_started
    axes.plot(times, running, label="running", color=_COLOURS[2], linewidth=1.4)
    axes.plot(times, queued, label="queued", color=_COLOURS[1], linestyle="--", linewidth=1.4)
    axes.set_ylabel("requests")


def _mark_faults(axes: Axes, result: SimulationResult, *, is_named: bool) -> None:
    # One planned for after the end is no part of the picture.
    faults = [e for e in result.events if e.kind in _FAULT_KINDS and e.at_s <= result.duration_s]
    for event in faults:
        axes.axvline(event.at_s, color=_GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    # A name needs room to its right; of a dense bunch the first one is named.
    free_from_s = 0.0
    for event in faults if is_named else ():
        if event.at_s < free_from_s:
            continue
        free_from_s = event.at_s + _FAULT_NAME_SHARE * result.duration_s
        axes.annotate(
            f"{event.kind} {event.subject}",
            (event.at_s, 1.0),
            (2, 1),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=7.5,
            color=_GREY,
            annotation_clip=False,
        )


def _replicas(summary: Summary) -> Figure:
    tokens: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    busy: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for r in summary.replicas:
        tokens[r.role][r.name] += r.num_prompt_tokens + r.num_output_tokens
        busy[r.role].append((r.name, 100 * (r.utilisation or 0.0)))
    num_bars = len(summary.replicas)
    height_in = 1.5 + (0.26 * num_bars if num_bars <= _MAX_NAMED_BARS else 2.8)
    figure = _new_figure(
        _title("Replicas", summary),
        "   ".join(_pool_line(pool) for pool in summary.pools),
        (11, max(2.2, height_in)),
    )
    left, right = figure.subplots(1, 2)
    _ranked(left, busy)
    left.set_title("Utilisation")
    _value_label(left, num_bars, "time in steps (% of life)")
    _ranked(
        right,
        {
            role: [(name, n / mean) for name, n in by_name.items()]
            for role, by_name in tokens.items()
            if (mean := sum(by_name.values()) / len(by_name)) > 0
        },
    )
    right.set_title("Load: prompt and output tokens computed")
    _value_label(right, num_bars, "tokens / mean of the pool")
    (right.axvline if num_bars <= _MAX_NAMED_BARS else right.axhline)(1, color=_GREY, linewidth=0.9)
    return figure


def _ranked(axes: Axes, by_role: dict[str, list[tuple[str, float]]]) -> None:
    """Bars with names when they fit; else a curve for each pool over its replicas' ranks."""
    if not by_role:
        _say_none(axes)
        return
    num_bars = sum(len(values) for values in by_role.values())
    if num_bars > _MAX_NAMED_BARS:
        for i, (role, named) in enumerate(sorted(by_role.items())):
            values = sorted((v for _, v in named), reverse=True)
            ranks = 100 * (np.arange(len(values)) + 0.5) / len(values)
            label = f"{role} ({len(values):,})"
            axes.plot(ranks, values, color=_COLOURS[i], linestyle=_LINES[i], label=label)
        axes.set_xlim(0, 100)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("replicas, busiest first (% of the pool)")
        axes.legend(loc="upper right")
        return
    names = [name for role in sorted(by_role) for name, _ in by_role[role]]
    values = [value for role in sorted(by_role) for _, value in by_role[role]]
    colours = [_COLOURS[i] for i, role in enumerate(sorted(by_role)) for _ in by_role[role]]
    axes.barh(range(num_bars), values, color=colours, height=0.7)
    axes.set_yticks(range(num_bars), names)
    axes.set_ylim(num_bars - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _value_label(axes: Axes, num_bars: int, label: str) -> None:
    if num_bars <= _MAX_NAMED_BARS:
        axes.set_xlabel(label)
    else:
        axes.set_ylabel(label)


def _pool_line(pool: PoolSummary) -> str:
    busy = "-" if pool.utilisation is None else f"{100 * pool.utilisation:.1f} %"
    uneven = "-" if pool.imbalance is None else f"{pool.imbalance:.2f}"
    return f"{pool.role}: {busy} busy, largest load / mean {uneven}"


# --- several runs ---


def _goodput_by_load(summaries: Sequence[Summary]) -> Figure:
    has_slo = all(s.goodput is not None for s in summaries)
    first = summaries[0]
    slo = describe_slo(first.goodput.slo) if first.goodput is not None and has_slo else ""
    title = "Goodput against load" if has_slo else "Throughput against load"
    figure = _new_figure(
        f"{title} · {_common(summaries)}", f"Good: {slo}" if slo else "", (7.5, 4.6)
    )
    axes = figure.subplots()
    series = _series(summaries, lambda s: s.requests.offered_per_s, _goodput_key(summaries))
    offered = [s.requests.offered_per_s for s in summaries if s.requests.offered_per_s]
    if offered:
        ends = [min(offered), max(offered)]
        axes.plot(ends, ends, color=_GREY, linewidth=0.9, linestyle=(0, (1, 2)), label="as offered")
    _draw_series(axes, series, _good_per_s)
    if offered and max(offered) > 4 * min(offered):
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_log_ticks(axes.xaxis)
        _plain_log_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("offered load (requests/s)")
    axes.set_ylabel(f"{'good' if has_slo else 'completed'} requests/s")
    axes.legend(loc="upper left")
    return figure


def _by_replicas(summaries: Sequence[Summary]) -> Figure:
    figure = _new_figure(f"Scale · {_common(summaries)}", "", (11, 4.0))
    series = _series(summaries, lambda s: s.num_replicas, _scale_key(summaries))
    panels = _comparison_panels(summaries)
    counts = sorted({s.num_replicas for s in summaries})
    all_axes = figure.subplots(1, len(panels))
    for axes, (title, label, value) in zip(all_axes, panels, strict=True):
        _draw_series(axes, series, value)
        _log2_axis(axes, counts, [f"{n:,}" for n in counts])
        axes.set_title(title)
        axes.set_xlabel("replicas")
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_ylim(0, 102 if value is _good_percent else None)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
    return figure


def _by_policy(summaries: Sequence[Summary]) -> Figure:
    figure = _new_figure(f"Policies · {_common(summaries)}", "", (11, 1.8 + 0.35 * len(summaries)))
    panels = _comparison_panels(summaries)
    for axes, (title, label, value) in zip(
        figure.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        values = [value(s) for s in summaries]
        shown = [0.0 if v is None else v for v in values]
        bars = axes.barh(
            range(len(summaries)),
            shown,
            height=0.6,
            color=[_COLOURS[i % len(_COLOURS)] for i in range(len(summaries))],
        )
        axes.bar_label(bars, [_short(v) if v is not None else "-" for v in values], padding=3)
        axes.set_yticks(range(len(summaries)), [s.policy for s in summaries])
        axes.set_ylim(len(summaries) - 0.4, -0.6)
        axes.set_xlim(0, 1.18 * max(*shown, 1e-9))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_title(title)
        axes.set_xlabel(label)
    return figure


def _comparison_panels(
    summaries: Sequence[Summary],
) -> list[tuple[str, str, Callable[[Summary], float | None]]]:
    """(title, axis label, value) of what is worth comparing between runs."""
    panels: list[tuple[str, str, Callable[[Summary], float | None]]] = [
        ("Mean time to first token", "TTFT (ms)", _mean_ttft_ms),
        ("Prefix reuse", "cached prompt tokens (%)", _hit_percent),
    ]
    if all(s.goodput is not None for s in summaries):
        panels.append(("SLO attainment", "good requests (% of those sent)", _good_percent))
    else:
        panels.append(("Mean inter-token latency", "ITL (ms)", _mean_itl_ms))
    return panels


def _mean_ttft_ms(summary: Summary) -> float | None:
    return _scaled(summary.latencies.ttft_s.mean, 1e3)


def _mean_itl_ms(summary: Summary) -> float | None:
    return _scaled(summary.latencies.itl_s.mean, 1e3)


def _hit_percent(summary: Summary) -> float | None:
    return _scaled(summary.prefix.hit_share, 1e2)


def _good_percent(summary: Summary) -> float | None:
    return _scaled(summary.goodput.attainment if summary.goodput else None, 1e2)


def _good_per_s(summary: Summary) -> float | None:
    if summary.goodput is None:
        return summary.requests.completed_per_s
    return summary.goodput.good_per_s


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _series(
    summaries: Sequence[Summary],
    x: Callable[[Summary], float | None],
    key: Callable[[Summary], str],
) -> dict[str, list[tuple[float, Summary]]]:
    """Points by the name of their line, each line in the order of x."""
    series: dict[str, list[tuple[float, Summary]]] = defaultdict(list)
    for summary in summaries:
        at = x(summary)
        if at is not None:
            series[key(summary)].append((at, summary))
    return {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()}


def _goodput_key(summaries: Sequence[Summary]) -> Callable[[Summary], str]:
    """A line for each policy; for each number of replicas too, when that is not just the load."""
    runs: dict[tuple[str, int], int] = defaultdict(int)
    for s in summaries:
        runs[s.policy, s.num_replicas] += 1
    if max(runs.values()) > 1 and len({s.num_replicas for s in summaries}) > 1:
        return lambda s: f"{s.policy}, {s.num_replicas:,} replicas"
    return lambda s: s.policy


def _scale_key(summaries: Sequence[Summary]) -> Callable[[Summary], str]:
    """A line for each policy; for each speed of arrivals too, when that is not one per size."""
    runs: dict[tuple[str, int], int] = defaultdict(int)
    for s in summaries:
        runs[s.policy, s.num_replicas] += 1
    if max(runs.values()) > 1:
        return lambda s: f"{s.policy}, arrivals {s.speed_up:g}x"
    return lambda s: s.policy


def _draw_series(
    axes: Axes,
    series: dict[str, list[tuple[float, Summary]]],
    value: Callable[[Summary], float | None],
) -> None:
    for i, (name, points) in enumerate(series.items()):
        shown = [(x, y) for x, s in points if (y := value(s)) is not None]
        axes.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            label=name,
            color=_COLOURS[i % len(_COLOURS)],
            linestyle=_LINES[i % len(_LINES)],
            marker=_MARKERS[i % len(_MARKERS)],
            # Later lines are thinner: one that lies on another does not hide it.
            linewidth=max(1.2, 2.8 - 0.5 * i),
            markersize=max(4.0, 8.0 - 1.2 * i),
        )


# --- shared ---


def _title(what: str, summary: Summary) -> str:
    return f"{what} · {describe(summary)}"


def _common(summaries: Sequence[Summary]) -> str:
    """What all the runs share, for a heading."""
    first = summaries[0]
    parts = sorted({s.workload for s in summaries})
    for key in ("model", "board"):
        if key in first.config and len({s.config.get(key) for s in summaries}) == 1:
            parts.append(str(first.config[key]))
    if len({s.num_replicas for s in summaries}) == 1:
        parts.append(f"{first.num_replicas:,} replicas")
    if len({s.speed_up for s in summaries}) == 1:
        parts.append(f"arrivals {first.speed_up:g}x")
    return " · ".join(parts)


def _log_if_positive(axes: Axes, ascending: NDArray[np.float64]) -> None:
    """A log axis for values that span some of it; zeros have no place on one."""
    if ascending[0] > 0 and ascending[-1] > 4 * ascending[0]:
        axes.set_xscale("log")
        _plain_log_ticks(axes.xaxis)


def _plain_log_ticks(axis: Any) -> None:  # noqa: ANN401 - XAxis and YAxis share no typed base
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _log2_axis(axes: Axes, ticks: Sequence[float], labels: Sequence[str]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(labels))
    axes.xaxis.set_minor_locator(NullLocator())


def _say_none(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no samples", transform=axes.transAxes, ha="center", color=_GREY)


def _short(value: float) -> str:
    """Three digits that count: 1,234; 56.7; 0.89."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ascending(values: Iterable[float]) -> NDArray[np.float64]:
    return np.sort(np.fromiter(values, dtype=np.float64))
