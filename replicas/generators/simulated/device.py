"""The simulated mesh as a device: it makes a step take as long as the model of time says.

Owner of the random stream that jitter draws on; the clock sleeps time away (`WallClock`, in a real
replica) or adds it up (in tests). The simulator's worker does without a mesh.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from typing import TYPE_CHECKING, Protocol

from replicas.faults import NO_FAULTS, PlanClock, ReplicaFaults

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
        """Monotonic seconds."""
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


def step_factor(slow: float, jitter: float, chance: random.Random) -> float:
    """What the seconds of a step are multiplied with; draws only where there is jitter."""
    return slow * math.exp(chance.gauss(0.0, jitter)) if jitter else slow


class SimulatedMesh:
    """The `mesh_device` of the simulated generator.

    Args:
        timing: What each step costs.
        clock: Where that time goes.
        faults: What is wrong with this replica; a device knows of being slow and of hanging.
        plan_clock: Tells the faults' time from the clock's.
        jitter: Standard deviation of the logarithm of a factor on every step; 0 is none.
        seed: Of the jitter.
    """

    def __init__(
        self,
        timing: StepTiming,
        clock: DeviceClock,
        *,
        faults: ReplicaFaults = NO_FAULTS,
        plan_clock: PlanClock | None = None,
        jitter: float = 0.0,
        seed: str = "",
    ) -> None:
        self.timing = timing
        self.clock = clock
        self._faults = faults
        self._plan_clock = plan_clock or PlanClock()
        self._jitter = jitter
        self._random = random.Random(seed)

    def busy(self, device_s: float) -> contextlib.AbstractContextManager[None]:
        """Make the body take `device_s`, times what faults and jitter make of it.

        A device that hangs takes until it answers again.
        """
        plan_s = self._plan_clock.plan_s(self.clock.now_s())
        factor = step_factor(self._faults.slow_factor(plan_s), self._jitter, self._random)
        return busy(self.clock, max(device_s * factor, self._faults.hang_left_s(plan_s)))
