"""Worker side of the point-to-point connector: copies blocks between KV memory and a transport.

It does so on the engine's core thread and nowhere else. Because this thread alone both touches the
blocks and reports the end of a transfer, nothing is read or written for a transfer once its end has
been reported. Owns the transfers in flight of one engine; not their deadlines, which the transport
keeps.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from kv_transfer.connector import (
    ConnectorMeta,
    ConnectorSettings,
    KVDeviceIO,
    LoadSpec,
    OfferSpec,
    SaveProgress,
    TransferResults,
    TransferStats,
)
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.layout import KVLayout
from kv_transfer.ticket import Ticket
from kv_transfer.transport import (
    Arrived,
    CancelLoad,
    CancelSend,
    Chunk,
    Command,
    Consumed,
    Delivered,
    Event,
    Granted,
    Load,
    LoadFailed,
    Offer,
    Ready,
    Repeat,
    SendFailed,
    Transport,
)

TransportFactory = Callable[[ConnectorSettings, KVLayout, Callable[[], None]], Transport]


@dataclass(slots=True, eq=False)
class _Sending:
    request_id: str
    ticket: Ticket
    num_blocks: int
    offered_s: float
    lane: int = 0
    block_ids: tuple[int, ...] = ()
    ready: int = 0
    """Blocks from position 0 that may be read."""
    cursor: int = -1
    """Next block to extract; -1 until a consumer has attached."""
    limit: int = 0
    repeats: deque[range] = field(default_factory=deque)

    def next_range(self, chunk_blocks: int) -> range:
        """Return the blocks to extract next, empty when none may be."""
        if self.repeats:
            wanted = self.repeats[0]
            return wanted[:chunk_blocks] if wanted.stop <= self.ready else range(0)
        if self.cursor < 0:
            return range(0)
        return range(self.cursor, min(self.ready, self.limit, self.cursor + chunk_blocks))

    def advance(self, taken: range) -> None:
        """Note that these blocks, from ``next_range``, were extracted."""
        if self.repeats:
            left = self.repeats.popleft()[len(taken) :]
            if left:
                self.repeats.appendleft(left)
        else:
            self.cursor = taken.stop


@dataclass(slots=True, eq=False)
class _Loading:
    request_id: str
    ticket: Ticket
    lane: int
    block_ids: tuple[int, ...]
    num_wired: int
    num_missing: int
    started_s: float
    first_s: float | None = None


@dataclass(slots=True)
class _Totals:
    num_sent: int = 0
    num_received: int = 0
    blocks_sent: int = 0
    blocks_received: int = 0
    send_failures: dict[str, int] = field(default_factory=dict)
    receive_failures: dict[str, int] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: {"rendezvous": 0.0, "stream": 0.0, "total": 0.0}
    )


class P2PConnectorWorker:
    """Worker side of the point-to-point connector (see ``KVConnectorWorker``).

    Owner: the engine's core thread. ``now_s`` is any monotonic clock; it only feeds statistics,
    because every deadline is kept by the transport.
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
        self._sending: dict[bytes, _Sending] = {}
        self._loading: dict[bytes, _Loading] = {}
        self._transfer_ids: dict[str, bytes] = {}
        self._events: deque[Event] = deque()
        self._commands: list[Command] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: dict[str, FailureReason] = {}
        self._totals = _Totals()
        self._chunk_blocks = 1

    # ---- life cycle

    @property
    def endpoint(self) -> str:
        """Where other engines reach this one."""
        return self._require_transport().endpoint

    def register_kv_caches(self, io: KVDeviceIO) -> None:
        """Take the cache and start listening."""
        if self._io is not None:
            raise TransferError("register_kv_caches was called before")
        self._transport = self._make_transport(self._settings, io.layout, self._notify)
        self._io = io
        self._chunk_blocks = self._config.chunk_blocks(io.layout.bytes_per_block)

    def close(self, deadline_s: float) -> None:
        """Stop listening and leave no thread, socket or file. Idempotent."""
        if self._transport is not None:
            self._transport.close(deadline_s)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Before the forward: start and stop transfers, then inject what arrived."""
        for request_id in meta.preempted:
            self._pause(request_id)
        for offer in meta.offers:
            self._offer(offer, now_s)
        for load in meta.loads:
            self._load(load, now_s)
        for request_id in meta.cancels:
            self._cancel(request_id)
        self._flush()
        self._take_events(now_s)

    def wait_for_layer_load(self, layer: int) -> None:
        """Return at once: a load becomes visible only when it is whole."""

    def save_kv_layer(self, layer: int) -> None:
        """Do nothing: readiness is announced per prefill chunk, by ``mark_ready``."""

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """After the forward: what ``meta.saves`` announced is in the cache; extract and send."""
        for save in meta.saves:
            sending = self._sending.get(self._transfer_ids.get(save.request_id, b""))
            if sending is not None:
                self._mark(sending, save)
        self._extract()

    def wait_for_save(self) -> None:
        """Return at once: extraction copies on this thread."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """At the end of the step: move what is due and report what ended."""
        self._take_events(now_s)
        self._extract()
        if not (self._sent or self._received or self._failed):
            return TransferResults()
        results = TransferResults(
            frozenset(self._sent), frozenset(self._received), dict(self._failed)
        )
        self._sent.clear()
        self._received.clear()
        self._failed.clear()
        return results

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""
        totals, bytes_per_block = self._totals, self._require_io().layout.bytes_per_block
        counters = self._require_transport().counters
        ages = [now_s - sending.offered_s for sending in self._sending.values()]
        return TransferStats(
            num_sent=totals.num_sent,
            num_received=totals.num_received,
            blocks_sent=totals.blocks_sent,
            blocks_received=totals.blocks_received,
            bytes_sent=totals.blocks_sent * bytes_per_block,
            bytes_received=totals.blocks_received * bytes_per_block,
            send_failures=dict(totals.send_failures),
            receive_failures=dict(totals.receive_failures),
            num_inflight_sends=len(self._sending),
            num_inflight_loads=len(self._loading),
            num_leased_blocks=sum(len(x.block_ids) for x in self._sending.values()),
            oldest_lease_s=max(ages, default=0.0),
            stage_seconds=dict(totals.stage_seconds),
            num_retransmits=counters.num_retransmits,
            num_checksum_failures=counters.num_checksum_failures,
            num_dropped_chunks=counters.num_dropped_chunks,
            num_unknown_ids=counters.num_unknown_ids,
            num_malformed=counters.num_malformed,
        )

    # ---- starting and stopping

    def _offer(self, spec: OfferSpec, now_s: float) -> None:
        num_blocks = self._require_io().layout.num_blocks(spec.ticket.num_tokens)
        transfer_id = spec.ticket.transfer_id
        self._sending[transfer_id] = _Sending(spec.request_id, spec.ticket, num_blocks, now_s)
        self._transfer_ids[spec.request_id] = transfer_id
        self._commands.append(Offer(spec.ticket))

    def _load(self, spec: LoadSpec, now_s: float) -> None:
        self._commands.append(Load(spec.ticket, spec.start_block))
        num_wired = len(spec.block_ids) - spec.start_block
        if not num_wired:
            self._received.add(spec.request_id)
            self._totals.num_received += 1
            return
        transfer_id = spec.ticket.transfer_id
        self._transfer_ids[spec.request_id] = transfer_id
        self._loading[transfer_id] = _Loading(
            spec.request_id,
            spec.ticket,
            spec.lane,
            spec.block_ids,
            num_wired=num_wired,
            num_missing=num_wired,
            started_s=now_s,
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
            self._failed[request_id] = FailureReason.CANCELLED

    def _pause(self, request_id: str) -> None:
        sending = self._sending.get(self._transfer_ids.get(request_id, b""))
        if sending is not None:
            sending.ready = 0
            sending.block_ids = ()

    # ---- moving bytes

    def _mark(self, sending: _Sending, save: SaveProgress) -> None:
        layout = self._require_io().layout
        num_tokens = min(save.num_computed_tokens, sending.ticket.num_tokens)
        is_whole = num_tokens == sending.ticket.num_tokens
        sending.lane = save.lane
        sending.block_ids = save.block_ids[: sending.num_blocks]
        sending.ready = sending.num_blocks if is_whole else num_tokens // layout.block_size
        self._commands.append(Ready(sending.ticket.transfer_id, sending.ready))

    def _extract(self) -> None:
        """Copy ready blocks out under their credits, one chunk per transfer in turn."""
        budget = self._budget_blocks
        busy = list(self._sending.values())
        while busy and budget > 0:
            still_busy = []
            for sending in busy:
                taken = sending.next_range(self._chunk_blocks)
                if taken and budget > 0:
                    self._extract_chunk(sending, taken)
                    budget -= len(taken)
                    still_busy.append(sending)
            busy = still_busy
        self._flush()
        if busy and budget <= 0:
            self._notify()

    def _extract_chunk(self, sending: _Sending, taken: range) -> None:
        io = self._require_io()
        payload = io.read_blocks(sending.lane, sending.block_ids[taken.start : taken.stop])
        num_tail = sending.ticket.num_tokens - (sending.num_blocks - 1) * io.layout.block_size
        if taken.stop == sending.num_blocks:
            payload[-1].reshape(io.layout.rows_shape)[:, num_tail:] = 0
        sending.advance(taken)
        self._commands.append(Chunk(sending.ticket.transfer_id, taken.start, payload))

    def _take_events(self, now_s: float) -> None:
        """Apply what the transport reported, injecting blocks up to the budget of one call."""
        self._events.extend(self._require_transport().poll())
        budget = self._budget_blocks
        while self._events and budget > 0:
            event = self._events.popleft()
            if isinstance(event, Arrived):
                budget -= self._inject(event, now_s)
            else:
                self._apply(event)
        self._flush()
        if self._events:
            self._notify()

    def _inject(self, event: Arrived, now_s: float) -> int:
        loading = self._loading.get(event.transfer_id)
        if loading is None:
            return 0
        num_blocks = len(event.payload)
        if loading.first_s is None:
            loading.first_s = now_s
        block_ids = loading.block_ids[event.first_block : event.first_block + num_blocks]
        self._require_io().write_blocks(loading.lane, block_ids, event.payload)
        self._commands.append(Consumed(event.transfer_id, event.num_new))
        loading.num_missing -= event.num_new
        if loading.num_missing == 0:
            self._end_load(event.transfer_id, None)
            self._count_stages(loading, loading.first_s, now_s)
        return num_blocks

    def _apply(self, event: Event) -> None:
        if isinstance(event, Granted):
            sending = self._sending.get(event.transfer_id)
            if sending is not None:
                sending.cursor = max(sending.cursor, event.start_block)
                sending.limit = event.limit
        elif isinstance(event, Repeat):
            sending = self._sending.get(event.transfer_id)
            if sending is not None:
                stop = event.first_block + event.num_blocks
                sending.repeats.append(range(event.first_block, stop))
        elif isinstance(event, Delivered):
            self._end_send(event.transfer_id, None, event.num_blocks)
        elif isinstance(event, SendFailed):
            self._end_send(event.transfer_id, event.reason)
        elif isinstance(event, LoadFailed):
            self._end_load(event.transfer_id, event.reason)

    # ---- ends

    def _end_send(
        self, transfer_id: bytes, reason: FailureReason | None, num_blocks: int = 0
    ) -> None:
        sending = self._sending.pop(transfer_id, None)
        if sending is None:
            return
        del self._transfer_ids[sending.request_id]
        if reason is None:
            self._sent.add(sending.request_id)
            self._totals.num_sent += 1
            self._totals.blocks_sent += num_blocks
        else:
            self._failed[sending.request_id] = reason
            _count(self._totals.send_failures, reason)

    def _end_load(self, transfer_id: bytes, reason: FailureReason | None) -> None:
        loading = self._loading.pop(transfer_id, None)
        if loading is None:
            return
        del self._transfer_ids[loading.request_id]
        if reason is None:
            self._received.add(loading.request_id)
            self._totals.num_received += 1
            self._totals.blocks_received += loading.num_wired
        else:
            self._failed[loading.request_id] = reason
            _count(self._totals.receive_failures, reason)

    def _count_stages(self, loading: _Loading, first_s: float, now_s: float) -> None:
        seconds = self._totals.stage_seconds
        seconds["rendezvous"] += first_s - loading.started_s
        seconds["stream"] += now_s - first_s
        seconds["total"] += now_s - loading.started_s

    # ---- inside

    @property
    def _config(self) -> TransferConfig:
        return self._settings.config

    @property
    def _budget_blocks(self) -> int:
        bytes_per_block = self._require_io().layout.bytes_per_block
        return max(1, self._config.max_bytes_per_call // bytes_per_block)

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


def _count(by_reason: dict[str, int], reason: FailureReason) -> None:
    by_reason[reason.value] = by_reason.get(reason.value, 0) + 1
