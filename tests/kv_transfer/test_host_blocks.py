"""Blocks in memory: rows of any block size, whole copies that are checked, zeros behind the end."""

import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import KVLayout

NUM_BLOCKS = 5


def make_layout(**changes: Any) -> KVLayout:
    values = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 32,
        "block_size": 64,
        "dtype": "bfloat16",
        "rope": "hf",
        "model_fingerprint": "m",
        "num_planes": 2,
    }
    return KVLayout(**(values | changes))


def fill(layout: KVLayout, seed: int, memory: str = "one", num_blocks: int = NUM_BLOCKS):
    """Make blocks of random bytes, in one memory with or without units in step, or in several."""
    generator = np.random.default_rng(seed)
    if memory == "several":
        shape = (num_blocks, layout.piece_bytes)
        pieces = [generator.integers(0, 256, shape, np.uint8) for _ in range(layout.num_pieces)]
        return HostBlocks(layout, pieces)
    stride = (num_blocks + 1) * layout.piece_bytes + (memory == "ragged")
    data = generator.integers(0, 256, 7 + layout.num_pieces * stride, np.uint8)
    offsets = [7 + stride * piece for piece in range(layout.num_pieces)][::-1]
    return HostBlocks.within(layout, data, offsets, num_blocks)


memories = st.sampled_from(["one", "ragged", "several"])


def expected_rows(blocks: HostBlocks, table: list[int]) -> np.ndarray:
    """Collect a request's rows unit by unit, as the layout's definition says."""
    layout, rows = blocks.layout, []
    for block in table:
        for row in range(layout.rows_per_block):
            units = []
            for piece in blocks.pieces:
                for head in range(layout.num_kv_heads):
                    start = (head * layout.rows_per_block + row) * layout.unit_bytes
                    units.append(piece[block, start : start + layout.unit_bytes])
            rows.append(np.concatenate(units))
    return np.stack(rows)


layouts = st.builds(
    make_layout,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([32, 64]),
    block_size=st.sampled_from([32, 64, 96, 128]),
    dtype=st.sampled_from(["bfloat16", "float32", "bfloat8_b"]),
    num_planes=st.sampled_from([1, 2]),
)
tables = st.permutations(range(NUM_BLOCKS)).flatmap(
    lambda ids: st.integers(1, NUM_BLOCKS).map(lambda n: ids[:n])
)


@settings(max_examples=40, deadline=None)
@given(layouts, tables, memories, st.data())
def test_rows_are_read_in_the_order_of_the_layout(layout, table, memory, data):
    blocks = fill(layout, 1, memory=memory)
    rows = expected_rows(blocks, table)
    first = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - first))
    found = blocks.read_rows(table, first, count)
    assert found.shape == (count, layout.row_bytes)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert np.array_equal(found, rows[first : first + count])
    if count:
        found[:] ^= 255
        assert np.array_equal(expected_rows(blocks, table), rows)


