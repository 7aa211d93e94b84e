"""Table of the addresses of KV in the chips' memory, for processes without a device.

The table is ttnn's own (``KvChunkAddressTable``), as the migration layer of Tenstorrent's serving
stack reads it: per *config*, layer, slot and position one address in the DRAM of a chip. A paged
cache is interleaved page by page over the DRAM banks, and a page is a tile: 32 tokens by 32
elements of one head. So a chunk here is a tile, and there is a config for each head and each tile
of its width, first of K and then of V (``config_name``). Slots are sequences; an exported table is
valid for their block tables at that time.

Building and reading a table needs no cluster; ``lane_addresses`` queries an open one for addresses.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ttnn

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import BFLOAT8_B, BFLOAT8_B_TILE_BYTES, DTYPE_BYTES, ROW_TOKENS
from kv_transfer.sharding import head_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kv_transfer.layout import KVLayout

_BANK_SHIFT = 32
"""An address is the number of the DRAM bank (ttnn's "DRAM view") above 32 bits within it."""


@dataclass(frozen=True, slots=True)
class LaneAddresses:
    """Addresses of a lane's cache, which are the same on all of its chips.

    Attributes:
        bases: Per layer and plane (``2 * layer``, plus one for V) the address of the first page.
        page_bytes: Distance of pages in a bank.
        num_banks: DRAM banks that pages are interleaved over.
        chips: (mesh, chip) of the fabric, in the order of the lane's chips.
    """

    bases: tuple[int, ...]
    page_bytes: int
    num_banks: int
    chips: tuple[tuple[int, int], ...]


def lane_addresses(lane_cache: Sequence[Sequence[ttnn.Tensor]]) -> LaneAddresses:
    """Query an open mesh for the addresses of a lane's cache.

    Args:
        lane_cache: ``[layer][k | v]``.
    """
    planes = [plane for layer in lane_cache for plane in layer]
    device = planes[0].device()
    grid, (rows, columns) = device.dram_grid_size(), device.shape
    nodes = [
        device.get_fabric_node_id(ttnn.MeshCoordinate(row, column))
        for row, column in itertools.product(range(rows), range(columns))
    ]
    return LaneAddresses(
        bases=tuple(plane.buffer_address() for plane in planes),
        page_bytes=planes[0].buffer_aligned_page_size(),
        num_banks=grid.x * grid.y,
        chips=tuple((int(node.mesh_id), int(node.chip_id)) for node in nodes),
    )


def config_name(plane: int, head: int, tile: int) -> str:
    """Name the config of one tile of the width of a head.

    Names have equal lengths, as ttnn numbers configs in the order of their names when it reads a
    table.

    Args:
        plane: 0 for K, 1 for V.
        head: KV head of the model.
        tile: Which 32 elements of the head.
    """
    return f"{'kv'[plane]}{head:04}.{tile:04}"


def build_table(
    memory: LaneAddresses, layout: KVLayout, block_tables: Sequence[Sequence[int]], host: str
) -> ttnn.experimental.disaggregation.KvChunkAddressTable:
    """List the address of every tile of some sequences.

    Args:
        memory: Addresses of the cache.
        layout: Layout of the whole cache.
        block_tables: Blocks of each slot from position 0; later positions have size 0.
        host: Name of the chips' machine.

    Returns:
        The table; ``config_name`` names its configs, and a chunk is 32 tokens.

    Raises:
        InvalidLayoutError: The memory has another number of layers, or heads are not whole tiles.
    """
    tiles, rest = divmod(layout.head_dim, ROW_TOKENS)
    if rest or len(memory.bases) != layout.num_pieces:
        raise InvalidLayoutError(
            f"the cache has {len(memory.bases)} planes and heads of {layout.head_dim} elements; "
            f"the layout has {layout.num_pieces} planes and a tile {ROW_TOKENS} elements"
        )
    config = ttnn.experimental.disaggregation.KvChunkAddressTableConfig()
    config.num_layers = layout.num_layers
    config.num_slots = len(block_tables)
    longest = max((len(table) for table in block_tables), default=0)
    config.max_sequence_length = longest * layout.block_size
    config.chunk_n_tokens = ROW_TOKENS
    config.chunk_size_bytes = _tile_bytes(layout)
    names = itertools.product(range(layout.num_planes), range(layout.num_kv_heads), range(tiles))
    table = ttnn.experimental.disaggregation.KvChunkAddressTable(
        {config_name(*name): config for name in names}
    )
    nodes = [ttnn.FabricNodeId(ttnn.MeshId(mesh), chip) for mesh, chip in memory.chips]
    for node in nodes:
        table.set_fabric_node_host(node, host)
    shards = head_shards(layout.num_kv_heads, len(nodes))
    for head in range(layout.num_kv_heads):
        holders = [chip for chip, heads in enumerate(shards) if head in heads]
        location = ttnn.experimental.disaggregation.KvCacheLocation()
        location.device_group_index = table.add_device_group([nodes[chip] for chip in holders])
        location.size_bytes = config.chunk_size_bytes
        heads = shards[holders[0]]
        for plane, tile in itertools.product(range(layout.num_planes), range(tiles)):
            column = _Column(plane, heads.index(head), len(heads), tile)
            number = table.config_id_of(config_name(plane, head, tile))
            for layer, position, slot, page in _pages(layout, block_tables, column):
                piece = layer * layout.num_planes + plane
                location.noc_addr = _address(memory, piece, page)
                table.set(layer, position, slot, location, number)
    return table


def write_table(table: ttnn.experimental.disaggregation.KvChunkAddressTable, path: Path) -> None:
    """Write a table as protobuf, for ``import_from_protobuf_file`` of another process.

    Raises:
        OSError: The file cannot be written.
    """
    # Written beside and renamed, so that readers never see half a table. ttnn reports failure
    # without a reason.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(b"")
    ttnn.experimental.disaggregation.export_to_protobuf_file(table, str(partial))
    partial.replace(path)


@dataclass(frozen=True, slots=True)
class _Column:
    """Content of one config.

    Attributes:
        plane: 0 for K, 1 for V.
        head: KV head of the chip.
        num_heads: KV heads of the chip.
        tile: Which 32 elements of the head.
    """

    plane: int
    head: int
    num_heads: int
    tile: int


def _pages(
    layout: KVLayout, block_tables: Sequence[Sequence[int]], column: _Column
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (layer, first token, slot, page of the plane) of every chunk of a config."""
    tiles, per_block = layout.head_dim // ROW_TOKENS, layout.rows_per_block
    for slot, block_table in enumerate(block_tables):
        for index, block in enumerate(block_table):
            for row in range(per_block):
                unit = (block * column.num_heads + column.head) * per_block + row
                position = (index * per_block + row) * ROW_TOKENS
                for layer in range(layout.num_layers):
                    yield layer, position, slot, unit * tiles + column.tile


def _address(memory: LaneAddresses, piece: int, page: int) -> int:
    turn, bank = divmod(page, memory.num_banks)
    return bank << _BANK_SHIFT | memory.bases[piece] + turn * memory.page_bytes


def _tile_bytes(layout: KVLayout) -> int:
    if layout.dtype == BFLOAT8_B:
        return BFLOAT8_B_TILE_BYTES
    return ROW_TOKENS * ROW_TOKENS * DTYPE_BYTES[layout.dtype]
