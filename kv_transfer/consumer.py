"""Fetch from producers: the consumer's half of the protocol as a state machine without I/O.

Messages, commands and ``now_s`` come in; messages to send and events for the core go out through
``take_sends`` and ``take_events``. A chunk reaches the core only if its transfer, epoch,
incarnation, range, credit and checksum are right; after ``LoadFailed`` none does. What is read in
the producer's memory (path ``shared``) counts only once the producer has confirmed that it held the
rows until the last of them was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import FailureReason, WireError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.lease import LeaseState
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Data,
    Done,
    Fetch,
    LeaseInfo,
    Mapped,
    PayloadPath,
    Renew,
    ToConsumer,
    ToProducer,
    chunk_checksum,
    decode_mapped,
)
from kv_transfer.ticket import Ticket
from kv_transfer.transport import (
    Arrived,
    ArrivedMapped,
    Confirmed,
    Event,
    Load,
    LoadFailed,
    WireCounters,
)

_REASON = {
    LeaseState.DONE: FailureReason.UNKNOWN_TRANSFER,
    LeaseState.EXPIRED: FailureReason.EXPIRED,
    LeaseState.CANCELLED: FailureReason.CANCELLED,
}


class SendToProducer(NamedTuple):
    """A message for the producer that listens at an endpoint."""

    endpoint: str
    message: ToProducer


class Route(NamedTuple):
    """How a transport reaches one producer.

    Attributes:
        endpoint: Where messages go.
        path: How payload comes back.
        source: The producer's blocks of each lane, mapped here; for the path ``shared`` alone.
    """

    endpoint: str
    path: PayloadPath = "inline"
    source: Sequence[HostBlocks] = ()


@dataclass(slots=True, eq=False)
class _Loading:
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

    @property
    def is_mapped(self) -> bool:
        return self.route.path == "shared"

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == self.num_rows - self.start_row

    @property
    def is_consumed(self) -> bool:
        return self.consumed == self.num_rows - self.start_row

    @property
    def is_confirming(self) -> bool:
        """Everything was read in the producer's memory; it has to say that it held it."""
        return self.is_mapped and self.is_consumed

    @property
    def window(self) -> int:
        """Rows that may arrive beyond the consumed ones."""
        return self.limit - self.start_row - self.consumed


@dataclass(slots=True, eq=False)
class _Closing:
    endpoint: str
    message: Done | Cancel
    resend_s: float
    give_up_s: float


