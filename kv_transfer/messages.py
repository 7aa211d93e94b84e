"""Wire messages of the point-to-point connector, their codec and the chunk checksum.

Consumer to producer: ``Fetch``, ``Credit``, ``Renew``, ``Done``, ``Cancel``. Producer to consumer:
``Data``, ``Mapped`` and ``Agent`` (each followed by one payload frame), ``Staged``, ``LeaseInfo``,
``Fail``, ``Cancel``. Every message is idempotent: counts in it are absolute, so that loss,
repetition and reordering cannot corrupt a transfer. All of them count rows (see ``layout``). Pure;
owns no state.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kv_transfer.errors import FailureReason, WireError
from kv_transfer.keys import MAX_SEALED_BYTES
from kv_transfer.lease import LeaseState
from kv_transfer.ticket import Count, Name, TransferId

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 2048
"""Most bytes of a message without its payload; longer frames are refused before decoding."""

PayloadPath = Literal["inline", "shared", "nixl"]
"""Path of a transfer's payload. inline: behind its header, on the same connection. shared: none is
sent; the consumer reads the producer's memory, which it has mapped. nixl: the producer stages it,
and the consumer reads it over NIXL."""

SealedTicket = Annotated[bytes, Meta(min_length=1, max_length=MAX_SEALED_BYTES)]
_Hash64 = Annotated[int, Meta(ge=0)]
_NumRows = Annotated[int, Meta(gt=0, lt=1 << 31)]


class Fetch(
    Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True, kw_only=True, gc=False
):
    """Request to attach to a transfer (``attempt`` 0), or to repeat a range of it (``attempt`` 1).

    May arrive before the producer has learned of the transfer. Answered by ``LeaseInfo`` or
    ``Fail``.

    Attributes:
        version: ``PROTOCOL_VERSION`` of the sender.
        transfer_id: From the ticket.
        epoch: From the ticket.
        ticket: The sealed ticket: the only proof that the sender may have the data.
        consumer: Incarnation of the sender.
        start_row: First row wanted.
        end_row: One past the last row wanted.
        window: Rows that the sender has room for beyond those it consumed.
        path: Path that the payload should take.
        attempt: 0 to attach, 1 to repeat.
    """

    version: Count
    transfer_id: TransferId
    epoch: Count
    ticket: SealedTicket
    consumer: Name
    start_row: Count
    end_row: Count
    window: Count
    path: PayloadPath = "inline"
    attempt: Annotated[int, Meta(ge=0, le=1)] = 0


class Credit(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True, gc=False):
    """Credit of a consumer: rows consumed since ``start_row``, and rows that may still come."""

    transfer_id: TransferId
    epoch: Count
    consumed: Count
    window: Count


class Renew(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True, gc=False):
    """Renewal of the lease, which repeats the latest credit; answered by ``LeaseInfo``."""

    transfer_id: TransferId
    epoch: Count
    consumed: Count
    window: Count


class Done(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True, gc=False):
    """End of a transfer whose rows are all verified and written; repeated until acknowledged.

    Over the path ``shared`` the data counts only once that answer says ``done``: until then the
    producer may have freed the memory that was read.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        ticket: The sealed ticket, as this message may come before, or without, a FETCH.
    """

    transfer_id: TransferId
    epoch: Count
    ticket: SealedTicket


class Cancel(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True, gc=False):
    """End of a transfer without delivery. A consumer repeats it until ``LeaseInfo`` acknowledges.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        reason: Why.
        ticket: A consumer's sealed ticket, as this message may come before a FETCH; empty from a
            producer.
    """

    transfer_id: TransferId
    epoch: Count
    reason: FailureReason
    ticket: Annotated[bytes, Meta(max_length=MAX_SEALED_BYTES)] = b""


class Data(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True, gc=False):
    """Header of ``num_rows`` rows, which follow in one payload frame.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        incarnation: The producer process.
        first_row: Position of the first row in the request.
        num_rows: Rows in the payload.
        checksum: ``chunk_checksum`` of coordinates and payload.
    """

    transfer_id: TransferId
    epoch: Count
    incarnation: Name
    first_row: Count
    num_rows: _NumRows
    checksum: _Hash64


class Mapped(Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True, gc=False):
    """Announcement of ``num_rows`` rows in the producer's shared memory; path ``shared`` only.

    The payload frame holds the producer's blocks that cover the rows, as little-endian int64 block
    ids, and behind them, if the producer computes them, as many uint64 digests of these blocks.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        incarnation: The producer process.
        first_row: Position of the first row in the request.
        num_rows: Number of rows announced.
        lane: Lane of the producer that holds the blocks.
        checksum: ``chunk_checksum`` of coordinates and payload.
    """

    transfer_id: TransferId
    epoch: Count
    incarnation: Name
    first_row: Count
    num_rows: _NumRows
    lane: Annotated[int, Meta(ge=0, lt=1 << 16)]
    checksum: _Hash64


class Staged(Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True, gc=False):
    """Announcement of ``num_rows`` rows in the producer's staging memory; path ``nixl`` only.

    Once read there, they are the payload of a ``Data`` with the same coordinates and checksum.

    Attributes:
        data: Header of the rows.
        address: Address of the rows in the producer.
        num_bytes: Bytes of the rows.
    """

    data: Data
    address: Annotated[int, Meta(ge=0)]
    num_bytes: Annotated[int, Meta(gt=0, lt=1 << 40)]


class Agent(Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True, gc=False):
    """Introduction of the producer's NIXL agent, before the first ``Staged``; metadata follows."""

    incarnation: Name


