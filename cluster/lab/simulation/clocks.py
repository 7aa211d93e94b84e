"""Decides from the fault plan's clock errors whether a ticket may be refused as expired. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.faults import FaultPlan


class WallClocks:
    """The wall clocks of all replicas and ingresses.

    Args:
        plan: The fault plan, with the clocks' errors.
        names: Every replica and ingress, as in a fault plan.
        lifetime_s: Shortest lifetime of a ticket.
    """

    def __init__(self, plan: FaultPlan, names: Sequence[str], lifetime_s: float) -> None:
        self._faults = [plan.for_target(name) for name in names]
        entries = [fault for fault in plan.faults if fault.kind == "clock"]
        self._changes_s = [moment_s for fault in entries for moment_s in fault.window]
        self._lifetime_s = lifetime_s

    def may_expire(self, sealed_s: float, now_s: float) -> bool:
        """Return whether a ticket sealed at `sealed_s` may be refused as expired at `now_s`.

        It may if its lifetime is over, a clock was set since then, or the clocks differ. Clocks
        that are equally wrong are no reason.
        """
        if now_s - sealed_s >= self._lifetime_s:
            return True
        if any(sealed_s <= change_s <= now_s for change_s in self._changes_s):
            return True
        return len({faults.clock_shift_s(now_s) for faults in self._faults}) > 1
