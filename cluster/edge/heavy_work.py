"""A few threads for what would hold up an event loop: long texts to encode and decode.

Owner: a `HeavyWork` belongs to one event loop, and owns its threads; `cluster.edge.fair_lanes`
decides which job gets a thread next. A job runs in steps, each in a thread of its own turn, so that
a short text comes in between the pieces of a long one. A step should release the interpreter's
lock, or do many small things: a thread that keeps it for long holds up the loop all the same.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cluster.edge.fair_lanes import FairLanes, LaneLimits
from cluster.errors import SaturatedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.edge.fair_lanes import Job

T = TypeVar("T")

_END = object()
"""What `next` returns of steps that are over; StopIteration cannot pass a future."""


class HeavyWork:
    """Runs jobs in threads, a step at a time.

    Args:
        num_threads: Steps that run at once.
        limits: What jobs may hold that wait or run.
    """

    def __init__(self, num_threads: int, limits: LaneLimits | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "heavy-work")
        self._num_free = num_threads
        self._lanes = FairLanes(limits or LaneLimits())
        # Jobs whose caller waits, and the turns that those in a lane wait for.
        self._running: set[Job] = set()
        self._turns: dict[Job, asyncio.Future[None]] = {}

    async def run(self, job: Job, steps: Iterator[T]) -> T:
        """Take the steps of a job, each in a thread when it is the job's turn.

        A step that has begun ends, even if the caller is cancelled meanwhile; no other one begins.

        Returns:
            What the last step yielded; there is one at least.

        Raises:
            SaturatedError: Too much waits already, of the job's source or in all.
        """
        refusal = self._lanes.refusal_reason(job)
        if refusal is not None:
            raise SaturatedError(f"{refusal}; try again in a moment")
        self._lanes.admit(job)
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
            self._lanes.release(job)
            turn = self._turns.pop(job, None)
            if turn is not None and turn.done() and not turn.cancelled():
                self._free_thread()  # a turn that was given, and not used
        assert last is not _END, "a job without a step"
        return last  # type: ignore[return-value] # _END is handled

    def _enqueue(self, job: Job) -> None:
        """Let a job that waits in its lane have a thread when it is its turn."""
        self._turns[job] = asyncio.get_running_loop().create_future()
        self._assign()

    async def _step(self, job: Job, steps: Iterator[T]) -> object:
        """Take a step in the thread that was assigned; the thread is free when the step ends."""
        step = asyncio.get_running_loop().run_in_executor(self._threads, next, steps, _END)
        step.add_done_callback(partial(self._on_step_done, job))
        return await asyncio.shield(step)

    def _on_step_done(self, job: Job, step: asyncio.Future[object]) -> None:
        """Let the job wait again, then free its thread.

        The order matters: the thread would otherwise go to whichever job waits already, whatever
        the shares and lanes say.
        """
        self._num_free += 1
        if job in self._running and not step.exception() and step.result() is not _END:
            self._lanes.resume(job)
            self._enqueue(job)
        else:
            self._assign()

    def _free_thread(self) -> None:
        self._num_free += 1
        self._assign()

    def _assign(self) -> None:
        """Give free threads to the jobs whose turn it is."""
        while self._num_free and (job := self._lanes.pop_next()) is not None:
            turn = self._turns[job]
            if not turn.done():
                self._num_free -= 1
                turn.set_result(None)
