"""A specification gives the arrivals, lengths and shared prefixes that it asks for."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.load import load_workload

SPEC = """
arrivals: {kind: poisson, rate_rps: 10}
prompt_tokens: {kind: constant, tokens: 100}
output_tokens: {kind: constant, tokens: 10}
num_requests: 20000
"""


def load(tmp_path, seed=0, **changes):
    path = tmp_path / "spec.json"
    base = {
        "arrivals": {"kind": "poisson", "rate_rps": 10},
        "prompt_tokens": {"kind": "constant", "tokens": 100},
        "output_tokens": {"kind": "constant", "tokens": 10},
        "num_requests": 20000,
    }
    path.write_text(json.dumps({**base, **changes}))
    return load_workload(path, seed=seed)


def arrivals_of(workload):
    return np.array([r.arrival_s for r in workload.requests])


def test_yaml_specification(tmp_path):
    path = tmp_path / "chat.yaml"
    path.write_text(SPEC)
    loaded = load_workload(path)
    assert (loaded.name, len(loaded.requests)) == ("chat", 20000)
    request = loaded.requests[0]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (100, 10)
    assert request.block_ids == (), "nothing is shared"
    path.write_text(SPEC + "name: other\n")
    assert load_workload(path).name == "other"


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        ({"kind": "poisson", "rate_rps": 10}, 1.0),
        ({"kind": "gamma", "rate_rps": 10, "cv": 0.5}, 0.5),
        ({"kind": "gamma", "rate_rps": 10, "cv": 2.0}, 2.0),
        ({"kind": "gamma", "rate_rps": 10, "cv": 4.0}, 4.0),
        ({"kind": "ramp", "start_rps": 10, "end_rps": 10, "ramp_s": 500, "cv": 2.0}, 2.0),
    ],
)
def test_gaps_have_the_rate_and_cv_that_were_asked_for(tmp_path, arrivals, cv):
    gaps = np.diff(arrivals_of(load(tmp_path, arrivals=arrivals)), prepend=0.0)
    assert len(gaps) == 20000
    assert gaps.mean() == pytest.approx(0.1, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_constant_arrivals(tmp_path):
    loaded = load(
        tmp_path, arrivals={"kind": "constant", "rate_rps": 4}, num_requests=None, duration_s=2.1
    )
    assert arrivals_of(loaded).tolist() == [0.25 * n for n in range(1, 9)]


@pytest.mark.parametrize(("start_rps", "end_rps"), [(0, 40), (3, 60), (40, 2)])
def test_ramp_changes_the_rate_evenly_and_then_stays(tmp_path, start_rps, end_rps):
    ramp = {"kind": "ramp", "start_rps": start_rps, "end_rps": end_rps, "ramp_s": 400}
    times = arrivals_of(load(tmp_path, arrivals=ramp, num_requests=None, duration_s=600))
    assert times.max() < 600
    counts, _ = np.histogram(times, bins=6, range=(0, 600))
    rates = [start_rps + (end_rps - start_rps) * (k + 0.5) / 4 for k in range(4)]
    for count, rate in zip(counts, [*rates, end_rps, end_rps], strict=True):
        assert abs(count - 100 * rate) < 5 * (100 * rate) ** 0.5


def test_duration_and_number_end_a_workload_whichever_comes_first(tmp_path):
    by_time = load(tmp_path, num_requests=None, duration_s=60)
    assert 480 < len(by_time.requests) < 720
    assert by_time.requests[-1].arrival_s < 60
    assert load(tmp_path, num_requests=100, duration_s=60).requests == by_time.requests[:100]
    assert load(tmp_path, num_requests=10**6, duration_s=60).requests == by_time.requests


@pytest.mark.parametrize(
    ("lengths", "mean", "std", "least", "most"),
    [
        ({"kind": "uniform", "min": 10, "max": 30}, 20, 6.06, 10, 30),
        ({"kind": "uniform", "min": 10, "max": 10}, 10, 0, 10, 10),
        ({"kind": "lognormal", "mean": 1000, "std": 500}, 1000, 500, 1, 20000),
        ({"kind": "lognormal", "mean": 50, "std": 0}, 50, 0, 50, 50),
        (
            {"kind": "lognormal", "mean": 100, "std": 900, "min": 90, "max": 110},
            None,
            None,
            90,
            110,
        ),
        ({"kind": "empirical", "values": [1, 5]}, 3, 2, 1, 5),
        ({"kind": "empirical", "values": [1, 5], "weights": [3, 1]}, 2, 1.73, 1, 5),
    ],
)
@pytest.mark.parametrize("key", ["prompt_tokens", "output_tokens"])
def test_lengths(tmp_path, lengths, mean, std, least, most, key):
    loaded = load(tmp_path, **{key: lengths})
    drawn = np.array([getattr(r, f"num_{key}") for r in loaded.requests])
    assert drawn.min() >= least
    assert drawn.max() <= most
    if mean is not None:
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
        assert drawn.std() == pytest.approx(std, rel=0.06)


def test_groups_share_their_prefix_and_questions_come_back(tmp_path):
    loaded = load(
        tmp_path,
        prompt_tokens={"kind": "uniform", "min": 20, "max": 60},
        prefixes={"groups": 3, "prefix_tokens": 64, "questions_per_group": 2},
        num_requests=60,
        block_tokens=32,
    )
    prompts = [tuple(loaded.prompt(i, 5000)) for i in range(60)]
    assert set(Counter(prompts).values()) == {10}, "six questions, each ten times"
    assert prompts[:6] == prompts[6:12]
    assert len({prompt[:64] for prompt in prompts}) == 3
    assert all(84 <= len(prompt) <= 124 for prompt in prompts)


def test_questions_are_shuffled_over_the_groups(tmp_path):
    prefixes = {"groups": 20, "prefix_tokens": 16, "questions_per_group": 5}
    groups = [r.block_ids[0] for r in load(tmp_path, prefixes=prefixes, num_requests=100).requests]
    assert set(Counter(groups).values()) == {5}
    assert sum(a == b for a, b in pairwise(groups)) < 20, "in order, 80 of them follow their like"


def test_new_questions_of_a_group_are_alike_in_the_prefix_only(tmp_path):
    loaded = load(tmp_path, prefixes={"groups": 2, "prefix_tokens": 48}, num_requests=50)
    prompts = [tuple(loaded.prompt(i, 5000)) for i in range(50)]
    assert {len(prompt) for prompt in prompts} == {148}
    assert len({prompt[:48] for prompt in prompts}) == 2
    assert len({prompt[48:64] for prompt in prompts}) == 50
    assert {len(r.block_ids) for r in loaded.requests} == {3}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(1, 20), st.booleans())
def test_turns_continue_their_conversation(tmp_path, block_tokens, has_prefix):
    loaded = load(
        tmp_path,
        arrivals={"kind": "constant", "rate_rps": 1},
        prompt_tokens={"kind": "uniform", "min": 5, "max": 9},
        output_tokens={"kind": "uniform", "min": 1, "max": 4},
        prefixes={"groups": 2, "prefix_tokens": 3 * block_tokens} if has_prefix else None,
        conversations={"turns": {"kind": "constant", "tokens": 3}, "pause_s": 2, "pause_cv": 0},
        num_requests=None,
        duration_s=50,
        block_tokens=block_tokens,
    )
    prompts = [loaded.prompt(i, 5000) for i in range(len(loaded.requests))]
    times = arrivals_of(loaded).tolist()
    assert times == sorted(times)
    assert len(prompts) == 49 + 47 + 45
    num_prefix = 3 * block_tokens if has_prefix else 0
    turns = {}
    for prompt, request in zip(prompts, loaded.requests, strict=True):
        turns.setdefault(tuple(prompt[num_prefix : num_prefix + 5]), []).append((prompt, request))
    assert len(turns) == 49, "every conversation is its own"
    for of_one in turns.values():
        for (prompt, request), (later, later_request) in pairwise(of_one):
            assert later[: len(prompt)] == prompt
            num_new = len(later) - len(prompt) - request.num_output_tokens
            assert 5 <= num_new <= 9, "the answer is part of the next prompt"
            assert later_request.arrival_s == pytest.approx(request.arrival_s + 2)


@pytest.mark.parametrize("questions", [None, 2])
def test_block_stands_for_one_beginning_only(tmp_path, questions):
    loaded = load(
        tmp_path,
        prefixes={"groups": 3, "prefix_tokens": 64, "questions_per_group": questions},
        conversations={"turns": {"kind": "constant", "tokens": 3}, "pause_s": 2},
        num_requests=90,
    )
    before = {}
    for request in loaded.requests:
        for position, block in enumerate(request.block_ids):
            assert (
                before.setdefault(block, request.block_ids[:position])
                == (request.block_ids[:position])
            )


def test_number_of_requests_counts_turns(tmp_path):
    turns = {"turns": {"kind": "uniform", "min": 1, "max": 5}, "pause_s": 30}
    few = load(tmp_path, conversations=turns, num_requests=100)
    assert len(few.requests) == 100
    assert few.requests[-1].arrival_s > 0


FINGERPRINT = """
import hashlib, sys
from cluster.lab.workloads.load import load_workload
loaded = load_workload(sys.argv[1], seed=5)
prompts = [loaded.prompt(i, 5000) for i in range(20)]
print(hashlib.sha256(repr((loaded.requests, prompts)).encode()).hexdigest())
"""


def test_same_seed_same_workload_in_every_process(tmp_path):
    changes = {
        "arrivals": {"kind": "gamma", "rate_rps": 10, "cv": 3},
        "prompt_tokens": {"kind": "lognormal", "mean": 200, "std": 100},
        "prefixes": {"groups": 3, "prefix_tokens": 64},
        "conversations": {"turns": {"kind": "uniform", "min": 1, "max": 3}, "pause_s": 10},
        "num_requests": 300,
    }
    here = load(tmp_path, seed=5, **changes)
    prompts = [here.prompt(i, 5000) for i in range(20)]
    expected = hashlib.sha256(repr((here.requests, prompts)).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", FINGERPRINT, str(tmp_path / "spec.json")],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout.decode()
        assert printed.strip() == expected
    assert load(tmp_path, seed=6, **changes) != here


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"num_requests": None}, None, "num_requests or duration_s"),
        ({"num_requests": 0}, "num_requests", ">= 1"),
        ({"arrivals": {"kind": "poisson", "rate_rps": 0}}, "arrivals.rate_rps", "> 0"),
        ({"arrivals": {"kind": "bursty"}}, "arrivals.kind", "bursty"),
        ({"arrivals": {"kind": "gamma", "rate_rps": 1}}, "arrivals", "`cv`"),
        ({"prompt_tokens": {"kind": "uniform", "min": 5, "max": 4}}, "prompt_tokens", "above max"),
        ({"prompt_tokens": {"kind": "constant", "tokens": -1}}, "prompt_tokens.tokens", ">= 1"),
        ({"output_tokens": {"kind": "empirical", "values": []}}, "output_tokens.values", ">= 1"),
        (
            {"output_tokens": {"kind": "empirical", "values": [1, 2], "weights": [1]}},
            "output_tokens",
            "1 weights for 2 values",
        ),
        (
            {"output_tokens": {"kind": "empirical", "values": [1], "weights": [0]}},
            "output_tokens",
            "all 0",
        ),
        ({"prefixes": {"groups": 1, "prefix_tokens": 100}}, None, "not a multiple"),
        ({"burstiness": 2}, None, "burstiness"),
        ({"num_requests": None, "duration_s": 1e9}, None, "more than"),
        ({"num_requests": None, "duration_s": 1e-6}, None, "no requests"),
    ],
)
def test_impossible_specification_says_what_to_change(tmp_path, changes, field, message):
    with pytest.raises(WorkloadError) as caught:
        load(tmp_path, **changes)
    assert message in str(caught.value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (SPEC + "name: [1\n", 7, "not YAML"),
        (SPEC.replace("10}", ".nan}"), None, "field arrivals.rate_rps"),
        (SPEC.replace("10}", ".inf}"), None, "field arrivals.rate_rps"),
        ("- 1\n", None, "Expected `object`"),
    ],
)
def test_malformed_yaml_is_refused(tmp_path, text, line, message):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert message in str(caught.value)
    assert caught.value.line == line


def test_malformed_json_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"arrivals": ')
    with pytest.raises(WorkloadError, match="truncated"):
        load_workload(path)
