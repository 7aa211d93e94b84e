"""The autoscaling policy: within bounds, up at once, down after a while, and never to and fro."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing.step_time import StepCosts
from cluster.routing.traffic import Traffic
from cluster.scaling.capacity import Engine, Objectives
from cluster.scaling.policy import DECISION_INTERVAL_S, Autoscaler, Pool

COSTS = StepCosts(decode_s=0.04, row_s=2e-4, prompt_s=0.05, prompt_token_s=3e-4)
OBJECTIVES = Objectives(ttft_s=3.0, tpot_s=0.1)
COLD_START_S = 60.0


def pools(least=1, most=20):
    return {
        "prefill": Pool(least, least, most, Engine(1, 16), COLD_START_S),
        "decode": Pool(least, least, most, Engine(8, 4), COLD_START_S),
    }


def targets_over(rates, least=1, most=20, roles=("prefill", "decode"), prompt=1000, output=200):
    """What is decided at each look while requests come at these rates."""
    scaler, traffic, decided = Autoscaler(OBJECTIVES), Traffic(), []
    now = pools(least, most)
    if roles == ("both",):
        now = {"both": now["decode"]}
    for step, rate in enumerate(rates):
        for _ in range(round(rate * DECISION_INTERVAL_S)):
            traffic.come(prompt)
            traffic.begin(prompt, 0)
            traffic.end(prompt, output)
        targets = scaler.decide(step * DECISION_INTERVAL_S, {"a": traffic}, COSTS, now)
        now = {role: pool._replace(num_replicas=targets[role]) for role, pool in now.items()}
        decided.append(targets)
    return decided


rates = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60)


@settings(deadline=None)
@given(rates, st.integers(1, 3), st.integers(3, 9))
def test_counts_stay_within_their_bounds(course, least, most):
    for targets in targets_over(course, least, most):
        assert all(least <= count <= most for count in targets.values())


@settings(deadline=None)
@given(rates)
def test_no_replica_is_removed_that_was_needed_within_a_cold_start(course):
    """So no replica is stopped while another of its pool starts."""
    decided = targets_over(course)
    held = math.floor(COLD_START_S / DECISION_INTERVAL_S)
    for role in ("prefill", "decode"):
        counts = [targets[role] for targets in decided]
        grew_at = None
        for step in range(1, len(counts)):
            if counts[step] > counts[step - 1]:
                grew_at = step
            if counts[step] < counts[step - 1]:
                assert grew_at is None or step - grew_at > held


@settings(deadline=None)
@given(rates)
def test_one_pool_for_both_roles_has_room_for_either(course):
    """And needs no more than the two together."""
    both = targets_over(course, most=60, roles=("both",))
    split = targets_over(course, most=60)
    for together, apart in zip(both, split, strict=True):
        assert together["both"] <= apart["prefill"] + apart["decode"]
        assert together["both"] >= apart["decode"]


def test_a_steady_demand_changes_nothing():
    rng = np.random.Generator(np.random.Philox(4))
    decided = targets_over(rng.poisson(np.full(120, 40.0)) / DECISION_INTERVAL_S)
    settled = decided[30:]
    for role in ("prefill", "decode"):
        counts = [targets[role] for targets in settled]
        assert max(counts) - min(counts) <= 1
        assert sum(a != b for a, b in pairwise(counts)) <= 8


def test_prompts_scale_prefill_and_outputs_scale_decode():
    short = targets_over([4.0] * 40, prompt=500, output=200)[-1]
    long_prompts = targets_over([4.0] * 40, prompt=4000, output=200)[-1]
    long_answers = targets_over([4.0] * 40, prompt=500, output=800)[-1]
    assert long_prompts["prefill"] > short["prefill"]
    assert long_prompts["decode"] == short["decode"]
    assert long_answers["decode"] > short["decode"]
    assert long_answers["prefill"] == short["prefill"]


def test_a_rise_is_followed_at_once_and_a_fall_after_a_cold_start():
    decided = targets_over([1.0] * 30 + [10.0] * 30 + [1.0] * 60)
    counts = [targets["prefill"] for targets in decided]
    assert counts[32] > counts[29]
    peak = max(counts[:60])
    assert counts[60 + math.floor(COLD_START_S / DECISION_INTERVAL_S) - 1] >= counts[59]
    assert counts[-1] < peak
    assert counts[-1] <= counts[29] + 1


def test_nothing_changes_before_demand_is_known():
    scaler = Autoscaler(OBJECTIVES)
    now = {role: pool._replace(num_replicas=5) for role, pool in pools().items()}
    assert scaler.decide(0.0, {"a": Traffic()}, StepCosts(), now) == {"prefill": 5, "decode": 5}
