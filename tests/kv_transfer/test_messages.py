"""The codec: what is sent comes back, and nothing else gets through."""

import random
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import FailureReason, WireError
from kv_transfer.lease import LeaseState
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Credit,
    Data,
    Done,
    Fail,
    Fetch,
    LeaseInfo,
    Renew,
    chunk_checksum,
    decode_to_consumer,
    decode_to_producer,
    encode,
)

TID = bytes(range(16))
FETCH = Fetch(
    version=1,
    transfer_id=TID,
    epoch=1,
    incarnation="P",
    consumer="D",
    layout_hash="h",
    start_block=0,
    end_block=3,
    window=2,
)
TO_PRODUCER = [
    FETCH,
    Credit(TID, 1, 2, 3),
    Renew(TID, 1, 2, 3),
    Done(TID, 1, "D"),
    Cancel(TID, 1, FailureReason.CANCELLED),
]
TO_CONSUMER = [
    Data(TID, 1, "P", 0, 2, (1 << 64) - 1),
    LeaseInfo(TID, 1, LeaseState.SERVING, 30_000, 4, 2),
    Fail(TID, 1, FailureReason.EXPIRED),
    Cancel(TID, 1, FailureReason.STALLED),
]


@pytest.mark.parametrize("message", TO_PRODUCER)
def test_requests_survive_the_wire(message) -> None:
    assert decode_to_producer(encode(message)) == message


@pytest.mark.parametrize("message", TO_CONSUMER)
def test_answers_survive_the_wire(message) -> None:
    assert decode_to_consumer(encode(message)) == message


def test_a_producer_takes_no_answers_and_a_consumer_no_requests() -> None:
    with pytest.raises(WireError):
        decode_to_producer(encode(TO_CONSUMER[0]))
    with pytest.raises(WireError):
        decode_to_consumer(encode(FETCH))


@pytest.mark.parametrize(
    "message",
    [
        Renew(b"short", 1, 2, 3),
        Renew(TID, -1, 2, 3),
        Renew(TID, 1, 1 << 31, 3),
        Renew(TID, "1", 2, 3),
        Done(TID, 1, ""),
        Done(TID, 1, "x" * 129),
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
    base = chunk_checksum(TID, 1, 0, payload)
    changed = payload.copy()
    changed[1, 3] ^= 1
    others = {
        chunk_checksum(TID[::-1], 1, 0, payload),
        chunk_checksum(TID, 2, 0, payload),
        chunk_checksum(TID, 1, 1, payload),
        chunk_checksum(TID, 1, 0, payload.reshape(1, 32)),
        chunk_checksum(TID, 1, 0, changed),
    }
    assert base not in others
    assert len(others) == 5
