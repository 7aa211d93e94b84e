"""One transfer on its way out: who fetches it, which rows may go, and which have gone."""

from dataclasses import dataclass, field

from kv_transfer.messages import Data, Fetch, Mapped, PayloadPath, chunk_checksum
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Chunk, MappedChunk


@dataclass(slots=True, eq=False)
class Sending:
    """See the module docstring. Owner: the ``ProducerSessions`` that it is one of."""

    ticket: Ticket
    num_rows: int
    peer: bytes | None = None
    path: PayloadPath = "inline"
    probe_s: float = 0.0
    """When to address a consumer that stays silent, to learn whether it is still there."""
    repeat_s: float = 0.0
    repeated: set[int] = field(default_factory=set)
    """Rows that were sent once more, and are not again before ``repeat_s``: whoever asks faster
    gains nothing."""
    start_row: int = 0
    limit: int = 0
    consumed_row: int = 0
    """One past the last row that the consumer has let go of."""
    ready_rows: int = 0
    sent_rows: int = 0
    stalled_s: float | None = None
    """Since when computed rows wait for credit."""

    def attach(self, peer: bytes, path: PayloadPath, start_row: int) -> None:
        """Belong to a consumer that wants the rows from there on."""
        self.peer, self.path = peer, path
        self.start_row = self.sent_rows = self.limit = start_row

    def grant(self, consumed: int, window: int, largest: int) -> bool:
        """Raise the limit, and note what the consumer has let go of; says whether more may go.

        Args:
            consumed: Rows that the consumer says it has let go of.
            window: What it grants beyond them.
            largest: This engine's own window, whatever the peer asks. Nothing is in flight on the
                path ``shared``: there, none is needed.
        """
        consumed = min(consumed, self.sent_rows - self.start_row)
        if self.path != "shared":
            window = min(window, largest)
        self.consumed_row = max(self.consumed_row, self.start_row + consumed)
        limit = min(self.start_row + consumed + window, self.num_rows)
        is_raised = limit > self.limit
        self.limit = max(limit, self.limit)
        return is_raised

    def take_out(self, incarnation: str, chunk: Chunk | MappedChunk) -> Data | Mapped | None:
        """Count rows as sent and return their header; None where they go another way."""
        is_mapped = isinstance(chunk, MappedChunk)
        if is_mapped != (self.path == "shared"):
            return None
        first_row, epoch = chunk.first_row, self.ticket.epoch
        num_rows = chunk.num_rows if isinstance(chunk, MappedChunk) else len(chunk.payload)
        self.sent_rows = max(self.sent_rows, first_row + num_rows)
        checksum = chunk_checksum(chunk.transfer_id, epoch, first_row, num_rows, chunk.payload)
        coordinates = (chunk.transfer_id, epoch, incarnation, first_row, num_rows)
        if isinstance(chunk, MappedChunk):
            return Mapped(*coordinates, chunk.lane, checksum)
        return Data(*coordinates, checksum)

    def repeat(self, fetch: Fetch, now_s: float, pause_s: float) -> tuple[int, int] | None:
        """Return where rows begin and end that are sent once more, if any are now."""
        start, end = max(fetch.start_row, self.start_row), min(fetch.end_row, self.sent_rows)
        if now_s >= self.repeat_s:
            self.repeated.clear()
        if start >= end or not self.repeated.isdisjoint(range(start, end)):
            return None
        self.repeat_s = now_s + pause_s
        self.repeated.update(range(start, end))
        return start, end

    def take_stalled_s(self, now_s: float) -> float:
        """Return the seconds since the last call, if only credit was missing then."""
        seconds = 0.0 if self.stalled_s is None else now_s - self.stalled_s
        waits = self.peer is not None and self.limit < min(self.num_rows, self.ready_rows)
        self.stalled_s = now_s if waits else None
        return seconds

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert self.limit <= self.num_rows
        assert self.sent_rows <= self.num_rows
