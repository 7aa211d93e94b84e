"""One transfer on its way here: which rows have come, which may, and what its producer is told."""

from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
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
from kv_transfer.transport import Load, Route


@dataclass(slots=True, eq=False)
class Loading:
    """See the module docstring. Owner: the ``ConsumerSessions`` that it is one of."""

    consumer: str
    """Incarnation of this engine."""
    ticket: Ticket
    sealed: bytes
    route: Route
    row_bytes: int
    start_row: int
    num_rows: int
    started_s: float
    heard_s: float
    """When the producer's process last said anything about this transfer."""
    data_s: float
    """When a chunk last arrived, or the producer last had good reason not to send one."""
    probe_s: float
    """When the next FETCH, RENEW or DONE is due."""
    is_attached: bool = False
    num_arrived: int = 0
    consumed: int = 0
    limit: int = 0
    told_limit: int = 0
    """What the producer knows of ``limit``."""
    arrived: bytearray = field(default_factory=bytearray)
    asked_s: float = 0.0
    """Before this, lost rows are not asked for again."""
    spoiled: set[int] = field(default_factory=set)
    """Rows that were asked for again because they had arrived corrupted."""

    @classmethod
    def begin(
        cls, consumer: str, command: Load, route: Route, num_rows: int, now_s: float
    ) -> "Loading":
        """Begin what the core asked for, of a request of so many rows; nothing may arrive yet."""
        return cls(
            consumer,
            command.ticket,
            command.sealed,
            route,
            command.row_bytes,
            command.start_row,
            num_rows,
            *(now_s,) * 4,
            limit=command.start_row,
            arrived=bytearray(num_rows),
        )

    @property
    def is_mapped(self) -> bool:
        """Whether its rows are read where they are, in the producer's memory."""
        return self.route.path == "shared"

    @property
    def is_complete(self) -> bool:
        """Whether every row has arrived."""
        return self.num_arrived == self.num_rows - self.start_row

    @property
    def is_consumed(self) -> bool:
        """Whether every row is written."""
        return self.consumed == self.num_rows - self.start_row

    @property
    def is_confirming(self) -> bool:
        """Everything was read in the producer's memory; it has to say that it held it."""
        return self.is_mapped and self.is_consumed

    @property
    def window(self) -> int:
        """Rows that may arrive beyond the consumed ones."""
        return self.limit - self.start_row - self.consumed

    # ---- rows

    def may_send(self, data: Data | Mapped) -> bool:
        """Tell whether these rows are among those that the producer has credit for."""
        start = data.first_row
        return self.start_row <= start < start + data.num_rows <= self.limit

    def expects(self, data: Data, num_bytes: int) -> bool:
        """Tell whether a header is this producer's, and so many bytes are its rows."""
        return (
            data.epoch == self.ticket.epoch
            and data.incarnation == self.ticket.producer_incarnation
            and num_bytes == data.num_rows * self.row_bytes
            and self.may_send(data)
        )

    def num_new(self, data: Data | Mapped) -> int:
        """Count those of these rows that have not arrived before."""
        return data.num_rows - sum(self.arrived[data.first_row : data.first_row + data.num_rows])

    def arrive(self, data: Data | Mapped, num_new: int, now_s: float) -> None:
        """Note rows that are here, and right; so many of them for the first time."""
        self.heard_s = self.data_s = now_s
        self.is_attached = True
        self.num_arrived += num_new
        self.arrived[data.first_row : data.first_row + data.num_rows] = b"\x01" * data.num_rows

    def take_back(self, first_row: int, num_rows: int) -> tuple[int, int]:
        """Note that rows are not here, though they had arrived; returns where they begin and end.

        Only those that are asked for: blocks that were read may hold others, too.
        """
        start = max(first_row, self.start_row)
        end = min(first_row + num_rows, self.num_rows)
        self.num_arrived -= sum(self.arrived[start:end])
        self.arrived[start:end] = bytes(end - start)
        return start, end

    def first_gap(self, sent: int) -> tuple[int, int] | None:
        """Return where the first rows begin and end that were sent and have not arrived."""
        missing = self.arrived.find(0, self.start_row)
        if not 0 <= missing < sent:
            return None
        end = self.arrived.find(1, missing, sent)
        return missing, sent if end < 0 else end

    def raise_limit(self, window_rows: int) -> None:
        """Grant so many rows beyond the consumed ones, as far as there are any; never fewer."""
        limit = min(self.start_row + self.consumed + window_rows, self.num_rows)
        self.limit = max(self.limit, limit)

    # ---- words to the producer

    def must_tell(self, window_rows: int) -> bool:
        """Tell whether it is time to say how far the limit has risen.

        By a quarter of the window: each message costs both ends more than a chunk's checksum. But
        not later than when the producer may send no more, as of a window that shrank.
        """
        untold = self.limit - self.told_limit
        is_used_up = self.told_limit <= self.start_row + self.consumed
        is_raised_enough = 4 * untold >= window_rows or self.limit == self.num_rows
        return untold > 0 and (is_raised_enough or is_used_up)

    def tell_credit(self) -> Credit:
        """Return the message that says how much may be sent; from now on the producer knows."""
        self.told_limit = self.limit
        return Credit(self.ticket.transfer_id, self.ticket.epoch, self.consumed, self.window)

    def sign_of_life(self) -> Fetch | Renew | Done:
        """FETCH until attached, then RENEW; DONE until confirmed. The first two tell the limit."""
        self.told_limit = self.limit
        if self.is_confirming:
            return self.done_message()
        if not self.is_attached:
            return self.fetch(self.start_row, self.num_rows, attempt=0)
        return Renew(self.ticket.transfer_id, self.ticket.epoch, self.consumed, self.window)

    def fetch(self, start: int, end: int, *, attempt: int) -> Fetch:
        """Ask for rows, for the first time or once more."""
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
        """Say that it is over, and well."""
        return Done(self.ticket.transfer_id, self.ticket.epoch, self.sealed)

    def cancel_message(self, reason: FailureReason) -> Cancel:
        """Say that it is over, and why."""
        return Cancel(self.ticket.transfer_id, self.ticket.epoch, reason, self.sealed)

    # ---- deadlines

    def overdue(self, config: TransferConfig, now_s: float) -> FailureReason | None:
        """Return why it has taken too long, if it has."""
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
