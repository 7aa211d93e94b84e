"""Simulated KV as rows: exact, in the order that the layout says, and in the time of the link."""

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


def make(lanes=2, num_blocks=6, block_size=32, **options):
    cache, clock = PagedKVCache(lanes, num_blocks, block_size), FakeClock()
    layout = simulated_kv_layout(block_size, "test")
    return cache, clock, SimulatedKVIO(cache, layout, TIMING, clock, **options)


def test_a_row_is_k_of_its_tokens_and_then_v():
    cache, _, io = make()
    cache.write_tokens(1, [2, 4], list(range(64)), 0)
    data = io.read_rows(1, [2, 4], 1, 1)
    assert data.shape == (1, io.layout.row_bytes) == (1, 32 * 16)
    k, v = data.view(np.uint64).reshape(2, 32)
    rows = kv_rows(range(32, 64), range(32, 64))
    assert (k == rows[:, 0]).all()
    assert (v == rows[:, 1]).all()
    data[:] = 0
    assert cache.rows[1, 4].all(), "the bytes are the cache's own"


@pytest.mark.parametrize("sizes", [(32, 32), (32, 128), (128, 32), (64, 96)])
@pytest.mark.parametrize(("first", "count"), [(0, 12), (3, 1), (1, 7)])
def test_rows_go_from_blocks_of_one_size_to_blocks_of_another(sizes, first, count):
    ids, num_tokens = [9, 4, 7, 2, 11, 5, 3, 8, 1, 12, 6, 10], 12 * 32
    source, _, reader = make(1, 13, sizes[0])
    target, _, writer = make(2, 13, sizes[1])
    tables = [ids[: num_tokens // size] for size in sizes]
    tokens = list(range(num_tokens))
    source.write_tokens(0, tables[0], tokens, 0)
    writer.write_rows(1, tables[1], first, reader.read_rows(0, tables[0], first, count))
    wanted = PagedKVCache(1, 13, sizes[1])
    wanted.write_tokens(0, tables[1], tokens[first * 32 : (first + count) * 32], first * 32)
    assert (target.rows[1] == wanted.rows[0]).all()
    assert not target.rows[0].any()
    # The sums that decoding reads are those of the rows.
    lanes, table = np.array([1]), np.array([tables[1]])
    total = target.context_sums(lanes, table, np.array([num_tokens]))
    assert total[0] == wanted.rows.sum(dtype=np.uint64)


def test_a_transfer_takes_the_time_of_the_real_models_bytes_on_either_side():
    _, clock, io = make()
    data = io.read_rows(0, [1, 2, 3, 4], 1, 3)
    io.write_rows(0, [3, 2, 1], 0, data)
    seconds = 0.001 + 3 * 32 * 69_632 / 1e9
    assert clock.spent == [pytest.approx(seconds)] * 2


def test_without_rows_the_time_is_the_same_and_nothing_is_kept():
    cache, clock, io = make(num_blocks=1, keeps_rows=False)
    data = io.read_rows(7, [100, 200], 0, 2)
    io.write_rows(7, [100, 200], 0, data)
    assert data.shape == (2, 32 * 16)
    assert clock.spent == [pytest.approx(LINK.transfer_s(2 * 32 * 69_632))] * 2
    assert not cache.rows.any()


@pytest.mark.parametrize(
    ("table", "first", "count", "message"),
    [
        ([6], 0, 1, "are not within"),
        ([-1], 0, 1, "are not within"),
        ([1, 6], 0, 2, "are not within"),
        ([1, 2], -1, 1, "2 blocks of 1 rows"),
        ([1, 2], 1, 2, "2 blocks of 1 rows"),
        ([1, 2], 2, 1, "2 blocks of 1 rows"),
    ],
)
def test_rows_that_are_not_there_are_refused(table, first, count, message):
    _, _, io = make()
    with pytest.raises(ValueError, match=message):
        io.read_rows(0, table, first, count)
    with pytest.raises(ValueError, match=message):
        io.write_rows(0, table, first, np.zeros((count, 512), np.uint8))


@pytest.mark.parametrize(
    ("block", "num_bytes", "message"), [(0, 512, r"within 1\.\.5"), (1, 511, "instead of")]
)
def test_what_cannot_be_written_is_refused(block, num_bytes, message):
    _, _, io = make()
    with pytest.raises(ValueError, match=message):
        io.write_rows(0, [block], 0, np.zeros((1, num_bytes), np.uint8))


def test_a_devices_memory_is_not_shared():
    _, _, io = make()
    assert (io.host_blocks, io.shared_region, io.region_layout) == (None, None, None)


def test_another_layout_is_refused():
    cache = PagedKVCache(1, 4, 64)
    layout = simulated_kv_layout(simulated_config().block_size, "test")
    with pytest.raises(InvalidLayoutError, match="simulated KV cache"):
        SimulatedKVIO(cache, layout, TIMING, FakeClock())
