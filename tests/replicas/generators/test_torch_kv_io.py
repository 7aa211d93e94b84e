"""KV blocks as bytes: exact round trips between caches of different lane counts."""

import numpy as np
import pytest
import torch

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import KVLayout
from replicas.generators.torch.kv_cache import TorchKVCache
from replicas.generators.torch.kv_io import TorchKVIO
from tests.replicas.generators.conftest import PROMPTS, make_generator
from tests.replicas.generators.paged_loop import PagedLoop

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


def make_cache(lanes, num_blocks, dtype="float32", random=True):
    cache = TorchKVCache((num_blocks, HEADS, SIZE, DIM), DTYPES[dtype], LAYERS, lanes)
    if random:
        for layer in cache.planes:
            for plane in layer:
                plane.normal_()
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_run_over_layer_plane_head_row_and_channel(dtype):
    cache = make_cache(2, 5, dtype)
    layout = make_layout(dtype)
    data = TorchKVIO(cache, layout).read_blocks(1, [4, 2])
    assert data.shape == (2, layout.bytes_per_block)
    assert data.dtype == np.uint8
    found = torch.from_numpy(data).view(DTYPES[dtype]).view(2, LAYERS, 2, HEADS, SIZE, DIM)
    for row, block in enumerate([4, 2]):
        for layer in range(LAYERS):
            for plane in range(2):
                assert torch.equal(found[row, layer, plane], cache[1][layer][plane][block])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lanes_from", "lanes_to"), [(1, 4), (4, 1), (2, 2)])
def test_a_round_trip_is_byte_exact_and_touches_only_its_blocks(dtype, lanes_from, lanes_to):
    source = make_cache(lanes_from, 6, dtype)
    target = make_cache(lanes_to, 9, dtype)
    before = [[plane.clone() for plane in layer] for layer in target.planes]
    reader, writer = (TorchKVIO(cache, make_layout(dtype)) for cache in (source, target))
    data = reader.read_blocks(lanes_from - 1, [5, 1, 3])
    data.setflags(write=False)
    writer.write_blocks(lanes_to - 1, [2, 8, 7], data)
    assert np.array_equal(writer.read_blocks(lanes_to - 1, [2, 8, 7]), data)
    for layer, old_layer in enumerate(before):
        for plane, old in enumerate(old_layer):
            first = (lanes_to - 1) * 9
            for block_from, block_to in ((5, 2), (1, 8), (3, 7)):
                old[first + block_to] = source[lanes_from - 1][layer][plane][block_from]
            assert torch.equal(target.planes[layer][plane], old)


def test_read_bytes_are_a_copy_that_may_be_written():
    cache = make_cache(1, 3)
    io = TorchKVIO(cache, make_layout())
    data = io.read_blocks(0, [1])
    data[:] = 0
    assert cache[0][0][0][1].any()
    assert io.read_blocks(0, []).shape == (0, make_layout().bytes_per_block)
    io.write_blocks(0, [], io.read_blocks(0, []))


@pytest.mark.parametrize("block_ids", [[-1], [3], [1, 7]])
def test_blocks_out_of_range_are_refused(block_ids):
    io = TorchKVIO(make_cache(1, 3), make_layout())
    data = np.zeros((len(block_ids), make_layout().bytes_per_block), np.uint8)
    with pytest.raises(ValueError, match="not within"):
        io.read_blocks(0, block_ids)
    with pytest.raises(ValueError, match="not within"):
        io.write_blocks(0, block_ids, data)


def test_the_null_block_is_not_written():
    io = TorchKVIO(make_cache(1, 3), make_layout())
    with pytest.raises(ValueError, match=r"not within 1\.\.2"):
        io.write_blocks(0, [0], io.read_blocks(0, [0]))


def test_data_of_another_shape_or_dtype_is_refused():
    io = TorchKVIO(make_cache(1, 3), make_layout())
    for data in (np.zeros((2, 4), np.uint8), io.read_blocks(0, [1]).astype(np.int8)):
        with pytest.raises(ValueError, match="instead of"):
            io.write_blocks(0, [1], data)


@pytest.mark.parametrize(
    "changes", [{"num_layers": 2}, {"head_dim": 32}, {"dtype": "float16"}, {"block_size": 64}]
)
def test_a_layout_of_another_cache_is_refused(changes):
    with pytest.raises(InvalidLayoutError, match="of a KV cache of"):
        TorchKVIO(make_cache(1, 3), make_layout(**changes))


def test_a_moved_sequence_decodes_as_if_it_had_stayed(tiny):
    """Prefill in one generator, decode in another with more lanes and other block ids."""
    model = tiny("qwen3")
    loops = []
    for lanes in (1, 4):
        generator = make_generator(model.config, tt_data_parallel=lanes)
        loop = PagedLoop(
            generator,
            model.config,
            num_lanes=lanes,
            slots_per_lane=8 // lanes,
            block_size=32,
            seed=lanes,
        )
        loops.append(loop)
    layout = make_layout(head_dim=32, num_layers=3)
    (one, two), (io_one, io_two) = loops, (TorchKVIO(loop.cache, layout) for loop in loops)
    prefilled, moved = one.add(PROMPTS[0], 12), two.add(PROMPTS[0], 12)
    one.step_prefill([prefilled])
    data = io_one.read_blocks(prefilled.lane, prefilled.block_ids)
    io_two.write_blocks(moved.lane, moved.block_ids, data)
    moved.token_ids = list(prefilled.token_ids)
    moved.num_computed_tokens = prefilled.num_computed_tokens
    for _ in range(11):
        two.step_decode([moved])
    assert moved.output == model.outputs[0]
