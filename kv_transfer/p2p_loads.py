"""Point-to-point transfers to this engine: write arrived rows, one chunk of each load in turn."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import (
    BlockTables,
    Failure,
    LoadSpec,
    TransferInfo,
    count_failure,
    only_kv_group,
)
from kv_transfer.dtypes import convert_rows
from kv_transfer.errors import FailureReason
from kv_transfer.host_blocks import HostBlocks, zero_row_tail
from kv_transfer.layout import ROW_TOKENS, RowLayout, group_rows
from kv_transfer.messages import PayloadPath
from kv_transfer.p2p_context import P2PContext
from kv_transfer.ticket import Ticket
from kv_transfer.transport import (
    Arrived,
    ArrivedMapped,
    CancelLoad,
    Confirmed,
    Consumed,
    Event,
    LoadFailed,
    Spoiled,
    StartLoad,
)


@dataclass(slots=True, eq=False)
class _Loading:
    ticket: Ticket
    layout: RowLayout
    """Layout of the producer, with this engine's block sizes."""
    lane: int
    block_ids: BlockTables
    start_row: int
    num_rows: int
    started_s: float
    path: PayloadPath = "inline"
    is_verified: bool = True
    written: bytearray = field(default_factory=bytearray)
    num_missing: int = 0
    arrived: deque[Event] = field(default_factory=deque)
    """Chunks that are not written yet, and the events that came after them."""
    first_s: float | None = None
    last_s: float = 0.0

    def mark_written(self, start: int, end: int) -> int:
        """Record that rows were written; return how many were not before."""
        num_new = self.written.count(0, start, end)
        self.written[start:end] = b"\x01" * (end - start)
        self.num_missing -= num_new
        return num_new

    def mark_lost(self, start: int, end: int) -> int:
        """Record that rows were overwritten with wrong data; return how many had been written."""
        num_lost = self.written.count(1, start, end)
        self.written[start:end] = bytes(end - start)
        self.num_missing += num_lost
        return num_lost

    def is_whole(self, first_row: int, num_rows: int) -> bool:
        """Return whether these rows begin and end at block bounds of this engine, or at the end."""
        rows_per_block = only_kv_group(self.layout.groups).rows_per_block
        end_row = first_row + num_rows
        return first_row % rows_per_block == 0 and (
            end_row % rows_per_block == 0 or end_row == self.num_rows
        )

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.block_ids))

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose KV is here and verified."""
        first_gap = self.written.find(0) if self.is_verified else self.start_row
        num_rows = self.num_rows if first_gap < 0 else first_gap
        return min(ROW_TOKENS * num_rows, self.ticket.num_tokens)

    @property
    def state(self) -> str:
        if self.first_s is None:
            return "waiting"
        return "streaming" if self.num_missing else "confirming"


class P2PLoads:
    """Transfers that this engine consumes. Owner: the worker, on the engine's core thread.

    Args:
        context: State shared with sends.
        layouts: Layouts of acceptable producers, by their hash.
    """

    def __init__(self, context: P2PContext, layouts: Mapping[str, RowLayout]) -> None:
        self._context = context
        self._layouts = layouts
        self._loading: dict[bytes, _Loading] = {}
        self._ids: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._loading)

    @property
    def num_blocks(self) -> int:
        """Blocks that in-flight loads write into."""
        return sum(x.num_blocks for x in self._loading.values())

    def infos(self, now_s: float) -> list[TransferInfo]:
        """Return the loads under way."""
        return [
            TransferInfo(
                request_id=x.ticket.request_id,
                role="consumer",
                peer=x.ticket.producer_incarnation,
                path=x.path if x.first_s is not None else "",
                state=x.state,
                total_rows=x.num_rows - x.start_row,
                ready_rows=x.num_rows - x.start_row - x.num_missing,
                done_rows=x.num_rows - x.start_row - x.num_missing,
                num_blocks=x.num_blocks,
                age_s=now_s - x.started_s,
            )
            for x in self._loading.values()
        ]

    # ---- starts and stops

    def start_load(self, spec: LoadSpec) -> None:
        """Start to fetch the KV that a ticket names."""
        layout = self._layouts[spec.ticket.layout_hash]
        num_rows = layout.num_rows(spec.ticket.num_tokens)
        self._context.commands.append(StartLoad(spec.ticket, spec.sealed, spec.start_row, layout))
        if spec.start_row >= num_rows:
            self._context.ended.received.add(spec.ticket.request_id)
            return
        transfer_id = spec.ticket.transfer_id
        self._ids[spec.ticket.request_id] = transfer_id
        self._context.turns[transfer_id] = None
        self._loading[transfer_id] = _Loading(
            spec.ticket,
            layout,
            spec.lane,
            spec.block_ids,
            spec.start_row,
            num_rows,
            self._context.now_s,
            written=bytearray(b"\x01" * spec.start_row + bytes(num_rows - spec.start_row)),
            num_missing=num_rows - spec.start_row,
        )

    def cancel(self, request_id: str) -> bool:
        """Stop touching a request's blocks now; return whether it was being loaded."""
        transfer_id = self._ids.get(request_id)
        if transfer_id is None:
            return False
        self._context.commands.append(CancelLoad(transfer_id))
        self._end(transfer_id, FailureReason.CANCELLED)
        return True

    # ---- moving bytes

    def hold_back(self, event: Event) -> bool:
        """Queue data, and events that follow it, until it is the transfer's turn.

        Returns:
            True if the event was queued or is stale data, False if it should be applied now.
        """
        loading = self._loading.get(event.transfer_id)
        is_data = isinstance(event, Arrived | ArrivedMapped)
        if loading is not None and (is_data or loading.arrived):
            loading.arrived.append(event)
            return True
        return is_data

    def inject(self, transfer_id: bytes) -> bool:
        """Write the oldest queued chunk of a transfer; return whether there was one."""
        loading = self._loading.get(transfer_id)
        if loading is None or not loading.arrived:
            return False
        event = loading.arrived.popleft()
        assert isinstance(event, Arrived | ArrivedMapped)
        self._inject(loading, event)
        while loading.arrived and not isinstance(loading.arrived[0], Arrived | ArrivedMapped):
            self.apply(loading.arrived.popleft())
        return True

    def apply(self, event: Event) -> None:
        """Apply an event that carries no data."""
        if isinstance(event, Confirmed):
            self._end(event.transfer_id, None)
        elif isinstance(event, LoadFailed):
            self._end(event.transfer_id, event.reason)

    def _inject(self, loading: _Loading, event: Arrived | ArrivedMapped) -> None:
        """Write the rows of one chunk into their blocks."""
        if loading.first_s is None:
            loading.first_s = self._context.now_s
        num_lost = 0
        if isinstance(event, Arrived):
            loading.path = event.path
            self._write(loading, event.first_row, event.num_rows, event.payload)
            good = [range(event.first_row, event.first_row + event.num_rows)]
        else:
            good, bad = self._read_mapped(loading, event)
            num_lost = sum(loading.mark_lost(rows.start, rows.stop) for rows in bad)
            self._context.commands += [Spoiled(event.transfer_id, x.start, len(x)) for x in bad]
        num_new = sum(loading.mark_written(rows.start, rows.stop) for rows in good)
        if num_new and loading.num_missing == 0:
            self._finish_writing(loading)
        self._context.commands.append(Consumed(event.transfer_id, num_new - num_lost))
        if loading.num_missing == 0 and loading.path != "shared":
            self._end(event.transfer_id, None)

    def _write(
        self, loading: _Loading, first_row: int, num_rows: int, payload: NDArray[np.uint8]
    ) -> None:
        """Write rows of all groups, whose bytes are in the order of ``GroupedLayout``."""
        num_tokens, start, payload = loading.ticket.num_tokens, 0, payload.reshape(-1)
        ranges = group_rows(loading.layout, num_tokens, first_row, num_rows)
        groups = zip(
            self._context.ios, loading.layout.groups, loading.block_ids, ranges, strict=True
        )
        for io, source, table, rows in groups:
            end = start + len(rows) * source.row_bytes
            data = payload[start:end].reshape(len(rows), source.row_bytes)
            if source.dtype != io.layout.dtype:
                data = convert_rows(data, source, io.layout)
            io.write_rows(loading.lane, table, rows.start, data)
            start = end

    def _read_mapped(
        self, loading: _Loading, event: ArrivedMapped
    ) -> tuple[list[range], list[range]]:
        """Copy rows out of the producer's memory.

        Returns:
            The rows that match the producer's digests, and the rows that do not.
        """
        source = event.source
        loading.path = "shared"
        loading.is_verified = loading.is_verified and len(event.digests) > 0
        wrong = self._copy_mapped(loading, event)
        first_block, _ = source.layout.covering(event.first_row, event.num_rows)
        rows_per_block = source.layout.rows_per_block
        good, bad = [range(event.first_row, event.first_row + event.num_rows)], []
        for position in wrong:
            start, last = (first_block + position) * rows_per_block, good.pop()
            bad.append(range(max(start, last.start), min(start + rows_per_block, last.stop)))
            good += [range(last.start, bad[-1].start), range(bad[-1].stop, last.stop)]
        return good, bad

    def _copy_mapped(self, loading: _Loading, event: ArrivedMapped) -> list[int]:
        """Copy rows; return the positions of the blocks that do not match their digests.

        Copies whole blocks at once where the layouts of both ends are equal.
        """
        io, source = self._context.io, event.source
        first_block, end_block = source.layout.covering(event.first_row, event.num_rows)
        digests = event.digests if len(event.digests) else None
        source_ids = event.block_ids.tolist()
        is_alike = io.host_blocks is not None and source.layout == io.layout
        if is_alike and loading.is_whole(event.first_row, event.num_rows):
            assert io.host_blocks is not None
            block_ids = only_kv_group(loading.block_ids)[first_block:end_block]
            return io.host_blocks[loading.lane].copy_from(source, source_ids, block_ids, digests)
        offset = event.first_row - first_block * source.layout.rows_per_block
        # Copied and checked in memory of this process: the source may change between two reads.
        copy = HostBlocks.empty(source.layout, len(source_ids))
        wrong = copy.copy_from(source, source_ids, range(len(source_ids)), digests)
        rows = copy.read_rows(range(len(source_ids)), offset, event.num_rows)
        if event.first_row + event.num_rows == loading.num_rows:
            zero_row_tail(source.layout, rows[-1], loading.ticket.num_tokens)
        self._write(loading, event.first_row, event.num_rows, rows)
        return wrong

    def _finish_writing(self, loading: _Loading) -> None:
        """Zero the last blocks behind the last token: stale values there could be NaN."""
        loading.last_s = self._context.now_s
        for io, table in zip(self._context.ios, loading.block_ids, strict=True):
            if io.host_blocks is not None:
                io.host_blocks[loading.lane].zero_tail(table, loading.ticket.num_tokens)
                continue
            num_free = -loading.num_rows % io.layout.rows_per_block
            if num_free:
                zeros = np.zeros((num_free, io.layout.row_bytes), np.uint8)
                io.write_rows(loading.lane, table, loading.num_rows, zeros)

    def _end(self, transfer_id: bytes, reason: FailureReason | None) -> None:
        loading = self._loading.pop(transfer_id, None)
        if loading is None:
            return
        del self._ids[loading.ticket.request_id], self._context.turns[transfer_id]
        if loading.layout != self._context.layout:
            self._context.ended.converted.add(loading.ticket.request_id)
        if reason is not None:
            self._context.ended.failed[loading.ticket.request_id] = Failure(
                reason, loading.num_tokens
            )
            count_failure(self._context.totals.receive_failures, reason)
            return
        self._context.ended.received.add(loading.ticket.request_id)
        assert loading.first_s is not None
        num_bytes = loading.layout.num_bytes(
            loading.ticket.num_tokens, loading.start_row, loading.num_rows - loading.start_row
        )
        times_s = (loading.started_s, loading.first_s, loading.last_s, self._context.now_s)
        self._context.totals.count_received(loading.path, num_bytes, times_s)
