"""Answer consumers: the producer's half of the protocol as a state machine without I/O.

Messages, commands and ``now_s`` come in; messages to send and events for the core go out through
``take_sends`` and ``take_events``. Whether a lease lives is decided anew for every chunk.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
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
    Renew,
    ToConsumer,
    ToProducer,
    chunk_checksum,
)
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Delivered, Event, Granted, Repeat, SendFailed, WireCounters

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
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Sending:
    ticket: Ticket
    num_blocks: int
    peer: bytes | None = None
    probe_s: float = 0.0
    """When to address a consumer that stays silent, to learn whether it is still there."""
    start_block: int = 0
    limit: int = 0
    ready_blocks: int = 0
    sent_blocks: int = 0
    repeated: set[int] = field(default_factory=set)


class ProducerSessions:
    """Every transfer that this engine produces.

    Owner: the transport's thread.
    """

    def __init__(
        self, incarnation: str, layout: KVLayout, config: TransferConfig, counters: WireCounters
    ) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._window = config.window_blocks(layout.bytes_per_block)
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
        num_blocks = self._layout.num_blocks(ticket.num_tokens)
        self._sending[ticket.transfer_id] = _Sending(ticket, num_blocks)
        parked = self._parked.pop(ticket.transfer_id, None)
        if parked is not None:
            self._on_fetch(parked.peer, parked.fetch, now_s)

    def ready(self, transfer_id: bytes, num_blocks: int) -> None:
        """Note how many blocks are computed; consumers learn it with their next renewal."""
        sending = self._sending.get(transfer_id)
        if sending is not None:
            sending.ready_blocks = num_blocks

    def send_chunk(
        self, transfer_id: bytes, first_block: int, payload: NDArray[np.uint8], now_s: float
    ) -> None:
        """Send blocks if the lease still lives; a dead one answers ``expired`` instead."""
        if not self._leases.is_live(transfer_id, now_s):
            self._expire(now_s)
            return
        sending = self._sending[transfer_id]
        epoch = sending.ticket.epoch
        checksum = chunk_checksum(transfer_id, epoch, first_block, payload)
        header = Data(transfer_id, epoch, self._incarnation, first_block, len(payload), checksum)
        sending.sent_blocks = max(sending.sent_blocks, first_block + len(payload))
        self._tell(sending, header, payload)

    def cancel(self, transfer_id: bytes) -> None:
        """End a transfer on this engine's wish."""
        sending = self._end(transfer_id, LeaseState.CANCELLED)
        if sending is not None:
            epoch = sending.ticket.epoch
            self._tell(sending, Cancel(transfer_id, epoch, FailureReason.CANCELLED))

    # ---- the outside

    def on_message(self, peer: bytes, message: ToProducer, now_s: float) -> None:
        """Handle one message; ``peer`` is only ever used to answer."""
        if isinstance(message, Fetch):
            self._on_fetch(peer, message, now_s)
            return
        state = self._leases.state(message.transfer_id)
        if state is None and not self._cancel_parked(message):
            self._counters.num_unknown_ids += 1
            return
        sending = self._sending.get(message.transfer_id)
        if sending is not None:
            if message.epoch != sending.ticket.epoch:
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
        lease_s = self._leases.next_deadline_s()
        if lease_s is not None:
            deadlines_s.append(lease_s)
        return min(deadlines_s, default=None)

    @property
    def num_open(self) -> int:
        """Transfers that have been offered and have not ended."""
        return len(self._sending)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        self._leases.check_invariants()
        for transfer_id, sending in self._sending.items():
            assert self._leases.state(transfer_id) in {LeaseState.WAITING, LeaseState.SERVING}
            assert sending.limit <= sending.num_blocks
            assert sending.sent_blocks <= max(sending.limit, 0)

    # ---- inside

    def _on_fetch(self, peer: bytes, fetch: Fetch, now_s: float) -> None:
        sending = self._sending.get(fetch.transfer_id)
        refusal = self._refusal(fetch, sending)
        if refusal is not None:
            self._sends.append(SendToConsumer(peer, Fail(fetch.transfer_id, fetch.epoch, refusal)))
            return
        if sending is None:
            self._parked[fetch.transfer_id] = _Parked(peer, fetch, now_s + self._rendezvous_s)
            self._parked.move_to_end(fetch.transfer_id)
            if len(self._parked) > MAX_PARKED:
                self._parked.popitem(last=False)
        elif fetch.attempt:
            self._repeat(sending, fetch)
        elif self._leases.attach(fetch.transfer_id, now_s):
            if sending.peer is None:
                sending.start_block = sending.sent_blocks = sending.limit = fetch.start_block
            sending.peer = peer
            sending.probe_s = now_s + 2 * self._probe_s
            self._grant(sending, 0, fetch.window)
        self._answer(peer, fetch.transfer_id, fetch.epoch, now_s)

    def _refusal(self, fetch: Fetch, sending: _Sending | None) -> FailureReason | None:
        """Return why this fetch gets nothing, or None."""
        if fetch.version != PROTOCOL_VERSION:
            return FailureReason.VERSION
        if fetch.incarnation != self._incarnation:
            return FailureReason.INCARNATION
        if sending is None:
            state = self._leases.state(fetch.transfer_id)
            return None if state is None else _REASON[state]
        return _mismatch(fetch, sending)

    def _repeat(self, sending: _Sending, fetch: Fetch) -> None:
        wanted = range(
            max(fetch.start_block, sending.start_block), min(fetch.end_block, sending.sent_blocks)
        )
        if wanted and sending.repeated.isdisjoint(wanted):
            sending.repeated.update(wanted)
            self._counters.num_retransmits += 1
            self._events.append(Repeat(fetch.transfer_id, wanted.start, len(wanted)))

    def _on_live(self, sending: _Sending, message: ToProducer, now_s: float) -> None:
        transfer_id = sending.ticket.transfer_id
        if isinstance(message, Credit | Renew):
            if self._leases.renew(transfer_id, now_s) and sending.peer is not None:
                self._grant(sending, message.consumed, message.window)
        elif isinstance(message, Done):
            if message.consumer == sending.ticket.consumer:
                self._end(transfer_id, LeaseState.DONE)
                wired = sending.num_blocks - sending.start_block if sending.peer else 0
                self._events.append(Delivered(transfer_id, wired))
        elif isinstance(message, Cancel):
            self._fail(transfer_id, message.reason)

    def _cancel_parked(self, message: ToProducer) -> bool:
        """Remember that a transfer was cancelled before this engine heard of it."""
        if not isinstance(message, Cancel) or message.transfer_id not in self._parked:
            return False
        del self._parked[message.transfer_id]
        return self._leases.end(message.transfer_id, LeaseState.CANCELLED)

    def _grant(self, sending: _Sending, consumed: int, window: int) -> None:
        """Raise the limit; never beyond this engine's own window, whatever the peer asks."""
        consumed = min(consumed, sending.sent_blocks - sending.start_block)
        limit = sending.start_block + consumed + min(window, self._window)
        limit = min(limit, sending.num_blocks)
        if limit > sending.limit:
            sending.limit = limit
            self._events.append(Granted(sending.ticket.transfer_id, sending.start_block, limit))

    def _answer(self, peer: bytes, transfer_id: bytes, epoch: int, now_s: float) -> None:
        sending = self._sending.get(transfer_id)
        info = LeaseInfo(
            transfer_id,
            epoch,
            self._leases.state(transfer_id) or LeaseState.WAITING,
            int(1000 * self._leases.left_s(transfer_id, now_s)),
            sending.ready_blocks if sending else 0,
            sending.sent_blocks if sending else 0,
        )
        self._sends.append(SendToConsumer(peer, info))

    def _expire(self, now_s: float) -> None:
        for transfer_id in self._leases.expire(now_s):
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
        return sending

    def _tell(
        self, sending: _Sending, message: ToConsumer, payload: NDArray[np.uint8] | None = None
    ) -> None:
        if sending.peer is not None:
            self._sends.append(SendToConsumer(sending.peer, message, payload))


def _mismatch(fetch: Fetch, sending: _Sending) -> FailureReason | None:
    """Return what of a fetch contradicts the ticket of the offer, or None."""
    ticket = sending.ticket
    if fetch.consumer != ticket.consumer:
        return FailureReason.AUDIENCE
    if fetch.epoch != ticket.epoch:
        return FailureReason.EPOCH
    in_range = fetch.start_block < fetch.end_block <= sending.num_blocks
    if fetch.layout_hash != ticket.layout_hash or not in_range:
        return FailureReason.LAYOUT
    return None
