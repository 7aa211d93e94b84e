"""Saves from KV memory to a pool: read units in chunks, then put them; drop units when behind."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import only_kv_group
from kv_transfer.pooled_context import PoolContext
from kv_transfer.pooled_meta import PoolSaveSpec
from kv_transfer.store_thread import PutJob


@dataclass(slots=True, eq=False)
class _Save:
    request_id: str
    lane: int
    block_ids: tuple[int, ...]
    key: bytes
    next_row: int
    end_row: int
    pieces: list[NDArray[np.uint8]] = field(default_factory=list)


class PoolSaves:
    """Saves of one worker. Owner: the worker, on the engine's core thread.

    Attributes:
        saved: Requests whose announced units have all been read.
    """

    def __init__(self, context: PoolContext) -> None:
        self.saved: set[str] = set()
        self._context = context
        self._saves: deque[_Save] = deque()
        self._num_unread: Counter[str] = Counter()
        """Number of entries in ``_saves``, by request."""
        self._finished: set[str] = set()
        self._waiting_bytes = 0
        """Bytes of units that were read and that the store has not answered for."""

    def __len__(self) -> int:
        return len(self._saves)

    def drop(self, request_id: str) -> None:
        """End a request's saves without reporting it."""
        self._finished.discard(request_id)
        if self._num_unread.pop(request_id, 0):
            self._saves = deque(save for save in self._saves if save.request_id != request_id)

    def finish(self, request_id: str) -> None:
        """Report a request as sent as soon as all of its units have been read."""
        self._finished.add(request_id)
        self._report_if_read(request_id)

    def on_put(self) -> None:
        """Record that a unit no longer waits for the store, stored or not."""
        self._waiting_bytes -= self._context.unit_bytes

    def announce(self, spec: PoolSaveSpec) -> None:
        """Queue units to be read; their blocks must not change until results name the request."""
        unit_rows, table = self._context.unit_rows, only_kv_group(spec.block_ids)
        for number, key in enumerate(spec.keys, spec.first_unit):
            start, end = number * unit_rows, (number + 1) * unit_rows
            self._saves.append(_Save(spec.request_id, spec.lane, table, key, start, end))
        self._num_unread[spec.request_id] += len(spec.keys)
        self.saved.discard(spec.request_id)

    def read_next(self) -> bool:
        """Read one chunk of the first save, and put its unit once it is whole; False without saves.

        A unit that the store has no room to wait for is dropped.
        """
        while self._saves:
            save = self._saves[0]
            if save.pieces or self._has_room:
                self._read(save)
                if save.next_row == save.end_row:
                    self._waiting_bytes += self._context.unit_bytes
                    self._context.executor.submit(PutJob(save.key, save.pieces))
                    self._end_save(save)
                return True
            self._context.totals.store.drops += 1
            self._end_save(save)
        return False

    def _end_save(self, save: _Save) -> None:
        """Remove the first save."""
        self._saves.popleft()
        self._num_unread[save.request_id] -= 1
        self._report_if_read(save.request_id)

    @property
    def _has_room(self) -> bool:
        """True if one more unit may wait for the store."""
        is_idle = self._waiting_bytes == 0
        return is_idle or (
            self._waiting_bytes + self._context.unit_bytes
            <= self._context.config.max_inflight_bytes
        )

    def _read(self, save: _Save) -> None:
        num_rows = min(self._context.chunk_rows, save.end_row - save.next_row)
        io = self._context.io
        save.pieces.append(io.read_rows(save.lane, save.block_ids, save.next_row, num_rows))
        save.next_row += num_rows

    def _report_if_read(self, request_id: str) -> None:
        if self._num_unread[request_id]:
            return
        del self._num_unread[request_id]
        if request_id in self._finished:
            self._finished.discard(request_id)
            self._context.ended.sent.add(request_id)
        else:
            self.saved.add(request_id)