@settings(max_examples=40, deadline=None)
@given(layouts, tables, memories, st.data())
def test_rows_are_written_where_they_are_read_and_nowhere_else(layout, table, memory, data):
    blocks = fill(layout, 2, memory=memory)
    everything = list(range(NUM_BLOCKS))
    wanted = expected_rows(blocks, everything)
    total = len(table) * layout.rows_per_block
    first = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - first))
    rows = np.random.default_rng(3).integers(0, 256, (count, layout.row_bytes), np.uint8)
    rows.setflags(write=False)
    blocks.write_rows(table, first, rows)
    per_block = layout.rows_per_block
    for position in range(first, first + count):
        block = table[position // per_block]
        wanted[block * per_block + position % per_block] = rows[position - first]
    assert np.array_equal(expected_rows(blocks, everything), wanted)


@settings(max_examples=40, deadline=None)
@given(layouts, tables, st.permutations(range(NUM_BLOCKS)), memories, st.booleans())
def test_a_copy_of_blocks_equals_reading_and_writing_their_rows(
    layout, source_ids, ids, memory, checked
):
    block_ids = ids[: len(source_ids)]
    source, copied, written = fill(layout, 6, memory=memory), fill(layout, 7), fill(layout, 7)
    digests = source.digests(source_ids) if checked else None
    assert copied.copy_from(source, source_ids, block_ids, digests) == []
    num_rows = len(source_ids) * layout.rows_per_block
    written.write_rows(block_ids, 0, source.read_rows(source_ids, 0, num_rows))
    everything = list(range(NUM_BLOCKS))
    assert np.array_equal(expected_rows(copied, everything), expected_rows(written, everything))


@pytest.mark.parametrize("memory", ["one", "several"])
def test_a_digest_is_the_hash_of_the_pieces_in_order(memory):
    blocks = fill(make_layout(num_layers=3), 10, memory=memory)
    wanted = [
        xxhash.xxh3_64_intdigest(b"".join(piece[block].tobytes() for piece in blocks.pieces))
        for block in (4, 0)
    ]
    found = blocks.digests([4, 0])
    assert found.dtype == np.uint64
    assert found.tolist() == wanted
    assert blocks.digests([]).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(layouts, st.data())
def test_any_flipped_bit_of_any_byte_is_found_and_says_which_block(layout, data):
    source, target = fill(layout, 11), fill(layout, 12)
    source_ids, block_ids = [3, 0, 4], [1, 4, 2]
    digests = source.digests(source_ids)
    position = data.draw(st.integers(0, 2))
    piece = source.pieces[data.draw(st.integers(0, layout.num_pieces - 1))]
    byte = data.draw(st.integers(0, layout.piece_bytes - 1))
    piece[source_ids[position], byte] ^= 1 << data.draw(st.integers(0, 7))
    assert target.copy_from(source, source_ids, block_ids, digests) == [position]


def test_every_wrong_block_is_named():
    source, target = fill(make_layout(), 13), fill(make_layout(), 14)
    digests = source.digests([0, 1, 2, 3]) ^ np.array([1, 0, 0, 1 << 63], np.uint64)
    assert target.copy_from(source, [0, 1, 2, 3], [4, 3, 2, 1], digests) == [0, 3]


class FaultyMemory(np.ndarray):
    """Flips a bit of whatever is written to it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value ^ np.uint8(4))


def test_a_copy_that_went_wrong_is_found():
    source, pieces = fill(make_layout(), 15), fill(make_layout(), 16, "several").pieces
    target = HostBlocks(make_layout(), [*pieces[:-1], pieces[-1].view(FaultyMemory)])
    assert target.copy_from(source, [2, 3], [1, 4], source.digests([2, 3])) == [0, 1]


def test_arrays_are_zeroed_from_the_token_after_the_last():
    layout = make_layout(block_size=96, dtype="float32")
    for num_tokens in range(96, 193, 5):
        blocks = fill(layout, 17)
        before = [piece.copy() for piece in blocks.pieces]
        blocks.zero_tail([3, 1, 2], num_tokens)
        for piece, old in zip(blocks.pieces, before, strict=True):
            tokens = old.view(np.uint32).reshape(NUM_BLOCKS, 3, 96, 32)
            if num_tokens % 96:
                tokens[1, :, num_tokens - 96 :] = 0
            assert np.array_equal(piece, old)


def decode_bfloat8_b(unit: bytes, head_dim: int) -> np.ndarray:
    """Decode 32 tokens byte by byte, in the way of the hardware's manual: (32, head_dim)."""
    values = np.zeros((32, head_dim))
    for tile in range(head_dim // 32):
        body = unit[1088 * tile : 1088 * (tile + 1)]
        for face, (top, left) in enumerate([(0, 0), (0, 16), (16, 0), (16, 16)]):
            for row in range(16):
                exponent = body[16 * face + row]
                mantissas = struct.unpack_from("16B", body, 64 + 256 * face + 16 * row)
                for column, mantissa in enumerate(mantissas):
                    sign = -1 if mantissa & 128 else 1
                    value = sign * (mantissa & 127) / 64 * 2.0 ** (exponent - 127)
                    values[top + row, 32 * tile + left + column] = value
    return values


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 127, 128])
def test_block_floats_are_zeroed_by_the_tokens_of_their_tiles(num_tokens):
    layout = make_layout(num_kv_heads=2, head_dim=64, dtype="bfloat8_b", num_layers=1)
    blocks = fill(layout, 18)
    for piece in blocks.pieces:
        np.bitwise_or(piece, 1, out=piece)  # no value is zero before
    before = [piece.copy() for piece in blocks.pieces]
    blocks.zero_tail([2, 4], num_tokens)
    last, kept = [2, 4][(num_tokens - 1) // 64], (num_tokens - 1) % 64 + 1
    for piece, old in zip(blocks.pieces, before, strict=True):
        others = [block for block in range(NUM_BLOCKS) if block != last]
        assert np.array_equal(piece[others], old[others])
        units, old_units = (p[last].reshape(2, 2, layout.unit_bytes) for p in (piece, old))
        for head in range(2):
            found, wanted = (
                np.concatenate([decode_bfloat8_b(u[head, row].tobytes(), 64) for row in range(2)])
                for u in (units, old_units)
            )
            assert wanted.all()
            wanted[kept:] = 0
            assert np.array_equal(found, wanted)
            # Also the bytes: an exponent that stays behind would be a value's again.
            num_bytes = (64 - kept) * (64 + 4)
            assert np.count_nonzero(units[head]) == np.count_nonzero(old_units[head]) - num_bytes


def test_memory_that_cannot_be_written_can_be_read_and_copied_from():
    layout = make_layout()
    memory = np.arange(layout.bytes_per_block * 2, dtype=np.uint64).astype(np.uint8)
    memory.setflags(write=False)
    offsets = [2 * layout.piece_bytes * piece for piece in range(layout.num_pieces)]
    blocks, target = HostBlocks.within(layout, memory, offsets, 2), fill(layout, 19)
    assert target.copy_from(blocks, [1], [3], blocks.digests([1])) == []
    rows = blocks.read_rows([1], 0, 2)
    assert np.array_equal(target.read_rows([3], 0, 2), rows)
    for write in (
        lambda: blocks.write_rows([1], 0, rows),
        lambda: blocks.copy_from(target, [3], [1]),
        lambda: blocks.zero_tail([1], 5),
    ):
        with pytest.raises(ValueError, match="read-only"):
            write()


@pytest.mark.parametrize("ids", [[-1], [NUM_BLOCKS], [1, -1]])
def test_blocks_out_of_range_are_refused(ids):
    blocks = fill(make_layout(), 20)
    rows = np.zeros((2 * len(ids), blocks.layout.row_bytes), np.uint8)
    for use in (
        lambda: blocks.read_rows(ids, 0, len(rows)),
        lambda: blocks.write_rows(ids, 0, rows),
        lambda: blocks.digests(ids),
        lambda: blocks.copy_from(blocks, ids, range(len(ids))),
        lambda: blocks.copy_from(blocks, range(len(ids)), ids),
        lambda: blocks.zero_tail(ids, 64 * len(ids) - 1),
    ):
        with pytest.raises(ValueError, match=r"not within 0\.\.4"):
            use()


def test_a_table_that_is_too_short_is_refused_and_its_unused_part_is_not_looked_at():
    blocks = fill(make_layout(), 21)
    rows = blocks.read_rows([99, 1, 99], 2, 2)
    blocks.write_rows([99, 1, 99], 2, rows)
    for use in (
        lambda: blocks.read_rows([1], 1, 2),
        lambda: blocks.write_rows([1], 1, rows),
        lambda: blocks.zero_tail([1], 65),
    ):
        with pytest.raises(ValueError, match="a table of 1 blocks of 64 tokens where 2 are needed"):
            use()
    for first, count in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="neither may be negative"):
            blocks.read_rows([1], first, count)


