"""Bound how much longer an engine's step gets because KV is copied in it. Pure; see the class."""

from collections.abc import Callable


class StepBudget:
    """Seconds that one step of an engine may spend on copying, whichever way and for whomever.

    A step may copy for ``least_s``, and longer where it computes for long: for ``share`` of the
    time that it has spent on other things. What a chunk costs is known when it is copied, so that
    a step is over its budget by less than one chunk; and each step may copy one at least.

    Owner: the worker side of a connector, on the engine's core thread.
    """

    def __init__(self, least_s: float, share: float, now_s: Callable[[], float]) -> None:
        """Begin the first step.

        Args:
            least_s: What every step may spend, in seconds; more than 0.
            share: What it may spend of the time that it computes for.
            now_s: Monotonic clock.
        """
        self._least_s = least_s
        self._share = share
        self._now_s = now_s
        self.begin()

    def begin(self) -> None:
        """Begin a step: nothing of its budget is spent."""
        self._began_s = self._mark_s = self._now_s()
        self._spent_s = 0.0

    def resume(self) -> None:
        """Begin to copy: what has gone by since the last chunk was spent on something else."""
        self._mark_s = self._now_s()

    def charge(self) -> None:
        """Count what has gone by since ``resume`` or the last call: a chunk was copied."""
        now_s = self._now_s()
        self._spent_s += now_s - self._mark_s
        self._mark_s = now_s

    @property
    def has_room(self) -> bool:
        """Whether one more chunk may be copied in this step."""
        other_s = self._mark_s - self._began_s - self._spent_s
        return self._spent_s < max(self._least_s, self._share * other_s)
