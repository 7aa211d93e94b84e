"""Messages between a client and the server of the node's store, and the name of their socket.

A connection is an abstract Unix socket (SOCK_SEQPACKET: one packet, one message). The client asks,
the server answers, one question at a time; ``Greeting`` comes first. The answer to it carries the
file descriptor of the slab. Pure; owns no state.
"""

import hashlib
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from kv_transfer.errors import WireError
from kv_transfer.store import MAX_KEY_BYTES, PutOutcome

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 17
"""Most bytes of a message; below the kernel's usual limit for one packet."""
MAX_KEYS = 1024
"""Most keys in one question."""

_Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
_Keys = Annotated[tuple[_Key, ...], Meta(max_length=MAX_KEYS)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Greeting(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Request for the slab; answered by ``Welcome``."""

    version: _Count


class NumPresent(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Question how many keys, from the first on, are stored; answered by ``Count``."""

    keys: _Keys


class Get(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Request for leases; answered by ``Leased``."""

    keys: _Keys


class Release(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """End of a lease; answered by ``Count``: 1 if it had not lapsed."""

    lease_id: _Count


class Begin(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Request for a place to write to; answered by ``Placed``."""

    key: _Key
    num_bytes: _Count


class Commit(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """End of a put whose bytes are all written; answered by ``PutEnded``."""

    put_id: _Count


class Discard(Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Removal of a value; answered by ``Count``."""

    key: _Key


class Welcome(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Answer that carries the slab's file descriptor."""

    capacity_bytes: _Count


class Count(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Answer with a number."""

    count: _Count


class Leased(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Answer with leases, each (lease id, offset in the slab, number of bytes)."""

    leases: Annotated[tuple[tuple[_Count, _Count, _Count], ...], Meta(max_length=MAX_KEYS)]


class Placed(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Answer with a place to write, unless ``outcome`` says how the put has ended already."""

    outcome: PutOutcome | None
    put_id: _Count = 0
    offset: _Count = 0


class PutEnded(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Answer with the result of a put."""

    outcome: PutOutcome


Question = Greeting | NumPresent | Get | Release | Begin | Commit | Discard
Answer = Welcome | Count | Leased | Placed | PutEnded

_MessageT = TypeVar("_MessageT")

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def socket_name(address: str, user_id: int) -> bytes:
    """Return the abstract name on which the server of this store listens."""
    digest = hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
    return f"\0ttserve-kv-store-{user_id}-{digest}".encode()


def encode(message: Question | Answer) -> bytes:
    """Return the packet of a message."""
    return _encoder.encode(message)


def decode_question(packet: bytes) -> Question:
    """Decode a packet from a client.

    Raises:
        WireError: When the packet is too long or no such message.
    """
    return _decode(_questions, packet)


def decode_answer(packet: bytes) -> Answer:
    """Decode a packet from the server.

    Raises:
        WireError: When the packet is too long or no such message.
    """
    return _decode(_answers, packet)


def _decode(decoder: msgspec.msgpack.Decoder[_MessageT], packet: bytes) -> _MessageT:
    if len(packet) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a message of {len(packet)} bytes or more; the limit is {MAX_MESSAGE_BYTES}"
        )
    try:
        return decoder.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error
