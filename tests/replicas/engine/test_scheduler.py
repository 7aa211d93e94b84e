"""Single decisions of the scheduler, each with the state that calls for it."""

from __future__ import annotations

import pytest

from kv_transfer.errors import TransferError
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import SequenceStatus
from replicas.engine.step import StepResult
from tests.replicas.engine.fakes import (
    EOS,
    FakeConnector,
    make_config,
    make_sequence,
    make_ticket,
)


def make_scheduler(num_blocks=9, max_model_len=32, connector=None, **changes):
    return Scheduler(
        make_config(**changes),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        connector=connector,
    )


def step(scheduler, token=1):
    """Run a step that samples `token` wherever a sequence is complete; its counts by request."""
    batch = scheduler.schedule()
    if batch is None:
        return {}
    by_slot = {seq.slot: seq for seq in scheduler._running}
    sequences = [by_slot[slot] for slot in batch.slots]
    counts = dict(zip((s.request_id for s in sequences), batch.num_scheduled_tokens, strict=True))
    tokens = [
        token if seq.num_computed_tokens + count == seq.num_tokens else -1
        for seq, count in zip(sequences, batch.num_scheduled_tokens, strict=True)
    ]
    scheduler.update(batch, StepResult(tokens, 0.0))
    scheduler.check_invariants()
    return counts


def test_budget_is_spent_on_running_sequences_first_and_cuts_the_last_prompt():
    scheduler = make_scheduler(num_blocks=20, block_size=2, max_num_batched_tokens=10)
    for name, length in (("a", 3), ("b", 2), ("c", 8)):
        scheduler.add(make_sequence(name, [1] * length))
    assert step(scheduler) == {"a": 3, "b": 2, "c": 5}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 3}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_calls_alternate_where_they_cannot_be_mixed():
    scheduler = make_scheduler(mixed_batches=False, max_num_batched_tokens=4)
    scheduler.add(make_sequence("a", [1] * 3))
    scheduler.add(make_sequence("b", [1] * 10))
    # b is cut by the budget; a decodes between its chunks.
    assert [step(scheduler) for _ in range(6)] == [
        {"a": 3, "b": 1},
        {"a": 1},
        {"b": 4},
        {"a": 1},
        {"b": 4},
        {"a": 1, "b": 1},
    ]


def test_whole_prompt_waits_for_a_step_that_has_room_for_it():
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=8, max_model_len=8
    )
    scheduler.add(make_sequence("a", [1] * 6))
    scheduler.add(make_sequence("b", [2] * 6))
    assert step(scheduler) == {"a": 6}
    assert step(scheduler) == {"a": 1, "b": 6}


def test_prompt_that_does_not_fit_the_pool_waits_whole():
    scheduler = make_scheduler(num_blocks=5, max_model_len=16)
    scheduler.add(make_sequence("a", [1] * 9, max_tokens=3))
    scheduler.add(make_sequence("b", [2] * 9))
    assert step(scheduler) == {"a": 9}
    assert scheduler.num_waiting_tokens == 9
    assert [step(scheduler), step(scheduler)] == [{"a": 1}, {"a": 1}]
    assert step(scheduler) == {"b": 9}


def test_last_running_sequence_is_preempted_and_resumes_with_its_tokens():
    scheduler = make_scheduler(num_blocks=5, max_model_len=16, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_sequence(name, [1] * 7))
    assert step(scheduler) == {"a": 7, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"a": 1}
    second = scheduler.get("b")
    assert (second.status, second.num_preemptions) == (SequenceStatus.WAITING, 1)
    assert second.num_new_tokens == 9
    scheduler.abort("a")
    assert step(scheduler) == {"b": 9}


