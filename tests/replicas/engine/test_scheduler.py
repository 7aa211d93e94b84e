"""Single decisions of the scheduler, each in a state that requires it."""

from __future__ import annotations

import pytest

from kv_transfer.connector import Failure
from kv_transfer.errors import FailureReason, TransferError
from replicas.engine.sequence import Phase
from replicas.messages import num_pairs
from tests.replicas.engine.fakes import (
    FakeConnector,
    make_sequence,
    make_siblings,
    make_ticket,
    result_of,
    scheduler_of,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def being_loaded(**changes):
    """A scheduler with a reservation whose prompt is on its way, and its connector."""
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector, **changes)
    scheduler.reserve(make_sequence("r", PROMPT, mode="decode"), 0.0)
    scheduler.loads.load("r", make_ticket("r", 8), 0, 0.0)
    return scheduler, connector


def step(scheduler, token=1):
    """Run a step that samples `token` wherever a sequence is complete; its counts by request."""
    batch = scheduler.schedule()
    if batch is None:
        return {}
    by_slot = {seq.place.slot: seq for seq in scheduler.table.rows}
    sequences = [by_slot[slot] for slot in batch.slots]
    counts = dict(zip((s.request_id for s in sequences), batch.num_scheduled_tokens, strict=True))
    tokens = [token if seq.num_new_tokens == 0 else None for seq in sequences]
    scheduler.update(batch, result_of(tokens))
    scheduler.check_invariants()
    return counts


def test_budget_is_spent_on_running_sequences_first_and_cuts_the_last_prompt():
    scheduler = scheduler_of(num_blocks=20, block_size=2, max_num_batched_tokens=10)
    for name, length in (("a", 3), ("b", 2), ("c", 8)):
        scheduler.add(make_sequence(name, [1] * length), 0.0)
    assert step(scheduler) == {"a": 3, "b": 2, "c": 5}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 3}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_calls_alternate_where_they_cannot_be_mixed():
    scheduler = scheduler_of(mixed_batches=False, max_num_batched_tokens=4)
    scheduler.add(make_sequence("a", [1] * 3), 0.0)
    scheduler.add(make_sequence("b", [1] * 10), 0.0)
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
    scheduler = scheduler_of(
        enable_chunked_prefill=False, max_num_batched_tokens=8, max_model_len=8
    )
    scheduler.add(make_sequence("a", [1] * 6), 0.0)
    scheduler.add(make_sequence("b", [2] * 6), 0.0)
    assert step(scheduler) == {"a": 6}
    assert step(scheduler) == {"a": 1, "b": 6}


def test_prompt_that_does_not_fit_the_pool_waits_whole():
    scheduler = scheduler_of(num_blocks=5, max_model_len=16)
    scheduler.add(make_sequence("a", [1] * 9, max_tokens=3), 0.0)
    scheduler.add(make_sequence("b", [2] * 9), 0.0)
    assert step(scheduler) == {"a": 9}
    assert scheduler.table.queue.num_tokens == 9
    assert [step(scheduler), step(scheduler)] == [{"a": 1}, {"a": 1}]
    assert step(scheduler) == {"b": 9}


@pytest.mark.parametrize(
    ("num_prompt", "resumes_prefill", "first", "each"),
    [
        # Two full blocks are shared, and at least one token of each choice is left to compute.
        (10, True, 10, 2),
        (8, True, 8, 4),
        (9, True, 9, 1),
        (3, True, 3, 3),
        (10, False, 10, 10),
    ],
)
def test_queued_choices_count_only_the_tokens_that_they_will_compute(
    num_prompt, resumes_prefill, first, each
):
    scheduler = scheduler_of(max_num_batched_tokens=16, resumes_prefill=resumes_prefill)
    seq = make_sequence("a", [1] * num_prompt, n=3)
    scheduler.add(seq, 0.0, make_siblings(seq))
    assert scheduler.table.queue.num_tokens == first + 2 * each
    [group] = scheduler.group_snapshots()
    assert group.num_prompt_tokens == first + 2 * each
    shared = num_prompt - each
    assert group.num_prompt_pairs == num_pairs(0, first) + 2 * num_pairs(shared, num_prompt)
    step(scheduler)
    scheduler.abort("a")
    assert scheduler.table.queue.num_tokens == 0


def test_last_running_sequence_is_preempted_and_resumes_with_its_tokens():
    scheduler = scheduler_of(num_blocks=5, max_model_len=16, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_sequence(name, [1] * 7), 0.0)
    assert step(scheduler) == {"a": 7, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"a": 1}
    second = scheduler.table.get("b")
    assert (second.phase, second.num_preemptions) == (Phase.WAITING, 1)
    assert second.num_new_tokens == 9
    scheduler.abort("a")
    assert step(scheduler) == {"b": 9}


