"""The overload benchmark: arrivals have their documented bursts, and rows their named counts."""

import numpy as np
import pytest

from benchmarks.overload import (
    ADMISSION,
    ROUTERS,
    Row,
    capacity_rps,
    gamma,
    least_share,
    row_of,
    run,
    spikes,
    workload,
)


@pytest.fixture
def rng():
    return np.random.Generator(np.random.Philox(1))


def test_gaps_vary_four_times_as_much_as_their_mean(rng):
    gaps_s = np.diff(gamma(rng, 10.0, 20_000.0))
    assert gaps_s.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(4.0, rel=0.05)


def test_spikes_are_ten_times_the_mean_and_keep_it(rng):
    at_s = spikes(rng, 5.0, 6000.0)
    assert at_s.size / 6000.0 == pytest.approx(5.0, rel=0.05)
    in_spikes = np.count_nonzero(at_s % 60.0 >= 57.0)
    assert in_spikes / (100 * 3.0) == pytest.approx(50.0, rel=0.05)


def rows(*goods):
    return [Row(load, load, good, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5) for load, good in goods]


def test_the_share_is_of_the_best_load_and_beyond():
    assert least_share(rows((0.5, 1.0), (1.0, 4.0), (2.0, 3.0), (4.0, 3.5))) == (4.0, 0.75)


def test_admission_keeps_what_today_is_lost_far_beyond_capacity():
    requests = workload("spikes", 3 * capacity_rps(), 60.0)
    good = {
        name: row_of(run(ROUTERS[name], requests), 3.0).good_per_s
        for name in (ADMISSION, "most_empty_slots")
    }
    assert good[ADMISSION] > 5 * good["most_empty_slots"]
