"""A byte that changes on its way, or a block that changes after it was announced."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from kv_transfer.messages import Data, Mapped, chunk_checksum, encode, encode_mapped
from tests.kv_transfer.fakes import LAYOUT, Mangled
from tests.kv_transfer.worlds import TINY, World

NUM_TOKENS = 6 * 32 - 3
IMPATIENT = TransferConfig(
    chunk_bytes=TINY.row_bytes,
    window_bytes=4 * TINY.row_bytes,
    mapped_chunk_bytes=2 * TINY.row_bytes,
    no_data_s=8.0,
)


Mangle = Callable[[bytes, NDArray[np.uint8] | None], Mangled]


@dataclasses.dataclass
class Mangler:
    """Fault that changes one byte of the chunk that begins with row 2, a given number of times.

    A chunk whose message cannot be recognised counts as lost, which is one way to detect the
    change.
    """

    position: int
    mask: int
    times: float
    num_changed: int = 0

    def __call__(self, frame: bytes, payload: NDArray[np.uint8] | None) -> Mangled:
        if payload is None or self.num_changed >= self.times or not self.is_wanted(frame):
            return frame, payload
        self.num_changed += 1
        changed, data = bytearray(frame), payload.copy().reshape(-1)
        if self.position < len(frame):
            changed[self.position] ^= self.mask
        else:
            data[self.position - len(frame)] ^= self.mask
        return bytes(changed), data

    def is_wanted(self, frame: bytes) -> bool:
        return msgspec.msgpack.decode(frame)[4] == 2


def transfer(path: str, mangle: Mangle, limit_s: float = 40.0, **changes: Any) -> World:
    config = msgspec.structs.replace(IMPATIENT, **changes)
    world = World(path, num_tokens=NUM_TOKENS, config=config)
    world.node(world.producer).mangle = mangle
    world.start()
    world.prefill()
    world.run(0.25, limit_s)
    return world


def sizes(path: str) -> tuple[int, int]:
    """Bytes of a chunk's header, and of what follows it."""
    tid, last = b"r".ljust(16, b"."), (1 << 64) - 1
    if path == "inline":
        return len(encode(Data(tid, 1, "P", 2, 1, last))), TINY.row_bytes
    return len(encode(Mapped(tid, 1, "P", 2, 2, 0, last))), 2 * 16


def positions(path: str) -> list[int]:
    """Every byte of the header; of the payload every one where ids and digests are, else some."""
    header, payload = sizes(path)
    return [*range(header), *range(header, header + payload, 1 if path == "shared" else 37)]


def watch(look: Callable[[bytes, NDArray[np.uint8] | None], None]) -> Mangle:
    """Change nothing, and look at everything."""

    def mangle(frame: bytes, payload: NDArray[np.uint8] | None) -> Mangled:
        look(frame, payload)
        return frame, payload

    return mangle


def num_noticed(world: World) -> int:
    stats = world.consumer.stats
    return (
        stats.num_checksum_failures
        + stats.num_malformed
        + stats.num_unknown_ids
        + stats.num_dropped_chunks
    )


@pytest.mark.parametrize("mask", [0x01, 0xFF])
@pytest.mark.parametrize("path", ["inline", "shared"])
def test_any_byte_that_changes_once_is_noticed_and_asked_for_again(path: str, mask: int) -> None:
    for position in positions(path):
        world = transfer(path, mangler := Mangler(position, mask, times=1))
        assert mangler.num_changed == 1
        assert world.consumer.received == world.producer.sent == {"r"}, position
        assert num_noticed(world) >= 1, position
        # Twice where the header then named other rows: those are asked for, and the lost ones.
        assert 1 <= world.consumer.stats.num_retransmits <= 2, position


@pytest.mark.parametrize("path", ["inline", "shared"])
def test_any_byte_that_changes_every_time_fails_the_transfer(path: str) -> None:
    header, _ = sizes(path)
    reasons = []
    for position in positions(path):
        world = transfer(path, mangler := Mangler(position, 0x11, times=float("inf")))
        assert world.consumer.ended == world.producer.ended == set(world.consumer.failed), position
        assert world.consumer.failed["r"].num_tokens == 64, position
        reasons.append(world.consumer.reasons["r"])
        if reasons[-1] is FailureReason.CHECKSUM:
            assert mangler.num_changed == 2, "asked for once"
            assert world.producer.reasons == {"r": FailureReason.CHECKSUM}
        world.steps(12, 1.0)
        world.assert_over()
    # What cannot be recognised is as good as lost, and its time ends another way.
    assert set(reasons) <= {FailureReason.CHECKSUM, FailureReason.STALLED}
    assert set(reasons[header - 8 : header]) == {FailureReason.CHECKSUM}
    assert set(reasons[header:]) == {FailureReason.CHECKSUM}


@pytest.mark.parametrize("mask", [0x01, 0xFF])
@pytest.mark.parametrize("path", ["inline", "shared"])
def test_any_byte_of_any_answer_that_changes_never_makes_wrong_kv(path: str, mask: int) -> None:
    """Leases carry no checksum: they can end a transfer, but not with wrong bytes."""
    frames: list[int] = []
    transfer(path, watch(lambda frame, _data: frames.append(len(frame))))
    for number, size in enumerate(frames):
        for position in range(0, size, 3):
            count = iter(range(1 << 20))

            def mangle(frame: bytes, data, number=number, position=position, count=count):
                if next(count) != number:
                    return frame, data
                changed = bytearray(frame)
                changed[position % len(frame)] ^= mask
                return bytes(changed), data

            transfer(path, mangle, limit_s=200.0)


