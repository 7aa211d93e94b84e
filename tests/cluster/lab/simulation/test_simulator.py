"""Whole simulated clusters: times that can be told in advance, and what becomes of each request."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest

from cluster.config.schema import OrderName
from cluster.lab.simulation.client import NOTICE_S
from cluster.lab.simulation.records import ABORTED, OK
from cluster.lab.workloads.request import TraceRequest, Workload
from cluster.routing.fleet import DESCRIBE_TIMEOUT_S, DISCOVERY_S
from kv_transfer.config import TransferConfig
from replicas import dealer
from replicas.config import SimulatedMeshConfig
from replicas.dealer import SILENCE_S
from replicas.engine_process import sockets
from replicas.engine_process.server import GATHER_S
from tests.cluster.lab.simulation.clusters import (
    BLOCK_SIZE,
    BYTES_PER_TOKEN,
    HOST_ROW_S,
    HOST_S,
    KV_BYTES_PER_S,
    LATENCY_S,
    LINK,
    PREFILL_TOKEN_S,
    RoundTiming,
    decode_turn_s,
    events_by_kind,
    events_of,
    fault,
    outcomes,
    pool,
    prefill_turn_s,
    requests,
    simulate,
    simulation,
    turn_s,
)

AHEAD = pytest.mark.parametrize("run_ahead", [True, False], ids=["ahead", "stepwise"])


def token_times(first_s, turns_s):
    """Times of tokens of which the first is there at `first_s`."""
    return list(itertools.accumulate(turns_s, initial=first_s))


def times(result, i):
    return result.records[i].token_times_s.tolist()


# --- one replica ----------------------------------------------------------------------------------


@AHEAD
@pytest.mark.parametrize("models_kv", [True, False], ids=["kv", "no kv"])
@pytest.mark.parametrize("arrival_s", [0.0, 1.25])
def test_a_request_on_an_idle_replica_takes_its_steps_and_two_journeys(
    run_ahead, models_kv, arrival_s
):
    options = {"run_ahead": run_ahead, "models_kv": models_kv}
    result = simulate(pool(), requests((arrival_s, 40, 30)), **options)
    [record] = result.records
    first_s = arrival_s + 2 * LATENCY_S + prefill_turn_s(40)
    expected = token_times(first_s, [decode_turn_s(40 + i) for i in range(1, 30)])
    assert record.token_times_s.tolist() == expected
    assert (record.outcome, record.replica, record.prefill_replica) == (OK, "both/0", None)
    assert (record.arrival_s, record.finished_s) == (arrival_s, expected[-1])
    assert (record.queued_s, record.num_retries, record.transfer_s) == (0.0, 0, None)
    [replica] = result.replicas
    assert replica.num_steps == 30
    assert replica.busy_s == pytest.approx(expected[-1] - arrival_s - 2 * LATENCY_S, rel=1e-12)
    assert (replica.num_prompt_tokens, replica.num_output_tokens) == (40, 30)
    assert result.duration_s == expected[-1]


def test_a_prompt_in_chunks_takes_a_step_for_each():
    engine = pool(max_num_batched_tokens=16)
    result = simulate(engine, requests((0.0, 40, 1)))
    steps_s = prefill_turn_s(16) + prefill_turn_s(16) + prefill_turn_s(8)
    assert times(result, 0) == [2 * LATENCY_S + steps_s]


@AHEAD
def test_two_staggered_requests_share_the_steps(run_ahead):
    """The second one comes in the middle of a step and waits for its end."""
    p, q = prefill_turn_s(32), prefill_turn_s(48)
    arrival_s = 0.5 * p
    result = simulate(pool(), requests((0.0, 32, 3), (arrival_s, 48, 3)), run_ahead=run_ahead)
    first_s = 2 * LATENCY_S + p
    # Where one step is all prefill or all decode, a waiting prompt and a waiting token take turns.
    second_s = first_s + decode_turn_s(33) + q
    both_s = decode_turn_s(34, 49)
    assert times(result, 0) == [first_s, first_s + decode_turn_s(33), second_s + both_s]
    assert times(result, 1) == [second_s, second_s + both_s, second_s + both_s + decode_turn_s(50)]


@AHEAD
def test_of_two_simultaneous_requests_the_second_waits_for_the_firsts_step(run_ahead):
    """Messages come one by one; the core begins with the first that it has."""
    result = simulate(pool(), requests((0.0, 32, 2), (0.0, 32, 2)), run_ahead=run_ahead)
    p = prefill_turn_s(32)
    first_s = 2 * LATENCY_S + p
    assert times(result, 0) == [first_s, first_s + decode_turn_s(33)]
    second_s = first_s + decode_turn_s(33) + p
    assert times(result, 1) == [second_s, second_s + decode_turn_s(33)]


def test_three_requests_that_arrive_during_a_step_are_prefilled_together():
    engine = pool(max_batch_size=4)
    rows = [(0.0, 64, 1), *[(0.001 * i, 16 * i, 1) for i in (1, 2, 3)]]
    result = simulate(engine, requests(*rows))
    done_s = 2 * LATENCY_S + prefill_turn_s(64) + prefill_turn_s(16, 32, 48)
    assert [times(result, i) for i in (1, 2, 3)] == [[done_s]] * 3


@AHEAD
def test_a_request_without_a_slot_waits_for_the_snapshot_that_shows_one(run_ahead):
    engine = pool(max_batch_size=1)
    workload = requests((0.0, 32, 5), (0.0, 16, 2), (0.0, 48, 1))
    result = simulate(engine, workload, run_ahead=run_ahead)
    end_s = token_times(
        2 * LATENCY_S + prefill_turn_s(32), [decode_turn_s(32 + i) for i in range(1, 5)]
    )
    assert times(result, 0) == end_s
    first_s = end_s[-1] + 2 * LATENCY_S + prefill_turn_s(16)
    assert times(result, 1) == [first_s, first_s + decode_turn_s(17)]
    assert result.records[1].queued_s == end_s[-1]
    assert times(result, 2) == [times(result, 1)[-1] + 2 * LATENCY_S + prefill_turn_s(48)]
    assert [r.num_retries for r in result.records] == [0, 0, 0]


def test_lanes_prefill_side_by_side():
    engine = pool(max_batch_size=4, tt_data_parallel=2)
    result = simulate(engine, requests((0.0, 64, 1), (0.005, 96, 1), (0.005, 48, 1)))
    done_s = 2 * LATENCY_S + GATHER_S + prefill_turn_s(64) + turn_s(96 * PREFILL_TOKEN_S, 2)
    assert [times(result, i) for i in (1, 2)] == [[pytest.approx(done_s)]] * 2


def test_idle_lanes_wait_for_requests_that_arrive_with_the_first():
    engine = pool(max_batch_size=4, tt_data_parallel=2)
    result = simulate(engine, requests((0.0, 64, 1), (0.001, 96, 1)))
    done_s = 2 * LATENCY_S + GATHER_S + turn_s(96 * PREFILL_TOKEN_S, 2)
    assert [times(result, i) for i in (0, 1)] == [[pytest.approx(done_s)]] * 2


def test_a_cached_prefix_is_not_computed_again():
    row = (80, 1, (0, 1, 2))
    workload = Workload("w", (TraceRequest(0.0, *row), TraceRequest(1.0, *row)), BLOCK_SIZE)
    result = simulate(pool(), workload, models_kv=True)
    assert [r.num_cached_tokens for r in result.records] == [0, 64]
    assert times(result, 1) == [1.0 + 2 * LATENCY_S + prefill_turn_s(16)]
    assert result.replicas[0].num_prompt_tokens == 80 + 16


def test_preempted_requests_are_computed_again_and_end():
    engine = pool(max_batch_size=4, num_blocks=6, max_model_len=128, enable_prefix_caching=False)
    workload = requests(*[(0.0, 24, 40)] * 4)
    result = simulate(engine, workload, models_kv=True)
    assert outcomes(result) == [OK] * 4
    assert result.replicas[0].num_preemptions > 0
    assert all(len(times(result, i)) == 40 for i in range(4))


def test_a_prompt_that_is_too_long_fails_alone():
    workload = requests((0.0, 512, 1), (0.0, 511, 1), (0.0, 600, 5), (0.0, 20, 2))
    result = simulate(pool(max_batch_size=8), workload)
    assert outcomes(result) == ["BadRequestError", OK, "BadRequestError", OK]
    assert [len(times(result, i)) for i in range(4)] == [0, 1, 0, 2]
    assert result.records[0].finished_s == 0.0


def test_output_ends_where_the_model_does():
    [record] = simulate(pool(), requests((0.0, 500, 100))).records
    assert (record.outcome, len(record.token_times_s)) == (OK, 12)


@AHEAD
def test_a_client_that_leaves_frees_its_slot_at_the_end_of_the_step(run_ahead):
    left_s = 0.125
    engine = pool(max_batch_size=1)
    result = simulate(
        engine, requests((0.0, 32, 400), (0.0, 16, 1)), aborts={0: left_s}, run_ahead=run_ahead
    )
    gone, other = result.records
    assert (gone.outcome, gone.finished_s) == (ABORTED, left_s)
    steps = [decode_turn_s(32 + i) for i in range(1, 20)]
    ends_s = token_times(LATENCY_S + prefill_turn_s(32), steps)
    heard_s = next(end_s for end_s in ends_s if end_s > left_s + LATENCY_S)
    # A step of nothing follows, and says that a slot is free.
    assert other.token_times_s.tolist() == [heard_s + 3 * LATENCY_S + prefill_turn_s(16)]
    assert other.outcome == OK
    # Its client had what had arrived: with a run under way, what was sent before it.
    seen = [end_s + LATENCY_S for end_s in ends_s if end_s + LATENCY_S <= left_s]
    if not run_ahead:
        assert gone.token_times_s.tolist() == seen


def test_a_client_that_leaves_before_its_request_has_a_slot_leaves_the_queue():
    workload = requests((0.0, 32, 20), (0.0, 16, 1), (0.0, 16, 1))
    result = simulate(pool(max_batch_size=1), workload, aborts={1: 0.0625})
    assert outcomes(result) == [OK, ABORTED, OK]
    assert (times(result, 1), result.records[1].replica) == ([], None)


# --- several replicas -----------------------------------------------------------------------------


def test_round_robin_takes_turns():
    workload = requests(*[(0.0, 16, 4)] * 6)
    result = simulate(pool(replicas=3), workload, router={"policy": "round_robin"})
    assert [r.replica for r in result.records] == [f"both/{i % 3}" for i in range(6)]
    assert result.policy == "round_robin"


def test_the_emptiest_replica_is_taken():
    workload = requests(*[(0.25 * i, 16, n) for i, n in enumerate((60, 4, 60, 4))])
    result = simulate(pool(replicas=2), workload)
    # The second has ended when the third comes. The fourth finds a request everywhere, and more
    # free blocks where the younger one is.
    assert [r.replica for r in result.records] == ["both/0", "both/1", "both/1", "both/1"]


def test_two_ingresses_learn_of_each_others_load_from_snapshots():
    workload = requests((0.0, 16, 60), (0.5, 16, 4), (0.5, 16, 4))
    result = simulate(pool(replicas=3, max_batch_size=1), workload, ingresses=2)
    assert [r.replica for r in result.records] == ["both/0", "both/1", "both/2"]
    assert [r.num_retries for r in result.records] == [0, 0, 1], "the last two chose alike"
    assert [s for _, s in events_of(result, "refuse")] == ["r2"]


def test_two_ingresses_that_choose_the_same_slot_at_once():
    result = simulate(
        pool(replicas=2, max_batch_size=1), requests((0.0, 32, 4), (0.0, 32, 4)), ingresses=2
    )
    assert [r.replica for r in result.records] == ["both/0", "both/1"]
    assert [r.num_retries for r in result.records] == [0, 1]
    # The core was at work: it takes the message when its step is over, and answers after the next.
    refused_s = 2 * LATENCY_S + prefill_turn_s(32) + decode_turn_s(33)
    assert times(result, 1)[0] == refused_s + 2 * LATENCY_S + prefill_turn_s(32)


# --- prefill and decode apart ---------------------------------------------------------------------


def disaggregated(prefill=1, decode=1, **both):
    return [pool("prefill", prefill, **both), pool("decode", decode, **both)]


def num_blocks(num_tokens):
    return -(-num_tokens // BLOCK_SIZE)


def moved_s(num_tokens):
    """Out of one engine, over the wire, into the other."""
    num_bytes = num_blocks(num_tokens) * BLOCK_SIZE * BYTES_PER_TOKEN
    wire_s = (num_bytes + 200) / KV_BYTES_PER_S + LATENCY_S
    return LINK.transfer_s(num_bytes), wire_s


@pytest.mark.parametrize("models_kv", [True, False], ids=["kv", "no kv"])
def test_the_first_token_comes_from_prefill_and_the_others_when_the_kv_has_moved(models_kv):
    result = simulate(disaggregated(), requests((0.0, 40, 6)), models_kv=models_kv)
    [record] = result.records
    assert (record.replica, record.prefill_replica) == ("decode/0", "prefill/0")
    # The prompt, while the slot is reserved; its KV is read in the same step, after the token has
    # gone out, because the decode engine has asked for it meanwhile.
    link_s, wire_s = moved_s(40)
    computed_s = LATENCY_S + prefill_turn_s(40)
    first_s = computed_s + LATENCY_S
    loaded_s = computed_s + link_s + wire_s + link_s + HOST_S
    turns = [decode_turn_s(40 + i) for i in range(1, 6)]
    expected = token_times(loaded_s + LATENCY_S, turns)
    expected[0] = first_s
    assert record.token_times_s.tolist() == pytest.approx(expected, abs=1e-12)
    # Each engine's own share: a step that only moves KV has no rows.
    prefill, decode = result.replicas
    assert prefill.busy_s >= prefill_turn_s(40) + link_s - 1e-12
    assert decode.busy_s >= turn_s(link_s, 0) + sum(turns) - 1e-12
    # From the first token, until the decode engine has said that the KV is in place.
    assert record.transfer_s == pytest.approx(loaded_s + LATENCY_S - first_s, abs=1e-12)
    assert events_by_kind(result.events)["kv_loaded"] == 1


def test_kv_moves_while_the_prompt_is_still_computed():
    """In chunks, less is left to move when the first token is there."""
    gaps = []
    for budget in (512, 128):
        prefill = pool("prefill", max_num_batched_tokens=budget)
        result = simulate([prefill, pool("decode")], requests((0.0, 500, 3)), models_kv=True)
        assert outcomes(result) == [OK]
        first_s, second_s, _ = times(result, 0)
        gaps.append(second_s - first_s)
    link_s, wire_s = moved_s(500)
    assert gaps[0] > link_s + wire_s + link_s
    assert gaps[1] < gaps[0] - 0.5 * link_s


def test_a_request_of_one_token_needs_no_decode():
    result = simulate(disaggregated(), requests((0.0, 40, 1)))
    assert times(result, 0) == pytest.approx([2 * LATENCY_S + prefill_turn_s(40)])
    assert result.replicas[1].num_output_tokens == 0


def test_a_short_prompt_stays_where_it_is_decoded():
    options = {"router": {"min_remote_prefill_tokens": 41}}
    result = simulate(disaggregated(), requests((0.0, 40, 3)), **options)
    [record] = result.records
    assert (record.replica, record.prefill_replica) == ("decode/0", None)
    assert record.token_times_s[0] == 2 * LATENCY_S + prefill_turn_s(40)


@pytest.mark.parametrize("order", get_args(OrderName))
def test_an_idle_decode_replica_computes_prompts_that_would_wait_elsewhere(order):
    burst = [(10.0, 40 + i, 3) for i in range(8)]
    workload = requests(*[(float(i), 40 + i, 3) for i in range(5)], *burst)
    router = {"order": order, "min_remote_prefill_tokens": None}
    result = simulate(disaggregated(), workload, router=router, models_kv=True)
    assert outcomes(result) == [OK] * 13
    alone, here, away = [
        {record.prefill_replica for record in result.records[:5]},
        {r.prefill_replica for r in result.records[5:]} & {None},
        {r.prefill_replica for r in result.records[5:]} & {"prefill/0"},
    ]
    assert alone == {"prefill/0"}, "nobody was in the way"
    assert here, "some of the burst had it sooner on the decode replica"
    assert away, "and some on the other"


def test_many_on_two_and_two():
    workload = requests(*[(0.004 * i, 30 + 7 * i % 60, 5 + i % 9) for i in range(24)])
    result = simulate(disaggregated(2, 2), workload, models_kv=True, ingresses=2)
    assert outcomes(result) == [OK] * 24
    assert {r.prefill_replica for r in result.records} == {"prefill/0", "prefill/1"}
    assert {r.replica for r in result.records} == {"decode/0", "decode/1"}
    for record, asked in zip(result.records, workload.requests, strict=True):
        assert len(record.token_times_s) == asked.num_output_tokens
        assert (np.diff(record.token_times_s) > 0).all()


def test_kv_that_is_damaged_lost_or_repeated_is_never_decoded_from():
    """With checks, every token is compared with the right one."""
    workload = requests(*[(0.125 * i, 30 + 9 * i, 6) for i in range(12)])
    transfer = TransferConfig(chunk_bytes=1, window_bytes=1000)
    result = simulate(
        [spec._replace(transfer=transfer) for spec in disaggregated(1, 2)],
        workload,
        models_kv=True,
        network={"kv_loss": 0.1, "kv_repetition": 0.2, "kv_jitter_s": 0.01},
        faults=[fault(0.0, "prefill/0", "corrupt", 0.5)],
    )
    assert outcomes(result) == [OK] * 12
    failed = [e for e in result.events if e.kind == "kv_loaded" and e.detail[1] != "ok"]
    assert failed, "nothing went wrong"


# --- trouble --------------------------------------------------------------------------------------


def test_a_stream_of_the_only_replica_continues_on_its_successor():
    killed_s, restart_s = 0.5, 3.0
    kill = fault(killed_s, "both/0", "kill")
    result = simulate(pool(), requests((0.0, 16, 100)), faults=[kill], restart_s=restart_s)
    assert outcomes(result) == [OK]
    heard = times(result, 0)
    assert 0 < sum(t <= killed_s + LATENCY_S for t in heard) < 100
    assert not any(killed_s + LATENCY_S < t <= killed_s + restart_s for t in heard)


def test_requests_of_a_killed_replica_fail_if_no_other_starts_in_time():
    killed_s, timeout_s = 0.5, 2.0
    result = simulate(
        pool(), requests((0.0, 16, 100)), faults=[fault(killed_s, "both/0", "kill")],
        restart_s=3.0, router={"queue_timeout_s": timeout_s},
    )  # fmt: skip
    assert outcomes(result) == ["ReplicaLostError"]
    lost = result.records[0]
    assert lost.finished_s == killed_s + LATENCY_S + timeout_s
    assert 0 < len(lost.token_times_s) < 100


def test_the_requests_of_a_killed_replica_migrate_and_it_has_a_successor():
    warm_up_s, restart_s, killed_s = 2.0, 3.0, 0.5
    engine = pool(replicas=2, timing=RoundTiming(warm_up_s))
    workload = requests((0.0, 16, 100), (0.0, 16, 100), (7.0, 16, 100), (7.0, 16, 100))
    result = simulate(
        engine, workload, faults=[fault(killed_s, "both/0", "kill")], restart_s=restart_s
    )
    assert outcomes(result) == [OK] * 4
    times_s = result.records[0].token_times_s
    assert times_s[0] < killed_s < times_s[-1]
    assert len(times_s) == 100
    gap_s = max(later - earlier for earlier, later in itertools.pairwise(times_s))
    # A step that was under way is done again, with the prompt and all tokens before it.
    assert gap_s < 4 * LATENCY_S + 2 * decode_turn_s(200) + prefill_turn_s(16 + len(times_s))
    assert {r.replica for r in result.records[2:]} == {"both/0", "both/1"}
    dead, _, successor = result.replicas
    assert (dead.name, dead.stopped_s, successor.name) == ("both/0", killed_s, "both/0")
    assert (successor.started_s, successor.stopped_s) == (killed_s + restart_s + warm_up_s, None)
    assert successor.num_output_tokens == 100


def test_a_request_without_a_token_goes_to_another_replica():
    """Killed while it computed a prompt: nobody has seen anything of it yet."""
    result = simulate(
        pool(replicas=2), requests((0.0, 400, 3)), faults=[fault(0.0625, "both/0", "kill")]
    )
    [record] = result.records
    assert (record.outcome, record.replica, record.num_retries) == (OK, "both/1", 1)
    assert record.token_times_s[0] == 0.0625 + 3 * LATENCY_S + prefill_turn_s(400)


PREFILL_FIRST = {"order": "prefill_first"}


def kv_loads(result):
    """How each transfer ended."""
    return [event.detail[-1] for event in result.events if event.kind == "kv_loaded"]


def test_prefill_first_gives_the_first_token_without_a_journey_to_the_decode_replica():
    result = simulate(disaggregated(), requests((0.0, 40, 6)), router=PREFILL_FIRST, models_kv=True)
    [record] = result.records
    assert (record.replica, record.prefill_replica) == ("decode/0", "prefill/0")
    computed_s = LATENCY_S + prefill_turn_s(40)
    assert record.token_times_s[0] == pytest.approx(computed_s + LATENCY_S, abs=1e-12)
    # Then there are the reservation and its answer, LOAD and ACTIVATE, and the fetch.
    link_s, wire_s = moved_s(40)
    fetched_s = computed_s + 5 * LATENCY_S + HOST_S
    assert record.token_times_s[1] > fetched_s + link_s + wire_s + link_s
    assert kv_loads(result) == ["ok"]
    assert record.outcome == OK


@pytest.mark.parametrize("order", get_args(OrderName))
def test_first_tokens_wait_for_a_slot_in_one_order_only(order):
    """Two slots, and four long answers."""
    result = simulate(
        disaggregated(), requests(*[(0.0, 40, 100)] * 4), router={"order": order}, models_kv=True
    )
    assert outcomes(result) == [OK] * 4
    firsts = sorted(record.token_times_s[0] for record in result.records)
    until_free_s = min(record.finished_s for record in result.records)
    assert (firsts[2] > until_free_s) == (order == "decode_first")
    assert kv_loads(result) == ["ok"] * 4, "nothing was computed twice"


def test_kv_that_waits_for_too_long_is_given_back_and_the_prompt_computed_again():
    transfer = TransferConfig(rendezvous_s=0.25)
    prefill, decode = (spec._replace(transfer=transfer) for spec in disaggregated())
    run = simulation(
        [prefill, decode], requests(*[(0.0, 40, 60)] * 3), router=PREFILL_FIRST, models_kv=True
    )
    result = run.run()
    assert outcomes(result) == [OK] * 3
    assert sorted(kv_loads(result)) == ["expired", "ok", "ok"]
    assert run.replicas.hosts[1].engine.metrics(0.0).kv_recompute_tokens == 40


def test_killed_decode_replica_costs_the_kv_that_it_fetched_and_no_request():
    """It dies with the KV in it: another one computes the prompt, and the client sees no error."""
    clean = simulate(
        disaggregated(1, 2), requests((0.0, 40, 6)), router=PREFILL_FIRST, models_kv=True
    )
    [loaded_s] = [at_s for at_s, _ in events_of(clean, "kv_loaded")]
    faults = [fault(loaded_s - LATENCY_S, "decode/0", "kill")]
    result = simulate(
        disaggregated(1, 2),
        requests((0.0, 40, 6)),
        router=PREFILL_FIRST,
        models_kv=True,
        faults=faults,
    )
    [record] = result.records
    assert (record.outcome, record.replica) == (OK, "decode/1")
    assert len(record.token_times_s) == 6


def test_a_request_without_a_token_fails_when_there_is_no_other_replica():
    result = simulate(pool(), requests((0.0, 400, 3)), faults=[fault(0.0625, "both/0", "kill")])
    assert outcomes(result) == ["NotReadyError"]


def test_a_killed_prefill_replica_costs_another_prefill():
    faults = [fault(0.0625, "prefill/0", "kill")]
    result = simulate(disaggregated(2, 1), requests((0.0, 400, 3)), faults=faults, models_kv=True)
    [record] = result.records
    assert (record.outcome, record.prefill_replica) == (OK, "prefill/1")
    again_s = 0.0625 + LATENCY_S
    first_s = again_s + 2 * LATENCY_S + prefill_turn_s(400)
    assert record.token_times_s[0] == pytest.approx(first_s, abs=1e-12)


def test_the_last_prefill_replica_killed_leaves_the_prompt_to_the_decode_replica():
    faults = [fault(0.0625, "prefill/0", "kill")]
    result = simulate(disaggregated(), requests((0.0, 400, 3)), faults=faults, models_kv=True)
    assert outcomes(result) == [OK]
    assert result.replicas[1].num_prompt_tokens == 400


def test_a_replica_continues_after_a_freeze_of_two_seconds():
    at_s, back_s = 0.25, 2.25
    result = simulate(
        pool(), requests((0.0, 16, 60)), faults=[fault(at_s, "both/0", "freeze", 2.0)]
    )
    assert (outcomes(result), events_of(result, "lost")) == ([OK], [])
    turns = [decode_turn_s(16 + i) for i in range(1, 60)]
    expected = token_times(2 * LATENCY_S + prefill_turn_s(16), turns)
    # The step that was under way is over when the process goes on.
    num_before = sum(t < at_s + LATENCY_S for t in expected)
    expected[num_before:] = token_times(back_s + LATENCY_S, turns[num_before:])
    assert times(result, 0) == expected
    assert len(result.replicas) == 1


def test_a_replica_reconnects_after_a_partition_of_two_seconds():
    """What it sent meanwhile is lost, and its clients notice that when they hear of it again.

    Whoever asked it meanwhile what it is waits for that answer before it asks again, and requests
    wait for what it finds.
    """
    at_s, back_s = 0.25, 2.25
    faults = [fault(at_s, "both/0", "partition", 2.0)]
    workload = requests((0.0, 16, 160), (1.0, 16, 4), (back_s + DESCRIBE_TIMEOUT_S, 16, 4))
    result = simulate(pool(), workload, faults=faults)
    assert outcomes(result) == [OK, OK, OK]
    assert back_s < result.records[1].token_times_s[0] < back_s + DESCRIBE_TIMEOUT_S
    assert not any(at_s + LATENCY_S <= t <= back_s for t in times(result, 0))
    assert events_of(result, "lost") == [(back_s, "ingress/0")]
    assert len(result.replicas) == 1, "the same start of it"


@pytest.mark.parametrize("kind", ["freeze", "partition"])
def test_a_replica_is_found_again_after_ten_silent_seconds(kind):
    at_s, duration_s = 0.25, 10.0
    lost_s, back_s = at_s + SILENCE_S, at_s + duration_s
    workload = requests(
        (0.0, 16, 60), (1.0, 16, 4), (6.0, 16, 4), (9.0, 16, 4), (back_s + 2 * DISCOVERY_S, 16, 4)
    )
    result = simulate(pool(), workload, faults=[fault(at_s, "both/0", kind, duration_s)])
    if kind == "freeze":  # its actor says that it is there, so that it is waited for
        assert outcomes(result) == [OK] * 5
    else:  # nobody says so
        assert outcomes(result) == [OK, *["NotReadyError"] * 3, OK]
        asked_s = lost_s + DESCRIBE_TIMEOUT_S
        assert [r.finished_s for r in result.records[1:4]] == [asked_s, asked_s, 9.0]
    assert result.records[0].finished_s > back_s, "who has tokens waits for it to come back"
    assert events_of(result, "lost") == [(lost_s, "ingress/0")]
    assert len(result.replicas) == 1, "the same start of it"


def test_no_prompt_is_computed_while_decode_replicas_are_missing():
    """Its client would have a first token, and then nothing, of nobody."""
    faults = [fault(0.25, "decode/0", "freeze", 60.0)]
    workload = requests((0.25 + SILENCE_S + 1.0, 16, 4))
    result = simulate(disaggregated(1, 1), workload, faults=faults)
    assert outcomes(result) == ["NotReadyError"]
    assert not len(result.records[0].token_times_s)
    assert not any(event.kind == "place" for event in result.events)


@pytest.mark.parametrize("kind", ["freeze", "partition"])
def test_another_replica_runs_requests_that_a_silent_one_had_not_begun(kind):
    workload = requests((0.5, 16, 4), (0.5, 16, 4))
    result = simulate(pool(replicas=2), workload, faults=[fault(0.25, "both/0", kind)])
    assert outcomes(result) == [OK, OK]
    assert [r.replica for r in result.records] == ["both/1", "both/1"]
    assert [r.num_retries for r in result.records] == [1, 0]
    assert times(result, 0)[0] == 0.25 + SILENCE_S + 2 * LATENCY_S + prefill_turn_s(16)


def test_a_broken_kv_link_costs_no_request():
    workload = requests(*[(0.03 * i, 200, 6) for i in range(10)])
    faults = [fault(0.1, "prefill/0", "drop_link"), fault(0.2, "decode/0", "drop_link")]
    result = simulate(disaggregated(1, 2), workload, faults=faults, models_kv=True)
    assert outcomes(result) == [OK] * 10
    assert events_by_kind(result.events)["drop_link"] == 2


def test_a_replica_is_slow_for_the_planned_time():
    faults = [{**fault(0.0, "both/0", "slow", 1.0), "factor": 4.0}]
    result = simulate(pool(), requests((0.0, 64, 1), (1.0, 64, 1)), faults=faults)
    slow_s = 4 * 64 * PREFILL_TOKEN_S + HOST_S + HOST_ROW_S
    assert times(result, 0) == [2 * LATENCY_S + slow_s]
    assert times(result, 1) == [1.0 + 2 * LATENCY_S + prefill_turn_s(64)]


def test_a_plan_of_faults_turns_off_running_ahead():
    """A device whose faults change decides each step anew."""
    faults = [{**fault(0.5, "both/0", "slow", 100.0), "factor": 2.0}]
    results = [
        simulate(pool(), requests((0.0, 16, 80)), faults=faults, run_ahead=ahead)
        for ahead in (True, False)
    ]
    assert times(results[0], 0) == times(results[1], 0)
    gaps = np.diff(times(results[0], 0))
    assert gaps[-1] > 1.5 * gaps[0]


# --- size -----------------------------------------------------------------------------------------


def test_two_hundred_replicas():
    rows = [(0.005 * i, 16 + i % 50, 4 + i % 7) for i in range(400)]
    result = simulate(
        pool(replicas=200, max_batch_size=4), requests(*rows),
        checks=False, keeps_events=False, router={"policy": "round_robin"},
    )  # fmt: skip
    assert outcomes(result) == [OK] * 400
    assert {r.replica for r in result.records} == {f"both/{i}" for i in range(200)}
    assert (len(result.replicas), result.num_replicas, result.events) == (200, 200, [])
    assert sum(r.num_output_tokens for r in result.replicas) == sum(n for *_, n in rows)


def test_progress_has_time_requests_and_events():
    told = []
    one = simulation(pool(max_batch_size=200), requests(*[(0.01 * i, 16, 2) for i in range(130)]))
    one._progress = lambda *args: told.append(args)
    result = one.run()
    assert [done for _, done, _ in told] == [64, 128]
    assert 0.0 < told[0][0] < told[1][0] <= result.duration_s
    assert 0 < told[0][2] < told[1][2] < result.num_events


def test_jitter_of_a_mesh_spreads_the_times_of_its_steps_alike_in_every_run():
    mesh = SimulatedMeshConfig(model="Llama-3.1-8B", board="n150", jitter=0.05)
    spec = pool("both", simulated_mesh=mesh)
    one, other = (simulate(spec, requests((0.0, 30, 60))) for _ in range(2))
    gaps_s = np.diff(one.records[0].token_times_s)
    assert gaps_s.tolist() == np.diff(other.records[0].token_times_s).tolist()
    spread = np.std(np.log(gaps_s))
    assert 0.02 < spread < 0.08, "a standard deviation near that asked for"

    third = simulate(spec, requests((0.0, 30, 60)), seed=7)
    assert gaps_s.tolist() != np.diff(third.records[0].token_times_s).tolist()


def test_a_replica_that_starts_again_within_a_freeze_is_frozen():
    faults = [fault(0.5, "both/0", "freeze", 40.0), fault(1.0, "both/0", "kill")]
    spec = pool("both", 1)
    result = simulate(
        spec, requests((0.1, 16, 3), (20.0, 16, 3), (41.5, 16, 3)), faults=faults,
        router={"queue_timeout_s": 5.0},
    )  # fmt: skip
    assert outcomes(result) == [OK, "NotReadyError", OK]
    assert events_of(result, "start")[1][0] < 10.0 < 40.5 < result.records[2].token_times_s[0]


def test_timeouts_are_those_of_production():
    assert (SILENCE_S, NOTICE_S) == (dealer.SILENCE_S, sockets.HEARTBEAT_S)
