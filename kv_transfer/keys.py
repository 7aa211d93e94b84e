"""Secrets of a deployment, and the seals and keys made from them.

Pure; owns no state.
"""

import hmac

import msgspec
from msgspec import Struct

from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.ticket import Ticket

MAX_SEALED_BYTES = 1024
"""Most bytes of a sealed ticket; longer ones are refused unread."""

CLOCK_TOLERANCE_S = 30.0
"""Tolerated difference between the clocks of two hosts when the age of a ticket is checked."""

MIN_KEY_BYTES = 16
NEW_KEY_BYTES = 32
"""Length of a secret or key that a process generates."""

_MAC_BYTES = 32
_CONTEXT = b"ttserve kv ticket 2\0"
"""Separates this use of a secret from others; the number rises with the form of ``Ticket``."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


class KeyRing(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Secrets that a deployment's processes share: the first one seals, each of them opens.

    To rotate, add the new secret behind the old one everywhere, then put it first, then remove the
    old one. An empty ring opens nothing.

    Attributes:
        secrets: At least 16 bytes each.
    """

    secrets: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        """Refuse secrets that can be guessed.

        Raises:
            ValueError: When one is too short; the text does not show it.
        """
        if any(len(secret) < MIN_KEY_BYTES for secret in self.secrets):
            raise ValueError(f"a secret must have at least {MIN_KEY_BYTES} bytes")

    def __repr__(self) -> str:
        """Show the number of secrets and none of them."""
        return f"KeyRing({len(self.secrets)} secrets)"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        """Hide the secrets from libraries that ask for the fields, such as rich."""
        return [("num_secrets", len(self.secrets))]

    def seal(self, ticket: Ticket) -> bytes:
        """Return the ticket with proof that a holder of the first secret made it.

        Raises:
            TicketError: When there is no secret, or the ticket is too long to travel.
        """
        if not self.secrets:
            raise TicketError("cannot seal a ticket without a secret: set key_file")
        body = _encoder.encode(ticket)
        if _MAC_BYTES + len(body) > MAX_SEALED_BYTES:
            raise TicketError(
                f"the ticket of request {ticket.request_id[:64]} has {len(body)} bytes; the limit "
                f"is {MAX_SEALED_BYTES - _MAC_BYTES}: use shorter request ids or endpoints"
            )
        return _mac(self.secrets[0], body) + body

    def unseal(self, sealed: bytes, now_unix_s: float) -> Ticket:
        """Check a sealed ticket and return it; nothing is decoded before the seal holds.

        Args:
            sealed: Bytes that claim to be a sealed ticket.
            now_unix_s: Wall clock of this host.

        Raises:
            TicketError: With reason ``auth`` when no secret here made the seal, or it is no ticket
                of this version; with ``expired`` when it is too old.
        """
        mac, body = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if len(sealed) > MAX_SEALED_BYTES or not any(
            hmac.compare_digest(mac, _mac(secret, body)) for secret in self.secrets
        ):
            raise TicketError(
                "the ticket was sealed with none of this engine's secrets: give the router and all "
                "engines the same key_file",
                FailureReason.AUTH,
            )
        try:
            ticket = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TicketError(f"no ticket of this version: {error}", FailureReason.AUTH) from error
        if now_unix_s > ticket.expires_ms / 1000 + CLOCK_TOLERANCE_S:
            raise TicketError(
                f"the ticket of request {ticket.request_id} has expired: mint one per transfer and "
                f"keep the hosts' clocks within {CLOCK_TOLERANCE_S:g} s",
                FailureReason.EXPIRED,
            )
        return ticket

    def derive(self, purpose: str) -> tuple[bytes, ...]:
        """Return a key of 32 bytes for another use than tickets, one for each secret, in order.

        Args:
            purpose: Use of the key; the keys of one purpose reveal nothing about those of another.
        """
        context = b"ttserve key for " + purpose.encode() + b"\0"
        return tuple(hmac.digest(secret, context, "sha256") for secret in self.secrets)


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, _CONTEXT + body, "sha256")
