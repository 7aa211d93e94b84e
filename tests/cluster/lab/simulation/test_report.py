"""Tables fit and line up, the progress bar is silent off a terminal, files are the same twice."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from cluster.lab.simulation.records import (
    OK,
    EventRecord,
    ReplicaRecord,
    RequestRecord,
    SimulationResult,
)
from cluster.lab.simulation.report import (
    MAX_WIDTH,
    describe,
    print_summary,
    progress_display,
    write_events,
)
from cluster.lab.simulation.summary import Slo, summarise


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make_summary(num_requests=30, slow=1.0, failure="ReplicaLostError", **fields):
    records = [
        RequestRecord(
            request_id=f"r{i}",
            arrival_s=float(i),
            num_prompt_tokens=100,
            num_output_tokens_asked=4,
            num_cached_tokens=25,
            token_times_s=i + slow * np.array([0.5, 0.6, 0.7, 0.8 + 0.01 * i]),
            outcome=OK if i % 10 else failure,
            finished_s=i + 1.0,
            transfer_s=0.05,
        )
        for i in range(num_requests)
    ]
    replicas = [
        ReplicaRecord(name=f"{role}/{i}", role=role, num_slots=8, busy_s=3.0, num_output_tokens=9)
        for role in ("prefill", "decode")
        for i in range(2)
    ]
    values = {"workload": "a trace", "policy": "round_robin", "num_replicas": 4, "seed": 3}
    run = SimulationResult(
        records=records, replicas=replicas, duration_s=31.0, num_events=1234, **(values | fields)
    )
    return summarise(run, Slo(ttft_s=0.55, tpot_s=0.15))


def shown(show, *args, width=MAX_WIDTH, **kwargs):
    file = io.StringIO()
    show(*args, console=Console(file=file, width=width), **kwargs)
    return file.getvalue()


def test_the_report_says_what_was_run_and_what_came_out():
    summary = make_summary(speed_up=4.0, config={"board": "n150", "model": "tiny", "x": 1})
    text = shown(print_summary, summary, wall_s=0.5)
    rows = {line.strip().split("  ")[0]: line.split() for line in text.splitlines() if line}
    heading = "a trace · round_robin · 4 replicas · arrivals 4x · tiny · n150 · seed 3"
    assert text.splitlines()[0] == heading == describe(summary)
    assert rows["requests sent"] == ["requests", "sent", "30"]
    assert rows["success rate"][2] == "90.0"
    assert rows["ReplicaLostError"] == ["ReplicaLostError", "3"]
    assert rows["prefix hits"][2] == "25.0"
    assert "% of those sent keep TTFT ≤ 550 ms, TPOT ≤ 150 ms" in text
    assert "1,234 events, 2,468 /s" in text
    # 27 samples: a median is one, a P90 is a guess.
    assert rows["TTFT"] == ["TTFT", *["500.00"] * 2, *["*500.00"] * 3, "500.00", "27"]
    assert "* fewer than 10 samples above it" in text


def test_without_doubtful_percentiles_nothing_is_marked():
    assert "*" not in shown(print_summary, make_summary(1200), wall_s=1.0)


@pytest.mark.parametrize(
    ("num_requests", "slow", "num_points"),
    # Of 99 latencies the P90 is marked, and of 297 gaps it is not.
    [(30, 1.0, 6), (110, 1.0, 6), (30, 900.0, 6), (30, 40000.0, 0)],
)
def test_tables_are_narrow_and_digits_stand_below_each_other(num_requests, slow, num_points):
    summary = make_summary(num_requests, slow)
    lines = shown(print_summary, summary, wall_s=1.0).splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    assert not any("…" in line for line in lines)
    names = ("TTFT", "TPOT", "ITL", "TBT", "E2E", "queued")
    table = [line for line in lines if line.startswith(names)]
    assert len(table) == len(names)
    points = [[i for i, c in enumerate(line) if c == "."] for line in table]
    assert all(p == points[0] for p in points)
    assert len(points[0]) == num_points


def test_names_with_brackets_are_shown_as_they_are():
    summary = make_summary(failure="[b]Lost", workload="[red]x[/red]", policy="[bold]")
    text = shown(print_summary, summary, wall_s=1.0)
    assert text.startswith("[red]x[/red] · [bold]")
    assert "[b]Lost" in text


def test_a_summary_without_requests_or_objectives_can_be_shown():
    run = SimulationResult(
        workload="none",
        policy="p",
        num_replicas=1,
        seed=0,
        duration_s=0.0,
        records=[],
        replicas=[],
    )
    text = shown(print_summary, summarise(run), wall_s=0.0)
    assert "none · p · 1 replica · seed 0" in text
    assert "nan" not in text
    assert "None" not in text


def test_standard_output_that_is_no_terminal_gets_plain_text(capsys):
    print_summary(make_summary(slow=900.0), wall_s=1.0)
    out, err = capsys.readouterr()
    # Not cut to the 80 columns that a file is taken to have.
    assert "…" not in out
    assert err == ""
    assert "\x1b" not in out
    assert "TTFT" in out


def test_progress_off_a_terminal_writes_nothing(capsys):
    stream = io.StringIO()
    for display in (progress_display(50.0, 50, stream), progress_display(50.0, 50)):
        with display as update:
            for done in range(50):
                update(float(done), done, done * 10)
    assert stream.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_shows_the_last_update(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress_display(20.0, 2000, stream) as update:
        update(0.0, 0, 0)
        drawn = len(stream.getvalue())
        for done in range(1, 2000):
            update(done / 100, done, 10 * done)
        update(20.0, 2000, 20000)
    text = stream.getvalue()
    assert drawn > 0
    assert "2,000/2,000 requests" in text
    assert "20.0/20.0 s virtual" in text
    # It does not draw at every call.
    assert text.count("requests") < 1000


def test_the_event_log_has_one_sorted_object_per_line(tmp_path):
    events = [
        EventRecord(0.0, "arrive", "r0", (12, "both")),
        EventRecord(2, "step", "both/0", (0.1,)),
        EventRecord(np.float64(0.1) + 0.2, "kill", "é"),
    ]
    write_events(iter(events), tmp_path / "events.jsonl")
    data = (tmp_path / "events.jsonl").read_bytes()
    assert (
        data
        == (
            '{"at_s":0.0,"detail":[12,"both"],"kind":"arrive","subject":"r0"}\n'
            '{"at_s":2.0,"detail":[0.1],"kind":"step","subject":"both/0"}\n'
            '{"at_s":0.30000000000000004,"detail":[],"kind":"kill","subject":"é"}\n'
        ).encode()
    )
    assert [json.loads(line)["at_s"] for line in data.splitlines()] == [0.0, 2.0, 0.1 + 0.2]


@pytest.mark.process
def test_numbers_alone_import_neither_rich_nor_matplotlib():
    code = (
        "import sys, cluster.lab.simulation.report, cluster.lab.simulation.plots;"
        "assert not {'rich', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
