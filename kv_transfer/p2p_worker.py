"""Worker side of the point-to-point connector: copies blocks between KV memory and a transport.

Copies run on the engine's core thread only. This thread alone touches the blocks and reports the
ends of transfers, so nothing is read or written for a transfer after its end was reported. Owns the
transfers in flight of one engine, but not their deadlines, which the transport keeps.
"""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kv_transfer.connector import (
    ConnectorMeta,
    ConnectorSettings,
    Failure,
    KVDeviceIO,
    KVMemory,
    LoadSpec,
    SaveProgress,
    TransferInfo,
    TransferResults,
    TransferStats,
    TransportFactory,
)
from kv_transfer.dtypes import acceptable_layouts
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.layout import join_layouts
from kv_transfer.p2p_context import P2PContext
from kv_transfer.p2p_loads import P2PLoads
from kv_transfer.p2p_sends import P2PSends
from kv_transfer.step_budget import StepBudget
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Delivered, Event, Granted, Repeat, SendFailed, Transport


class P2PMeta(ConnectorMeta, frozen=True):
    """Message of one step from scheduler side to worker side.

    Attributes:
        cancels: Requests whose transfer ends now, in either role.
        preempted: Producing requests whose blocks were taken away; their saves start again.
        offers: Transfers that a consumer may attach to from now on.
        loads: Transfers to fetch.
        saves: Progress of prefills after this step's forward.
    """

    cancels: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    offers: tuple[Ticket, ...] = ()
    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveProgress, ...] = ()


class P2PConnectorWorker:
    """Worker side of the point-to-point connector (see ``KVConnectorWorker``).

    Owner: the engine's core thread. ``now_s`` is any monotonic clock; it only feeds statistics,
    because the transport keeps every deadline. Transfers in both directions take turns, one chunk
    each, until the step's budget is spent. The next step continues with the next in turn.
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
        """None until ``register_kv_caches``, which also sets the three fields below."""
        self._context: P2PContext
        self._sends: P2PSends
        self._loads: P2PLoads
        self._is_behind = False
        """True if some transfers may have a chunk that did not fit into the step's budget."""
        config = settings.config
        self._budget = StepBudget(config.copy_s, config.copy_share, settings.step_now_s)

    # ---- life cycle

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of this engine for others."""
        return self._require_transport().endpoints

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Attach the cache and start listening."""
        if self._transport is not None:
            raise TransferError("register_kv_caches was called twice: call it once")
        layout = join_layouts([io.layout for io in ios])
        self._context = P2PContext(
            io=ios[0], ios=tuple(ios), layout=layout, config=self._settings.config
        )
        self._sends = P2PSends(self._context)
        layouts = acceptable_layouts(layout, self._settings.accept_dtypes)
        self._loads = P2PLoads(self._context, layouts)
        # Blocks of several KV groups are sent: a digest covers a block of one group.
        memory = KVMemory(layout)
        if len(ios) == 1:
            memory = KVMemory(layout, ios[0].shared_region, ios[0].region_layout)
        self._transport = self._make_transport(self._settings, memory, self._notify)

    def close(self, deadline_s: float) -> None:
        """Stop listening and leave no thread, socket or file. Idempotent."""
        if self._transport is not None:
            self._transport.close(deadline_s)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Begin a step: start and stop transfers, then copy what is due."""
        assert isinstance(meta, P2PMeta)
        self._require_transport()
        self._context.now_s = now_s
        self._budget.start_step()
        for request_id in meta.preempted:
            self._sends.pause(request_id)
        for offer in meta.offers:
            self._sends.offer(offer)
        for load in meta.loads:
            self._loads.start_load(load)
        for request_id in meta.cancels:
            self._cancel(request_id)
        self._flush()
        self._take_events()
        self._move()

    def wait_for_layer_load(self, layer: int) -> None:
        """Return at once: a load becomes visible only when it is complete."""

    def save_kv_layer(self, layer: int) -> None:
        """Copy rows of earlier prefill chunks that became due during a long forward.

        The layer itself becomes ready with its prefill chunk, by ``mark_ready``.
        """
        if (self._sends or self._loads) and (self._take_events() or self._is_behind):
            self._move()

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """Record after the forward what is in the cache; copy what is due."""
        assert isinstance(meta, P2PMeta)
        self._context.now_s = now_s
        for save in meta.saves:
            self._sends.mark(save)
        self._move()

    def wait_for_save(self) -> None:
        """Return at once: rows are extracted on this thread."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """Copy what is due at the end of a step, and return what ended."""
        self._context.now_s = now_s
        self._take_events()
        self._move()
        return self._context.ended.drain()

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""
        counters = self._require_transport().counters
        wire = msgspec.structs.asdict(counters) | {"leases": dict(counters.leases)}
        return msgspec.structs.replace(
            self._context.totals,
            **wire,
            num_inflight_sends=len(self._sends),
            num_inflight_loads=len(self._loads),
            num_leased_blocks=self._sends.num_blocks,
            num_reserved_blocks=self._loads.num_blocks,
            oldest_lease_s=self._sends.oldest_s(now_s),
        )

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the transfers under way."""
        lease_left_s = self._require_transport().lease_left_s
        return self._sends.infos(now_s, lease_left_s) + self._loads.infos(now_s)

    # ---- helpers

    def _cancel(self, request_id: str) -> None:
        """Stop touching a request's blocks now.

        A transfer that the worker side never started is reported as failed here.
        """
        if self._sends.cancel(request_id) or self._loads.cancel(request_id):
            return
        if request_id not in self._context.ended:
            self._context.ended.failed[request_id] = Failure(FailureReason.CANCELLED)

    def _move(self) -> None:
        """Copy one chunk of each transfer in turn, until the step's budget is spent."""
        self._budget.resume()
        turns = self._context.turns
        waiting = deque(turns)
        while waiting and self._budget.has_room:
            transfer_id = waiting.popleft()
            is_sent = transfer_id in self._sends
            if self._sends.extract(transfer_id) if is_sent else self._loads.inject(transfer_id):
                self._flush()
                self._budget.charge()
                waiting.append(transfer_id)
                if transfer_id in turns:  # It may have ended with this chunk.
                    turns[transfer_id] = turns.pop(transfer_id)
        self._is_behind = bool(waiting)
        if waiting:
            self._notify()

    def _take_events(self) -> bool:
        """Apply the transport's events; data, and events that follow it, wait for their turn.

        Returns:
            Whether there were any.
        """
        events = self._require_transport().poll()
        for event in events:
            if not self._loads.hold_back(event):
                self._apply(event)
        self._flush()
        return bool(events)

    def _apply(self, event: Event) -> None:
        """Apply an event that carries no data."""
        if isinstance(event, Granted | Repeat):
            self._sends.serve(event)
        elif isinstance(event, Delivered):
            self._sends.finish_send(event.transfer_id, None, event.num_rows)
        elif isinstance(event, SendFailed):
            self._sends.finish_send(event.transfer_id, event.reason)
        else:
            self._loads.apply(event)

    def _flush(self) -> None:
        commands = self._context.commands
        if commands:
            self._require_transport().submit(commands)
            self._context.commands = []

    def _require_transport(self) -> Transport:
        if self._transport is None:
            raise TransferError("call register_kv_caches first")
        return self._transport
