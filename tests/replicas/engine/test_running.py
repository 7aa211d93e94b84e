"""Decoding rows: planned all at once, and examined singly only when one changes."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.step import StepResult
from tests.replicas.engine.fakes import EOS, make_sequence, result_of, scheduler_of


def make_scheduler(num_blocks=64, **changes):
    settings = {"max_num_batched_tokens": 32, **changes}
    return scheduler_of(num_blocks, max_model_len=40, **settings)


def add(scheduler, request_id, num_prompt=3, **sampling):
    settings = {"max_tokens": 20, "ignore_eos": True, **sampling}
    assert scheduler.add(make_sequence(request_id, [1] * num_prompt, **settings), 0.0) is None


def step(scheduler, *token_ids):
    """One step; the rows get these tokens. Returns its batch and outputs."""
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, result_of(token_ids))
    scheduler.check_invariants()
    return batch, outputs


def with_passes(scheduler, batch, num_passes):
    """Return the step under way with so many passes, whatever may happen in them."""
    [plan] = scheduler._plans
    return scheduler._add_passes(plan, num_passes - 1) if num_passes > 1 else batch


@pytest.mark.parametrize("mixed", [True, False])
def test_a_step_that_changes_nothing_is_the_one_before(mixed):
    """One row fills its block of four with the second decode step, the other with the fourth."""
    scheduler = make_scheduler(mixed_batches=mixed)
    add(scheduler, "a", num_prompt=3)
    add(scheduler, "b", num_prompt=1)
    step(scheduler, 1, 1)
    batches, sequences = [], []
    for _ in range(6):
        batch, outputs = step(scheduler, 1, 1)
        batches.append(batch)
        sequences.append(outputs.sequences)
    assert all(found is sequences[0] for found in sequences)
    assert all(batch.slots is batches[0].slots for batch in batches)
    grown = [[slot for slot, _ in batch.appended_blocks] for batch in batches]
    assert grown == [[], [0], [], [1], [], [0]]
    assert [batch is batches[0] for batch in batches] == [not slots for slots in grown]


@pytest.mark.parametrize(("num_hosts", "is_left_out"), [(0, False), (1, True), (2, False)])
def test_few_rows_of_the_host_are_left_out_of_the_step_after_theirs(num_hosts, is_left_out):
    scheduler = make_scheduler(mixed_batches=False, max_batch_size=4)
    for request_id in "abcd":
        add(scheduler, request_id)
    first = result_of([1] * 4)
    prompts = scheduler.schedule()
    scheduler.update(prompts, msgspec.structs.replace(first, on_host=[*range(num_hosts)]))
    all_rows, others = [0, 1, 2, 3], [1, 2, 3]
    found = [scheduler.schedule(), scheduler.schedule_ahead()]
    for _ in range(2):
        scheduler.update(found[-2], result_of([1] * len(found[-2].slots)))
        found.append(scheduler.schedule_ahead())
    slots = [batch.slots for batch in found]
    assert slots == ([all_rows, others] * 2 if is_left_out else [all_rows] * 4)
    lengths = [len(seq.token_ids) - seq.num_prompt_tokens for seq in scheduler.table.rows]
    assert lengths == ([2, 3, 3, 3] if is_left_out else [3] * 4)
    scheduler.check_invariants()


def test_a_token_ends_whom_it_may_end():
    scheduler = make_scheduler()
    add(scheduler, "a")
    add(scheduler, "b", stop_token_ids=frozenset({7}))
    add(scheduler, "c", ignore_eos=False)
    step(scheduler, 1, 1, 1)
    _, outputs = step(scheduler, 7, 7, 7)
    assert outputs.ends == {1: ("stop", 7)}
    _, outputs = step(scheduler, EOS, EOS)
    assert [seq.request_id for seq in outputs.sequences] == ["a", "c"]
    assert outputs.ends == {1: ("stop", None)}
    _, outputs = step(scheduler, EOS)
    assert outputs.ends == {}


def test_the_last_token_is_seen_between_two_blocks():
    scheduler = make_scheduler(block_size=16)
    add(scheduler, "a", max_tokens=3)
    add(scheduler, "b", max_tokens=9)
    ends = [step(scheduler, 1, 1)[1].ends for _ in range(3)]
    assert ends == [{}, {}, {0: ("length", None)}]
    batch, _ = step(scheduler, 1)
    assert batch.slots == [1]


def test_a_prompt_joins_rows_that_decode():
    """Together they fill the budget; with a token less the rows go first in their order."""
    for budget, counts in ((8, [1, 7]), (7, [1, 6])):
        scheduler = make_scheduler(max_num_batched_tokens=budget)
        add(scheduler, "a", num_prompt=2)
        step(scheduler, 1)
        add(scheduler, "b", num_prompt=14)
        assert step(scheduler, 1, None)[0].num_scheduled_tokens == counts
        sampled = 1 if budget == 8 else None
        batch, outputs = step(scheduler, 1, sampled)
        assert batch.num_scheduled_tokens == counts
        assert len(outputs.sequences) == (2 if budget == 8 else 1)


def test_rows_that_lack_blocks_are_served_in_their_order():
    """Both fill their block at once and one is left: the later row gives its own up."""
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    add(scheduler, "a")
    add(scheduler, "b")
    step(scheduler, 1, 1)
    step(scheduler, 1, 1)
    batch, outputs = step(scheduler, 1)
    assert [slot for slot, _ in batch.appended_blocks] == [0]
    assert [seq.request_id for seq in outputs.sequences] == ["a"]
    assert scheduler.table.get("b").num_preemptions == 1
    assert len(scheduler.table.queue) == 1


def test_steps_in_which_all_rows_decode_plan_nothing(monkeypatch):
    """Without a queue, a prompt, or a row that lacks a block, the step is known already."""
    scheduler = make_scheduler(block_size=16)
    add(scheduler, "a")
    add(scheduler, "b")
    step(scheduler, 1, 1)
    for name in ("_advance_all", "_advance_in_order", "_admit_waiting"):
        monkeypatch.setattr(scheduler, name, None)
    first, _ = step(scheduler, 1, 1)
    before = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    assert before is ahead is first
    for batch in (before, ahead):
        scheduler.update(batch, result_of([1, 1]))
    assert [s.num_computed_tokens for s in scheduler.table] == [6, 6]
    scheduler.check_invariants()


def test_who_waits_costs_nothing_while_no_slot_is_free(monkeypatch):
    scheduler = make_scheduler(max_batch_size=2)
    for name in "abcd":
        add(scheduler, name)
    step(scheduler, 1, 1)
    monkeypatch.setattr(scheduler._kv, "find_place", None)
    batch, _ = step(scheduler, 1, 1)
    assert batch.slots == [0, 1]
    assert len(scheduler.table.queue) == 2


def test_a_step_that_is_shortened_is_planned_on_from_the_passes_it_makes():
    """Of 13 passes the last fills the block of 16, so that the step ahead would need another."""
    scheduler = make_scheduler(block_size=16)
    add(scheduler, "a")
    step(scheduler, 1)
    batch = scheduler.schedule()
    longer = scheduler.extend(batch, 1000)
    assert longer == msgspec.structs.replace(batch, num_passes=13)
    scheduler.shorten(longer, 4)
    ahead = scheduler.schedule_ahead()
    assert ahead == batch
    seq = scheduler.table.get("a")
    assert seq.num_computed_tokens == 3 + 4 + 1
    outputs = scheduler.update(longer, StepResult([1] * 4, [0.0] * 4, [4]))
    assert outputs.counts == [4]
    scheduler.update(ahead, result_of([1]))
    scheduler.check_invariants()
    assert seq.num_computed_tokens == seq.num_tokens - 1 == 8
    assert scheduler.extend(scheduler.schedule(), 1000).num_passes == 8


def test_passes_are_taken_from_a_step_that_is_all_there_is():
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler, 1)
    batch = scheduler.schedule()
    assert scheduler.schedule_ahead() is not None
    with pytest.raises(AssertionError, match="a step ahead"):
        scheduler.shorten(batch, 1)


def test_a_run_ends_with_its_first_stop():
    scheduler = make_scheduler(block_size=16)
    add(scheduler, "a", stop_token_ids=frozenset({7}))
    [before] = scheduler.group_snapshots()
    step(scheduler, 1)
    batch = with_passes(scheduler, scheduler.schedule(), 5)
    outputs = scheduler.update(batch, StepResult([1, 2, 7, 4, 5], [0.0] * 5, [5]))
    assert outputs.token_ids == [1, 2, 7]
    assert outputs.ends == {0: ("stop", 7)}
    scheduler.check_invariants()
    assert scheduler.group_snapshots() != [before], "it counts as running no more"
    assert scheduler.table.get("a") is None


@given(
    limits=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    stops=st.sets(st.integers(2, 9), max_size=2),
    passes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1),
)
def test_runs_give_what_single_tokens_give(limits, stops, passes):
    """Each row's tokens, however many passes a step was to have and however many it made."""

    def token(row, index):
        return 2 + (5 * row + 3 * index * index) % 8

    expected = []
    for row, limit in enumerate(limits):
        tokens = [token(row, index) for index in range(limit)]
        ends = [i for i, t in enumerate(tokens) if t in stops]
        expected.append(tokens[: ends[0] + 1] if ends else tokens)
    scheduler = make_scheduler(num_blocks=9, block_size=32)
    found = {}
    for row, limit in enumerate(limits):
        add(scheduler, str(row), max_tokens=limit, stop_token_ids=frozenset(stops))
        found[str(row)] = []
    steps = itertools.cycle(passes)
    while (batch := scheduler.schedule()) is not None:
        rows = [int(seq.request_id) for seq in scheduler.table.rows]
        planned, made = (1, 1) if batch.new else next(steps)
        made = min(planned, made)
        batch = with_passes(scheduler, batch, planned)
        runs = [[token(r, len(found[str(r)]) + i) for i in range(made)] for r in rows]
        result = StepResult([*itertools.chain(*runs)], [0.0] * made, [made] * len(rows))
        outputs = scheduler.update(batch, result)
        scheduler.check_invariants()
        for seq, run in zip(outputs.sequences, outputs.runs(), strict=True):
            found[seq.request_id] += run
            assert seq.token_ids[3:] == found[seq.request_id]
    assert list(found.values()) == expected
