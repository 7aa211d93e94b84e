"""Shards: every split meets every other, and each token's bytes arrive where it says."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import BFLOAT8_B, DTYPE_BYTES, KVLayout
from kv_transfer.sharding import (
    Part,
    Shard,
    ShardedKVIO,
    head_shards,
    layer_stages,
    mesh_shards,
    transfer_plan,
)
from tests.kv_transfer.sharded_connector import ShardArray, shard_layout

COUNTS = (1, 2, 3, 4, 8)
BLOCK_SIZES = list(itertools.permutations((32, 64, 96, 128), 2))


def layout_of(num_kv_heads=8, **changes):
    values = {"num_layers": 3, "head_dim": 32, "block_size": 64, "dtype": "bfloat16"}
    return KVLayout(
        **{**values, **changes}, num_kv_heads=num_kv_heads, rope="hf", model_fingerprint="m"
    )


# --- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_kv_heads", "num_shards", "wanted"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (2, 3, [(0, 1), (0, 1), (1, 2)]),
        (3, 4, [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_are_split_in_order_with_the_rest_in_front(num_kv_heads, num_shards, wanted):
    assert head_shards(num_kv_heads, num_shards) == tuple(range(*bounds) for bounds in wanted)


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_head_is_somewhere_and_shards_are_as_equal_as_can_be(num_kv_heads, num_shards):
    shards = head_shards(num_kv_heads, num_shards)
    held = [head for shard in shards for head in shard]
    counts = [held.count(head) for head in range(num_kv_heads)]
    assert len(shards) == num_shards
    assert held == sorted(held)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


def test_layers_are_split_like_heads_but_never_held_twice():
    assert layer_stages(7, 3) == (range(3), range(3, 5), range(5, 7))
    with pytest.raises(InvalidLayoutError, match="4 pipeline stages of 3 layers"):
        layer_stages(3, 4)


@pytest.mark.parametrize("split", [head_shards, layer_stages])
@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, -1)])
def test_counts_that_are_none_are_refused(split, counts):
    with pytest.raises(InvalidLayoutError, match="must be positive"):
        split(*counts)


# --- plans ---------------------------------------------------------------------------------------


def shards_of_heads(*bounds):
    return [Shard(range(2), range(*pair)) for pair in bounds]


def test_a_plan_between_splits_that_do_not_divide_each_other():
    layers = range(3)
    plan = transfer_plan(mesh_shards(layout_of(8), 3), mesh_shards(layout_of(8), 2))
    assert plan == (
        Part(0, 0, layers, range(3)),
        Part(1, 0, layers, range(3, 4)),
        Part(1, 1, layers, range(4, 6)),
        Part(2, 1, layers, range(6, 8)),
    )


def test_replicas_take_turns_by_the_number_of_the_destination():
    plan = transfer_plan(mesh_shards(layout_of(2), 8), mesh_shards(layout_of(2), 4))
    assert [(part.source, part.destination) for part in plan] == [(0, 0), (1, 1), (6, 2), (7, 3)]


def test_a_latent_cache_is_fetched_from_every_replica_in_turn():
    layout = layout_of(1, num_planes=1)
    plan = transfer_plan(mesh_shards(layout, 3), mesh_shards(layout, 8))
    assert [part.source for part in plan] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_neighbours_from_one_source_are_one_part():
    # The second source cuts the range in two; the first has all of it.
    plan = transfer_plan(shards_of_heads((0, 4), (0, 2)), shards_of_heads((0, 4)))
    assert plan == (Part(0, 0, range(2), range(4)),)


def test_stages_meet_by_the_same_algebra():
    plan = transfer_plan(mesh_shards(layout_of(2), 1, 2), mesh_shards(layout_of(2), 2, 3))
    assert [(p.source, p.destination, tuple(p.layers), tuple(p.heads)) for p in plan] == [
        (0, 0, (0,), (0,)),
        (0, 1, (0,), (1,)),
        (0, 2, (1,), (0,)),
        (0, 3, (1,), (1,)),
        (1, 4, (2,), (0,)),
        (1, 5, (2,), (1,)),
    ]


def test_what_no_source_has_is_named():
    with pytest.raises(InvalidLayoutError, match=r"heads \[2, 3\) of layers \[0, 2\).*shard 1"):
        transfer_plan(shards_of_heads((0, 2), (3, 4)), shards_of_heads((0, 2), (1, 4)))
    with pytest.raises(InvalidLayoutError, match=r"layers \[2, 3\)"):
        transfer_plan(shards_of_heads((0, 4)), [Shard(range(3), range(4))])


@st.composite
def splits(draw, count):
    """Ranges that cover 0 to count, in any order, some of them overlapping or twice."""
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    spans = [range(*pair) for pair in itertools.pairwise([0, *cuts, count])]
    ends = st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(lambda e: e[0] < e[1])
    spans += [range(*pair) for pair in draw(st.lists(ends, max_size=4))]
    return draw(st.permutations(spans))


@st.composite
def meshes(draw, num_layers, num_heads):
    return [Shard(*pair) for pair in itertools.product(
        draw(splits(num_layers)), draw(splits(num_heads)))]  # fmt: skip


@given(meshes(3, 6), meshes(3, 6))
def test_any_plan_covers_each_destination_once_from_shards_that_have_it(sources, destinations):
    plan = transfer_plan(sources, destinations)
    for index, destination in enumerate(destinations):
        got = []
        for part in plan:
            if part.destination == index:
                source = sources[part.source]
                got += itertools.product(part.layers, part.heads)
                assert set(part.layers) <= set(source.layers)
                assert set(part.heads) <= set(source.heads)
        assert sorted(got) == list(itertools.product(destination.layers, destination.heads))


# --- bytes ---------------------------------------------------------------------------------------


def token_offsets(layout):
    """Per token of a unit the offsets of its bytes, (32, n), from the definition of the dtype."""
    if layout.dtype != BFLOAT8_B:
        size = layout.head_dim * DTYPE_BYTES[layout.dtype]
        return np.arange(32 * size).reshape(32, size)
    offsets = []
    for token in range(32):
        lower, row = divmod(token, 16)
        found = []
        for tile in range(layout.head_dim // 32):
            for right in range(2):
                face = 2 * lower + right
                elements = 1088 * tile + 64 + 256 * face + 16 * row
                found += [1088 * tile + 16 * face + row, *range(elements, elements + 16)]
        offsets.append(found)
    return np.array(offsets)


class Coordinates:
    """Bytes that say where they belong: no two of (layer, plane, head, token) have the same."""

    def __init__(self, layout, num_tokens):
        self.layout, self.offsets = layout, token_offsets(layout)
        self.num_tokens = num_tokens
        assert sorted(self.offsets.flatten()) == list(range(layout.unit_bytes))

    def unit(self, layer, plane, head, row):
        """Bytes of one unit."""
        layout = self.layout
        unit = np.empty(layout.unit_bytes, np.uint8)
        for token in range(32):
            place = (layer * layout.num_planes + plane) * layout.num_kv_heads + head
            code = np.uint32(place * self.num_tokens + 32 * row + token + 1)
            unit[self.offsets[token]] = np.resize(np.array([code]).view(np.uint8),
                                                  len(self.offsets[token]))  # fmt: skip
        return unit

    def whole(self):
        """Bytes of all units, (row, layer, plane, head, byte)."""
        layout = self.layout
        shape = (self.num_tokens // 32, layout.num_layers, layout.num_planes, layout.num_kv_heads)
        units = [self.unit(*rest, row) for row, *rest in itertools.product(*map(range, shape))]
        return np.stack(units).reshape(*shape, -1)


def make_memories(layout, shards, num_blocks):
    return [ShardArray.empty(shard_layout(layout, shard), num_blocks) for shard in shards]


def places(layout, shards, table, num_rows):
    """Every unit of every shard: (shard, piece, head there, block, row), and what it is for all."""
    for index, shard in enumerate(shards):
        for layer, plane, head, row in itertools.product(
            shard.layers, range(layout.num_planes), shard.heads, range(num_rows)
        ):
            block, row_of_block = divmod(row, layout.rows_per_block)
            piece = (layer - shard.layers.start) * layout.num_planes + plane
            there = (table[block], head - shard.heads.start, row_of_block)
            yield index, piece, there, (row, layer, plane, head)


def table_of(layout, num_tokens, seed):
    """A scattered block table, block 0 left out, and how many blocks there are."""
    num_blocks = layout.num_blocks(num_tokens) + 3
    ids = 1 + np.random.default_rng(seed).permutation(num_blocks - 1)
    return [int(i) for i in ids[: layout.num_blocks(num_tokens)]], num_blocks


HEADS = {"one head": (1, 2), "two heads": (2, 2), "eight heads": (8, 2), "latent": (1, 1)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", BFLOAT8_B])
@pytest.mark.parametrize(("num_kv_heads", "num_planes"), HEADS.values(), ids=HEADS)
def test_each_token_arrives_in_every_replica_that_should_have_it(num_kv_heads, num_planes, dtype):
    layout = layout_of(num_kv_heads, num_planes=num_planes, num_layers=2, dtype=dtype)
    num_rows = 7
    truth = Coordinates(layout, 32 * num_rows).whole()
    assert (
        len({unit.tobytes() for unit in truth.reshape(-1, layout.unit_bytes)}) == truth[..., 0].size
    )
    pairs = itertools.product(COUNTS, COUNTS)
    for (num_sources, num_targets), sizes in zip(pairs, itertools.cycle(BLOCK_SIZES)):
        source, target = (msgspec.structs.replace(layout, block_size=size) for size in sizes)
        shards = mesh_shards(source, num_sources)
        table, num_blocks = table_of(source, 32 * num_rows, seed=1)
        memories = make_memories(source, shards, num_blocks)
        for shard, piece, there, what in places(source, shards, table, num_rows):
            memories[shard].pieces[piece][there] = truth[what]
        producer = ShardedKVIO(source, shards, [memories])

        shards = mesh_shards(target, num_targets)
        table_there, num_blocks = table_of(target, 32 * num_rows, seed=2)
        received = make_memories(target, shards, num_blocks)
        consumer = ShardedKVIO(target, shards, [received])
        for first, last in ((0, 3), (3, 4), (4, num_rows)):
            rows = producer.read_rows(0, table, first, last - first)
            assert np.array_equal(rows, truth[first:last].reshape(last - first, -1))
            consumer.write_rows(0, table_there, first, rows)
        untouched = make_memories(target, shards, num_blocks)
        for shard, piece, there, what in places(target, shards, table_there, num_rows):
            assert np.array_equal(received[shard].pieces[piece][there], truth[what]), what
            untouched[shard].pieces[piece][there] = truth[what]
        for memory, wanted in zip(received, untouched, strict=True):
            assert np.array_equal(memory.pieces, wanted.pieces)


@given(st.data())
def test_any_split_reads_back_what_was_written_in_any_other(data):
    layout = layout_of(5, num_layers=3, head_dim=1, block_size=96)
    rows = np.random.default_rng(0).integers(0, 256, (5, layout.row_bytes), np.uint8)
    shards = data.draw(meshes(3, 5))
    io = ShardedKVIO(layout, shards, [make_memories(layout, shards, 4)])
    io.write_rows(0, [3, 1], 0, rows)
    first = data.draw(st.integers(0, 4))
    assert np.array_equal(io.read_rows(0, [3, 1], first, 5 - first), rows[first:])


def test_stages_and_shards_keep_lanes_apart():
    layout = layout_of(2)
    shards = mesh_shards(layout, 3, 2)
    io = ShardedKVIO(layout, shards, [make_memories(layout, shards, 3) for _ in range(2)])
    one, other = np.random.default_rng(0).integers(0, 256, (2, 2, layout.row_bytes), np.uint8)
    io.write_rows(0, [2], 0, one)
    io.write_rows(1, [2], 0, other)
    assert np.array_equal(io.read_rows(0, [2], 0, 2), one)
    assert np.array_equal(io.read_rows(1, [2], 0, 2), other)


def test_reading_asks_one_replica_of_each_head():
    layout = layout_of(2)
    shards = mesh_shards(layout, 8)
    memories = make_memories(layout, shards, 2)
    ShardedKVIO(layout, shards, [memories]).read_rows(0, [1], 0, 1)
    assert [memory.num_reads for memory in memories] == [1, 0, 0, 0, 1, 0, 0, 0]


def test_host_blocks_are_shard_memory():
    layout = layout_of(3, block_size=64)
    shards = mesh_shards(layout, 2)
    memories = []
    for shard in shards:
        part = shard_layout(layout, shard)
        pieces = [np.zeros((3, part.piece_bytes), np.uint8) for _ in range(part.num_pieces)]
        memories.append(HostBlocks(part, pieces))
    io = ShardedKVIO(layout, shards, [memories])
    arrays = make_memories(layout, shards, 3)
    other = ShardedKVIO(layout, shards, [arrays])
    rows = np.random.default_rng(0).integers(0, 256, (3, layout.row_bytes), np.uint8)
    for each in (io, other):
        each.write_rows(0, [2, 1], 1, rows)
    assert np.array_equal(io.read_rows(0, [2, 1], 1, 3), rows)
    for memory, array in zip(memories, arrays, strict=True):
        assert np.array_equal(memory.read_rows([2, 1], 1, 3), array.read_rows([2, 1], 1, 3))


# --- refusals ------------------------------------------------------------------------------------


def test_shards_that_are_no_cache_are_refused():
    layout = layout_of(4)
    half = [Shard(range(3), range(2))]
    with pytest.raises(InvalidLayoutError, match=r"no source shard holds heads \[2, 4\)"):
        ShardedKVIO(layout, half, [make_memories(layout, half, 2)])
    more = [Shard(range(3), range(5))]
    with pytest.raises(InvalidLayoutError, match="outside 3 layers of 4 KV heads"):
        ShardedKVIO(layout, more, [make_memories(layout, more, 2)])


def test_memory_that_is_laid_out_otherwise_is_refused():
    layout = layout_of(4)
    shards = mesh_shards(layout, 2)
    memories = make_memories(msgspec.structs.replace(layout, block_size=32), shards, 2)
    with pytest.raises(InvalidLayoutError, match=r"shards of lane 1 are laid out"):
        ShardedKVIO(layout, shards, [make_memories(layout, shards, 2), memories])
    with pytest.raises(InvalidLayoutError, match=r"shards of lane 0 are laid out"):
        ShardedKVIO(layout, shards, [make_memories(layout, shards, 2)[:1]])


def test_rows_of_another_shape_are_refused():
    layout = layout_of(4)
    shards = mesh_shards(layout, 2)
    io = ShardedKVIO(layout, shards, [make_memories(layout, shards, 2)])
    for data in (
        np.zeros((1, layout.row_bytes - 1), np.uint8),
        np.zeros(layout.row_bytes, np.uint8),
        np.zeros((1, layout.row_bytes), np.int8),
    ):
        with pytest.raises(ValueError, match="instead of"):
            io.write_rows(0, [1], 0, data)
