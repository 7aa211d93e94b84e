"""KV as bytes: exact round trips between caches of different lanes and block sizes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import KVLayout
from kv_transfer.shared_region import RegionFetch, RegionServer
from replicas.errors import ConfigError
from replicas.generators.torch.kv_cache import TorchKVCache
from replicas.generators.torch.kv_io import TorchKVIO

LAYERS, HEADS, SIZE, DIM = 3, 2, 32, 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def make_layout(dtype="float32", **changes):
    values = {
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "block_size": SIZE,
        "dtype": dtype,
        "rope": "hf",
        "model_fingerprint": "m",
    }
    return KVLayout(**(values | changes))


def make_cache(lanes, num_blocks, dtype="float32", size=SIZE, **options):
    shape = (num_blocks, HEADS, size, DIM)
    cache = TorchKVCache(shape, DTYPES[dtype], LAYERS, lanes, **options)
    for layer in cache.planes:
        for plane in layer:
            plane.normal_()
    return cache


def tokens_of(lane_cache, table):
    """All KV of a table's blocks as tokens: (layers, 2, heads, tokens, head size)."""
    layers = [torch.stack([plane[table] for plane in layer]) for layer in lane_cache]
    return torch.stack(layers).transpose(2, 3).flatten(3, 4)


@pytest.mark.parametrize("shares", [False, True])
def test_a_cache_starts_as_zeros_with_every_plane_of_a_lane_in_one_piece(shares):
    cache = TorchKVCache((3, HEADS, SIZE, DIM), torch.bfloat16, LAYERS, 2, shares=shares)
    assert (cache.shared_region is not None) == shares
    assert not cache.memory.any()
    for lane in range(2):
        for layer in range(LAYERS):
            for plane, tensor in enumerate(cache[lane][layer]):
                whole = cache.planes[layer][plane]
                assert tensor.shape == (3, HEADS, SIZE, DIM)
                assert tensor.is_contiguous()
                assert whole.is_contiguous()
                value = 1 + lane + 2 * (plane + 2 * layer)
                tensor.fill_(value)
                assert (whole[3 * lane : 3 * lane + 3] == value).all()
                start = cache.offsets[lane][2 * layer + plane]
                found = cache.memory[start : start + tensor.nbytes]
                assert np.array_equal(found, tensor.view(torch.uint8).numpy().ravel())
    # Nothing was written twice, and nothing of the memory belongs to no plane.
    assert len({tensor.max().item() for layer in cache.planes for tensor in layer}) == 2 * LAYERS
    assert cache.memory.nbytes == sum(p.nbytes for layer in cache.planes for p in layer)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1)])
def test_a_cache_of_nothing_is_refused(sizes):
    with pytest.raises(ConfigError, match="must be positive"):
        TorchKVCache(sizes, torch.float32, 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_run_over_layer_plane_head_token_and_channel(dtype):
    cache = make_cache(2, 5, dtype)
    layout = make_layout(dtype)
    data = TorchKVIO(cache, layout).read_rows(1, [4, 2], 0, 2)
    assert data.shape == (2, layout.row_bytes)
    assert data.dtype == np.uint8
    found = torch.from_numpy(data).view(DTYPES[dtype]).view(2, LAYERS, 2, HEADS, 32, DIM)
    for row, block in enumerate([4, 2]):
        for layer in range(LAYERS):
            for plane in range(2):
                assert torch.equal(found[row, layer, plane], cache[1][layer][plane][block])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([(1, 4), (4, 1), (2, 2)]),
    st.tuples(*[st.sampled_from([32, 64, 96, 128])] * 2),
    st.integers(0, 6),
    st.integers(0, 4),
    st.booleans(),
)
def test_rows_move_tokens_between_any_caches_and_touch_nothing_else(
    dtype, lanes, sizes, first, count, shares
):
    lane_from, lane_to = (n - 1 for n in lanes)
    source = make_cache(lanes[0], 12, dtype, sizes[0])
    target = make_cache(lanes[1], 12, dtype, sizes[1], shares=shares)
    reader, writer = (
        TorchKVIO(cache, make_layout(dtype, block_size=size))
        for cache, size in zip((source, target), sizes, strict=True)
    )
    table_from, table_to = [5, 1, 3, 11, 7, 2, 9, 8, 4, 6], [2, 8, 7, 1, 3, 10, 6, 5, 11, 4]
    everything = list(range(12))
    untouched = [tokens_of(lane, everything).clone() for lane in target[:lane_to]]
    wanted = tokens_of(target[lane_to], table_to).clone()
    others = [block for block in everything if block not in table_to]
    wanted_others = tokens_of(target[lane_to], others).clone()
    moved = slice(32 * first, 32 * (first + count))
    wanted[:, :, :, moved] = tokens_of(source[lane_from], table_from)[:, :, :, moved]

    data = reader.read_rows(lane_from, table_from, first, count)
    data.setflags(write=False)
    writer.write_rows(lane_to, table_to, first, data)

    assert torch.equal(tokens_of(target[lane_to], table_to), wanted)
    assert torch.equal(tokens_of(target[lane_to], others), wanted_others)
    for lane, old in zip(target[:lane_to], untouched, strict=True):
        assert torch.equal(tokens_of(lane, everything), old)
    assert np.array_equal(writer.read_rows(lane_to, table_to, first, count), data)


