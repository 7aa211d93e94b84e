"""Sequences wait for their grammars and hold up no others; what cannot be used ends them."""

from __future__ import annotations

import pytest

from replicas.engine.preparations import (
    FIRST_GRAMMAR_TIMEOUT_S,
    GRAMMAR_CPU_S,
    GRAMMAR_TIMEOUT_S,
    LATE,
    Preparations,
)
from replicas.engine.sequence import Phase
from replicas.messages import (
    BAD_GRAMMAR,
    GRAMMARS_BUSY,
    KV_TRANSFER_FAILED,
    Abort,
    AddRequest,
    EngineRequest,
    TokenOutput,
)
from replicas.sampling.preparation import Preparation, Prepared
from replicas.sampling_params import SamplingParams, StructuredOutputs
from tests.engines import take_events
from tests.replicas.engine.fakes import make_sequence, make_ticket, scheduler_of
from tests.replicas.engine.test_scheduler import PROMPT, being_loaded, step
from tests.replicas.engine.virtual import CLIENT, virtual_side
from tests.replicas.generators.simulated.engines import simulated_config

A, B, C = (StructuredOutputs(regex=letter) for letter in "abc")


def sequence(name, spec, **options):
    return make_sequence(name, PROMPT, structured_outputs=spec, **options)


@pytest.fixture
def preparations():
    made = Preparations()
    # The vocabulary has been read.
    made.add(first := sequence("first", StructuredOutputs(regex="first")))
    made.take_orders(0.0)
    made.end([Prepared(StructuredOutputs(regex="first"))], 0.0)
    made.remove(first)
    assert made.take_orders(0.0) == [Preparation(StructuredOutputs(regex="first"), is_wanted=False)]
    made.end([], 0.0)
    assert not made.is_active
    return made


def waiting(preparations):
    preparations.check_invariants()
    return {seq.request_id for seq in preparations.waiting}


def test_a_sequence_without_a_grammar_is_no_concern(preparations):
    preparations.add(seq := sequence("r", None))
    preparations.remove(seq)
    assert not preparations.is_active
    assert preparations.next_deadline_s() is None


def test_sequences_of_one_grammar_share_an_order_and_keep_it_as_long_as_one_lives(preparations):
    one, two, three = (sequence(name, A) for name in ("one", "two", "three"))
    preparations.add(one)
    preparations.add(two)
    assert preparations.take_orders(0.0) == [Preparation(A)]
    assert preparations.take_orders(0.0) == []
    assert waiting(preparations) == {"one", "two"}
    assert preparations.end([Prepared(A)], 0.5).ready == [one, two]
    preparations.add(three)
    assert waiting(preparations) == set()
    preparations.remove(one)
    preparations.remove(three)
    assert not preparations.is_active
    preparations.remove(two)
    assert preparations.take_orders(1.0) == [Preparation(A, is_wanted=False)]
    preparations.end([], 1.0)
    assert not preparations.is_active


def test_a_bad_grammar_fails_its_sequences_with_the_reason_and_no_others(preparations):
    preparations.add(one := sequence("one", A))
    preparations.add(sequence("two", B))
    preparations.take_orders(0.0)
    [(failed, error)] = preparations.end([Prepared(A, "no such thing")], 0.1).failed
    assert failed is one
    assert error == f"{BAD_GRAMMAR}: no such thing"
    assert waiting(preparations) == {"two"}


def test_a_late_grammar_fails_its_sequences_and_its_result_is_kept_by_the_worker_alone(
    preparations,
):
    preparations.add(one := sequence("one", A))
    preparations.take_orders(5.0)
    assert preparations.next_deadline_s() == 5.0 + GRAMMAR_CPU_S
    assert preparations.end([Prepared(A, cpu_s=0.9)], 5.9).failed == []
    assert preparations.end([Prepared(A, cpu_s=1.0)], 6.0).failed == [(one, LATE)]
    assert preparations.next_deadline_s() is None
    preparations.add(two := sequence("two", A))
    assert preparations.end([], 6.5).failed == [(two, LATE)]
    preparations.add(sequence("three", A))
    assert preparations.end([Prepared(A)], 9.0).ready[0].request_id == "three"


