"""Steps of several decode passes give the tokens of single passes, and delay others little."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import cache

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.config import EngineConfig, GangConfig, MeshConfig, SpeculativeConfig
from replicas.engine.pause import Call
from replicas.engine.scheduler import Scheduler
from replicas.engine.step import RowFailure, ScheduledBatch, StepResult
from replicas.errors import ConfigError
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling.preparation import Prepared
from replicas.sampling_params import SamplingParams, StructuredOutputs
from tests.engines import (
    CLIENT,
    engine_core,
    generate,
    make_config,
    num_preemptions,
    num_prefix_hits,
    take_events,
)
from tests.kv_groups import one_kv_group
from tests.models import model_folder
from tests.replicas.engine import fakes
from tests.replicas.engine.mesh_doubles import MeshGenerator, install
from tests.replicas.engine.pair import Pair
from tests.replicas.engine.test_drafts import Table, make_runner, new_row

# --- which steps have several passes, and their blocks --------------------------------------------


def make_scheduler(num_blocks=64, **changes):
    config = fakes.make_config(**changes)
    return Scheduler(
        config,
        kv_groups=one_kv_group(num_blocks, config.block_size),
        prefix_cache_key=fakes.PREFIX_CACHE_KEY,
        max_model_len=40,
        eos_token_ids=frozenset({fakes.EOS}),
    )


def add(scheduler, request_id, num_prompt=3, **sampling):
    seq = fakes.make_sequence(request_id, [1] * num_prompt, **{"max_tokens": 20, **sampling})
    assert scheduler.add(seq, 0.0) is None


def step(scheduler, max_passes=8):
    """Run a step in which each row gets token 1 in every pass; return its batch and outputs."""
    batch = scheduler.schedule()
    if batch is None:
        return None, None
    batch = scheduler.extend(batch, max_passes, with_blocks=True)
    count, num_rows = batch.num_passes, len(batch.slots)
    result = StepResult([1] * (count * num_rows), [0.0] * count, [count] * num_rows)
    outputs = scheduler.update(batch, result)
    scheduler.check_invariants()
    return batch, outputs


@pytest.mark.parametrize(
    ("rows", "changes", "num_passes"),
    [
        ([{}], {}, 8),
        ([{"stop_token_ids": frozenset({7})}], {}, 8),
        ([{"max_tokens": 4}, {}], {}, 8),
        ([{"max_tokens": 4}, {"max_tokens": 3}], {}, 3),
        ([{"max_tokens": 2}], {}, 1),
        ([{}], {"num_blocks": 4}, 8),
        ([{}], {"num_blocks": 3}, 1),
        ([{"repetition_penalty": 1.2}, {"min_tokens": 5}], {}, 8),
        ([{"logprobs": 0}, {}], {}, 1),
        ([{"logprob_token_ids": (5,)}, {}], {}, 1),
        ([{}, {}, {}], {"max_batch_size": 2}, 8),
        ([{}], {"tt_data_parallel": 2}, 8),
    ],
)
def test_a_step_has_as_many_passes_as_a_row_can_use(rows, changes, num_passes):
    scheduler = make_scheduler(**changes)
    for number, row in enumerate(rows):
        add(scheduler, f"r{number}", **row)
    assert step(scheduler)[0].num_passes == 1, "prompts are computed"
    before = scheduler.group_counters()
    batch = scheduler.extend(scheduler.schedule(), 8, with_blocks=True)
    assert batch.num_passes == num_passes
    if num_passes == 1:
        # 3 tokens fill a block but for the second token of the output.
        assert batch.appended_blocks == []
        assert scheduler.group_counters() == before


def test_rows_have_one_token_each_where_a_step_of_many_passes_gives_no_counts():
    scheduler = make_scheduler()
    add(scheduler, "r")
    step(scheduler)
    batch = scheduler.extend(scheduler.schedule(), 8, with_blocks=True)
    outputs = scheduler.update(batch, StepResult([5], [0.0] * 8))
    scheduler.check_invariants()
    assert outputs.token_ids == [5]
    assert [seq.token_ids[-2:] for seq in outputs.sequences] == [[1, 5]]


def test_a_row_with_a_grammar_gets_single_passes():
    scheduler = make_scheduler()
    grammar = StructuredOutputs(choice=("a",))
    add(scheduler, "r", structured_outputs=grammar)
    [order] = scheduler.preparations.take_orders(0.0)
    scheduler.end_preparations([Prepared(order.grammar)], 0.0)
    step(scheduler)
    assert step(scheduler)[0].num_passes == 1


def queue_behind_a_pause(scheduler):
    scheduler.pause.begin("wait", Call(b"client", 1))
    add(scheduler, "queued")


def queue_for_a_grammar(scheduler):
    add(scheduler, "queued", structured_outputs=StructuredOutputs(choice=("a",)))


def queue_choices_of_a_reservation(scheduler):
    seq = fakes.make_sequence("queued", [1] * 3, mode="decode", n=2)
    assert scheduler.reserve(seq, 0.0, fakes.make_siblings(seq)) is None


@pytest.mark.parametrize(
    "queue", [queue_behind_a_pause, queue_for_a_grammar, queue_choices_of_a_reservation]
)
def test_sequences_that_cannot_be_admitted_delay_no_others(queue):
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler)
    queue(scheduler)
    assert len(scheduler.table.queue) == 1
    assert step(scheduler)[0].num_passes == 8
    scheduler.schedule()
    assert scheduler.schedule_ahead() is not None


def test_blocks_of_all_passes_come_with_the_first():
    """Blocks of four: 3 + 1 tokens are known, and 8 passes compute up to the twelfth."""
    scheduler = make_scheduler()
    add(scheduler, "a")
    add(scheduler, "b", max_tokens=3)
    step(scheduler)
    batch = scheduler.extend(scheduler.schedule(), 8, with_blocks=True)
    grown = {
        slot: sum(len(ids[0]) for s, ids in batch.appended_blocks if s == slot) for slot in (0, 1)
    }
    # The other row ends with its sixth token, of which the fifth is the last to be computed.
    assert grown == {0: 2, 1: 1}
    assert len(batch.appended_blocks) == 2


@pytest.mark.parametrize("max_passes", [1, 3])
def test_a_block_that_is_filled_within_a_step_is_indexed_at_its_end(max_passes):
    """Three tokens of the prompt and three more are computed: a block of four is full."""
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler)
    for _ in range(3 // max_passes):
        step(scheduler, max_passes)
    seq = scheduler.table.get("a")
    assert seq.num_computed_tokens == 6
    assert seq.place.num_indexed_tokens // 4 == 1


def test_passes_take_no_blocks_where_these_are_short():
    """Two rows need a block each for eight passes, and one is free: they take it in turn."""
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    add(scheduler, "a", num_prompt=5)
    add(scheduler, "b", num_prompt=5)
    step(scheduler)
    assert [step(scheduler)[0].num_passes for _ in range(2)] == [1, 1]
    assert scheduler.group_counters()[0].num_preemptions == 0


@given(
    lengths=st.lists(st.integers(1, 20), min_size=3, max_size=6),
    num_passes=st.integers(2, 8),
)
def test_a_queued_request_waits_for_one_step_once_there_is_room(lengths, num_passes):
    scheduler = make_scheduler(max_batch_size=2, max_num_batched_tokens=8)
    waiting = [f"r{i}" for i in range(len(lengths))]
    for request_id, length in zip(waiting, lengths, strict=True):
        add(scheduler, request_id, max_tokens=length)
    while scheduler.table.num_live:
        has_room = bool(scheduler._kv.num_empty_slots and scheduler.table.queue.sequences)
        num_queued = len(scheduler.table.queue)
        batch, _ = step(scheduler, num_passes)
        assert batch.num_passes <= num_passes
        assert not has_room or len(scheduler.table.queue) < num_queued
        assert not has_room or batch.num_passes == 1


# --- the same tokens ------------------------------------------------------------------------------

PROMPTS = [[7, 8, 9] * 5, [11, 3] * 24, [5] * 33, [2, 4, 6, 8], [1, 2, 3] * 15, [9, 9, 1]]
HOT = {"temperature": 1.0, "seed": 5}


def params(max_tokens, **fields):
    fields = {"temperature": 0.0, "seed": 0, "ignore_eos": True, **fields}
    return SamplingParams(max_tokens=max_tokens, **fields)


def config(**changes):
    return make_config(model_folder("llama-gqa"), **{"max_model_len": 64, **changes})


def run(engine_config, sampling, repeat=1):
    """Outputs, ends by reason, and the core's metrics."""
    with engine_core(engine_config) as core:
        for _ in range(repeat):
            outputs = generate(core, PROMPTS, sampling, stagger=2)
        ends = Counter()
        for group in core.metrics(0.0).groups:
            ends.update(group.requests_finished)
        return outputs, ends, num_preemptions(core), num_prefix_hits(core)


