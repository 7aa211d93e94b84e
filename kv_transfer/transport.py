"""Commands and events between the core thread and a transport, passed by value.

Commands go down, events come up; neither holds a reference to KV memory. A transport decides
nothing about blocks: it runs the two session state machines of ``producer`` and ``consumer`` over
its sockets, or over a simulated wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from kv_transfer.errors import FailureReason
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import RowLayout
from kv_transfer.messages import PayloadPath
from kv_transfer.ticket import Ticket


class ProducerRoute(NamedTuple):
    """Way to one producer, found by the transport for a ``StartLoad``.

    Attributes:
        endpoint: Where messages go.
        path: Path of the payload.
        source: The producer's blocks of each lane, mapped here; for the path ``shared`` alone.
    """

    endpoint: str
    path: PayloadPath = "inline"
    source: Sequence[HostBlocks] = ()


# ---- commands: core thread -> transport


@dataclass(frozen=True, slots=True)
class Offer:
    """Producer: permit the ticket's consumer to attach."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Ready:
    """Producer: this many rows from position 0 are computed."""

    transfer_id: bytes
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Producer: extracted rows to send, ``payload`` their bytes as ``GroupedLayout`` says."""

    transfer_id: bytes
    first_row: int
    num_rows: int
    payload: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class MappedChunk:
    """Producer: rows to announce, which stay where they are.

    Attributes:
        transfer_id: Which transfer.
        first_row: First row of the chunk.
        num_rows: Number of rows.
        lane: Lane of the blocks.
        payload: ``encode_mapped`` of the blocks that cover them.
    """

    transfer_id: bytes
    first_row: int
    num_rows: int
    lane: int
    payload: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CancelSend:
    """Producer: the core has ended the transfer."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Consumer: fetch the rows from ``start_row`` on.

    Attributes:
        ticket: The opened ticket.
        sealed: The same ticket as it came, to show to the producer.
        start_row: First row; if no row is left, only Done is sent.
        layout: Layout of the producer's rows.
    """

    ticket: Ticket
    sealed: bytes
    start_row: int
    layout: RowLayout


@dataclass(frozen=True, slots=True)
class Consumed:
    """Consumer: so many more rows are written, and their buffers are free again.

    Negative when more rows were spoiled than written (see ``Spoiled``).
    """

    transfer_id: bytes
    num_rows: int


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Consumer: these rows, read in shared memory, do not match the producer's digests."""

    transfer_id: bytes
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Consumer: the core has ended the load."""

    transfer_id: bytes


Command = (
    Offer | Ready | Chunk | MappedChunk | CancelSend | StartLoad | Consumed | Spoiled | CancelLoad
)

# ---- events: transport -> core thread


@dataclass(frozen=True, slots=True)
class Granted:
    """Producer: rows from ``start_row`` up to but excluding ``limit`` may be extracted."""

    transfer_id: bytes
    start_row: int
    limit: int
    path: PayloadPath


@dataclass(frozen=True, slots=True)
class Repeat:
    """Producer: the consumer needs these rows once more."""

    transfer_id: bytes
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Producer: the consumer holds all rows, of which ``num_rows`` were sent from here."""

    transfer_id: bytes
    num_rows: int


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Producer: the lease ended without delivery."""

    transfer_id: bytes
    reason: FailureReason


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """Consumer: verified rows, ``payload`` their bytes as ``GroupedLayout`` says."""

    transfer_id: bytes
    first_row: int
    num_rows: int
    payload: NDArray[np.uint8]
    path: PayloadPath


@dataclass(frozen=True, slots=True, eq=False)
class ArrivedMapped:
    """Consumer: rows that may now be read in the producer's memory; not verified yet.

    Attributes:
        transfer_id: Which transfer.
        first_row: First row of the chunk.
        num_rows: Number of rows.
        source: The producer's blocks, mapped here.
        block_ids: Blocks that cover the rows.
        digests: One for each of these blocks; empty where the producer computes none.
    """

    transfer_id: bytes
    first_row: int
    num_rows: int
    source: HostBlocks
    block_ids: NDArray[np.int64]
    digests: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Consumer: the producer held the rows until all were read; path ``shared`` only."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Consumer: the load has failed, and nothing more will arrive."""

    transfer_id: bytes
    reason: FailureReason


Event = Granted | Repeat | Delivered | SendFailed | Arrived | ArrivedMapped | Confirmed | LoadFailed


class WireCounters(Struct):
    """Totals of messages. Owner: the transport's thread; other threads only read single numbers.

    Attributes:
        num_retransmits: Chunks that were asked for again.
        num_checksum_failures: Chunks that arrived corrupted.
        num_dropped_chunks: Chunks that were late, duplicated, or of another epoch or incarnation.
        num_unknown_ids: Messages about transfers that this engine does not know.
        num_malformed: Frames that are no message of the protocol.
        num_bad_tickets: Fetches whose ticket was forged, for another audience, or too old.
        num_denied: Connections over the network that held no secret of the deployment.
        credit_stalled_s: Seconds, summed over sends, in which computed rows waited for credit.
        leases: Leases by event: granted, renewed, done, expired, cancelled, late_fetch (a consumer
            that came after the end).
    """

    num_retransmits: int = 0
    num_checksum_failures: int = 0
    num_dropped_chunks: int = 0
    num_unknown_ids: int = 0
    num_malformed: int = 0
    num_bad_tickets: int = 0
    num_denied: int = 0
    credit_stalled_s: float = 0.0
    leases: dict[str, int] = field(default_factory=dict)

    def count_denied(self) -> None:
        """Count a refused connection; only the thread that refuses them calls this."""
        self.num_denied += 1

    def count_lease(self, event: str) -> None:
        """Count an event of a lease."""
        self.leases[event] = self.leases.get(event, 0) + 1


class Transport(Protocol):
    """Carrier of messages and chunks with its own thread, or a test double without one."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of this producer; a consumer uses the ones it can reach."""

    @property
    def counters(self) -> WireCounters:
        """Totals of messages."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Queue commands, in order, without blocking.

        Raises:
            TransferError: When the transport has stopped working.
        """

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call. Credits bound the bytes that they hold.

        Raises:
            TransferError: When the transport has stopped working.
        """

    def lease_left_s(self, transfer_id: bytes, now_s: float) -> float:
        """Return the seconds until a producer's lease ends unless renewed; 0 without one."""

    def close(self, deadline_s: float) -> None:
        """Stop, and leave no thread, socket or file. Idempotent."""
