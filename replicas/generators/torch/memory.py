"""Memory of the torch generator's own, in huge pages where the host has any.

A core that reads a gigabyte of weights a step, or blocks that lie anywhere, waits a third less for
memory whose addresses it need not look up so often.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE = 1 << 21
_PAGE = 1 << 12
_CHUNK = 1 << 26
"""Bytes mapped at once for small pieces; the unused rest of a mapping is never touched."""


def own_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros in separate pages, unmapped when no reference is left."""
    mapped = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # madvise fails on kernels without huge pages.
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8)


class Pieces:
    """Pieces of such memory, each from a page on: many are smaller than a huge page.

    Owner: the chunk that the next piece comes from; a chunk lives as long as one of its pieces.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeros."""
        with self._lock:
            if num_bytes > len(self._left):
                chunk = own_memory(max(num_bytes, _CHUNK) + _HUGE)
                self._left = chunk[-chunk.ctypes.data % _HUGE :]
            piece = self._left[:num_bytes]
            self._left = self._left[-(-num_bytes // _PAGE) * _PAGE :]
            return piece