def test_each_slot_whose_row_has_left_is_named_once_by_the_next_step():
    scheduler, gone = scheduler_of(num_blocks=5, max_model_len=16), []

    def next_step():
        batch = scheduler.schedule()
        gone.append((batch.gone, [row.slot for row in batch.new]))
        scheduler.update(batch, result_of([1] * len(batch.slots)))

    for name in "ab":
        scheduler.add(make_sequence(name, [1] * 7), 0.0)
    next_step()
    next_step()
    next_step()  # preempts b
    scheduler.abort("a")
    next_step()  # b takes the slot of a
    next_step()
    assert gone == [([], [0, 1]), ([], []), ([1], []), ([0], [0]), ([], [])]


def test_preempted_prefill_tells_the_connector():
    connector = FakeConnector(4)
    scheduler = scheduler_of(
        num_blocks=5, max_model_len=16, max_num_batched_tokens=6, connector=connector
    )
    scheduler.add(make_sequence("a", [1] * 3), 0.0)
    scheduler.add(make_sequence("b", [2] * 12, mode="prefill"), 0.0)
    assert step(scheduler) == {"a": 3, "b": 3}
    assert step(scheduler) == {"a": 1, "b": 5}
    assert step(scheduler) == {"a": 1}
    assert connector.preempted == ["b"]


def test_full_group_holds_up_only_those_that_ask_for_it():
    scheduler = scheduler_of(max_batch_size=2, tt_data_parallel=2)
    for name, group in (("a", 0), ("b", 0), ("c", 1)):
        scheduler.add(make_sequence(name, [1], dp_group=group), 0.0)
    assert step(scheduler) == {"a": 1, "c": 1}


def test_small_requests_do_not_starve_a_large_one_that_waits_for_its_group():
    scheduler = scheduler_of(
        num_blocks=5, max_model_len=16, tt_data_parallel=2, connector=FakeConnector(4)
    )
    for i in range(2):
        seq = make_sequence(f"other{i}", [1], mode="decode", dp_group=1)
        assert scheduler.reserve(seq, 0.0) is None
    scheduler.add(make_sequence("small", [3] * 3, max_tokens=2), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("large", [2] * 13, dp_group=0, max_tokens=2), 0.0)
    for i in range(30):
        scheduler.add(make_sequence(f"small{i}", [3] * 3, max_tokens=3), 0.0)
        if "large" in step(scheduler):
            return
    raise AssertionError("others took the blocks that the large request waited for")


def test_idle_group_is_used_in_the_step_in_which_another_preempts_itself():
    connector = FakeConnector(4)
    scheduler = scheduler_of(
        num_blocks=4, max_model_len=12, tt_data_parallel=2, connector=connector
    )
    scheduler.add(make_sequence("a", [1] * 4, dp_group=0), 0.0)
    assert scheduler.reserve(make_sequence("r", [2] * 6, mode="decode", dp_group=0), 0.0) is None
    assert step(scheduler) == {"a": 4}
    # Every block of group 0 is taken: its only running sequence must give its own up.
    scheduler.add(make_sequence("b", [3], dp_group=1), 0.0)
    assert step(scheduler) == {"b": 1}


def test_reservation_takes_blocks_for_the_prompt_and_one_step_more():
    scheduler = scheduler_of(connector=FakeConnector(4))
    assert scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0) is None
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks, group.num_reserved) == (3, [8 - 3], 1)
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("length", "taken", "refusal"), [(4, 4, "no_slot"), (31, 0, None), (32, 0, "no_blocks")]
)
def test_reservation_without_room_is_refused(length, taken, refusal):
    scheduler = scheduler_of(max_model_len=40, connector=FakeConnector(4))
    for i in range(taken):
        scheduler.reserve(make_sequence(f"{i}", [1], mode="decode"), 0.0)
    assert scheduler.reserve(make_sequence("r", [2] * length, mode="decode"), 0.0) == refusal


def test_reservation_that_nobody_activates_lapses():
    scheduler = scheduler_of(connector=FakeConnector(4))
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 5.0)
    assert scheduler.next_deadline_s() == 15.0
    assert scheduler.expire(14.9) == []
    assert [seq.request_id for seq in scheduler.expire(15.0)] == ["r"]
    assert scheduler.group_snapshots()[0].num_free_blocks == [8]


def test_loaded_prompt_goes_on_with_one_token():
    scheduler, connector = being_loaded()
    scheduler.activate("r", [[5]], 0.0)
    assert step(scheduler) == {}
    del connector.transfers["r"]
    scheduler.kv_ended("r", None, 0.0)
    assert step(scheduler) == {"r": 1}


def test_tokens_that_the_client_has_already_are_computed_after_a_load():
    scheduler, connector = being_loaded()
    scheduler.activate("r", [[5, 6, 7]], 0.0)
    del connector.transfers["r"]
    scheduler.kv_ended("r", None, 0.0)
    assert step(scheduler) == {"r": 3}


def test_failed_load_of_an_activated_prompt_is_computed_here():
    scheduler, connector = being_loaded()
    scheduler.activate("r", [[5]], 0.0)
    del connector.transfers["r"]
    scheduler.kv_ended("r", Failure(FailureReason.PEER_DEAD), 0.0)
    assert step(scheduler) == {"r": 9}


