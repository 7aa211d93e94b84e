"""Threads that encode and decode long texts, which would block the event loop.

Owner: a `HeavyWork` belongs to one event loop and owns its threads. `cluster.edge.fair_scheduler`
decides which job gets a thread next. A job runs in steps and competes for a thread before each, so
that short texts run between the pieces of long ones. A step must release the GIL, or consist of
many small operations: a thread that keeps the GIL for long blocks the event loop, too.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cluster.edge.fair_scheduler import FairScheduler, JobLimits
from cluster.errors import SaturatedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.edge.fair_scheduler import Job

T = TypeVar("T")

_END = object()
"""Returned by `next` after the last step; a future cannot carry StopIteration."""


class HeavyWork:
    """Runs jobs in threads, a step at a time.

    Args:
        num_threads: Steps that run at once.
        limits: Limits on waiting and running jobs.
    """

    def __init__(self, num_threads: int, limits: JobLimits | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "heavy-work")
        self._num_free = num_threads
        self._scheduler = FairScheduler(limits or JobLimits())
        # Jobs whose caller still waits, and the futures that queued jobs wait for.
        self._running: set[Job] = set()
        self._turns: dict[Job, asyncio.Future[None]] = {}

    async def run(self, job: Job, steps: Iterator[T]) -> T:
        """Run the steps of a job in threads, each when it is the job's turn.

        If the caller is cancelled, a running step still ends, and no further step starts.

        Returns:
            The value of the last step; there must be at least one.

        Raises:
            SaturatedError: Too many jobs or characters are waiting, of the job's source or in all.
        """
        refusal = self._scheduler.refusal_reason(job)
        if refusal is not None:
            raise SaturatedError(f"{refusal}; try again in a moment")
        self._scheduler.admit(job)
        self._running.add(job)
        self._enqueue(job)
        last: object = _END
        try:
            while True:
                await self._turns[job]
                del self._turns[job]
                value = await self._step(job, steps)
                if value is _END:
                    break
                last = value
        finally:
            self._running.discard(job)
            self._scheduler.release(job)
            turn = self._turns.pop(job, None)
            if turn is not None and turn.done() and not turn.cancelled():
                self._free_thread()  # a thread was assigned and not used
        assert last is not _END, "a job without a step"
        return last  # type: ignore[return-value] # _END is handled

    def _enqueue(self, job: Job) -> None:
        """Create the job's turn, and assign free threads."""
        self._turns[job] = asyncio.get_running_loop().create_future()
        self._assign()

    async def _step(self, job: Job, steps: Iterator[T]) -> object:
        """Run one step in the assigned thread, which is free again when the step ends."""
        step = asyncio.get_running_loop().run_in_executor(self._threads, next, steps, _END)
        step.add_done_callback(partial(self._on_step_done, job))
        return await asyncio.shield(step)

    def _on_step_done(self, job: Job, step: asyncio.Future[object]) -> None:
        """Queue the job again, then assign its thread.

        In the other order the thread would always go to another queued job, whatever the shares
        and lanes say.
        """
        self._num_free += 1
        if job in self._running and not step.exception() and step.result() is not _END:
            self._scheduler.resume(job)
            self._enqueue(job)
        else:
            self._assign()

    def _free_thread(self) -> None:
        self._num_free += 1
        self._assign()

    def _assign(self) -> None:
        """Assign free threads to the next jobs."""
        while self._num_free and (job := self._scheduler.pop_next()) is not None:
            turn = self._turns[job]
            if not turn.done():
                self._num_free -= 1
                turn.set_result(None)
