"""Codec: every message survives a round trip, and every other frame is refused."""

import random
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import FailureReason, WireError
from kv_transfer.keys import MAX_SEALED_BYTES
from kv_transfer.lease import LeaseState
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Data,
    Done,
    Fail,
    Fetch,
    LeaseInfo,
    Mapped,
    Renew,
    chunk_checksum,
    decode_mapped,
    decode_to_consumer,
    decode_to_producer,
    encode,
    encode_mapped,
)

TID = bytes(range(16))
FETCH = Fetch(
    version=PROTOCOL_VERSION,
    transfer_id=TID,
    epoch=1,
    ticket=b"sealed",
    consumer="D",
    start_row=0,
    end_row=3,
    window=2,
    path="shared",
)
TO_PRODUCER = [
    FETCH,
    Credit(TID, 1, 2, 3),
    Renew(TID, 1, 2, 3),
    Done(TID, 1, b"sealed"),
    Cancel(TID, 1, FailureReason.CANCELLED),
]
TO_CONSUMER = [
    Data(TID, 1, "P", 0, 2, (1 << 64) - 1),
    Mapped(TID, 1, "P", 0, 2, 1, (1 << 64) - 1),
    LeaseInfo(TID, 1, LeaseState.SERVING, 30_000, 4, 2),
    Fail(TID, 1, FailureReason.EXPIRED),
    Cancel(TID, 1, FailureReason.STALLED),
]


@pytest.mark.parametrize(
    ("examples", "decode", "decode_there"),
    [
        (TO_PRODUCER, decode_to_producer, decode_to_consumer),
        (TO_CONSUMER, decode_to_consumer, decode_to_producer),
    ],
)
def test_messages_survive_the_wire_in_their_direction(examples, decode, decode_there) -> None:
    for message in examples:
        assert decode(encode(message)) == message
    with pytest.raises(WireError):
        decode_there(encode(examples[0]))


@pytest.mark.parametrize(
    "message",
    [
        Renew(b"short", 1, 2, 3),
        Renew(TID, -1, 2, 3),
        Renew(TID, 1, 1 << 31, 3),
        Renew(TID, "1", 2, 3),
        Done(TID, 1, b""),
        Done(TID, 1, bytes(MAX_SEALED_BYTES + 1)),
        Cancel(TID, 1, FailureReason.CANCELLED, bytes(MAX_SEALED_BYTES + 1)),
        msgspec.structs.replace(FETCH, ticket=b""),
        msgspec.structs.replace(FETCH, ticket=bytes(MAX_SEALED_BYTES + 1)),
        msgspec.structs.replace(FETCH, path="pigeon"),
        msgspec.structs.replace(FETCH, attempt=2),
    ],
)
def test_values_out_of_range_are_refused(message) -> None:
    with pytest.raises(WireError):
        decode_to_producer(encode(message))


def test_a_message_with_a_surplus_field_is_refused() -> None:
    frame = bytearray(encode(TO_PRODUCER[3]))
    frame[0] += 1
    with pytest.raises(WireError):
        decode_to_producer(bytes(frame) + b"\x01")


def test_an_oversized_frame_is_refused_undecoded() -> None:
    with pytest.raises(WireError, match="limit"):
        decode_to_producer(b"\x91" * (MAX_MESSAGE_BYTES + 1))


@given(st.binary(max_size=64))
def test_random_bytes_raise_nothing_but_wire_errors(frame: bytes) -> None:
    for decode in (decode_to_producer, decode_to_consumer):
        with suppress(WireError):
            decode(frame)


def test_mutated_messages_raise_nothing_but_wire_errors() -> None:
    dice = random.Random(1)
    for _ in range(5000):
        frame = bytearray(encode(dice.choice(TO_PRODUCER + TO_CONSUMER)))
        for _ in range(dice.randint(1, 3)):
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        for decode in (decode_to_producer, decode_to_consumer):
            with suppress(WireError):
                decode(bytes(frame))


def test_the_checksum_covers_coordinates_and_payload() -> None:
    payload = np.arange(32, dtype=np.uint8).reshape(2, 16)
    base = chunk_checksum(TID, 1, 0, 2, payload)
    changed = payload.copy()
    changed[1, 3] ^= 1
    others = {
        chunk_checksum(TID[::-1], 1, 0, 2, payload),
        chunk_checksum(TID, 2, 0, 2, payload),
        chunk_checksum(TID, 1, 1, 2, payload),
        chunk_checksum(TID, 1, 0, 1, payload),
        chunk_checksum(TID, 1, 0, 2, changed),
    }
    assert base not in others
    assert len(others) == 5


@pytest.mark.parametrize("with_digests", [True, False])
def test_block_ids_and_digests_survive_the_wire(with_digests: bool) -> None:
    ids = np.array([7, 0, (1 << 40)], np.int64)
    digests = np.array([1, 2, (1 << 64) - 1] if with_digests else [], np.uint64)
    payload = encode_mapped(ids, digests)
    assert payload.dtype == np.uint8
    got_ids, got_digests = decode_mapped(payload, 3)
    assert np.array_equal(got_ids, ids)
    assert np.array_equal(got_digests, digests)


@pytest.mark.parametrize("num_bytes", [0, 8, 23, 25, 32, 47, 49, 72])
def test_a_payload_about_another_number_of_blocks_is_refused(num_bytes: int) -> None:
    with pytest.raises(WireError, match=f"{num_bytes} bytes for 3 blocks"):
        decode_mapped(np.zeros(num_bytes, np.uint8), 3)


def test_the_largest_fetch_fits_a_message() -> None:
    longest = msgspec.structs.replace(
        FETCH, ticket=bytes(MAX_SEALED_BYTES), consumer="x" * 128, end_row=(1 << 31) - 1
    )
    assert decode_to_producer(encode(longest)) == longest
