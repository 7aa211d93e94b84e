"""Read and write the torch generator's KV blocks as bytes, for KV transfer.

A block's bytes run over (layer, K | V, KV head, token row, head size), as ``KVLayout`` says. The
null block may be read but not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_transfer.errors import InvalidLayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_transfer.connector import KVDeviceIO
    from kv_transfer.layout import KVLayout
    from replicas.generators.torch.kv_cache import TorchKVCache


class TorchKVIO:
    """Byte access to a ``TorchKVCache``; implements ``kv_transfer.connector.KVDeviceIO``.

    Owner: nothing; it writes the cache that it was given, on the engine's core thread only.
    """

    def __init__(self, kv_cache: TorchKVCache, layout: KVLayout) -> None:
        """Look at the cache's memory as bytes.

        Args:
            kv_cache: The cache; it must outlive this object and never move.
            layout: What the other side was told; must describe this cache.

        Raises:
            InvalidLayoutError: The layout is not the cache's; says both.
        """
        k = kv_cache[0][0][0]
        _, num_kv_heads, block_size, head_dim = k.shape
        dtype = str(k.dtype).removeprefix("torch.")
        found = (len(kv_cache[0]), num_kv_heads, head_dim, block_size, dtype)
        told = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
        if found != (*told, layout.dtype):
            raise InvalidLayoutError(
                f"layout {(*told, layout.dtype)} of a KV cache of {found} (layers, KV heads, head "
                "size, block size, dtype)"
            )
        self._layout = layout
        self._num_blocks = kv_cache.num_blocks
        # [lane][2 * layer + plane] -> (num_blocks, bytes of one block of one plane).
        self._planes = [
            [
                plane.view(torch.uint8).numpy().reshape(kv_cache.num_blocks, -1)
                for layer in lane
                for plane in layer
            ]
            for lane in kv_cache
        ]

    @property
    def layout(self) -> KVLayout:
        """What a block's bytes mean."""
        return self._layout

    def read_blocks(self, lane: int, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy blocks out; see ``KVDeviceIO.read_blocks``.

        Raises:
            ValueError: A block id is out of range.
        """
        ids = self._checked(block_ids, first=0)
        data = np.empty((len(ids), self._layout.bytes_per_block), np.uint8)
        for part, plane in zip(self._parts(data), self._planes[lane], strict=True):
            part[:] = plane[ids]
        return data

    def write_blocks(
        self, lane: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]
    ) -> None:
        """Copy blocks in; see ``KVDeviceIO.write_blocks``.

        Raises:
            ValueError: A block id is out of range, or ``data`` has another shape or dtype.
        """
        ids = self._checked(block_ids, first=1)
        wanted = (len(ids), self._layout.bytes_per_block)
        if data.shape != wanted or data.dtype != np.uint8:
            raise ValueError(f"data of {data.shape} {data.dtype} instead of {wanted} uint8")
        for part, plane in zip(self._parts(data), self._planes[lane], strict=True):
            plane[ids] = part

    def _parts(self, data: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        """Split (n, bytes_per_block) into views, one per layer and plane."""
        return np.split(data, 2 * self._layout.num_layers, axis=1)

    def _checked(self, block_ids: Sequence[int], first: int) -> npt.NDArray[np.int64]:
        ids = np.asarray(block_ids, dtype=np.int64)
        # numpy would take a negative index for a block from the end.
        if len(ids) and (ids.min() < first or ids.max() >= self._num_blocks):
            raise ValueError(f"block ids {ids} are not within {first}..{self._num_blocks - 1}")
        return ids


if TYPE_CHECKING:  # fails type checking when the class and the protocol part ways

    def _conforms(io: TorchKVIO) -> KVDeviceIO:
        return io
