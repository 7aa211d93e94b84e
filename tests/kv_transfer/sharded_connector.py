"""Memory as a mesh has it: every shard its own heads. And connectors of engines that have such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kv_transfer.p2p import P2PConnector
from kv_transfer.sharding import Shard, ShardedKVIO, mesh_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kv_transfer.connector import ConnectorSettings, KVConnectorWorker, KVDeviceIO
    from kv_transfer.layout import KVLayout


class ShardArray:
    """Implements ``ShardMemory`` by plain indexing; knows nothing of the shards beside it.

    Args:
        layout: Of the shard alone.
        pieces: Per layer and plane (num_blocks, heads of the shard, rows_per_block, unit_bytes),
            in any strides, so that it may be a part of a larger cache.
    """

    def __init__(self, layout: KVLayout, pieces: Sequence[NDArray[np.uint8]]) -> None:
        self.layout = layout
        self.pieces = list(pieces)
        self.num_reads = 0
        assert len(pieces) == layout.num_pieces
        for piece in pieces:
            assert piece.shape[1:] == (
                layout.num_kv_heads,
                layout.rows_per_block,
                layout.unit_bytes,
            )

    @classmethod
    def empty(cls, layout: KVLayout, num_blocks: int) -> ShardArray:
        """Memory of its own, full of a byte that a test would notice."""
        shape = (num_blocks, layout.num_kv_heads, layout.rows_per_block, layout.unit_bytes)
        return cls(layout, [np.full(shape, 0xEE, np.uint8) for _ in range(layout.num_pieces)])

    def read_rows(
        self, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        self.num_reads += 1
        rows = [
            np.stack([piece[block, :, row] for piece in self.pieces])
            for block, row in self._places(block_ids, first_row, num_rows)
        ]
        return np.stack(rows).reshape(num_rows, self.layout.row_bytes)

    def write_rows(self, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]) -> None:
        units = data.reshape(len(data), len(self.pieces), self.layout.num_kv_heads, -1)
        places = self._places(block_ids, first_row, len(data))
        for values, (block, row) in zip(units, places, strict=True):
            for piece, value in zip(self.pieces, values, strict=True):
                piece[block, :, row] = value

    def _places(
        self, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> list[tuple[int, int]]:
        places = (divmod(row, self.layout.rows_per_block) for row in range(num_rows + first_row))
        return [(block_ids[block], row) for block, row in places][first_row:]


def shard_layout(layout: KVLayout, shard: Shard) -> KVLayout:
    return msgspec.structs.replace(
        layout, num_layers=len(shard.layers), num_kv_heads=len(shard.heads)
    )


def shards_of_cache(io: KVDeviceIO, shards: Sequence[Shard]) -> ShardedKVIO:
    """See an engine's cache as if every shard had its layers and heads for itself."""
    layout = io.layout
    assert io.host_blocks is not None
    lanes = []
    for blocks in io.host_blocks:
        shape = (blocks.num_blocks, layout.num_kv_heads, layout.rows_per_block, layout.unit_bytes)
        pieces = [piece.reshape(shape) for piece in blocks._pieces]
        lanes.append(
            [
                ShardArray(
                    shard_layout(layout, shard),
                    [
                        pieces[layer * layout.num_planes + plane][
                            :, shard.heads.start : shard.heads.stop
                        ]
                        for layer in shard.layers
                        for plane in range(layout.num_planes)
                    ],
                )
                for shard in shards
            ]
        )
    return ShardedKVIO(layout, shards, lanes)


class ShardedConnector(P2PConnector):
    """Point-to-point connector of an engine whose heads are spread over ``num_shards`` devices."""

    num_shards = 1
    num_stages = 1

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> KVConnectorWorker:
        worker = super().create_worker(settings, notify)
        register = worker.register_kv_caches

        def register_sharded(io: KVDeviceIO) -> None:
            shards = mesh_shards(io.layout, self.num_shards, self.num_stages)
            register(shards_of_cache(io, shards))

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


class Staged3Sharded2(ShardedConnector):
    """Three pipeline stages of two shards."""

    num_shards = 2
    num_stages = 3
