"""A few threads for what would hold up an event loop: long texts to encode and decode.

Owner: a `HeavyWork` owns its threads and the count of what they have been given. What runs there
should release the interpreter's lock, or do many small things: a thread that keeps it for long
holds up the loop all the same. It bounds how many jobs there are, not how long each takes.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from cluster.errors import SaturatedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


class HeavyWork:
    """Runs functions in threads, a bounded number at a time and in wait.

    Args:
        num_threads: How many run at once.
        max_jobs: How many may run and wait together.
    """

    def __init__(self, num_threads: int, max_jobs: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "heavy-work")
        self._places = threading.BoundedSemaphore(max_jobs)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; one that waits still is dropped when the caller is cancelled.

        Raises:
            SaturatedError: As many jobs as may be wait already.
        """
        if not self._places.acquire(blocking=False):
            raise SaturatedError("too many long texts are being encoded; try again in a moment")
        job = self._threads.submit(work)
        # Not when the caller is done: a job that has begun goes on without it.
        job.add_done_callback(self._free_place)
        return await asyncio.wrap_future(job)

    def _free_place(self, _job: Future[T]) -> None:
        self._places.release()
