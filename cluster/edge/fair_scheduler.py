"""Fair scheduling of long texts over a few threads: shares by source, at two priorities. Pure.

A source is a tenant, or a client address if no tenant is named. A job runs in slices of at most
`SLICE_CHARS` characters, unless it cannot be divided; each slice may go to another job. At one
priority the next slice goes to the waiting source that was served the fewest characters, divided by
its weight. A source that returns starts level with the others. So of two waiting sources of one
weight, neither gets more than two slices ahead. Prompts of generations go before other texts, which
get at least one of `_SLICES_BETWEEN_OTHERS + 1` slices.

Owner: a `FairScheduler` belongs to one event loop; `cluster.edge.heavy_work` owns the threads.
Source: Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from replicas.text_pieces import PIECE_CHARS

SLICE_CHARS = PIECE_CHARS
_SLICES_BETWEEN_OTHERS = 8


class Priority(IntEnum):
    """Purpose of a text; lower values go first."""

    PROMPT = 0
    OTHER = 1


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits on waiting and running jobs.

    A text larger than a limit of characters is admitted if no other job counts towards the limit.

    Attributes:
        max_chars: Characters of all jobs.
        max_source_chars: Characters of one source's jobs.
        max_jobs: All jobs.
        max_source_jobs: One source's jobs.
    """

    max_chars: int = 2**24
    max_source_chars: int = 2**21
    max_jobs: int = 256
    max_source_jobs: int = 64


@dataclass(slots=True, eq=False)
class Job:
    """A text to encode or decode.

    Attributes:
        priority: Purpose of the text.
        source: Tenant or address whose share pays for it.
        num_chars: Length of the text.
        weight: Weight of the source.
        slice_chars: Characters of a slice; `num_chars` for a job of a single step.
        num_left: Characters that were not yet scheduled.
    """

    priority: Priority
    source: str
    num_chars: int
    weight: float = 1.0
    slice_chars: int = SLICE_CHARS
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = self.num_chars


@dataclass(slots=True)
class _Source:
    """Totals of a source's jobs; `served` has characters divided by weight, for each priority."""

    num_jobs: int = 0
    num_chars: int = 0
    served: list[float] = field(default_factory=lambda: [0.0 for _ in Priority])


class FairScheduler:
    """Queues of jobs by priority and source, and the choice of the next one.

    Args:
        limits: Limits on waiting and running jobs.
    """

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        # Waiting jobs by source.
        self._queues: dict[Priority, dict[str, deque[Job]]] = {
            priority: {} for priority in Priority
        }
        self._sources: dict[str, _Source] = {}
        # By priority: `served` of the latest chosen source, before its slice.
        self._virtual_times = [0.0 for _ in Priority]
        self._num_since_other = 0
        self.num_jobs = 0
        self.num_chars = 0

    def refusal_reason(self, job: Job) -> str | None:
        """Return why a job cannot be admitted now; None if it can."""
        limits, held = self._limits, self._sources.get(job.source, _Source())
        if held.num_jobs >= limits.max_source_jobs or _is_over(
            held.num_chars, job.num_chars, limits.max_source_chars
        ):
            return "too many long texts of this client are being encoded"
        if self.num_jobs >= limits.max_jobs or _is_over(
            self.num_chars, job.num_chars, limits.max_chars
        ):
            return "too many long texts are being encoded"
        return None

    def admit(self, job: Job) -> None:
        """Queue a job for its first slice; `refusal_reason` must be None."""
        held = self._sources.setdefault(job.source, _Source())
        held.num_jobs += 1
        held.num_chars += job.num_chars
        self.num_jobs += 1
        self.num_chars += job.num_chars
        queues = self._queues[job.priority]
        if job.source not in queues:
            held.served[job.priority] = max(
                held.served[job.priority], self._virtual_times[job.priority]
            )
            queues[job.source] = deque()
        queues[job.source].append(job)

    def pop_next(self) -> Job | None:
        """Remove and return the job of the next slice; None if no job waits."""
        if self._queues[Priority.OTHER] and self._num_since_other >= _SLICES_BETWEEN_OTHERS:
            order = (Priority.OTHER, Priority.PROMPT)
        else:
            order = (Priority.PROMPT, Priority.OTHER)
        for priority in order:
            if self._queues[priority]:
                self._num_since_other = (
                    0 if priority is Priority.OTHER else self._num_since_other + 1
                )
                return self._pop_from(priority)
        return None

    def resume(self, job: Job) -> None:
        """Queue a job for its next slice, before the other jobs of its source."""
        self._queues[job.priority].setdefault(job.source, deque()).appendleft(job)

    def release(self, job: Job) -> None:
        """Remove a job that has ended or whose caller was cancelled, queued or not."""
        queues = self._queues[job.priority]
        queue = queues.get(job.source)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del queues[job.source]
        held = self._sources[job.source]
        held.num_jobs -= 1
        held.num_chars -= job.num_chars
        self.num_jobs -= 1
        self.num_chars -= job.num_chars
        if not held.num_jobs:
            del self._sources[job.source]

    def _pop_from(self, priority: Priority) -> Job:
        """Remove and return the first job of the source that was served least."""
        queues = self._queues[priority]
        source = min(queues, key=lambda name: self._sources[name].served[priority])
        queue, served = queues[source], self._sources[source].served
        job = queue.popleft()
        if not queue:
            del queues[source]
        size = min(job.num_left, job.slice_chars)
        job.num_left -= size
        self._virtual_times[priority] = served[priority]
        served[priority] += max(size, 1) / job.weight
        return job


def _is_over(held: int, more: int, most: int) -> bool:
    return held > 0 and held + more > most