@cache
def expected():
    """Every way to end, greedy and drawn, and what single passes give: outputs and ends."""
    free = [
        params(30),
        params(30, **HOT),
        params(30, temperature=0.7, top_k=20, seed=9, presence_penalty=1.0),
        params(30, repetition_penalty=1.3, min_tokens=9, **HOT),
        params(60, **HOT),
        params(60, logit_bias={3: 2.0}),
    ]
    outputs, *_ = run(config(), free)
    stops = {0: 5, 1: 9, 2: 14}
    sampling = [
        msgspec.structs.replace(each, stop_token_ids=frozenset({outputs[row][stops[row]]}))
        if row in stops
        else each
        for row, each in enumerate(free)
    ]
    outputs, ends, *_ = run(config(), sampling)
    assert ends == {"stop": 3, "length": 3}
    assert len(PROMPTS[4]) + len(outputs[4]) == 64, "it ends with the model's length"
    return sampling, outputs, ends


@pytest.fixture
def extended(monkeypatch):
    """The numbers of further passes that steps have got."""
    found, add_passes = [], Scheduler._add_passes

    def spy(scheduler, plan, num_more):
        found.append(num_more)
        return add_passes(scheduler, plan, num_more)

    monkeypatch.setattr(Scheduler, "_add_passes", spy)
    return found