def test_only_the_tokens_of_a_ticket_count_as_computed():
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.loads.load("r", make_ticket("r", 4), 0, 0.0)
    scheduler.activate("r", [[5]], 0.0)
    del connector.transfers["r"]
    scheduler.kv_ended("r", None, 0.0)
    assert step(scheduler) == {"r": 5}


def test_a_ticket_for_more_than_the_prompt_loads_nothing():
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.loads.load("r", make_ticket("r", 9), 0, 0.0)
    assert connector.cancelled == {"r"}
    assert connector.transfers["r"].block_ids == ()


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_block_that_may_be_computed_again_is_nobody_elses(is_delivered):
    scheduler, connector = being_loaded(num_blocks=16)
    del connector.transfers["r"]
    if is_delivered:
        scheduler.kv_ended("r", None, 0.0)
    else:
        # Given up after the last row was verified.
        scheduler.kv_ended("r", Failure(FailureReason.PEER_DEAD, 8), 0.0)
    scheduler.add(make_sequence("early", [*PROMPT, 9]), 0.0)
    assert step(scheduler) == {"early": 5}, "the last block of r is not to be found yet"
    # Its first token was lost with the engine that drew it: the logits are computed again here.
    scheduler.activate("r", [], 0.0)
    scheduler.check_invariants()
    assert step(scheduler) == {"early": 1, "r": 1}
    scheduler.add(make_sequence("late", [*PROMPT, 9]), 0.0)
    assert step(scheduler)["late"] == 1


def test_converted_kv_is_found_by_nobody_until_it_is_computed_here():
    scheduler, connector = being_loaded(num_blocks=16)
    del connector.transfers["r"]
    scheduler.kv_ended("r", None, 0.0, is_converted=True)
    scheduler.activate("r", [[9]], 0.0)
    for _ in range(8):
        assert step(scheduler) == {"r": 1}
    # Nor KV that was computed from it.
    scheduler.add(make_sequence("other", [*PROMPT, 9, 1, 1, 1, 1, 1]), 0.0)
    assert step(scheduler) == {"r": 1, "other": 14}
    scheduler.add(make_sequence("third", [*PROMPT, 9, 1, 1, 1, 1, 1]), 0.0)
    assert step(scheduler)["third"] == 2


@pytest.mark.parametrize("num_verified", [0, 4])
def test_of_a_failed_load_what_counts_decides_whether_blocks_are_found(num_verified):
    scheduler, connector = being_loaded(num_blocks=16)
    del connector.transfers["r"]
    failure = Failure(FailureReason.PEER_DEAD, num_verified)
    scheduler.kv_ended("r", failure, 0.0, is_converted=True)
    scheduler.activate("r", [], 0.0)
    assert step(scheduler) == {"r": 8 - num_verified}
    scheduler.add(make_sequence("other", [*PROMPT, 9]), 0.0)
    assert step(scheduler) == {"r": 1, "other": 9 if num_verified else 1}


def test_blocks_of_an_aborted_load_stay_taken_until_nothing_can_be_written():
    scheduler, connector = being_loaded()
    scheduler.abort("r")
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks) == (4, [5])
    assert scheduler.add(make_sequence("r", [1]), 0.0) == "duplicate"
    del connector.transfers["r"]
    scheduler.kv_ended("r", Failure(FailureReason.PEER_DEAD), 0.0)
    assert scheduler.group_snapshots()[0].num_free_blocks == [8]


def test_handed_over_blocks_stay_until_they_are_sent():
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    scheduler.add(make_sequence("p", [1] * 8, mode="prefill"), 0.0)
    connector.transfers["p"].num_saved_tokens = 8
    assert step(scheduler) == {"p": 8}
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks, scheduler.table.num_live) == (4, [6], 1)
    scheduler.release_held("p")
    assert (scheduler.group_snapshots()[0].num_free_blocks, scheduler.table.num_live) == ([8], 0)


def test_refused_ticket_queues_nothing():
    connector = FakeConnector(4)
    connector.refuse = "not for this engine"
    scheduler = scheduler_of(connector=connector)
    with pytest.raises(TransferError, match="not for this engine"):
        scheduler.add(make_sequence("p", [1], mode="prefill"), 0.0)
    assert (scheduler.table.num_live, len(scheduler.table.queue)) == (0, 0)


def test_sequence_that_preempted_itself_runs_at_once_where_others_hold_its_prompt():
    connector = FakeConnector(2)
    scheduler = scheduler_of(
        num_blocks=8, block_size=2, mixed_batches=False, connector=connector, max_batch_size=4
    )
    prompt = [1, 2, 3]
    # Both compute the same first block in one step, so a's copy of it stays private.
    scheduler.add(make_sequence("lent", prompt, mode="prefill"), 0.0)
    scheduler.add(make_sequence("a", prompt), 0.0)
    connector.transfers["lent"].num_saved_tokens = 3
    assert step(scheduler) == {"lent": 3, "a": 3}
    assert step(scheduler) == {"a": 1}
    assert scheduler.reserve(make_sequence("r", [5] * 5, mode="decode"), now_s=0.0) is None
    # a needs a third block and none is left: it gives up its copy and shares the lent one.
    assert step(scheduler) == {"a": 1}
    assert scheduler.table.get("a").num_preemptions == 1


