"""Requests drawn from ServeGen's statistics have their counts, burstiness and lengths."""

import json
from collections import Counter

import numpy as np
import pytest

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.load import load_workload

LENGTHS = {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{7: 1.0}"}
NO_LENGTHS = {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"}
BUSY = "0,1.0,2.0,Gamma,0.25,4.0\n600,0,0,,0,0\n1200,0.5,1.0,Weibull,1.0,2.0\n"


def write_client(folder, number, trace, dataset):
    folder.mkdir(exist_ok=True)
    (folder / f"chunk-{number}-trace.csv").write_text(trace)
    text = dataset if isinstance(dataset, str) else json.dumps(dataset)
    (folder / f"chunk-{number}-dataset.json").write_text(text)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "m-test"
    write_client(folder, 0, BUSY, {"0": LENGTHS, "600": NO_LENGTHS})
    later = {"600": {"input_tokens": "{50: 1.0}", "output_tokens": "{3: 1.0}"}}
    write_client(folder, 12, "600,0.1,1.0,Gamma,1.0,10.0\n1200,0,0,,0,0\n", later)
    return folder


def test_every_window_has_its_count_and_its_lengths(folder):
    loaded = load_workload(folder)
    assert loaded.name == "m-test"
    arrivals = [r.arrival_s for r in loaded.requests]
    assert arrivals == sorted(arrivals)
    counts = Counter(int(t // 600) for t in arrivals)
    assert counts == {0: 600, 1: 60, 2: 300}
    lengths = Counter((r.num_prompt_tokens, r.num_output_tokens) for r in loaded.requests)
    assert set(lengths) == {(100, 7), (200, 7), (50, 3)}
    assert lengths[50, 3] == 60
    assert 0.18 < lengths[100, 7] / 900 < 0.32


def test_a_limit_takes_a_part_of_the_whole(folder):
    whole = load_workload(folder, seed=2)
    assert load_workload(folder, seed=2, limit=640).requests == whole.requests[:640]
    assert load_workload(folder, seed=3) != whole


def test_clients_and_windows_are_independent(tmp_path):
    folder = tmp_path / "alike"
    for number in (0, 1):
        trace = "0,0.1,1,Gamma,1,10\n600,0.1,1,Gamma,1,10\n"
        later = {**LENGTHS, "output_tokens": f"{{{20 + number}: 1}}"}
        dataset = {"0": {**LENGTHS, "output_tokens": f"{{{10 + number}: 1}}"}, "600": later}
        write_client(folder, number, trace, dataset)
    arrivals = {}
    for request in load_workload(folder).requests:
        assert (request.arrival_s < 600) == (request.num_output_tokens < 20)
        arrivals.setdefault(request.num_output_tokens, []).append(request.arrival_s % 600)
    assert {number: len(times) for number, times in arrivals.items()} == {
        10: 60,
        11: 60,
        20: 60,
        21: 60,
    }
    assert len({round(times[0], 3) for times in arrivals.values()}) == 4


def test_limit_waits_for_windows_that_are_still_open(tmp_path):
    folder = tmp_path / "wide"
    write_client(folder, 0, "0,0.1,1,Gamma,1,10\n1200,0.1,1,Gamma,1,10\n", {"0": LENGTHS})
    write_client(folder, 1, "0,0,0,,0,0\n600,1,1,Gamma,1,1\n", {"600": LENGTHS})
    whole = load_workload(folder).requests
    assert load_workload(folder, limit=100).requests == whole[:100]


def test_time_counts_from_the_first_window(tmp_path):
    folder = tmp_path / "day"
    write_client(
        folder, 0, "172800,0.1,1,Gamma,1,10\n173400,0.1,1,Gamma,1,10\n", {"172800": LENGTHS}
    )
    loaded = load_workload(folder)
    assert len(loaded.requests) == 120
    assert loaded.requests[-1].arrival_s < 1200


@pytest.mark.parametrize(
    ("pattern", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Weibull", 1.0, 1.0), ("", 0, 1.0)]
)
def test_gaps_have_the_pattern_of_the_window(tmp_path, pattern, shape, cv):
    folder = tmp_path / "one"
    write_client(folder, 0, f"0,33.4,{cv},{pattern},{shape},1\n", {"0": LENGTHS})
    arrivals = [r.arrival_s for r in load_workload(folder).requests]
    assert len(arrivals) == 20040
    gaps = np.diff(arrivals)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_gaps_too_small_for_a_float_do_not_break_a_window(tmp_path):
    folder = tmp_path / "tiny"
    write_client(folder, 0, "0,0.01,99,Gamma,1e-9,1\n", {"0": LENGTHS})
    assert len(load_workload(folder).requests) == 6


@pytest.mark.parametrize(
    ("trace", "dataset", "file", "line", "message"),
    [
        ("", {"0": LENGTHS}, "trace.csv", None, "no windows"),
        (
            "0,-1,1,Gamma,1,1",
            {"0": LENGTHS},
            "trace.csv",
            1,
            "field rate_rps: Expected `float` >= 0",
        ),
        ("0,nan,1,Gamma,1,1", {"0": LENGTHS}, "trace.csv", 1, "rate_rps"),
        ("0,1,1,Pareto,1,1", {"0": LENGTHS}, "trace.csv", 1, "field pattern: Invalid"),
        ("0,0,0,,0,0\n600,1,1,Gamma,0,1", {"0": LENGTHS}, "trace.csv", 2, "field shape: must be"),
        ("0,1,1", {"0": LENGTHS}, "trace.csv", 1, "`pattern`"),
        ("0,0,0,,0,0\n0,1,1,Gamma,1,1", {"0": LENGTHS}, "trace.csv", None, "same time"),
        (BUSY, "{", "dataset.json", None, "truncated"),
        (BUSY, {"0": {"input_tokens": "{}"}}, "dataset.json", None, "output_tokens"),
        (BUSY, {"0": NO_LENGTHS}, "dataset.json", None, "no lengths for the window at 0 s"),
        (BUSY, {"600": LENGTHS}, "dataset.json", None, "no lengths for the window at 0 s"),
        (BUSY, {"0": {**LENGTHS, "input_tokens": "{1: "}}, "dataset.json", None, "0.input_tokens"),
        (BUSY, {"0": {**LENGTHS, "input_tokens": "{-1: 1}"}}, "dataset.json", None, "1 or more"),
        (BUSY, {"0": {**LENGTHS, "input_tokens": "{1: 0}"}}, "dataset.json", None, "not all"),
        (BUSY, {"0": {**LENGTHS, "output_tokens": "{1: -1, 2: 2}"}}, "dataset.json", None, "0 or"),
        (BUSY, {"0": {**LENGTHS, "output_tokens": "f()"}}, "dataset.json", None, "not a dict"),
    ],
)
def test_malformed_client_says_where_and_what(tmp_path, trace, dataset, file, line, message):
    folder = tmp_path / "bad"
    write_client(folder, 3, trace, dataset)
    with pytest.raises(WorkloadError) as caught:
        load_workload(folder)
    assert message in str(caught.value)
    assert caught.value.path == str(folder / f"chunk-3-{file}")
    assert caught.value.line == line


def test_folder_without_clients_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="ServeGen folder"):
        load_workload(tmp_path)


def test_client_without_lengths_file_is_refused(folder):
    (folder / "chunk-12-dataset.json").unlink()
    with pytest.raises(WorkloadError, match=r"chunk-12-dataset.json: cannot be read"):
        load_workload(folder)