def test_preempted_prefill_tells_the_connector():
    connector = FakeConnector(block_size=4)
    scheduler = make_scheduler(
        num_blocks=5, max_model_len=16, max_num_batched_tokens=6, connector=connector
    )
    scheduler.add(make_sequence("a", [1] * 3))
    scheduler.add(make_sequence("b", [2] * 12, mode="prefill"), make_ticket("b", 12))
    assert step(scheduler) == {"a": 3, "b": 3}
    assert step(scheduler) == {"a": 1, "b": 5}
    assert step(scheduler) == {"a": 1}
    assert connector.preempted == ["b"]


def test_full_group_holds_up_only_those_that_ask_for_it():
    scheduler = make_scheduler(max_batch_size=2, tt_data_parallel=2)
    for name, group in (("a", 0), ("b", 0), ("c", 1)):
        scheduler.add(make_sequence(name, [1], dp_group=group))
    assert step(scheduler) == {"a": 1, "c": 1}


def test_small_requests_do_not_starve_a_large_one_that_waits_for_its_group():
    scheduler = make_scheduler(
        num_blocks=5, max_model_len=16, tt_data_parallel=2, connector=FakeConnector(4)
    )
    for i in range(2):
        seq = make_sequence(f"other{i}", [1], mode="decode", dp_group=1)
        assert scheduler.reserve(seq, 0.0) is None
    scheduler.add(make_sequence("small", [3] * 3, max_tokens=2))
    step(scheduler)
    scheduler.add(make_sequence("large", [2] * 13, dp_group=0, max_tokens=2))
    for i in range(30):
        scheduler.add(make_sequence(f"small{i}", [3] * 3, max_tokens=3))
        if "large" in step(scheduler):
            return
    raise AssertionError("others took the blocks that the large request waited for")


def test_idle_group_is_used_in_the_step_in_which_another_preempts_itself():
    connector = FakeConnector(block_size=4)
    scheduler = make_scheduler(
        num_blocks=4, max_model_len=12, tt_data_parallel=2, connector=connector
    )
    scheduler.add(make_sequence("a", [1] * 4, dp_group=0))
    assert scheduler.reserve(make_sequence("r", [2] * 6, mode="decode", dp_group=0), 0.0) is None
    assert step(scheduler) == {"a": 4}
    # Every block of group 0 is taken: its only running sequence must give its own up.
    scheduler.add(make_sequence("b", [3], dp_group=1))
    assert step(scheduler) == {"b": 1}


def test_reservation_takes_blocks_for_the_prompt_and_one_step_more():
    scheduler = make_scheduler(connector=FakeConnector(4))
    assert scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0) is None
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks, group.num_reserved) == (3, 8 - 3, 1)
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("length", "taken", "refusal"), [(4, 4, "no_slot"), (31, 0, None), (32, 0, "no_blocks")]
)
def test_reservation_without_room_is_refused(length, taken, refusal):
    scheduler = make_scheduler(max_model_len=40, connector=FakeConnector(4))
    for i in range(taken):
        scheduler.reserve(make_sequence(f"{i}", [1], mode="decode"), 0.0)
    assert scheduler.reserve(make_sequence("r", [2] * length, mode="decode"), 0.0) == refusal


def test_reservation_that_nobody_activates_lapses():
    scheduler = make_scheduler(connector=FakeConnector(4))
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 5.0)
    assert scheduler.next_deadline_s() == 15.0
    assert scheduler.expire(14.9) == []
    assert [seq.request_id for seq in scheduler.expire(15.0)] == ["r"]
    assert scheduler.group_snapshots()[0].num_free_blocks == 8


def test_loaded_prompt_goes_on_with_one_token():
    connector = FakeConnector(4)
    scheduler = make_scheduler(connector=connector)
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.load("r", make_ticket("r", 8))
    scheduler.activate("r", [5])
    assert step(scheduler) == {}
    del connector.transfers["r"]
    scheduler.kv_received("r")
    assert step(scheduler) == {"r": 1}


