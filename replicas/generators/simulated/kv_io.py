"""Read and write the simulated generator's KV blocks as bytes, for KV transfer.

A block's bytes are K of every token, then V. The seconds are those of the
modelled model's bytes, which are thousands of times as many; the engine's core thread spends them,
as it does with a real device's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import KVLayout
from replicas.generators.simulated.device import busy
from replicas.generators.simulated.tokens import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_transfer.connector import KVDeviceIO
    from replicas.generators.simulated.device import DeviceClock
    from replicas.generators.simulated.timing import StepTiming
    from replicas.generators.simulated.tokens import PagedKVCache


def simulated_kv_layout(block_size: int, fingerprint: str) -> KVLayout:
    """How a simulated engine's blocks travel: of each token eight bytes of K and eight of V.

    Args:
        block_size: Tokens per block.
        fingerprint: Equal for two engines whose KV is the same.

    Raises:
        InvalidLayoutError: The block size is not one that KV transfer can move.
    """
    return KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=block_size, dtype="float32",
        rope="hf", model_fingerprint=fingerprint,
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
            layout: What the other side was told; must describe this cache.
            timing: What moving bytes costs.
            clock: Where that time goes.
            keeps_rows: Otherwise the cache is not touched: zeros are read, and writes forgotten.

        Raises:
            InvalidLayoutError: The layout is not the cache's; says both.
        """
        told, found = layout.rows_shape, (2, kv_cache.block_size, BYTES_PER_TOKEN // 2)
        if told != found:
            raise InvalidLayoutError(
                f"layout of {told} of a simulated KV cache of {found} (planes, rows, bytes)"
            )
        self._kv_cache = kv_cache
        self._layout = layout
        self._timing = timing
        self._clock = clock
        self._keeps_rows = keeps_rows

    @property
    def layout(self) -> KVLayout:
        """What a block's bytes mean."""
        return self._layout

    def read_blocks(self, lane: int, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy blocks out; see `KVDeviceIO.read_blocks`.

        Raises:
            ValueError: A block id is out of range.
        """
        self._check(block_ids, first=0)
        shape = (len(block_ids), self._layout.bytes_per_block)
        with busy(self._clock, self._seconds(len(block_ids))):
            if not self._keeps_rows:
                return np.zeros(shape, np.uint8)
            rows = self._kv_cache.read_blocks(lane, block_ids)
            return np.ascontiguousarray(rows.transpose(0, 2, 1)).view(np.uint8).reshape(shape)

    def write_blocks(
        self, lane: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]
    ) -> None:
        """Copy blocks in; see `KVDeviceIO.write_blocks`.

        Raises:
            ValueError: A block id is out of range, or `data` has another shape or dtype.
        """
        self._check(block_ids, first=1)
        wanted = (len(block_ids), self._layout.bytes_per_block)
        if data.shape != wanted or data.dtype != np.uint8:
            raise ValueError(f"data of {data.shape} {data.dtype} instead of {wanted} uint8")
        with busy(self._clock, self._seconds(len(block_ids))):
            if self._keeps_rows:
                planes = np.ascontiguousarray(data).view(np.uint64)
                rows = planes.reshape(len(block_ids), 2, self._layout.block_size)
                self._kv_cache.write_blocks(lane, block_ids, rows.transpose(0, 2, 1))

    def _seconds(self, num_blocks: int) -> float:
        num_tokens = num_blocks * self._layout.block_size
        return self._timing.link.transfer_s(num_tokens * self._timing.bytes_per_token)

    def _check(self, block_ids: Sequence[int], first: int) -> None:
        last = self._kv_cache.num_blocks - 1
        if self._keeps_rows and not all(first <= block <= last for block in block_ids):
            raise ValueError(f"block ids {list(block_ids)} are not within {first}..{last}")


if TYPE_CHECKING:  # fails type checking when the class and the protocol part ways

    def _conforms(io: SimulatedKVIO) -> KVDeviceIO:
        return io
