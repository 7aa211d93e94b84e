"""Failure reasons of transfers, and the exceptions of this package.

A *reason* travels: in results, on the wire, as a metric label. An *exception* tells the caller that
an argument cannot be used. A transfer that fails after it has started never raises. It is reported
once, with its reason, in ``TransferResults.failed``.
"""

from enum import Enum


class FailureReason(str, Enum):
    """Reason why a transfer ended without delivery; the value is metric label and wire form."""

    PEER_DEAD = "peer_dead"
    """The connection to the other engine broke, or never came up."""
    STALLED = "stalled"
    """The other engine is connected and was silent for longer than its deadline."""
    EXPIRED = "expired"
    """The producer's lease ended: no consumer fetched, or the consumer stopped renewing."""
    CHECKSUM = "checksum"
    """A chunk arrived corrupted twice."""
    LAYOUT = "layout"
    """The two ends lay out a KV block differently."""
    CANCELLED = "cancelled"
    """One of the two engines ended the transfer."""
    UNKNOWN_TRANSFER = "unknown_transfer"
    """The producer did not learn of the transfer within the rendezvous deadline."""
    VERSION = "version"
    """The two ends speak different versions of the protocol."""
    INCARNATION = "incarnation"
    """The process at the ticket's endpoint is not the one the ticket was minted for."""
    AUDIENCE = "audience"
    """The ticket was minted for another consumer."""
    AUTH = "auth"
    """A ticket was not sealed with a secret of this deployment."""
    CAPACITY = "capacity"
    """No buffer had room for the data."""
    STORE = "store"
    """The pool did not deliver a value that it had reported as present."""
    EPOCH = "epoch"
    """The message belongs to another attempt of the same transfer."""


class KVTransferError(Exception):
    """Base of every exception that this package raises on purpose."""


class InvalidLayoutError(KVTransferError, ValueError):
    """KV layout that cannot be transferred."""


class AddressError(KVTransferError, ValueError):
    """Address that an engine must not listen on; the text says which one to give."""


class ServerKeyError(KVTransferError):
    """Missing secret, or a peer that proves none which this process has; says what to do."""


class TransferError(KVTransferError):
    """Wrong use of a connector, or a connector that can no longer work.

    Attributes:
        reason: The failure reason where one applies, else None.
    """

    def __init__(self, message: str, reason: FailureReason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class SharedMemoryError(TransferError):
    """Shortage of shared memory; the text says how much was asked for and how much there is."""


class TicketError(TransferError):
    """Ticket that this engine cannot use; ``reason`` says which check failed."""


class LayoutMismatchError(TicketError):
    """Ticket for another KV layout than this engine's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureReason.LAYOUT)


class WireError(KVTransferError):
    """Bytes from a peer that are no message of this protocol; they are counted and ignored."""