def test_a_grammar_is_late_by_its_cpu_time_and_a_busy_host_gives_it_little(preparations):
    preparations.add(one := sequence("one", A))
    preparations.take_orders(5.0)
    assert preparations.end([], 6.0).failed == [], "its thread has not begun"
    assert preparations.next_deadline_s() == 7.0
    assert preparations.end([Prepared(A, cpu_s=0.25)], 7.0).failed == []
    assert preparations.next_deadline_s() == 7.75
    assert preparations.end([Prepared(A, cpu_s=0.5)], 14.75).failed == []
    assert preparations.next_deadline_s() == 5.0 + GRAMMAR_TIMEOUT_S
    assert preparations.end([Prepared(A, cpu_s=0.75)], 15.0).failed == [(one, LATE)]


def test_time_counts_from_the_order_and_only_as_many_are_ordered_as_are_compiled(preparations):
    for name, spec in (("a", A), ("b", B), ("c", C)):
        preparations.add(sequence(name, spec))
    assert preparations.take_orders(0.0) == [Preparation(A), Preparation(B)]
    preparations.end([Prepared(A), Prepared(B, cpu_s=0.9)], 0.9)
    assert preparations.take_orders(0.9) == [Preparation(C)]
    assert preparations.end([Prepared(B), Prepared(C, cpu_s=0.6)], 1.5).failed == []
    assert preparations.next_deadline_s() == 0.9 + GRAMMAR_CPU_S


def test_while_late_grammars_keep_all_threads_further_ones_fail_at_once(preparations):
    for name, spec in (("a", A), ("b", B), ("c", C)):
        preparations.add(sequence(name, spec))
    preparations.take_orders(0.0)
    compiling = [Prepared(A, cpu_s=1.0), Prepared(B, cpu_s=1.0)]
    failed = {s.request_id: error for s, error in preparations.end(compiling, 1.0).failed}
    assert failed == {"a": LATE, "b": LATE, "c": GRAMMARS_BUSY}
    preparations.add(four := sequence("four", C))
    assert preparations.take_orders(1.1) == []
    assert preparations.end([], 1.1).failed == [(four, GRAMMARS_BUSY)]
    preparations.end([Prepared(A)], 3.0)
    preparations.add(sequence("five", C))
    assert Preparation(C) in preparations.take_orders(3.0)


def test_the_first_grammar_may_take_as_long_as_reading_the_vocabulary():
    preparations = Preparations()
    preparations.add(sequence("r", A))
    preparations.take_orders(0.0)
    assert preparations.next_deadline_s() == FIRST_GRAMMAR_TIMEOUT_S


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_sequence_that_leaves_takes_its_grammar_along(preparations, is_ordered):
    preparations.add(seq := sequence("r", A))
    if is_ordered:
        preparations.take_orders(0.0)
    preparations.remove(seq)
    assert waiting(preparations) == set()
    if is_ordered:
        assert preparations.end([Prepared(A)], 0.1) == ([], [])
        assert preparations.take_orders(0.2) == [Preparation(A, is_wanted=False)]
    preparations.end([], 0.3)
    assert not preparations.is_active


# --- the scheduler --------------------------------------------------------------------------------


def test_a_sequence_that_waits_holds_up_nobody_and_runs_once_it_is_ready():
    scheduler = scheduler_of(enable_prefix_caching=False)
    scheduler.add(sequence("waits", A, dp_group=0), 0.0)
    scheduler.add(make_sequence("other", PROMPT, dp_group=0), 0.0)
    assert step(scheduler) == {"other": 8}
    scheduler.preparations.take_orders(0.0)
    assert scheduler.end_preparations([Prepared(A)], 0.1) == []
    assert step(scheduler) == {"other": 1, "waits": 8}


def test_a_preempted_sequence_needs_no_second_preparation():
    scheduler = scheduler_of(enable_prefix_caching=False)
    scheduler.add(seq := sequence("r", A, max_tokens=20), 0.0)
    scheduler.preparations.take_orders(0.0)
    scheduler.end_preparations([Prepared(A)], 0.0)
    step(scheduler)
    scheduler._preempt(seq)
    assert step(scheduler) == {"r": 9}