class ConsumerSessions:
    """Every transfer that this engine consumes.

    Owner: the transport's thread.
    """

    def __init__(self, settings: ConnectorSettings, counters: WireCounters) -> None:
        self._incarnation = settings.incarnation
        self._config = settings.config
        self._counters = counters
        self._loading: dict[bytes, _Loading] = {}
        self._closing: dict[bytes, _Closing] = {}
        self._sends: list[SendToProducer] = []
        self._events: list[Event] = []

    def take_sends(self) -> list[SendToProducer]:
        """Return and forget the messages to send, in order."""
        sends, self._sends = self._sends, []
        return sends

    def take_events(self) -> list[Event]:
        """Return and forget the events for the core, in order."""
        events, self._events = self._events, []
        return events

    # ---- commands

    def load(self, command: Load, route: Route, num_rows: int, now_s: float) -> None:
        """Start to fetch; with nothing left to fetch, only say Done.

        Args:
            command: What the core asked for.
            route: How to reach the producer.
            num_rows: Rows of the whole request.
            now_s: Monotonic clock.
        """
        ticket = command.ticket
        if command.start_row >= num_rows:
            self._close(route.endpoint, _done(ticket, command.sealed), now_s)
            return
        self._closing.pop(ticket.transfer_id, None)
        loading = _Loading(
            ticket,
            command.sealed,
            route,
            command.row_bytes,
            command.start_row,
            num_rows,
            *(now_s,) * 4,
            limit=command.start_row,
            arrived=bytearray(num_rows),
        )
        self._raise_limit(loading)
        self._loading[ticket.transfer_id] = loading
        self._probe(loading, now_s)

    def consumed(self, transfer_id: bytes, num_rows: int, now_s: float) -> None:
        """Return the credit of rows that are written; after the last one the load is done."""
        loading = self._loading.get(transfer_id)
        if loading is None:
            return
        loading.consumed += num_rows
        endpoint, epoch = loading.route.endpoint, loading.ticket.epoch
        if not loading.is_consumed:
            self._raise_limit(loading)
            # By the quarter window: each message costs both ends more than a chunk's checksum. But
            # not later than when the producer may send no more, as of a window that shrank.
            untold = loading.limit - loading.told_limit
            is_used_up = loading.told_limit <= loading.start_row + loading.consumed
            if 4 * untold >= self._config.window_rows(loading.row_bytes) or (
                untold and (is_used_up or loading.limit == loading.num_rows)
            ):
                loading.told_limit = loading.limit
                credit = Credit(transfer_id, epoch, loading.consumed, loading.window)
                self._sends.append(SendToProducer(endpoint, credit))
        elif loading.is_mapped:
            loading.heard_s = loading.data_s = now_s
            self._probe(loading, now_s)
        else:
            del self._loading[transfer_id]
            self._close(endpoint, _done(loading.ticket, loading.sealed), now_s)

    def spoiled(self, transfer_id: bytes, first_row: int, num_rows: int, now_s: float) -> None:
        """Take back rows that were told of and turned out to be something else when read."""
        loading = self._loading.get(transfer_id)
        if loading is None:
            return
        end = min(first_row + num_rows, loading.num_rows)
        first_row = max(first_row, loading.start_row)
        loading.num_arrived -= sum(loading.arrived[first_row:end])
        loading.arrived[first_row:end] = bytes(end - first_row)
        self._on_corrupt(loading, first_row, end, now_s)

    def cancel(self, transfer_id: bytes, now_s: float) -> None:
        """Stop a load on this engine's wish; the core has stopped listening already."""
        loading = self._loading.pop(transfer_id, None)
        if loading is not None:
            self._close_with(loading, FailureReason.CANCELLED, now_s)

    # ---- the outside

    def on_message(
        self,
        endpoint: str,
        message: ToConsumer,
        payload: NDArray[np.uint8] | None,
        now_s: float,
        path: PayloadPath = "inline",
    ) -> None:
        """Handle one message from a producer.

        Args:
            endpoint: The producer's.
            message: What it said.
            payload: The frame behind its header.
            now_s: Monotonic clock.
            path: How a ``Data``'s payload came.
        """
        if isinstance(message, Data | Mapped) != (payload is not None):
            self._counters.num_malformed += 1
            return
        loading = self._loading.get(message.transfer_id)
        if loading is None:
            self._on_unknown(message)
        elif endpoint != loading.route.endpoint or message.epoch != loading.ticket.epoch:
            self._drop(message)
        elif isinstance(message, Data | Mapped):
            assert payload is not None
            self._on_data(loading, message, payload, now_s, path)
        elif isinstance(message, LeaseInfo):
            self._on_lease(loading, message, now_s)
        else:
            self._fail(loading, message.reason)

    def on_peer_lost(self, endpoint: str) -> None:
        """Fail what was still expected from a producer whose connection broke."""
        for loading in list(self._loading.values()):
            if loading.route.endpoint == endpoint:
                self._fail(loading, FailureReason.PEER_DEAD)
        gone = [tid for tid, closing in self._closing.items() if closing.endpoint == endpoint]
        for transfer_id in gone:
            del self._closing[transfer_id]

    def tick(self, now_s: float) -> None:
        """Let deadlines pass: probe, repeat, give up."""
        for loading in list(self._loading.values()):
            reason = self._overdue(loading, now_s)
            if reason is not None and self._fail(loading, reason):
                self._close_with(loading, reason, now_s)
            elif now_s >= loading.probe_s:
                self._probe(loading, now_s)
        for transfer_id, closing in list(self._closing.items()):
            if now_s >= closing.give_up_s:
                del self._closing[transfer_id]
            elif now_s >= closing.resend_s:
                closing.resend_s = now_s + self._config.probe_s
                self._sends.append(SendToProducer(closing.endpoint, closing.message))

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        probes = [loading.probe_s for loading in self._loading.values()]
        return min(probes + [closing.resend_s for closing in self._closing.values()], default=None)

    @property
    def num_open(self) -> int:
        """Loads that have not ended, and those whose end the producer has not acknowledged."""
        return len(self._loading) + len(self._closing)

    def expects(self, data: Data, num_bytes: int) -> bool:
        """Tell whether these rows, of so many bytes, are awaited: worth fetching their payload."""
        loading = self._loading.get(data.transfer_id)
        return (
            loading is not None
            and data.epoch == loading.ticket.epoch
            and data.incarnation == loading.ticket.producer_incarnation
            and num_bytes == data.num_rows * loading.row_bytes
            and loading.start_row <= data.first_row
            and data.first_row + data.num_rows <= loading.limit
        )

    def lost(self, data: Data, now_s: float) -> None:
        """Ask at once for rows whose payload could not be fetched."""
        loading = self._loading.get(data.transfer_id)
        if loading is not None and self.expects(data, data.num_rows * loading.row_bytes):
            self._ask_again(loading, data.first_row, data.first_row + data.num_rows, now_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert not self._loading.keys() & self._closing.keys()
        for loading in self._loading.values():
            assert loading.num_arrived == sum(loading.arrived)
            assert loading.consumed <= loading.num_arrived
            assert loading.start_row <= loading.limit <= loading.num_rows
            assert not any(loading.arrived[loading.limit :])

    # ---- messages

    def _on_unknown(self, message: ToConsumer) -> None:
        closing = self._closing.get(message.transfer_id)
        if closing is None or isinstance(message, Data | Mapped):
            self._counters.num_unknown_ids += closing is None
            self._drop(message)
        elif message.epoch == closing.message.epoch and (
            not isinstance(message, LeaseInfo)
            or message.state not in {LeaseState.WAITING, LeaseState.SERVING}
        ):
            del self._closing[message.transfer_id]

    def _on_data(
        self,
        loading: _Loading,
        data: Data | Mapped,
        payload: NDArray[np.uint8],
        now_s: float,
        path: PayloadPath,
    ) -> None:
        start, end = data.first_row, data.first_row + data.num_rows
        if data.incarnation != loading.ticket.producer_incarnation:
            self._drop(data)
            return
        is_mapped = isinstance(data, Mapped)
        if (
            not loading.start_row <= start < end <= loading.limit
            or is_mapped != loading.is_mapped
            or (not is_mapped and payload.nbytes != data.num_rows * loading.row_bytes)
        ):
            self._counters.num_malformed += 1
            return
        num_new = data.num_rows - sum(loading.arrived[start:end])
        if not num_new:
            self._drop(data)
            return
        # Hashed as it came: a corrupted size or id must not get any further.
        checksum = chunk_checksum(data.transfer_id, data.epoch, start, data.num_rows, payload)
        if checksum != data.checksum:
            self._on_corrupt(loading, start, end, now_s)
            return
        try:
            event = _arrival(loading, data, payload, path)
        except WireError:
            self._counters.num_malformed += 1
            return
        if isinstance(event, ArrivedMapped) and self._config.verify and not len(event.digests):
            # Whether data is compared is this end's decision.
            self._on_corrupt(loading, start, end, now_s)
            return
        loading.heard_s = loading.data_s = now_s
        loading.is_attached = True
        loading.arrived[start:end] = b"\x01" * data.num_rows
        loading.num_arrived += num_new
        self._events.append(event)

    def _on_corrupt(self, loading: _Loading, start: int, end: int, now_s: float) -> None:
        """Ask once more for rows that arrived corrupted; the second time the transfer fails."""
        self._counters.num_checksum_failures += 1
        rows = range(start, end)
        if loading.spoiled.isdisjoint(rows):
            loading.spoiled.update(rows)
            self._ask_again(loading, start, end, now_s)
        elif self._fail(loading, FailureReason.CHECKSUM):
            self._close_with(loading, FailureReason.CHECKSUM, now_s)

    def _on_lease(self, loading: _Loading, info: LeaseInfo, now_s: float) -> None:
        if info.state is LeaseState.DONE and loading.is_confirming:
            del self._loading[info.transfer_id]
            self._events.append(Confirmed(info.transfer_id))
            return
        if info.state in _REASON:
            self._fail(loading, _REASON[info.state])
            return
        loading.heard_s = now_s
        if info.state is LeaseState.WAITING:
            return
        loading.is_attached = True
        if loading.is_confirming:
            return
        missing = loading.arrived.find(0, loading.start_row)
        sent = min(info.sent_rows, loading.limit)
        if 0 <= missing < sent:
            end = loading.arrived.find(1, missing, sent)
            if now_s >= loading.asked_s:
                self._ask_again(loading, missing, sent if end < 0 else end, now_s)
        elif info.ready_rows <= info.sent_rows or loading.limit <= info.sent_rows:
            loading.data_s = now_s

    # ---- inside

    def _ask_again(self, loading: _Loading, start: int, end: int, now_s: float) -> None:
        """Ask for rows that were sent and lost or corrupted; as long as it takes, but not faster.

        A transfer that gets nowhere this way ends by ``no_data_s``.
        """
        loading.asked_s = now_s + self._config.probe_s
        self._counters.num_retransmits += 1
        fetch = self._fetch(loading, start, end, attempt=1)
        self._sends.append(SendToProducer(loading.route.endpoint, fetch))

    def _overdue(self, loading: _Loading, now_s: float) -> FailureReason | None:
        if loading.is_complete and not loading.is_confirming:
            return None
        if not loading.is_attached and now_s - loading.started_s >= self._config.rendezvous_s:
            return FailureReason.UNKNOWN_TRANSFER
        is_silent = now_s - loading.heard_s >= self._config.no_progress_s
        is_stuck = loading.is_attached and now_s - loading.data_s >= self._config.no_data_s
        return FailureReason.STALLED if is_silent or is_stuck else None

    def _probe(self, loading: _Loading, now_s: float) -> None:
        """Give a sign of life: FETCH until attached, then RENEW; DONE until confirmed."""
        loading.probe_s = now_s + self._config.probe_s
        loading.told_limit = loading.limit
        ticket = loading.ticket
        message: ToProducer
        if loading.is_confirming:
            message = _done(ticket, loading.sealed)
        elif loading.is_attached:
            message = Renew(ticket.transfer_id, ticket.epoch, loading.consumed, loading.window)
        else:
            message = self._fetch(loading, loading.start_row, loading.num_rows, attempt=0)
        self._sends.append(SendToProducer(loading.route.endpoint, message))

    def _fetch(self, loading: _Loading, start: int, end: int, *, attempt: int) -> Fetch:
        return Fetch(
            version=PROTOCOL_VERSION,
            transfer_id=loading.ticket.transfer_id,
            epoch=loading.ticket.epoch,
            ticket=loading.sealed,
            consumer=self._incarnation,
            start_row=start,
            end_row=end,
            window=loading.window,
            path=loading.route.path,
            attempt=attempt,
        )

    def _raise_limit(self, loading: _Loading) -> None:
        """Grant what there is room for.

        One chunk is always granted: a load without credit would keep blocks of the producer that
        other loads may be waiting for. What stays in the producer's memory needs no room.
        """
        if loading.is_mapped:
            loading.limit = loading.num_rows
            return
        config, row_bytes = self._config, loading.row_bytes
        ahead = sum(
            other.window * other.row_bytes
            for other in self._loading.values()
            if other is not loading and not other.is_mapped
        )
        window = config.window_rows(row_bytes)
        if ahead + window * row_bytes > config.max_inflight_bytes:
            window = config.chunk_rows(row_bytes)
        limit = min(loading.num_rows, loading.start_row + loading.consumed + window)
        loading.limit = max(loading.limit, limit)

    def _fail(self, loading: _Loading, reason: FailureReason) -> bool:
        """End a load, unless all of it has arrived verified: then only the core is awaited."""
        if loading.is_complete and not loading.is_mapped:
            return False
        del self._loading[loading.ticket.transfer_id]
        self._events.append(LoadFailed(loading.ticket.transfer_id, reason))
        return True

    def _close_with(self, loading: _Loading, reason: FailureReason, now_s: float) -> None:
        ticket = loading.ticket
        cancel = Cancel(ticket.transfer_id, ticket.epoch, reason, loading.sealed)
        self._close(loading.route.endpoint, cancel, now_s)

    def _close(self, endpoint: str, message: Done | Cancel, now_s: float) -> None:
        """Say the last word, again and again until it is acknowledged or no use any more."""
        self._closing[message.transfer_id] = _Closing(
            endpoint, message, now_s + self._config.probe_s, now_s + self._config.closing_s
        )
        self._sends.append(SendToProducer(endpoint, message))

    def _drop(self, message: ToConsumer) -> None:
        if isinstance(message, Data | Mapped):
            self._counters.num_dropped_chunks += 1


def _done(ticket: Ticket, sealed: bytes) -> Done:
    return Done(ticket.transfer_id, ticket.epoch, sealed)


def _arrival(
    loading: _Loading, data: Data | Mapped, payload: NDArray[np.uint8], path: PayloadPath
) -> Arrived | ArrivedMapped:
    """Make the event of a chunk whose checksum is right.

    Raises:
        WireError: When it tells of blocks that the producer does not share.
    """
    if isinstance(data, Data):
        rows = payload.reshape(data.num_rows, loading.row_bytes)
        return Arrived(data.transfer_id, data.first_row, rows, path)
    if data.lane >= len(loading.route.source):
        raise WireError(f"no lane {data.lane} in the producer's shared memory")
    source = loading.route.source[data.lane]
    first_block, end_block = source.layout.covering(data.first_row, data.num_rows)
    block_ids, digests = decode_mapped(payload, end_block - first_block)
    if block_ids.min() < 0 or block_ids.max() >= source.num_blocks:
        raise WireError(f"blocks outside the producer's {source.num_blocks}")
    return ArrivedMapped(
        data.transfer_id, data.first_row, data.num_rows, source, block_ids, digests
    )