def test_request_goes_to_the_group_that_has_blocks_even_if_another_has_more_slots():
    scheduler = scheduler_of(num_blocks=5, block_size=2, max_batch_size=8, tt_data_parallel=2)
    scheduler.add(make_sequence("long", [1] * 7, dp_group=0), 0.0)
    for name in ("b", "c"):
        scheduler.add(make_sequence(name, [2], dp_group=1), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("new", [3] * 3), 0.0)
    assert "new" in step(scheduler)
    assert scheduler.table.get("new").place.dp_group == 1


def test_a_prompt_goes_to_the_group_that_is_done_with_it_first():
    """Its prefix is cached in a group with fewer slots, which counts less while prompts wait."""
    scheduler = scheduler_of(num_blocks=60, max_batch_size=8, tt_data_parallel=2)
    cached = [*range(100, 116)]
    scheduler.add(make_sequence("first", cached, dp_group=1, max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("runs", [1], dp_group=1), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("other", [2] * 5), 0.0)
    step(scheduler)
    assert scheduler.table.get("other").place.dp_group == 0, "it is the emptiest"
    for name in ("same0", "same1"):
        scheduler.add(make_sequence(name, [*cached, 3]), 0.0)
    step(scheduler)
    assert scheduler.table.get("same0").place.dp_group == 1
    assert scheduler.table.get("same1").place.dp_group == 1, (
        "what is missing of two is less than of one whole"
    )


def test_prompts_of_one_step_go_all_around():
    scheduler = scheduler_of(num_blocks=60, max_batch_size=8, tt_data_parallel=2)
    for i in range(4):
        scheduler.add(make_sequence(f"r{i}", [i + 1] * 4), 0.0)
    step(scheduler)
    assert sorted(scheduler.table.get(f"r{i}").place.dp_group for i in range(4)) == [0, 0, 1, 1]


# --- prompts that a store knows ----------------------------------------------------------------


def with_store(found, **changes):
    """A scheduler whose connector's store has so many leading tokens of these requests."""
    connector = FakeConnector(changes.get("block_size", 4))
    connector.pool.update(found)
    return scheduler_of(connector=connector, **changes), connector


def arrive(scheduler, connector, request_id):
    del connector.transfers[request_id]
    assert scheduler.kv_ended(request_id, None, 0.0) is None


def fail(scheduler, connector, request_id, num_tokens, reason=FailureReason.STORE):
    del connector.transfers[request_id]
    return scheduler.kv_ended(request_id, Failure(reason, num_tokens), 0.0)


def test_every_request_is_announced_with_its_prompt_and_salt():
    connector = FakeConnector(4)
    seen = []
    connector.on_new_request = lambda request, now_s: seen.append((request, now_s))
    scheduler = scheduler_of(connector=connector)
    scheduler.add(make_sequence("a", [1, 2], cache_salt="s"), 3.0)
    [(request, now_s)] = seen
    assert (request.request_id, list(request.prompt_token_ids)) == ("a", [1, 2])
    assert (request.ticket, request.cache_salt, now_s) == (b"", "s", 3.0)


def test_a_prompt_that_a_store_knows_is_loaded_and_not_computed():
    scheduler, connector = with_store({"a": 8})
    scheduler.add(make_sequence("a", [1] * 10), 0.0)
    assert step(scheduler) == {}
    seq = scheduler.table.get("a")
    assert (seq.phase, len(seq.place.block_ids[0]), seq.place.slot) == (Phase.LOADING, 3, 0)
    transfer = connector.transfers["a"]
    assert (transfer.start, transfer.block_ids) == (0, (tuple(seq.place.block_ids[0][:2]),))
    [group] = scheduler.group_snapshots()
    assert (group.num_running, group.num_reserved, group.num_free_blocks) == (0, 1, [5])
    assert step(scheduler) == {}
    arrive(scheduler, connector, "a")
    assert (seq.phase, seq.place.num_cached_tokens) == (Phase.PREFILL, 8)
    assert [step(scheduler), step(scheduler)] == [{"a": 2}, {"a": 1}]
    [group] = scheduler.group_snapshots()
    assert (group.num_running, group.num_reserved) == (1, 0)


def test_the_last_token_of_a_prompt_that_a_store_knows_whole_is_computed():
    scheduler, connector = with_store({"a": 8})
    scheduler.add(make_sequence("a", [1] * 8), 0.0)
    step(scheduler)
    arrive(scheduler, connector, "a")
    assert step(scheduler) == {"a": 1}


def test_only_what_is_not_cached_here_is_loaded():
    scheduler, connector = with_store({"b": 12})
    scheduler.add(make_sequence("a", [1] * 9, max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("b", [1] * 14), 0.0)
    step(scheduler)
    assert connector.transfers["b"].start == 8
    arrive(scheduler, connector, "b")
    assert step(scheduler) == {"b": 2}


def test_loaded_blocks_are_found_only_once_they_are_here():
    scheduler, connector = with_store({"a": 8})
    scheduler.add(make_sequence("a", [1] * 9), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("b", [1] * 9), 0.0)
    assert step(scheduler) == {"b": 9}
    arrive(scheduler, connector, "a")
    scheduler.abort("b")
    scheduler.add(make_sequence("c", [1] * 9), 0.0)
    assert step(scheduler) == {"a": 1, "c": 1}


@pytest.mark.parametrize(("num_tokens", "left"), [(0, 14), (3, 14), (11, 6), (12, 2), (99, 2)])
def test_of_a_failed_load_whole_verified_blocks_are_kept(num_tokens, left):
    scheduler, connector = with_store({"a": 12})
    scheduler.add(make_sequence("a", [1] * 14), 0.0)
    step(scheduler)
    assert fail(scheduler, connector, "a", num_tokens) is None
    assert scheduler.table.get("a").place.num_cached_tokens == 14 - left
    assert step(scheduler) == {"a": left}
    assert scheduler.loads.num_recompute_tokens == left - 2


def test_a_failed_load_keeps_what_was_cached_here():
    scheduler, connector = with_store({"b": 12})
    scheduler.add(make_sequence("a", [1] * 9, max_tokens=1), 0.0)
    step(scheduler)
    scheduler.add(make_sequence("b", [1] * 14), 0.0)
    step(scheduler)
    fail(scheduler, connector, "b", 0)
    assert step(scheduler) == {"b": 6}
    assert scheduler.loads.num_recompute_tokens == 4


def test_a_generator_that_computes_whole_prompts_only_is_given_no_parts():
    connector = FakeConnector(4)
    connector.pool["a"] = 8
    scheduler = scheduler_of(connector=connector, resumes_prefill=False)
    scheduler.add(make_sequence("a", [1] * 10), 0.0)
    assert step(scheduler) == {"a": 10}
    scheduler.reserve(make_sequence("r", [2] * 8, mode="decode"), 0.0)
    scheduler.loads.load("r", make_ticket("r", 8), 0, 0.0)
    scheduler.activate("r", [[5]], 0.0)
    fail(scheduler, connector, "r", 4)
    assert step(scheduler) == {"a": 1, "r": 9}


def test_a_lookup_under_way_holds_up_nobody_else():
    scheduler, connector = with_store({"a": None})
    scheduler.add(make_sequence("a", [1] * 10), 0.0)
    scheduler.add(make_sequence("b", [2] * 3), 0.0)
    assert step(scheduler) == {"b": 3}
    assert (len(scheduler.table.queue), scheduler.awaits_connector) == (1, True)
    assert step(scheduler) == {"b": 1}
    connector.pool["a"] = 0
    assert step(scheduler) == {"b": 1, "a": 10}
    assert not scheduler.awaits_connector


def test_a_lookup_that_nobody_waits_for_any_more_is_forgotten():
    scheduler, _ = with_store({"a": None})
    scheduler.add(make_sequence("a", [1] * 10), 0.0)
    step(scheduler)
    scheduler.abort("a")
    scheduler.check_invariants()
    assert (scheduler.table.num_live, scheduler.awaits_connector) == (0, False)


def test_a_load_waits_for_room_for_its_whole_prompt():
    scheduler, connector = with_store({"b": 8}, num_blocks=5, max_model_len=16)
    scheduler.add(make_sequence("a", [1] * 9, max_tokens=3), 0.0)
    scheduler.add(make_sequence("b", [2] * 9), 0.0)
    assert [step(scheduler) for _ in range(3)] == [{"a": 9}, {"a": 1}, {"a": 1}]
    assert "b" not in connector.transfers
    step(scheduler)
    assert "b" in connector.transfers


def test_a_loading_sequence_is_not_preempted_and_two_do_not_wait_for_each_other():
    scheduler, connector = with_store({"b": 4}, num_blocks=5, max_model_len=16)
    scheduler.add(make_sequence("a", [1] * 7, max_tokens=4), 0.0)
    assert step(scheduler) == {"a": 7}
    scheduler.add(make_sequence("b", [2] * 7), 0.0)
    assert step(scheduler) == {"a": 1}
    # a needs a third block: it gives up its own rather than those that KV is written to.
    assert step(scheduler) == {}
    assert scheduler.table.get("a").phase is Phase.WAITING
    assert scheduler.table.get("b").phase is Phase.LOADING
    arrive(scheduler, connector, "b")
    assert step(scheduler) == {"b": 3}


def test_an_aborted_load_holds_its_blocks_until_the_connector_has_let_go():
    scheduler, connector = with_store({"a": 8})
    scheduler.add(make_sequence("a", [1] * 10), 0.0)
    step(scheduler)
    scheduler.abort("a")
    [group] = scheduler.group_snapshots()
    assert (group.num_empty_slots, group.num_free_blocks, group.num_reserved) == (4, [5], 0)
    assert connector.cancelled == {"a"}
    fail(scheduler, connector, "a", 8, FailureReason.CANCELLED)
    assert (scheduler.group_snapshots()[0].num_free_blocks, scheduler.table.num_live) == ([8], 0)
    # Blocks that were never known to be complete cannot be found.
    scheduler.add(make_sequence("b", [1] * 10), 0.0)
    assert step(scheduler) == {"b": 10}


def test_a_preempted_sequence_asks_the_store_again():
    scheduler, connector = with_store({}, num_blocks=5, max_model_len=16)
    for name in "ab":
        scheduler.add(make_sequence(name, [1] * 7, ignore_eos=True), 0.0)
    step(scheduler)
    step(scheduler)
    connector.pool["b"] = 4
    assert step(scheduler) == {"a": 1}
    scheduler.reset_prefix_cache()
    scheduler.abort("a")
    assert step(scheduler) == {}
    assert scheduler.table.get("b").phase is Phase.LOADING
    arrive(scheduler, connector, "b")
    assert scheduler.table.get("b").place.num_cached_tokens == 0
    assert step(scheduler) == {"b": 5}


# --- KV that does not come ---------------------------------------------------------------------


def loading(tokens=(), policy="recompute"):
    """A reserved sequence of twelve tokens whose KV is on its way, activated with `tokens`."""
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector, kv_load_failure_policy=policy)
    scheduler.reserve(make_sequence("r", [1] * 12, mode="decode"), 0.0)
    scheduler.loads.load("r", make_ticket("r", 12), 7, 0.0)
    if tokens:
        scheduler.activate("r", [list(tokens)], 0.0)
    return scheduler, connector


@pytest.mark.parametrize(("num_tokens", "left"), [(0, 13), (7, 9), (8, 5), (12, 1)])
def test_of_a_failed_transfer_whole_verified_blocks_are_kept(num_tokens, left):
    scheduler, connector = loading([5])
    seq = fail(scheduler, connector, "r", num_tokens, FailureReason.PEER_DEAD)
    assert (seq.load.failure, seq.load.epoch) == ("peer_dead", 7)
    assert step(scheduler) == {"r": left}
    assert scheduler.loads.num_recompute_tokens == left - 1


def test_a_reservation_that_nobody_needs_any_more_fetches_nothing_and_counts_as_its_client_says():
    scheduler, connector = loading()
    scheduler.abort("r", "stop")
    assert connector.cancelled == {"r"}
    assert scheduler.group_counters()[0].requests_finished == {"stop": 1}


def test_the_next_ticket_fetches_only_what_is_missing():
    scheduler, connector = loading()
    fail(scheduler, connector, "r", 8)
    scheduler.loads.load("r", make_ticket("r", 12, 1), 1, 0.0)
    assert connector.transfers["r"].start == 8
    del connector.transfers["r"]
    scheduler.kv_ended("r", None, 0.0)
    scheduler.activate("r", [[5]], 0.0)
    assert step(scheduler) == {"r": 1}
    assert scheduler.loads.num_recompute_tokens == 0


def test_a_request_that_must_not_be_recomputed_ends_when_its_kv_fails():
    scheduler, connector = loading([5], policy="fail")
    seq = fail(scheduler, connector, "r", 8)
    assert (seq.phase, seq.load.failure) == (Phase.ENDED, "store")
    assert scheduler.table.num_live == 0
    assert scheduler.group_counters()[0].requests_finished == {"error": 1}
    assert scheduler.loads.num_recompute_tokens == 0


def test_a_request_that_must_not_be_recomputed_ends_when_it_is_activated_without_its_kv():
    scheduler, connector = loading(policy="fail")
    seq = fail(scheduler, connector, "r", 0)
    assert seq.phase is Phase.RESERVED, "another ticket may come"
    assert scheduler.activate("r", [[5]], 0.0) is seq
    assert (seq.phase, scheduler.table.num_live) == (Phase.ENDED, 0)


def test_a_client_may_ask_for_the_prompt_to_be_computed_whatever_failed():
    scheduler, connector = loading(policy="fail")
    fail(scheduler, connector, "r", 4)
    assert scheduler.activate("r", [], 0.0) is None
    assert step(scheduler) == {"r": 8}


def activated_with_a_token_and_never_given_a_ticket(policy, cached=0):
    """A reserved sequence of twelve tokens, of which so many are cached here."""
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector, kv_load_failure_policy=policy)
    if cached:
        scheduler.add(make_sequence("before", [1] * cached, max_tokens=1), 0.0)
        step(scheduler)
    scheduler.reserve(make_sequence("r", [1] * 12, mode="decode"), 0.0)
    return scheduler, scheduler.activate("r", [[5]], 0.0)


