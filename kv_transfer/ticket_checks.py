"""Whether a consumer's message shows a ticket, and one for what it wants."""

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.layout import KVLayout
from kv_transfer.messages import PROTOCOL_VERSION, Cancel, Done, Fetch, PayloadPath, ToProducer
from kv_transfer.ticket import Ticket
from kv_transfer.transport import WireCounters


class TicketChecks:
    """Of one producer; it keeps nothing. Owner: a ``ProducerSessions``, whose clock tells the age.

    Args:
        settings: The engine's.
        layout: Of its blocks.
        counters: Where bad tickets are counted.
        paths: How this engine can give its payload away.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: KVLayout,
        counters: WireCounters,
        paths: frozenset[PayloadPath],
    ) -> None:
        self._incarnation = settings.incarnation
        self._keys = settings.keys
        self._unix_now_s = settings.unix_now_s
        self._layout = layout
        self._counters = counters
        self._paths = paths

    def of_fetch(self, fetch: Fetch) -> Ticket | FailureReason | None:
        """Return the ticket, or why it is refused; None for strangers, who get no answer.

        An answer to these would wait in memory for one who never reads it.
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

    def of_last_word(self, message: ToProducer) -> Ticket | None:
        """Return what a last word shows, if it is a ticket of this transfer and engine."""
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
        """Return what of a fetch its own ticket does not allow, or None."""
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
        is_in_range = fetch.start_row < fetch.end_row <= self._layout.num_rows(ticket.num_tokens)
        # Payload that travels can replace every path but one: memory that is not shared.
        is_possible = fetch.path != "shared" or "shared" in self._paths
        return None if is_in_range and is_possible else FailureReason.LAYOUT


def ticket_mismatch(shown: Ticket, offered: Ticket) -> FailureReason | None:
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
