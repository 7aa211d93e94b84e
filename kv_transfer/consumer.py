"""Fetch from producers: the consumer's half of the protocol as a state machine without I/O.

Messages, commands and ``now_s`` come in; messages to send and events for the core go out through
``take_sends`` and ``take_events``. A chunk reaches the core only if its transfer, epoch,
incarnation, range, credit and checksum are right; after ``LoadFailed`` none does.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from kv_transfer.layout import KVLayout
from kv_transfer.lease import LeaseState
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Data,
    Done,
    Fetch,
    LeaseInfo,
    Renew,
    ToConsumer,
    ToProducer,
    chunk_checksum,
)
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Arrived, Event, LoadFailed, WireCounters

_REASON = {
    LeaseState.DONE: FailureReason.UNKNOWN_TRANSFER,
    LeaseState.EXPIRED: FailureReason.EXPIRED,
    LeaseState.CANCELLED: FailureReason.CANCELLED,
}


class SendToProducer(NamedTuple):
    """A message for the producer that listens at an endpoint."""

    endpoint: str
    message: ToProducer


@dataclass(slots=True, eq=False)
class _Loading:
    ticket: Ticket
    start_block: int
    num_blocks: int
    started_s: float
    heard_s: float
    """When the producer's process last said anything about this transfer."""
    data_s: float
    """When a chunk last arrived, or the producer last had good reason not to send one."""
    probe_s: float
    """When the next FETCH or RENEW is due."""
    is_attached: bool = False
    num_arrived: int = 0
    consumed: int = 0
    limit: int = 0
    arrived: bytearray = field(default_factory=bytearray)
    repeated: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == self.num_blocks - self.start_block

    @property
    def window(self) -> int:
        """Blocks that may arrive beyond the consumed ones."""
        return self.limit - self.start_block - self.consumed


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

    def __init__(
        self, incarnation: str, layout: KVLayout, config: TransferConfig, counters: WireCounters
    ) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._config = config
        self._counters = counters
        self._chunk = config.chunk_blocks(layout.bytes_per_block)
        self._window = config.window_blocks(layout.bytes_per_block)
        self._max_ahead = config.max_inflight_bytes // layout.bytes_per_block
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

    def load(self, ticket: Ticket, start_block: int, now_s: float) -> None:
        """Start to fetch the blocks from ``start_block`` on; with none left, only say Done."""
        num_blocks = self._layout.num_blocks(ticket.num_tokens)
        if start_block >= num_blocks:
            self._close(ticket, Done(ticket.transfer_id, ticket.epoch, self._incarnation), now_s)
            return
        loading = _Loading(
            ticket, start_block, num_blocks, now_s, now_s, now_s, now_s, limit=start_block
        )
        loading.arrived = bytearray(num_blocks)
        self._closing.pop(ticket.transfer_id, None)
        self._raise_limit(loading)
        self._loading[ticket.transfer_id] = loading
        self._probe(loading, now_s)

    def consumed(self, transfer_id: bytes, num_blocks: int, now_s: float) -> None:
        """Return the credit of blocks that are written; after the last one the load is done."""
        loading = self._loading.get(transfer_id)
        if loading is None:
            return
        ticket = loading.ticket
        loading.consumed += num_blocks
        if loading.consumed == loading.num_blocks - loading.start_block:
            del self._loading[transfer_id]
            self._close(ticket, Done(transfer_id, ticket.epoch, self._incarnation), now_s)
        else:
            self._raise_limit(loading)
            credit = Credit(transfer_id, ticket.epoch, loading.consumed, loading.window)
            self._sends.append(SendToProducer(ticket.producer_endpoint, credit))

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
    ) -> None:
        """Handle one message from a producer; ``payload`` is the frame after a ``Data``."""
        if (message.__class__ is Data) != (payload is not None):
            self._counters.num_malformed += 1
            return
        loading = self._loading.get(message.transfer_id)
        if loading is None:
            self._on_unknown(message)
        elif endpoint != loading.ticket.producer_endpoint or message.epoch != loading.ticket.epoch:
            self._drop(message)
        elif isinstance(message, Data):
            assert payload is not None
            self._on_data(loading, message, payload, now_s)
        elif isinstance(message, LeaseInfo):
            self._on_lease(loading, message, now_s)
        else:
            self._fail(loading, message.reason)

    def on_peer_lost(self, endpoint: str) -> None:
        """Fail what was still expected from a producer whose connection broke."""
        for loading in list(self._loading.values()):
            if loading.ticket.producer_endpoint == endpoint:
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

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert not self._loading.keys() & self._closing.keys()
        for loading in self._loading.values():
            assert loading.num_arrived == sum(loading.arrived)
            assert loading.consumed <= loading.num_arrived
            assert loading.start_block <= loading.limit <= loading.num_blocks
            assert not any(loading.arrived[loading.limit :])

    # ---- messages

    def _on_unknown(self, message: ToConsumer) -> None:
        closing = self._closing.get(message.transfer_id)
        if closing is None or isinstance(message, Data):
            self._counters.num_unknown_ids += closing is None
            self._drop(message)
        elif message.epoch == closing.message.epoch and (
            not isinstance(message, LeaseInfo)
            or message.state not in {LeaseState.WAITING, LeaseState.SERVING}
        ):
            del self._closing[message.transfer_id]

    def _on_data(
        self, loading: _Loading, data: Data, payload: NDArray[np.uint8], now_s: float
    ) -> None:
        end = data.first_block + data.num_blocks
        bytes_per_block = self._layout.bytes_per_block
        if data.incarnation != loading.ticket.producer_incarnation:
            self._drop(data)
            return
        if (
            not loading.start_block <= data.first_block < end <= loading.limit
            or payload.nbytes != data.num_blocks * bytes_per_block
        ):
            self._counters.num_malformed += 1
            return
        blocks = payload.reshape(data.num_blocks, bytes_per_block)
        checksum = chunk_checksum(data.transfer_id, data.epoch, data.first_block, blocks)
        num_new = data.num_blocks - sum(loading.arrived[data.first_block : end])
        if not num_new:
            self._drop(data)
        elif checksum != data.checksum:
            self._on_corrupt(loading, data, now_s)
        else:
            loading.heard_s = loading.data_s = now_s
            loading.is_attached = True
            loading.arrived[data.first_block : end] = b"\x01" * data.num_blocks
            loading.num_arrived += num_new
            self._events.append(Arrived(data.transfer_id, data.first_block, num_new, blocks))

    def _on_corrupt(self, loading: _Loading, data: Data, now_s: float) -> None:
        self._counters.num_checksum_failures += 1
        if not self._ask_again(loading, data.first_block, data.first_block + data.num_blocks):
            self._fail(loading, FailureReason.CHECKSUM)
            self._close_with(loading, FailureReason.CHECKSUM, now_s)

    def _on_lease(self, loading: _Loading, info: LeaseInfo, now_s: float) -> None:
        if info.state in _REASON:
            self._fail(loading, _REASON[info.state])
            return
        loading.heard_s = now_s
        if info.state is LeaseState.WAITING:
            return
        loading.is_attached = True
        missing = loading.arrived.find(0, loading.start_block)
        sent = min(info.sent_blocks, loading.limit)
        if 0 <= missing < sent:
            end = loading.arrived.find(1, missing, sent)
            self._ask_again(loading, missing, sent if end < 0 else end)
        elif info.ready_blocks <= info.sent_blocks or loading.limit <= info.sent_blocks:
            loading.data_s = now_s

    # ---- inside

    def _ask_again(self, loading: _Loading, start: int, end: int) -> bool:
        """Ask for blocks that were sent and lost or corrupted; False when asked before."""
        if not loading.repeated.isdisjoint(range(start, end)):
            return False
        loading.repeated.update(range(start, end))
        self._counters.num_retransmits += 1
        self._sends.append(
            SendToProducer(
                loading.ticket.producer_endpoint, self._fetch(loading, start, end, attempt=1)
            )
        )
        return True

    def _overdue(self, loading: _Loading, now_s: float) -> FailureReason | None:
        if loading.is_complete:
            return None
        if not loading.is_attached and now_s - loading.started_s >= self._config.rendezvous_s:
            return FailureReason.UNKNOWN_TRANSFER
        is_silent = now_s - loading.heard_s >= self._config.no_progress_s
        is_stuck = loading.is_attached and now_s - loading.data_s >= self._config.no_data_s
        return FailureReason.STALLED if is_silent or is_stuck else None

    def _probe(self, loading: _Loading, now_s: float) -> None:
        """Give a sign of life: FETCH until the producer has attached us, then RENEW."""
        loading.probe_s = now_s + self._config.probe_s
        ticket = loading.ticket
        message: ToProducer
        if loading.is_attached:
            message = Renew(ticket.transfer_id, ticket.epoch, loading.consumed, loading.window)
        else:
            message = self._fetch(loading, loading.start_block, loading.num_blocks, attempt=0)
        self._sends.append(SendToProducer(ticket.producer_endpoint, message))

    def _fetch(self, loading: _Loading, start: int, end: int, *, attempt: int) -> Fetch:
        return Fetch(
            version=PROTOCOL_VERSION,
            transfer_id=loading.ticket.transfer_id,
            epoch=loading.ticket.epoch,
            incarnation=loading.ticket.producer_incarnation,
            consumer=self._incarnation,
            layout_hash=loading.ticket.layout_hash,
            start_block=start,
            end_block=end,
            window=loading.window,
            attempt=attempt,
        )

    def _raise_limit(self, loading: _Loading) -> None:
        """Grant what there is room for.

        One chunk is always granted: a load without credit would keep blocks of the producer that
        other loads may be waiting for.
        """
        ahead = sum(other.window for other in self._loading.values() if other is not loading)
        window = self._window if ahead + self._window <= self._max_ahead else self._chunk
        limit = min(loading.num_blocks, loading.start_block + loading.consumed + window)
        loading.limit = max(loading.limit, limit)

    def _fail(self, loading: _Loading, reason: FailureReason) -> bool:
        """End a load, unless all of it has arrived verified: then only the core is awaited."""
        if loading.is_complete:
            return False
        del self._loading[loading.ticket.transfer_id]
        self._events.append(LoadFailed(loading.ticket.transfer_id, reason))
        return True

    def _close_with(self, loading: _Loading, reason: FailureReason, now_s: float) -> None:
        ticket = loading.ticket
        self._close(ticket, Cancel(ticket.transfer_id, ticket.epoch, reason), now_s)

    def _close(self, ticket: Ticket, message: Done | Cancel, now_s: float) -> None:
        """Say the last word, again and again until it is acknowledged or no use any more."""
        endpoint = ticket.producer_endpoint
        self._closing[ticket.transfer_id] = _Closing(
            endpoint, message, now_s + self._config.probe_s, now_s + self._config.closing_s
        )
        self._sends.append(SendToProducer(endpoint, message))

    def _drop(self, message: ToConsumer) -> None:
        if isinstance(message, Data):
            self._counters.num_dropped_chunks += 1