def test_a_request_that_must_not_be_recomputed_ends_without_a_ticket_too():
    scheduler, ended = activated_with_a_token_and_never_given_a_ticket("fail")
    assert (ended.phase, ended.load.failure) == (Phase.ENDED, "no_ticket")
    assert (scheduler.table.num_live, scheduler.loads.num_recompute_tokens) == (0, 0)


@pytest.mark.parametrize(("cached", "left"), [(0, 13), (8, 5)])
def test_what_is_recomputed_without_a_ticket_is_counted_as_such(cached, left):
    scheduler, ended = activated_with_a_token_and_never_given_a_ticket("recompute", cached)
    assert ended is None
    assert step(scheduler) == {"r": left}
    assert scheduler.loads.num_recompute_tokens == left - 1


def test_a_prompt_that_the_client_wants_computed_here_is_no_recomputation():
    scheduler = scheduler_of(connector=FakeConnector(4), kv_load_failure_policy="fail")
    scheduler.reserve(make_sequence("r", [1] * 12, mode="decode"), 0.0)
    assert scheduler.activate("r", [], 0.0) is None
    assert step(scheduler) == {"r": 12}
    assert scheduler.loads.num_recompute_tokens == 0


def test_kv_that_is_here_in_spite_of_a_failure_is_used():
    scheduler, connector = loading([5], policy="fail")
    fail(scheduler, connector, "r", 12)
    assert step(scheduler) == {"r": 1}


