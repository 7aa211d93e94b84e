"""Scenarios with random features of requests and engines: that these happen, and are checked."""

import msgspec
import numpy as np
import pytest

from cluster.lab.simulation.adversarial_scenarios import random_scenario
from cluster.lab.simulation.invariants import check_tokens
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PLAIN, PlannedPause, RequestVariant
from cluster.lab.simulation.records import OK, RequestRecord
from cluster.lab.simulation.scenario import (
    Scenario,
    ScenarioPool,
    ScenarioRequest,
    ScenarioTiming,
    build,
    run_scenario,
)
from replicas.generators.simulated.tokens import draw_salt, expected_tokens

PROMPT = list(range(20, 60))
SIZE, EOS = 512, (0, 2)
THREE = RequestVariant(num_choices=3)


def scenario(*variants, split=False, num_output=40, **pool):
    """Requests that arrive one after the other, on an engine or on two."""
    roles = ("prefill", "decode") if split else ("both",)
    requests = tuple(
        ScenarioRequest(
            arrival_s=0.1 * i,
            num_prompt_tokens=40,
            num_output_tokens=num_output,
            block_ids=(1, 10 + i),
            variant=variant,
        )
        for i, variant in enumerate(variants)
    )
    pools = tuple(ScenarioPool(role=role, **pool) for role in roles)
    return Scenario(seed=0, max_model_len=500, pools=pools, requests=requests)


def run(*variants, **given):
    """Outcomes, tokens of each choice, and totals of the drafts of all engines."""
    simulation = build(scenario(*variants, **given))
    result = simulation.run()
    metrics = [host.engine.metrics(0.0) for host in simulation.replicas.hosts]
    outputs = [simulation.recorder.outputs[record.request_id] for record in result.records]
    return [r.outcome for r in result.records], outputs, [m.drafts for m in metrics]


@pytest.mark.parametrize("split", [False, True])
def test_choices_differ_and_a_stop_string_ends_one(split):
    stopped = RequestVariant(num_choices=3, stop_at=5, stopped_choice=2)
    outcomes, outputs, _ = run(THREE, stopped, split=split)
    assert outcomes == ["ok", "ok"]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 3
    assert [len(tokens) for tokens in outputs[0]] == [40, 40, 40]
    # A run of passes may have more tokens than the client wants.
    assert [len(tokens) for tokens in outputs[1][:2]] == [40, 40]
    assert 5 <= len(outputs[1][2]) < 40


@pytest.mark.parametrize("stop_at", [1, 8, 19])
def test_an_engine_may_end_a_choice_before_it_reads_that_the_client_has(stop_at):
    stopped = RequestVariant(num_choices=2, stop_at=stop_at)
    far = msgspec.structs.replace(
        scenario(stopped, num_output=20),
        network=NetworkConfig(latency_s=0.02),
        timing=ScenarioTiming(decode_base_s=2e-3),
        run_ahead=False,
    )
    outcome = run_scenario(far)
    assert outcome.failure is None
    assert outcome.outcomes == {"ok": 1}


@pytest.mark.parametrize("split", [False, True])
def test_drafts_change_no_token(split):
    stops = RequestVariant(stop_token_ids=tuple(range(100, 116)))
    variants = (THREE, PLAIN, stops)
    given = {"split": split, "mixed": True}
    _, drafted, counters = run(*variants, max_drafts=4, right_drafts=0.8, **given)
    _, plain, _ = run(*variants, **given)
    assert drafted == plain
    num_drafts = sum(c.num_draft_tokens for c in counters)
    num_right = sum(c.num_accepted_tokens for c in counters)
    assert 0 < num_right < num_drafts


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_steps_of_several_passes_change_no_token(split, mixed):
    stops = RequestVariant(stop_token_ids=tuple(range(100, 116)))
    given = {"split": split, "mixed": mixed, "num_blocks": 40}
    _, single, _ = run(THREE, PLAIN, stops, **given)
    outcomes, several, _ = run(THREE, PLAIN, stops, num_scheduler_steps=4, **given)
    assert outcomes == ["ok"] * 3
    assert several == single