def test_rows_of_another_shape_or_dtype_are_refused():
    blocks = fill(make_layout(), 22)
    row = blocks.read_rows([1], 0, 1)
    for data in (row[:, :-1], row[0], row.astype(np.int8), row[None]):
        with pytest.raises(ValueError, match="is needed"):
            blocks.write_rows([1], 0, data)


@pytest.mark.parametrize(
    "changes", [{"block_size": 32}, {"dtype": "float16"}, {"model_fingerprint": "other"}]
)
def test_blocks_that_are_laid_out_otherwise_are_not_copied(changes):
    source, target = fill(make_layout(**changes), 23), fill(make_layout(), 24)
    with pytest.raises(ValueError, match="cannot copy blocks of"):
        target.copy_from(source, [1], [1])


def test_numbers_of_blocks_and_digests_that_differ_are_refused():
    blocks = fill(make_layout(), 25)
    with pytest.raises(ValueError, match="1 blocks to 2 with no digests"):
        blocks.copy_from(blocks, [1], [1, 2])
    with pytest.raises(ValueError, match="1 blocks to 1 with 2 digests"):
        blocks.copy_from(blocks, [1], [2], blocks.digests([1, 2]))


def test_memory_that_is_not_as_the_layout_says_is_refused():
    layout = make_layout(num_layers=1)
    good = np.zeros((2, layout.piece_bytes), np.uint8)
    for pieces in (
        [],
        [good],
        [good, good[:1]],
        [good, good.view(np.int8)],
        [good, np.zeros((2, 2 * layout.piece_bytes), np.uint8)[:, ::2]],
    ):
        with pytest.raises(ValueError, match="pieces of"):
            HostBlocks(layout, pieces)


@pytest.mark.parametrize(
    ("offsets", "num_blocks"), [([0, 1], 2), ([-1, 0], 1), ([0, 0], 0), ([0, 0], 3)]
)
def test_pieces_outside_the_memory_are_refused(offsets, num_blocks):
    layout = make_layout(num_layers=1)
    memory = np.zeros(2 * layout.piece_bytes, np.uint8)
    HostBlocks.within(layout, memory, [0, 0], 2)
    with pytest.raises(ValueError, match="do not fit"):
        HostBlocks.within(layout, memory, offsets, num_blocks)