def test_a_refused_ticket_is_a_failure_too():
    scheduler, connector = loading(policy="fail")
    fail(scheduler, connector, "r", 0)
    connector.refuse = "forged"
    with pytest.raises(TransferError):
        scheduler.loads.load("r", make_ticket("r", 12, 1), 8, 0.0)
    ended = scheduler.activate("r", [[5]], 0.0)
    assert (ended.phase, ended.load.failure) == (Phase.ENDED, "bad_ticket")


def test_a_reserved_sequence_waits_for_a_store_that_does_not_know_yet():
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    connector.pool["r"] = None
    scheduler.reserve(make_sequence("r", [1] * 8, mode="decode"), 0.0)
    scheduler.loads.load("r", make_ticket("r", 8), 0, 0.0)
    scheduler.activate("r", [[5]], 0.0)
    assert step(scheduler) == {}
    scheduler.check_invariants()
    assert connector.transfers["r"].block_ids == ()
    connector.pool["r"] = 8
    assert step(scheduler) == {}
    assert len(connector.transfers["r"].block_ids[0]) == 2
    del connector.transfers["r"]
    assert scheduler.kv_ended("r", None, 0.0).request_id == "r"
    assert step(scheduler) == {"r": 1}


def test_news_of_what_a_live_sequence_sends_concern_no_client():
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    scheduler.add(make_sequence("p", [1] * 8, mode="prefill"), 0.0)
    assert fail(scheduler, connector, "p", 0, FailureReason.EXPIRED) is None
    assert step(scheduler) == {"p": 8}
    assert scheduler.table.num_live == 0


