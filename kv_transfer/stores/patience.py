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

COPY_BYTES_PER_S = 256e6
"""How fast a value is put at least, all of the copies on its way together."""

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
    ones, and after a failure none for a while; after that of a put, no puts. Owner: the connector's
    store thread.
    """

    def __init__(self, name: str, timeout_s: float, counters: StoreCounters) -> None:
        """Start the thread.

        Args:
            name: Of the thread, and of the store in the log.
            timeout_s: Longest time that ``call`` waits, and ``put`` besides copying.
            counters: Whose ``errors`` count failures.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._counters = counters
        self._back_off = BackOff()
        self._put_back_off = BackOff()
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
        return self._call(function, default, self._timeout_s, self._back_off)

    def put(
        self, function: Callable[[float], _ResultT], default: _ResultT, num_bytes: int
    ) -> _ResultT:
        """Call a function that puts so many bytes: as ``call``, with time to copy them.

        A put that fails may just have been too large for the moment: it does not keep others from
        reading. After a call that failed there are no puts either.
        """
        timeout_s = self._timeout_s + num_bytes / COPY_BYTES_PER_S
        return self._call(function, default, timeout_s, self._put_back_off)

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
        except Exception as error:  # noqa: BLE001 - whatever it is, the store is of no use now
            logger.warning("KV store %s failed: %r", self._name, error)
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
    except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
        future.set_exception(error)
