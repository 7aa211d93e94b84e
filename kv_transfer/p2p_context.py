"""State shared by the sends and the loads of one point-to-point worker."""

from dataclasses import dataclass, field

from kv_transfer.connector import KVDeviceIO
from kv_transfer.layout import RowLayout
from kv_transfer.transfer_context import TransferContext
from kv_transfer.transport import Command


@dataclass(slots=True, eq=False, kw_only=True)
class P2PContext(TransferContext):
    """`TransferContext` with the commands and the turns of point-to-point transfers.

    Attributes:
        ios: The KV cache of each KV group; ``io`` is that of the first.
        layout: Layout of the rows of a transfer.
        commands: Commands for the transport that are not submitted yet.
        turns: Every transfer in flight, in the order in which they copy.
        now_s: Time at which the current part of the step began.
    """

    ios: tuple[KVDeviceIO, ...]
    layout: RowLayout
    commands: list[Command] = field(default_factory=list)
    turns: dict[bytes, None] = field(default_factory=dict)
    now_s: float = 0.0

    def observe(self, stage: str, seconds: float) -> None:
        """Count how long a stage took."""
        self.totals.stages[stage].observe(seconds)
