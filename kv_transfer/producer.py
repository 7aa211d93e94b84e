"""Answer consumers: the producer's half of the protocol as a state machine without I/O.

Messages, commands and ``now_s`` come in; messages to send and events for the core go out through
``take_sends`` and ``take_events``. Whether a lease lives is decided anew for every chunk. A
transfer belongs to the connection that first showed its ticket; nobody else is listened to.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.layout import KVLayout
from kv_transfer.lease import LeaseState, LeaseTable
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Data,
    Done,
    Fail,
    Fetch,
    LeaseInfo,
    Mapped,
    PayloadPath,
    Renew,
    ToConsumer,
    ToProducer,
    chunk_checksum,
)
from kv_transfer.ticket import Ticket
from kv_transfer.transport import (
    Chunk,
    Delivered,
    Event,
    Granted,
    MappedChunk,
    Repeat,
    SendFailed,
    WireCounters,
)

MAX_PARKED = 4096
"""FETCHes that are kept for transfers this engine has not heard of yet; the oldest give way."""

_REASON = {
    LeaseState.DONE: FailureReason.UNKNOWN_TRANSFER,
    LeaseState.EXPIRED: FailureReason.EXPIRED,
    LeaseState.CANCELLED: FailureReason.CANCELLED,
}


class SendToConsumer(NamedTuple):
    """A message for the peer that a message came from, with the payload of a ``Data``."""

    peer: bytes
    message: ToConsumer
    payload: NDArray[np.uint8] | None = None


class _Parked(NamedTuple):
    peer: bytes
    fetch: Fetch
    ticket: Ticket
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Sending:
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

    @property
    def is_stalled(self) -> bool:
        return self.peer is not None and self.limit < self.num_rows and self.limit < self.ready_rows


class ProducerSessions:
    """Every transfer that this engine produces.

    Owner: the transport's thread.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: KVLayout,
        counters: WireCounters,
        paths: frozenset[PayloadPath],
    ) -> None:
        config = settings.config
        self._paths = paths
        self._incarnation = settings.incarnation
        self._keys = settings.keys
        self._unix_now_s = settings.unix_now_s
        self._layout = layout
        self._window = config.window_rows(layout.row_bytes)
        self._rendezvous_s = config.rendezvous_s
        self._probe_s = config.probe_s
        self._counters = counters
        self._leases = LeaseTable(config)
        self._sending: dict[bytes, _Sending] = {}
        self._parked: OrderedDict[bytes, _Parked] = OrderedDict()
        self._sends: list[SendToConsumer] = []
        self._events: list[Event] = []

    def take_sends(self) -> list[SendToConsumer]:
        """Return and forget the messages to send, in order."""
        sends, self._sends = self._sends, []
        return sends

    def take_events(self) -> list[Event]:
        """Return and forget the events for the core, in order."""
        events, self._events = self._events, []
        return events

    # ---- commands

    def offer(self, ticket: Ticket, now_s: float) -> None:
        """Grant a lease and attach the consumer if it has come already."""
        if not self._leases.grant(ticket.transfer_id, now_s):
            self._events.append(SendFailed(ticket.transfer_id, FailureReason.CANCELLED))
            return
        self._counters.count_lease("granted")
        num_rows = self._layout.num_rows(ticket.num_tokens)
        self._sending[ticket.transfer_id] = _Sending(ticket, num_rows)
        parked = self._parked.pop(ticket.transfer_id, None)
        if parked is not None:
            self._on_valid_fetch(parked.peer, parked.fetch, parked.ticket, now_s)

    def ready(self, transfer_id: bytes, num_rows: int, now_s: float) -> None:
        """Note how many rows are computed; consumers learn it with their next renewal."""
        sending = self._sending.get(transfer_id)
        if sending is not None:
            sending.ready_rows = num_rows
            self._watch_stall(sending, now_s)

    def send_chunk(self, chunk: Chunk | MappedChunk, now_s: float) -> None:
        """Send rows if the lease still lives; a dead one answers ``expired`` instead."""
        transfer_id, first_row = chunk.transfer_id, chunk.first_row
        if not self._leases.is_live(transfer_id, now_s):
            self._expire(now_s)
            return
        sending = self._sending[transfer_id]
        epoch = sending.ticket.epoch
        is_mapped = isinstance(chunk, MappedChunk)
        num_rows = chunk.num_rows if isinstance(chunk, MappedChunk) else len(chunk.payload)
        checksum = chunk_checksum(transfer_id, epoch, first_row, num_rows, chunk.payload)
        coordinates = (transfer_id, epoch, self._incarnation, first_row, num_rows)
        header = (
            Mapped(*coordinates, chunk.lane, checksum)
            if isinstance(chunk, MappedChunk)
            else Data(*coordinates, checksum)
        )
        if is_mapped == (sending.path == "shared"):
            sending.sent_rows = max(sending.sent_rows, first_row + num_rows)
            self._tell(sending, header, chunk.payload)

    def cancel(self, transfer_id: bytes) -> None:
        """End a transfer on this engine's wish."""
        sending = self._end(transfer_id, LeaseState.CANCELLED)
        if sending is not None:
            epoch = sending.ticket.epoch
            self._tell(sending, Cancel(transfer_id, epoch, FailureReason.CANCELLED))

    # ---- the outside

    def on_message(self, peer: bytes, message: ToProducer, now_s: float) -> None:
        """Handle one message; ``peer`` names the connection that it came over."""
        if isinstance(message, Fetch):
            self._on_fetch(peer, message, now_s)
            return
        if self._leases.state(message.transfer_id) is None and not self._end_early(message, now_s):
            self._counters.num_unknown_ids += 1
            return
        sending = self._sending.get(message.transfer_id)
        if sending is not None:
            if message.epoch != sending.ticket.epoch or not self._may_speak(
                peer, sending, message, now_s
            ):
                self._counters.num_unknown_ids += 1
                return
            sending.probe_s = now_s + 2 * self._probe_s
            self._on_live(sending, message, now_s)
        if not isinstance(message, Credit):
            self._answer(peer, message.transfer_id, message.epoch, now_s)

    def on_peer_lost(self, peer: bytes) -> None:
        """End what a vanished consumer was fetching: it has given up too."""
        lost = [tid for tid, sending in self._sending.items() if sending.peer == peer]
        for transfer_id in lost:
            self._fail(transfer_id, FailureReason.PEER_DEAD)

    def tick(self, now_s: float) -> None:
        """Let deadlines pass; address silent consumers, as a dead one cannot be reached."""
        self._expire(now_s)
        for transfer_id, sending in self._sending.items():
            if sending.peer is not None and now_s >= sending.probe_s:
                sending.probe_s = now_s + self._probe_s
                self._answer(sending.peer, transfer_id, sending.ticket.epoch, now_s)
        while self._parked and next(iter(self._parked.values())).deadline_s <= now_s:
            self._parked.popitem(last=False)
            self._counters.num_unknown_ids += 1

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        deadlines_s = [x.probe_s for x in self._sending.values() if x.peer is not None]
        deadlines_s += [parked.deadline_s for parked in list(self._parked.values())[:1]]
        lease_s = self._leases.next_deadline_s()
        if lease_s is not None:
            deadlines_s.append(lease_s)
        return min(deadlines_s, default=None)

    @property
    def num_open(self) -> int:
        """Transfers that have been offered and have not ended."""
        return len(self._sending)

    def consumed_row(self, transfer_id: bytes) -> int | None:
        """Return one past the last row that is not needed any more; None when all are not."""
        sending = self._sending.get(transfer_id)
        return None if sending is None else sending.consumed_row

    @property
    def peers(self) -> set[bytes]:
        """Connections that transfers belong to."""
        return {x.peer for x in self._sending.values() if x.peer is not None}

    def path(self, transfer_id: bytes) -> PayloadPath:
        """Return how a transfer's payload travels."""
        sending = self._sending.get(transfer_id)
        return "inline" if sending is None else sending.path

    def left_s(self, transfer_id: bytes, now_s: float) -> float:
        """Return the seconds until a lease ends unless renewed; any thread may ask."""
        return self._leases.left_s(transfer_id, now_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        self._leases.check_invariants()
        for transfer_id, sending in self._sending.items():
            assert self._leases.state(transfer_id) in {LeaseState.WAITING, LeaseState.SERVING}
            assert sending.limit <= sending.num_rows
            assert sending.sent_rows <= sending.num_rows
        assert not self._sending.keys() & self._parked.keys()
        assert len(self._parked) <= MAX_PARKED

    # ---- messages

    def _on_fetch(self, peer: bytes, fetch: Fetch, now_s: float) -> None:
        sending = self._sending.get(fetch.transfer_id)
        if sending is not None and (sending.peer, sending.ticket.epoch) == (peer, fetch.epoch):
            # It has shown its ticket, whose age says nothing about a lease that lives.
            self._on_valid_fetch(peer, fetch, sending.ticket, now_s)
            return
        try:
            ticket = self._keys.unseal(fetch.ticket, self._unix_now_s())
        except TicketError as error:
            self._counters.num_bad_tickets += 1
            if error.reason is not FailureReason.AUTH:
                # Strangers get no answer: it would wait in memory for one who never reads it.
                self._refuse(peer, fetch, error.reason or FailureReason.EXPIRED)
            return
        reason = (
            self._contradiction(fetch, ticket)
            if fetch.version == PROTOCOL_VERSION
            else FailureReason.VERSION
        )
        if reason is not None:
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, reason)
            return
        self._on_valid_fetch(peer, fetch, ticket, now_s)

    def _contradiction(self, fetch: Fetch, ticket: Ticket) -> FailureReason | None:
        """Return what of a fetch its own ticket does not allow, or None."""
        if ticket.producer_incarnation != self._incarnation:
            return FailureReason.INCARNATION
        if not ticket.consumer or ticket.consumer != fetch.consumer:
            return FailureReason.AUDIENCE
        if ticket.transfer_id != fetch.transfer_id:
            return FailureReason.AUTH
        if ticket.epoch != fetch.epoch:
            return FailureReason.EPOCH
        is_in_range = fetch.start_row < fetch.end_row <= self._layout.num_rows(ticket.num_tokens)
        # Payload that travels can replace every path but one: memory that is not shared.
        is_possible = fetch.path != "shared" or "shared" in self._paths
        return None if is_in_range and is_possible else FailureReason.LAYOUT

    def _on_valid_fetch(self, peer: bytes, fetch: Fetch, ticket: Ticket, now_s: float) -> None:
        state = self._leases.state(fetch.transfer_id)
        sending = self._sending.get(fetch.transfer_id)
        if state is None:
            self._park(peer, fetch, ticket, now_s)
        elif sending is None:
            self._counters.count_lease("late_fetch")
            self._refuse(peer, fetch, _REASON[state])
        elif (reason := _mismatch(ticket, sending.ticket)) is not None:
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, reason)
        elif sending.peer not in {None, peer}:
            # A replay: whoever attached first has the transfer, and holds its connection.
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, FailureReason.AUDIENCE)
        elif sending.peer is None and fetch.attempt:
            # Asks once more for what it never asked for: out of order, or made up.
            self._counters.num_unknown_ids += 1
        elif self._leases.attach(fetch.transfer_id, now_s):
            self._attach(sending, peer, fetch, now_s)
            self._answer(peer, fetch.transfer_id, fetch.epoch, now_s)
        else:
            self._expire(now_s)
            self._counters.count_lease("late_fetch")
            self._refuse(peer, fetch, FailureReason.EXPIRED)

    def _attach(self, sending: _Sending, peer: bytes, fetch: Fetch, now_s: float) -> None:
        if sending.peer is None:
            sending.peer = peer
            sending.path = fetch.path if fetch.path in self._paths else "inline"
            sending.start_row = sending.sent_rows = sending.limit = fetch.start_row
        sending.probe_s = now_s + 2 * self._probe_s
        if fetch.attempt:
            self._repeat(sending, fetch, now_s)
        else:
            self._grant(sending, 0, fetch.window, now_s)

    def _park(self, peer: bytes, fetch: Fetch, ticket: Ticket, now_s: float) -> None:
        """Keep a fetch for a transfer that the router has not told this engine of yet."""
        known = self._parked.get(fetch.transfer_id)
        if known is None:
            if len(self._parked) >= MAX_PARKED:
                self._parked.popitem(last=False)
            deadline_s = now_s + self._rendezvous_s
            self._parked[fetch.transfer_id] = _Parked(peer, fetch, ticket, deadline_s)
        elif known.peer != peer:
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, FailureReason.AUDIENCE)
            return
        self._answer(peer, fetch.transfer_id, fetch.epoch, now_s)

    def _refuse(self, peer: bytes, fetch: Fetch, reason: FailureReason) -> None:
        self._sends.append(SendToConsumer(peer, Fail(fetch.transfer_id, fetch.epoch, reason)))

    def _repeat(self, sending: _Sending, fetch: Fetch, now_s: float) -> None:
        start = max(fetch.start_row, sending.start_row)
        end = min(fetch.end_row, sending.sent_rows)
        if now_s >= sending.repeat_s:
            sending.repeated.clear()
        if start < end and sending.repeated.isdisjoint(range(start, end)):
            sending.repeat_s = now_s + self._probe_s / 2
            sending.repeated.update(range(start, end))
            self._counters.num_retransmits += 1
            self._events.append(Repeat(fetch.transfer_id, start, end - start))

    def _on_live(self, sending: _Sending, message: ToProducer, now_s: float) -> None:
        transfer_id = sending.ticket.transfer_id
        if isinstance(message, Credit | Renew):
            if self._leases.renew(transfer_id, now_s) and sending.peer is not None:
                self._counters.count_lease("renewed")
                self._grant(sending, message.consumed, message.window, now_s)
        elif isinstance(message, Done):
            self._end(transfer_id, LeaseState.DONE)
            wired = sending.num_rows - sending.start_row if sending.peer else 0
            self._events.append(Delivered(transfer_id, wired))
        elif isinstance(message, Cancel):
            self._fail(transfer_id, message.reason)

    def _may_speak(self, peer: bytes, sending: _Sending, message: ToProducer, now_s: float) -> bool:
        """Tell whether a message is from the transfer's consumer.

        Once attached, that is whoever holds its connection; before, whoever has the ticket.
        """
        if sending.peer is not None:
            return sending.peer == peer
        ticket = self._shown(message, now_s)
        return ticket is not None and _mismatch(ticket, sending.ticket) is None

    def _shown(self, message: ToProducer, now_s: float) -> Ticket | None:
        """Return the ticket of a last word, if it is one of this transfer and engine."""
        if not isinstance(message, Done | Cancel) or not message.ticket:
            return None
        try:
            ticket = self._keys.unseal(message.ticket, self._unix_now_s())
        except TicketError:
            self._counters.num_bad_tickets += 1
            return None
        is_right = (
            ticket.transfer_id == message.transfer_id
            and ticket.producer_incarnation == self._incarnation
            and ticket.consumer
        )
        return ticket if is_right else None

    def _end_early(self, message: ToProducer, now_s: float) -> bool:
        """Remember that a transfer is over before this engine has heard of it."""
        if self._shown(message, now_s) is None:
            return False
        self._parked.pop(message.transfer_id, None)
        state = LeaseState.DONE if isinstance(message, Done) else LeaseState.CANCELLED
        return self._leases.end(message.transfer_id, state)

    def _grant(self, sending: _Sending, consumed: int, window: int, now_s: float) -> None:
        """Raise the limit; never beyond this engine's own window, whatever the peer asks.

        Nothing is in flight on the path ``shared``: there, no window is needed.
        """
        consumed = min(consumed, sending.sent_rows - sending.start_row)
        if sending.path != "shared":
            window = min(window, self._window)
        sending.consumed_row = max(sending.consumed_row, sending.start_row + consumed)
        limit = min(sending.start_row + consumed + window, sending.num_rows)
        if limit > sending.limit:
            self._watch_stall(sending, now_s)
            sending.limit = limit
            self._events.append(
                Granted(sending.ticket.transfer_id, sending.start_row, limit, sending.path)
            )
        self._watch_stall(sending, now_s)

    def _watch_stall(self, sending: _Sending, now_s: float) -> None:
        """Count the seconds in which only credit was missing."""
        if sending.stalled_s is not None:
            self._counters.credit_stalled_s += now_s - sending.stalled_s
        sending.stalled_s = now_s if sending.is_stalled else None

    def _answer(self, peer: bytes, transfer_id: bytes, epoch: int, now_s: float) -> None:
        sending = self._sending.get(transfer_id)
        info = LeaseInfo(
            transfer_id,
            epoch,
            self._leases.state(transfer_id) or LeaseState.WAITING,
            int(1000 * self._leases.left_s(transfer_id, now_s)),
            sending.ready_rows if sending else 0,
            sending.sent_rows if sending else 0,
        )
        self._sends.append(SendToConsumer(peer, info))

    def _expire(self, now_s: float) -> None:
        for transfer_id in self._leases.expire(now_s):
            self._counters.count_lease("expired")
            sending = self._sending.pop(transfer_id)
            self._events.append(SendFailed(transfer_id, FailureReason.EXPIRED))
            self._tell(sending, Fail(transfer_id, sending.ticket.epoch, FailureReason.EXPIRED))

    def _fail(self, transfer_id: bytes, reason: FailureReason) -> None:
        if self._end(transfer_id, LeaseState.CANCELLED) is not None:
            self._events.append(SendFailed(transfer_id, reason))

    def _end(self, transfer_id: bytes, state: LeaseState) -> _Sending | None:
        sending = self._sending.pop(transfer_id, None)
        if sending is not None:
            self._leases.end(transfer_id, state)
            self._counters.count_lease(state.value)
        return sending

    def _tell(
        self, sending: _Sending, message: ToConsumer, payload: NDArray[np.uint8] | None = None
    ) -> None:
        if sending.peer is not None:
            self._sends.append(SendToConsumer(sending.peer, message, payload))


def _mismatch(shown: Ticket, offered: Ticket) -> FailureReason | None:
    """Return in what a consumer's ticket contradicts the one that this engine was given."""
    if offered.consumer not in {"", shown.consumer}:
        return FailureReason.AUDIENCE
    if shown.epoch != offered.epoch:
        return FailureReason.EPOCH
    is_same = (
        shown.num_tokens == offered.num_tokens
        and shown.layout_hash == offered.layout_hash
        and shown.request_id == offered.request_id
    )
    return None if is_same else FailureReason.LAYOUT
