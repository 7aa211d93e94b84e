"""Faults of a cluster's processes at random moments: SIGKILL, or SIGSTOP and SIGCONT.

They hit only replicas and ingresses that serve already, because Ray Serve gives up a deployment
whose replicas fail twice in a row before they serve. They hit only processes with another one of
their kind, because a cluster without any decode engine correctly answers 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Set

SERVES_AFTER_S = 12.0
"""A process that has been seen for this long is assumed to serve."""
LONGEST_STOP_S = 8.0
"""Longer than the silence after which an engine is given up; shorter than Serve's patience."""
AFTERMATH_S = 15.0
"""How long HAProxy may still send requests to an ingress that has died."""
_KILLED_SHARE = 0.35


class Trouble(NamedTuple):
    """One of them; times of `time.monotonic`."""

    victim: str
    kind: str
    began_s: float
    ended_s: float


class Troublemaker:
    """Injector of faults, and owner of the stopped processes; cancelling it resumes them.

    Args:
        processes: Gives (name, process id) of every process of the cluster.
        mean_s: Mean time from one trouble to the next.
        rng: Source of all random draws.
        can_lose: Says which pools have a replica more than they need; "ingress" is one.

    Attributes:
        done: All troubles so far.
    """

    def __init__(
        self,
        processes: Callable[[], dict[str, int]],
        mean_s: float,
        rng: random.Random,
        can_lose: Callable[[], Set[str]],
    ) -> None:
        self._processes = processes
        self._can_lose = can_lose
        self._mean_s = mean_s
        self._rng = rng
        self._seen_s: dict[int, float] = {}
        self._stopped: dict[int, asyncio.Task[None]] = {}
        self.done: list[Trouble] = []

    async def run(self) -> None:
        """Make trouble until it is cancelled."""
        for process_id in (await asyncio.to_thread(self._processes)).values():
            self._seen_s[process_id] = -SERVES_AFTER_S  # it serves before anything begins
        try:
            while True:
                await asyncio.sleep(self._rng.expovariate(1.0 / self._mean_s))
                pools = await asyncio.to_thread(self._can_lose)
                self._make(await asyncio.to_thread(self._processes), pools)
        finally:
            for process_id, waking in self._stopped.items():
                waking.cancel()
                _signal(process_id, signal.SIGCONT)

    def ingress_was_in_trouble(self, began_s: float, ended_s: float) -> bool:
        """Return whether one was between these times, or a little before."""
        return any(
            trouble.victim.startswith("ingress")
            and trouble.began_s <= ended_s
            and trouble.ended_s + AFTERMATH_S >= began_s
            for trouble in self.done
        )

    def _make(self, processes: dict[str, int], pools: Set[str]) -> None:
        now_s = time.monotonic()
        for process_id in processes.values():
            self._seen_s.setdefault(process_id, now_s)
        victims = sorted(
            name
            for name, process_id in processes.items()
            if name.startswith(("engine", "actor", "ingress"))
            and not pools.isdisjoint(name.split())
            and process_id not in self._stopped
            and now_s - self._seen_s[process_id] >= SERVES_AFTER_S
        )
        if not victims:
            return
        name = self._rng.choice(victims)
        is_killed = self._rng.random() < _KILLED_SHARE
        stop_s = self._rng.uniform(0.2, LONGEST_STOP_S)
        if is_killed:
            _signal(processes[name], signal.SIGKILL)
            self.done.append(Trouble(name, "kill", now_s, now_s))
        else:
            _signal(processes[name], signal.SIGSTOP)
            self.done.append(Trouble(name, "stop", now_s, now_s + stop_s))
            self._stopped[processes[name]] = asyncio.create_task(
                self._wake(processes[name], stop_s)
            )

    async def _wake(self, process_id: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        _signal(process_id, signal.SIGCONT)
        del self._stopped[process_id]


def _signal(process_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, number)
