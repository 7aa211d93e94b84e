"""Simulated KV as bytes: exact, in the order that the layout says, and in the time of the link."""

import numpy as np
import pytest

from kv_transfer.errors import InvalidLayoutError
from replicas.generators.simulated.kv_io import SimulatedKVIO, simulated_kv_layout
from replicas.generators.simulated.profiles import mesh_profile
from replicas.generators.simulated.timing import LinkTiming
from replicas.generators.simulated.tokens import PagedKVCache, kv_rows
from tests.replicas.generators.simulated.clocks import FakeClock
from tests.replicas.generators.simulated.engines import simulated_config

LINK = LinkTiming(0.001, 1e9)
TIMING = mesh_profile("n150", "Llama-3.1-8B").timing(block_size=32, link=LINK)


def make(lanes=2, num_blocks=6, **options):
    cache, clock = PagedKVCache(lanes, num_blocks, 32), FakeClock()
    layout = simulated_kv_layout(simulated_config().block_size, "test")
    return cache, clock, SimulatedKVIO(cache, layout, TIMING, clock, **options)


def test_bytes_are_k_of_every_token_and_then_v():
    cache, _, io = make()
    cache.write_tokens(1, [0, 4], list(range(64)), 0)
    data = io.read_blocks(1, [4])
    assert data.shape == (1, io.layout.bytes_per_block) == (1, 32 * 16)
    k, v = data.view(np.uint64).reshape(2, 32)
    rows = kv_rows(range(32, 64), range(32, 64))
    assert (k == rows[:, 0]).all()
    assert (v == rows[:, 1]).all()
    data[:] = 0
    assert cache.rows[1, 4].all(), "the bytes are the cache's own"


def test_a_round_trip_between_lanes_is_exact_and_touches_only_its_blocks():
    source, _, reader = make(lanes=1)
    target, _, writer = make(lanes=4)
    source.write_tokens(0, [2, 5], list(range(64)), 0)
    writer.write_blocks(3, [1, 4], reader.read_blocks(0, [2, 5]))
    assert (target.rows[3, [1, 4]] == source.rows[0, [2, 5]]).all()
    target.rows[3, [1, 4]] = 0
    assert not target.rows.any()


def test_a_transfer_takes_the_time_of_the_real_models_bytes_on_either_side():
    _, clock, io = make()
    data = io.read_blocks(0, [1, 2, 3])
    io.write_blocks(0, [3, 2, 1], data)
    seconds = 0.001 + 3 * 32 * 69_632 / 1e9
    assert clock.spent == [pytest.approx(seconds)] * 2


def test_without_rows_the_time_is_the_same_and_nothing_is_kept():
    cache, clock, io = make(num_blocks=1, keeps_rows=False)
    data = io.read_blocks(7, [100, 200])
    io.write_blocks(7, [100, 200], data)
    assert data.shape == (2, 32 * 16)
    assert clock.spent == [pytest.approx(LINK.transfer_s(2 * 32 * 69_632))] * 2
    assert not cache.rows.any()


@pytest.mark.parametrize("ids", [[6], [-1], [1, 6]])
def test_blocks_that_are_not_there_are_refused(ids):
    _, _, io = make()
    with pytest.raises(ValueError, match=r"0\.\.5"):
        io.read_blocks(0, ids)
    with pytest.raises(ValueError, match=r"1\.\.5"):
        io.write_blocks(0, ids, np.zeros((len(ids), 512), np.uint8))


def test_the_null_block_is_not_written():
    _, _, io = make()
    with pytest.raises(ValueError, match=r"1\.\.5"):
        io.write_blocks(0, [0], np.zeros((1, 512), np.uint8))


def test_data_of_another_shape_is_refused():
    _, _, io = make()
    with pytest.raises(ValueError, match="instead of"):
        io.write_blocks(0, [1], np.zeros((1, 511), np.uint8))


def test_another_layout_is_refused():
    cache = PagedKVCache(1, 4, 64)
    layout = simulated_kv_layout(simulated_config().block_size, "test")
    with pytest.raises(InvalidLayoutError, match="simulated KV cache"):
        SimulatedKVIO(cache, layout, TIMING, FakeClock())