@pytest.mark.parametrize(
    ("chances", "outcomes"),
    [
        ({}, {"ok"}),
        ({"bad_grammars": 1.0}, {"BadRequestError"}),
        ({"slow_grammars": 1.0}, {"ok", "BadRequestError", "SaturatedError"}),
    ],
    ids=["ready", "bad", "late"],
)
def test_grammars_are_ready_or_bad_or_late(chances, outcomes):
    variants = [RequestVariant(grammar=i) for i in range(1, 25)]
    found, _, _ = run(*variants, num_output=3, **chances)
    assert set(found) == outcomes


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_a_row_that_fails_ends_its_request(split, mixed, num_scheduler_steps):
    given = {"split": split, "mixed": mixed, "num_scheduler_steps": num_scheduler_steps}
    outcomes, outputs, _ = run(*[THREE, PLAIN] * 6, failed_rows=0.01, **given)
    assert set(outcomes) <= {"ok", "BadRequestError", "InternalError"}
    ok = [tokens for outcome, tokens in zip(outcomes, outputs, strict=True) if outcome == "ok"]
    assert {len(choice) for tokens in ok for choice in tokens} == {40}
    assert 0 < len(ok) < len(outcomes)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_paused_engine_continues_or_ends_its_requests(split, mode):
    target = "decode/0" if split else "both/0"
    pauses = (PlannedPause(at_s=0.25, target=target, mode=mode, duration_s=5.0),)
    paused = msgspec.structs.replace(scenario(*[THREE, PLAIN] * 3, split=split), pauses=pauses)
    simulation = build(paused)
    records = simulation.run().records
    assert [record.outcome for record in records] == ["ok"] * 6
    outputs = [simulation.recorder.outputs[record.request_id] for record in records]
    is_whole = [{len(tokens) for tokens in output} == {40} for output in outputs]
    assert all(is_whole) == (mode != "abort")
    cut = {record.request_id for record, whole in zip(records, is_whole, strict=True) if not whole}
    assert simulation.recorder.cut == cut
    assert max(record.finished_s for record in records) > 5.25


def test_seeds_have_every_feature():
    scenarios = [random_scenario(seed) for seed in range(60)]
    requests = [request.variant for s in scenarios for request in s.requests]
    pools = [pool for s in scenarios for pool in s.pools]
    assert {1, 2, 3, 4} <= {variant.num_choices for variant in requests}
    assert any(variant.stop_at for variant in requests)
    assert any(variant.stop_token_ids for variant in requests)
    assert any(variant.grammar for variant in requests)
    assert len({variant.priority for variant in requests}) > 1
    assert {pool.scheduling_policy for pool in pools} == {"fcfs", "priority"}
    assert {pool.num_scheduler_steps > 1 for pool in pools} == {False, True}
    assert {bool(pool.max_drafts) for pool in pools} == {False, True}
    assert {bool(pool.slow_grammars) for pool in pools} == {False, True}
    assert {bool(pool.bad_grammars) for pool in pools} == {False, True}
    assert {bool(pool.failed_rows) for pool in pools} == {False, True}
    pauses = [pause for s in scenarios for pause in s.pauses]
    assert {pause.mode for pause in pauses} == {"keep", "wait", "abort"}
    assert {pool.max_partial_prompts for pool in pools} == {1, 2, 3}
    assert {pool.max_long_prompts for pool in pools} == {1, 2, 3}


# --- what is checked ----------------------------------------------------------------------------


GREEDY = expected_tokens(PROMPT, 6, SIZE, EOS)
FIRST, SECOND = (expected_tokens(PROMPT, 6, SIZE, EOS, draw_salt(7 + i)) for i in range(2))
TWO = RequestVariant(num_choices=2)
TWO_STOPPED = RequestVariant(num_choices=2, stop_at=3, stopped_choice=1)
STOPS = RequestVariant(stop_token_ids=(GREEDY[3],))


def check(outputs, variant):
    num_tokens = sum(map(len, outputs))
    record = RequestRecord(
        request_id="r",
        arrival_s=0.0,
        num_prompt_tokens=len(PROMPT),
        num_output_tokens_asked=6,
        outcome=OK,
        finished_s=1.0,
        token_times_s=np.full(num_tokens, 0.5),
    )
    check_tokens(record, outputs, PROMPT, 100, (SIZE, EOS), variant, 7)


@pytest.mark.parametrize(
    ("outputs", "variant"),
    [
        ([GREEDY], PLAIN),
        ([FIRST, SECOND], TWO),
        ([FIRST, SECOND[:3]], TWO_STOPPED),
        ([FIRST, SECOND], TWO_STOPPED),
        ([GREEDY[:4]], STOPS),
    ],
)
def test_right_tokens_pass(outputs, variant):
    check(outputs, variant)


@pytest.mark.parametrize(
    ("outputs", "variant", "reason"),
    [
        ([GREEDY[:5]], PLAIN, "5 tokens of 6"),
        ([FIRST, FIRST], TWO, "choice 1: output token 0"),
        ([FIRST[:3], SECOND], TWO_STOPPED, "choice 0: 3 tokens of 6"),
        ([FIRST, SECOND[:2]], TWO_STOPPED, "choice 1: 2 tokens of 3"),
        ([GREEDY], STOPS, "6 tokens, asked for 4"),
        ([GREEDY[:3]], STOPS, "3 tokens of 4"),
    ],
)
def test_other_tokens_do_not(outputs, variant, reason):
    with pytest.raises(AssertionError, match=reason):
        check(outputs, variant)
