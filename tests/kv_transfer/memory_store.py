"""A KV store in this process's memory that fails when told to, and an executor without threads."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_transfer.store import PutOutcome, StoreConfig, StoreCounters
from kv_transfer.store_thread import StoreJob


@dataclass(eq=False)
class Shelf:
    """Values shared by the stores of one address, and the faults to inject."""

    values: dict[bytes, NDArray[np.uint8]] = field(default_factory=dict)
    open_leases: int = 0
    num_calls: int = 0
    is_down: bool = False
    loses_leases: bool = False
    """Leases that are released from now on had ended before."""
    raises: bool = False
    thaw: threading.Event = field(default_factory=threading.Event)
    """Calls hang until it is set."""
    lied_about: set[bytes] = field(default_factory=set)
    """Keys that are present when counted and gone when wanted."""

    def __post_init__(self) -> None:
        self.thaw.set()

    def poison(self, key: bytes) -> None:
        """Flip one bit of a payload."""
        value = self.values[key].copy()
        value[-1] ^= 1
        self.values[key] = value


SHELVES: dict[str, Shelf] = {}


@dataclass(eq=False)
class MemoryLease:
    shelf: Shelf
    value: NDArray[np.uint8]
    answer: bool | None = None

    def release(self) -> bool:
        if self.answer is None:
            self.shelf.open_leases -= 1
            self.answer = not self.shelf.loses_leases
        return self.answer


class MemoryStore:
    """See ``KVStore``; ``address`` names the shelf."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.shelf = SHELVES.setdefault(config.address, Shelf())
        self.totals = StoreCounters()
        self.is_closed = False
        self.leases: list[MemoryLease] = []
        self._threads: set[int] = set()

    def _call(self) -> bool:
        """Note a call and return whether it finds the store up."""
        assert not self.is_closed
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1, "called from two threads"
        self.shelf.num_calls += 1
        self.shelf.thaw.wait()
        if self.shelf.raises:
            raise RuntimeError("scripted")
        return not self.shelf.is_down

    def num_present(self, keys: Sequence[bytes]) -> int:
        if not self._call():
            return 0
        missing = (i for i, key in enumerate(keys) if key not in self.shelf.values)
        return next(missing, len(keys))

    def get(self, keys: Sequence[bytes]) -> list[MemoryLease]:
        leases: list[MemoryLease] = []
        if not self._call():
            return leases
        for key in keys:
            if key not in self.shelf.values or key in self.shelf.lied_about:
                break
            value = self.shelf.values[key].view()
            value.flags.writeable = False
            leases.append(MemoryLease(self.shelf, value))
            self.totals.hits += 1
        self.shelf.open_leases += len(leases)
        self.leases = [x for x in self.leases if x.answer is None] + leases
        return leases

    def put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        assert value.ndim == 1
        assert value.flags.c_contiguous
        if not self._call():
            self.totals.drops += 1
            return "dropped"
        if key in self.shelf.values:
            return "present"
        self.shelf.values[key] = value.copy()
        self.totals.puts += 1
        return "stored"

    def discard(self, key: bytes) -> None:
        if self._call():
            self.shelf.values.pop(key, None)

    def counters(self) -> StoreCounters:
        return self.totals

    def close(self) -> None:
        self.is_closed = True
        for lease in self.leases:
            lease.release()


class InlineExecutor:
    """``StoreExecutor`` that runs jobs only when the test calls ``run``, on the calling thread."""

    def __init__(self, config: StoreConfig, notify: Callable[[], None]) -> None:
        self.store = MemoryStore(config)
        self.urgent: deque[StoreJob] = deque()
        self.others: deque[StoreJob] = deque()
        self.done: deque[StoreJob] = deque()
        self.num_errors = 0
        self.alarm_s: float | None = None
        self.is_closed = False
        self._notify = notify

    @property
    def counters(self) -> StoreCounters:
        return self.store.counters()

    @property
    def num_waiting(self) -> int:
        return len(self.urgent) + len(self.others)

    def submit(self, job: StoreJob) -> None:
        assert not self.is_closed
        (self.urgent if job.is_urgent else self.others).append(job)

    def run(self, max_jobs: int = 1000) -> None:
        """Run some jobs."""
        while self.num_waiting and max_jobs > 0:
            max_jobs -= 1
            job = (self.urgent or self.others).popleft()
            if not job.is_dropped:
                try:
                    job.run(self.store)
                except RuntimeError:
                    self.num_errors += 1
            self.done.append(job)
            self._notify()

    def poll(self) -> list[StoreJob]:
        jobs = list(self.done)
        self.done.clear()
        return jobs

    def wake_in(self, delay_s: float | None) -> None:
        self.alarm_s = delay_s

    def close(self, deadline_s: float) -> None:
        self.run()
        self.is_closed = True
        self.store.close()
