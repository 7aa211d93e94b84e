"""What an engine's core thread says of itself, for the process that watches it."""

import queue
from types import SimpleNamespace

from replicas.engine.inbox import STOP, WAKE
from replicas.engine.process import EngineProcess, Pulse


def test_the_pulse_is_odd_at_work_and_even_at_rest_and_always_grows():
    pulse = Pulse()
    counts = [pulse.count]
    for turn in (pulse.work, pulse.rest, pulse.rest, pulse.work, pulse.work, pulse.rest):
        turn()
        counts.append(pulse.count)
    assert [count % 2 for count in counts] == [1, 1, 0, 0, 1, 1, 0]
    assert counts == sorted(set(counts))


class Turns:
    """An inbox and a server that note what the pulse says whenever they are asked something.

    Args:
        items: What each blocking read of the inbox gives; None is a deadline that passes.
    """

    def __init__(self, items):
        self._items = list(items)
        self.pulse = Pulse()
        self.seen = []
        self.counts = []
        self.core = SimpleNamespace(
            begin_step=self.begin_step, publish=lambda _: None, end_step=lambda _step, _now: False
        )

    def _note(self, what):
        self.seen.append((what, "works" if self.pulse.count % 2 else "rests"))

    def get(self, *, block, timeout):
        assert block
        self._note("wait")
        item = self._items.pop(0)
        if item is None:
            raise queue.Empty
        return b"", item

    def get_nowait(self):
        raise queue.Empty

    def begin_step(self, _now):
        self._note("step")
        self.counts.append(self.pulse.count)
        return SimpleNamespace(meta=None)

    def frames(self, _now):
        return []

    def next_deadline_s(self):
        return None


def test_the_core_thread_rests_while_it_waits_and_works_in_every_step():
    turns = Turns([WAKE, None, STOP])
    EngineProcess(turns, turns, queue.SimpleQueue(), turns.pulse).run()
    assert turns.seen == [("wait", "rests"), ("step", "works")] * 3
    assert turns.counts == sorted(set(turns.counts)), "each step is another one"
