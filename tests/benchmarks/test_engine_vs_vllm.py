"""The benchmark against vLLM: its models, its turns, its ratios."""

import sys
from pathlib import Path

import pytest

from benchmarks.engine_vs_vllm import CASES, ROOT, Engine, make_model, ratios
from replicas.generators.model_config import load_hf_config

TINY = CASES[0]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    make_model(TINY, folder)
    return folder


def engine(model, num_requests):
    arguments = ["in-process", str(model), str(num_requests)]
    return Engine(
        arguments, sys.executable, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stops=True
    )


def test_models_have_the_sizes_that_the_report_names(tmp_path):
    assert make_model(TINY, tmp_path / "tiny") == 558_208
    assert load_hf_config(tmp_path / "tiny").num_hidden_layers == 4


def test_an_engine_is_stopped_but_for_its_turns(model):
    started = engine(model, 2)
    try:
        assert started.start_s > 0 < started.round_s()
        assert state(started) == "T"
        assert started.peak_mib() > 50
    finally:
        started.kill()


def state(started):
    return Path(f"/proc/{started._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_engine_that_does_not_start_ends_the_benchmark(tmp_path):
    with pytest.raises(SystemExit, match="ended with code"):
        engine(tmp_path, 2)


def test_ratios_are_of_pairs_and_above_one_where_ours_is_faster():
    assert ratios([1.0, 2.0, 4.0], [3.0, 4.0, 4.0]) == (2.0, 1.0, 3.0)
