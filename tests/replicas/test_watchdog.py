"""The state that an engine's core thread publishes for its watching process."""

import queue
from types import SimpleNamespace

from replicas.engine.role_state import RoleState
from replicas.engine.step_timer import StepTimer
from replicas.engine_process.parent import STOP, WAKE
from replicas.engine_process.process import EngineProcess
from replicas.watchdog import FACTOR, STALL_S, Watchdog
from tests.engines import make_config


def test_the_count_is_odd_at_work_and_even_at_rest_and_always_grows():
    watchdog = Watchdog()
    counts = [watchdog.count]
    work, rest = watchdog.work, watchdog.rest
    for turn in (work, rest, rest, work, work, rest):
        turn(0.0)
        counts.append(watchdog.count)
    assert [count % 2 for count in counts] == [1, 1, 0, 0, 1, 1, 0]
    assert counts == sorted(set(counts))


class Turns:
    """An inbox and a server that record the watchdog at each of their calls.

    Args:
        items: What each blocking read of the inbox gives; None is a deadline that passes.
    """

    def __init__(self, items):
        self._items = list(items)
        self.watchdog = Watchdog()
        self.seen = []
        self.counts = []
        self.core = SimpleNamespace(
            begin_step=self.begin_step,
            collect_step=lambda _: None,
            end_step=lambda _step, _now: False,
            watchdog=self.watchdog,
            timer=StepTimer(),
            role_state=RoleState("both"),
            config=make_config("nowhere"),
        )

    def _note(self, what):
        self.seen.append((what, "works" if self.watchdog.count % 2 else "rests"))

    def get(self, *, block, timeout):
        if not block:
            raise queue.Empty
        self._note("wait")
        item = self._items.pop(0)
        if item is None:
            raise queue.Empty
        return b"", item

    def begin_step(self, _now):
        self._note("step")
        self.counts.append(self.watchdog.count)
        return SimpleNamespace(meta=None)

    def frames(self, _now):
        return []

    def next_deadline_s(self):
        return None


def test_the_core_thread_rests_while_it_waits_and_works_in_every_step():
    turns = Turns([WAKE, None, STOP])
    EngineProcess(turns, turns, queue.SimpleQueue()).run()
    assert turns.seen == [("wait", "rests"), ("step", "works")] * 3
    assert turns.counts == sorted(set(turns.counts)), "each step is another one"


# --- stalls --------------------------------------------------------------------------------------


def turn(watchdog, took_s, num_tokens, began_s=0.0):
    """Run a turn from its beginning to the next one; return its longest allowed time."""
    watchdog.work(began_s)
    watchdog.compute(num_tokens)
    allowed_s = watchdog.stalls_at_s() - began_s
    watchdog.work(began_s + took_s)
    return allowed_s


def test_a_turn_stalls_after_its_time_and_until_the_next_one():
    watchdog = Watchdog()
    turn(watchdog, 0.03, 32)
    watchdog.work(100.0)
    watchdog.compute(32)
    assert watchdog.stalls_at_s() == 100.0 + STALL_S
    assert [watchdog.stalled_s(100.0 + t) for t in (0, STALL_S, STALL_S + 1)] == [0, 0, STALL_S + 1]
    watchdog.work(110.0)
    assert watchdog.stalled_s(110.0 + STALL_S - 0.1) == 0


def test_nobody_stalls_at_rest():
    watchdog = Watchdog()
    assert (watchdog.stalls_at_s(), watchdog.stalled_s(1e9)) == (None, 0)
    watchdog.work(0.0)
    watchdog.rest(0.1)
    watchdog.compute(7)
    assert (watchdog.stalls_at_s(), watchdog.stalled_s(1e9)) == (None, 0)


def test_a_turn_may_take_several_times_as_long_as_those_of_its_size_did():
    watchdog = Watchdog()
    turn(watchdog, 60.0, 100_000)
    turn(watchdog, 0.03, 32)
    assert turn(watchdog, 60.0, 100_001) == FACTOR * 60.0
    assert turn(watchdog, 0.03, 32) == STALL_S, "what it usually needs for a few tokens it knows"


def test_what_was_never_done_may_take_long_the_longer_the_more_it_is():
    for num_tokens, allowed_s in ((0, 8.0), (1, 8.0), (2048, 8.0), (102_400, 400.0)):
        assert turn(Watchdog(), 1.0, num_tokens) == allowed_s


def test_a_turn_that_stalled_at_most_doubles_what_the_next_one_may_take():
    watchdog = Watchdog()
    turn(watchdog, 0.03, 32)
    assert [turn(watchdog, 1000.0, 32) for _ in range(3)] == [5.0, 10.0, 20.0]


def test_long_turns_are_forgotten_after_many_short_ones():
    watchdog = Watchdog()
    turn(watchdog, 10.0, 32)
    allowed_s = [turn(watchdog, 0.03, 32) for _ in range(300)]
    assert allowed_s == sorted(allowed_s, reverse=True)
    assert allowed_s[0] > 3 * STALL_S
    assert allowed_s[-1] == STALL_S
