"""The wire messages of the point-to-point connector, their codec and the chunk checksum.

Consumer to producer: ``Fetch``, ``Credit``, ``Renew``, ``Done``, ``Cancel``. Producer to consumer:
``Data`` (followed by one payload frame), ``LeaseInfo``, ``Fail``, ``Cancel``. Every message is
idempotent: counts in it are absolute, so that loss, repetition and reordering cannot corrupt a
transfer. Pure; owns no state.
"""

from typing import Annotated, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kv_transfer.errors import FailureReason, WireError
from kv_transfer.lease import LeaseState
from kv_transfer.ticket import Count, Name, TransferId

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 2048
"""Most bytes of a message without its payload; longer frames are refused undecoded."""

_Hash64 = Annotated[int, Meta(ge=0)]


class Fetch(
    Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True, kw_only=True, gc=False
):
    """Attach to a transfer (``attempt`` 0), or ask for a range of it again (``attempt`` 1).

    May arrive before the producer has heard of the transfer. Answered by ``LeaseInfo`` or ``Fail``.

    Attributes:
        version: ``PROTOCOL_VERSION`` of the sender.
        transfer_id: From the ticket.
        epoch: From the ticket.
        incarnation: Producer process that the consumer believes it talks to.
        consumer: Incarnation of the sender.
        layout_hash: Layout of the sender.
        start_block: First block wanted, in blocks of the request from position 0.
        end_block: One past the last block wanted.
        window: Blocks that the sender has room for beyond those it consumed.
        attempt: 0 to attach, 1 to repeat.
    """

    version: Count
    transfer_id: TransferId
    epoch: Count
    incarnation: Name
    consumer: Name
    layout_hash: Name
    start_block: Count
    end_block: Count
    window: Count
    attempt: Annotated[int, Meta(ge=0, le=1)] = 0


class Credit(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True, gc=False):
    """Say how many blocks have been consumed since ``start_block`` and how many more may come."""

    transfer_id: TransferId
    epoch: Count
    consumed: Count
    window: Count


class Renew(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True, gc=False):
    """Keep the lease alive and repeat the latest credit; answered by ``LeaseInfo``."""

    transfer_id: TransferId
    epoch: Count
    consumed: Count
    window: Count


class Done(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True, gc=False):
    """Every block is verified and written; repeated until ``LeaseInfo`` says so."""

    transfer_id: TransferId
    epoch: Count
    consumer: Name


class Cancel(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True, gc=False):
    """The sender's end is over. A consumer repeats it until ``LeaseInfo`` acknowledges."""

    transfer_id: TransferId
    epoch: Count
    reason: FailureReason


class Data(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True, gc=False):
    """Header of ``num_blocks`` whole blocks, which follow in one payload frame.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        incarnation: The producer process.
        first_block: Position of the first block in the request.
        num_blocks: Blocks in the payload.
        checksum: ``chunk_checksum`` of coordinates and payload.
    """

    transfer_id: TransferId
    epoch: Count
    incarnation: Name
    first_block: Count
    num_blocks: Annotated[int, Meta(gt=0, lt=1 << 31)]
    checksum: _Hash64


class LeaseInfo(Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True, gc=False):
    """The producer's answer: where the transfer stands. Also acknowledges Done and Cancel.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        state: State of the lease; ``waiting`` too when the producer does not know it yet.
        left_ms: Milliseconds until the lease ends unless renewed.
        ready_blocks: Blocks computed so far, counted from position 0.
        sent_blocks: One past the last block sent.
    """

    transfer_id: TransferId
    epoch: Count
    state: LeaseState
    left_ms: Count
    ready_blocks: Count
    sent_blocks: Count


class Fail(Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True, gc=False):
    """The producer will send nothing (more) for this transfer."""

    transfer_id: TransferId
    epoch: Count
    reason: FailureReason


ToProducer = Fetch | Credit | Renew | Done | Cancel
ToConsumer = Data | LeaseInfo | Fail | Cancel

_MessageT = TypeVar("_MessageT")

_encoder = msgspec.msgpack.Encoder()
_to_producer: msgspec.msgpack.Decoder[ToProducer] = msgspec.msgpack.Decoder(ToProducer)
_to_consumer: msgspec.msgpack.Decoder[ToConsumer] = msgspec.msgpack.Decoder(ToConsumer)


def encode(message: ToProducer | ToConsumer) -> bytes:
    """Return the frame of a message (a ``Data`` payload is a frame of its own)."""
    return _encoder.encode(message)


def decode_to_producer(frame: bytes) -> ToProducer:
    """Decode what a consumer sent.

    Raises:
        WireError: When the frame is too long or no such message.
    """
    return _decode(_to_producer, frame)


def decode_to_consumer(frame: bytes) -> ToConsumer:
    """Decode what a producer sent.

    Raises:
        WireError: When the frame is too long or no such message.
    """
    return _decode(_to_consumer, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_MessageT], frame: bytes) -> _MessageT:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(frame)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"no message of this protocol: {error}") from error


def chunk_checksum(
    transfer_id: bytes, epoch: int, first_block: int, payload: NDArray[np.uint8]
) -> int:
    """Return xxh3 over a chunk's coordinates and bytes.

    Why: a chunk that arrives intact under another chunk's name must not pass.
    """
    digest = xxhash.xxh3_64(_encoder.encode((transfer_id, epoch, first_block, len(payload))))
    digest.update(payload.data)
    return digest.intdigest()
