"""The simulated mesh as a device: it makes a step take as long as the model of time says.

What it is given it does in that order, beside its host, who may go on and wait for the end later.
The clock sleeps time away (`WallClock`, in a real replica) or adds it up (in tests). The
simulator's worker does without a mesh, on a `DeviceTimeline` of its own.
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
    """Where a device's time comes from and goes to."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        ...

    def spend(self, seconds: float) -> None:
        """Let the device work that long; the caller goes on afterwards."""
        ...


class WallClock:
    """Real time: sleeps, without a busy core but for the last instant."""

    def now_s(self) -> float:
        """See `DeviceClock.now_s`."""
        return time.monotonic()

    def spend(self, seconds: float) -> None:
        """See `DeviceClock.spend`; nothing where `seconds` is not positive."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if left_s > _SPIN_S:
                time.sleep(min(left_s - _SPIN_S, _SLEEP_S))


@contextlib.contextmanager
def busy(clock: DeviceClock, seconds: float) -> Iterator[None]:
    """Make the body take so many seconds in all: what it computes is part of them, not on top."""
    until_s = clock.now_s() + seconds
    yield
    clock.spend(until_s - clock.now_s())


class Slowdown(Protocol):
    """What is wrong with a device; see `replicas.faults.ReplicaFaults`."""

    def slow_factor(self, now_s: float) -> float:
        """Return how many times as long a step takes that starts now."""
        ...

    def hang_left_s(self, now_s: float) -> float:
        """Return how long a step takes at least that starts now."""
        ...


class DeviceTimeline:
    """When a device is done with what it is given: one thing after another, each in its time.

    The one rule of that, of a real replica's simulated mesh and of the simulator's. Owner of the
    random stream that jitter draws on. Pure: the present is handed in.

    Args:
        faults: What is wrong with the device; a step is slow, or hangs, that starts while it is so.
        plan_clock: Tells the faults' time from the clock's.
        jitter: Standard deviation of the logarithm of a factor on every step; 0 is none.
        seed: Of the jitter.

    Attributes:
        free_s: When it is done with all that it was given.
        busy_s: Seconds of all that it was given.
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

    def begin(self, now_s: float, device_s: float) -> float:
        """Give it something to do, behind all that it has; returns when that is over.

        Args:
            now_s: The present.
            device_s: What it takes a device with which nothing is wrong.
        """
        started_s = max(now_s, self.free_s)
        plan_s = self._plan_clock.plan_s(started_s)
        factor = self._faults.slow_factor(plan_s)
        if self._jitter:
            factor *= math.exp(self._random.gauss(0.0, self._jitter))
        # A device that hangs takes until it answers again.
        seconds = max(device_s * factor, self._faults.hang_left_s(plan_s))
        self.busy_s += seconds
        self.free_s = started_s + seconds
        return self.free_s

    def rewind(self, free_s: float, busy_s: float) -> None:
        """Take back what it was given last: it is as it was when it was so."""
        self.free_s, self.busy_s = free_s, busy_s


class SimulatedMesh:
    """The `mesh_device` of the simulated generator.

    Args:
        timing: What each step costs.
        clock: Where that time goes.
        timeline: Of this device; None: nothing is wrong with it.

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

    def begin(self, device_s: float) -> float:
        """Let it work on something as soon as it is free; returns the event that it is done."""
        return self.timeline.begin(self.clock.now_s(), device_s)

    def wait(self, event: object) -> None:
        """Wait for an event of `begin`."""
        assert isinstance(event, float), "an event of this device is a time"
        self.clock.spend(event - self.clock.now_s())

    @contextlib.contextmanager
    def busy(self, device_s: float) -> Iterator[None]:
        """Work on something to its end: what the body computes is part of it, not on top."""
        event = self.begin(device_s)
        yield
        self.wait(event)
