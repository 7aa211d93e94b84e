"""Scheduling by priority: order of the queue, choice of the victim, refusal without the policy."""

from __future__ import annotations

import pytest

from replicas.engine.requests import RequestChecks
from replicas.engine.sequence import Phase
from replicas.messages import AddRequest
from tests.replicas.engine.fakes import make_sequence, result_of, scheduler_of
from tests.replicas.engine.test_scheduler import step


def by_priority(**changes):
    return scheduler_of(scheduling_policy="priority", enable_prefix_caching=False, **changes)


def add(scheduler, length=3, **priorities):
    for name, priority in priorities.items():
        scheduler.add(make_sequence(name, [1] * length, priority=priority, max_tokens=9), 0.0)


def queued(scheduler):
    return [seq.request_id for seq in scheduler.table.queue]


@pytest.mark.parametrize(
    ("policy", "order"), [("priority", ["d", "b", "c", "a"]), ("fcfs", ["a", "b", "c", "d"])]
)
def test_queue_is_in_order_of_priority_then_of_arrival(policy, order):
    scheduler = scheduler_of(scheduling_policy=policy, max_batch_size=1)
    add(scheduler, a=1, b=0, c=0, d=-(2**63))
    assert queued(scheduler) == order
    ran = []
    for _ in order:
        [name] = step(scheduler)
        ran.append(name)
        scheduler.abort(name)
    assert ran == order


def test_later_request_of_better_priority_is_admitted_first_and_preempts_nothing():
    scheduler = by_priority(max_batch_size=1)
    add(scheduler, a=5, b=5)
    assert step(scheduler) == {"a": 3}
    add(scheduler, c=1)
    assert step(scheduler) == {"a": 1}
    scheduler.abort("a")
    assert step(scheduler) == {"c": 3}


def test_preempted_row_returns_to_its_own_place_in_the_queue():
    scheduler = by_priority(num_blocks=5, max_model_len=16)
    add(scheduler, length=7, a=0, b=5)
    step(scheduler)
    add(scheduler, c=1, d=5)
    step(scheduler)
    assert step(scheduler) == {"a": 1}
    assert queued(scheduler) == ["c", "b", "d"]


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [({"a": 0, "b": 1}, "b"), ({"a": 1, "b": 0}, "a"), ({"a": 1, "b": 1}, "b")],
)
def test_row_of_the_worst_priority_is_preempted_and_the_last_of_equal_ones(priorities, victim):
    scheduler = by_priority(num_blocks=5, max_model_len=16)
    add(scheduler, length=7, **priorities)
    step(scheduler)
    step(scheduler)
    [winner] = {"a", "b"} - {victim}
    assert step(scheduler) == {winner: 1}
    assert scheduler.table.get(victim).phase is Phase.WAITING


def test_planned_row_that_is_preempted_gives_back_its_tokens():
    scheduler = by_priority(num_blocks=7, max_model_len=16, max_num_batched_tokens=8)
    # The worst row was admitted first, and so is planned before the row that lacks a block.
    add(scheduler, length=1, a=5)
    step(scheduler)
    add(scheduler, b=0)
    step(scheduler)
    add(scheduler, length=14, c=1)
    assert step(scheduler) == {"a": 1, "b": 1, "c": 6}
    assert step(scheduler) == {"b": 1, "c": 7}
    assert queued(scheduler) == ["a"]


def test_planned_row_that_is_preempted_gives_back_its_block():
    scheduler = by_priority(num_blocks=4, max_model_len=12)
    add(scheduler, a=5, b=0)
    step(scheduler)
    step(scheduler)
    slots = {name: scheduler.table.get(name).place.slot for name in "ab"}
    batch = scheduler.schedule()
    assert batch.slots == [slots["b"]]
    assert [slot for slot, _ in batch.appended_blocks] == [slots["b"]]
    assert batch.gone == [slots["a"]]
    scheduler.update(batch, result_of([1]))
    scheduler.check_invariants()


def test_arrival_is_kept_over_a_preemption():
    scheduler = by_priority(num_blocks=5, max_model_len=16)
    add(scheduler, length=7, a=0, b=0)
    step(scheduler)
    add(scheduler, length=7, c=0)
    step(scheduler)
    step(scheduler)
    assert queued(scheduler) == ["b", "c"]


@pytest.mark.parametrize(
    ("policy", "priority", "is_refused"),
    [("fcfs", 0, False), ("fcfs", 1, True), ("fcfs", -1, True), ("priority", -1, False)],
)
def test_priority_is_refused_where_it_would_change_nothing(policy, priority, is_refused):
    checks = RequestChecks(
        num_groups=1, max_model_len=64, vocab_size=9, has_connector=False, scheduling_policy=policy
    )
    request = make_sequence("a", [1], priority=priority).request
    problem = checks.problem(AddRequest(request))
    if is_refused:
        assert f"priority is {priority}" in problem
        assert "scheduling_policy: priority" in problem
    else:
        assert problem is None
