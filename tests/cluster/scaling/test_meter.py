"""The meter: what ingresses counted, whoever of them comes and goes, and where demand goes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.step_time import StepCosts
from cluster.routing.traffic import Traffic
from cluster.scaling.meter import Meter

COSTS = StepCosts(decode_s=0.04, prompt_s=0.1, prompt_token_s=1e-4)


def meter(window_s=300.0):
    return Meter(window_s, recent_s=20.0)


def serve(traffic, num, prompt=1000, output=100, cached=0):
    """So many requests come, begin and end."""
    for _ in range(num):
        traffic.come(prompt)
        traffic.begin(prompt, cached)
        traffic.end(prompt, output)


def rate_ahead(counts, ahead_s=70.0):
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    for step, count in enumerate(counts, 1):
        serve(traffic, int(count))
        seen.observe(10.0 * step, {"a": traffic})
    return seen.demand(ahead_s, COSTS).requests_per_s


def test_there_is_no_forecast_before_a_request_has_ended():
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    traffic.come(1000)
    seen.observe(10.0, {"a": traffic})
    assert seen.demand(60.0, COSTS) is None


def test_means_are_over_the_requests_that_arrived():
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    for step in range(1, 11):
        serve(traffic, 20, prompt=1000, output=100, cached=250)
        seen.observe(10.0 * step, {"a": traffic})
    demand = seen.demand(60.0, COSTS)
    assert demand.requests_per_s == pytest.approx(2.0)
    # The first look knew nothing of caches yet, but those in it had begun when they were counted.
    assert demand.prompt_s == pytest.approx(0.1 + 750 * 1e-4)
    assert demand.output_tokens == 100
    assert demand.num_decoding == 0
    assert demand.backlog_s == 0


def test_work_is_computed_with_the_present_costs():
    """What came while they seemed to be others is neither more of it nor bursts."""
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    demands = []
    for step in range(1, 21):
        serve(traffic, 20)
        seen.observe(10.0 * step, {"a": traffic})
        dear = COSTS._replace(prompt_token_s=1e-3) if step == 10 else COSTS
        demands.append(seen.demand(60.0, dear))
    assert [round(demand.prompt_s, 3) for demand in demands] == [0.2] * 9 + [1.1] + [0.2] * 10
    assert max(demand.burstiness for demand in demands) <= 1.0


def test_waiting_requests_are_backlog_and_refused_ones_are_not():
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    serve(traffic, 10)
    for _ in range(5):
        traffic.come(1000)
    traffic.end(1000, 0)
    seen.observe(10.0, {"a": traffic})
    demand = seen.demand(0.0, COSTS)
    assert demand.backlog_s == pytest.approx(4 * 0.2)
    assert demand.requests_per_s == pytest.approx(1.5)


@given(
    rates=st.lists(st.integers(0, 50), min_size=8, max_size=20),
    ingresses=st.integers(1, 4),
    lives=st.data(),
)
def test_the_number_of_ingresses_makes_no_difference(rates, ingresses, lives):
    """Nor that some of them die between looks, and others begin."""
    alone, parted = meter(), meter()
    total = Traffic()
    names = {f"i{n}": Traffic() for n in range(ingresses)}
    started = ingresses
    alone.observe(0.0, {"one": total})
    parted.observe(0.0, names)
    for step, count in enumerate(rates, 1):
        for _ in range(count):
            serve(total, 1)
            serve(names[lives.draw(st.sampled_from(sorted(names)))], 1)
        alone.observe(10.0 * step, {"one": total})
        parted.observe(10.0 * step, names)
        if lives.draw(st.booleans()):
            names.pop(lives.draw(st.sampled_from(sorted(names))))
            names[f"i{started}"] = Traffic()
            started += 1
    one, many = alone.demand(30.0, COSTS), parted.demand(30.0, COSTS)
    assert (one is None) == (many is None)
    if one is not None:
        assert many[:4] == pytest.approx(one[:4])


def test_a_trend_is_extrapolated_and_noise_is_not():
    rng = np.random.Generator(np.random.Philox(1))
    rising = rate_ahead(rng.poisson(np.linspace(10, 70, 30)), 100.0)
    assert rising == pytest.approx(9.0, rel=0.15)
    steady = [rate_ahead(rng.poisson(np.full(30, 40)), 100.0) for _ in range(20)]
    assert np.median(steady) == pytest.approx(4.0, rel=0.1)


def test_a_burst_is_detected_within_two_readings():
    rng = np.random.Generator(np.random.Philox(2))
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    for step, count in enumerate([*rng.poisson(np.full(28, 15)), 60, 60], 1):
        serve(traffic, int(count))
        seen.observe(10.0 * step, {"a": traffic})
    assert seen.demand(0.0, COSTS).requests_per_s == pytest.approx(6.0)


@pytest.mark.parametrize(("before", "after"), [(15, 60), (60, 15)])
def test_a_step_in_the_rate_is_assumed_to_stay(before, after):
    """A line through it would be carried on to twice as much, or to nothing."""
    rng = np.random.Generator(np.random.Philox(3))
    seen, traffic = meter(), Traffic()
    seen.observe(0.0, {"a": traffic})
    for step, count in enumerate(rng.poisson([before] * 20 + [after] * 8), 1):
        serve(traffic, int(count))
        seen.observe(10.0 * step, {"a": traffic})
    demand = seen.demand(70.0, COSTS)
    assert demand.requests_per_s == pytest.approx(after / 10.0, rel=0.25)
    assert demand.burstiness < 3.0, "nor is the jump itself noise"


def test_a_step_counts_after_two_readings_and_with_few_observations():
    """A line through these was carried on to 13.5 requests/s, where 6 came."""
    counts = [14, 15, 17, 15, 48, 48, 60, 81, 65, 62]
    assert rate_ahead(counts[:6]) == pytest.approx(4.8)
    assert rate_ahead(counts) < 7.0


def test_a_trend_is_extrapolated_for_a_third_of_its_observed_length():
    counts = list(range(20, 100, 10))
    assert rate_ahead(counts, 20.0) == pytest.approx(9.0 + 0.1 * (5 + 20))
    assert rate_ahead(counts, 200.0) == pytest.approx(9.0 + 0.1 * (5 + 80 / 3))


def test_an_ingress_that_reappears_adds_only_its_new_requests():
    seen, there, away = meter(), Traffic(), Traffic()
    for look in range(30):
        for traffic in (there, away):
            serve(traffic, 20)
        counted = {"there": there} if look in {20, 21} else {"there": there, "away": away}
        seen.observe(10.0 * look, counted)
    assert seen.demand(60.0, COSTS).requests_per_s < 8.0
