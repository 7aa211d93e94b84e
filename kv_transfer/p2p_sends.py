"""Point-to-point transfers to other engines: extract the rows that are computed and granted."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.connector import (
    BlockTables,
    Failure,
    SaveProgress,
    TransferInfo,
    count_failure,
    only_kv_group,
)
from kv_transfer.errors import FailureReason
from kv_transfer.host_blocks import zero_row_tail
from kv_transfer.layout import ROW_TOKENS, group_rows
from kv_transfer.messages import PayloadPath, encode_mapped
from kv_transfer.p2p_context import P2PContext
from kv_transfer.ticket import Ticket
from kv_transfer.transport import (
    CancelSend,
    Chunk,
    Granted,
    MappedChunk,
    Offer,
    Ready,
    Repeat,
)


@dataclass(slots=True, eq=False)
class _Sending:
    ticket: Ticket
    num_rows: int
    offered_s: float
    lane: int = 0
    block_ids: BlockTables = ()
    ready: int = 0
    """Rows from position 0 that are computed and may be read."""
    computed_s: float | None = None
    """Time at which the last row became ready."""
    path: PayloadPath = "inline"
    cursor: int = -1
    """Next row to extract; -1 until a consumer has attached."""
    limit: int = 0
    repeats: deque[range] = field(default_factory=deque)

    def next_range(self, chunk_rows: int, rows_per_block: int) -> range:
        """Return the rows to extract next; empty if none may be.

        On the path ``shared`` only whole blocks are announced, since a digest covers a whole block.
        """
        is_shared, ready = self.path == "shared", self.ready
        if is_shared and ready < self.num_rows:
            ready -= ready % rows_per_block
        if self.repeats:
            start, stop = self.repeats[0].start, self.repeats[0].stop
            stop = stop if stop <= ready else start
        elif self.cursor < 0:
            return range(0)
        else:
            start, stop = self.cursor, min(ready, self.limit)
        end = start + chunk_rows
        if is_shared:
            end += -end % rows_per_block
        return range(start, min(end, stop))

    def advance(self, taken: range) -> None:
        """Record that these rows, from ``next_range``, were extracted."""
        if self.repeats:
            left = self.repeats.popleft()[len(taken) :]
            if left:
                self.repeats.appendleft(left)
        else:
            self.cursor = taken.stop

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.block_ids))

    @property
    def state(self) -> str:
        if self.cursor < 0:
            return "waiting"
        return "computing" if self.ready < self.num_rows else "streaming"


class P2PSends:
    """Transfers that this engine produces. Owner: the worker, on the engine's core thread."""

    def __init__(self, context: P2PContext) -> None:
        self._context = context
        self._sending: dict[bytes, _Sending] = {}
        self._ids: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._sending)

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._sending

    def _of(self, request_id: str) -> _Sending | None:
        return self._sending.get(self._ids.get(request_id, b""))

    @property
    def num_blocks(self) -> int:
        """Blocks that in-flight sends keep allocated."""
        return sum(x.num_blocks for x in self._sending.values())

    def oldest_s(self, now_s: float) -> float:
        """Return the age of the oldest send in seconds; 0 without one."""
        return max((now_s - x.offered_s for x in self._sending.values()), default=0.0)

    def infos(
        self, now_s: float, lease_left_s: Callable[[bytes, float], float]
    ) -> list[TransferInfo]:
        """Return the sends under way, each with the seconds that its lease still lasts."""
        return [
            TransferInfo(
                request_id=x.ticket.request_id,
                role="producer",
                peer=x.ticket.consumer,
                path=x.path if x.cursor >= 0 else "",
                state=x.state,
                total_rows=x.num_rows,
                ready_rows=x.ready,
                done_rows=max(0, x.cursor),
                num_blocks=x.num_blocks,
                age_s=now_s - x.offered_s,
                lease_left_s=lease_left_s(transfer_id, now_s),
            )
            for transfer_id, x in self._sending.items()
        ]

    # ---- starts and stops

    def offer(self, ticket: Ticket) -> None:
        """Permit a consumer to attach."""
        transfer_id = ticket.transfer_id
        num_rows = self._context.layout.num_rows(ticket.num_tokens)
        self._sending[transfer_id] = _Sending(ticket, num_rows, self._context.now_s)
        self._ids[ticket.request_id] = transfer_id
        self._context.turns[transfer_id] = None
        self._context.commands.append(Offer(ticket))

    def cancel(self, request_id: str) -> bool:
        """Stop touching a request's blocks now; return whether it was being sent."""
        sending = self._of(request_id)
        if sending is None:
            return False
        self._context.commands.append(CancelSend(sending.ticket.transfer_id))
        self.finish_send(sending.ticket.transfer_id, FailureReason.CANCELLED)
        return True

    def pause(self, request_id: str) -> None:
        """Release the blocks of a preempted request; they may be overwritten from now on.

        A consumer on the path ``shared`` may be reading them and cannot be stopped. Its transfer
        ends, so that what it reads is never confirmed.
        """
        sending = self._of(request_id)
        if sending is None:
            return
        if sending.path == "shared" and sending.cursor >= 0:
            self.cancel(request_id)
            return
        sending.ready = 0
        sending.block_ids = ()
        # Without this the consumer would see ready rows that never come, and fail by no_data_s.
        self._context.commands.append(Ready(sending.ticket.transfer_id, 0))

    def mark(self, save: SaveProgress) -> None:
        """Record how much of a request is computed after the step's forward."""
        sending = self._of(save.request_id)
        if sending is None:
            return
        num_tokens = min(save.num_computed_tokens, sending.ticket.num_tokens)
        is_whole = num_tokens == sending.ticket.num_tokens
        if is_whole and sending.ready < sending.num_rows:
            sending.computed_s = self._context.now_s
        sending.lane = save.lane
        sending.block_ids = tuple(
            table[: layout.num_blocks(sending.ticket.num_tokens)]
            for layout, table in zip(self._context.layout.groups, save.block_ids, strict=True)
        )
        sending.ready = sending.num_rows if is_whole else num_tokens // ROW_TOKENS
        self._context.commands.append(Ready(sending.ticket.transfer_id, sending.ready))

    # ---- moving bytes

    def extract(self, transfer_id: bytes) -> bool:
        """Submit the next granted chunk of a transfer; return whether there was one."""
        sending = self._sending[transfer_id]
        is_shared = sending.path == "shared"
        largest = (
            self._context.config.mapped_chunk_rows if is_shared else self._context.config.chunk_rows
        )
        taken = sending.next_range(
            largest(self._context.layout.row_bytes), self._context.io.layout.rows_per_block
        )
        if not taken:
            return False
        chunk = self._mapped_chunk if is_shared else self._chunk
        self._context.commands.append(chunk(sending, taken))
        sending.advance(taken)
        return True

    def _chunk(self, sending: _Sending, taken: range) -> Chunk:
        """Copy rows out, with zeros behind the last token of the last row."""
        num_tokens, parts = sending.ticket.num_tokens, []
        ranges = group_rows(self._context.layout, num_tokens, taken.start, len(taken))
        for io, table, rows in zip(self._context.ios, sending.block_ids, ranges, strict=True):
            if not rows:
                continue
            part = io.read_rows(sending.lane, table, rows.start, len(rows))
            if rows.stop == sending.num_rows:
                zero_row_tail(io.layout, part[-1], num_tokens)
            parts.append(part.reshape(-1))
        payload = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Chunk(sending.ticket.transfer_id, taken.start, len(taken), payload)

    def _mapped_chunk(self, sending: _Sending, taken: range) -> MappedChunk:
        """Announce rows in place, with digests to check them if ``verify`` is set."""
        io = self._context.io
        assert io.host_blocks is not None
        first_block, end_block = io.layout.covering(taken.start, len(taken))
        block_ids = only_kv_group(sending.block_ids)[first_block:end_block]
        digests = np.empty(0, np.uint64)
        if self._context.config.verify:
            digests = io.host_blocks[sending.lane].digests(block_ids)
        return MappedChunk(
            sending.ticket.transfer_id,
            taken.start,
            len(taken),
            sending.lane,
            encode_mapped(np.asarray(block_ids, np.int64), digests),
        )

    def serve(self, event: Granted | Repeat) -> None:
        """Record a credit, or a request to repeat rows, from the consumer."""
        sending = self._sending.get(event.transfer_id)
        if sending is None:
            return
        if isinstance(event, Granted):
            if sending.cursor < 0:
                self._context.observe("rendezvous", self._context.now_s - sending.offered_s)
            sending.cursor = max(sending.cursor, event.start_row)
            sending.limit = event.limit
            sending.path = event.path
            return
        wanted = range(event.first_row, event.first_row + event.num_rows)
        # The rows may be queued already: a preempted request's rows are asked for repeatedly.
        if not any(x.start <= wanted.start and wanted.stop <= x.stop for x in sending.repeats):
            sending.repeats.append(wanted)

    def finish_send(
        self, transfer_id: bytes, reason: FailureReason | None, num_rows: int = 0
    ) -> None:
        """Report the end of a transfer, of which ``num_rows`` rows went, and release its blocks."""
        sending = self._sending.pop(transfer_id, None)
        if sending is None:
            return
        del self._ids[sending.ticket.request_id], self._context.turns[transfer_id]
        if reason is None:
            self._context.ended.sent.add(sending.ticket.request_id)
            num_bytes = self._context.layout.num_bytes(
                sending.ticket.num_tokens, sending.num_rows - num_rows, num_rows
            )
            self._context.totals.count_sent(sending.path, num_bytes)
            if sending.computed_s is not None:
                self._context.observe("handover", self._context.now_s - sending.computed_s)
        else:
            self._context.ended.failed[sending.ticket.request_id] = Failure(reason)
            count_failure(self._context.totals.send_failures, reason)
