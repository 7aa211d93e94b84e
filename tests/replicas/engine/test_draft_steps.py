"""Which drafts a step verifies, and what becomes of its progress."""

from __future__ import annotations

import pytest

from replicas.config import SpeculativeConfig
from tests.replicas.engine.fakes import EOS, make_sequence, result_of, scheduler_of


def make_scheduler(num_blocks=20, **changes):
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    return scheduler_of(num_blocks, speculative_config=speculation, **changes)


def begin(scheduler, *prompt_lengths, num_drafts=3, **sampling):
    """Let sequences of these lengths compute their prompts; the worker holds drafts for each.

    What steps without drafts cost is known.
    """
    for num_rows in (1, 2):
        for _ in range(4):
            scheduler._draft_control.learn(num_rows, 0, [], [], 1.0)
    for number, length in enumerate(prompt_lengths):
        seq = make_sequence(f"r{number}", [1] * length, **{"max_tokens": 99, **sampling})
        scheduler.add(seq, 0.0)
    batch = scheduler.schedule()
    count = len(prompt_lengths)
    scheduler.update(batch, result_of([1] * count, [num_drafts] * count))


def run(scheduler, *runs, num_drafts=()):
    """Run a step that gives each row a run; return its counts."""
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, result_of(runs, num_drafts))
    scheduler.check_invariants()
    return batch.num_scheduled_tokens, outputs


def test_rows_verify_what_the_worker_proposed_and_give_the_rest_back():
    scheduler = make_scheduler()
    begin(scheduler, 2, 6)
    counts, outputs = run(scheduler, [7, 8], [7, 8, 9, 5], num_drafts=[0, 2])
    assert counts == [4, 4]
    assert list(outputs.runs()) == [[7, 8], [7, 8, 9, 5]]
    rows = scheduler.table.rows
    assert [(s.num_computed_tokens, s.num_tokens) for s in rows] == [(4, 5), (10, 11)]
    counts, _ = run(scheduler, [7], [7, 8])
    assert counts == [1, 3]
    counts, _ = run(scheduler, [7], [7])
    assert counts == [1, 1], "nothing was proposed"


def test_a_stop_among_right_drafts_ends_the_sequence_there():
    scheduler = make_scheduler()
    begin(scheduler, 2)
    _, outputs = run(scheduler, [7, EOS, 8, 9])
    assert list(outputs.runs()) == [[7, EOS]]
    assert outputs.ends[0].reason == "stop"
    assert scheduler.table.num_live == 0
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("prompt_lengths", "changes", "counts"),
    [
        # Each row needs one token of the budget; drafts share what is left, in order.
        ([2, 2], {"max_num_batched_tokens": 6}, [4, 2]),
        ([2], {"max_model_len": 6}, [3]),
        ([2], {"max_tokens": 3}, [2]),
        # Five tokens are known; two blocks hold eight, and there is no third one.
        ([4], {"num_blocks": 3, "max_model_len": 8, "max_tokens": 4}, [3]),
        ([7, 7], {"num_blocks": 6, "max_model_len": 16}, [4, 1]),
    ],
)
def test_drafts_are_cut_to_budget_length_and_free_blocks(prompt_lengths, changes, counts):
    changes = {**changes}
    sampling = {"max_tokens": changes.pop("max_tokens", 99)}
    scheduler = make_scheduler(**changes)
    begin(scheduler, *prompt_lengths, **sampling)
    assert scheduler.schedule().num_scheduled_tokens == counts
    assert scheduler.group_counters()[0].num_preemptions == 0


def test_a_step_with_prompts_verifies_no_drafts():
    scheduler = make_scheduler()
    begin(scheduler, 2)
    scheduler.add(make_sequence("new", [1] * 5), 0.0)
    counts, _ = run(scheduler, [7], [8], num_drafts=[3, 3])
    assert counts == [1, 5]
    assert run(scheduler, [7], [8])[0] == [4, 4]


def test_what_a_step_with_drafts_leaves_undecided():
    """The next step is not planned ahead, more passes are not added, and its time is no record."""
    scheduler = make_scheduler()
    begin(scheduler, 2, ignore_eos=True)
    batch = scheduler.schedule()
    assert scheduler.schedule_ahead() is None
    assert scheduler.extend(batch, 8) is batch
    assert scheduler.work(batch) is None
    scheduler.update(batch, result_of([[7]]))
    batch = scheduler.schedule()
    assert scheduler.schedule_ahead() is None, "it proposes drafts"
    assert scheduler.extend(batch, 8) is batch
    assert scheduler.work(batch).num_rows == 1


def test_drafts_are_not_verified_where_they_stopped_paying():
    scheduler = make_scheduler()
    begin(scheduler, 2, num_drafts=0)
    for _ in range(4):
        scheduler._draft_control.learn(1, 3, [4], [1], 4.0)
    counts = [run(scheduler, [7], num_drafts=[3])[0] for _ in range(2)]
    assert counts == [[1], [1]]
    assert scheduler.draft_counters.num_draft_tokens == 12


def test_a_prefill_engine_asks_for_no_drafts():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("p", [1, 2], mode="prefill"), 0.0)
    assert scheduler.schedule().max_drafts == 0
