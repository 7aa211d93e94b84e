"""Calls of a store that fails, is silent, or never returns: deadlines and exponential back-off."""

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

COPY_BYTES_PER_S = 256e6
"""Assumed lowest speed of a put, with all copies of the value on its way."""

_ResultT = TypeVar("_ResultT")
_Call = Callable[[], None]


class BackOff:
    """Exponential back-off: after each failure in a row the wait doubles, up to 5 s. Pure."""

    def __init__(self) -> None:
        self._wait_s = _FIRST_S
        self._not_before_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Return whether the next attempt may be made."""
        return now_s >= self._not_before_s

    def fail(self, now_s: float) -> None:
        """Record a failure."""
        self._not_before_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LAST_S)

    def succeed(self) -> None:
        """Record a success."""
        self._wait_s = _FIRST_S


class CallThread:
    """Thread for calls of a library without deadlines, one at a time.

    A call that misses its deadline keeps running, and its caller gets the default. Until it
    returns, further calls are skipped. After a failure calls are skipped for a while; after a
    failed put, puts only. Owner: the connector's store thread.
    """

    def __init__(self, name: str, timeout_s: float, counters: StoreCounters) -> None:
        """Start the thread.

        Args:
            name: Name of the thread, and of the store in the log.
            timeout_s: Longest time that ``call`` waits, and ``put`` besides copying.
            counters: Counters whose ``errors`` count failures.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._counters = counters
        self._back_off = BackOff()
        self._put_back_off = BackOff()
        self._is_closed = False
        self._last: Future[object] | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[float], _ResultT], default: _ResultT) -> _ResultT:
        """Call a function with its deadline (monotonic clock); return the default if that fails.

        It fails when the function raises or returns too late, or is not called at all because an
        earlier call is still running or failed a moment ago.
        """
        return self._call(function, default, self._timeout_s, self._back_off)

    def put(
        self, function: Callable[[float], _ResultT], default: _ResultT, num_bytes: int
    ) -> _ResultT:
        """Call a function that puts ``num_bytes``: as ``call``, with time to copy them.

        A failed put, which may only have been too large for the moment, does not stop other calls.
        After another call that failed, puts are skipped as well.
        """
        timeout_s = self._timeout_s + num_bytes / COPY_BYTES_PER_S
        return self._call(function, default, timeout_s, self._put_back_off)

    def close(self, function: Callable[[], None]) -> None:
        """Call a last function and end the thread; waits no longer than for any call."""
        if self._is_closed:
            return
        self._is_closed = True
        future: Future[None] = Future()
        self._calls.put(lambda: _fulfil(future, lambda _: function(), 0.0))
        self._calls.put(None)
        try:
            future.result(self._timeout_s)
        except Exception as error:  # noqa: BLE001 - the engine does not depend on the store's end
            logger.warning("KV store %s could not be closed: %r", self._name, error)

    def _call(
        self,
        function: Callable[[float], _ResultT],
        default: _ResultT,
        timeout_s: float,
        back_off: BackOff,
    ) -> _ResultT:
        now_s = time.monotonic()
        is_busy = self._last is not None and not self._last.done()
        is_due = self._back_off.is_due(now_s) and back_off.is_due(now_s)
        if self._is_closed or is_busy or not is_due:
            return default
        future: Future[_ResultT] = Future()
        self._last = future  # type: ignore[assignment]
        self._calls.put(lambda: _fulfil(future, function, now_s + timeout_s))
        try:
            result = future.result(timeout_s)
        except Exception as error:  # noqa: BLE001 - any failure makes the store unusable for now
            logger.warning("a call of KV store %s failed, counts as a miss: %r", self._name, error)
            self._counters.errors += 1
            back_off.fail(time.monotonic())
            return default
        back_off.succeed()
        return result

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _fulfil(
    future: "Future[_ResultT]", function: Callable[[float], _ResultT], deadline_s: float
) -> None:
    try:
        future.set_result(function(deadline_s))
    except Exception as error:  # noqa: BLE001 - raised again by future.result()
        future.set_exception(error)
