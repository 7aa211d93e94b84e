"""Sharded memory, as on a mesh, in which every shard holds its own heads; and its connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.p2p import P2PConnector
from kv_transfer.sharding import head_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kv_transfer.connector import ConnectorSettings, KVConnectorWorker, KVDeviceIO
    from kv_transfer.layout import KVLayout

    Pieces = Sequence[NDArray[np.uint8]]


class ShardedIO:
    """Implements ``KVDeviceIO`` by plain indexing; of replicas it reads the first, and writes all.

    Args:
        layout: Of the whole cache.
        lanes: ``[lane][shard][layer and plane]``: (num_blocks, heads of the shard, rows_per_block,
            unit_bytes) uint8, in any strides, so that it may be a part of a larger cache.
    """

    host_blocks = shared_region = region_layout = None

    def __init__(self, layout: KVLayout, lanes: Sequence[Sequence[Pieces]]) -> None:
        self.layout = layout
        self._lanes = lanes
        self._heads = head_shards(layout.num_kv_heads, len(lanes[0]))

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        rows = np.empty((num_rows, self.layout.row_bytes), np.uint8)
        for units, block, row in self._places(rows, block_ids, first_row):
            for heads, pieces in reversed(self._shards(lane)):
                for piece, held in zip(units, pieces, strict=True):
                    piece[heads] = held[block, :, row]
        return rows

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        for units, block, row in self._places(data, block_ids, first_row):
            for heads, pieces in self._shards(lane):
                for piece, held in zip(units, pieces, strict=True):
                    held[block, :, row] = piece[heads]

    def _shards(self, lane: int) -> list[tuple[slice, Pieces]]:
        spans = (slice(heads.start, heads.stop) for heads in self._heads)
        return list(zip(spans, self._lanes[lane], strict=True))

    def _places(
        self, rows: NDArray[np.uint8], block_ids: Sequence[int], first_row: int
    ) -> list[tuple[NDArray[np.uint8], int, int]]:
        """Return (layer and plane, head, byte of the unit), block and row in it, of each row."""
        layout = self.layout
        units = rows.reshape(len(rows), layout.num_pieces, layout.num_kv_heads, layout.unit_bytes)
        places = (divmod(first_row + i, layout.rows_per_block) for i in range(len(rows)))
        return [(units[i], block_ids[block], row) for i, (block, row) in enumerate(places)]


def shards_of_cache(io: KVDeviceIO, num_shards: int) -> ShardedIO:
    """See an engine's cache as if every shard had its heads for itself."""
    layout = io.layout
    assert io.host_blocks is not None
    lanes = []
    for blocks in io.host_blocks:
        shape = (blocks.num_blocks, layout.num_kv_heads, layout.rows_per_block, layout.unit_bytes)
        pieces = [piece.reshape(shape) for piece in blocks.pieces]
        shards = head_shards(layout.num_kv_heads, num_shards)
        lanes.append([[piece[:, heads.start : heads.stop] for piece in pieces] for heads in shards])
    return ShardedIO(layout, lanes)


class ShardedConnector(P2PConnector):
    """Point-to-point connector of an engine whose heads are spread over ``num_shards`` devices."""

    num_shards = 1

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> KVConnectorWorker:
        worker = super().create_worker(settings, notify)
        register = worker.register_kv_caches

        def register_sharded(ios: Sequence[KVDeviceIO]) -> None:
            register([shards_of_cache(io, self.num_shards) for io in ios])

        worker.register_kv_caches = register_sharded  # type: ignore[method-assign]
        return worker


class Sharded2(ShardedConnector):
    num_shards = 2


class Sharded3(ShardedConnector):
    num_shards = 3


class Sharded4(ShardedConnector):
    num_shards = 4


class Sharded8(ShardedConnector):
    num_shards = 8
