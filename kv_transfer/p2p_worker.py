"""Worker side of the point-to-point connector: copies blocks between KV memory and a transport.

It does so on the engine's core thread and nowhere else. Because this thread alone both touches the
blocks and reports the end of a transfer, nothing is read or written for a transfer once its end has
been reported. Owns the transfers in flight of one engine; not their deadlines, which the transport
keeps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.connector import (
    ConnectorMeta,
    ConnectorSettings,
    Failure,
    KVDeviceIO,
    LoadSpec,
    SaveProgress,
    TransferInfo,
    TransferResults,
    TransferStats,
    TransportFactory,
    count_failure,
    only_kv_group,
)
from kv_transfer.dtypes import acceptable_layouts, convert_rows
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import ROW_TOKENS, KVLayout
from kv_transfer.messages import PayloadPath, encode_mapped
from kv_transfer.step_budget import StepBudget
from kv_transfer.ticket import Ticket
from kv_transfer.transport import (
    Arrived,
    ArrivedMapped,
    CancelLoad,
    CancelSend,
    Chunk,
    Command,
    Confirmed,
    Consumed,
    Delivered,
    Event,
    Granted,
    Load,
    LoadFailed,
    MappedChunk,
    Offer,
    Ready,
    Repeat,
    SendFailed,
    Spoiled,
    Transport,
)


class P2PMeta(ConnectorMeta, frozen=True):
    """Everything the scheduler side tells the worker side in one step.

    Attributes:
        cancels: Requests whose transfer ends now, in either role.
        preempted: Producing requests whose blocks were taken away; saves start again.
        offers: Transfers that a consumer may attach to from now on.
        loads: Transfers to fetch.
        saves: What this step's forward will have computed.
    """

    cancels: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    offers: tuple[Ticket, ...] = ()
    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveProgress, ...] = ()


@dataclass(slots=True, eq=False)
class _Sending:
    ticket: Ticket
    num_rows: int
    offered_s: float
    lane: int = 0
    block_ids: tuple[int, ...] = ()
    ready: int = 0
    """Rows from position 0 that may be read."""
    computed_s: float | None = None
    """When the last of them became ready."""
    path: PayloadPath = "inline"
    cursor: int = -1
    """Next row to extract; -1 until a consumer has attached."""
    limit: int = 0
    repeats: deque[range] = field(default_factory=deque)

    def next_range(self, chunk_rows: int, rows_per_block: int) -> range:
        """Return the rows to extract next, empty when none may be.

        A block is told of only as a whole, since its digest covers all of it.
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
        """Note that these rows, from ``next_range``, were extracted."""
        if self.repeats:
            left = self.repeats.popleft()[len(taken) :]
            if left:
                self.repeats.appendleft(left)
        else:
            self.cursor = taken.stop

    @property
    def state(self) -> str:
        if self.cursor < 0:
            return "waiting"
        return "computing" if self.ready < self.num_rows else "streaming"


@dataclass(slots=True, eq=False)
class _Loading:
    ticket: Ticket
    layout: KVLayout
    """The producer's, with this engine's block size."""
    lane: int
    block_ids: tuple[int, ...]
    start_row: int
    num_rows: int
    started_s: float
    path: PayloadPath = "inline"
    is_verified: bool = True
    written: bytearray = field(default_factory=bytearray)
    num_missing: int = 0
    arrived: deque[Event] = field(default_factory=deque)
    """Data that waits to be written, and what was said after it."""
    first_s: float | None = None
    last_s: float = 0.0

    def take(self, start: int, end: int) -> int:
        """Note that rows were written; returns how many were not before."""
        num_new = self.written.count(0, start, end)
        self.written[start:end] = b"\x01" * (end - start)
        self.num_missing -= num_new
        return num_new

    def lose(self, start: int, end: int) -> int:
        """Note that rows were overwritten with something else; returns how many were written."""
        num_lost = self.written.count(1, start, end)
        self.written[start:end] = bytes(end - start)
        self.num_missing += num_lost
        return num_lost

    def is_whole(self, first_row: int, num_rows: int) -> bool:
        """Tell whether these rows end where blocks of this engine, or the request, do."""
        rows_per_block, end_row = self.layout.rows_per_block, first_row + num_rows
        return first_row % rows_per_block == 0 and (
            end_row % rows_per_block == 0 or end_row == self.num_rows
        )

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


