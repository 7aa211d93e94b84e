"""Producer's half of the protocol: answer consumers, as a state machine without I/O.

Messages, commands and ``now_s`` come in; messages to send and events for the core go out through
``take_sends`` and ``take_events``. Every chunk is sent only if its lease is live at that moment. A
transfer belongs to the connection that first showed its ticket; messages about it from other
connections are refused.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import FailureReason
from kv_transfer.layout import RowLayout
from kv_transfer.lease import LeaseState, LeaseTable
from kv_transfer.messages import (
    Cancel,
    Credit,
    Done,
    Fail,
    Fetch,
    LeaseInfo,
    PayloadPath,
    Renew,
    ToConsumer,
    ToProducer,
)
from kv_transfer.parked import Parked, ParkedFetches
from kv_transfer.sending import Sending
from kv_transfer.ticket import Ticket
from kv_transfer.ticket_checks import TicketChecks, ticket_mismatch
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

_REASON = {
    LeaseState.DONE: FailureReason.UNKNOWN_TRANSFER,
    LeaseState.EXPIRED: FailureReason.EXPIRED,
    LeaseState.CANCELLED: FailureReason.CANCELLED,
}


class SendToConsumer(NamedTuple):
    """Message for the connection of a consumer, with the payload of a ``Data``."""

    peer: bytes
    message: ToConsumer
    payload: NDArray[np.uint8] | None = None


class ProducerSessions:
    """Transfers that this engine produces.

    Owner: the transport's thread.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: RowLayout,
        counters: WireCounters,
        paths: frozenset[PayloadPath],
    ) -> None:
        config = settings.config
        self._paths = paths
        self._incarnation = settings.incarnation
        self._checks = TicketChecks(settings, layout, counters, paths)
        self._layout = layout
        self._window = config.window_rows(layout.row_bytes)
        self._rendezvous_s = config.rendezvous_s
        self._probe_s = config.probe_s
        self._counters = counters
        self._leases = LeaseTable(config)
        self._sending: dict[bytes, Sending] = {}
        self._parked = ParkedFetches()
        self._sends: list[SendToConsumer] = []
        self._events: list[Event] = []

    def take_sends(self) -> list[SendToConsumer]:
        """Return and clear the messages to send, in order."""
        sends, self._sends = self._sends, []
        return sends

    def take_events(self) -> list[Event]:
        """Return and clear the events for the core, in order."""
        events, self._events = self._events, []
        return events

    # ---- commands

    def offer(self, ticket: Ticket, now_s: float) -> None:
        """Grant a lease, and attach the consumer if its fetch is parked."""
        if not self._leases.grant(ticket.transfer_id, now_s):
            self._events.append(SendFailed(ticket.transfer_id, FailureReason.CANCELLED))
            return
        self._counters.count_lease("granted")
        num_rows = self._layout.num_rows(ticket.num_tokens)
        self._sending[ticket.transfer_id] = Sending(ticket, num_rows)
        parked = self._parked.pop_fetch(ticket.transfer_id)
        if parked is not None:
            self._on_valid_fetch(parked.peer, parked.fetch, parked.ticket, now_s)

    def ready(self, transfer_id: bytes, num_rows: int, now_s: float) -> None:
        """Record how many rows are computed; consumers learn it with their next renewal."""
        sending = self._sending.get(transfer_id)
        if sending is not None:
            sending.ready_rows = num_rows
            self._watch_stall(sending, now_s)

    def send_chunk(self, chunk: Chunk | MappedChunk, now_s: float) -> None:
        """Send rows if the lease is live; a dead one answers ``expired`` instead."""
        if not self._leases.is_live(chunk.transfer_id, now_s):
            self._expire(now_s)
            return
        sending = self._sending[chunk.transfer_id]
        header = sending.header_of(self._incarnation, chunk)
        if header is not None:
            self._tell(sending, header, chunk.payload)

    def cancel(self, transfer_id: bytes) -> None:
        """End a transfer at this engine's request."""
        sending = self._end(transfer_id, LeaseState.CANCELLED)
        if sending is not None:
            epoch = sending.ticket.epoch
            self._tell(sending, Cancel(transfer_id, epoch, FailureReason.CANCELLED))

    # ---- messages and deadlines

    def on_message(self, peer: bytes, message: ToProducer, now_s: float) -> None:
        """Handle one message; ``peer`` is the connection that it came over."""
        if isinstance(message, Fetch):
            self._on_fetch(peer, message, now_s)
            return
        if self._leases.state(message.transfer_id) is None and not self._end_early(message):
            self._counters.num_unknown_ids += 1
            return
        sending = self._sending.get(message.transfer_id)
        if sending is not None:
            if message.epoch != sending.ticket.epoch or not self._may_speak(peer, sending, message):
                self._counters.num_unknown_ids += 1
                return
            sending.probe_s = now_s + 2 * self._probe_s
            self._on_live(sending, message, now_s)
        if not isinstance(message, Credit):
            self._answer(peer, message.transfer_id, message.epoch, now_s)

    def on_peer_lost(self, peer: bytes) -> None:
        """End the transfers of a consumer whose connection is gone."""
        lost = [tid for tid, sending in self._sending.items() if sending.peer == peer]
        for transfer_id in lost:
            self._fail(transfer_id, FailureReason.PEER_DEAD)

    def tick(self, now_s: float) -> None:
        """Handle deadlines, and address silent consumers: a send to a dead one fails."""
        self._expire(now_s)
        for transfer_id, sending in self._sending.items():
            if sending.peer is not None and now_s >= sending.probe_s:
                sending.probe_s = now_s + self._probe_s
                self._answer(sending.peer, transfer_id, sending.ticket.epoch, now_s)
        self._counters.num_unknown_ids += self._parked.expire(now_s)

    def next_deadline_s(self) -> float | None:
        """Return the time of the next ``tick``, or None."""
        deadlines_s = [x.probe_s for x in self._sending.values() if x.peer is not None]
        others_s = (self._parked.next_deadline_s(), self._leases.next_deadline_s())
        deadlines_s += [deadline_s for deadline_s in others_s if deadline_s is not None]
        return min(deadlines_s, default=None)

    @property
    def num_open(self) -> int:
        """Transfers that were offered and have not ended."""
        return len(self._sending)

    def consumed_row(self, transfer_id: bytes) -> int | None:
        """Return one past the last row that the consumer has released; None once it has ended."""
        sending = self._sending.get(transfer_id)
        return None if sending is None else sending.consumed_row

    @property
    def peers(self) -> set[bytes]:
        """Connections that own a transfer."""
        return {x.peer for x in self._sending.values() if x.peer is not None}

    def path(self, transfer_id: bytes) -> PayloadPath:
        """Return the path of a transfer's payload."""
        sending = self._sending.get(transfer_id)
        return "inline" if sending is None else sending.path

    def left_s(self, transfer_id: bytes, now_s: float) -> float:
        """Return the seconds until a lease ends unless renewed; safe on any thread."""
        return self._leases.left_s(transfer_id, now_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        self._leases.check_invariants()
        for transfer_id, sending in self._sending.items():
            assert self._leases.state(transfer_id) in {LeaseState.WAITING, LeaseState.SERVING}
            sending.check_invariants()
        assert not self._sending.keys() & self._parked.transfer_ids
        self._parked.check_invariants()

    # ---- handling of messages

    def _on_fetch(self, peer: bytes, fetch: Fetch, now_s: float) -> None:
        sending = self._sending.get(fetch.transfer_id)
        if sending is not None and (sending.peer, sending.ticket.epoch) == (peer, fetch.epoch):
            # Its ticket was checked when it attached; a live lease outlasts the ticket's age.
            self._on_valid_fetch(peer, fetch, sending.ticket, now_s)
            return
        shown = self._checks.check_fetch(fetch)
        if isinstance(shown, Ticket):
            self._on_valid_fetch(peer, fetch, shown, now_s)
        elif shown is not None:
            self._refuse(peer, fetch, shown)

    def _on_valid_fetch(self, peer: bytes, fetch: Fetch, ticket: Ticket, now_s: float) -> None:
        state = self._leases.state(fetch.transfer_id)
        sending = self._sending.get(fetch.transfer_id)
        if state is None:
            self._park(peer, fetch, ticket, now_s)
        elif sending is None:
            self._counters.count_lease("late_fetch")
            self._refuse(peer, fetch, _REASON[state])
        elif (reason := ticket_mismatch(ticket, sending.ticket)) is not None:
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, reason)
        elif sending.peer not in {None, peer}:
            # A replay: the connection that attached first keeps the transfer.
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, FailureReason.AUDIENCE)
        elif sending.peer is None and fetch.attempt:
            # A repetition before the first fetch: reordered or made up.
            self._counters.num_unknown_ids += 1
        elif self._leases.attach(fetch.transfer_id, now_s):
            self._attach(sending, peer, fetch, now_s)
            self._answer(peer, fetch.transfer_id, fetch.epoch, now_s)
        else:
            self._expire(now_s)
            self._counters.count_lease("late_fetch")
            self._refuse(peer, fetch, FailureReason.EXPIRED)

    def _attach(self, sending: Sending, peer: bytes, fetch: Fetch, now_s: float) -> None:
        if sending.peer is None:
            path = fetch.path if fetch.path in self._paths else "inline"
            sending.attach(peer, path, fetch.start_row)
        sending.probe_s = now_s + 2 * self._probe_s
        if fetch.attempt:
            self._repeat(sending, fetch, now_s)
        else:
            self._grant(sending, 0, fetch.window, now_s)

    def _park(self, peer: bytes, fetch: Fetch, ticket: Ticket, now_s: float) -> None:
        """Keep a fetch for a transfer that the router has not announced to this engine yet."""
        if self._parked.park(Parked(peer, fetch, ticket, now_s + self._rendezvous_s)):
            self._answer(peer, fetch.transfer_id, fetch.epoch, now_s)
        else:
            self._counters.num_bad_tickets += 1
            self._refuse(peer, fetch, FailureReason.AUDIENCE)

    def _refuse(self, peer: bytes, fetch: Fetch, reason: FailureReason) -> None:
        self._sends.append(SendToConsumer(peer, Fail(fetch.transfer_id, fetch.epoch, reason)))

    def _repeat(self, sending: Sending, fetch: Fetch, now_s: float) -> None:
        rows = sending.repeat(fetch, now_s, self._probe_s / 2)
        if rows is not None:
            start, end = rows
            self._counters.num_retransmits += 1
            self._events.append(Repeat(fetch.transfer_id, start, end - start))

    def _on_live(self, sending: Sending, message: ToProducer, now_s: float) -> None:
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

    def _may_speak(self, peer: bytes, sending: Sending, message: ToProducer) -> bool:
        """Return whether a message is from the transfer's consumer.

        Once attached, the consumer is known by its connection; before that, by its ticket.
        """
        if sending.peer is not None:
            return sending.peer == peer
        ticket = self._checks.check_final(message)
        return ticket is not None and ticket_mismatch(ticket, sending.ticket) is None

    def _end_early(self, message: ToProducer) -> bool:
        """Remember the end of a transfer that this engine has not learned of yet."""
        if self._checks.check_final(message) is None:
            return False
        self._parked.pop_fetch(message.transfer_id)
        state = LeaseState.DONE if isinstance(message, Done) else LeaseState.CANCELLED
        return self._leases.end_lease(message.transfer_id, state)

    def _grant(self, sending: Sending, consumed: int, window: int, now_s: float) -> None:
        if sending.grant(consumed, window, self._window):
            self._events.append(
                Granted(sending.ticket.transfer_id, sending.start_row, sending.limit, sending.path)
            )
        self._watch_stall(sending, now_s)

    def _watch_stall(self, sending: Sending, now_s: float) -> None:
        self._counters.credit_stalled_s += sending.measure_stall_s(now_s)

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

    def _end(self, transfer_id: bytes, state: LeaseState) -> Sending | None:
        sending = self._sending.pop(transfer_id, None)
        if sending is not None:
            self._leases.end_lease(transfer_id, state)
            self._counters.count_lease(state.value)
        return sending

    def _tell(
        self, sending: Sending, message: ToConsumer, payload: NDArray[np.uint8] | None = None
    ) -> None:
        if sending.peer is not None:
            self._sends.append(SendToConsumer(sending.peer, message, payload))
