"""Consumer's half of the protocol: fetch from producers, as a state machine without I/O.

Messages, commands and ``now_s`` come in; messages to send and events for the core go out through
``take_sends`` and ``take_events``. A chunk reaches the core only if its transfer, epoch,
incarnation, range, credit and checksum are right. After ``LoadFailed`` no chunk reaches it. Rows
read in the producer's memory (path ``shared``) count only once the producer has confirmed that it
held them until the last one was read.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import FailureReason, WireError
from kv_transfer.lease import LeaseState
from kv_transfer.loading import Loading
from kv_transfer.messages import (
    Cancel,
    Data,
    Done,
    LeaseInfo,
    Mapped,
    PayloadPath,
    ToConsumer,
    ToProducer,
    chunk_checksum,
    decode_mapped,
)
from kv_transfer.transport import (
    Arrived,
    ArrivedMapped,
    Confirmed,
    Event,
    LoadFailed,
    ProducerRoute,
    StartLoad,
    WireCounters,
)
from kv_transfer.unacked_finals import UnackedFinals

_REASON = {
    LeaseState.DONE: FailureReason.UNKNOWN_TRANSFER,
    LeaseState.EXPIRED: FailureReason.EXPIRED,
    LeaseState.CANCELLED: FailureReason.CANCELLED,
}


class SendToProducer(NamedTuple):
    """Message for the producer that listens at an endpoint."""

    endpoint: str
    message: ToProducer


class ConsumerSessions:
    """Transfers that this engine consumes.

    Owner: the transport's thread.
    """

    def __init__(self, settings: ConnectorSettings, counters: WireCounters) -> None:
        self._incarnation = settings.incarnation
        self._config = settings.config
        self._counters = counters
        self._loading: dict[bytes, Loading] = {}
        self._unacked = UnackedFinals(settings.config)
        self._sends: list[SendToProducer] = []
        self._events: list[Event] = []

    def take_sends(self) -> list[SendToProducer]:
        """Return and clear the messages to send, in order."""
        sends, self._sends = self._sends, []
        return sends

    def take_events(self) -> list[Event]:
        """Return and clear the events for the core, in order."""
        events, self._events = self._events, []
        return events

    # ---- commands

    def load(self, command: StartLoad, route: ProducerRoute, num_rows: int, now_s: float) -> None:
        """Start to fetch; with nothing left to fetch, only send Done.

        Args:
            command: The core's command.
            route: Endpoint and path of the producer.
            num_rows: Rows of the whole request.
            now_s: Monotonic clock.
        """
        ticket = command.ticket
        if command.start_row >= num_rows:
            done = Done(ticket.transfer_id, ticket.epoch, command.sealed)
            self._close(route.endpoint, done, now_s)
            return
        # The transfer starts again: an unacknowledged end from before must not be repeated.
        self._unacked.discard(ticket.transfer_id)
        loading = Loading.from_command(self._incarnation, command, route, num_rows, now_s)
        self._raise_limit(loading)
        self._loading[ticket.transfer_id] = loading
        self._probe(loading, now_s)

    def consumed(self, transfer_id: bytes, num_rows: int, now_s: float) -> None:
        """Return the credit of rows that are written; after the last one the load is done."""
        loading = self._loading.get(transfer_id)
        if loading is None:
            return
        loading.consumed += num_rows
        endpoint = loading.route.endpoint
        if not loading.is_consumed:
            self._raise_limit(loading)
            if loading.must_tell(self._config.window_rows(loading.row_bytes)):
                self._sends.append(SendToProducer(endpoint, loading.tell_credit()))
        elif loading.is_mapped:
            loading.heard_s = loading.data_s = now_s
            self._probe(loading, now_s)
        else:
            del self._loading[transfer_id]
            self._close(endpoint, loading.done_message(), now_s)

    def spoiled(self, transfer_id: bytes, first_row: int, num_rows: int, now_s: float) -> None:
        """Handle rows in the producer's memory that did not match their digests when read."""
        loading = self._loading.get(transfer_id)
        if loading is None:
            return
        start, end = loading.mark_missing(first_row, num_rows)
        self._on_corrupt(loading, start, end, now_s)

    def cancel(self, transfer_id: bytes, now_s: float) -> None:
        """Stop a load at the core's request; the core ignores its events already."""
        loading = self._loading.pop(transfer_id, None)
        if loading is not None:
            self._close_with(loading, FailureReason.CANCELLED, now_s)

    # ---- messages and deadlines

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
            message: The decoded message.
            payload: The frame behind its header.
            now_s: Monotonic clock.
            path: Path that the payload of a ``Data`` took.
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
        """Fail the loads from a producer whose connection broke."""
        for loading in list(self._loading.values()):
            if loading.route.endpoint == endpoint:
                self._fail(loading, FailureReason.PEER_DEAD)
        self._unacked.on_peer_lost(endpoint)

    def tick(self, now_s: float) -> None:
        """Handle deadlines: probe, repeat, or fail a load."""
        for loading in list(self._loading.values()):
            reason = loading.overdue(self._config, now_s)
            if reason is not None and self._fail(loading, reason):
                self._close_with(loading, reason, now_s)
            elif now_s >= loading.probe_s:
                self._probe(loading, now_s)
        self._sends += [SendToProducer(*again) for again in self._unacked.due(now_s)]

    def next_deadline_s(self) -> float | None:
        """Return the time of the next ``tick``, or None."""
        probes = [loading.probe_s for loading in self._loading.values()]
        return min(probes + self._unacked.deadlines_s(), default=None)

    @property
    def num_open(self) -> int:
        """Loads that have not ended, and ended ones that their producer has not acknowledged."""
        return len(self._loading) + len(self._unacked)

    def expects(self, data: Data, num_bytes: int) -> bool:
        """Return whether these rows, of so many bytes, are awaited and worth fetching."""
        loading = self._loading.get(data.transfer_id)
        return loading is not None and loading.expects(data, num_bytes)

    def lost(self, data: Data, now_s: float) -> None:
        """Request rows again whose payload could not be fetched."""
        loading = self._loading.get(data.transfer_id)
        if loading is not None and loading.expects(data, loading.num_bytes(data)):
            self._ask_again(loading, data.first_row, data.first_row + data.num_rows, now_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        for transfer_id, loading in self._loading.items():
            assert transfer_id not in self._unacked
            loading.check_invariants()

    # ---- handling of messages

    def _on_unknown(self, message: ToConsumer) -> None:
        is_known = message.transfer_id in self._unacked
        if is_known and not isinstance(message, Data | Mapped):
            self._unacked.acknowledge(message)
        else:
            self._counters.num_unknown_ids += not is_known
            self._drop(message)

    def _on_data(
        self,
        loading: Loading,
        data: Data | Mapped,
        payload: NDArray[np.uint8],
        now_s: float,
        path: PayloadPath,
    ) -> None:
        if data.incarnation != loading.ticket.producer_incarnation:
            self._drop(data)
            return
        is_mapped = isinstance(data, Mapped)
        if (
            not loading.may_send(data)
            or is_mapped != loading.is_mapped
            or (isinstance(data, Data) and payload.nbytes != loading.num_bytes(data))
        ):
            self._counters.num_malformed += 1
            return
        num_new = loading.num_new(data)
        if not num_new:
            self._drop(data)
            return
        start, end = data.first_row, data.first_row + data.num_rows
        # Checked before any other use: a corrupted size or id must not reach the core.
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
            # The producer may have verification off; this end requires digests anyway.
            self._on_corrupt(loading, start, end, now_s)
            return
        loading.arrive(data, num_new, now_s)
        self._events.append(event)

    def _on_corrupt(self, loading: Loading, start: int, end: int, now_s: float) -> None:
        """Request corrupted rows once more; the second time the transfer fails."""
        self._counters.num_checksum_failures += 1
        rows = range(start, end)
        if loading.spoiled.isdisjoint(rows):
            loading.spoiled.update(rows)
            self._ask_again(loading, start, end, now_s)
        elif self._fail(loading, FailureReason.CHECKSUM):
            self._close_with(loading, FailureReason.CHECKSUM, now_s)

    def _on_lease(self, loading: Loading, info: LeaseInfo, now_s: float) -> None:
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
        sent = min(info.sent_rows, loading.limit)
        gap = loading.first_gap(sent)
        if gap is not None:  # Rows that the producer has sent and that are not here count as lost.
            if now_s >= loading.asked_s:
                self._ask_again(loading, *gap, now_s)
        elif info.ready_rows <= info.sent_rows or loading.limit <= info.sent_rows:
            loading.data_s = now_s

    # ---- helpers

    def _ask_again(self, loading: Loading, start: int, end: int, now_s: float) -> None:
        """Request rows that were lost or corrupted on the way, at most once per probe interval.

        There is no limit on attempts: without progress the transfer ends by ``no_data_s``.
        """
        loading.asked_s = now_s + self._config.probe_s
        self._counters.num_retransmits += 1
        fetch = loading.fetch(start, end, attempt=1)
        self._sends.append(SendToProducer(loading.route.endpoint, fetch))

    def _probe(self, loading: Loading, now_s: float) -> None:
        """Send the sign of life that fits the state of a load."""
        loading.probe_s = now_s + self._config.probe_s
        self._sends.append(SendToProducer(loading.route.endpoint, loading.sign_of_life()))

    def _raise_limit(self, loading: Loading) -> None:
        """Grant credit for the rows that memory has room for.

        One chunk is always granted: a load without credit would keep blocks of the producer that
        other loads may be waiting for. Rows on the path ``shared`` need no room here.
        """
        if loading.is_mapped:
            loading.raise_limit(loading.num_rows)
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
        loading.raise_limit(window)

    def _fail(self, loading: Loading, reason: FailureReason) -> bool:
        """End a load and return True, unless all of it has arrived verified.

        Then only the core's writing is outstanding, and the load will succeed.
        """
        if loading.is_complete and not loading.is_mapped:
            return False
        del self._loading[loading.ticket.transfer_id]
        self._events.append(LoadFailed(loading.ticket.transfer_id, reason))
        return True

    def _close_with(self, loading: Loading, reason: FailureReason, now_s: float) -> None:
        self._close(loading.route.endpoint, loading.cancel_message(reason), now_s)

    def _close(self, endpoint: str, message: Done | Cancel, now_s: float) -> None:
        """Send Done or Cancel, and repeat it until it is acknowledged or useless."""
        self._unacked.add(endpoint, message, now_s)
        self._sends.append(SendToProducer(endpoint, message))

    def _drop(self, message: ToConsumer) -> None:
        if isinstance(message, Data | Mapped):
            self._counters.num_dropped_chunks += 1


def _arrival(
    loading: Loading, data: Data | Mapped, payload: NDArray[np.uint8], path: PayloadPath
) -> Arrived | ArrivedMapped:
    """Make the event of a chunk whose checksum is right.

    Raises:
        WireError: When it names blocks that the producer does not share.
    """
    if isinstance(data, Data):
        return Arrived(data.transfer_id, data.first_row, data.num_rows, payload, path)
    if data.lane >= len(loading.route.source):
        raise WireError(f"no lane {data.lane} in the producer's shared memory")
    source = loading.route.source[data.lane]
    first_block, end_block = source.layout.covering(data.first_row, data.num_rows)
    block_ids, digests = decode_mapped(payload, end_block - first_block)
    if block_ids.min() < 0 or block_ids.max() >= source.num_blocks:
        raise WireError(f"block ids outside the producer's {source.num_blocks} blocks")
    return ArrivedMapped(
        data.transfer_id, data.first_row, data.num_rows, source, block_ids, digests
    )
