"""What the sends and the loads of one point-to-point worker have in common."""

from dataclasses import dataclass, field

from kv_transfer.desk import Desk
from kv_transfer.transport import Command


@dataclass(slots=True, eq=False, kw_only=True)
class P2PDesk(Desk):
    """See the module, and `Desk`.

    Attributes:
        commands: What the transport is to be told next.
        turns: Every transfer in flight, in the order in which they move.
        now_s: When the part of the step began that runs.
    """

    commands: list[Command] = field(default_factory=list)
    turns: dict[bytes, None] = field(default_factory=dict)
    now_s: float = 0.0

    def observe(self, stage: str, seconds: float) -> None:
        """Count how long a stage took."""
        self.totals.stages[stage].observe(seconds)
