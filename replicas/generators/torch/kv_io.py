"""Read and write the torch generator's KV blocks as bytes, for KV transfer.

A row's bytes run over (layer, K | V, KV head, token, head size), as ``KVLayout`` says. The null
block may be read but not written.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.shared_region import RegionLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_transfer.connector import KVDeviceIO
    from kv_transfer.layout import KVLayout
    from kv_transfer.shared_region import SharedRegion
    from replicas.generators.torch.kv_cache import TorchKVCache


class TorchKVIO:
    """Byte access to a ``TorchKVCache``; implements ``kv_transfer.connector.KVDeviceIO``.

    Owner: nothing; it writes the cache that it was given, on the engine's core thread only.
    """

    def __init__(self, kv_cache: TorchKVCache, layout: KVLayout, group: int = 0) -> None:
        """View the cache's memory as bytes.

        Args:
            kv_cache: The cache. Other processes map it only if it has one KV group.
            layout: The layout that peers know; must describe the group's part of this cache.
            group: Which of the cache's KV groups.

        Raises:
            InvalidLayoutError: The layout is not the cache's; gives both.
        """
        first_planes = [0, *accumulate(len(planes) for planes in kv_cache.planes)]
        layers = [layer for layer, of in enumerate(kv_cache.group_of) if of == group]
        num_blocks, [k, *others] = kv_cache.num_blocks[group], kv_cache[0][layers[0]]
        _, num_kv_heads, block_size, head_dim = k.shape
        dtype = str(k.dtype).removeprefix("torch.")
        found = (len(layers), 1 + len(others), num_kv_heads, head_dim, block_size, dtype)
        told = (
            layout.num_layers,
            layout.num_planes,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            layout.dtype,
        )
        if found != told:
            raise InvalidLayoutError(
                f"layout {told} of a KV cache of {found} (layers, planes, KV heads, head size, "
                "block size, dtype)"
            )
        offsets_of_lanes = tuple(
            tuple(
                offset
                for layer in layers
                for offset in offsets[first_planes[layer] : first_planes[layer + 1]]
            )
            for offsets in kv_cache.offsets
        )
        self._layout = layout
        self._host_blocks = tuple(
            HostBlocks.within(layout, kv_cache.memory, offsets, num_blocks)
            for offsets in offsets_of_lanes
        )
        self._shared_region = kv_cache.shared_region if len(kv_cache.num_blocks) == 1 else None
        self._region_layout = RegionLayout(
            block_size=block_size,
            num_blocks=num_blocks,
            content_hash=layout.content_hash(),
            offsets=offsets_of_lanes,
        )

    @property
    def layout(self) -> KVLayout:
        """Layout of the bytes."""
        return self._layout

    @property
    def host_blocks(self) -> Sequence[HostBlocks]:
        """The blocks of each lane."""
        return self._host_blocks

    @property
    def shared_region(self) -> SharedRegion | None:
        """The memory of ``host_blocks``, where other processes of this host may map it."""
        return self._shared_region

    @property
    def region_layout(self) -> RegionLayout | None:
        """Return where the blocks are in ``shared_region``; None without one."""
        return None if self._shared_region is None else self._region_layout

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> npt.NDArray[np.uint8]:
        """Copy rows out; see ``KVDeviceIO.read_rows``.

        Raises:
            ValueError: A block id is out of range, or the table too short.
        """
        return self._host_blocks[lane].read_rows(block_ids, first_row, num_rows)

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: npt.NDArray[np.uint8]
    ) -> None:
        """Copy rows in; see ``KVDeviceIO.write_rows``.

        Raises:
            ValueError: A block id is out of range or the null block's, the table is too short, or
                ``data`` has another shape or dtype.
        """
        per_block = self._layout.rows_per_block
        end = -(-(first_row + len(data)) // per_block)
        if len(data) and 0 in block_ids[first_row // per_block : end]:
            raise ValueError("block 0 is the null block, of no sequence, and must not be written")
        self._host_blocks[lane].write_rows(block_ids, first_row, data)


if TYPE_CHECKING:  # fails type checking when the class and the protocol part ways

    def _conforms(io: TorchKVIO) -> KVDeviceIO:
        return io