@pytest.mark.parametrize(
    ("num_passes", "changes"),
    [
        (8, {}),
        (3, {"mixed_batches": False}),
        (32, {"max_batch_size": 2}),
        (8, {"block_size": 8, "num_blocks": 12}),
        (5, {"tt_data_parallel": 2, "max_num_batched_tokens": 16}),
        (4, {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)}),
    ],
    ids=["plain", "apart", "queued", "preempted", "lanes, chunked", "drafts"],
)
def test_steps_of_several_passes_give_the_tokens_of_single_ones(num_passes, changes, extended):
    sampling, wanted, ends = expected()
    preempts = "num_blocks" in changes
    changes = {"enable_prefix_caching": not preempts, **changes}
    found = run(config(num_scheduler_steps=num_passes, **changes), sampling, repeat=2)
    assert found[0] == wanted
    assert found[1] == {reason: 2 * count for reason, count in ends.items()}
    assert extended
    assert max(extended) < num_passes
    assert bool(found[2]) == preempts
    assert bool(found[3]) != preempts


def test_log_probabilities_and_neighbours_are_those_of_single_passes(extended):
    """A row with log probabilities has single passes, until it ends."""
    sampling, wanted, _ = expected()
    sampling = [msgspec.structs.replace(sampling[0], logprobs=2), *sampling[1:]]
    assert run(config(num_scheduler_steps=8), sampling)[0] == wanted
    assert extended


def test_choices_and_handed_over_requests_get_the_same_tokens(extended):
    three = params(14, n=3, temperature=1.5, seed=5)
    alone = [msgspec.structs.replace(three, n=1, seed=5 + choice) for choice in range(3)]
    with engine_core(config()) as core:
        wanted = generate(core, [PROMPTS[0]] * 3, alone)
    with engine_core(config(num_scheduler_steps=8)) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", PROMPTS[0], three)), 0.0)
        assert tokens_of_choices(core, 3) == wanted
    assert extended
    extended.clear()
    sampling, wanted, _ = expected()
    settings = {"kv_connector": "p2p", "keys": fakes.KEYS}
    pair = Pair(config(**settings), config(**settings, num_scheduler_steps=8))
    with contextlib.closing(pair):
        assert pair.generate(PROMPTS, sampling) == wanted
    assert extended


