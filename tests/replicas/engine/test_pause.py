"""A pause of an engine: its modes, what still runs meanwhile, resets of the prefix cache."""

from __future__ import annotations

import pytest

from replicas.engine.sequence import Phase
from replicas.messages import (
    Accepted,
    AddRequest,
    EngineRequest,
    TokenOutput,
    Utility,
    UtilityResult,
)
from replicas.sampling_params import SamplingParams
from tests.engines import CLIENT, take_events
from tests.replicas.engine.fakes import make_config
from tests.replicas.engine.test_run_ahead import Core

OTHER = b"other"
STEPS = 2
"""After so many steps none is under way in a paused engine, and its calls are answered."""


@pytest.fixture(params=[False, True], ids=["one", "two in flight"])
def core(request):
    """An idle engine; the second one submits each step before the one under way is read."""
    config = make_config(max_batch_size=2, block_size=16)
    return Core(config, num_blocks=40, max_model_len=100, runs_ahead=request.param).core


def add(core, name, client=CLIENT, mode="local", **sampling):
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "seed": 1, **sampling}
    )
    core.handle(client, AddRequest(EngineRequest(name, [5, 9, 3], params), mode), 0.0)
    events = take_events(core)[client]
    assert isinstance(events[-1], Accepted)


def call(core, method, *args, client=CLIENT):
    """Make a call; return the events of its client until now."""
    core.handle(client, Utility(7, method, [*args]), 0.0)
    return take_events(core).get(client, [])


def run(core, num_steps=1):
    """The events of so many steps."""
    events = []
    for _ in range(num_steps):
        core.step(0.0)
        events += take_events(core).get(CLIENT, [])
    core.check_invariants()
    return events


def tokens(events):
    return [t for e in events if isinstance(e, TokenOutput) for t in e.token_ids]


def answers(events):
    return [(e.result, e.error) for e in events if isinstance(e, UtilityResult)]


def phases(core):
    return {seq.request_id: seq.phase for seq in core._scheduler.table}


def test_requests_that_are_kept_stand_still_and_go_on_with_the_same_tokens(core):
    add(core, "a")
    expected = tokens(run(core, 25))
    add(core, "b")
    first = run(core, 5)
    events = call(core, "pause", "keep")
    events += run(core, STEPS)
    assert answers(events) == [(True, None)]
    slot = core._scheduler.table.get("b").place.slot
    num_steps = core.metrics(0.0).num_steps
    assert run(core, 3) == []
    assert core.metrics(0.0).num_steps == num_steps
    assert core._scheduler.table.get("b").place.slot == slot
    assert answers(call(core, "resume")) == [(True, None)]
    assert tokens([*first, *events, *run(core, 25)]) == expected


def test_requests_that_are_waited_for_end_and_new_ones_stay_queued(core):
    add(core, "a", max_tokens=6)
    run(core, 2)
    assert answers(call(core, "pause", "wait")) == []
    add(core, "b")
    events = run(core, 10)
    assert [e.finish_reason for e in events if isinstance(e, TokenOutput)][-1] == "length"
    assert answers(events) == [(True, None)]
    assert phases(core) == {"b": Phase.WAITING}
    call(core, "resume")
    assert tokens(run(core, 25))


def test_requests_are_aborted_by_default_and_new_ones_stay_queued(core):
    for name, client in (("a", CLIENT), ("b", CLIENT), ("c", OTHER)):
        add(core, name, client, n=1)
    run(core, 3)
    core.handle(CLIENT, Utility(7, "pause"), 0.0)
    for _ in range(STEPS):
        core.step(0.0)
    events = take_events(core)
    for client, names in ((CLIENT, ["a", "b"]), (OTHER, ["c"])):
        ends = [e for e in events[client] if isinstance(e, TokenOutput) and e.finish_reason]
        assert [(e.request_id, e.finish_reason) for e in ends] == [(n, "abort") for n in names]
    assert answers(events[CLIENT]) == [(True, None)]
    assert phases(core) == {}
    add(core, "d")
    run(core, 2)
    assert phases(core) == {"d": Phase.WAITING}


def test_a_paused_engine_looks_as_if_it_drained_until_it_resumes(core):
    assert not core.snapshot(0).draining
    assert answers(call(core, "is_paused")) == [(False, None)]
    before = core.state()
    call(core, "pause", "keep")
    assert core.snapshot(0).draining
    assert core.snapshot(0).paused
    assert core.state() != before
    assert answers(call(core, "is_paused")) == [(True, None)]
    call(core, "resume")
    assert core.state() == before
    assert not core.snapshot(0).paused


def test_reservations_lapse_in_a_pause(core):
    call(core, "pause", "keep")
    add(core, "r", mode="decode")
    assert phases(core) == {"r": Phase.RESERVED}
    deadline_s = core.next_deadline_s()
    assert deadline_s is not None
    core.step(deadline_s)
    [event] = take_events(core)[CLIENT]
    assert event.finish_reason == "error"
    assert phases(core) == {}


@pytest.mark.parametrize("order", ["end", "change"])
def test_draining_ends_a_pause_and_refuses_another(core, order):
    add(core, "a", max_tokens=3)
    run(core, 1)
    call(core, "pause", "keep")
    run(core, 2)
    getattr(core.role_state, order)(*(["decode"] if order == "change" else []))
    assert tokens(run(core, 2))
    assert not core.is_paused
    if order == "end":
        [(_, error)] = answers(call(core, "pause", "keep"))
        assert "drains" in error


def test_resume_answers_a_pause_that_has_not_come(core):
    add(core, "a")
    run(core, 2)
    assert answers(call(core, "pause", "wait")) == []
    assert answers(call(core, "resume")) == [(None, "the pause was ended"), (True, None)]


def test_a_pause_can_be_made_stricter(core):
    add(core, "a")
    run(core, 2)
    call(core, "pause", "wait")
    events = call(core, "pause", "keep") + run(core, STEPS)
    assert answers(events) == [(True, None), (True, None)]
    assert len(phases(core)) == 1


def test_clients_that_leave_are_not_answered_and_the_pause_stays(core):
    add(core, "a")
    run(core, 2)
    call(core, "pause", "wait", client=OTHER)
    core.client_gone(OTHER)
    run(core, 25)
    assert take_events(core) == {}
    assert core.is_paused


def test_unknown_modes_are_refused(core):
    [(_, error)] = answers(call(core, "pause", "nap"))
    assert "'nap'" in error
    assert "abort, wait, keep" in error
    assert not core.is_paused


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_reset_of_running_requests_leaves_no_kv_and_the_same_tokens(core, is_paused):
    add(core, "a")
    expected = tokens(run(core, 25))
    add(core, "b")
    events = run(core, 6)
    if is_paused:
        events += call(core, "pause", "keep") + run(core, STEPS)
    more = call(core, "reset_prefix_cache", True)
    more += [] if answers(more) else run(core, STEPS)
    assert answers(more) == [(True, None)]
    assert core._scheduler.table.get("b").num_preemptions == 1
    call(core, "resume")
    assert tokens([*events, *more, *run(core, 25)]) == expected


def test_a_reset_says_so_if_a_reservation_keeps_its_blocks(core):
    add(core, "r", mode="decode")
    assert answers(call(core, "reset_prefix_cache", True)) == [(False, None)]
    assert answers(call(core, "reset_prefix_cache")) == [(True, None)]
