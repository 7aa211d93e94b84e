"""Learned costs: one fit for each pool, and paces of unusual replicas."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing import learned_costs
from cluster.routing.learned_costs import LearnedCosts, Pace
from cluster.routing.step_time import StepCosts
from replicas.messages import StepWork

TRUE = StepCosts(0.04, 0.0, 2e-7, 0.0, 0.02, 2e-4, 1e-9)
AB = ("a", "b")


def step(factor, rng=None):
    """A decode step that takes `factor` times as long as `TRUE`, with noise."""
    rng = rng or np.random.default_rng(7)
    rows, context = int(rng.integers(1, 33)), int(rng.integers(100, 10**5))
    longest = int(rng.integers(100, context + 1))
    seconds = TRUE.decode_step_s(rows, context, longest) * rng.uniform(0.95, 1.05)
    return StepWork(rows, context, longest, 0, 0, 0, factor * seconds)


def prompt_step(factor, rng):
    tokens = int(rng.integers(16, 20_000))
    seconds = TRUE.prompts_s(1, tokens, tokens**2 // 2)
    return StepWork(0, 0, 0, 1, tokens, tokens**2 // 2, factor * seconds)


def decode_s(costs):
    return costs.decode_step_s(16, 50_000, 5000)


class PoolHistory:
    """A pool whose replicas report steps, and the costs learned so far."""

    def __init__(self, *replicas):
        self.rng = np.random.default_rng(11)
        self.learned = LearnedCosts()
        self.costs = {}
        for replica in replicas:
            self.costs.update(self.learned.learn("pool", replica, []))

    def tell(self, factors, times=1):
        """Report steps of these replicas that take these factors of the true time."""
        for _ in range(times):
            for replica, factor in factors.items():
                told = [step(factor, self.rng)]
                self.costs.update(self.learned.learn("pool", replica, told))
        return self

    def seconds(self):
        return {replica: decode_s(costs) / decode_s(TRUE) for replica, costs in self.costs.items()}


# --- a replica's pace ---------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.floats(0.1, 9.0), st.floats(0.1, 10.0))
def test_a_pace_is_relative_to_any_given_costs(factor, scale):
    pace, rng = Pace(), np.random.default_rng(5)
    for number in range(90):
        assert (pace.against(TRUE) is None) == (number < learned_costs.MIN_STEPS)
        assert pace.see(step(factor, rng), TRUE)
    assert pace.against(TRUE) == pytest.approx(factor, rel=0.05)
    # A corrected fit corrects the pace, too.
    scaled = StepCosts(*(scale * seconds for seconds in TRUE))
    assert pace.against(scaled) == pytest.approx(factor / scale, rel=0.05)


def test_one_delayed_step_does_not_change_a_pace():
    pace, rng = Pace(), np.random.default_rng(5)
    for _ in range(120):
        pace.see(step(1.0, rng), TRUE)
    pace.see(msgspec.structs.replace(step(1.0, rng), device_s=60.0), TRUE)
    assert pace.against(TRUE) < learned_costs.ORDINARY


def test_without_known_costs_there_is_no_pace():
    pace = Pace()
    for _ in range(99):
        assert not pace.see(step(1.0), StepCosts())
        assert not pace.see(step(math.nan), TRUE)
        assert not pace.see(step(math.inf), TRUE)
        assert not pace.see(step(0.0), TRUE)
    assert pace.against(TRUE) is None


# --- replicas of a pool -------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=200, max_size=400), st.floats(0.2, 5.0))
def test_replicas_that_are_alike_cost_the_same_to_the_bit(who, factor):
    told = PoolHistory(*"abcd")
    for replica in who:
        told.tell({replica: factor})
        assert len(set(told.costs.values())) == 1
    assert told.seconds()["a"] == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 0.6, 1.7, 4.0])
def test_an_unusual_replica_costs_its_own_step_times(factor):
    told = PoolHistory(*"abc").tell(dict.fromkeys("abc", 1.0), 10)
    assert len(set(told.costs.values())) == 1, "it is too early to tell"
    told.tell({"a": 1.0, "b": factor, "c": 1.0}, 300)
    assert told.seconds() == pytest.approx({"a": 1.0, "b": factor, "c": 1.0}, rel=0.1)
    assert told.costs["a"] == told.costs["c"]
    assert told.learned.of_pool("pool") == told.costs["a"]


@pytest.mark.parametrize(
    "factors", [{"a": 1.0, "b": 1.4}, dict(zip("abcd", (1.0, 1.4, 1.4, 1.0), strict=True))]
)
def test_slower_replicas_are_unusual_even_if_half_of_the_pool_is(factors):
    told = PoolHistory(*factors).tell(factors, 300)
    assert told.seconds() == pytest.approx(factors, rel=0.1)


def test_a_replica_that_alternates_prompts_and_decodes_teaches_both():
    told = PoolHistory("a").tell({"a": 1.0}, 100)
    for number in range(4000):
        steps = [prompt_step(1.0, told.rng), step(1.0 if number < 400 else 3.0, told.rng)]
        for each in steps:
            told.costs.update(told.learned.learn("pool", "a", [each]))
    model = told.learned._pools["pool"].model
    assert decode_s(model.known_costs) == pytest.approx(3.0 * decode_s(TRUE), rel=0.1)


def test_replicas_joining_before_and_after_the_first_costs_are_equal():
    learned, rng = LearnedCosts(), np.random.default_rng(3)
    learned.learn("prefill", "early", [])
    learned.learn("decode", "d", [step(2.0, rng), prompt_step(2.0, rng)])
    costs = learned.learn("prefill", "late", [])
    assert costs["early"] == costs["late"] != StepCosts()


def test_work_seen_only_on_a_slow_replica_is_scaled_for_others():
    """A slow replica's pace does not change the cost of its work, here of context tokens."""
    told = PoolHistory(*"abc").tell({"a": 1.0, "b": 4.0, "c": 1.0}, 150)
    for _ in range(1500):
        for replica, context, factor in (("a", 200, 1.0), ("b", 100_000, 4.0), ("c", 200, 1.0)):
            seconds = factor * TRUE.decode_step_s(4, context, context // 4)
            steps = [StepWork(4, context, context // 4, 0, 0, 0, seconds)]
            told.costs.update(told.learned.learn("pool", replica, steps))
    true_s = TRUE.decode_step_s(4, 100_000, 25_000)
    assert told.costs["a"].decode_step_s(4, 100_000, 25_000) == pytest.approx(true_s, rel=0.25)


def test_two_unlike_replicas_each_cost_their_own_step_times():
    told = PoolHistory(*AB).tell({"a": 1.0, "b": 3.0}, 300)
    assert told.seconds() == pytest.approx({"a": 1.0, "b": 3.0}, rel=0.1)


def test_a_replica_idle_since_slow_first_steps_is_not_slow():
    """Cold steps taught the fit; it is wrong for both replicas, not just for the active one."""
    told = PoolHistory(*AB).tell({"a": 3.0, "b": 3.0}, 60)
    told.tell({"a": 1.0}, 5)
    assert told.costs["a"] == told.costs["b"]
    for _ in range(80):
        told.tell({"a": 1.0}, 40)
        assert told.seconds()["b"] <= 3.5
    assert told.costs["a"] == told.costs["b"]
    assert told.seconds()["b"] == pytest.approx(1.0, rel=0.1)


def test_a_replica_without_steps_costs_what_others_take_now():
    told = PoolHistory(*AB).tell({"a": 3.0}, 60).tell({"a": 1.0}, 600)
    assert told.costs["a"] == told.costs["b"]
    assert told.seconds()["b"] == pytest.approx(1.0, rel=0.15)


def test_a_host_that_slows_down_shows_at_once():
    """The fit takes hundreds of steps; until then the level shows it."""
    told = PoolHistory(*"abc").tell(dict.fromkeys("abc", 1.0), 400)
    told.tell(dict.fromkeys("abc", 2.5), 200)
    assert told.seconds() == pytest.approx(dict.fromkeys("abc", 2.5), rel=0.15)


def test_a_slow_replica_without_new_steps_fades_to_the_pools_costs():
    told = PoolHistory(*"abc").tell({"a": 1.0, "b": 4.0, "c": 1.0}, 200)
    assert told.seconds()["b"] == pytest.approx(4.0, rel=0.1)
    told.tell({"a": 1.0, "c": 1.0}, 10 * learned_costs.HALF_LIFE)
    assert told.costs["b"] == told.costs["a"]
    for new in map(str, range(30)):
        told.costs.update(told.learned.learn("pool", new, []))
    told.tell({"a": 1.0, "c": 1.0}, learned_costs.MAX_STEPS_APART * learned_costs.ONE_IN)
    assert told.costs["b"] == told.costs["a"], "a faded pace does not come back by itself"
    # Its first new step restores its pace.
    told.tell({"b": 4.0})
    assert told.seconds()["b"] > 3.0


def test_decodes_and_prompts_have_paces_of_their_own():
    told = PoolHistory(*"abc")
    for _ in range(300):
        for replica in "abc":
            steps = [step(1.0, told.rng), prompt_step(3.0 if replica == "b" else 1.0, told.rng)]
            told.costs.update(told.learned.learn("pool", replica, steps))
    a, b = told.costs["a"], told.costs["b"]
    assert decode_s(b) == pytest.approx(decode_s(a), rel=0.01)
    assert b.prompts_s(1, 4000, 8e6) == pytest.approx(3.0 * a.prompts_s(1, 4000, 8e6), rel=0.1)


def test_a_replica_that_is_gone_counts_for_nothing():
    told = PoolHistory(*AB).tell({"a": 1.0, "b": 9.0}, 200)
    told.learned.forget("pool", "b")
    changed = {}
    for _ in range(learned_costs.ONE_IN * learned_costs.MAX_STEPS_APART):
        changed |= told.learned.learn("pool", "a", [step(1.0, told.rng)])
    assert set(changed) == {"a"}
    assert decode_s(changed["a"]) == pytest.approx(decode_s(TRUE), rel=0.1)


def test_pools_learn_for_themselves_and_for_pools_without_steps():
    learned, rng = LearnedCosts(), np.random.default_rng(3)
    for _ in range(50):
        learned.learn("decode", "d", [step(2.0, rng)])
    assert not learned.knows_prompts("decode")
    assert decode_s(learned.of_pool("decode")) == pytest.approx(2.0 * decode_s(TRUE), rel=0.1)
    first = learned.learn("prefill", "p", [prompt_step(1.0, rng)])
    assert learned.knows_prompts("prefill")
    assert learned.num_pools_that_know_prompts == 1
    assert learned.num_steps == 51
    assert decode_s(first["p"]) == pytest.approx(2.0 * decode_s(TRUE), rel=0.1)
    assert learned.of_pool("nobody") != StepCosts()
