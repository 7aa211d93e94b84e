"""What the core thread and a transport say to each other, by value.

Commands go down, events come up; neither holds a reference to KV memory. A transport decides
nothing about blocks: it runs the two session state machines of ``producer`` and ``consumer`` over
whatever carries bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer.errors import FailureReason
from kv_transfer.ticket import Ticket

# ---- commands: core thread -> transport


@dataclass(frozen=True, slots=True)
class Offer:
    """Producer: from now on the ticket's consumer may attach."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Ready:
    """Producer: this many blocks from position 0 are computed."""

    transfer_id: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Producer: extracted blocks to send, ``payload`` (n, bytes_per_block) uint8."""

    transfer_id: bytes
    first_block: int
    payload: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CancelSend:
    """Producer: nothing more will come."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Consumer: fetch the blocks from ``start_block`` on."""

    ticket: Ticket
    start_block: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """Consumer: this many more blocks have been written; their buffers are free again."""

    transfer_id: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Consumer: the data is not wanted any more."""

    transfer_id: bytes


Command = Offer | Ready | Chunk | CancelSend | Load | Consumed | CancelLoad

# ---- events: transport -> core thread


@dataclass(frozen=True, slots=True)
class Granted:
    """Producer: blocks from ``start_block`` up to but excluding ``limit`` may be extracted."""

    transfer_id: bytes
    start_block: int
    limit: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Producer: these blocks are wanted once more."""

    transfer_id: bytes
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Producer: the consumer has all, ``num_blocks`` of it over the wire."""

    transfer_id: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Producer: the lease ended without delivery."""

    transfer_id: bytes
    reason: FailureReason


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """Consumer: verified blocks, ``payload`` (n, bytes_per_block) uint8, ``num_new`` unseen."""

    transfer_id: bytes
    first_block: int
    num_new: int
    payload: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Consumer: nothing more will arrive."""

    transfer_id: bytes
    reason: FailureReason


Event = Granted | Repeat | Delivered | SendFailed | Arrived | LoadFailed


@dataclass(slots=True)
class WireCounters:
    """Totals about messages. Owner: the transport's thread; others only read single numbers."""

    num_retransmits: int = 0
    num_checksum_failures: int = 0
    num_dropped_chunks: int = 0
    num_unknown_ids: int = 0
    num_malformed: int = 0


class Transport(Protocol):
    """A byte mover with its own thread, or a test double without one."""

    @property
    def endpoint(self) -> str:
        """Where consumers find this producer."""

    @property
    def counters(self) -> WireCounters:
        """Totals about messages."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Pass commands on, in order, without blocking.

        Raises:
            TransferError: When the transport has stopped working.
        """

    def poll(self) -> Sequence[Event]:
        """Take the events since the last call. Credits bound the bytes that they hold.

        Raises:
            TransferError: When the transport has stopped working.
        """

    def close(self, deadline_s: float) -> None:
        """Stop; idempotent. Leaves no thread, socket or file."""
