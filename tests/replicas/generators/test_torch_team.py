"""The threads that a pass is computed with: real ones, of PyTorch's own team."""

import logging
import os
import threading

import pytest
import torch

from replicas.generators.torch import generator, team
from replicas.generators.torch.team import TeamHelpers
from tests.replicas.generators.conftest import PROMPTS, make_generator
from tests.replicas.generators.paged_loop import PagedLoop

if not hasattr(os, "sched_setaffinity"):
    pytest.skip("threads cannot be told where to run here", allow_module_level=True)

cores_of = os.sched_getaffinity  # the real function, also while a test replaces it in the module
CORES = cores_of(0)
FIRST, LAST = min(CORES), max(CORES)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core alone")


@pytest.fixture
def on_core(monkeypatch):
    """Says which core this thread runs on."""

    def say(core):
        monkeypatch.setattr(team, "_this_core", lambda: lambda: core)

    say(FIRST)
    return say


@pytest.fixture
def three_cores(monkeypatch):
    """Pretend a third core, so that teams of three exist everywhere; bindings leave it out."""
    others = {*CORES, LAST + 1}
    confine = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: others)
    monkeypatch.setattr(os, "sched_setaffinity", lambda t, cores: confine(t, cores & CORES))


@pytest.fixture(autouse=True)
def _anywhere():
    """Unbind threads before and after a test: passes of earlier tests keep them off a core."""
    before = torch.get_num_threads()
    let_run_anywhere()
    yield
    torch.set_num_threads(before)
    let_run_anywhere()


def let_run_anywhere():
    for thread in helpers_of(3):
        os.sched_setaffinity(thread, CORES)


def helpers_of(num_threads):
    found = team._others_in_team(num_threads)
    assert len(set(found)) == num_threads - 1
    return found


def test_a_helper_runs_where_the_one_that_it_helps_does_not(on_core):
    helpers = TeamHelpers()
    for core in (FIRST, LAST, FIRST):
        on_core(core)
        helpers.keep_off(2)
        [thread] = helpers_of(2)
        assert cores_of(thread) == CORES - {core}
    assert os.sched_getaffinity(0) == CORES


def test_all_of_a_team_do(on_core, three_cores):
    TeamHelpers().keep_off(3)
    for thread in helpers_of(3):
        assert cores_of(thread) == CORES - {FIRST}


def test_each_thread_has_helpers_of_its_own(on_core):
    helpers, seen = TeamHelpers(), []

    def compute():
        helpers.keep_off(2)
        seen.append([cores_of(thread) for thread in helpers_of(2)])

    compute()
    other = threading.Thread(target=compute)
    other.start()
    other.join()
    assert seen == [[CORES - {FIRST}]] * 2


def test_the_core_is_the_one_that_it_runs_on():
    os.sched_setaffinity(0, {LAST})
    try:
        assert team._this_core()() == LAST
    finally:
        os.sched_setaffinity(0, CORES)


def test_on_one_core_all_share_it(on_core):
    os.sched_setaffinity(0, {FIRST})
    try:
        TeamHelpers().keep_off(2)
    finally:
        os.sched_setaffinity(0, CORES)
    [thread] = helpers_of(2)
    assert cores_of(thread) & {FIRST}


def test_with_more_threads_than_cores_all_run_anywhere(on_core):
    num_threads = len(CORES) + 1
    TeamHelpers().keep_off(num_threads)
    assert [cores_of(thread) for thread in helpers_of(num_threads)] == [CORES] * len(CORES)


def test_a_thread_that_has_the_number_of_an_ended_helper_is_left_alone(on_core, monkeypatch):
    helpers, list_again = TeamHelpers(), team._others_in_team
    ends = threading.Event()
    stranger = threading.Thread(target=ends.wait)
    stranger.start()
    monkeypatch.setattr(team, "_others_in_team", lambda _count: [stranger.native_id])
    with monkeypatch.context() as before:
        before.setattr(os, "sched_setaffinity", lambda _thread, _cores: None)
        helpers.keep_off(2)
    monkeypatch.setattr(team, "_others_in_team", list_again)
    on_core(LAST)
    helpers.keep_off(2)
    assert cores_of(stranger.native_id) == CORES
    assert [cores_of(thread) for thread in helpers_of(2)] == [CORES - {LAST}]
    ends.set()
    stranger.join()


def test_refused_pinning_is_logged_once_and_computation_continues(on_core, monkeypatch, caplog):
    def refuse(_thread, _cores):
        raise PermissionError(1, "not here")

    helpers = TeamHelpers()
    with caplog.at_level(logging.WARNING), monkeypatch.context() as now:
        now.setattr(os, "sched_setaffinity", refuse)
        helpers.keep_off(2)
    on_core(LAST)
    helpers.keep_off(2)
    [thread] = helpers_of(2)
    assert cores_of(thread) == CORES
    assert caplog.text.count("cannot pin compute threads") == 1


def test_without_a_current_core_nothing_is_pinned(monkeypatch):
    monkeypatch.setattr(team, "_this_core", lambda: None)
    TeamHelpers().keep_off(2)
    [thread] = helpers_of(2)
    assert cores_of(thread) == CORES


@pytest.mark.parametrize("long_products", [1000, 10**12])
def test_a_pass_of_several_threads_keeps_them_off(tiny, on_core, monkeypatch, long_products):
    monkeypatch.setattr(generator, "LONG_PRODUCTS", long_products)
    monkeypatch.setattr(generator, "HELPERS", TeamHelpers())
    torch.set_num_threads(2)
    config = tiny("mistral").config
    loop = PagedLoop(make_generator(config), config, slots_per_lane=8)
    loop.step_prefill([loop.add(PROMPTS[0], 2)])
    [thread] = helpers_of(2)
    assert cores_of(thread) == (CORES - {FIRST} if long_products == 1000 else CORES)


def test_two_generators_of_a_thread_see_to_the_same_helpers(tiny, on_core, monkeypatch):
    monkeypatch.setattr(generator, "LONG_PRODUCTS", 1000)
    monkeypatch.setattr(generator, "HELPERS", TeamHelpers())
    torch.set_num_threads(2)
    config = tiny("mistral").config
    one, other = (PagedLoop(make_generator(config), config, slots_per_lane=8) for _ in range(2))
    for core, loop in ((FIRST, one), (LAST, other), (FIRST, one)):
        on_core(core)
        loop.step_prefill([loop.add(PROMPTS[0], 2)])
        [thread] = helpers_of(2)
        assert cores_of(thread) == CORES - {core}