def test_what_a_finished_request_computed_may_still_be_kept():
    # Only a request that is given up has its transfer ended.
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    cancelled = []
    connector.cancel = cancelled.append
    for name in ("done", "given up"):
        scheduler.add(make_sequence(name, [1] * 4, max_tokens=1), 0.0)
    scheduler.abort("given up")
    step(scheduler)
    assert (cancelled, scheduler.table.num_live) == (["given up"], 0)


def test_cache_salts_keep_equal_prompts_apart():
    scheduler = scheduler_of()
    cached = {}
    for i, salt in enumerate(["", "one", "two", "one", ""]):
        seq = make_sequence(f"{i}", [1] * 9, max_tokens=1, cache_salt=salt)
        scheduler.add(seq, 0.0)
        step(scheduler)
        cached[i] = seq.place.num_cached_tokens
    assert list(cached.values()) == [0, 0, 0, 8, 8]


def test_a_reserved_prompt_that_is_computed_here_may_be_kept():
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector)
    for name in ("here", "there"):
        scheduler.reserve(make_sequence(name, [1] * 8, mode="decode"), 0.0)
    scheduler.loads.load("there", make_ticket("there", 8), 0, 0.0)
    for name in ("here", "there"):
        scheduler.activate(name, [], 0.0)
    assert connector.announced == ["here"]
    assert connector.cancelled == {"there"}


def test_a_scheduler_finishes_what_it_loads():
    scheduler, connector = with_store({"a": 8})
    scheduler.add(make_sequence("a", [1] * 10, max_tokens=1), 0.0)
    step(scheduler)
    arrive(scheduler, connector, "a")
    assert step(scheduler) == {"a": 2}
    assert scheduler.table.num_live == 0


# --- KV that is lent while its sequence runs on -------------------------------------------------


def lending(num_tokens, num_output_tokens=6, **changes):
    """A sequence of eight tokens that has got some more, of which KV is to be lent."""
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector, **changes)
    scheduler.add(make_sequence("r", PROMPT, max_tokens=16, ignore_eos=True), 0.0)
    for _ in range(num_output_tokens):
        step(scheduler)
    scheduler.lend("r", make_ticket("r", num_tokens, producer="here"), 0.0)
    return scheduler, connector


