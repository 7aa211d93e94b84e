"""Simulated mesh as a device: makes each step take the time that the timing model gives.

It executes work in order, concurrently with its host, which may wait for the end later. The clock
sleeps (`WallClock`, in a real replica) or counts (in tests). The simulator's worker uses a
`DeviceTimeline` without a mesh.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from typing import TYPE_CHECKING, Protocol

from replicas.faults import NO_FAULTS, PlanClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.generators.simulated.timing import StepTiming

_SPIN_S = 80e-6
"""The operating system wakes a sleeper up to this late; the rest is spent looking at the clock."""
_SLEEP_S = 3600.0
"""Longest sleep at a time: a device may hang for ever, which no system call takes."""


class DeviceClock(Protocol):
    """Clock of a simulated device, which can also spend time."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        ...

    def spend(self, seconds: float) -> None:
        """Wait until the device has worked for so many seconds."""
        ...


class WallClock:
    """Clock of real time; sleeps, and spins only for the last instant."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def spend(self, seconds: float) -> None:
        """Sleep for so many seconds; do nothing if they are not positive."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if left_s > _SPIN_S:
                time.sleep(min(left_s - _SPIN_S, _SLEEP_S))


@contextlib.contextmanager
def busy(clock: DeviceClock, seconds: float) -> Iterator[None]:
    """Make the body take so many seconds in total, its own computation included."""
    until_s = clock.now_s() + seconds
    yield
    clock.spend(until_s - clock.now_s())


class Slowdown(Protocol):
    """Faults of a device over time; see `replicas.faults.ReplicaFaults`."""

    def slow_factor(self, now_s: float) -> float:
        """Return the factor on the duration of a step that starts now."""
        ...

    def hang_left_s(self, now_s: float) -> float:
        """Return the least duration of a step that starts now."""
        ...


class DeviceTimeline:
    """Timeline of a device that executes work in order.

    Shared by a real replica's simulated mesh and the simulator. Owns the random stream of the
    jitter. Pure: the present time is an argument.

    Args:
        faults: Faults of the device; they affect steps that start during them.
        plan_clock: Converts the clock's time to that of the faults.
        jitter: Standard deviation of the logarithm of a random factor on every step; 0 is none.
        seed: Seed of the jitter.

    Attributes:
        free_s: Time at which all submitted work is done.
        busy_s: Total seconds of all submitted work.
    """

    def __init__(
        self,
        faults: Slowdown = NO_FAULTS,
        plan_clock: PlanClock | None = None,
        jitter: float = 0.0,
        seed: str = "",
    ) -> None:
        self.free_s = -math.inf
        self.busy_s = 0.0
        self._faults = faults
        self._plan_clock = plan_clock or PlanClock()
        self._jitter = jitter
        self._random = random.Random(seed)

    def submit(self, now_s: float, device_s: float) -> float:
        """Submit work behind all earlier work; return the time at which it will be done.

        Args:
            now_s: The present time.
            device_s: Duration on a healthy device.
        """
        started_s = max(now_s, self.free_s)
        plan_s = self._plan_clock.plan_s(started_s)
        factor = self._faults.slow_factor(plan_s)
        if self._jitter:
            factor *= math.exp(self._random.gauss(0.0, self._jitter))
        # Work on a hung device takes until the hang is over.
        seconds = max(device_s * factor, self._faults.hang_left_s(plan_s))
        self.busy_s += seconds
        self.free_s = started_s + seconds
        return self.free_s

    def rewind(self, free_s: float, busy_s: float) -> None:
        """Undo submissions by restoring earlier values of `free_s` and `busy_s`."""
        self.free_s, self.busy_s = free_s, busy_s


class SimulatedMesh:
    """`mesh_device` of the simulated generator.

    Args:
        timing: Durations of steps.
        clock: Clock on which they are spent.
        timeline: Timeline of this device; None is a healthy device's.

    Attributes:
        timing: As given.
        clock: As given.
        timeline: As given.
    """

    def __init__(
        self, timing: StepTiming, clock: DeviceClock, timeline: DeviceTimeline | None = None
    ) -> None:
        self.timing = timing
        self.clock = clock
        self.timeline = timeline or DeviceTimeline()

    def submit(self, device_s: float) -> float:
        """Submit work; return the event of its end."""
        return self.timeline.submit(self.clock.now_s(), device_s)

    def wait(self, event: object) -> None:
        """Wait for an event of `submit`."""
        assert isinstance(event, float), "an event of this device is a time"
        self.clock.spend(event - self.clock.now_s())

    @contextlib.contextmanager
    def busy(self, device_s: float) -> Iterator[None]:
        """Submit work and wait for its end after the body, which runs concurrently."""
        event = self.submit(device_s)
        yield
        self.wait(event)
