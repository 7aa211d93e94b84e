"""Engines that change their roles under load: nobody notices but by where requests go."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from cluster.config.schema import OrderName
from cluster.lab.simulation.records import OK
from tests.cluster.lab.simulation.clusters import (
    BLOCK_SIZE,
    decode_turn_s,
    events_of,
    fault,
    outcomes,
    pool,
    prefill_turn_s,
    requests,
    simulate,
)

ORDERS = get_args(OrderName)


def cluster():
    return [pool("prefill", 2, num_blocks=129), pool("decode", 2, num_blocks=129, max_batch_size=8)]


def steady(count=60, gap_s=0.1, num_output_tokens=8):
    return requests(*[(gap_s * i, 64, num_output_tokens) for i in range(count)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_change_of_role_under_load_costs_no_request(role, order):
    faults = [fault(1.0, f"{role}/0", "flip")]
    router = {"order": order, "policy": "round_robin"}
    result = simulate(cluster(), steady(), faults=faults, router=router, models_kv=True)
    assert outcomes(result) == [OK] * 60
    flipped, start_s = f"{role}/0", 3.0
    decoded = [r.replica for r in result.records if r.arrival_s > start_s]
    prefilled = [r.prefill_replica for r in result.records if r.arrival_s > start_s]
    assert (flipped in decoded, flipped in prefilled) == (role == "prefill", role == "decode")
    assert len(result.replicas) == 4, "none was started again"


def test_long_streams_migrate_on_a_change_of_role_without_a_wrong_token():
    workload = requests(*[(0.01 * i, 64, 400) for i in range(8)], *[(8.0, 64, 8)] * 4)
    result = simulate(cluster(), workload, faults=[fault(2.0, "decode/0", "flip")], models_kv=True)
    assert outcomes(result) == [OK] * 12
    assert min(r.finished_s for r in result.records[:8]) > 6.0, "they outlast it"
    assert {r.replica for r in result.records} == {"decode/1"}
    assert "decode/0" in {r.prefill_replica for r in result.records[8:]}


@pytest.mark.parametrize("caching", [True, False])
def test_a_migrating_stream_pauses_only_for_the_kv_of_the_last_tokens(caching):
    pools = [
        pool("prefill", 1, num_blocks=129),
        pool("decode", 2, num_blocks=129, enable_prefix_caching=caching),
    ]
    faults = [fault(1.0, "decode/0", "flip")]
    result = simulate(pools, requests((0.0, 400, 100)), faults=faults, models_kv=True)
    [stream] = result.records
    assert (stream.outcome, stream.replica) == (OK, "decode/1")
    assert [subject for _, subject in events_of(result, "lend")] == ["r0"]
    gaps_s = [b - a for a, b in itertools.pairwise(stream.token_times_s)]
    # Less than a block, and a few tokens of the transfer's time; a step of either engine at most.
    most_s = prefill_turn_s(2 * BLOCK_SIZE) + 2 * decode_turn_s(500)
    assert max(gaps_s[1:]) < most_s < prefill_turn_s(400)


def test_without_room_elsewhere_the_role_changes_after_the_streams_end():
    pools = [pool("prefill", 1, num_blocks=129), pool("decode", 2)]
    workload = requests(
        *[(0.01 * i, 64, 200) for i in range(4)], *[(12.0 + i // 2, 64, 8) for i in range(4)]
    )
    result = simulate(pools, workload, faults=[fault(2.0, "decode/0", "flip")], models_kv=True)
    assert outcomes(result) == [OK] * 8
    assert len({r.replica for r in result.records[:4]}) == 2
    assert {r.replica for r in result.records[4:]} == {"decode/1"}
    assert "decode/0" in {r.prefill_replica for r in result.records[4:]}


def test_a_role_changes_there_and_back():
    faults = [fault(at_s, "decode/0", "flip") for at_s in (1.0, 3.0)]
    result = simulate(cluster(), steady(), faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 60
    late = {r.replica for r in result.records if r.arrival_s > 4.0}
    assert "decode/0" in late


def test_a_change_that_is_reverted_at_once_has_no_effect():
    faults = [fault(at_s, "decode/0", "flip") for at_s in (1.0, 1.001)]
    result = simulate(cluster(), steady(num_output_tokens=60), faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 60
    assert "decode/0" in {r.replica for r in result.records if r.arrival_s > 2.0}
    assert "decode/0" not in {r.prefill_replica for r in result.records}


@pytest.mark.parametrize("target", ["decode/0", "decode/1"])
def test_a_stream_stays_if_the_change_is_reverted(target):
    pools = [pool("prefill", 1, num_blocks=129), pool("decode", 2)]
    faults = [fault(at_s, target, "flip") for at_s in (2.0, 3.0)]
    streams = requests(*[(0.01 * i, 64, 200) for i in range(3)], (2.5, 64, 8))
    result = simulate(pools, streams, faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 4
    assert result.duration_s < 8.0, "the last one found room at once"


@pytest.mark.parametrize("target", ["prefill/0", "decode/0"])
def test_the_last_of_a_role_does_not_change(target):
    pools = [pool("prefill", 1, num_blocks=129), pool("decode", 1, max_batch_size=8)]
    result = simulate(pools, steady(), faults=[fault(1.0, target, "flip")], models_kv=True)
    assert outcomes(result) == [OK] * 60
    assert [name for _, name in events_of(result, "LastOfRoleError")] == [target]
    assert {r.replica for r in result.records} == {"decode/0"}


def test_every_role_is_exchanged_under_load():
    faults = [
        fault(at_s, target, "flip")
        for at_s, target in [
            (1.0, "prefill/0"),
            (2.0, "decode/0"),
            (3.0, "prefill/1"),
            (4.0, "decode/1"),
        ]
    ]
    result = simulate(cluster(), steady(80), faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 80
    late = [r for r in result.records if r.arrival_s > 5.5]
    assert {r.replica for r in late} <= {"prefill/0", "prefill/1"}
    assert {r.prefill_replica for r in late} <= {"decode/0", "decode/1"}


def test_each_ingress_learns_of_a_change_by_itself():
    result = simulate(
        cluster(), steady(), faults=[fault(1.0, "decode/0", "flip")], models_kv=True, ingresses=2
    )
    assert outcomes(result) == [OK] * 60
    assert "decode/0" not in {r.replica for r in result.records if r.arrival_s > 3.0}
