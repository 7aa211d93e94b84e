"""Bound on the time by which copying KV may lengthen an engine's step. Pure."""

from collections.abc import Callable


class StepBudget:
    """Seconds that one step of an engine may spend on copying, over all transfers, both directions.

    A step may copy for ``least_s``, and longer if it computes for long: for ``share`` of the time
    that it has spent on other things. The cost of a chunk is known only after it is copied, so a
    step exceeds its budget by less than one chunk. Each step may copy at least one.

    Owner: the worker side of a connector, on the engine's core thread.
    """

    def __init__(self, least_s: float, share: float, now_s: Callable[[], float]) -> None:
        """Start the first step.

        Args:
            least_s: Seconds that every step may spend; more than 0.
            share: Share of a step's computing time that it may spend.
            now_s: Monotonic clock.
        """
        self._least_s = least_s
        self._share = share
        self._now_s = now_s
        self.start_step()

    def start_step(self) -> None:
        """Start a step with an unspent budget."""
        self._began_s = self._mark_s = self._now_s()
        self._spent_s = 0.0

    def resume(self) -> None:
        """Start copying: do not charge the time since the last chunk."""
        self._mark_s = self._now_s()

    def charge(self) -> None:
        """Charge the time since ``resume`` or the last call for a chunk that was copied."""
        now_s = self._now_s()
        self._spent_s += now_s - self._mark_s
        self._mark_s = now_s

    @property
    def has_room(self) -> bool:
        """True if one more chunk may be copied in this step."""
        other_s = self._mark_s - self._began_s - self._spent_s
        return self._spent_s < max(self._least_s, self._share * other_s)