def test_tokens_that_the_client_has_already_are_computed_after_a_load():
    connector = FakeConnector(4)
    scheduler = make_scheduler(connector=connector)
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.load("r", make_ticket("r", 8))
    scheduler.activate("r", [5, 6, 7])
    del connector.transfers["r"]
    scheduler.kv_received("r")
    assert step(scheduler) == {"r": 3}


def test_failed_load_of_an_activated_prompt_is_computed_here():
    connector = FakeConnector(4)
    scheduler = make_scheduler(connector=connector)
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.load("r", make_ticket("r", 8))
    scheduler.activate("r", [5])
    del connector.transfers["r"]
    scheduler.kv_failed("r")
    assert step(scheduler) == {"r": 9}


def test_ticket_for_another_number_of_tokens_is_refused():
    # Else the tokens that are not in it would count as computed.
    scheduler = make_scheduler(connector=FakeConnector(4))
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    with pytest.raises(TransferError, match=r"4 tokens.* 8"):
        scheduler.load("r", make_ticket("r", 4))
    assert not scheduler.get("r").is_loading


def test_blocks_of_an_aborted_load_stay_taken_until_nothing_can_be_written():
    connector = FakeConnector(4)
    scheduler = make_scheduler(connector=connector)
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.load("r", make_ticket("r", 8))
    scheduler.abort("r")
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks) == (4, 5)
    assert scheduler.add(make_sequence("r", [1])) == "duplicate"
    del connector.transfers["r"]
    scheduler.kv_failed("r")
    assert scheduler.group_snapshots()[0].num_free_blocks == 8


def test_handed_over_blocks_stay_until_they_are_sent():
    connector = FakeConnector(4)
    scheduler = make_scheduler(connector=connector)
    scheduler.add(make_sequence("p", [1] * 8, mode="prefill"), make_ticket("p", 8))
    connector.transfers["p"].num_saved_tokens = 8
    assert step(scheduler) == {"p": 8}
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks, scheduler.num_live) == (4, 6, 1)
    scheduler.release_held("p")
    assert (scheduler.group_snapshots()[0].num_free_blocks, scheduler.num_live) == (8, 0)


def test_refused_ticket_queues_nothing():
    connector = FakeConnector(4)
    connector.refuse = "not for this engine"
    scheduler = make_scheduler(connector=connector)
    with pytest.raises(TransferError, match="not for this engine"):
        scheduler.add(make_sequence("p", [1], mode="prefill"), make_ticket("p", 1))
    assert (scheduler.num_live, scheduler.num_waiting) == (0, 0)


def test_sequence_that_preempted_itself_runs_at_once_where_others_hold_its_prompt():
    connector = FakeConnector(block_size=2)
    scheduler = make_scheduler(
        num_blocks=8, block_size=2, mixed_batches=False, connector=connector, max_batch_size=4
    )
    prompt = [1, 2, 3]
    # Both compute the same first block in one step, so a's copy of it stays private.
    scheduler.add(make_sequence("lent", prompt, mode="prefill"), make_ticket("lent", num_tokens=3))
    scheduler.add(make_sequence("a", prompt))
    connector.transfers["lent"].num_saved_tokens = 3
    assert step(scheduler) == {"lent": 3, "a": 3}
    assert step(scheduler) == {"a": 1}
    assert scheduler.reserve(make_sequence("r", [5] * 5, mode="decode"), now_s=0.0) is None
    # a needs a third block and none is left: it gives up its copy and shares the lent one.
    assert step(scheduler) == {"a": 1}
    assert scheduler.get("a").num_preemptions == 1


def test_request_goes_to_the_group_that_has_blocks_even_if_another_has_more_slots():
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_batch_size=8, tt_data_parallel=2)
    scheduler.add(make_sequence("long", [1] * 7, dp_group=0))
    for name in ("b", "c"):
        scheduler.add(make_sequence(name, [2], dp_group=1))
    step(scheduler)
    scheduler.add(make_sequence("new", [3] * 3))
    assert "new" in step(scheduler)
    assert scheduler.get("new").dp_group == 1
