"""A summary gives the numbers that one gets by hand, and the same bytes for the same records."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.simulation.records import (
    ABORTED,
    NO_TIMES,
    OK,
    ReplicaRecord,
    RequestRecord,
    SimulationResult,
)
from cluster.lab.simulation.summary import (
    SLO_SCALES,
    Distribution,
    Slo,
    Summary,
    attainment_curve,
    distribution,
    nearest_rank,
    slo_ratios,
    summarise,
    to_json,
)


def record(arrival_s=0.0, times=(), outcome=OK, **fields):
    times = np.array(times, dtype=np.float64)
    values = {
        "request_id": "r",
        "arrival_s": arrival_s,
        "num_prompt_tokens": 10,
        "num_output_tokens_asked": max(1, times.size),
        "token_times_s": times,
        "outcome": outcome,
        "finished_s": times[-1] if times.size else arrival_s,
    }
    return RequestRecord(**(values | fields))


def result(records=(), replicas=(), duration_s=10.0, **fields):
    values = {"workload": "made up", "policy": "round_robin", "num_replicas": 2, "seed": 7}
    return SimulationResult(
        records=records, replicas=replicas, duration_s=duration_s, **(values | fields)
    )


TWO = (
    # TTFT 2, gaps 1 and 3, E2E 6.
    record(1.0, (3.0, 4.0, 7.0), num_cached_tokens=5, queued_s=0.5, transfer_s=0.25),
    # TTFT 1, no gap, E2E 1.
    record(2.0, (3.0,), num_prompt_tokens=30),
)
LOST = record(3.0, (5.0,), "ReplicaLostError", num_cached_tokens=9, num_retries=2)
GONE = record(5.0, (), ABORTED)


def test_latencies_by_hand():
    latencies = summarise(result(TWO)).latencies
    assert (latencies.ttft_s.count, latencies.ttft_s.mean, latencies.ttft_s.max) == (2, 1.5, 2.0)
    # (6 - 2) / 2 for the first; one token has no time per further token, and counts as 0.
    assert (latencies.tpot_s.count, latencies.tpot_s.mean, latencies.tpot_s.max) == (2, 1.0, 2.0)
    assert (latencies.itl_s.count, latencies.itl_s.mean, latencies.itl_s.p50) == (2, 2.0, 1.0)
    assert (latencies.e2e_s.mean, latencies.e2e_s.p50, latencies.e2e_s.max) == (3.5, 1.0, 6.0)
    assert (latencies.queued_s.mean, latencies.queued_s.max) == (0.25, 0.5)


def test_a_request_that_failed_has_no_latency_and_no_reuse():
    with_failures = summarise(result((*TWO, LOST, GONE)))
    without = summarise(result(TWO))
    assert with_failures.latencies == without.latencies
    assert with_failures.prefix == without.prefix
    assert with_failures.transfers == without.transfers


@pytest.mark.parametrize(
    ("num_gaps", "expected"),
    [(1, 1.0), (10, 10.0), (11, 10.5), (20, 19.5), (21, 20.0)],
)
def test_tbt_is_the_mean_of_the_longest_tenth_rounded_up(num_gaps, expected):
    gaps = np.random.default_rng(0).permutation(np.arange(1.0, num_gaps + 1))
    times = np.concatenate([[1.0], 1.0 + np.cumsum(gaps)])
    tbt = summarise(result((record(0.0, times), record(0.0, (1.0,))))).latencies.tbt_s
    assert (tbt.count, tbt.mean) == (1, expected)


def test_counts_and_rates():
    requests = summarise(result((*TWO, LOST, GONE))).requests
    assert (requests.num_sent, requests.num_ok, requests.success_rate) == (4, 2, 0.5)
    assert requests.failures == {"ReplicaLostError": 1, "aborted": 1}
    assert requests.num_retries == 2
    assert requests.offered_per_s == 3 / 4
    assert requests.completed_per_s == 0.2
    assert requests.output_tokens_per_s == 0.4


def test_reuse_is_a_share_of_tokens_not_of_requests():
    prefix = summarise(result(TWO)).prefix
    assert (prefix.num_prompt_tokens, prefix.num_cached_tokens, prefix.hit_share) == (40, 5, 0.125)


def test_transfer_share_is_of_the_requests_that_had_one():
    transfers = summarise(result(TWO)).transfers
    assert (transfers.seconds.count, transfers.total_s) == (1, 0.25)
    assert transfers.share_of_e2e == 0.25 / 6


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(ttft_s=2.0), 2),
        (Slo(ttft_s=1.999), 1),
        (Slo(tpot_s=2.0), 2),
        (Slo(tpot_s=1.5), 1),
        (Slo(e2e_s=5.0), 1),
        (Slo(ttft_s=0.5, e2e_s=100.0), 0),
        (Slo(ttft_s=2.0, tpot_s=1.0), 1),
    ],
)
def test_good_keeps_every_objective_and_failures_count_against_attainment(slo, num_good):
    goodput = summarise(result((*TWO, LOST, GONE)), slo).goodput
    assert goodput.num_good == num_good
    assert goodput.attainment == num_good / 4
    assert goodput.good_per_s == num_good / 10


def test_attainment_curve_and_the_scale_for_nine_in_ten():
    records = [record(0.0, (float(i),)) for i in range(1, 11)]
    slo = Slo(ttft_s=5.0)
    curve = attainment_curve(slo_ratios(records, slo), (0.1, 0.2, 1.0, 1.9, 2.0))
    assert curve.tolist() == [0.0, 0.1, 0.5, 0.9, 1.0]
    goodput = summarise(result(records), slo).goodput
    assert goodput.scale_at_90 == 9 / 5
    assert goodput.attainments[goodput.scales.index(1.0)] == goodput.attainment == 0.5
    # One of eleven failed: 10 of 11 are enough. Two of eleven: never nine in ten.
    assert summarise(result([*records, LOST]), slo).goodput.scale_at_90 == 2.0
    assert summarise(result([*records, LOST, GONE]), slo).goodput.scale_at_90 is None


def test_no_objective_no_goodput():
    assert summarise(result(TWO)).goodput is None
    assert summarise(result(TWO), Slo()).goodput is None
    with pytest.raises(ValueError, match="tpot_s must be more than 0, not 0"):
        Slo(tpot_s=0)
    with pytest.raises(ValueError, match="ttft_s must be more than 0, not nan"):
        Slo(ttft_s=math.nan)


REPLICAS = (
    ReplicaRecord(
        name="decode/0",
        role="decode",
        num_slots=4,
        busy_s=2.0,
        slot_busy_s=4.0,
        num_output_tokens=30,
        stopped_s=4.0,
        num_preemptions=1,
    ),
    # The same replica, back after a fault.
    ReplicaRecord(
        name="decode/0",
        role="decode",
        num_slots=4,
        busy_s=1.0,
        slot_busy_s=4.0,
        num_output_tokens=30,
        started_s=8.0,
    ),
    ReplicaRecord(name="decode/1", role="decode", num_slots=4, busy_s=5.0, num_output_tokens=20),
    ReplicaRecord(name="prefill/0", role="prefill", num_slots=0, busy_s=9.0, num_prompt_tokens=50),
)


def test_a_replica_is_busy_for_a_share_of_its_own_life():
    replicas = summarise(result(replicas=REPLICAS)).replicas
    assert [r.lived_s for r in replicas] == [4.0, 2.0, 10.0, 10.0]
    assert [r.utilisation for r in replicas] == [0.5, 0.5, 0.5, 0.9]
    assert [r.slot_occupancy for r in replicas] == [0.25, 0.5, 0.0, None]


def test_a_pool_adds_up_its_replicas_and_a_name_counts_once():
    decode, prefill = summarise(result(replicas=REPLICAS)).pools
    assert (decode.role, decode.num_replicas, decode.num_preemptions) == ("decode", 2, 1)
    assert (decode.utilisation, decode.slot_occupancy) == (8 / 16, 8 / 64)
    # 60 and 20 tokens: the largest is 1.5 times the mean.
    assert decode.imbalance == 1.5
    assert (prefill.role, prefill.utilisation, prefill.slot_occupancy) == ("prefill", 0.9, None)
    assert prefill.imbalance == 1.0


def test_a_run_without_requests_has_no_numbers_and_says_so_in_json():
    idle = ReplicaRecord(name="both/0", role="both", num_slots=1)
    summary = summarise(result(replicas=(idle,), duration_s=0.0), Slo(ttft_s=1.0))
    assert summary.latencies.ttft_s == Distribution(count=0)
    assert summary.requests.success_rate is None
    assert summary.requests.offered_per_s is None
    assert summary.goodput.attainment is None
    assert summary.goodput.attainments == ()
    assert summary.pools[0].utilisation is None
    assert summary.pools[0].imbalance is None
    assert msgspec.json.decode(to_json(summary), type=Summary) == summary


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 10), (90, 18), (95, 19), (99, 20)])
def test_nearest_rank(percent, expected):
    assert nearest_rank(np.arange(1.0, 21.0), percent) == expected


@pytest.mark.parametrize(
    ("count", "uncertain"),
    [
        (19, ("p50", "p90", "p95", "p99")),
        (20, ("p90", "p95", "p99")),
        (999, ("p99",)),
        (1000, ()),
    ],
)
def test_a_percentile_of_few_samples_is_given_and_marked(count, uncertain):
    d = distribution(np.arange(count, dtype=np.float64))
    assert d.uncertain == uncertain
    assert d.p99 == -(-99 * count // 100) - 1


def test_json_is_the_documented_form():
    summary = summarise(
        result((*TWO, LOST, GONE), REPLICAS, config={"b": 1, "a": "n150"}), Slo(ttft_s=1.5)
    )
    data = to_json(summary)
    assert data.endswith(b"}\n")
    read = json.loads(data)
    assert read["schema_version"] == 1
    assert list(read["config"]) == ["a", "b"]
    assert read["latencies"]["ttft_s"]["p50"] == 1.0
    assert read["goodput"]["slo"] == {"ttft_s": 1.5, "tpot_s": None, "e2e_s": None}
    assert read["replicas"][3]["slot_occupancy"] is None
    assert "wall_s" not in read


def test_json_does_not_depend_on_how_the_records_were_made():
    runs = [
        result((*TWO, LOST, GONE), REPLICAS, config=config, wall_s=wall_s)
        for config, wall_s in (({"b": 1, "a": 2}, 1.0), ({"a": 2, "b": 1}, 2.0))
    ]
    first, second = (to_json(summarise(run, Slo(e2e_s=3.0))) for run in runs)
    assert first == second


SECONDS = st.floats(0.0, 1e4)


@st.composite
def request_records(draw):
    arrival_s = draw(SECONDS)
    gaps = draw(st.lists(st.floats(0.0, 10.0), max_size=6))
    outcome = draw(st.sampled_from([OK, OK, ABORTED, "ReplicaLostError"]))
    return record(
        arrival_s,
        arrival_s + np.cumsum(gaps) if gaps else NO_TIMES,
        outcome,
        num_prompt_tokens=draw(st.integers(1, 50)),
        queued_s=draw(SECONDS),
        transfer_s=draw(st.none() | SECONDS),
    )


SLOS = st.builds(Slo, **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"), st.none() | st.floats(0.1, 9)))


@given(st.lists(SECONDS, min_size=1), st.randoms())
def test_percentiles_rise_are_samples_and_do_not_depend_on_order(values, random):
    d = distribution(np.array(values))
    numbers = [d.p50, d.p90, d.p95, d.p99, d.max]
    assert numbers == sorted(numbers)
    assert set(numbers) <= set(values)
    assert min(values) <= d.mean * (1 + 1e-12)
    assert d.mean <= max(values) * (1 + 1e-12)
    for percent, value in zip((50, 90, 95, 99), numbers, strict=False):
        assert sum(v <= value for v in values) * 100 >= percent * len(values)
        assert sum(v < value for v in values) * 100 < percent * len(values)
    random.shuffle(values)
    assert distribution(np.array(values)) == d


@given(st.lists(request_records(), max_size=12), SLOS, st.sampled_from([0.0, 3.0]))
def test_attainment_is_at_most_success_and_json_round_trips(records, slo, duration_s):
    summary = summarise(result(records, REPLICAS, duration_s), slo)
    assert msgspec.json.decode(to_json(summary), type=Summary) == summary
    assert b"NaN" not in to_json(summary)
    if summary.goodput is None or not records:
        return
    assert summary.goodput.attainment <= summary.requests.success_rate
    curve = summary.goodput.attainments
    assert list(curve) == sorted(curve)
    assert curve[SLO_SCALES.index(1.0)] == summary.goodput.attainment
    assert all(share <= summary.requests.success_rate for share in curve)


@given(st.lists(request_records(), max_size=12), SLOS)
def test_good_requests_match_the_definition(records, slo):
    """Attainment goes over ratios; the definition compares each latency with its bound."""

    def is_good(r):
        times = r.token_times_s
        if r.outcome != OK or not times.size:
            return False
        ttft_s, e2e_s = times[0] - r.arrival_s, times[-1] - r.arrival_s
        tpot_s = (e2e_s - ttft_s) / (times.size - 1) if times.size > 1 else 0.0
        bounds = ((ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s), (e2e_s, slo.e2e_s))
        return all(bound is None or latency <= bound for latency, bound in bounds)

    goodput = summarise(result(records), slo).goodput
    if goodput is not None:
        assert goodput.num_good == sum(map(is_good, records))
