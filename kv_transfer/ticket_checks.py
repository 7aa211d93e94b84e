"""Checks that a consumer's message shows a ticket, and that the ticket allows the message."""

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.layout import RowLayout
from kv_transfer.messages import PROTOCOL_VERSION, Cancel, Done, Fetch, PayloadPath, ToProducer
from kv_transfer.ticket import Ticket
from kv_transfer.transport import WireCounters


class TicketChecks:
    """Ticket checks of one producer, without state.

    Owner: a ``ProducerSessions``. Tickets expire by the wall clock in ``settings.unix_now_s``.

    Args:
        settings: The engine's.
        layout: Layout of its blocks.
        counters: Where bad tickets are counted.
        paths: Paths by which this engine can give its payload away.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: RowLayout,
        counters: WireCounters,
        paths: frozenset[PayloadPath],
    ) -> None:
        self._incarnation = settings.incarnation
        self._keys = settings.keys
        self._unix_now_s = settings.unix_now_s
        self._layout = layout
        self._counters = counters
        self._paths = paths

    def check_fetch(self, fetch: Fetch) -> Ticket | FailureReason | None:
        """Return the ticket, or the reason to refuse it; None without a valid seal.

        A sender without a valid seal gets no answer: an answer that is never read would stay in
        memory.
        """
        try:
            ticket = self._keys.unseal(fetch.ticket, self._unix_now_s())
        except TicketError as error:
            self._counters.num_bad_tickets += 1
            is_stranger = error.reason is FailureReason.AUTH
            return None if is_stranger else error.reason or FailureReason.EXPIRED
        reason = self._contradiction(fetch, ticket)
        self._counters.num_bad_tickets += reason is not None
        return reason or ticket

    def check_final(self, message: ToProducer) -> Ticket | None:
        """Return the ticket that a DONE or CANCEL shows, if it is for this transfer and engine."""
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

    def _contradiction(self, fetch: Fetch, ticket: Ticket) -> FailureReason | None:
        """Return the reason why a fetch asks for more than its ticket allows, or None."""
        if fetch.version != PROTOCOL_VERSION:
            return FailureReason.VERSION
        if ticket.producer_incarnation != self._incarnation:
            return FailureReason.INCARNATION
        if not ticket.consumer or ticket.consumer != fetch.consumer:
            return FailureReason.AUDIENCE
        if ticket.transfer_id != fetch.transfer_id:
            return FailureReason.AUTH
        if ticket.epoch != fetch.epoch:
            return FailureReason.EPOCH
        # The rows before the window are not kept: an engine without one must compute them.
        first_row = self._layout.first_row(ticket.num_tokens)
        end_row = self._layout.num_rows(ticket.num_tokens)
        is_in_range = first_row <= fetch.start_row < fetch.end_row <= end_row
        # Inline payload can replace any path except "shared", which needs shared memory here.
        is_possible = fetch.path != "shared" or "shared" in self._paths
        return None if is_in_range and is_possible else FailureReason.LAYOUT


def ticket_mismatch(shown: Ticket, offered: Ticket) -> FailureReason | None:
    """Return how a consumer's ticket contradicts the one that this engine was given, or None."""
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