class LeaseInfo(Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True, gc=False):
    """State of a transfer, as the producer's answer. Also acknowledges Done and Cancel.

    Attributes:
        transfer_id: From the ticket.
        epoch: From the ticket.
        state: State of the lease; ``waiting`` too when the producer does not know it yet.
        left_ms: Milliseconds until the lease ends unless renewed.
        ready_rows: Rows computed so far, counted from position 0.
        sent_rows: One past the last row sent.
    """

    transfer_id: TransferId
    epoch: Count
    state: LeaseState
    left_ms: Count
    ready_rows: Count
    sent_rows: Count


class Fail(Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True, gc=False):
    """Refusal or end of a transfer: the producer will send nothing (more) for it."""

    transfer_id: TransferId
    epoch: Count
    reason: FailureReason


ToProducer = Fetch | Credit | Renew | Done | Cancel
ToConsumer = Data | Mapped | LeaseInfo | Fail | Cancel
FromProducer = ToConsumer | Staged | Agent
"""Messages that arrive at a consumer; ``Staged`` and ``Agent`` are for its transport."""

_MessageT = TypeVar("_MessageT")

_encoder = msgspec.msgpack.Encoder()
_to_producer: msgspec.msgpack.Decoder[ToProducer] = msgspec.msgpack.Decoder(ToProducer)
_to_consumer: msgspec.msgpack.Decoder[FromProducer] = msgspec.msgpack.Decoder(FromProducer)


def encode(message: ToProducer | FromProducer) -> bytes:
    """Return the frame of a message; the payload of a ``Data`` is a frame of its own."""
    return _encoder.encode(message)


def decode_to_producer(frame: bytes) -> ToProducer:
    """Decode a frame from a consumer.

    Raises:
        WireError: When the frame is too long or no such message.
    """
    return _decode(_to_producer, frame)


def decode_to_consumer(frame: bytes) -> FromProducer:
    """Decode a frame from a producer.

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
        raise WireError(f"not a message of this protocol: {error}") from error


def chunk_checksum(
    transfer_id: bytes, epoch: int, first_row: int, num_rows: int, payload: NDArray[np.uint8]
) -> int:
    """Return xxh3 over a chunk's coordinates and bytes.

    The coordinates are part of it so that an intact chunk under another chunk's name fails. It
    detects damage on the way, not forgery: an attacker can compute it too.
    """
    digest = xxhash.xxh3_64(_encoder.encode((transfer_id, epoch, first_row, num_rows)))
    digest.update(payload.data)
    return digest.intdigest()


def encode_mapped(block_ids: NDArray[np.int64], digests: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the payload of a ``Mapped``; ``digests`` may be empty."""
    ids = block_ids.astype("<i8", copy=False).view(np.uint8)
    return np.concatenate([ids, digests.astype("<u8", copy=False).view(np.uint8)])


def decode_mapped(
    payload: NDArray[np.uint8], num_blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return block ids and digests of a ``Mapped`` for ``num_blocks`` blocks.

    Raises:
        WireError: When the payload has another size.
    """
    if payload.nbytes not in {8 * num_blocks, 16 * num_blocks}:
        raise WireError(
            f"a payload of {payload.nbytes} bytes for {num_blocks} blocks: not 8 or 16 a block"
        )
    words = np.frombuffer(payload.tobytes(), "<i8")
    return words[:num_blocks], words[num_blocks:].view("<u8")
