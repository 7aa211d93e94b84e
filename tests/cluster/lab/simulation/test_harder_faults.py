"""Faults that leave something alive: what clients see, and how long they wait for it."""

from __future__ import annotations

import pytest

from cluster.config.schema import IngressConfig, RouterConfig
from cluster.lab.simulation.records import INGRESS_LOST, NO_INGRESS, OK
from cluster.lab.simulation.waits import wait_limits
from cluster.routing.leg import ANSWER_S
from kv_transfer.config import TransferConfig
from tests.cluster.lab.simulation.clusters import (
    LATENCY_S,
    events_by_kind,
    events_of,
    fault,
    outcomes,
    pool,
    requests,
    simulate,
)

STALL_S = 8.0
"""After so long the first turn of its kind is taken for a hang."""


def many(count=40, gap_s=0.1):
    return requests(*[(gap_s * i, 16, 8) for i in range(count)])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_hung_engine_costs_no_request(role):
    pools = [pool("prefill", 2), pool("decode", 2)]
    result = simulate(pools, many(), faults=[fault(0.5, f"{role}/0", "hang")], models_kv=True)
    assert outcomes(result) == [OK] * 40
    assert max(r.finished_s - r.arrival_s for r in result.records) < STALL_S + 2.0


def test_a_hung_engine_is_ended_and_replaced():
    faults = [fault(0.2, "both/0", "hang", 12.0)]
    result = simulate(
        pool(step_timeout_s=6.0), requests((0.0, 16, 60), (20.0, 16, 4)), faults=faults
    )
    assert outcomes(result) == [OK] * 2
    assert {r.replica for r in result.records} == {"both/0"}, "its stream went on there, too"
    assert len(result.replicas) == 2
    assert 6.0 < result.replicas[0].stopped_s < 9.0


def test_requests_to_a_deaf_engine_go_elsewhere_after_a_timeout():
    result = simulate(
        pool(replicas=2), requests((1.0, 16, 4)), faults=[fault(0.5, "both/0", "deaf")]
    )
    assert outcomes(result) == [OK]
    assert result.records[0].replica == "both/1"
    assert result.records[0].finished_s == pytest.approx(1.0 + ANSWER_S, abs=1.0)


def test_a_mute_engine_is_given_up():
    faults = [fault(0.25, "both/0", "mute", 8.0)]
    result = simulate(pool(), requests((0.0, 16, 60), (20.0, 16, 4)), faults=faults)
    assert outcomes(result) == [OK] * 2
    assert events_of(result, "lost")[0][0] == pytest.approx(5.25, abs=0.01)
    assert result.records[0].finished_s > 8.25, "its stream waited for it to come back"
    assert len(result.replicas) == 1, "the same start of it"


def test_messages_wait_before_a_full_inbox_in_order():
    faults = [fault(0.5, "both/0", "backpressure", 2.0)]
    result = simulate(pool(), requests((1.0, 16, 4), (1.1, 16, 4)), faults=faults)
    assert outcomes(result) == [OK, OK]
    first_s, second_s = (r.token_times_s[0] for r in result.records)
    assert 2.5 < first_s <= second_s < 3.0
    assert not events_of(result, "lost")


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_wrong_wall_clock_costs_time_and_no_request(shift_s):
    faults = [{**fault(0.5, "prefill/0", "clock", 2.0), "shift_s": shift_s}]
    pools = [pool("prefill"), pool("decode", 2)]
    result = simulate(pools, many(), faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 40


def test_equal_clock_errors_do_not_affect_kv_transfer():
    targets = ["prefill/0", "decode/0", "ingress/0"]
    faults = [{**fault(0.55, t, "clock", 60.0), "shift_s": -3600.0} for t in targets]
    result = simulate(
        [pool("prefill"), pool("decode")], many(20, 0.3), faults=faults, models_kv=True
    )
    assert outcomes(result) == [OK] * 20
    assert not [e for e in result.events if e.kind == "refuse" and e.detail[-1] == "invalid"]


def test_the_death_of_an_ingress_ends_only_its_requests():
    faults = [fault(1.0625, "ingress/0", "kill")]
    result = simulate(pool(replicas=4), many(), faults=faults, ingresses=2)
    assert set(outcomes(result)) == {OK, INGRESS_LOST}
    lost = [r for r in result.records if r.outcome == INGRESS_LOST]
    assert all(r.arrival_s <= r.finished_s == 1.0625 for r in lost)
    assert events_of(result, "start")[-1] == (4.0625, "ingress/2")


def test_without_an_ingress_requests_fail():
    faults = [fault(1.0, "ingress/0", "kill")]
    result = simulate(pool(), requests((2.0, 16, 4), (6.0, 16, 4)), faults=faults)
    assert outcomes(result) == [NO_INGRESS, OK]


def test_a_rolling_update_under_load_loses_no_request():
    faults = [fault(0.5 + i, f"both/{i}", "replace") for i in range(3)]
    result = simulate(pool(replicas=3), many(), faults=faults, restart_s=0.25)
    assert outcomes(result) == [OK] * 40
    assert events_by_kind(result.events)["start"] == 6
    assert all(r.stopped_s is not None for r in result.replicas[:3])


def test_streams_longer_than_the_drain_are_handed_over():
    drain_s = 1.0
    spec = pool(replicas=3)._replace(drain_timeout_s=drain_s)
    workload = requests(*[(0.01 * i, 16, 400) for i in range(4)])
    faults = [fault(0.5, "both/0", "replace")]
    result = simulate(spec, workload, faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 4
    assert min(r.finished_s for r in result.records) > 0.5 + drain_s, "they outlived it"
    assert result.replicas[0].stopped_s < 0.5 + drain_s, "with nothing left it need not wait"
    assert {r.replica for r in result.records} == {"both/1", "both/2"}


def test_an_engine_that_does_not_end_is_killed_after_its_timeout():
    faults = [fault(1.0, "both/0", "replace"), fault(0.0, "both/0", "ignore_sigterm")]
    result = simulate(pool(), requests((30.0, 16, 4)), faults=faults)
    assert outcomes(result) == [OK]
    assert result.replicas[0].stopped_s == pytest.approx(6.3, abs=0.3)


def test_wait_limits_follow_from_the_configuration():
    spec, transfer = pool(step_timeout_s=20.0), TransferConfig()
    waits = wait_limits(RouterConfig(queue_timeout_s=7.0, max_attempts=2), [spec])
    assert (waits.slot_s, waits.answer_s) == (7.0, 2 * ANSWER_S + 20.0 + 1.0)
    assert waits.hand_over_s == 20.0 + 1.0 + sum(
        (transfer.rendezvous_s, transfer.no_progress_s, transfer.no_data_s, transfer.closing_s)
    )
    assert waits.request_s == IngressConfig().request_timeout_s


def test_no_wait_limit_exceeds_the_request_timeout():
    waits = wait_limits(RouterConfig(queue_timeout_s=1e9), [pool(step_timeout_s=1e9)])
    assert set(waits) == {IngressConfig().request_timeout_s}


def test_an_answer_ends_the_wait():
    result = simulate(pool(), requests((0.0, 16, 4)))
    assert outcomes(result) == [OK]
    assert result.duration_s < 1.0 + LATENCY_S
