"""Byte access to KV blocks of a Tenstorrent mesh, for KV transfer.

A paged cache is ``[lane][layer][k | v]``, each a mesh tensor of (num_blocks, KV heads of a chip,
block_size, head_dim) in tiles in DRAM. Its bytes on one chip are *units* of 32 tokens of one head,
ordered by (block, head, row of the block). A unit is its tiles from left to right: in bfloat8_b
exactly the transferred bytes, in bfloat16 reordered from and to rows of tokens. So a cache is
viewed as (units, 1, 32, head_dim), without a copy:

- Reading takes neighbouring units with ``ttnn.narrow``, a view that starts at the first DRAM bank,
  and copies them to the host. No program runs.
- Writing copies units into a staging tensor of one of a few lengths and runs
  ``paged_fill_cache`` on the view, whose blocks are then units. Lengths are padded with unit 0,
  which is in the null block, and zeros, which do no harm there. So only two programs are needed,
  compiled by ``TTKVIO.warm_up``; they and the staging tensors must exist before a trace is
  captured.

Only the named blocks are written. Calls on a lane are queued between two forward passes, on command
queue 0.

Source: vllm-tt-plugin's and tt_transformers' caches have this form, so they can be transferred,
too.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
import ttnn
from numpy.typing import NDArray

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import BFLOAT8_B, ROW_TOKENS
from kv_transfer.sharding import head_shards
from replicas.errors import DeviceError
from replicas.generators.ttnn.mesh import ttnn_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_transfer.connector import KVDeviceIO
    from kv_transfer.layout import KVLayout

    KVCache: TypeAlias = Sequence[Sequence[Sequence[ttnn.Tensor]]]
    """[lane][layer][k | v]"""

Bytes: TypeAlias = NDArray[np.uint8]

FILL_UNITS = (32, 256)
"""Lengths of a write in units: four rows of eight heads, and 1,024 tokens of them."""

_READ_BYTES = 64 * 2**20
"""Largest copy to the host from each chip."""

_FACE = ROW_TOKENS // 2
_DTYPES = (BFLOAT8_B, "bfloat16")


# ---- bytes


def tiles_to_rows(units: Bytes, head_dim: int) -> Bytes:
    """Turn bfloat16 tiles into rows of tokens.

    Args:
        units: (n, bytes of a unit): tiles from left to right, each of four faces of 16x16, left
            before right and upper before lower.
        head_dim: Elements of a token; a multiple of 32.

    Returns:
        (n, bytes of a unit): arrays (32, head_dim).
    """
    tiles = units.view(np.uint16).reshape(-1, head_dim // ROW_TOKENS, 2, 2, _FACE, _FACE)
    rows = np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3, 5))
    return rows.view(np.uint8).reshape(units.shape)


def rows_to_tiles(units: Bytes, head_dim: int) -> Bytes:
    """Turn rows of tokens into bfloat16 tiles; see ``tiles_to_rows``."""
    rows = units.view(np.uint16).reshape(-1, 2, _FACE, head_dim // ROW_TOKENS, 2, _FACE)
    tiles = np.ascontiguousarray(rows.transpose(0, 3, 1, 4, 2, 5))
    return tiles.view(np.uint8).reshape(units.shape)


def _runs(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge ids that follow each other: (first position, first id, length)."""
    starts = [i for i, block in enumerate(ids) if i == 0 or block != ids[i - 1] + 1]
    return [(start, ids[start], stop - start) for start, stop in pairwise([*starts, len(ids)])]


