"""KV blocks of a mesh as bytes: the same whatever lanes, chips and tiles they come from.

Golden chips, whose tiles are packed as ttnn packs them, check the bytes. The mock device checks
that calls are accepted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
import ttnn

from kv_transfer.dtypes import convert_rows
from kv_transfer.errors import InvalidLayoutError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import KVLayout
from kv_transfer.sharding import head_shards
from replicas.errors import DeviceError
from replicas.generators.ttnn import kv_io
from replicas.generators.ttnn.kv_io import FILL_UNITS, TTKVIO
from tests.tt.golden.lanes import shards_of
from tests.tt.golden.library import poisoned
from tests.tt.golden.ops import OPS
from tests.tt.golden.tensors import GoldenDevice, GoldenTensor, round_to

DTYPES = ["bfloat8_b", "bfloat16"]


def make_layout(dtype="bfloat8_b", heads=4, layers=2, head_dim=64, block_size=64, rope="hf"):
    return KVLayout(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, rope=rope, model_fingerprint="m",
    )  # fmt: skip


@dataclass
class World:
    """An engine's cache, and its content as rows of bfloat16 that the host can read.

    Attributes:
        io: Under test.
        cache: [lane][layer][plane].
        lanes: [lane] host blocks of all heads, bfloat16.
    """

    io: TTKVIO
    cache: list
    lanes: list


def make_world(layout, *, lanes=1, tp=1, num_blocks=12, seed=0, num_banks=12):
    generator = torch.Generator().manual_seed(seed)
    shards = head_shards(layout.num_kv_heads, tp)
    dtype = getattr(ttnn, layout.dtype)
    plain = msgspec.structs.replace(layout, dtype="bfloat16")
    shape = (num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    cache, blocks = [], []
    for _ in range(lanes):
        device = GoldenDevice((1, tp))
        device.num_banks = num_banks
        planes, pieces = [], []
        for _ in range(layout.num_pieces):
            # Block floats have no -0.0.
            values = round_to(torch.randn(shape, generator=generator), dtype) + 0.0
            of_chips = [values[:, list(heads)].clone() for heads in shards]
            planes.append(GoldenTensor(of_chips, dtype, ttnn.TILE_LAYOUT, device=device))
            pieces.append(values.bfloat16().view(torch.uint8).reshape(num_blocks, -1).numpy())
        cache.append(list(zip(planes[::2], planes[1::2], strict=True)))
        blocks.append(HostBlocks(plain, pieces))
    return World(TTKVIO(cache, layout), cache, blocks)


def as_bfloat16(rows, layout):
    return convert_rows(rows, layout, msgspec.structs.replace(layout, dtype="bfloat16"))


def snapshot(world):
    return [[shard.clone() for shard in shards_of([lane])] for lane in world.cache]


def fills(library):
    """Units of every fill of a cache."""
    return [
        call.operands[1][0][2] // 32
        for call in library.calls
        if call.name == "experimental.paged_fill_cache"
    ]


# ---- tiles


@pytest.mark.board("T3K")
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_tiles_are_reordered_as_ttnn_orders_them(head_dim):
    values = torch.randn(5, 3, 32, head_dim).to(torch.bfloat16)
    tensor = ttnn.from_torch(values, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)
    tiled = torch.as_tensor(tensor.host_buffer().get_shard(ttnn.MeshCoordinate(0, 0))).numpy()
    tiled = tiled.reshape(15, -1)
    rows = values.view(torch.uint8).reshape(15, -1).numpy()
    assert np.array_equal(kv_io.tiles_to_rows(tiled, head_dim), rows)
    assert np.array_equal(kv_io.rows_to_tiles(rows, head_dim), tiled)


def test_every_bit_pattern_survives_the_reordering():
    patterns = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(-1, 32 * 64 * 2)
    tiles = kv_io.rows_to_tiles(patterns, 64)
    assert not np.array_equal(tiles, patterns)
    assert np.array_equal(kv_io.tiles_to_rows(tiles, 64), patterns)


# ---- reading


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "tp"), [(4, 1), (4, 2), (4, 4), (2, 4)])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_rows_are_the_tokens_of_the_cache(golden, dtype, heads, tp, block_size):
    layout = make_layout(dtype, heads=heads, block_size=block_size)
    world = make_world(layout, lanes=2, tp=tp)
    table = [7, 3, 4, 5, 11, 1]
    for lane in range(2):
        for first, count in ((0, 6 * block_size // 32), (1, 2), (3, 1), (2, 0)):
            rows = world.io.read_rows(lane, table, first, count)
            assert rows.shape == (count, layout.row_bytes)
            assert rows.flags.writeable
            assert rows.flags.c_contiguous
            wanted = world.lanes[lane].read_rows(table, first, count)
            assert np.array_equal(as_bfloat16(rows, layout), wanted)


@pytest.mark.parametrize("num_banks", [7, 8, 12])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_reading_starts_at_any_block_whatever_the_banks(golden, num_banks, head_dim):
    layout = make_layout("bfloat8_b", heads=3, layers=1, head_dim=head_dim)
    world = make_world(layout, num_banks=num_banks, num_blocks=13)
    for block in range(13):
        rows = world.io.read_rows(0, [block], 0, 2)
        assert np.array_equal(as_bfloat16(rows, layout), world.lanes[0].read_rows([block], 0, 2))


def units_read(library):
    """Units of every part of a cache that was copied to the host."""
    return [call.results[0][0][0] for call in library.calls if call.name == "narrow"]


def test_neighbours_are_read_at_once_and_no_more_than_a_chip_may_hold(golden, monkeypatch):
    layout = make_layout("bfloat8_b", layers=1)
    world = make_world(layout)
    table = [3, 4, 5, 6, 9]
    wanted = world.io.read_rows(0, table, 0, 10)
    assert len(units_read(golden)) == 2 * 2  # two runs of K and of V
    monkeypatch.setattr(kv_io, "_READ_BYTES", 2 * layout.piece_bytes)
    golden.calls.clear()
    assert np.array_equal(world.io.read_rows(0, table, 0, 10), wanted)
    assert len(units_read(golden)) == 2 * 3
    assert max(units_read(golden)) <= 2 * 8 + 12


# ---- moving


def rounds(rng, num_blocks, rows_per_block):
    """A table of random blocks, and rows to move in pieces: whole blocks, parts, single rows."""
    table = (1 + rng.permutation(num_blocks - 1)).tolist()
    num_rows = len(table) * rows_per_block
    first = int(rng.integers(0, num_rows - 1))
    count = int(rng.integers(1, num_rows - first))
    cuts = sorted({0, count, *rng.integers(0, count + 1, 2).tolist()})
    return table, [(first + a, b - a) for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lanes", list(itertools.product((1, 2, 4), repeat=2)))
def test_rows_arrive_byte_for_byte_between_any_two_engines(golden, monkeypatch, dtype, lanes):
    monkeypatch.setattr(kv_io, "FILL_UNITS", (8, 24))
    rng = np.random.default_rng([lanes[0], lanes[1], len(dtype)])
    for source_tp, target_tp in itertools.product((1, 2, 4), repeat=2):
        sizes = rng.choice([32, 64, 128], 2).tolist()
        source_layout = make_layout(dtype, layers=1, head_dim=32, block_size=sizes[0])
        layout = make_layout(dtype, layers=1, head_dim=32, block_size=sizes[1])
        source = make_world(source_layout, lanes=lanes[0], tp=source_tp, seed=1)
        target = make_world(
            layout, lanes=lanes[1], tp=target_tp, seed=2, num_blocks=20, num_banks=8
        )
        before = snapshot(target)
        source_table, pieces = rounds(rng, 12, source_layout.rows_per_block)
        target_table = (1 + rng.permutation(19)).tolist()
        room = 19 * layout.rows_per_block
        pieces = [(first, count) for first, count in pieces if first + count <= room]
        source_lane, target_lane = rng.integers(lanes[0]), rng.integers(lanes[1])
        for first, count in pieces:
            rows = source.io.read_rows(source_lane, source_table, first, count)
            rows.flags.writeable = False
            target.io.write_rows(target_lane, target_table, first, rows)
        for first, count in pieces:
            sent = source.io.read_rows(source_lane, source_table, first, count)
            found = target.io.read_rows(target_lane, target_table, first, count)
            assert np.array_equal(found, sent)
            wanted = source.lanes[source_lane].read_rows(source_table, first, count)
            assert np.array_equal(as_bfloat16(found, layout), wanted)
        written = {row for first, count in pieces for row in range(first, first + count)}
        assert_only_written(target, before, [target_lane], target_table, written)


def assert_only_written(world, before, lanes, table=(), rows=()):
    """Check that only the units of these rows, and the null block's first unit, have changed."""
    layout = world.io.layout
    heads, per_block = world.cache[0][0][0].shape[1], layout.rows_per_block
    allowed = {0}
    for row in rows:
        first = table[row // per_block] * heads * per_block + row % per_block
        allowed |= {first + head * per_block for head in range(heads)}
    for lane, (old, new) in enumerate(zip(before, snapshot(world), strict=True)):
        for was, now in zip(old, new, strict=True):
            changed = (was != now).reshape(-1, 32 * layout.head_dim).any(dim=1)
            units = set(changed.nonzero().flatten().tolist())
            assert units <= (allowed if lane in lanes else set())


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_several_chips_hold_are_written_to_all_of_them(golden, dtype):
    layout = make_layout(dtype, heads=2)
    source = make_world(layout, tp=1, seed=1)
    target = make_world(layout, tp=4, seed=2)
    target.io.write_rows(0, [2, 5], 0, source.io.read_rows(0, [8, 9], 0, 4))
    for layer in target.cache[0]:
        for plane in layer:
            first, second, third, fourth = plane.shards
            assert torch.equal(first[2], second[2])
            assert torch.equal(third[5], fourth[5])
    assert np.array_equal(
        target.io.read_rows(0, [2, 5], 0, 4), source.io.read_rows(0, [8, 9], 0, 4)
    )


@pytest.mark.parametrize(
    ("num_rows", "wanted"),
    [
        (1, [32]),
        (8, [32]),
        (9, [256]),
        (64, [256]),
        (65, [256, 32]),
        (130, [256, 256, 32]),
    ],
)
def test_writes_have_one_of_a_few_lengths_and_pad_with_zeros(golden, num_rows, wanted):
    assert FILL_UNITS == (32, 256)
    layout = make_layout("bfloat8_b", layers=1)
    world = make_world(layout, num_blocks=70)
    table = list(range(1, 70))
    rows = world.io.read_rows(0, table, 0, num_rows)
    with poisoned(5.0):  # what a new buffer has
        world.io.write_rows(0, table, 0, rows)
    assert fills(golden) == [length for length in wanted for _ in range(2)]
    if num_rows % 8:  # some padding went to the null block
        assert not world.cache[0][0][1].shards[0][0, 0, :32].any()
    assert np.array_equal(world.io.read_rows(0, table, 0, num_rows), rows)


def test_warm_up_runs_every_length_and_touches_the_null_block_alone(golden):
    layout = make_layout("bfloat16")
    world = make_world(layout, lanes=2, tp=2)
    before = snapshot(world)
    world.io.warm_up()
    assert fills(golden) == [*FILL_UNITS] * 2
    assert_only_written(world, before, [0, 1])


def test_rows_that_are_no_rows_change_nothing(golden):
    layout = make_layout("bfloat8_b")
    world = make_world(layout)
    before = snapshot(world)
    world.io.write_rows(0, [1], 0, np.empty((0, layout.row_bytes), np.uint8))
    assert fills(golden) == []
    assert_only_written(world, before, [])


# ---- refusals


def test_the_null_block_is_not_written(golden):
    layout = make_layout("bfloat8_b")
    world = make_world(layout)
    rows = np.zeros((3, layout.row_bytes), np.uint8)
    with pytest.raises(ValueError, match="null block"):
        world.io.write_rows(0, [1, 0], 0, rows)
    world.io.write_rows(0, [1, 2, 0], 0, rows)  # of which no row is in block 0


@pytest.mark.parametrize("table", [[-1], [12]])
def test_blocks_that_are_not_there_are_refused(golden, table):
    layout = make_layout("bfloat16")
    world = make_world(layout)
    with pytest.raises(ValueError, match=r"not within 0\.\.11"):
        world.io.read_rows(0, table, 0, 1)
    with pytest.raises(ValueError, match=r"not within 0\.\.11"):
        world.io.write_rows(0, table, 0, np.zeros((1, layout.row_bytes), np.uint8))


def test_a_short_table_is_refused(golden):
    layout = make_layout("bfloat8_b")
    world = make_world(layout)
    with pytest.raises(ValueError, match="1 blocks of 64 tokens where 2 are needed"):
        world.io.read_rows(0, [1], 0, 3)
    with pytest.raises(ValueError, match="1 blocks of 64 tokens where 2 are needed"):
        world.io.write_rows(0, [1], 1, np.zeros((2, layout.row_bytes), np.uint8))
    with pytest.raises(ValueError, match="negative"):
        world.io.read_rows(0, [1], -1, 1)


@pytest.mark.parametrize("shape", [(1, 5), (5,)])
def test_rows_of_another_size_are_refused(golden, shape):
    world = make_world(make_layout("bfloat8_b"))
    with pytest.raises(ValueError, match="instead of"):
        world.io.write_rows(0, [1], 0, np.zeros(shape, np.uint8))


@pytest.mark.parametrize(
    "other",
    [{"heads": 8}, {"layers": 3}, {"block_size": 32}, {"head_dim": 32}, {"dtype": "bfloat16"}],
)
def test_a_layout_that_is_not_the_cache_s_is_refused_with_both(golden, other):
    settings = {"dtype": "bfloat8_b", "heads": 4}
    world = make_world(make_layout(**settings), tp=2)
    with pytest.raises(InvalidLayoutError, match=r"layout .* of a KV cache of .*\{2\}.*bfloat8_b"):
        TTKVIO(world.cache, make_layout(**{**settings, **other}))


def test_heads_that_are_no_whole_tiles_are_refused(golden):
    layout = make_layout("bfloat16", head_dim=80)
    values = torch.zeros(4, 4, 64, 80)
    held = GoldenTensor([values], ttnn.bfloat16, ttnn.TILE_LAYOUT, device=GoldenDevice((1, 1)))
    with pytest.raises(InvalidLayoutError, match="heads of 80 elements"):
        TTKVIO([[[held, held]] * 2], layout)


def test_a_device_that_refuses_is_a_typed_error(golden, monkeypatch):
    layout = make_layout("bfloat8_b")
    world = make_world(layout)

    def refuse(*args, **kwargs):
        raise RuntimeError("TT_FATAL @ x.cpp:1: no\ninfo:\nOut of Memory\nbacktrace:\n --- y")

    monkeypatch.setitem(OPS, "from_device", refuse)
    with pytest.raises(DeviceError, match="KV cannot be read: Out of Memory"):
        world.io.read_rows(0, [1], 0, 1)
    monkeypatch.setitem(OPS, "experimental.paged_fill_cache", refuse)
    with pytest.raises(DeviceError, match="KV cannot be written: Out of Memory"):
        world.io.write_rows(0, [1], 0, np.zeros((1, layout.row_bytes), np.uint8))
    with pytest.raises(DeviceError, match="KV cannot be written: Out of Memory"):
        world.io.warm_up()
    monkeypatch.setitem(OPS, "experimental.view", refuse)
    with pytest.raises(DeviceError, match="cannot prepare KV transfer: Out of Memory"):
        TTKVIO(world.cache, layout)


# ---- mock device


def native_cache(lane, shape, dtype):
    def plane():
        return ttnn.zeros(
            list(shape), dtype=getattr(ttnn, dtype), layout=ttnn.TILE_LAYOUT, device=lane,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
        )  # fmt: skip

    return [[plane(), plane()] for _ in range(2)]


def foreign_cache(lane, shape, dtype):
    """As tt_transformers' allocate_vllm_kv_cache makes it: each chip's heads, called replicated."""

    def plane():
        return ttnn.as_tensor(
            torch.zeros(shape), device=lane, mesh_mapper=ttnn.ReplicateTensorToMesh(lane),
            layout=ttnn.TILE_LAYOUT, memory_config=ttnn.DRAM_MEMORY_CONFIG,
            dtype=getattr(ttnn, dtype),
        )  # fmt: skip

    return [[plane(), plane()] for _ in range(2)]


@pytest.mark.board("T3K")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_lanes", [2, 8])
@pytest.mark.parametrize(("make_cache", "rope"), [(native_cache, "hf"), (foreign_cache, "meta")])
def test_the_device_takes_it_and_compiles_nothing_after_the_warm_up(
    open_mock_mesh, dtype, num_lanes, make_cache, rope
):
    lanes = open_mock_mesh().lanes(num_lanes)
    tp = 8 // num_lanes
    layout = make_layout(dtype, heads=4, rope=rope)
    shape = (40, 4 // tp, 64, 64)
    cache = [make_cache(lane, shape, dtype) for lane in lanes]
    io = TTKVIO(cache, layout)
    io.warm_up()
    compiled = [lane.num_program_cache_entries() for lane in lanes]
    rng = np.random.default_rng(0)
    for lane in (0, num_lanes - 1):
        for num_rows in (1, 5, 30, 78):
            table = (1 + rng.permutation(39)).tolist()
            rows = io.read_rows(lane, table, 0, num_rows)
            assert rows.shape == (num_rows, layout.row_bytes)
            io.write_rows(lane, table, 0, rows)
    assert [lane.num_program_cache_entries() for lane in lanes] == compiled
