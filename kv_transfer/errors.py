"""Name what can go wrong in a transfer: failure reasons for results, exceptions for callers.

A *reason* travels (in results, on the wire, as a metric label); an *exception* tells the caller of
this package that what it passed in cannot be used. A transfer that fails after it has started is
never an exception: it is reported once, with its reason, in ``TransferResults.failed``.
"""

from enum import Enum


class FailureReason(str, Enum):
    """Why a transfer ended without delivery. The value is the metric label and the wire form."""

    PEER_DEAD = "peer_dead"
    """The connection to the other engine broke, or never came up."""
    STALLED = "stalled"
    """The other engine is connected and silent for longer than its deadline."""
    EXPIRED = "expired"
    """The producer's lease ended: nobody fetched, or nobody renewed."""
    CHECKSUM = "checksum"
    """A chunk arrived corrupted, and so did its repetition."""
    LAYOUT = "layout"
    """The two ends lay out a KV block differently."""
    CANCELLED = "cancelled"
    """One of the two engines gave the request up."""
    UNKNOWN_TRANSFER = "unknown_transfer"
    """The producer never heard of the transfer within the rendezvous deadline."""
    VERSION = "version"
    """The two ends speak different versions of the protocol."""
    INCARNATION = "incarnation"
    """The process at the ticket's endpoint is not the one the ticket was minted for."""
    AUDIENCE = "audience"
    """The ticket was minted for another consumer."""
    AUTH = "auth"
    """A ticket was not sealed by this cluster's router."""
    CAPACITY = "capacity"
    """There was no room for the data on the way."""
    STORE = "store"
    """The pool lost, or could not give, what it said it had."""
    EPOCH = "epoch"
    """The message belongs to another attempt of the same transfer."""


class KVTransferError(Exception):
    """Base of every exception that this package raises on purpose."""


class InvalidLayoutError(KVTransferError, ValueError):
    """A KV cache is laid out in a way that cannot be transferred."""


class AddressError(KVTransferError, ValueError):
    """Nobody may listen on such an address; says which one to give."""


class ServerKeyError(KVTransferError):
    """Two processes have no secret in common, or one of them has none; says what to do."""


class TransferError(KVTransferError):
    """The connector was used wrongly or can no longer work.

    Attributes:
        reason: The failure reason where one applies, else None.
    """

    def __init__(self, message: str, reason: FailureReason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class SharedMemoryError(TransferError):
    """Memory for processes to share is short: says how much was asked for, how much there is."""


class TicketError(TransferError):
    """A ticket is not usable by this engine; ``reason`` says which check failed."""


class LayoutMismatchError(TicketError):
    """A ticket names another KV layout than this engine's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureReason.LAYOUT)


class WireError(KVTransferError):
    """Bytes from a peer are no message of this protocol. They are counted and ignored."""
