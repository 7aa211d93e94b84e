"""How a client gets by with a store that fails, is silent, or never returns from a call."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kv_transfer.store import StoreCounters

logger = logging.getLogger(__name__)

_FIRST_S = 0.05
_LAST_S = 5.0

_ResultT = TypeVar("_ResultT")
_Call = Callable[[], None]


class BackOff:
    """When to try again: after each failure in a row twice as late, at most 5 s. Pure."""

    def __init__(self) -> None:
        self._wait_s = _FIRST_S
        self._not_before_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Tell whether to try now."""
        return now_s >= self._not_before_s

    def fail(self, now_s: float) -> None:
        """Note a failure."""
        self._not_before_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LAST_S)

    def succeed(self) -> None:
        """Note a success."""
        self._wait_s = _FIRST_S


class CallThread:
    """Runs calls of a library that knows no deadline, one at a time, on a thread of its own.

    A call that is late goes on while its caller does without; until it ends there are no further
    ones, and after a failure none for a while. Owner: the connector's store thread.
    """

    def __init__(self, name: str, timeout_s: float, counters: StoreCounters) -> None:
        """Start the thread.

        Args:
            name: Of the thread, and of the store in the log.
            timeout_s: Longest time that ``call`` waits.
            counters: Whose ``errors`` count failures.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._counters = counters
        self._back_off = BackOff()
        self._is_closed = False
        self._last: Future[object] | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[float], _ResultT], default: _ResultT) -> _ResultT:
        """Call a function with its deadline (monotonic clock); the default when it fails.

        Failing is: to raise, to return too late, or not to be called at all because an earlier
        call goes on or failed a moment ago.
        """
        now_s = time.monotonic()
        is_busy = self._last is not None and not self._last.done()
        if self._is_closed or is_busy or not self._back_off.is_due(now_s):
            return default
        future: Future[_ResultT] = Future()
        self._last = future  # type: ignore[assignment]
        self._calls.put(lambda: _fulfil(future, function, now_s + self._timeout_s))
        try:
            result = future.result(self._timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the store is of no use now
            self._fail(error)
            return default
        self._back_off.succeed()
        return result

    def close(self, function: Callable[[], None]) -> None:
        """Call a last function and end the thread, waiting for it no longer than for any call."""
        if self._is_closed:
            return
        self._is_closed = True
        future: Future[None] = Future()
        self._calls.put(lambda: _fulfil(future, lambda _: function(), 0.0))
        self._calls.put(None)
        try:
            future.result(self._timeout_s)
        except Exception as error:  # noqa: BLE001 - the process goes on without it
            logger.warning("KV store %s did not close: %r", self._name, error)

    def _fail(self, error: Exception) -> None:
        logger.warning("KV store %s failed: %r", self._name, error)
        self._counters.errors += 1
        self._back_off.fail(time.monotonic())

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _fulfil(
    future: "Future[_ResultT]", function: Callable[[float], _ResultT], deadline_s: float
) -> None:
    try:
        future.set_result(function(deadline_s))
    except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
        future.set_exception(error)
