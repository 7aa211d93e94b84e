"""An asyncio event loop with a virtual clock: it never waits but jumps to the next event.

The cluster's asyncio code (router, slot queue) runs on it unchanged. It is deterministic: callbacks
run in the order of their times, and at equal times in the order of their scheduling. Callbacks of
`call_soon` run before the next timer. The loop owns virtual time and all pending events.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextvars import Context

T = TypeVar("T")

UNIX_S = 1_000_000_000.0
"""Unix time at virtual zero: late enough that a clock can be set back by years."""


class _Handle(asyncio.TimerHandle):
    """A callback that is due."""

    def run(self) -> None:
        """Run the callback unless it was cancelled; its exceptions go to the loop."""
        if not self.cancelled():
            self._run()


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop with a virtual clock.

    An exception of a callback, or of a task that is not awaited, ends the run: results after a bug
    would be worthless.

    Args:
        start_s: Virtual time at the start; times before zero are for preparation.

    Attributes:
        num_events: Number of callbacks that have run.
        after_event: Called after every callback; for checks.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.num_events = 0
        self.after_event: Callable[[], None] | None = None
        self._now_s = start_s
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = itertools.count()
        self._error: BaseException | None = None
        # The order in which tasks were started: iterating over a set of tasks is not deterministic.
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()

    # --- what drives it ------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until `main` is done; later events never run.

        Raises:
            RuntimeError: No event is left and `main` is not done: it would wait for ever.
        """
        previous = asyncio._get_running_loop()  # noqa: SLF001 - what a loop has to do
        asyncio._set_running_loop(self)  # noqa: SLF001
        try:
            task = self.create_task(main)
            while not task.done():
                if not self._run_one():
                    raise RuntimeError(
                        f"nothing is due any more at {self._now_s:.6f} s, and the run is not over"
                    )
            return task.result()
        finally:
            asyncio._set_running_loop(previous)  # noqa: SLF001

    def abandon(self) -> None:
        """Cancel every task in order and let it clean up; for use after a failure."""
        self.after_event = None
        for task, _ in sorted(self._tasks.items(), key=lambda item: item[1]):
            task.cancel()
        previous = asyncio._get_running_loop()  # noqa: SLF001
        asyncio._set_running_loop(self)  # noqa: SLF001
        try:
            while self._ready:
                self._ready.popleft().run()
        finally:
            asyncio._set_running_loop(previous)  # noqa: SLF001
            self._error = None

    def _run_one(self) -> bool:
        """Run the next callback; False if there is none."""
        if not self._ready:
            if not self._timers:
                return False
            when_s, _, handle = heapq.heappop(self._timers)
            if handle.cancelled():
                return True
            self._now_s = max(self._now_s, when_s)
            self._ready.append(handle)
        self._ready.popleft().run()
        self.num_events += 1
        if self.after_event is not None:
            self.after_event()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True

    @property
    def is_settled(self) -> bool:
        """Whether all callbacks of this instant that are not timers have run."""
        return not self._ready

    # --- the interface of an asyncio loop -------------------------------------------------------

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now_s

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback after those that are already due."""
        handle = _Handle(self._now_s, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback `delay` seconds from now."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback at a virtual time."""
        handle = _Handle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, **_: object
    ) -> asyncio.Task[T]:
        """Start a coroutine."""
        task = asyncio.Task(coro, loop=self, name=name)
        self._tasks[task] = next(self._order)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the first exception; `run` raises it."""
        if self._error is None:
            self._error = context.get("exception") or RuntimeError(str(context.get("message")))

    def get_debug(self) -> bool:
        """Return False: the loop has no debug mode."""
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when its time comes."""
