"""Producer's state of one transfer: its consumer, and the rows granted, computed and sent."""

from dataclasses import dataclass, field

from kv_transfer.messages import Data, Fetch, Mapped, PayloadPath, chunk_checksum
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Chunk, MappedChunk


@dataclass(slots=True, eq=False)
class Sending:
    """Progress of one outgoing transfer. Owner: the ``ProducerSessions`` that holds it."""

    ticket: Ticket
    num_rows: int
    peer: bytes | None = None
    path: PayloadPath = "inline"
    probe_s: float = 0.0
    """Time to address a silent consumer, to learn whether its connection still exists."""
    repeat_s: float = 0.0
    repeated: set[int] = field(default_factory=set)
    """Rows that were repeated, and are not repeated again before ``repeat_s``, even if a consumer
    asks faster."""
    start_row: int = 0
    limit: int = 0
    consumed_row: int = 0
    """One past the last row that the consumer has released."""
    ready_rows: int = 0
    sent_rows: int = 0
    stalled_s: float | None = None
    """Time since which computed rows wait for credit."""

    def attach(self, peer: bytes, path: PayloadPath, start_row: int) -> None:
        """Bind the transfer to a consumer that fetches from ``start_row`` on."""
        self.peer, self.path = peer, path
        self.start_row = self.sent_rows = self.limit = start_row

    def grant(self, consumed: int, window: int, largest: int) -> bool:
        """Raise the limit, record what the consumer has released; return whether more may be sent.

        Args:
            consumed: Rows that the consumer says it has released.
            window: Rows that it grants beyond them.
            largest: This engine's own window, which bounds the consumer's. Not applied on the path
                ``shared``, where nothing is in flight.
        """
        consumed = min(consumed, self.sent_rows - self.start_row)
        if self.path != "shared":
            window = min(window, largest)
        self.consumed_row = max(self.consumed_row, self.start_row + consumed)
        limit = min(self.start_row + consumed + window, self.num_rows)
        is_raised = limit > self.limit
        self.limit = max(limit, self.limit)
        return is_raised

    def header_of(self, incarnation: str, chunk: Chunk | MappedChunk) -> Data | Mapped | None:
        """Count rows as sent and return their header; None for rows of another path."""
        is_mapped = isinstance(chunk, MappedChunk)
        if is_mapped != (self.path == "shared"):
            # The core extracted it for another path than the consumer attached with.
            return None
        first_row, epoch = chunk.first_row, self.ticket.epoch
        num_rows = chunk.num_rows
        self.sent_rows = max(self.sent_rows, first_row + num_rows)
        checksum = chunk_checksum(chunk.transfer_id, epoch, first_row, num_rows, chunk.payload)
        coordinates = (chunk.transfer_id, epoch, incarnation, first_row, num_rows)
        if isinstance(chunk, MappedChunk):
            return Mapped(*coordinates, chunk.lane, checksum)
        return Data(*coordinates, checksum)

    def repeat(self, fetch: Fetch, now_s: float, pause_s: float) -> tuple[int, int] | None:
        """Return the range of rows to send once more, or None."""
        start, end = max(fetch.start_row, self.start_row), min(fetch.end_row, self.sent_rows)
        if now_s >= self.repeat_s:
            self.repeated.clear()
        if start >= end or not self.repeated.isdisjoint(range(start, end)):
            return None
        self.repeat_s = now_s + pause_s
        self.repeated.update(range(start, end))
        return start, end

    def measure_stall_s(self, now_s: float) -> float:
        """Return the seconds since the last call, if credit was all that was missing then."""
        seconds = 0.0 if self.stalled_s is None else now_s - self.stalled_s
        waits = self.peer is not None and self.limit < min(self.num_rows, self.ready_rows)
        self.stalled_s = now_s if waits else None
        return seconds

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert self.limit <= self.num_rows
        assert self.sent_rows <= self.num_rows
