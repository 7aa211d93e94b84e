"""Calls of a KV store on a thread of their own, so that a slow store never blocks the engine.

Every job goes to the thread and comes back, always with an answer, which is a miss unless the store
said more. A job belongs to one side at a time, except for ``is_dropped``, which the core thread may
set at any moment. Values are sealed and verified here, away from the core thread.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_transfer.errors import FailureReason
from kv_transfer.store import KVStore, Lease, StoreConfig, StoreCounters, make_store

logger = logging.getLogger(__name__)

CHECKSUM_BYTES = 8


def seal_value(key: bytes, pieces: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the value that holds a payload: its checksum under the key, then its bytes.

    Args:
        key: The value's key; part of the checksum, so that a value under a wrong key is noticed.
        pieces: The payload in order, any shapes.

    Returns:
        1-D uint8, ``CHECKSUM_BYTES`` longer than the payload.
    """
    value = np.empty(CHECKSUM_BYTES + sum(piece.nbytes for piece in pieces), np.uint8)
    position = CHECKSUM_BYTES
    for piece in pieces:
        value[position : position + piece.nbytes] = piece.reshape(-1)
        position += piece.nbytes
    value[:CHECKSUM_BYTES] = np.frombuffer(_checksum(key, value), np.uint8)
    return value


def is_value(key: bytes, value: NDArray[np.uint8], payload_bytes: int) -> bool:
    """Return whether a value from a store is what ``seal_value`` made for this key."""
    if value.dtype != np.uint8 or value.shape != (CHECKSUM_BYTES + payload_bytes,):
        return False
    return value[:CHECKSUM_BYTES].tobytes() == _checksum(key, value)


def _checksum(key: bytes, value: NDArray[np.uint8]) -> bytes:
    # Detects damage and mistakes, not forgery: a writer of the store can compute it, too.
    state = xxhash.xxh3_64(key)
    state.update(value[CHECKSUM_BYTES:].data)
    return state.digest()


@dataclass(slots=True, eq=False)
class StoreJob(ABC):
    """Call of the store, and afterwards its answer.

    Attributes:
        is_dropped: True when the answer is not needed any more; the store is then not called.
    """

    is_urgent: ClassVar[bool] = True
    """True if the job runs before the others, and its end wakes the engine."""

    is_dropped: bool = field(default=False, init=False)

    @abstractmethod
    def run(self, store: KVStore) -> None:
        """Call the store and record its answer."""


@dataclass(slots=True, eq=False)
class CountJob(StoreJob):
    """Count of how many of the keys, from the first on, are stored.

    Attributes:
        owner: Object of the caller, by which it knows the job.
        keys: Keys to look for.
        num_present: The answer.
    """

    owner: object
    keys: Sequence[bytes]
    num_present: int = 0

    def run(self, store: KVStore) -> None:
        """Count the keys."""
        self.num_present = min(max(0, store.num_present(self.keys)), len(self.keys))


@dataclass(slots=True, eq=False)
class FetchJob(StoreJob):
    """Lease of the values of the keys, from the first on, as far as they are stored and correct.

    Attributes:
        owner: Object of the caller, by which it knows the job.
        first: Number of the first key among the owner's.
        keys: Keys to get.
        payload_bytes: Bytes of each value without its checksum.
        leases: Leases of verified values only.
        reason: Why there are fewer leases than keys, if so.
    """

    owner: object
    first: int
    keys: Sequence[bytes]
    payload_bytes: int
    leases: list[Lease] = field(default_factory=list)
    reason: FailureReason = FailureReason.STORE

    def run(self, store: KVStore) -> None:
        """Get the values; discard the first wrong one, which ends the list."""
        got = list(store.get(self.keys))[: len(self.keys)]
        for key, lease in zip(self.keys, got, strict=False):
            if not is_value(key, lease.value, self.payload_bytes):
                self.reason = FailureReason.CHECKSUM
                break
            self.leases.append(lease)
        wrong = got[len(self.leases) :]
        if wrong:
            store.discard(self.keys[len(self.leases)])
        for lease in wrong:
            lease.release()


@dataclass(slots=True, eq=False)
class ReleaseJob(StoreJob):
    """Release of a value.

    Attributes:
        owner: Object of the caller that copied from it; None if the result does not matter.
        lease: Lease to release.
        was_protected: Whether the value was protected until now.
    """

    owner: object
    lease: Lease
    was_protected: bool = False

    def run(self, store: KVStore) -> None:
        """Release the lease."""
        self.was_protected = self.lease.release()


