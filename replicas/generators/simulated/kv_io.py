"""Read and write the simulated generator's KV blocks as rows of bytes, for KV transfer.

A row's bytes are K of its 32 tokens, then V. The seconds are those of the modelled model's bytes,
which are thousands of times as many; the engine's core thread spends them, as it does with a real
device's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import ROW_TOKENS, KVLayout
from replicas.generators.simulated.device import busy
from replicas.generators.simulated.tokens import KV_SPEC

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_transfer.connector import KVDeviceIO
    from replicas.generators.simulated.device import DeviceClock
    from replicas.generators.simulated.timing import StepTiming
    from replicas.generators.simulated.tokens import PagedKVCache


def simulated_kv_layout(block_size: int, fingerprint: str) -> KVLayout:
    """Return how a simulated engine's KV travels: of each token eight bytes of K and eight of V.

    Args:
        block_size: Tokens per block.
        fingerprint: Equal for two engines whose KV is the same.

    Raises:
        InvalidLayoutError: The block size is not one that KV transfer can move.
    """
    return KVLayout(
        num_layers=1, num_kv_heads=KV_SPEC.heads, head_dim=KV_SPEC.width, block_size=block_size,
        dtype=KV_SPEC.dtype, num_planes=KV_SPEC.planes, rope="hf", model_fingerprint=fingerprint,
    )  # fmt: skip


class SimulatedKVIO:
    """Byte access to a `PagedKVCache`; implements `kv_transfer.connector.KVDeviceIO`.

    Owner: nothing; it writes the cache that it was given, on the engine's core thread only.
    """

    def __init__(
        self,
        kv_cache: PagedKVCache,
        layout: KVLayout,
        timing: StepTiming,
        clock: DeviceClock,
        *,
        keeps_rows: bool = True,
    ) -> None:
        """Bind cache, layout and device.

        Args:
            kv_cache: The cache.
            layout: The layout that peers know; must describe this cache.
            timing: Durations of transfers.
            clock: Clock on which they are spent.
            keeps_rows: Whether the cache is accessed; otherwise reads give zeros and writes are
            dropped.

        Raises:
            InvalidLayoutError: The layout is not the cache's; gives both.
        """
        told = (layout.num_pieces, layout.block_size, layout.unit_bytes)
        found = (2, kv_cache.block_size, KV_SPEC.bytes_per_block(ROW_TOKENS) // KV_SPEC.planes)
        if told != found:
            raise InvalidLayoutError(
                f"layout {told} does not match the simulated KV cache {found} (planes, block size, "
                "bytes per unit)"
            )
        self._kv_cache = kv_cache
        self._layout = layout
        self._timing = timing
        self._clock = clock
        self._keeps_rows = keeps_rows

    @property
    def layout(self) -> KVLayout:
        """Layout of the bytes."""
        return self._layout

    @property
    def host_blocks(self) -> None:
        """None, so that every transfer takes the time of a link."""
        return

    @property
    def shared_region(self) -> None:
        """None, as for `host_blocks`."""
        return

    @property
    def region_layout(self) -> None:
        """None, as for `host_blocks`."""
        return

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> npt.NDArray[np.uint8]:
        """Copy rows out; see `KVDeviceIO.read_rows`.

        Raises:
            ValueError: A row is past the block table, or its block is out of range.
        """
        blocks, offsets = self._places(block_ids, first_row, num_rows, first_block=0)
        shape = (num_rows, self._layout.row_bytes)
        with busy(self._clock, self._seconds(num_rows)):
            if not self._keeps_rows:
                return np.zeros(shape, np.uint8)
            rows = self._as_rows(self._kv_cache.read_blocks(lane, blocks.tolist()))
            rows = rows[np.arange(num_rows), offsets]
            return np.ascontiguousarray(rows.transpose(0, 2, 1)).view(np.uint8).reshape(shape)

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: npt.NDArray[np.uint8]
    ) -> None:
        """Copy rows in; see `KVDeviceIO.write_rows`.

        Raises:
            ValueError: A row is past the block table, or its block is out of range; or `data` has
                another shape or dtype.
        """
        wanted = (len(data), self._layout.row_bytes)
        if data.shape != wanted or data.dtype != np.uint8:
            raise ValueError(f"data of {data.shape} {data.dtype} instead of {wanted} uint8")
        blocks, offsets = self._places(block_ids, first_row, len(data), first_block=1)
        with busy(self._clock, self._seconds(len(data))):
            if self._keeps_rows:
                planes = np.ascontiguousarray(data).view(np.uint64)
                rows = planes.reshape(len(data), 2, ROW_TOKENS).transpose(0, 2, 1)
                unique, inverse = np.unique(blocks, return_inverse=True)
                content = self._kv_cache.read_blocks(lane, unique.tolist())
                self._as_rows(content)[inverse, offsets] = rows
                self._kv_cache.write_blocks(lane, unique.tolist(), content)

    def _as_rows(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return blocks (n, block_size, 2) seen as (n, rows of a block, 32, 2)."""
        return blocks.reshape(len(blocks), self._layout.rows_per_block, ROW_TOKENS, 2)

    def _seconds(self, num_rows: int) -> float:
        return self._timing.link.transfer_s(num_rows * ROW_TOKENS * self._timing.bytes_per_token)

    def _places(
        self, block_ids: Sequence[int], first_row: int, num_rows: int, *, first_block: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and row of the block of each of these rows, checked."""
        rows = np.arange(first_row, first_row + num_rows)
        rows_per_block = self._layout.rows_per_block
        if first_row < 0 or first_row + num_rows > len(block_ids) * rows_per_block:
            raise ValueError(
                f"rows {first_row} to {first_row + num_rows} of a block table of "
                f"{len(block_ids)} blocks of {rows_per_block} rows"
            )
        blocks = np.asarray(block_ids, np.int64)[rows // rows_per_block]
        last = self._kv_cache.num_blocks - 1
        if self._keeps_rows and not ((first_block <= blocks) & (blocks <= last)).all():
            raise ValueError(f"block ids {blocks.tolist()} are not within {first_block}..{last}")
        return blocks, rows % rows_per_block


if TYPE_CHECKING:  # fails type checking when the class and the protocol part ways

    def _conforms(io: SimulatedKVIO) -> KVDeviceIO:
        return io
