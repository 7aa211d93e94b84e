"""Moments at which a benchmark sends its requests."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.arrivals import RampUp, arrival_times
from cluster.bench.errors import BenchError


def times(number, rate, burstiness=1.0, ramp_up=None, seed=0):
    return arrival_times(number, rate, burstiness, np.random.default_rng(seed), ramp_up)


@given(
    st.integers(1, 200),
    st.floats(0.01, 1e4),
    st.floats(0.2, 100) | st.just(math.inf),
    st.integers(0, 9),
)
def test_a_rate_is_met_exactly_in_order(number, rate, burstiness, seed):
    found = times(number, rate, burstiness, seed=seed)
    assert found.shape == (number,)
    assert (np.diff(found, prepend=0.0) >= 0).all()
    assert found[-1] == pytest.approx(number / rate)


def test_an_infinite_rate_sends_all_at_once():
    assert (times(5, math.inf) == 0).all()


def test_burstiness_is_the_shape_of_the_gaps():
    def variation(burstiness):
        gaps = np.diff(times(4000, 10.0, burstiness))
        return gaps.std() / gaps.mean()

    # A gamma distribution of shape k has this coefficient of variation.
    for shape in (0.25, 1.0, 4.0):
        assert variation(shape) == pytest.approx(shape**-0.5, rel=0.1)
    assert variation(math.inf) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("strategy", "rates"), [("linear", [1, 2.5, 4]), ("exponential", [1, 2, 4])]
)
def test_a_rate_ramps_up(strategy, rates):
    ramp_up = RampUp(strategy, 1, 4)
    assert ramp_up.rates(3).tolist() == pytest.approx(rates)
    gaps = np.diff(times(3, math.inf, math.inf, ramp_up), prepend=0.0)
    assert gaps.tolist() == pytest.approx([1 / rate for rate in rates])


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (math.nan, 1), (-1, 1), (1, 0)])
def test_a_rate_that_cannot_be_is_refused(rate, burstiness):
    with pytest.raises(BenchError, match="give a number above 0"):
        times(3, rate, burstiness)


def test_a_ramp_to_nothing_is_refused():
    with pytest.raises(BenchError, match="ramp-up-end-rps is 0"):
        RampUp("linear", 1, 0)
