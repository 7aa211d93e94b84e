"""Ticket of a transfer: names it to both ends, and only the cluster's router can make one.

A ticket holds no block ids and no memory addresses. A producer resolves ``transfer_id`` to blocks
itself, so a stolen or stale ticket cannot name memory of another request. A ticket travels sealed,
as bytes: from the router to both engines, and from the consumer to the producer in its FETCH.
Pure; owns no state.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kv_transfer.errors import FailureReason, LayoutMismatchError, TicketError

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Endpoint = Annotated[str, Meta(pattern=r"^(tcp|ipc|shm)://\S+$", max_length=256)]

Role = Literal["producer", "consumer"]


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Permit for one consumer to fetch one request's KV from one producer.

    Attributes:
        transfer_id: 16 random bytes.
        request_id: The request whose KV moves; never used to address memory.
        epoch: Number of the request's attempt; messages of another epoch are dropped.
        producer_endpoints: Where the producer's connector listens: ``tcp://host:port``,
            ``ipc://@name`` and ``shm://name``. The consumer uses the ones it can reach.
        producer_incarnation: The process that must answer there.
        consumer: Incarnation of the only engine that may fetch (the audience). Empty while none is
            chosen: then the producer keeps the KV, and no engine may fetch it.
        num_tokens: Tokens whose KV moves, counted from position 0.
        layout_hash: ``KVLayout.content_hash()`` of the producer.
        expires_ms: Unix time in milliseconds after which the ticket is refused.
    """

    transfer_id: TransferId
    request_id: Annotated[str, Meta(min_length=1, max_length=256)]
    epoch: Count
    producer_endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=3)]
    producer_incarnation: Name
    consumer: Annotated[str, Meta(max_length=128)]
    num_tokens: Annotated[int, Meta(gt=0, lt=1 << 31)]
    layout_hash: Name
    expires_ms: Annotated[int, Meta(ge=0, lt=1 << 53)]


def check_ticket(ticket: Ticket, incarnation: str, layout_hashes: frozenset[str]) -> Role:
    """Check that a ticket names this engine and an acceptable layout, and return the engine's role.

    Args:
        ticket: Ticket from the router.
        incarnation: This engine process.
        layout_hashes: Content hashes of the layouts that this engine accepts, its own included.

    Returns:
        The end of the transfer that this engine is.

    Raises:
        TicketError: When this engine is neither the producer nor the audience (reason
            ``incarnation``), or is both (reason ``audience``).
        LayoutMismatchError: When the KV has another layout.
    """
    is_producer = ticket.producer_incarnation == incarnation
    is_consumer = ticket.consumer == incarnation
    if is_producer == is_consumer:
        reason = FailureReason.AUDIENCE if is_producer else FailureReason.INCARNATION
        raise TicketError(
            f"the ticket of request {ticket.request_id} is from {ticket.producer_incarnation} to "
            f"{ticket.consumer or 'no engine yet'}, and this engine is {incarnation}: mint a "
            f"ticket from fresh snapshots",
            reason,
        )
    if ticket.layout_hash not in layout_hashes:
        raise LayoutMismatchError(
            f"the ticket of request {ticket.request_id} is for KV layout {ticket.layout_hash}, and "
            f"this engine accepts {sorted(layout_hashes)}: both pools must serve the same model "
            f"with the same rope order and KV groups (one kv_connector, one kind of platform), and "
            f"a dtype that kv_accept_dtypes of the decode pool allows"
        )
    return "producer" if is_producer else "consumer"