def tokens_of_choices(core, num_choices):
    found, num_open = [[] for _ in range(num_choices)], num_choices
    while num_open:
        core.step(0.0)
        for output in take_events(core).get(CLIENT, []):
            if isinstance(output, TokenOutput):
                found[output.choice] += output.token_ids
                num_open -= output.finish_reason is not None
    return found


def on_mesh(**changes):
    mesh = MeshConfig(name="N150", sample_on_device="decode_only")
    settings = {"max_batch_size": 4, "max_model_len": 64, "num_blocks": 9, "dtype": "auto"}
    return make_config(model_folder("qwen3"), mesh=mesh, **{**settings, **changes})


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_device_that_continues_by_itself_has_two_passes_in_flight(monkeypatch, steps_in_flight):
    """Each pass but the last is followed by one that loads no inputs, where no row has left."""
    install(monkeypatch, MeshGenerator)
    greedy = [params(n) for n in (30, 12, 21, 26)]
    mesh = on_mesh(steps_in_flight=steps_in_flight)
    found = []
    for num_passes in (1, 8):
        changed = msgspec.structs.replace(mesh, num_scheduler_steps=num_passes)
        with engine_core(changed) as core:
            most, runner = 0, core._executor._worker._runner
            submit = runner.submit

            def counting(batch, submit=submit, runner=runner):
                nonlocal most
                submitted = submit(batch)
                most = max(most, len(runner._submitted))
                return submitted

            runner.submit = counting
            found.append(generate(core, PROMPTS[:4], greedy))
            assert most == steps_in_flight
            assert core.runs_ahead == (num_passes == 1 and steps_in_flight == 2)
    assert found[0] == found[1]


# --- failures and refusals ------------------------------------------------------------------------


def test_a_row_without_a_distribution_keeps_the_tokens_before_it():
    """Its neighbour gets all passes; its own next step fails, as with single passes."""
    table = torch.eye(12)[[3, 4, 5, 6]] * 9.0
    runner = make_runner(Table(table, broken=4), 2, None)
    greedy = SamplingParams(temperature=0.0)
    new = [new_row(0, [1, 2], greedy), new_row(1, [1] * 6, greedy)]
    assert runner.run(ScheduledBatch("mixed", [0, 1], [2, 6], new, [])).token_ids == [4, 4]
    result = runner.run(ScheduledBatch("mixed", [0, 1], [1, 1], [], [], num_passes=4))
    assert (result.token_ids, result.counts) == ([5, 6, 5, 6, 3, 4], [2, 4])
    assert (result.failed, len(result.passes_s)) == ([], 4)
    result = runner.run(ScheduledBatch("mixed", [0, 1], [1, 1], [], [], num_passes=2))
    assert (result.token_ids, result.counts) == ([5, 6], [0, 2])
    assert result.failed == [RowFailure(0, "no_distribution")]


def test_a_row_makes_no_pass_behind_the_longest_length():
    table = torch.eye(12)[[3, 4, 5, 6]] * 9.0
    runner = make_runner(Table(table), 2, None)
    greedy = SamplingParams(temperature=0.0)
    new = [new_row(0, [1] * 45, greedy), new_row(1, [1] * 6, greedy)]
    runner.run(ScheduledBatch("mixed", [0, 1], [45, 6], new, []))
    result = runner.run(ScheduledBatch("mixed", [0, 1], [1, 1], [], [], num_passes=6))
    assert result.counts == [2, 6]


@pytest.mark.parametrize("number", [0, 33])
def test_a_number_of_passes_out_of_range_is_refused(number):
    with pytest.raises(
        ConfigError, match=f"num_scheduler_steps must be from 1 to 32, got {number}"
    ):
        EngineConfig(model="/none", num_scheduler_steps=number).validate()


def test_a_gang_refuses_steps_of_several_passes():
    gang = GangConfig(name="g", rank=0, size=2, hub="127.0.0.1:1")
    with pytest.raises(ConfigError, match="num_scheduler_steps 2 and a gang exclude each other"):
        EngineConfig(model="/none", num_scheduler_steps=2, gang=gang).validate()
