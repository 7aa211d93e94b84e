"""Helper process that stops, continues and kills an engine process at given times.

A separate process is needed because a stopped engine can neither wake nor kill itself. It is run by
its path on a bare interpreter, hence it uses the standard library only. It ends with the engine. If
the engine's parent is gone it continues a stopped engine, so that the engine ends, too, and no
process is left behind.

Owner: the engine, see `replicas.simulation.fault_injection`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

_PARENT_FD = 0
"""The engine's standard input, inherited; the engine's parent holds the other end."""


class EngineGoneError(Exception):
    """The engine, or its parent, has ended."""


class _HangUpWatch:
    """Waiting that ends early if the engine or its parent ends.

    Args:
        alive_fd: Read end of a pipe whose other end only the engine holds.
    """

    def __init__(self, alive_fd: int) -> None:
        self._poll = select.poll()
        # Nothing is read from either: poll always reports hang-ups, even with an empty mask.
        self._poll.register(alive_fd, 0)
        self._poll.register(_PARENT_FD, 0)

    def wait_until(self, at_s: float) -> None:
        """Block until a reading of the monotonic clock.

        Raises:
            EngineGoneError: The engine or its parent has ended.
        """
        while (left_s := at_s - time.monotonic()) > 0:
            if self._poll.poll(min(left_s, 3600.0) * 1000):
                raise EngineGoneError


def run(engine: int, alive_fd: int, schedule: list[tuple[float, int]]) -> None:
    """Send every signal at its time.

    Args:
        engine: Process id of the engine, this process's parent.
        alive_fd: See `_HangUpWatch`.
        schedule: (monotonic time, signal number), in order.
    """
    watch = _HangUpWatch(alive_fd)
    is_stopped = False
    try:
        for at_s, number in schedule:
            watch.wait_until(at_s)
            _send(engine, number)
            is_stopped = number == signal.SIGSTOP
        if is_stopped:
            watch.wait_until(float("inf"))
    except EngineGoneError:
        pass
    finally:
        if is_stopped:
            _send(engine, signal.SIGCONT)


def _send(engine: int, number: int) -> None:
    # After the engine's end its id may be reused, but this process has another parent then.
    if os.getppid() == engine:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, number)


def _exit(_signal: int, _frame: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    run(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
