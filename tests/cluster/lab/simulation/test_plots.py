"""Plots are drawn for every shape of run, twice the same, and say how to get matplotlib."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from cluster.lab.simulation import plots
from cluster.lab.simulation.plots import (
    MissingPlotLibraryError,
    plot_goodput,
    plot_run,
    require_matplotlib,
)
from cluster.lab.simulation.records import (
    NO_TIMES,
    OK,
    EventRecord,
    ReplicaRecord,
    RequestRecord,
    SimulationResult,
)
from cluster.lab.simulation.summary import Slo, summarise

PNG = b"\x89PNG\r\n\x1a\n"
SLO = Slo(ttft_s=0.3, tpot_s=0.1)


def make_result(num_requests=20, num_replicas=2, policy="round_robin", speed_up=1.0, **fields):
    draw = np.random.default_rng(1)
    records = []
    for i in range(num_requests):
        times = i / speed_up + 0.2 + np.cumsum(draw.random(5) / 10)
        records.append(
            RequestRecord(
                request_id=f"r{i}",
                arrival_s=i / speed_up,
                num_prompt_tokens=100,
                num_output_tokens_asked=5,
                token_times_s=times if i % 7 else NO_TIMES,
                outcome=OK if i % 7 else "ReplicaLostError",
                finished_s=float(times[-1]),
                replica="both/0" if i % 7 else None,
                queued_s=0.05,
            )
        )
    replicas = [
        ReplicaRecord(
            name=f"both/{i}",
            role="both",
            num_slots=4,
            busy_s=1.0 + i / num_replicas,
            num_output_tokens=10 + i,
            stopped_s=6.0 if i % 3 == 0 else None,
        )
        for i in range(num_replicas)
    ]
    values = {
        "workload": "a trace",
        "policy": policy,
        "num_replicas": num_replicas,
        "speed_up": speed_up,
        "seed": 0,
        "duration_s": num_requests / speed_up + 1.0,
        "records": records,
        "replicas": replicas,
        "events": (EventRecord(3.0, "kill", "both/0"), EventRecord(9.0, "step", "both/1")),
    }
    return SimulationResult(**(values | fields))


@pytest.fixture
def _svg_only(monkeypatch):
    monkeypatch.setattr(plots, "FORMATS", ("svg",))


def words(svg):
    """What an SVG says: matplotlib leaves each text beside its outlines, as a comment."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.fromstring(svg.read_bytes(), parser)
    found = [e.text.strip() for e in tree.iter() if e.tag is ElementTree.Comment]
    return " ".join(found).replace("\u00a0", " ")


def names(paths):
    return [path.name for path in paths]


def test_a_run_has_its_plots_and_each_is_a_picture(tmp_path):
    paths = plot_run(make_result(), tmp_path / "new" / "folder", slo=SLO)
    assert names(paths) == [
        f"{name}.{suffix}"
        for name in ("latencies", "timeline", "replicas", "attainment")
        for suffix in ("png", "svg")
    ]
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("_svg_only")
def test_plots_name_the_run_and_their_units(tmp_path):
    plot_run(make_result(config={"board": "n150"}), tmp_path, slo=SLO)
    latencies, timeline = words(tmp_path / "latencies.svg"), words(tmp_path / "timeline.svg")
    assert "a trace · round_robin · 2 replicas · n150 · seed 0" in latencies
    for label in ("TTFT (ms)", "ITL (ms)", "E2E (ms)", "SLO  300 ms"):
        assert label in latencies
    for label in ("virtual time (s)", "requests/s", "kill both/0"):
        assert label in timeline
    # A step is an event of every run, and no fault.
    assert "step both/1" not in timeline
    assert "TTFT ≤ 300 ms, TPOT ≤ 100 ms" in words(tmp_path / "attainment.svg")


@pytest.mark.usefixtures("_svg_only")
def test_svg_is_the_same_twice_and_has_no_date(tmp_path):
    import matplotlib as mpl

    first = plot_run(make_result(), tmp_path / "a", slo=SLO)
    # Not even a user's settings change it.
    with mpl.rc_context({"font.size": 20.0, "svg.hashsalt": "mine", "xtick.major.size": 9.0}):
        second = plot_run(make_result(), tmp_path / "b", slo=SLO)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert b"<dc:date>" not in one.read_bytes()
    runs = [summarise(make_result(speed_up=x), SLO) for x in (1.0, 2.0)]
    one, other = tmp_path / "a" / "goodput.svg", tmp_path / "b" / "goodput.svg"
    plot_goodput(runs, one)
    plot_goodput(runs, other)
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.usefixtures("_svg_only")
@pytest.mark.parametrize(
    "fields",
    [
        {"num_requests": 0},
        {"num_requests": 1},
        {"num_replicas": 60},
        {"replicas": (), "events": (), "num_requests": 3},
        {"num_requests": 0, "duration_s": 0.0},
    ],
    ids=["no-requests", "one-failed", "many-replicas", "no-replicas", "no-time"],
)
def test_every_shape_of_run_can_be_drawn(tmp_path, fields):
    assert len(plot_run(make_result(**fields), tmp_path, slo=SLO)) == 4
    assert len(plot_run(make_result(**fields), tmp_path)) == 3


@pytest.mark.usefixtures("_svg_only")
def test_where_there_is_nothing_to_draw_the_plot_says_so(tmp_path):
    plot_run(make_result(0, replicas=()), tmp_path)
    assert "no samples" in words(tmp_path / "latencies.svg")
    assert "no samples" in words(tmp_path / "replicas.svg")


@pytest.mark.parametrize(
    ("values", "scale"), [([0.0, 1.0, 9.0], "linear"), ([1.0, 2.0], "linear"), ([1.0, 9.0], "log")]
)
def test_zero_latencies_have_no_place_on_a_log_axis(values, scale):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._cdf(axes, np.array(values))
    assert axes.get_xscale() == scale


def test_goodput_has_a_line_for_each_policy_and_names_the_objectives(tmp_path):
    runs = [
        summarise(make_result(policy=policy, speed_up=x), SLO)
        for policy in ("round_robin", "other")
        for x in (1.0, 3.0)
    ]
    plot_goodput(runs, tmp_path / "new" / "goodput.svg")
    said = words(tmp_path / "new" / "goodput.svg")
    assert "Goodput against load · a trace · 2 replicas" in said
    assert "Good: TTFT ≤ 300 ms, TPOT ≤ 100 ms" in said
    for label in ("as offered", "round_robin", "other", "offered load (requests/s)"):
        assert label in said


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPlotLibraryError, match="extra `plot`"):
        require_matplotlib()
    with pytest.raises(MissingPlotLibraryError):
        plot_run(make_result(), tmp_path / "x")
    assert not (tmp_path / "x").exists()
