"""Addresses of KV for readers without a device: no cluster is needed to write or read a table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import ttnn

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.sharding import head_shards
from replicas.generators.ttnn.kv_table import (
    LaneAddresses,
    build_table,
    config_name,
    lane_addresses,
    write_table,
)
from tests.kv_transfer.sharded_connector import ShardedIO
from tests.tt.test_kv_io import make_layout

BASES = (64, 50_048, 100_032, 150_016)
NUM_BLOCKS = 9


def make_memory(tp, page_bytes, num_banks):
    chips = tuple((0, 10 + chip) for chip in range(tp))
    return LaneAddresses(BASES, page_bytes, num_banks, chips)


def banks_of(pieces, memory, tile_bytes):
    """A chip's DRAM with its planes in it, page by page round the banks: (bank, address) bytes."""
    banks = np.zeros((memory.num_banks, 300_000), np.uint8)
    for base, piece in zip(memory.bases, pieces, strict=True):
        for page, content in enumerate(piece.reshape(-1, tile_bytes)):
            at = base + page // memory.num_banks * memory.page_bytes
            banks[page % memory.num_banks, at : at + tile_bytes] = content
    return banks


@pytest.mark.parametrize(("heads", "tp"), [(4, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("num_banks", [7, 12])
@pytest.mark.parametrize("block_size", [32, 128])
def test_a_reader_finds_every_row_s_bytes(tmp_path, heads, tp, num_banks, block_size):
    layout = make_layout(heads=heads, block_size=block_size)
    memory = make_memory(tp, 1088 + 64, num_banks)
    rng = np.random.default_rng(0)
    local = make_layout(heads=len(head_shards(heads, tp)[0]), block_size=block_size)
    shape = (NUM_BLOCKS, local.piece_bytes)
    chips = [
        HostBlocks(local, [rng.integers(0, 256, shape, np.uint8) for _ in BASES]) for _ in range(tp)
    ]
    dram = {10 + chip: banks_of(held.pieces, memory, 1088) for chip, held in enumerate(chips)}
    tables = [[5, 2, 8], [7]]
    path = tmp_path / "kv.pb"
    write_table(build_table(memory, layout, tables, "host-a"), path)

    table = ttnn.experimental.disaggregation.import_from_protobuf_file(str(path))
    assert table.num_configs() == 2 * heads * 2
    units = (NUM_BLOCKS, local.num_kv_heads, local.rows_per_block, local.unit_bytes)
    shards = [[piece.reshape(units) for piece in held.pieces] for held in chips]
    whole = ShardedIO(layout, [shards])
    for slot, block_ids in enumerate(tables):
        num_rows = len(block_ids) * layout.rows_per_block
        wanted = whole.read_rows(0, block_ids, 0, num_rows).reshape(num_rows, 2, 2, heads, 2, 1088)
        for row, layer, plane, head, tile in np.ndindex(wanted.shape[:5]):
            number = table.config_id_of(config_name(plane, head, tile))
            location = table.lookup(layer, row * 32, slot, number)
            assert location.size_bytes == 1088
            nodes = table.get_device_group(location.device_group_index).fabric_node_ids
            assert len(nodes) == max(tp // heads, 1)
            assert {table.get_host(node) for node in nodes} == {"host-a"}
            bank, at = location.noc_addr >> 32, location.noc_addr & 0xFFFFFFFF
            found = dram[nodes[0].chip_id][bank, at : at + 1088]
            assert np.array_equal(found, wanted[row, layer, plane, head, tile])
    assert table.lookup(0, layout.block_size, 1, 0).size_bytes == 0  # behind the end of slot 1


def test_replicas_of_a_head_are_one_group():
    layout = make_layout(heads=2)
    table = build_table(make_memory(4, 1088, 12), layout, [[1]], "host-a")
    assert table.num_device_groups() == 2
    location = table.lookup(0, 0, 0, config_name(1, 1, 0))
    nodes = table.get_device_group(location.device_group_index).fabric_node_ids
    assert [node.chip_id for node in nodes] == [12, 13]


def test_configs_are_heads_of_k_and_then_of_v_also_when_read_again(tmp_path):
    layout = make_layout(heads=12, head_dim=96)
    write_table(build_table(make_memory(1, 1088, 12), layout, [[1]], "a"), tmp_path / "kv.pb")
    table = ttnn.experimental.disaggregation.import_from_protobuf_file(str(tmp_path / "kv.pb"))
    wanted = [config_name(p, h, t) for p in range(2) for h in range(12) for t in range(3)]
    assert [table.config_name(number) for number in range(table.num_configs())] == wanted


def test_a_table_of_bfloat16_has_its_tiles(tmp_path):
    table = build_table(make_memory(1, 2048, 8), make_layout("bfloat16"), [[1, 2]], "host-a")
    assert table.config(0).chunk_size_bytes == 2048
    assert table.config(0).max_sequence_length == 128
    assert table.config(0).num_slots == 1


def test_another_number_of_layers_is_refused_with_both():
    with pytest.raises(InvalidLayoutError, match=r"4 planes and .* the layout has 6"):
        build_table(make_memory(1, 1088, 8), make_layout(layers=3), [[1]], "host-a")


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    table = build_table(make_memory(1, 1088, 8), make_layout(), [[1]], "host-a")
    with pytest.raises(FileNotFoundError):
        write_table(table, tmp_path / "none" / "kv.pb")


@pytest.mark.board("T3K")
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_an_open_mesh_says_where_its_cache_is(open_mock_mesh, num_lanes):
    lanes = open_mock_mesh().lanes(num_lanes)
    tp = 8 // num_lanes
    seen = set()
    for lane in lanes:
        planes = [
            ttnn.from_torch(
                torch.zeros(4, 1, 64, 64, dtype=torch.bfloat16), dtype=ttnn.bfloat8_b,
                layout=ttnn.TILE_LAYOUT, device=lane, memory_config=ttnn.DRAM_MEMORY_CONFIG,
            )
            for _ in range(4)
        ]  # fmt: skip
        memory = lane_addresses([planes[:2], planes[2:]])
        assert memory.bases == tuple(plane.buffer_address() for plane in planes)
        assert len(set(memory.bases)) == 4
        assert (memory.page_bytes, memory.num_banks) == (1088, 12)
        assert len(set(memory.chips)) == tp
        seen |= set(memory.chips)
        table = build_table(memory, make_layout(heads=tp), [[1, 2]], "host-a")
        assert table.lookup(1, 64, 0, 0).noc_addr >> 32 < 12
    assert len(seen) == 8  # lanes have chips of their own
