"""A profile of the core thread: its stack, read many times a second from another thread.

The core runs at its own speed: nothing is called for each of its functions. A call into C, such as
a kernel or a wait for a device, counts for the Python line that makes it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERVAL_S = 0.005
"""Time between two samples."""
MAX_SECONDS = 60.0
"""Longest profile."""
_MAX_STACKS = 4096


class Profiler:
    """Profiles one thread, one profile at a time.

    Args:
        thread_id: Identifier of the thread.
    """

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._is_busy = False

    def start(self, seconds: float, on_end: Callable[[str], None]) -> str | None:
        """Start a profile, and return at once.

        Args:
            seconds: Its length, up to `MAX_SECONDS`.
            on_end: Called with the profile in another thread: a line for each stack, with its
                functions from the outermost one on, separated by semicolons, and its samples.

        Returns:
            Why it cannot start; None if it has started.
        """
        if not 0.0 < seconds <= MAX_SECONDS:
            return f"a profile has up to {MAX_SECONDS:g} seconds"
        if self._is_busy:
            return "a profile is being made"
        self._is_busy = True

        def run() -> None:
            profile = self._sample(seconds)
            # First, because the client may ask for the next one at once.
            self._is_busy = False
            on_end(profile)

        threading.Thread(target=run, name="profiler", daemon=True).start()
        return None

    def _sample(self, seconds: float) -> str:
        stacks: Counter[str] = Counter()
        end_s = time.monotonic() + seconds
        while not stacks or time.monotonic() < end_s:
            frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the only way
            if frame is not None:
                stacks[_folded(frame)] += 1
            time.sleep(INTERVAL_S)
        kept = _without_torn(stacks).most_common(_MAX_STACKS)
        return "".join(f"{stack} {count}\n" for stack, count in kept)


def _without_torn(stacks: Counter[str]) -> Counter[str]:
    """Drop stacks that do not begin with the thread's outermost function.

    The thread may run while its frames are read one by one. A generator that yields meanwhile has
    no caller any more, so that the stack seems to begin with it.
    """
    roots: Counter[str] = Counter()
    for stack, count in stacks.items():
        roots[_root(stack)] += count
    [(root, _)] = roots.most_common(1)
    return Counter({stack: count for stack, count in stacks.items() if _root(stack) == root})


def _root(stack: str) -> str:
    return stack.partition(":")[0]


def _folded(frame: FrameType | None) -> str:
    names = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        names.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return ";".join(reversed(names))