def test_read_bytes_are_a_copy_that_may_be_written():
    cache = make_cache(1, 3)
    io = TorchKVIO(cache, make_layout())
    data = io.read_rows(0, [1], 0, 1)
    data[:] = 0
    assert cache[0][0][0][1].any()
    assert io.read_rows(0, [], 0, 0).shape == (0, make_layout().row_bytes)
    io.write_rows(0, [], 0, io.read_rows(0, [], 0, 0))


def test_the_blocks_of_each_lane_are_the_caches_memory():
    source, target = make_cache(2, 4), make_cache(3, 4)
    lanes, others = (TorchKVIO(cache, make_layout()).host_blocks for cache in (source, target))
    assert (len(lanes), len(others)) == (2, 3)
    assert lanes[1].layout == make_layout()
    digests = lanes[1].digests([3, 1])
    assert others[2].copy_from(lanes[1], [3, 1], [1, 2], digests) == []
    for layer in range(LAYERS):
        for plane in range(2):
            assert torch.equal(target[2][layer][plane][[1, 2]], source[1][layer][plane][[3, 1]])
    others[2].zero_tail([1, 2], 45)
    for layer in target[2]:
        for plane in layer:
            assert not plane[2, :, 13:].any()
            assert plane[2, :, :13].all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_a_cache_of_its_own_asks_for_huge_pages():
    cache = TorchKVCache((256, HEADS, SIZE, DIM), torch.float32, LAYERS, 1)
    address = cache.memory.ctypes.data
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the cache is in no mapping")


def test_a_cache_that_is_not_shared_has_no_region():
    io = TorchKVIO(make_cache(1, 3), make_layout())
    assert io.shared_region is None
    assert io.region_layout is None


def test_another_process_finds_the_blocks_of_a_shared_cache():
    cache = make_cache(2, 4, "bfloat16", shares=True)
    layout = make_layout("bfloat16")
    io = TorchKVIO(cache, layout)
    server = RegionServer(io.shared_region, io.region_layout, lambda shown: True)
    fetch = RegionFetch(server.address, b"ticket")
    server.serve()
    mapped = fetch.poll()
    lanes = mapped.lanes(layout)
    mapped.close()
    server.close()
    for lane in range(2):
        wanted = io.read_rows(lane, [3, 0, 1, 2], 0, 4)
        assert np.array_equal(lanes[lane].read_rows([3, 0, 1, 2], 0, 4), wanted)
    cache[1][2][1][3].zero_()
    assert np.array_equal(lanes[1].read_rows([3], 0, 1), io.read_rows(1, [3], 0, 1))


@pytest.mark.parametrize("block_ids", [[-1], [3], [1, 7]])
def test_blocks_out_of_range_are_refused(block_ids):
    io = TorchKVIO(make_cache(1, 3), make_layout())
    data = np.zeros((len(block_ids), make_layout().row_bytes), np.uint8)
    with pytest.raises(ValueError, match="not within"):
        io.read_rows(0, block_ids, 0, len(block_ids))
    with pytest.raises(ValueError, match="not within"):
        io.write_rows(0, block_ids, 0, data)


def test_the_null_block_is_not_written():
    io = TorchKVIO(make_cache(1, 3, size=64), make_layout(block_size=64))
    row = io.read_rows(0, [0], 0, 1)
    for first, table in ((0, [0]), (1, [0]), (2, [1, 0]), (3, [1, 0])):
        with pytest.raises(ValueError, match="null block"):
            io.write_rows(0, table, first, row)
    with pytest.raises(ValueError, match="null block"):
        io.write_rows(0, [1, 0], 1, row.repeat(2, 0))
    io.write_rows(0, [0, 1, 0], 3, row)
    io.write_rows(0, [0], 0, row[:0])


def test_data_of_another_shape_or_dtype_is_refused():
    io = TorchKVIO(make_cache(1, 3), make_layout())
    for data in (np.zeros((2, 4), np.uint8), io.read_rows(0, [1], 0, 1).astype(np.int8)):
        with pytest.raises(ValueError, match="is needed"):
            io.write_rows(0, [1, 2], 0, data)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"head_dim": 32},
        {"dtype": "float16"},
        {"block_size": 64},
        {"num_planes": 1},
    ],
)
def test_a_layout_of_another_cache_is_refused(changes):
    with pytest.raises(InvalidLayoutError, match="of a KV cache of"):
        TorchKVIO(make_cache(1, 3), make_layout(**changes))
