"""Local prefix hits and lengths of every kind, between blocks of every size."""

import msgspec
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.messages import Mapped
from tests.kv_transfer.fakes import LAYOUT
from tests.kv_transfer.pairs import Pair

SIZES = (32, 64, 128)
TINY = msgspec.structs.replace(LAYOUT, num_layers=1, num_kv_heads=2, head_dim=2)
BY_SIZE = {size: msgspec.structs.replace(TINY, block_size=size) for size in SIZES}
PAIRS = [(one, other) for one in SIZES for other in SIZES]


def transfer(
    path: str, sizes: tuple[int, int], num_tokens: int, num_cached: int = 0, *, piece: int = 0
) -> Pair:
    """Run a transfer, computed ``piece`` tokens at a time."""
    layouts = [BY_SIZE[size] for size in sizes]
    pair = Pair(path, num_tokens=num_tokens, layouts=layouts)
    pair.start(num_cached=num_cached)
    for num_computed in range(piece, num_tokens, piece) if piece else ():
        pair.prefill(num_computed)
        pair.steps(1)
    pair.prefill()
    pair.steps(8 + num_tokens // 32)
    pair.assert_delivered(num_cached)
    pair.assert_nothing_is_held()
    return pair


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 65, 128, 129, 300])
def test_any_number_of_tokens_arrives(path: str, sizes: tuple[int, int], num_tokens: int) -> None:
    transfer(path, sizes, num_tokens)


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@pytest.mark.parametrize("piece", [1, 45, 64])
def test_any_pieces_of_a_prefill_arrive(path: str, sizes: tuple[int, int], piece: int) -> None:
    transfer(path, sizes, 130, piece=piece)


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@pytest.mark.parametrize("num_tokens", [256, 290])
def test_only_missing_rows_travel(path: str, sizes: tuple[int, int], num_tokens: int) -> None:
    block_size, num_rows = sizes[1], -(-num_tokens // 32)
    most = (num_tokens - 1) // block_size * block_size  # All but the last block.
    for num_cached in sorted({0, block_size, most} - {num_tokens}):
        pair = transfer(path, sizes, num_tokens, min(num_cached, most))
        sent = pair.producer.stats.paths[pair.wired_path]
        received = pair.consumer.stats.paths[pair.wired_path]
        num_wired = num_rows - min(num_cached, most) // 32
        assert sent.bytes_sent == received.bytes_received == num_wired * TINY.row_bytes


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
def test_with_everything_there_nothing_travels(path: str, sizes: tuple[int, int]) -> None:
    layouts = [BY_SIZE[size] for size in sizes]
    pair = Pair(path, num_tokens=256, layouts=layouts)
    pair.start(num_cached=256)
    pair.prefill()
    pair.steps(3)
    assert (pair.producer.sent, pair.consumer.received) == ({"r"}, {"r"})
    assert not pair.consumer.io.changed()
    sent = pair.producer.stats.paths.get("inline")
    assert sent is None or sent.bytes_sent == 0
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("block_size", SIZES)
def test_shared_memory_is_announced_in_whole_blocks(block_size: int) -> None:
    """Use the smallest chunks: a block announced in parts would be hashed once for each part."""
    layout = BY_SIZE[block_size]
    config = TransferConfig(mapped_chunk_bytes=1)
    pair = Pair("shared", num_tokens=300, layouts=(layout, layout), config=config)
    pair.start()
    pair.deliver()
    told = [(m.first_row, m.num_rows) for m in pair.network.sent if isinstance(m, Mapped)]
    rows = block_size // 32
    assert told == [(first, min(rows, 10 - first)) for first in range(0, 10, rows)]


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_block_still_being_filled_is_not_announced(block_size: int) -> None:
    """Otherwise its digest could change before it is read."""
    layout = BY_SIZE[block_size]
    pair = Pair("shared", num_tokens=300, layouts=(layout, layout))
    pair.start()
    for num_tokens in (40, 150, 200, 290):
        pair.prefill(num_tokens)
        pair.steps(3)
        told = [m.first_row + m.num_rows for m in pair.network.sent if isinstance(m, Mapped)]
        assert max(told, default=0) == num_tokens // block_size * block_size // 32
    pair.prefill()
    pair.steps(6)
    pair.assert_delivered()


def test_a_hit_that_ends_within_a_block_is_not_overwritten() -> None:
    """Whole blocks are copied only where all of them is wanted."""
    layouts = [BY_SIZE[64], BY_SIZE[64]]
    pair = Pair("shared", num_tokens=200, layouts=layouts)
    pair.start(num_cached=32)
    before = pair.consumer.io.blocks[0].read_rows(pair.target, 0, 1)
    pair.prefill()
    pair.steps(12)
    assert pair.consumer.received == {"r"}
    assert pair.has_rows(32, 200)
    assert (pair.consumer.io.blocks[0].read_rows(pair.target, 0, 1) == before).all()
