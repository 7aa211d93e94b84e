"""The wall clocks of a simulated cluster: whether they agree, and so whether a ticket may expire.

Pure; the fault plan is all that it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.faults import FaultPlan


class WallClocks:
    """See the module docstring.

    Args:
        plan: What is wrong with them, and when.
        names: Every replica and ingress, as in a fault plan.
        lifetime_s: How long a ticket is good for at least.
    """

    def __init__(self, plan: FaultPlan, names: Sequence[str], lifetime_s: float) -> None:
        self._faults = [plan.for_target(name) for name in names]
        entries = [fault for fault in plan.faults if fault.kind == "clock"]
        self._changes_s = [moment_s for fault in entries for moment_s in fault.window]
        self._lifetime_s = lifetime_s

    def may_expire(self, sealed_s: float, now_s: float) -> bool:
        """Whether a ticket that was sealed then may be too old now: by its age, or by a clock.

        While all clocks show the same, and none has been set, however wrong they are, it may not.
        """
        if now_s - sealed_s >= self._lifetime_s:
            return True
        if any(sealed_s <= change_s <= now_s for change_s in self._changes_s):
            return True
        return len({faults.clock_shift_s(now_s) for faults in self._faults}) > 1