@dataclass(slots=True, eq=False)
class PutJob(StoreJob):
    """Put of a payload, unless the key has a value."""

    is_urgent = False

    key: bytes
    pieces: Sequence[NDArray[np.uint8]]

    def run(self, store: KVStore) -> None:
        """Seal the payload and put it."""
        store.put(self.key, seal_value(self.key, self.pieces))


class StoreExecutor(Protocol):
    """Executor of jobs in the order of submission, urgent ones first."""

    def submit(self, job: StoreJob) -> None:
        """Queue a job, without blocking."""

    def poll(self) -> list[StoreJob]:
        """Return the jobs that finished since the last call, in order of their ends."""

    def wake_in(self, delay_s: float | None) -> None:
        """Wake the engine in so many seconds; replaces the time that was set before.

        None: no wake-up is needed.
        """

    @property
    def counters(self) -> StoreCounters:
        """Totals of the store."""

    @property
    def num_errors(self) -> int:
        """Number of calls that raised an exception in the store."""

    def close(self, deadline_s: float) -> None:
        """Stop within so many seconds; jobs that are not urgent are lost. Idempotent."""


class StoreThread:
    """``StoreExecutor`` with one thread for the store and one for its timer.

    A store from elsewhere may hang for good. So the store's own thread cannot run the timer, and
    both threads are daemons. Owner: the engine's core thread, which alone calls the methods.

    Args:
        config: Configuration of the store.
        notify: Wakes the engine; called on both threads.

    Raises:
        TransferError: When the store cannot be made.
    """

    def __init__(self, config: StoreConfig, notify: Callable[[], None]) -> None:
        # Made here, so that a wrong configuration fails at start; used by the thread alone.
        self._store = make_store(config)
        self._counters = self._store.counters()
        self._notify = notify
        self._alarm = _Alarm(notify)
        self._urgent: deque[StoreJob] = deque()
        self._others: deque[StoreJob] = deque()
        self._done: deque[StoreJob] = deque()
        self._news = threading.Event()
        self._is_closing = False
        self._num_errors = 0
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> StoreCounters:
        """Totals of the store."""
        return self._counters

    @property
    def num_errors(self) -> int:
        """Number of calls that raised an exception in the store."""
        return self._num_errors

    def submit(self, job: StoreJob) -> None:
        """Queue a job, without blocking."""
        (self._urgent if job.is_urgent else self._others).append(job)
        self._news.set()

    def poll(self) -> list[StoreJob]:
        """Return the jobs that finished since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def wake_in(self, delay_s: float | None) -> None:
        """Wake the engine in so many seconds."""
        self._alarm.set(delay_s)

    def close(self, deadline_s: float) -> None:
        """Stop; the thread of a store that does not answer stays until it does."""
        self._is_closing = True
        self._news.set()
        self._alarm.close()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._is_closing:
            self._news.wait()
            self._news.clear()
            while job := self._next():
                self._do(job)
        try:
            self._store.close()
        except Exception:
            # The protocol forbids it, but a bug in a backend must not break the engine's shutdown.
            logger.exception("the KV store raised when it was closed; ignored")

    def _next(self) -> StoreJob | None:
        if self._urgent:
            return self._urgent.popleft()
        if self._others and not self._is_closing:
            return self._others.popleft()
        return None

    def _do(self, job: StoreJob) -> None:
        try:
            if not job.is_dropped:
                job.run(self._store)
        except Exception:
            # The protocol forbids it, but a bug in a backend must cost hits, not the engine.
            self._num_errors += 1
            logger.exception(
                "the KV store raised in %s; counted as an error and a miss", type(job).__name__
            )
        self._done.append(job)
        if job.is_urgent:
            self._notify()


class _Alarm:
    """Timer that calls back once at a set time. Owner of the time: its lock."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-store-alarm", daemon=True)
        self._thread.start()

    def set(self, delay_s: float | None) -> None:
        due_s = None if delay_s is None else time.monotonic() + delay_s
        if due_s is None and self._due_s is None:
            return
        with self._changed:
            self._due_s = due_s
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                if self._due_s is None:
                    self._changed.wait()
                elif (left_s := self._due_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    self._due_s = None
                    self._ring()
