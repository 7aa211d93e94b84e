"""Consumer's state of one transfer: the rows that have arrived, and the credit granted."""

from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from kv_transfer.layout import RowLayout
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Data,
    Done,
    Fetch,
    Mapped,
    Renew,
)
from kv_transfer.ticket import Ticket
from kv_transfer.transport import ProducerRoute, StartLoad


@dataclass(slots=True, eq=False)
class Loading:
    """Progress of one incoming transfer. Owner: the ``ConsumerSessions`` that holds it."""

    consumer: str
    """Incarnation of this engine."""
    ticket: Ticket
    sealed: bytes
    route: ProducerRoute
    layout: RowLayout
    start_row: int
    num_rows: int
    started_s: float
    heard_s: float
    """When the producer's process last sent anything about this transfer."""
    data_s: float
    """When a chunk last arrived, or the producer last had a valid reason to send none."""
    probe_s: float
    """When the next FETCH, RENEW or DONE is due."""
    is_attached: bool = False
    num_arrived: int = 0
    consumed: int = 0
    limit: int = 0
    told_limit: int = 0
    """The ``limit`` that the producer has been sent."""
    arrived: bytearray = field(default_factory=bytearray)
    asked_s: float = 0.0
    """Earliest time to ask for lost rows again."""
    spoiled: set[int] = field(default_factory=set)
    """Rows that arrived corrupted and were requested again."""

    @classmethod
    def from_command(
        cls, consumer: str, command: StartLoad, route: ProducerRoute, num_rows: int, now_s: float
    ) -> "Loading":
        """Start the load of a ``StartLoad`` command, for a request of ``num_rows`` rows."""
        return cls(
            consumer,
            command.ticket,
            command.sealed,
            route,
            command.layout,
            command.start_row,
            num_rows,
            *(now_s,) * 4,
            limit=command.start_row,
            arrived=bytearray(num_rows),
        )

    @property
    def is_mapped(self) -> bool:
        """True if rows are read in place, in the producer's memory."""
        return self.route.path == "shared"

    @property
    def is_complete(self) -> bool:
        """True once every row has arrived."""
        return self.num_arrived == self.num_rows - self.start_row

    @property
    def is_consumed(self) -> bool:
        """True once every row is written."""
        return self.consumed == self.num_rows - self.start_row

    @property
    def is_confirming(self) -> bool:
        """True once all rows were read in place and only the producer's confirmation is missing."""
        return self.is_mapped and self.is_consumed

    @property
    def row_bytes(self) -> int:
        """Bytes of the producer's largest row, by which memory is reserved."""
        return self.layout.row_bytes

    def num_bytes(self, data: Data) -> int:
        """Return how many bytes the payload of a header has."""
        return self.layout.num_bytes(self.ticket.num_tokens, data.first_row, data.num_rows)

    @property
    def window(self) -> int:
        """Rows that may arrive beyond the consumed ones."""
        return self.limit - self.start_row - self.consumed

    # ---- rows

    def may_send(self, data: Data | Mapped) -> bool:
        """Return whether the producer has credit for these rows."""
        start = data.first_row
        return self.start_row <= start < start + data.num_rows <= self.limit

    def expects(self, data: Data, num_bytes: int) -> bool:
        """Return whether a header is from this producer and matches a payload of so many bytes."""
        return (
            data.epoch == self.ticket.epoch
            and data.incarnation == self.ticket.producer_incarnation
            and num_bytes == self.num_bytes(data)
            and self.may_send(data)
        )

    def num_new(self, data: Data | Mapped) -> int:
        """Return how many of these rows have not arrived before."""
        return data.num_rows - sum(self.arrived[data.first_row : data.first_row + data.num_rows])

    def arrive(self, data: Data | Mapped, num_new: int, now_s: float) -> None:
        """Record verified rows, ``num_new`` of them for the first time."""
        self.heard_s = self.data_s = now_s
        self.is_attached = True
        self.num_arrived += num_new
        self.arrived[data.first_row : data.first_row + data.num_rows] = b"\x01" * data.num_rows

    def mark_missing(self, first_row: int, num_rows: int) -> tuple[int, int]:
        """Record that rows are missing again, and return their range.

        Clipped to the rows of this load: a block that was read may hold others, too.
        """
        start = max(first_row, self.start_row)
        end = min(first_row + num_rows, self.num_rows)
        self.num_arrived -= sum(self.arrived[start:end])
        self.arrived[start:end] = bytes(end - start)
        return start, end

    def first_gap(self, sent: int) -> tuple[int, int] | None:
        """Return the first range of rows that were sent and have not arrived, or None."""
        missing = self.arrived.find(0, self.start_row)
        if not 0 <= missing < sent:
            return None
        end = self.arrived.find(1, missing, sent)
        return missing, sent if end < 0 else end

    def raise_limit(self, window_rows: int) -> None:
        """Raise the limit to ``window_rows`` beyond the consumed rows; never lower it."""
        limit = min(self.start_row + self.consumed + window_rows, self.num_rows)
        self.limit = max(self.limit, limit)

    # ---- messages to the producer

    def must_tell(self, window_rows: int) -> bool:
        """Return whether the producer should be sent the new limit now.

        Sent in steps of a quarter of the window, because each message costs both ends more than a
        chunk's checksum. Sent at once when the producer has no credit left, as after the window
        shrank.
        """
        untold = self.limit - self.told_limit
        is_used_up = self.told_limit <= self.start_row + self.consumed
        is_raised_enough = 4 * untold >= window_rows or self.limit == self.num_rows
        return untold > 0 and (is_raised_enough or is_used_up)

    def tell_credit(self) -> Credit:
        """Return the message with the current limit, and record that it was sent."""
        self.told_limit = self.limit
        return Credit(self.ticket.transfer_id, self.ticket.epoch, self.consumed, self.window)

    def sign_of_life(self) -> Fetch | Renew | Done:
        """Return FETCH until attached, then RENEW, and DONE until confirmed.

        FETCH and RENEW carry the current limit.
        """
        self.told_limit = self.limit
        if self.is_confirming:
            return self.done_message()
        if not self.is_attached:
            return self.fetch(self.start_row, self.num_rows, attempt=0)
        return Renew(self.ticket.transfer_id, self.ticket.epoch, self.consumed, self.window)

    def fetch(self, start: int, end: int, *, attempt: int) -> Fetch:
        """Return a FETCH of rows, for the first time or again."""
        return Fetch(
            version=PROTOCOL_VERSION,
            transfer_id=self.ticket.transfer_id,
            epoch=self.ticket.epoch,
            ticket=self.sealed,
            consumer=self.consumer,
            start_row=start,
            end_row=end,
            window=self.window,
            path=self.route.path,
            attempt=attempt,
        )

    def done_message(self) -> Done:
        """Return the DONE of this transfer."""
        return Done(self.ticket.transfer_id, self.ticket.epoch, self.sealed)

    def cancel_message(self, reason: FailureReason) -> Cancel:
        """Return the CANCEL of this transfer."""
        return Cancel(self.ticket.transfer_id, self.ticket.epoch, reason, self.sealed)

    # ---- deadlines

    def overdue(self, config: TransferConfig, now_s: float) -> FailureReason | None:
        """Return the reason to fail the load for a deadline, or None."""
        if self.is_complete and not self.is_confirming:
            return None
        if not self.is_attached and now_s - self.started_s >= config.rendezvous_s:
            return FailureReason.UNKNOWN_TRANSFER
        is_silent = now_s - self.heard_s >= config.no_progress_s
        is_stuck = self.is_attached and now_s - self.data_s >= config.no_data_s
        return FailureReason.STALLED if is_silent or is_stuck else None

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert self.num_arrived == sum(self.arrived)
        assert self.consumed <= self.num_arrived
        assert self.start_row <= self.limit <= self.num_rows
        assert not any(self.arrived[self.limit :])
