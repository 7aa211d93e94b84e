"""Growth of processes, from samples. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FLAT_SHARE = 0.01
"""A process is flat if its memory changes by less than this share of itself."""
FLAT_COUNT = 5.0
"""Descriptors and threads are flat within their share, or this many: connections come and go."""
_MAX_POINTS = 400
_MB = 2**20


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one time.

    Attributes:
        time_s: Seconds since the load began.
        num_requests: Requests that had begun by then.
        process: Its name, unique in the run.
        process_id: Its id.
        is_ours: Whether it is the cluster's, not one of Ray's own.
        anonymous_bytes: Memory that is backed by no file and not shared (RssAnon).
        pss_bytes: Its share of all memory that it has mapped.
        num_descriptors: Open file descriptors.
        num_threads: Threads.
    """

    time_s: float
    num_requests: int
    process: str
    process_id: int
    is_ours: bool
    anonymous_bytes: int
    pss_bytes: int
    num_descriptors: int
    num_threads: int


class Trend(msgspec.Struct, frozen=True):
    """Change of a quantity over a window.

    Attributes:
        level: Its median over the first tenth of the window.
        change: Rise of the fitted line from the window's begin to its end.
    """

    level: float
    change: float

    def is_flat(self, floor: float = 0.0) -> bool:
        """Return whether it changes by less than `FLAT_SHARE` of its level, or than `floor`."""
        return abs(self.change) <= max(FLAT_SHARE * self.level, floor)


class ProcessGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of one process between the end of the warm-up and the end of the load.

    Attributes:
        process: Its name.
        is_ours: Whether it is the cluster's, not one of Ray's own.
        is_whole: Whether it was there in every sample of the window.
        anonymous: Bytes of anonymous memory.
        pss: Bytes of its share of all memory.
        descriptors: Open file descriptors.
        threads: Threads.
        bytes_per_request: Growth of anonymous memory over the requests of the window.
    """

    process: str
    is_ours: bool
    is_whole: bool
    anonymous: Trend
    pss: Trend
    descriptors: Trend
    threads: Trend
    bytes_per_request: float

    @property
    def is_flat(self) -> bool:
        """Return whether it lived throughout, without growth of memory, descriptors or threads."""
        return (
            self.is_whole
            and self.anonymous.is_flat()
            and self.descriptors.is_flat(FLAT_COUNT)
            and self.threads.is_flat(FLAT_COUNT)
        )


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """Fit a line: the median of the slopes between all pairs, which no spike can turn.

    Args:
        times_s: When, ascending.
        values: The measurement at each time.
    """
    level = statistics.median(values[: max(len(values) // 10, 1)])
    stride = -(-len(values) // _MAX_POINTS)
    at_s, of = np.asarray(times_s, float)[::stride], np.asarray(values, float)[::stride]
    later, earlier = np.tril_indices(len(at_s), -1)
    if not later.size:
        return Trend(level, 0.0)
    slope = float(np.median((of[later] - of[earlier]) / (at_s[later] - at_s[earlier])))
    return Trend(level, slope * (times_s[-1] - times_s[0]))


def judge(samples: Iterable[Sample], warm_up_s: float) -> list[ProcessGrowth]:
    """Return the growth of each process that was seen after the warm-up; ours first, by name.

    Args:
        samples: All of them, in order of time.
        warm_up_s: Samples before this time do not count.
    """
    series: defaultdict[str, list[Sample]] = defaultdict(list)
    times_s = set()
    for sample in samples:
        if sample.time_s >= warm_up_s:
            series[sample.process].append(sample)
            times_s.add(sample.time_s)
    grown = [_growth(of_one, len(times_s)) for of_one in series.values()]
    return sorted(grown, key=lambda g: (not g.is_ours, g.process))


def _growth(samples: Sequence[Sample], num_times: int) -> ProcessGrowth:
    times_s = [s.time_s for s in samples]
    anonymous = trend(times_s, [s.anonymous_bytes for s in samples])
    num_requests = samples[-1].num_requests - samples[0].num_requests
    return ProcessGrowth(
        process=samples[0].process,
        is_ours=samples[0].is_ours,
        is_whole=len(samples) == num_times,
        anonymous=anonymous,
        pss=trend(times_s, [s.pss_bytes for s in samples]),
        descriptors=trend(times_s, [s.num_descriptors for s in samples]),
        threads=trend(times_s, [s.num_threads for s in samples]),
        bytes_per_request=anonymous.change / max(num_requests, 1),
    )


def mb_per_1000_requests(grown: Iterable[ProcessGrowth]) -> float:
    """Growth of all of the cluster's own processes together."""
    return sum(g.bytes_per_request for g in grown if g.is_ours) * 1000 / _MB


def table(grown: Iterable[ProcessGrowth]) -> str:
    """One line a process: where it was after the warm-up, and by how much it has moved since."""
    lines = [
        f"{'PROCESS':30}{'ANON MB':>9}{'CHANGE':>9}{'%':>7}{'KB/REQ':>8}{'PSS MB':>9}{'CHANGE':>9}"
        f"{'FDS':>6}{'CHANGE':>8}{'THREADS':>9}{'CHANGE':>8}  FLAT"
    ]
    for g in grown:
        share = g.anonymous.change / max(g.anonymous.level, 1.0)
        verdict = ("yes" if g.is_flat else "NO") if g.is_ours else "(Ray's)"
        if not g.is_whole:
            verdict += ", came or went"
        lines.append(
            f"{g.process:30}{g.anonymous.level / _MB:9.1f}{g.anonymous.change / _MB:+9.2f}"
            f"{share:+7.1%}{g.bytes_per_request / 1024:+8.2f}"
            f"{g.pss.level / _MB:9.1f}{g.pss.change / _MB:+9.2f}"
            f"{g.descriptors.level:6.0f}{g.descriptors.change:+8.1f}"
            f"{g.threads.level:9.0f}{g.threads.change:+8.1f}  {verdict}"
        )
    return "\n".join(lines)
