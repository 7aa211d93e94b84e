"""The model of step times is least squares with forgetting."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing import step_time
from cluster.routing.step_time import StepCosts, StepTimeModel
from replicas.messages import StepWork

UNITS = [1.0, 32.0, 1e5, 1e5, 1.0, 1e4, 1e8]


def work(rows=0, context=0, longest=0, prompts=0, tokens=0, pairs=0, device_s=0.0):
    return StepWork(rows, context, longest, prompts, tokens, pairs, device_s)


DECODES = st.builds(
    work,
    rows=st.integers(1, 64),
    context=st.integers(0, 10**6),
    longest=st.integers(0, 10**5),
    device_s=st.floats(0.0, 2.0),
)
PROMPTS = st.builds(
    work,
    prompts=st.integers(1, 8),
    tokens=st.integers(1, 10**5),
    pairs=st.integers(0, 10**9),
    device_s=st.floats(0.0, 90.0),
)
STEPS = st.lists(DECODES | PROMPTS, max_size=60)


def inputs(step):
    numbers = np.array([step.num_rows > 0, *msgspec.structs.astuple(step)[:-1]], dtype=float)
    return numbers / UNITS


def batch_fit(steps):
    """Solve least squares over all steps at once, with fading rows and rows that pull to 0."""
    weights = step_time.FORGETTING ** (np.arange(len(steps) - 1, -1, -1) / 2)
    rows = [w * inputs(step) for w, step in zip(weights, steps, strict=True)]
    seconds = [w * step.device_s for w, step in zip(weights, steps, strict=True)]
    matrix = np.vstack([*rows, math.sqrt(step_time.PULL) * np.eye(len(UNITS))])
    return np.linalg.lstsq(matrix, np.array([*seconds, *[0.0] * len(UNITS)]), rcond=None)[0]


def taught(steps):
    model = StepTimeModel()
    for step in steps:
        model.learn(step)
    return model


@given(STEPS)
def test_the_fit_equals_least_squares_over_all_steps(steps):
    model, expected = taught(steps), batch_fit(steps)
    for step in steps:
        found = model.seconds(step)
        assert found == pytest.approx(max(inputs(step) @ expected, 0.0), rel=1e-3, abs=1e-3)


@given(STEPS, DECODES | PROMPTS)
def test_any_steps_give_finite_non_negative_costs(steps, asked):
    model = taught(steps)
    assert 0.0 <= model.seconds(asked) < math.inf
    assert all(0.0 <= cost < math.inf for cost in model.known_costs)


@settings(max_examples=5, deadline=None)
@given(DECODES | PROMPTS)
def test_the_same_step_for_ever_is_learned_and_unlearned(step):
    model = taught([step] * 3000)
    assert model.seconds(step) == pytest.approx(step.device_s, rel=1e-3, abs=1e-4)
    other = msgspec.structs.replace(step, device_s=2.0 * step.device_s + 1.0)
    for _ in range(2000):
        model.learn(other)
    assert model.seconds(step) == pytest.approx(other.device_s, rel=1e-2)


@pytest.mark.parametrize("first", ["prompts", "decodes"])
def test_a_kind_of_step_that_stops_keeps_its_cost(first):
    """The weight of these steps fades to nothing; their cost must not."""
    prompt = work(prompts=1, tokens=1500, pairs=10**6, device_s=0.5)
    decodes = work(rows=8, context=4000, longest=900, device_s=0.04)
    one, other = (prompt, decodes) if first == "prompts" else (decodes, prompt)
    model = taught([one] * 100)
    for _ in range(40):
        for _ in range(100):
            model.learn(other)
        assert model.seconds(one) == pytest.approx(one.device_s, rel=0.02)
        assert model.seconds(other) == pytest.approx(other.device_s, rel=0.02)
    for _ in range(100):
        model.learn(msgspec.structs.replace(one, device_s=3.0 * one.device_s))
    assert model.seconds(one) == pytest.approx(3.0 * one.device_s, rel=0.05)


def test_empty_or_impossible_steps_are_ignored():
    model = taught([work(rows=1, device_s=0.5)] * 9)
    before = model.seconds(work(rows=1))
    for step in (
        work(device_s=3.0),
        work(rows=1, device_s=math.nan),
        work(rows=1, device_s=math.inf),
        work(rows=1, device_s=-1.0),
        work(rows=2**63 - 1, prompts=2**31, device_s=0.02),
        work(rows=1, context=10**12, device_s=0.02),
    ):
        model.learn(step)
    assert model.seconds(work(rows=1)) == before


TRUE = StepCosts(0.04, 0.0, 2e-7, 0.0, 0.02, 2e-4, 1e-9)


def drawn(rng, noise):
    """Return a step that takes its true time, with noise."""
    if rng.random() < 0.5:
        rows, context = int(rng.integers(1, 33)), int(rng.integers(100, 10**5))
        step = work(rows, context, int(rng.integers(100, context + 1)))
        seconds = TRUE.decode_step_s(rows, context, step.max_context_tokens)
    else:
        tokens = int(rng.integers(16, 20_000))
        step = work(prompts=int(rng.integers(1, 4)), tokens=tokens, pairs=tokens**2 // 2)
        seconds = TRUE.prompts_s(step.num_prompts, tokens, step.num_prompt_pairs)
    return msgspec.structs.replace(step, device_s=max(seconds + rng.normal(0.0, noise), 0.0))


def test_the_fit_finds_the_cost_of_each_part():
    rng = np.random.default_rng(1)
    found = taught([drawn(rng, 0.0) for _ in range(400)]).known_costs
    assert found.decode_s == pytest.approx(TRUE.decode_s, rel=0.01)
    assert found.context_token_s == pytest.approx(TRUE.context_token_s, rel=0.01)
    assert found[4:] == pytest.approx(TRUE[4:], rel=0.01)


def test_a_replica_that_becomes_slower_costs_more():
    rng = np.random.default_rng(4)
    steps = [drawn(rng, 0.001) for _ in range(1500)]
    model = taught(steps[:500])
    for step in steps[500:]:
        model.learn(msgspec.structs.replace(step, device_s=3.0 * step.device_s))
    assert model.known_costs.decode_s == pytest.approx(3.0 * TRUE.decode_s, rel=0.05)
    assert model.known_costs.prompt_token_s == pytest.approx(3.0 * TRUE.prompt_token_s, rel=0.05)


def test_one_delayed_step_does_not_change_costs():
    rng = np.random.default_rng(6)
    model = taught([drawn(rng, 0.001) for _ in range(100)])
    before = model.known_costs
    step = drawn(rng, 0.0)
    held_up = msgspec.structs.replace(step, device_s=1000.0 * step.device_s)
    model.learn(model.plausible(held_up))
    assert model.seconds(step) < 2.0 * step.device_s
    assert model.known_costs.decode_step_s(16, 10**4, 10**3) == pytest.approx(
        before.decode_step_s(16, 10**4, 10**3), rel=0.5
    )


def test_steps_unlike_any_before_are_believed():
    model = taught([work(prompts=1, tokens=16, pairs=128, device_s=0.02)] * 100)
    long = work(prompts=1, tokens=10**4, pairs=10**8, device_s=9.0)
    assert model.plausible(long) == long


def test_a_lasting_large_slowdown_is_learned():
    rng = np.random.default_rng(7)
    model = taught([drawn(rng, 0.001) for _ in range(300)])
    for _ in range(1200):
        step = drawn(rng, 0.0)
        slower = msgspec.structs.replace(step, device_s=20.0 * step.device_s)
        model.learn(model.plausible(slower))
    assert model.known_costs.decode_s == pytest.approx(20.0 * TRUE.decode_s, rel=0.1)


def test_unknown_kinds_of_steps_cost_what_they_cost_others():
    others = taught([work(rows=1, device_s=0.5), work(prompts=1, tokens=10**4, device_s=7.0)] * 9)
    own = StepTimeModel()
    assert own.costs(others) == others.known_costs
    for _ in range(step_time.MIN_STEPS):
        own.learn(work(rows=1, device_s=0.1))
    assert own.costs(others).decode_step_s(1, 0, 0) == pytest.approx(0.1, rel=0.01)
    assert own.costs(others).prompts_s(1, 10**4, 0) == pytest.approx(7.0, rel=0.01)


def test_prompts_of_a_slow_kind_of_replica_cost_in_proportion_until_many_were_seen():
    others, slow = StepTimeModel(), StepTimeModel()
    for length in (500, 1000, 2000, 4000) * 25:
        others.learn(work(prompts=1, tokens=length, device_s=1e-3 * length))
    # A few short ones alone would say that each costs the same, however long it is.
    for _ in range(3):
        slow.learn(work(prompts=1, tokens=400, device_s=4e-3 * 400))
    assert slow.costs(others).prompts_s(1, 4000, 0) == pytest.approx(16.0, rel=0.05)
