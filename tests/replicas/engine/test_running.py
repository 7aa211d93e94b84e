"""Decoding rows: planned all at once, and examined singly only when one changes."""

from __future__ import annotations

import pytest

from replicas.engine.scheduler import Scheduler
from replicas.engine.step import StepResult
from tests.kv_groups import one_kv_group
from tests.replicas.engine.fakes import EOS, PREFIX_CACHE_KEY, make_config, make_sequence


def make_scheduler(num_blocks=64, **changes):
    config = make_config(**{"block_size": 4, "max_num_batched_tokens": 32, **changes})
    return Scheduler(
        config,
        kv_groups=one_kv_group(num_blocks, config.block_size),
        prefix_cache_key=PREFIX_CACHE_KEY,
        max_model_len=40,
        eos_token_ids=frozenset({EOS}),
    )


def add(scheduler, request_id, num_prompt=3, **sampling):
    settings = {"max_tokens": 20, "ignore_eos": True, **sampling}
    assert scheduler.add(make_sequence(request_id, [1] * num_prompt, **settings), 0.0) is None


def step(scheduler, *token_ids):
    """One step; the rows get these tokens. Returns its batch and outputs."""
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, StepResult(list(token_ids), 0.0))
    scheduler.check_invariants()
    return batch, outputs


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


def test_a_token_ends_whom_it_may_end():
    scheduler = make_scheduler()
    add(scheduler, "a")
    add(scheduler, "b", stop_token_ids=frozenset({7}))
    add(scheduler, "c", ignore_eos=False)
    step(scheduler, 1, 1, 1)
    _, outputs = step(scheduler, 7, 7, 7)
    assert outputs.endings == [(1, "stop", 7)]
    _, outputs = step(scheduler, EOS, EOS)
    assert [seq.request_id for seq in outputs.sequences] == ["a", "c"]
    assert outputs.endings == [(1, "stop", None)]
    _, outputs = step(scheduler, EOS)
    assert outputs.endings == []


def test_the_last_token_is_seen_between_two_blocks():
    scheduler = make_scheduler(block_size=16)
    add(scheduler, "a", max_tokens=3)
    add(scheduler, "b", max_tokens=9)
    endings = [step(scheduler, 1, 1)[1].endings for _ in range(3)]
    assert endings == [[], [], [(0, "length", None)]]
    batch, _ = step(scheduler, 1)
    assert batch.slots == [1]


def test_a_prompt_joins_rows_that_decode():
    """Together they fill the budget; with a token less the rows go first in their order."""
    for budget, counts in ((8, [1, 7]), (7, [1, 6])):
        scheduler = make_scheduler(max_num_batched_tokens=budget)
        add(scheduler, "a", num_prompt=2)
        step(scheduler, 1)
        add(scheduler, "b", num_prompt=14)
        assert step(scheduler, 1, -1)[0].num_scheduled_tokens == counts
        sampled = 1 if budget == 8 else -1
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
    assert scheduler.get("b").num_preemptions == 1
    assert scheduler.num_waiting == 1


def test_who_waits_costs_nothing_while_no_slot_is_free(monkeypatch):
    scheduler = make_scheduler(max_batch_size=2)
    for name in "abcd":
        add(scheduler, name)
    step(scheduler, 1, 1)
    monkeypatch.setattr(scheduler._groups, "place", None)
    batch, _ = step(scheduler, 1, 1)
    assert batch.slots == [0, 1]
    assert scheduler.num_waiting == 2