def test_a_sequence_that_fails_ends_and_gives_everything_back():
    scheduler = scheduler_of()
    scheduler.add(queued := sequence("queued", A), 0.0)
    scheduler.reserve(reserved := sequence("reserved", A, mode="decode"), 0.0)
    scheduler.preparations.take_orders(0.0)
    failed = scheduler.end_preparations([Prepared(A, "why")], 0.0)
    assert failed == [(queued, f"{BAD_GRAMMAR}: why"), (reserved, f"{BAD_GRAMMAR}: why")]
    assert queued.is_over
    assert reserved.is_over
    scheduler.check_invariants()
    assert scheduler.table.num_live == 0
    assert scheduler.group_snapshots()[0].num_empty_slots == 4


@pytest.mark.parametrize("is_last", ["grammar", "kv"])
def test_a_reserved_sequence_waits_for_its_kv_and_its_grammar(is_last):
    _, connector = being_loaded()
    scheduler = scheduler_of(connector=connector)
    scheduler.reserve(seq := sequence("g", A, mode="decode"), 0.0)
    scheduler.loads.load("g", make_ticket("g", 8), 0, 0.0)
    scheduler.activate("g", [[7]], 0.0)
    scheduler.preparations.take_orders(0.0)
    if is_last == "grammar":
        scheduler.kv_ended("g", None, 0.0)
        assert step(scheduler) == {}
        scheduler.end_preparations([Prepared(A)], 0.0)
    else:
        scheduler.end_preparations([Prepared(A)], 0.0)
        assert step(scheduler) == {}
        scheduler.kv_ended("g", None, 0.0)
    assert seq.phase is Phase.PREFILL
    assert step(scheduler) == {"g": 1}


def test_a_sequence_whose_kv_failed_meanwhile_ends_with_that_reason():
    _, connector = being_loaded()
    scheduler = scheduler_of(connector=connector, kv_load_failure_policy="fail")
    scheduler.reserve(seq := sequence("g", A, mode="decode"), 0.0)
    scheduler.activate("g", [[7]], 0.0)
    scheduler.preparations.take_orders(0.0)
    [(failed, error)] = scheduler.end_preparations([Prepared(A)], 0.0)
    assert failed is seq
    assert error == f"{KV_TRANSFER_FAILED}: no_ticket"


# --- the core -------------------------------------------------------------------------------------


@pytest.fixture
def core():
    return virtual_side(simulated_config()).core


def add(core, name, spec):
    sampling = SamplingParams(max_tokens=3, seed=0, structured_outputs=spec)
    core.handle(CLIENT, AddRequest(EngineRequest(name, [1, 2, 3], sampling)), 0.0)


def ends(core, now_s=0.0):
    """How requests end within the next steps."""
    found = {}
    for _ in range(10):
        core.step(now_s)
        for event in take_events(core).get(CLIENT, []):
            if isinstance(event, TokenOutput) and event.finish_reason is not None:
                found[event.request_id] = (event.finish_reason, event.error)
    return found


def test_a_core_runs_what_is_prepared(core):
    add(core, "r", A)
    assert ends(core) == {"r": ("length", None)}
    assert core.num_live == 0


def test_an_idle_core_is_woken_by_the_deadline_of_a_grammar(core):
    core._executor.worker.prepare = lambda _orders: []
    add(core, "late", A)
    add(core, "plain", None)
    assert ends(core) == {"plain": ("length", None)}
    assert not core.step(0.0)
    assert core.next_deadline_s() == FIRST_GRAMMAR_TIMEOUT_S
    assert ends(core, FIRST_GRAMMAR_TIMEOUT_S) == {"late": ("error", LATE)}
    assert core.next_deadline_s() is None
    assert core.num_live == 0


def test_a_client_that_leaves_takes_its_waiting_requests_along(core):
    core._executor.worker.prepare = lambda _orders: []
    add(core, "gone", A)
    core.step(0.0)
    core.handle(CLIENT, Abort(["gone"]), 0.0)
    assert ends(core, 99.0) == {}
    core.check_invariants()
    assert core.num_live == 0