def _unit_ids(block_ids: Sequence[int], rows: range, layout: KVLayout) -> NDArray[np.int32]:
    """Number the units of rows of a request on a chip, in the order (row, head)."""
    heads, per_block = layout.num_kv_heads, layout.rows_per_block
    table = np.asarray(block_ids, np.int32)
    row = np.asarray(rows, np.int32)
    first = table[row // per_block] * (heads * per_block) + row % per_block
    units: NDArray[np.int32] = first[:, None] + np.arange(heads, dtype=np.int32) * per_block
    return units.reshape(-1)


# ---- device


class LaneUnits(Protocol):
    """Units of one lane, on all of its chips, in the device's byte order.

    A piece is one plane of one layer: ``2 * layer``, plus one for V.
    """

    @property
    def num_chips(self) -> int:
        """Chips of the lane."""

    def read(self, piece: int, first: int, count: int) -> list[Bytes]:
        """Copy neighbouring units out: (count, bytes of a unit) of each chip."""

    def write(self, units: NDArray[np.int32], chips: Sequence[Bytes]) -> None:
        """Write units.

        Args:
            units: Target units, without duplicates.
            chips: (pieces, len(units), bytes of a unit) of each chip.
        """

    def warm_up(self) -> None:
        """Compile the programs of the first write."""


class TTLaneUnits:
    """``LaneUnits`` of mesh tensors.

    Owns the staging tensors for its lifetime, but not the cache.
    """

    def __init__(self, planes: Sequence[ttnn.Tensor]) -> None:
        """View a lane's cache as units, and allocate the staging tensors for writes.

        Args:
            planes: K and V of each layer, of one shape and dtype.

        Raises:
            DeviceError: The device refused.
        """
        num_blocks, heads, block_size, head_dim = planes[0].shape
        self._device = planes[0].device()
        rows, columns = self._device.shape
        self._coordinates = [
            ttnn.MeshCoordinate(row, column) for row in range(rows) for column in range(columns)
        ]
        self._dtype = planes[0].dtype
        self._head_dim = head_dim
        grid = self._device.dram_grid_size()
        num_banks = grid.x * grid.y
        self._alignment = num_banks // math.gcd(num_banks, head_dim // ROW_TOKENS)
        shape = (num_blocks * heads * block_size // ROW_TOKENS, 1, ROW_TOKENS, head_dim)
        try:
            self._planes = [ttnn.experimental.view(plane, shape) for plane in planes]
            self._stages = {
                length: (
                    self._on_device(_stage_shape(length, head_dim), self._dtype),
                    self._on_device((1, length), ttnn.int32),
                )
                for length in FILL_UNITS
            }
        except RuntimeError as error:
            raise DeviceError(f"cannot prepare KV transfer: {ttnn_message(error)}") from error

    @property
    def num_chips(self) -> int:
        """Chips of the lane."""
        return len(self._coordinates)

    def read(self, piece: int, first: int, count: int) -> list[Bytes]:
        """Copy neighbouring units out: (count, bytes of a unit) of each chip.

        Raises:
            DeviceError: The device refused.
        """
        start = first - first % self._alignment
        try:
            view = ttnn.narrow(self._planes[piece], 0, start, first + count - start)
            shards = self._shards(ttnn.from_device(view))
        except RuntimeError as error:
            raise DeviceError(f"KV cannot be read: {ttnn_message(error)}") from error
        return [shard.reshape(first + count - start, -1)[first - start :] for shard in shards]

    def write(self, units: NDArray[np.int32], chips: Sequence[Bytes]) -> None:
        """Write units; see ``LaneUnits.write``.

        Raises:
            DeviceError: The device refused.
        """
        try:
            for start, length in _groups(len(units)):
                group = slice(start, start + length)
                self._fill(units[group], [chip[:, group] for chip in chips])
        except RuntimeError as error:
            raise DeviceError(f"KV cannot be written: {ttnn_message(error)}") from error

    def warm_up(self) -> None:
        """Compile the programs for writes, by writing zeros to the null block.

        Raises:
            DeviceError: The device refused.
        """
        no_units = np.empty(0, np.int32)
        none = np.empty((1, 0, 1), np.uint8)
        try:
            for length in FILL_UNITS:
                self._fill(no_units, [none] * self.num_chips, length)
        except RuntimeError as error:
            raise DeviceError(f"KV cannot be written: {ttnn_message(error)}") from error

    def _fill(
        self, units: NDArray[np.int32], chips: Sequence[Bytes], length: int | None = None
    ) -> None:
        """Write as many units as fit a staging tensor, in every piece."""
        length = length or _stage_length(len(units))
        stage, table = self._stages[length]
        ids = np.zeros(length, np.int32)
        ids[: len(units)] = units
        host_table = self._on_host((1, length), ttnn.int32)
        for shard in self._shards(host_table):
            shard[:] = ids.view(np.uint8)
        ttnn.copy_host_to_device_tensor(host_table, table)
        host_stage = self._on_host(_stage_shape(length, self._head_dim), self._dtype)
        held = [shard.reshape(length, -1) for shard in self._shards(host_stage)]
        for piece in range(len(chips[0])):
            # One host buffer for all pieces, as a copy has read it when it returns.
            for rows, chip in zip(held, chips, strict=True):
                rows[: len(units)] = chip[piece]
                rows[len(units) :] = 0
            ttnn.copy_host_to_device_tensor(host_stage, stage)
            ttnn.experimental.paged_fill_cache(self._planes[piece], stage, table, batch_idx=0)

    def _on_device(self, shape: tuple[int, ...], dtype: ttnn.DataType) -> ttnn.Tensor:
        layout = ttnn.ROW_MAJOR_LAYOUT if dtype == ttnn.int32 else ttnn.TILE_LAYOUT
        return ttnn.allocate_tensor_on_device(
            ttnn.Shape(shape), dtype, layout, self._device, ttnn.DRAM_MEMORY_CONFIG
        )

    def _on_host(self, shape: tuple[int, ...], dtype: ttnn.DataType) -> ttnn.Tensor:
        layout = ttnn.ROW_MAJOR_LAYOUT if dtype == ttnn.int32 else ttnn.TILE_LAYOUT
        return ttnn.allocate_tensor_on_host(
            ttnn.Shape(shape), dtype, layout, self._device, ttnn.DRAM_MEMORY_CONFIG
        )

    def _shards(self, host: ttnn.Tensor) -> list[Bytes]:
        return host_shards(host, self._coordinates)


def host_shards(host: ttnn.Tensor, coordinates: Sequence[ttnn.MeshCoordinate]) -> list[Bytes]:
    """Return views of each chip's bytes in a host tensor; writes to them change the tensor.

    Args:
        host: A tensor on the host.
        coordinates: Coordinates of the chips.

    Returns:
        uint8, one dimension, the tensor's own memory.
    """
    buffer = host.host_buffer()
    return [torch.as_tensor(buffer.get_shard(at)).numpy() for at in coordinates]


def _stage_shape(length: int, head_dim: int) -> tuple[int, ...]:
    return (1, 1, length * ROW_TOKENS, head_dim)


def _stage_length(num_units: int) -> int:
    """Return the shortest staging length that fits so many units, else the longest."""
    return next((length for length in FILL_UNITS if num_units <= length), FILL_UNITS[-1])


def _groups(num_units: int) -> Iterator[tuple[int, int]]:
    """Cut units into (first, length) for the staging tensors."""
    start = 0
    while start < num_units:
        length = min(num_units - start, FILL_UNITS[-1])
        yield start, length
        start += length


# ---- the engine's side


class TTKVIO:
    """Byte access to a paged cache on a mesh; implements ``kv_transfer.connector.KVDeviceIO``.

    Owns the staging tensors of its lanes. Writes the given cache, on the engine's core thread only.

    Attributes:
        host_blocks: None: the blocks are in the chips' memory.
        shared_region: None.
        region_layout: None.
    """

    host_blocks: None = None
    shared_region: None = None
    region_layout: None = None

    def __init__(
        self,
        kv_cache: KVCache,
        layout: KVLayout,
        *,
        open_lane: Callable[[Sequence[ttnn.Tensor]], LaneUnits] = TTLaneUnits,
    ) -> None:
        """View the cache's memory as bytes.

        Args:
            kv_cache: The cache, of this project's generator or of one for vllm-tt-plugin.
            layout: The layout that peers know; must describe this cache.
            open_lane: Creates the units of a lane from K and V of each layer.

        Raises:
            InvalidLayoutError: The layout is not the cache's; gives both.
            DeviceError: The device refused.
        """
        self._lanes = tuple(
            open_lane([plane for layer in lane for plane in layer]) for lane in kv_cache
        )
        self._heads = head_shards(layout.num_kv_heads, self._lanes[0].num_chips)
        self._num_blocks = _check_layout(kv_cache, layout, self._heads)
        self._layout = layout
        self._chip_layout = msgspec.structs.replace(layout, num_kv_heads=len(self._heads[0]))

    @property
    def layout(self) -> KVLayout:
        """Layout of the bytes."""
        return self._layout

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> Bytes:
        """Copy rows out; see ``KVDeviceIO.read_rows``.

        Raises:
            ValueError: A block id is out of range, or the table too short.
            DeviceError: The device refused.
        """
        first, ids = self._covered(block_ids, first_row, num_rows)
        layout = self._layout
        per_block = layout.rows_per_block
        shape = (len(ids), per_block, layout.num_pieces, layout.num_kv_heads, layout.unit_bytes)
        blocks = np.empty(shape, np.uint8)
        for position, block, length in _runs(ids):
            for piece in range(layout.num_pieces):
                target = blocks[position : position + length, :, piece]
                self._read_run(self._lanes[lane], piece, block, target)
        first_row -= first * per_block
        return blocks.reshape(-1, layout.row_bytes)[first_row : first_row + num_rows]

    def write_rows(self, lane: int, block_ids: Sequence[int], first_row: int, data: Bytes) -> None:
        """Copy rows in; see ``KVDeviceIO.write_rows``.

        Raises:
            ValueError: A block id is out of range or the null block's, the table is too short, or
                ``data`` has another shape or dtype.
            DeviceError: The device refused.
        """
        layout = self._layout
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != layout.row_bytes:
            raise ValueError(
                f"data of {data.shape} {data.dtype} instead of (n, {layout.row_bytes}) uint8"
            )
        _, ids = self._covered(block_ids, first_row, len(data))
        if 0 in ids:
            raise ValueError("block 0 is the null block, of no sequence, and must not be written")
        if not len(data):
            return
        rows = range(first_row, first_row + len(data))
        units = _unit_ids(block_ids, rows, self._chip_layout)
        by_row = data.reshape(-1, layout.num_pieces, layout.num_kv_heads, layout.unit_bytes)
        by_piece = by_row.swapaxes(0, 1)
        shards = [by_piece[:, :, heads.start : heads.stop] for heads in self._heads]
        self._lanes[lane].write(units, [self._to_device(shard) for shard in shards])

    def warm_up(self) -> None:
        """Compile the programs for writes; call before a trace is captured.

        Raises:
            DeviceError: The device refused.
        """
        for lane in self._lanes:
            lane.warm_up()

    def _covered(
        self, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> tuple[int, list[int]]:
        """Return the part of a table that contains these rows, and its first index."""
        if first_row < 0 or num_rows < 0:
            raise ValueError(f"{num_rows} rows from row {first_row}: neither may be negative")
        first, end = self._layout.covering(first_row, num_rows)
        if end > len(block_ids):
            raise ValueError(
                f"a table of {len(block_ids)} blocks of {self._layout.block_size} tokens where "
                f"{end} are needed"
            )
        ids = [int(block) for block in block_ids[first:end]]
        if ids and not 0 <= min(ids) <= max(ids) < self._num_blocks:
            raise ValueError(f"block ids {ids} are not within 0..{self._num_blocks - 1}")
        return first, ids

    def _read_run(self, lane: LaneUnits, piece: int, block: int, target: Bytes) -> None:
        """Read neighbouring blocks of a piece.

        Args:
            lane: The lane.
            piece: The piece.
            block: The first block.
            target: (blocks, rows of a block, KV heads of all chips, bytes of a unit).
        """
        layout = self._chip_layout
        per_block = layout.num_kv_heads * layout.rows_per_block
        at_once = max(_READ_BYTES // layout.piece_bytes, 1)
        shape = (-1, layout.num_kv_heads, layout.rows_per_block, layout.unit_bytes)
        for start in range(0, len(target), at_once):
            part = target[start : start + at_once]
            found = lane.read(piece, (block + start) * per_block, len(part) * per_block)
            for heads, units in dict(zip(self._heads, found, strict=True)).items():  # no replicas
                ordered = self._from_device(units).reshape(shape).swapaxes(1, 2)
                part[:, :, heads.start : heads.stop] = ordered

    def _from_device(self, units: Bytes) -> Bytes:
        if self._layout.dtype == BFLOAT8_B:
            return units
        return tiles_to_rows(np.ascontiguousarray(units), self._layout.head_dim)

    def _to_device(self, shard: Bytes) -> Bytes:
        """Copy (pieces, rows, heads, unit_bytes) to (pieces, rows * heads, unit_bytes)."""
        units = shard.reshape(len(shard), -1, self._layout.unit_bytes)
        if self._layout.dtype == BFLOAT8_B:
            return units
        return rows_to_tiles(np.ascontiguousarray(units), self._layout.head_dim)


def _check_layout(kv_cache: KVCache, layout: KVLayout, chips: Sequence[range]) -> int:
    """Check that the layout is the cache's; return its blocks per lane, null block included."""
    k = kv_cache[0][0][0]
    num_blocks, heads, block_size, head_dim = k.shape
    dtype = next((name for name in _DTYPES if k.dtype == getattr(ttnn, name)), str(k.dtype))
    found = (len(kv_cache[0]), len(kv_cache[0][0]), {heads}, head_dim, block_size, dtype)
    told = (
        layout.num_layers,
        layout.num_planes,
        {len(heads) for heads in chips},
        layout.head_dim,
        layout.block_size,
        layout.dtype,
    )
    if head_dim % ROW_TOKENS:
        raise InvalidLayoutError(
            f"heads of {head_dim} elements are not whole tiles of {ROW_TOKENS}; KV transfer does "
            "not support such a cache"
        )
    if found != told:
        raise InvalidLayoutError(
            f"layout {told} of a KV cache of {found} (layers, planes, KV heads of each of "
            f"{len(chips)} chips, head size, block size, dtype)"
        )
    return int(num_blocks)


if TYPE_CHECKING:  # fails type checking when the class and the protocols part ways

    def _conforms(io: TTKVIO, lane: TTLaneUnits) -> tuple[KVDeviceIO, LaneUnits]:
        return io, lane
