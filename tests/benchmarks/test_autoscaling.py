"""The autoscaling benchmark: arrivals have their documented rates, and rival policies are true."""

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from benchmarks.autoscaling import (
        CONFIG,
        LEAST,
        Oracle,
        Serve,
        bursts,
        load_cluster,
        pool_specs,
        ramp,
        workload,
    )
from cluster.lab.simulation.scaling import ClusterObservation
from cluster.routing.step_time import StepCosts
from cluster.routing.traffic import Traffic


@pytest.fixture
def rng():
    return np.random.Generator(np.random.Philox(1))


def test_a_day_rises_and_falls_and_bursts_are_four_times_as_many(rng):
    counts, _ = np.histogram(ramp(rng, 3600.0), 6, (0.0, 3600.0))
    assert counts.argmax() in (2, 3)
    assert counts[[0, 5]].max() < counts[2] / 3
    rates = np.histogram(bursts(rng, 36_000.0), 600, (0.0, 36_000.0))[0] / 60.0
    assert np.quantile(rates, 0.2) == pytest.approx(1.5, rel=0.2)
    assert np.quantile(rates, 0.95) == pytest.approx(6.0, rel=0.2)


def seen(now_s, traffic, prefill=2, decode=2):
    return ClusterObservation(
        now_s, {"i": traffic}, StepCosts(), {"prefill": prefill, "decode": decode}
    )


def test_serve_waits_for_its_delays_and_counts_each_pool_apart():
    policy, traffic = Serve({"prefill": 2.0, "decode": 40.0}), Traffic()
    for _ in range(12):
        traffic.come(100)
    decided = [dict(policy.decide(seen(10.0 * i, traffic))) for i in range(5)]
    assert decided[:3] == [{"prefill": 2, "decode": 2}] * 3
    assert decided[3]["prefill"] == 6
    assert all(counts["decode"] == 2 for counts in decided)


def test_an_oracle_starts_before_work_comes_and_keeps_nothing_for_it():
    pools = pool_specs(load_cluster(CONFIG))
    requests = workload("bursts", 900.0, 11)
    oracle = Oracle(pools, requests, 3.0, 1.0)
    counts = np.array([oracle.decide(seen(t, None))["prefill"] for t in range(0, 900, 10)])
    rates = np.histogram([r.arrival_s for r in requests.requests], 90, (0.0, 900.0))[0] / 10.0
    begins = np.flatnonzero(rates > 4.0)[0]
    assert counts[begins - 7] > LEAST
    assert counts[: begins - 12].max() < counts[begins - 7]