@pytest.mark.parametrize(("num_tokens", "is_lent"), [(8, True), (12, True), (13, False)])
def test_of_a_running_sequence_only_full_blocks_are_lent(num_tokens, is_lent):
    # Fourteen tokens, the last of which is not computed: three blocks are full.
    _, connector = lending(num_tokens)
    assert ("r" not in connector.cancelled) == is_lent
    assert connector.transfers["r"].num_saved_tokens == 12


def test_a_block_whose_last_token_is_not_computed_yet_is_not_lent():
    scheduler, connector = lending(12, num_output_tokens=4)
    assert scheduler.table.get("r").num_tokens == 12
    assert connector.cancelled == {"r"}


def test_a_sequence_that_lends_goes_on_and_its_blocks_outlive_it():
    scheduler, connector = lending(8)
    free = scheduler.group_snapshots()[0].num_free_blocks
    for _ in range(10):
        assert step(scheduler) == {"r": 1}
    assert scheduler.table.get("r") is None
    assert scheduler.table.num_live == 1
    assert scheduler.group_snapshots()[0].num_free_blocks == [free[0] - 2]
    del connector.transfers["r"]
    scheduler.release_held("r")
    assert scheduler.table.num_live == 0
    assert scheduler.group_snapshots()[0].num_free_blocks == [8]


def test_a_sequence_that_is_preempted_lends_no_more_and_goes_on_by_itself():
    connector = FakeConnector(4)
    scheduler = scheduler_of(num_blocks=6, max_model_len=20, connector=connector)
    for request_id, prompt in (("early", [9] * 4), ("r", PROMPT)):
        sequence = make_sequence(request_id, prompt, max_tokens=9, ignore_eos=True)
        assert scheduler.add(sequence, 0.0) is None
        step(scheduler)
    scheduler.lend("r", make_ticket("r", 8, producer="here"), 0.0)
    while not scheduler.table.get("r").num_preemptions:
        assert not connector.cancelled
        step(scheduler)
    assert connector.cancelled == {"r"}
    assert fail(scheduler, connector, "r", 0, FailureReason.CANCELLED) is None, "no client's news"
    while scheduler.table.num_live:
        assert step(scheduler)
    assert scheduler.group_counters()[0].requests_finished == {"length": 2}


def test_nothing_is_lent_of_what_came_in_another_dtype_or_has_no_blocks():
    scheduler, connector = being_loaded()
    scheduler.activate("r", [[5]], 0.0)
    del connector.transfers["r"]
    scheduler.kv_ended("r", None, 0.0, is_converted=True)
    assert step(scheduler) == {"r": 1}
    scheduler.lend("r", make_ticket("r", 4, producer="here"), 0.0)
    assert connector.cancelled == {"r"}


def test_a_stream_is_reserved_for_with_its_tokens_and_finds_them_in_the_cache():
    scheduler = scheduler_of(num_blocks=17, connector=FakeConnector(4))
    scheduler.add(make_sequence("before", [*PROMPT, 1, 1, 1, 1, 1], max_tokens=1), 0.0)
    step(scheduler)
    heir = make_sequence("r", PROMPT, mode="decode", output=[1] * 6)
    assert scheduler.reserve(heir, 0.0) is None
    assert (heir.num_computed_tokens, heir.place.capacity) == (12, 16)
    scheduler.activate("r", [[1] * 7], 0.0)
    assert heir.token_ids == [*PROMPT, *[1] * 7]
    assert step(scheduler) == {"r": 3}


def heir(num_tokens, **changes):
    """A stream of six tokens whose KV is on its way from where it is decoded."""
    connector = FakeConnector(4)
    scheduler = scheduler_of(connector=connector, **changes)
    scheduler.reserve(make_sequence("r", PROMPT, mode="decode", output=[1] * 6), 0.0)
    scheduler.loads.load("r", make_ticket("r", num_tokens), 3, 0.0)
    return scheduler, connector


@pytest.mark.parametrize(("num_tokens", "left"), [(12, 5), (8, 9), (10, 9)])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_stream_goes_on_with_lent_kv_and_computes_what_came_meanwhile(num_tokens, left, policy):
    scheduler, connector = heir(num_tokens, kv_load_failure_policy=policy)
    del connector.transfers["r"]
    assert scheduler.kv_ended("r", None, 0.0).request_id == "r"
    assert scheduler.activate("r", [[1] * 9], 0.0) is None
    assert step(scheduler) == {"r": left}
    assert scheduler.loads.num_recompute_tokens == 0


def test_a_stream_that_starts_before_its_kv_came_does_not_wait_for_the_rest():
    scheduler, connector = heir(12)
    scheduler.activate("r", [[1] * 7], 0.0)
    assert connector.cancelled == {"r"}
    assert step(scheduler) == {}, "its blocks may still be written to"
    fail(scheduler, connector, "r", 8, FailureReason.CANCELLED)
    assert step(scheduler) == {"r": 7}
