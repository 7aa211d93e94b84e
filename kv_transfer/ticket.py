"""Name one transfer to both of its ends, sealed so that only the cluster's router can have done it.

A ticket holds no block ids and no memory addresses: a producer resolves ``transfer_id`` to blocks
itself, so a stolen or stale ticket cannot name somebody else's memory. It travels sealed, as bytes:
from the router to both engines, and from the consumer to the producer in its FETCH.
Pure; owns no state.
"""

import hmac
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kv_transfer.errors import FailureReason, LayoutMismatchError, TicketError

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Endpoint = Annotated[str, Meta(pattern=r"^(tcp|ipc|shm)://\S+$", max_length=256)]

Role = Literal["producer", "consumer"]

MAX_SEALED_BYTES = 1024
"""Most bytes of a sealed ticket; longer ones are refused unread."""

CLOCK_TOLERANCE_S = 30.0
"""How far the clocks of two hosts may be apart without a ticket being refused for its age."""

MIN_KEY_BYTES = 16

_MAC_BYTES = 32
_CONTEXT = b"ttserve kv ticket 2\0"
"""Tells this use of a key from any other; the number rises with the form of ``Ticket``."""


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Permit for one consumer to fetch one request's KV from one producer.

    Attributes:
        transfer_id: 16 random bytes.
        request_id: The request whose KV moves; never used to address memory.
        epoch: Counts the attempts of the request; messages of another epoch are dropped.
        producer_endpoints: Where the producer's connector listens: ``tcp://host:port``,
            ``ipc://@name`` and ``shm://name``, of which the consumer takes what it can reach.
        producer_incarnation: The process that must answer there.
        consumer: Incarnation of the only engine that may fetch (the audience). Empty while it is
            not chosen: such a ticket is good for the producer to keep the KV, not to fetch it.
        num_tokens: Tokens whose KV moves, counted from position 0.
        layout_hash: ``KVLayout.content_hash()`` of the producer.
        expires_ms: Unix time in milliseconds after which nobody takes the ticket any more.
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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


class KeyRing(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The secrets that seal tickets: the first one seals, each of them opens.

    To rotate, add the new secret behind the old one everywhere, then put it first, then take the
    old one away. An empty ring opens nothing.

    Attributes:
        secrets: At least 16 bytes each.
    """

    secrets: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        """Refuse secrets that can be guessed.

        Raises:
            ValueError: When one is too short; it is not shown.
        """
        if any(len(secret) < MIN_KEY_BYTES for secret in self.secrets):
            raise ValueError(f"a ticket key must have at least {MIN_KEY_BYTES} bytes")

    def __repr__(self) -> str:
        """Show how many secrets there are, and none of them."""
        return f"KeyRing({len(self.secrets)} secrets)"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        """Show no secret where another library asks for the fields."""
        return [("num_secrets", len(self.secrets))]

    def seal(self, ticket: Ticket) -> bytes:
        """Return the ticket with proof that a holder of the first secret made it.

        Raises:
            TicketError: When there is no secret, or the ticket is too long to travel.
        """
        if not self.secrets:
            raise TicketError("no ticket key: set kv_keys on the router and on every engine")
        body = _encoder.encode(ticket)
        if _MAC_BYTES + len(body) > MAX_SEALED_BYTES:
            raise TicketError(
                f"the ticket of request {ticket.request_id[:64]} has {len(body)} bytes; the limit "
                f"is {MAX_SEALED_BYTES - _MAC_BYTES}: use shorter request ids or endpoints"
            )
        return _mac(self.secrets[0], body) + body

    def unseal(self, sealed: bytes, now_unix_s: float) -> Ticket:
        """Check a sealed ticket and return it; nothing is decoded before the proof holds.

        Args:
            sealed: What ``seal`` returned, perhaps.
            now_unix_s: Wall clock of this host.

        Raises:
            TicketError: With reason ``auth`` when no secret here made it, or it is no ticket of
                this version; with ``expired`` when it is too old.
        """
        mac, body = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if len(sealed) > MAX_SEALED_BYTES or not any(
            hmac.compare_digest(mac, _mac(secret, body)) for secret in self.secrets
        ):
            raise TicketError(
                "the ticket was sealed with none of this engine's keys: give the router and all "
                "engines the same kv_keys",
                FailureReason.AUTH,
            )
        try:
            ticket = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TicketError(f"no ticket of this version: {error}", FailureReason.AUTH) from error
        if now_unix_s > ticket.expires_ms / 1000 + CLOCK_TOLERANCE_S:
            raise TicketError(
                f"the ticket of request {ticket.request_id} is too old: mint one per transfer, and "
                f"keep the hosts' clocks within {CLOCK_TOLERANCE_S:g} s",
                FailureReason.EXPIRED,
            )
        return ticket


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, _CONTEXT + body, "sha256")


def check_ticket(ticket: Ticket, incarnation: str, layout_hashes: frozenset[str]) -> Role:
    """Check that a ticket names this engine and a layout of its, and tell on which end.

    Args:
        ticket: What the router minted.
        incarnation: This engine process.
        layout_hashes: Contents that this engine can take; of its own KV among them.

    Returns:
        The end of the transfer that this engine is.

    Raises:
        TicketError: When this engine is neither the producer (reason ``incarnation``) nor the
            audience, or is both (reason ``audience``).
        LayoutMismatchError: When the KV has another layout.
    """
    is_producer = ticket.producer_incarnation == incarnation
    is_consumer = ticket.consumer == incarnation
    if is_producer == is_consumer:
        reason = FailureReason.AUDIENCE if is_producer else FailureReason.INCARNATION
        raise TicketError(
            f"ticket of request {ticket.request_id} is from {ticket.producer_incarnation} to "
            f"{ticket.consumer or 'nobody yet'}; this engine is {incarnation}: mint a ticket from "
            f"fresh snapshots",
            reason,
        )
    if ticket.layout_hash not in layout_hashes:
        raise LayoutMismatchError(
            f"ticket of request {ticket.request_id} is for KV layout {ticket.layout_hash}; this "
            f"engine takes {sorted(layout_hashes)}: both pools must serve the same model with the "
            f"same rope order and a dtype that kv_accept_dtypes of the decode pool allows"
        )
    return "producer" if is_producer else "consumer"
