"""Name one transfer to both of its ends, and check that an end is one of them.

A ticket holds no block ids and no memory addresses: a producer resolves ``transfer_id`` to blocks
itself, so a stolen or stale ticket cannot name somebody else's memory. Pure; owns no state.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kv_transfer.errors import FailureReason, LayoutMismatchError, TicketError
from kv_transfer.layout import KVLayout

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]

Role = Literal["producer", "consumer"]


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Permit for one consumer to fetch one request's KV from one producer.

    Attributes:
        transfer_id: 16 random bytes; whoever knows them may speak for the transfer.
        request_id: The request whose KV moves; never used to address memory.
        epoch: Counts the attempts of the request; messages of another epoch are dropped.
        producer_endpoint: ``tcp://host:port`` or ``ipc://path`` of the producer's connector.
        producer_incarnation: The process that must answer there.
        consumer: Incarnation of the only engine that may fetch (the audience).
        num_tokens: Tokens whose KV moves, counted from position 0.
        layout_hash: ``KVLayout.layout_hash()`` that both ends must have.
    """

    transfer_id: TransferId
    request_id: Annotated[str, Meta(min_length=1, max_length=512)]
    epoch: Count
    producer_endpoint: Annotated[str, Meta(pattern=r"^(tcp|ipc)://\S+$", max_length=256)]
    producer_incarnation: Name
    consumer: Name
    num_tokens: Annotated[int, Meta(gt=0, lt=1 << 31)]
    layout_hash: Name


def check_ticket(ticket: Ticket, incarnation: str, layout: KVLayout) -> Role:
    """Check that a ticket names this engine and its layout, and tell on which end.

    Args:
        ticket: What the router minted.
        incarnation: This engine process.
        layout: This engine's KV layout.

    Returns:
        The end of the transfer that this engine is.

    Raises:
        TicketError: When this engine is neither the producer (reason ``incarnation``) nor the
            audience, or is both (reason ``audience``).
        LayoutMismatchError: When the ticket was minted for another layout.
    """
    is_producer = ticket.producer_incarnation == incarnation
    is_consumer = ticket.consumer == incarnation
    if is_producer == is_consumer:
        reason = FailureReason.AUDIENCE if is_producer else FailureReason.INCARNATION
        raise TicketError(
            f"ticket of request {ticket.request_id} is from {ticket.producer_incarnation} to "
            f"{ticket.consumer}; this engine is {incarnation}: mint a ticket from fresh snapshots",
            reason,
        )
    if ticket.layout_hash != layout.layout_hash():
        raise LayoutMismatchError(
            f"ticket of request {ticket.request_id} is for KV layout {ticket.layout_hash}; this "
            f"engine has {layout.layout_hash()}: both pools must serve the same model, dtype and "
            f"block size"
        )
    return "producer" if is_producer else "consumer"