# ---- blocks that change behind their digest


@pytest.fixture(params=["shared", "mixed"])
def mapped(request: pytest.FixtureRequest) -> str:
    return request.param


def between(world: World, change) -> None:
    """Announce rows, change something, and let the consumer read."""
    world.step(world.producer)
    change()
    world.network.advance(0.1)
    world.step(world.consumer)
    world.network.advance(0.1)


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("block", range(3))
def test_a_block_that_changed_after_its_digest_is_read_once_more(
    mapped: str, block: int, block_size: int
) -> None:
    layout = msgspec.structs.replace(TINY, block_size=block_size)
    world = World(mapped, num_tokens=NUM_TOKENS, layouts=(layout, layout))
    world.start()
    world.steps(1)
    world.prefill()
    where = world.producer.io.cache[0][:, world.source[block]]
    right = where.copy()
    between(world, lambda: np.add(where, 1, out=where))
    assert not world.consumer.ended
    where[:] = right
    world.run(0.25, 20.0)
    assert world.consumer.received == world.producer.sent == {"r"}
    assert world.consumer.stats.num_checksum_failures == 1
    assert world.consumer.stats.num_retransmits >= 1


@pytest.mark.parametrize("block_size", [32, 64])
def test_a_block_that_keeps_changing_fails_the_transfer(mapped: str, block_size: int) -> None:
    layout = msgspec.structs.replace(TINY, block_size=block_size)
    world = World(mapped, num_tokens=NUM_TOKENS, layouts=(layout, layout))
    world.start()
    world.steps(1)
    world.prefill()
    where = world.producer.io.cache[0][:, world.source[1]]
    for _ in range(20):
        if world.consumer.ended:
            break
        between(world, lambda: np.add(where, 1, out=where))
    assert world.consumer.reasons == {"r": FailureReason.CHECKSUM}
    assert world.consumer.failed["r"].num_tokens == block_size, "the rows before the bad block"
    world.run(0.25, 20.0)
    assert world.producer.reasons == {"r": FailureReason.CHECKSUM}
    world.steps(12, 1.0)
    world.assert_over()


def test_rows_that_a_bad_copy_overwrote_do_not_count(mapped: str) -> None:
    """Announce blocks of two rows row by row, so that a later copy may overwrite a correct row."""
    layout = msgspec.structs.replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=1)
    layout = msgspec.structs.replace(layout, block_size=64)
    config = msgspec.structs.replace(IMPATIENT, mapped_chunk_bytes=1)
    world = World(mapped, num_tokens=128, layouts=(layout, layout), config=config)
    world.start()
    world.steps(1)
    world.prefill()
    where = world.producer.io.cache[0][:, world.source[0]]
    right = where.copy()
    for _ in range(20):
        if world.consumer.ended:
            break
        between(world, lambda: np.add(where, 1, out=where))
        where[:] = right
    # World compares what the failed load says is good.
    assert world.consumer.failed["r"].num_tokens == 0


def test_a_row_that_was_good_and_is_overwritten_with_a_bad_one_does_not_count(mapped: str) -> None:
    """Announce lost rows again in other pieces than before, so that some arrive twice."""
    world = World(mapped, num_tokens=NUM_TOKENS, config=IMPATIENT)
    world.start()
    world.steps(2)
    world.network.fate = lambda _message: []
    node, io, tid = world.node(world.consumer), world.producer.io, world.ticket.transfer_id
    endpoint = world.producer.worker.endpoints[0]

    def tell(first_row: int, ids: tuple[int, ...]) -> None:
        payload = encode_mapped(np.array(ids), io.blocks[0].digests(ids))
        checksum = chunk_checksum(tid, 1, first_row, len(ids), payload)
        message = Mapped(tid, 1, "P", first_row, len(ids), 0, checksum)
        node.consumer.on_message(endpoint, message, payload, world.network.now_s)
        node.send()

    tell(0, world.source[:2])
    world.step(world.consumer)
    tell(1, world.source[1:3])
    io.cache[0][:, world.source[1]] ^= 0xFF
    world.step(world.consumer)
    assert world.consumer.stats.num_checksum_failures == 1
    [info] = world.consumer.worker.transfers(0.0)
    assert info.done_rows == 2, "the first and the third"
    node.consumer.on_peer_lost(endpoint)
    node.send()
    world.step(world.consumer)
    assert world.consumer.failed["r"].num_tokens == 32


def test_without_digests_a_failed_load_believes_in_nothing_of_it(mapped: str) -> None:
    config = msgspec.structs.replace(IMPATIENT, verify=False)
    world = World(mapped, num_tokens=NUM_TOKENS, config=config)
    world.start(num_cached=32)
    world.prefill(100)
    world.steps(4)
    assert len(world.consumer.io.changed()) == 2
    world.producer.scheduler.cancel("r")
    world.run(0.25, 20.0)
    assert world.consumer.failed["r"].num_tokens == 32


def test_without_digests_the_producer_hashes_nothing(mapped: str) -> None:
    sent: list[int] = []
    look = watch(lambda _frame, data: sent.append(0 if data is None else data.nbytes))
    world = transfer(mapped, look, verify=False)
    assert world.consumer.received == {"r"}
    assert max(sent) == 2 * 8