class P2PConnectorWorker:
    """Worker side of the point-to-point connector (see ``KVConnectorWorker``).

    Owner: the engine's core thread. ``now_s`` is any monotonic clock; it only feeds statistics,
    because every deadline is kept by the transport. Every transfer, in either direction, moves one
    chunk in its turn until the step's budget is spent; the next step goes on with whose turn it is.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        notify: Callable[[], None],
        make_transport: TransportFactory,
    ) -> None:
        self._settings = settings
        self._notify = notify
        self._make_transport = make_transport
        self._transport: Transport | None = None
        self._io: KVDeviceIO | None = None
        self._layouts: dict[str, KVLayout] = {}
        self._sending: dict[bytes, _Sending] = {}
        self._loading: dict[bytes, _Loading] = {}
        self._transfer_ids: dict[str, bytes] = {}
        self._turns: dict[bytes, None] = {}
        """Every transfer in flight, in the order in which they move."""
        self._is_behind = False
        """Whether some of them may have a chunk that the step's budget had no room for."""
        config = settings.config
        self._budget = StepBudget(config.copy_s, config.copy_share, settings.step_now_s)
        self._commands: list[Command] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: dict[str, Failure] = {}
        self._converted: set[str] = set()
        self._totals = TransferStats.empty()
        self._now_s = 0.0

    # ---- life cycle

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where other engines reach this one."""
        return self._require_transport().endpoints

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Take the cache and start listening."""
        if self._io is not None:
            raise TransferError("register_kv_caches was called before")
        io = only_kv_group(ios)
        self._layouts = acceptable_layouts(io.layout, self._settings.accept_dtypes)
        self._transport = self._make_transport(self._settings, io, self._notify)
        self._io = io

    def close(self, deadline_s: float) -> None:
        """Stop listening and leave no thread, socket or file. Idempotent."""
        if self._transport is not None:
            self._transport.close(deadline_s)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Before the forward: start and stop transfers, then move what is due."""
        assert isinstance(meta, P2PMeta)
        self._now_s = now_s
        self._budget.begin()
        for request_id in meta.preempted:
            self._pause(request_id)
        for offer in meta.offers:
            self._offer(offer, now_s)
        for load in meta.loads:
            self._load(load, now_s)
        for request_id in meta.cancels:
            self._cancel(request_id)
        self._flush()
        self._take_events()
        self._move()

    def wait_for_layer_load(self, layer: int) -> None:
        """Return at once: a load becomes visible only when it is whole."""

    def save_kv_layer(self, layer: int) -> None:
        """Keep transfers going during a long forward: what an earlier chunk made ready moves now.

        The layer itself becomes ready with its prefill chunk, by ``mark_ready``.
        """
        if (self._sending or self._loading) and (self._take_events() or self._is_behind):
            self._move()

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """After the forward: what ``meta.saves`` announced is in the cache; move what is due."""
        assert isinstance(meta, P2PMeta)
        self._now_s = now_s
        for save in meta.saves:
            sending = self._sending.get(self._transfer_ids.get(save.request_id, b""))
            if sending is not None:
                self._mark(sending, save)
        self._move()

    def wait_for_save(self) -> None:
        """Return at once: extraction copies on this thread."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """At the end of the step: move what is due and report what ended."""
        self._now_s = now_s
        self._take_events()
        self._move()
        if not (self._sent or self._received or self._failed):
            return TransferResults()
        results = TransferResults(
            sent=frozenset(self._sent),
            received=frozenset(self._received),
            failed=dict(self._failed),
            converted=frozenset(self._converted),
        )
        for reported in (self._sent, self._received, self._failed, self._converted):
            reported.clear()
        return results

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""
        counters = self._require_transport().counters
        ages = [now_s - sending.offered_s for sending in self._sending.values()]
        wire = msgspec.structs.asdict(counters) | {"leases": dict(counters.leases)}
        return msgspec.structs.replace(
            self._totals,
            **wire,
            num_inflight_sends=len(self._sending),
            num_inflight_loads=len(self._loading),
            num_leased_blocks=sum(len(x.block_ids) for x in self._sending.values()),
            num_reserved_blocks=sum(len(x.block_ids) for x in self._loading.values()),
            oldest_lease_s=max(ages, default=0.0),
        )

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return what is under way."""
        transport = self._require_transport()
        sends = [
            TransferInfo(
                request_id=x.ticket.request_id,
                role="producer",
                peer=x.ticket.consumer,
                path=x.path if x.cursor >= 0 else "",
                state=x.state,
                total_rows=x.num_rows,
                ready_rows=x.ready,
                done_rows=max(0, x.cursor),
                num_blocks=len(x.block_ids),
                age_s=now_s - x.offered_s,
                lease_left_s=transport.lease_left_s(transfer_id, now_s),
            )
            for transfer_id, x in self._sending.items()
        ]
        loads = [
            TransferInfo(
                request_id=x.ticket.request_id,
                role="consumer",
                peer=x.ticket.producer_incarnation,
                path=x.path if x.first_s is not None else "",
                state=x.state,
                total_rows=x.num_rows - x.start_row,
                ready_rows=x.num_rows - x.start_row - x.num_missing,
                done_rows=x.num_rows - x.start_row - x.num_missing,
                num_blocks=len(x.block_ids),
                age_s=now_s - x.started_s,
            )
            for x in self._loading.values()
        ]
        return sends + loads

    # ---- starts and stops

    def _offer(self, ticket: Ticket, now_s: float) -> None:
        transfer_id = ticket.transfer_id
        num_rows = self._require_io().layout.num_rows(ticket.num_tokens)
        self._sending[transfer_id] = _Sending(ticket, num_rows, now_s)
        self._transfer_ids[ticket.request_id] = transfer_id
        self._turns[transfer_id] = None
        self._commands.append(Offer(ticket))

    def _load(self, spec: LoadSpec, now_s: float) -> None:
        layout = self._layouts[spec.ticket.layout_hash]
        num_rows = layout.num_rows(spec.ticket.num_tokens)
        self._commands.append(Load(spec.ticket, spec.sealed, spec.start_row, layout.row_bytes))
        if spec.start_row >= num_rows:
            self._received.add(spec.ticket.request_id)
            return
        transfer_id = spec.ticket.transfer_id
        self._transfer_ids[spec.ticket.request_id] = transfer_id
        self._turns[transfer_id] = None
        self._loading[transfer_id] = _Loading(
            spec.ticket,
            layout,
            spec.lane,
            only_kv_group(spec.block_ids),
            spec.start_row,
            num_rows,
            now_s,
            written=bytearray(b"\x01" * spec.start_row + bytes(num_rows - spec.start_row)),
            num_missing=num_rows - spec.start_row,
        )

    def _cancel(self, request_id: str) -> None:
        """Stop touching a request's blocks now; a transfer that never started ends here too."""
        transfer_id = self._transfer_ids.get(request_id, b"")
        if transfer_id in self._sending:
            self._commands.append(CancelSend(transfer_id))
            self._end_send(transfer_id, FailureReason.CANCELLED)
        elif transfer_id in self._loading:
            self._commands.append(CancelLoad(transfer_id))
            self._end_load(transfer_id, FailureReason.CANCELLED)
        elif request_id not in self._sent | self._received | self._failed.keys():
            self._failed[request_id] = Failure(FailureReason.CANCELLED)

    def _pause(self, request_id: str) -> None:
        """Let go of the blocks of a preempted request; they are overwritten from now on.

        A consumer that may be reading them where they are cannot be stopped: what it reads must
        never be confirmed, so its transfer ends.
        """
        sending = self._sending.get(self._transfer_ids.get(request_id, b""))
        if sending is None:
            return
        if sending.path == "shared" and sending.cursor >= 0:
            self._cancel(request_id)
            return
        sending.ready = 0
        sending.block_ids = ()
        # A consumer that believes that rows are ready would not wait for them for ever.
        self._commands.append(Ready(sending.ticket.transfer_id, 0))

    # ---- moving bytes

    def _mark(self, sending: _Sending, save: SaveProgress) -> None:
        layout = self._require_io().layout
        num_tokens = min(save.num_computed_tokens, sending.ticket.num_tokens)
        is_whole = num_tokens == sending.ticket.num_tokens
        if is_whole and sending.ready < sending.num_rows:
            sending.computed_s = self._now_s
        sending.lane = save.lane
        table = only_kv_group(save.block_ids)
        sending.block_ids = table[: layout.num_blocks(sending.ticket.num_tokens)]
        sending.ready = sending.num_rows if is_whole else num_tokens // ROW_TOKENS
        self._commands.append(Ready(sending.ticket.transfer_id, sending.ready))

    def _move(self) -> None:
        """Copy chunks, of each transfer in its turn, as far as the step's budget goes."""
        self._budget.resume()
        waiting = deque(self._turns)
        while waiting and self._budget.has_room:
            transfer_id = waiting.popleft()
            if self._move_chunk(transfer_id):
                self._flush()
                self._budget.charge()
                waiting.append(transfer_id)
                if transfer_id in self._turns:
                    self._turns[transfer_id] = self._turns.pop(transfer_id)
        self._is_behind = bool(waiting)
        if waiting:
            self._notify()

    def _move_chunk(self, transfer_id: bytes) -> bool:
        """Copy one chunk of a transfer; returns whether there was one."""
        sending = self._sending.get(transfer_id)
        if sending is not None:
            return self._extract(sending)
        loading = self._loading.get(transfer_id)
        if loading is None or not loading.arrived:
            return False
        event = loading.arrived.popleft()
        assert isinstance(event, Arrived | ArrivedMapped)
        self._inject(loading, event)
        while loading.arrived and not isinstance(loading.arrived[0], Arrived | ArrivedMapped):
            self._apply(loading.arrived.popleft())
        return True

    def _extract(self, sending: _Sending) -> bool:
        """Hand out the next ready rows, if credits allow any; returns whether there were some."""
        layout, is_shared = self._require_io().layout, sending.path == "shared"
        largest = self._config.mapped_chunk_rows if is_shared else self._config.chunk_rows
        taken = sending.next_range(largest(layout.row_bytes), layout.rows_per_block)
        if not taken:
            return False
        chunk = self._mapped_chunk if is_shared else self._chunk
        self._commands.append(chunk(sending, taken))
        sending.advance(taken)
        return True

    def _chunk(self, sending: _Sending, taken: range) -> Chunk:
        """Copy rows out, without what the last block holds behind the last token."""
        io = self._require_io()
        payload = io.read_rows(sending.lane, sending.block_ids, taken.start, len(taken))
        if taken.stop == sending.num_rows:
            _zero_tail(io.layout, payload[-1], sending.ticket.num_tokens)
        return Chunk(sending.ticket.transfer_id, taken.start, payload)

    def _mapped_chunk(self, sending: _Sending, taken: range) -> MappedChunk:
        """Tell where rows are, and with which digests whoever reads them can check them."""
        io = self._require_io()
        assert io.host_blocks is not None
        first_block, end_block = io.layout.covering(taken.start, len(taken))
        block_ids = sending.block_ids[first_block:end_block]
        digests = np.empty(0, np.uint64)
        if self._config.verify:
            digests = io.host_blocks[sending.lane].digests(block_ids)
        return MappedChunk(
            sending.ticket.transfer_id,
            taken.start,
            len(taken),
            sending.lane,
            encode_mapped(np.asarray(block_ids, np.int64), digests),
        )

    def _take_events(self) -> bool:
        """Apply what the transport reported; data, and what follows on it, waits for its turn.

        Returns:
            Whether there was anything.
        """
        events = self._require_transport().poll()
        for event in events:
            loading = self._loading.get(event.transfer_id)
            is_data = isinstance(event, Arrived | ArrivedMapped)
            if loading is not None and (is_data or loading.arrived):
                loading.arrived.append(event)
            elif not is_data:
                self._apply(event)
        self._flush()
        return bool(events)

    def _inject(self, loading: _Loading, event: Arrived | ArrivedMapped) -> None:
        """Write rows into their blocks."""
        if loading.first_s is None:
            loading.first_s = self._now_s
        num_lost = 0
        if isinstance(event, Arrived):
            loading.path = event.path
            self._write(loading, event.first_row, event.payload)
            good = [range(event.first_row, event.first_row + len(event.payload))]
        else:
            good, bad = self._read_mapped(loading, event)
            num_lost = sum(loading.lose(rows.start, rows.stop) for rows in bad)
            self._commands += [Spoiled(event.transfer_id, x.start, len(x)) for x in bad]
        num_new = sum(loading.take(rows.start, rows.stop) for rows in good)
        if num_new and loading.num_missing == 0:
            self._finish_writing(loading)
        self._commands.append(Consumed(event.transfer_id, num_new - num_lost))
        if loading.num_missing == 0 and loading.path != "shared":
            self._end_load(event.transfer_id, None)

    def _write(self, loading: _Loading, first_row: int, rows: NDArray[np.uint8]) -> None:
        io = self._require_io()
        if loading.layout.dtype != io.layout.dtype:
            rows = convert_rows(rows, loading.layout, io.layout)
        io.write_rows(loading.lane, loading.block_ids, first_row, rows)

    def _read_mapped(
        self, loading: _Loading, event: ArrivedMapped
    ) -> tuple[list[range], list[range]]:
        """Copy rows out of the producer's memory.

        Returns:
            The rows that are now here as the producer told of them, and those that are something
            else.
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
        """Copy rows, whole blocks at once where both ends' are alike; returns which were wrong."""
        io, source = self._require_io(), event.source
        first_block, end_block = source.layout.covering(event.first_row, event.num_rows)
        digests = event.digests if len(event.digests) else None
        source_ids = event.block_ids.tolist()
        is_alike = io.host_blocks is not None and source.layout == io.layout
        if is_alike and loading.is_whole(event.first_row, event.num_rows):
            assert io.host_blocks is not None
            block_ids = loading.block_ids[first_block:end_block]
            return io.host_blocks[loading.lane].copy_from(source, source_ids, block_ids, digests)
        offset = event.first_row - first_block * source.layout.rows_per_block
        # Into memory of this process first, and checked there: the source may change at any time.
        copy = HostBlocks.empty(source.layout, len(source_ids))
        wrong = copy.copy_from(source, source_ids, range(len(source_ids)), digests)
        rows = copy.read_rows(range(len(source_ids)), offset, event.num_rows)
        if event.first_row + event.num_rows == loading.num_rows:
            _zero_tail(source.layout, rows[-1], loading.ticket.num_tokens)
        self._write(loading, event.first_row, rows)
        return wrong

    def _finish_writing(self, loading: _Loading) -> None:
        """Zero what follows the last token in its block; stale values there could be NaN."""
        io, num_tokens = self._require_io(), loading.ticket.num_tokens
        loading.last_s = self._now_s
        if io.host_blocks is not None:
            io.host_blocks[loading.lane].zero_tail(loading.block_ids, num_tokens)
            return
        num_free = -loading.num_rows % io.layout.rows_per_block
        if num_free:
            zeros = np.zeros((num_free, io.layout.row_bytes), np.uint8)
            io.write_rows(loading.lane, loading.block_ids, loading.num_rows, zeros)

    def _apply(self, event: Event) -> None:
        """Apply what is not data."""
        if isinstance(event, Granted | Repeat):
            sending = self._sending.get(event.transfer_id)
            if sending is not None:
                self._serve(sending, event)
        elif isinstance(event, Delivered):
            self._end_send(event.transfer_id, None, event.num_rows)
        elif isinstance(event, SendFailed):
            self._end_send(event.transfer_id, event.reason)
        elif isinstance(event, Confirmed):
            self._end_load(event.transfer_id, None)
        elif isinstance(event, LoadFailed):
            self._end_load(event.transfer_id, event.reason)

    def _serve(self, sending: _Sending, event: Granted | Repeat) -> None:
        """Note what the consumer wants."""
        if isinstance(event, Granted):
            if sending.cursor < 0:
                self._observe("rendezvous", self._now_s - sending.offered_s)
            sending.cursor = max(sending.cursor, event.start_row)
            sending.limit = event.limit
            sending.path = event.path
            return
        wanted = range(event.first_row, event.first_row + event.num_rows)
        # Asked for again while it waits already, as for the blocks of a preempted request.
        if not any(x.start <= wanted.start and wanted.stop <= x.stop for x in sending.repeats):
            sending.repeats.append(wanted)

    # ---- ends

    def _end_send(
        self, transfer_id: bytes, reason: FailureReason | None, num_rows: int = 0
    ) -> None:
        sending = self._sending.pop(transfer_id, None)
        if sending is None:
            return
        del self._transfer_ids[sending.ticket.request_id], self._turns[transfer_id]
        if reason is None:
            self._sent.add(sending.ticket.request_id)
            num_bytes = num_rows * self._require_io().layout.row_bytes
            self._totals.count_sent(sending.path, num_bytes)
            if sending.computed_s is not None:
                self._observe("handover", self._now_s - sending.computed_s)
        else:
            self._failed[sending.ticket.request_id] = Failure(reason)
            count_failure(self._totals.send_failures, reason)

    def _end_load(self, transfer_id: bytes, reason: FailureReason | None) -> None:
        loading = self._loading.pop(transfer_id, None)
        if loading is None:
            return
        del self._transfer_ids[loading.ticket.request_id], self._turns[transfer_id]
        if loading.layout.dtype != self._require_io().layout.dtype:
            self._converted.add(loading.ticket.request_id)
        if reason is not None:
            self._failed[loading.ticket.request_id] = Failure(reason, loading.num_tokens)
            count_failure(self._totals.receive_failures, reason)
            return
        self._received.add(loading.ticket.request_id)
        assert loading.first_s is not None
        num_bytes = (loading.num_rows - loading.start_row) * loading.layout.row_bytes
        times_s = (loading.started_s, loading.first_s, loading.last_s, self._now_s)
        self._totals.count_received(loading.path, num_bytes, times_s)

    def _observe(self, stage: str, seconds: float) -> None:
        self._totals.stages[stage].observe(seconds)

    # ---- inside

    @property
    def _config(self) -> TransferConfig:
        return self._settings.config

    def _flush(self) -> None:
        if self._commands:
            self._require_transport().submit(self._commands)
            self._commands = []

    def _require_io(self) -> KVDeviceIO:
        if self._io is None:
            raise TransferError("call register_kv_caches first")
        return self._io

    def _require_transport(self) -> Transport:
        if self._transport is None:
            raise TransferError("call register_kv_caches first")
        return self._transport


def _zero_tail(layout: KVLayout, row: NDArray[np.uint8], num_tokens: int) -> None:
    """Zero what follows the last token of a request in its last row."""
    one_row = msgspec.structs.replace(layout, block_size=ROW_TOKENS)
    pieces = list(row.reshape(layout.num_pieces, 1, -1))
    HostBlocks(one_row, pieces).zero_tail([0], num_tokens % ROW_TOKENS)
