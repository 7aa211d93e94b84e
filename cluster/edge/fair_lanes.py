"""Which long text gets the next slice of a thread: fair shares by source, in two lanes. Pure.

A source is a tenant, or an address where no tenant is named. Jobs run in slices, of at most
`SLICE_CHARS` characters unless a job cannot be divided, and between two slices another job may be
chosen. Within a lane the next slice is for the waiting source that has had the fewest characters by
weight; one that comes back starts where the others are. So of two sources of one weight that both
have jobs waiting, neither gets more than two slices ahead of the other. Prompts of generations go
before other texts; these get one slice in `_SLICES_BETWEEN_OTHERS` + 1 at least.

Owner: a `FairLanes` belongs to one event loop. It holds no thread: `cluster.edge.heavy_work` does.
Source: Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from replicas.text_pieces import PIECE_CHARS

SLICE_CHARS = PIECE_CHARS
_SLICES_BETWEEN_OTHERS = 8


class Lane(IntEnum):
    """What a text is for; the lower one goes first."""

    PROMPT = 0
    OTHER = 1


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """What jobs may hold that wait or run.

    A text larger than a limit of characters is admitted where nothing else counts against it.

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
    """A text to work on.

    Attributes:
        lane: What it is for.
        source: On whose share it runs.
        num_chars: Of it.
        weight: Of its source.
        slice_chars: Characters of a slice; all of them for a job that is one step.
        num_left: Characters that no slice was given for yet.
    """

    lane: Lane
    source: str
    num_chars: int
    weight: float = 1.0
    slice_chars: int = SLICE_CHARS
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = self.num_chars


@dataclass(slots=True)
class _Source:
    """What a source's jobs hold, and what it has had in each lane: characters by weight."""

    num_jobs: int = 0
    num_chars: int = 0
    served: list[float] = field(default_factory=lambda: [0.0 for _ in Lane])


class FairLanes:
    """See the module docstring.

    Args:
        limits: What jobs may hold.
    """

    def __init__(self, limits: LaneLimits) -> None:
        self._limits = limits
        # Waiting jobs by source.
        self._lanes: dict[Lane, dict[str, deque[Job]]] = {lane: {} for lane in Lane}
        self._sources: dict[str, _Source] = {}
        # What the source of the latest slice had had before it.
        self._virtual_times = [0.0 for _ in Lane]
        self._num_since_other = 0
        self.num_jobs = 0
        self.num_chars = 0

    def refusal_reason(self, job: Job) -> str | None:
        """Say why a job cannot be admitted now; None if it can."""
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
        """Let a job wait for its first slice; `refusal_reason` has none."""
        held = self._sources.setdefault(job.source, _Source())
        held.num_jobs += 1
        held.num_chars += job.num_chars
        self.num_jobs += 1
        self.num_chars += job.num_chars
        lines = self._lanes[job.lane]
        if job.source not in lines:
            held.served[job.lane] = max(held.served[job.lane], self._virtual_times[job.lane])
            lines[job.source] = deque()
        lines[job.source].append(job)

    def pop_next(self) -> Job | None:
        """Choose the job of the next slice; it waits no more until `resume`."""
        if self._lanes[Lane.OTHER] and self._num_since_other >= _SLICES_BETWEEN_OTHERS:
            lanes = (Lane.OTHER, Lane.PROMPT)
        else:
            lanes = (Lane.PROMPT, Lane.OTHER)
        for lane in lanes:
            if self._lanes[lane]:
                self._num_since_other = 0 if lane is Lane.OTHER else self._num_since_other + 1
                return self._pop_from_lane(lane)
        return None

    def resume(self, job: Job) -> None:
        """Let a job wait for its next slice, before the other jobs of its source."""
        self._lanes[job.lane].setdefault(job.source, deque()).appendleft(job)

    def release(self, job: Job) -> None:
        """Forget a job that has ended, or whose caller is gone; it may wait or not."""
        lines = self._lanes[job.lane]
        line = lines.get(job.source)
        if line is not None and job in line:
            line.remove(job)
            if not line:
                del lines[job.source]
        held = self._sources[job.source]
        held.num_jobs -= 1
        held.num_chars -= job.num_chars
        self.num_jobs -= 1
        self.num_chars -= job.num_chars
        if not held.num_jobs:
            del self._sources[job.source]

    def _pop_from_lane(self, lane: Lane) -> Job:
        """Take the first job of the source that has had least."""
        lines = self._lanes[lane]
        source = min(lines, key=lambda name: self._sources[name].served[lane])
        line, served = lines[source], self._sources[source].served
        job = line.popleft()
        if not line:
            del lines[source]
        size = min(job.num_left, job.slice_chars)
        job.num_left -= size
        self._virtual_times[lane] = served[lane]
        served[lane] += max(size, 1) / job.weight
        return job


def _is_over(held: int, more: int, most: int) -> bool:
    return held > 0 and held + more > most
