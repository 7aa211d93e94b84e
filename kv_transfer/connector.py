"""Interface between an engine and KV transfer, with the order of all calls.

An engine owns two objects of one connector, both used from its core thread only. The *scheduler
side* keeps the books of each request; the *worker side* moves bytes. Plain values travel between
them in ``ConnectorMeta`` (scheduler to worker) and ``TransferResults`` (worker to scheduler).

At start::

    connector = load_connector("p2p")
    worker = connector.create_worker(settings, notify)
    worker.register_kv_caches(ios)                # binds; worker.endpoints go into `describe`
    scheduler = connector.create_scheduler(settings, [io.layout for io in ios])

Layers that share one block table are a *KV group*. The engine passes one entry for each of its KV
groups, in an order that never changes: ``ios``, layouts, every ``block_ids``. Of the connectors in
this package "p2p" moves any number of groups; the others refuse an engine with several at start.

When a request arrives: ``on_new_request``; on the decode side, when its ticket does. While it waits
to be admitted: ``get_num_new_matched_tokens``, then blocks are allocated for the whole prompt, then
``update_state_after_alloc``. In every step that computes a prompt, and while the connector has
transfers or pending work (``num_inflight``, ``has_pending_work``), with or without a forward::

    preempted or aborted requests: scheduler.request_preempted / scheduler.cancel
    meta = scheduler.build_connector_meta(progress)   # what this step's forward will have computed
    worker.start_load_kv(meta, now_s)                 # starts, cancels; injects what arrived
    forward                                           # layer i: wait_for_layer_load / save_kv_layer
    sampled tokens are published to the clients
    worker.mark_ready(meta, now_s)                    # extracts what became ready, under credits
    worker.wait_for_save()
    results = worker.get_transfer_results(now_s)      # one snapshot; ids appear in it once, ever
    ends = scheduler.update_connector_output(results)

When a request finishes for any reason: ``request_finished``. If it returns True, the blocks must
stay allocated until one of ``ends.sent``, ``received`` or ``failed`` names the request.

An idle engine sleeps until an input arrives or ``notify`` is called (from another thread: set an
event, do nothing else), and then makes one step. Lease deadlines also end in ``notify``, so the
engine needs no timer for the connector. It must also step while ``scheduler.has_pending_work()``.

Source: vLLM ``distributed/kv_transfer/kv_connector/v1/base.py`` for names and roles.
"""

import bisect
import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from kv_transfer.block_hash import Image
from kv_transfer.config import KVNetwork, TransferConfig
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.keys import KeyRing
from kv_transfer.layout import KVLayout, RowLayout
from kv_transfer.store import StoreConfig, StoreCounters
from kv_transfer.ticket import Role, Ticket
from kv_transfer.transport import Transport, WireCounters

if TYPE_CHECKING:
    from kv_transfer.shared_region import RegionLayout, SharedRegion


BlockTables = tuple[tuple[int, ...], ...]
"""A request's block table for each KV group, from position 0."""

_T = TypeVar("_T")


def only_kv_group(of_groups: Sequence[_T]) -> _T:
    """Return the entry of the one KV group, for a connector that moves the KV of one group.

    Args:
        of_groups: One entry for each KV group.

    Raises:
        TransferError: When there are several.
    """
    if len(of_groups) != 1:
        raise TransferError(
            f"this KV connector moves the KV of one KV group and the engine has {len(of_groups)}: "
            f"leave kv_connector out, or serve another model"
        )
    return of_groups[0]


class KVDeviceIO(Protocol):
    """Access to the blocks of one KV group as rows of bytes, on the core thread only.

    ``block_ids`` is always a request's block table from position 0, so that row r of the request
    is in block ``block_ids[r // layout.rows_per_block]``.
    """

    @property
    def layout(self) -> KVLayout:
        """Meaning of the bytes."""

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        """Copy rows out of the cache.

        Args:
            lane: The DP group's submesh inside this engine.
            block_ids: The request's block table.
            first_row: First row, counted from position 0.
            num_rows: How many.

        Returns:
            ``(num_rows, layout.row_bytes)`` uint8, contiguous, writable, not aliased by the cache.
        """

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        """Copy rows into the cache.

        Args:
            lane: The DP group's submesh inside this engine.
            block_ids: The request's block table.
            first_row: Where the first row goes, counted from position 0.
            data: ``(n, layout.row_bytes)`` uint8, perhaps read-only; not valid after the call.
        """

    @property
    def host_blocks(self) -> Sequence[HostBlocks] | None:
        """Blocks of each lane in memory that this process can address; None on a device."""

    @property
    def shared_region(self) -> "SharedRegion | None":
        """Memory of ``host_blocks`` that other processes of this host may map; None without."""

    @property
    def region_layout(self) -> "RegionLayout | None":
        """Places of the blocks in ``shared_region``."""


class KVMemory(Struct, frozen=True):
    """KV memory of one engine, as a transport sees it.

    Attributes:
        layout: Layout of the rows that it carries.
        shared_region: Memory of the blocks that other processes of this host may map, else None.
        region_layout: Places of the blocks in ``shared_region``.
    """

    layout: RowLayout
    shared_region: "SharedRegion | None" = None
    region_layout: "RegionLayout | None" = None


class ConnectorSettings(Struct, frozen=True, kw_only=True):
    """Settings of one engine's connector, fixed at start.

    Attributes:
        incarnation: Unique name of this engine process, the one that tickets name.
        bind: Where to listen: ``tcp://<address>:*`` for a free port, ``tcp://<address>:<port>``
            or ``ipc://<path>``. The address is one of this host, never a wildcard; and loopback
            where there are no keys.
        config: Deadlines and sizes.
        keys: Secrets that seal tickets and secure connections over the network.
        network: "encrypted": KV that leaves the host is encrypted, and both ends of a connection
            prove that they hold a secret. "plain": any holder of a ticket is served, and the
            network sees all of it.
        unix_now_s: Wall clock of this host, in Unix seconds, by which tickets expire. Read at each
            check and never kept, because it may be set at any time.
        step_now_s: Monotonic clock of this engine's steps, which measures the cost of copying.
        accept_dtypes: KV dtypes of producers that this engine accepts besides its own; converting
            them may lose precision.
        store: Configuration of the pool, for connectors that have one.
        make_transport: Makes the transport of messages and chunks; ZMQ by default.
    """

    incarnation: str
    unix_now_s: Callable[[], float]
    step_now_s: Callable[[], float]
    bind: str = "tcp://127.0.0.1:*"
    config: TransferConfig = field(default_factory=TransferConfig)
    keys: KeyRing = field(default_factory=KeyRing)
    accept_dtypes: tuple[str, ...] = ()
    network: KVNetwork = "encrypted"
    store: StoreConfig | None = None
    make_transport: "TransportFactory | None" = None


TransportFactory = Callable[[ConnectorSettings, KVMemory, Callable[[], None]], Transport]
"""Makes the transport of an engine; the last argument wakes the engine, from any thread."""


class TransferRequest(Struct, frozen=True, array_like=True):
    """A request as a connector sees it.

    Attributes:
        request_id: The request.
        prompt_token_ids: Its prompt; for a stream that moves, also its output so far.
        ticket: Sealed ticket of its transfer; empty without one.
        cache_salt: Tenant: KV in a pool is found under the same salt only.
        adapter: LoRA adapter; KV is found under the same one only.
        images: Images of the prompt; KV is found with the same ones only.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    ticket: bytes = b""
    cache_salt: str = ""
    adapter: str = ""
    images: tuple[Image, ...] = ()


class SaveProgress(Struct, frozen=True, array_like=True):
    """Progress of one prefilling request after this step's forward.

    Attributes:
        request_id: The request.
        lane: Lane of its blocks.
        block_ids: Its block tables so far (prefix hits included).
        num_computed_tokens: Tokens whose KV these blocks hold after the forward of this step.
        first_positions: For each KV group the first position whose KV its blocks hold: 0, or one
            behind which a window has moved. Empty: 0 in each.
    """

    request_id: str
    lane: int
    block_ids: BlockTables
    num_computed_tokens: int
    first_positions: tuple[int, ...] = ()


class LoadSpec(Struct, frozen=True, array_like=True):
    """Start of a consumer's side of a transfer.

    Attributes:
        ticket: The opened ticket: producer, layout and number of tokens.
        sealed: The ticket as it came, for the producer.
        lane: Lane of the destination blocks.
        block_ids: The request's block tables.
        start_row: First row to fetch; the rows before it are already here, or behind the window.
    """

    ticket: Ticket
    sealed: bytes
    lane: int
    block_ids: BlockTables
    start_row: int


class ConnectorMeta(Struct, frozen=True):
    """Message of one step from scheduler side to worker side; each connector has a subclass.

    Opaque to the engine, and plain data, so that the two sides may be in two processes.
    """


class Failure(Struct, frozen=True, array_like=True):
    """Failure of one transfer.

    Attributes:
        reason: Why.
        num_tokens: Consumer: leading tokens of the request whose KV is verified and in its blocks
            despite the failure, local hits included.
    """

    reason: FailureReason
    num_tokens: int = 0


class TransferResults(Struct, frozen=True):
    """Transfers that ended since the last snapshot; each request appears once per transfer.

    Attributes:
        sent: Producing requests whose consumer holds a verified copy: blocks may be freed.
        received: Consuming requests whose blocks are all written and verified.
        failed: Requests whose transfer ended without delivery. Producer: the blocks may be freed.
            Consumer: nothing more will be written to the blocks.
        found: Requests whose prompt was looked up in a pool, each with its leading tokens there.
            No end of a transfer, only news for the scheduler side.
        converted: Requests of ``received`` and ``failed`` whose KV came in another dtype. Their
            blocks differ from what this engine computes, so no other request may share them.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: dict[str, Failure] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    converted: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return whether the snapshot holds anything."""
        return bool(self.sent or self.received or self.failed or self.found)


STAGE_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets of a ``StageHistogram``; the last bucket has none."""

STAGES = ("rendezvous", "handover", "first_chunk", "stream", "commit", "total")
"""Producer: rendezvous (offered to attached), handover (last row computed to delivered). Consumer:
first_chunk (load started to first rows here), stream (to last rows written), commit (to reported),
total (load started to reported)."""


class StageHistogram(Struct):
    """Duration of one stage, over all transfers. Owner: the worker side's core thread.

    Attributes:
        counts: Transfers per bucket of ``STAGE_BOUNDS_S``, not cumulative.
        total_s: Sum of all durations.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(STAGE_BOUNDS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(STAGE_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class PathCounters(Struct):
    """Delivered transfers over one path. Owner: the worker side's core thread.

    Attributes:
        num_sent: Transfers as producer.
        num_received: Transfers as consumer.
        bytes_sent: Payload bytes as producer.
        bytes_received: Payload bytes as consumer.
    """

    num_sent: int = 0
    num_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class TransferStats(WireCounters, kw_only=True):
    """Totals since start, and gauges, of one worker side; plain numbers for metrics.

    Owner: the worker side's core thread, which counts in one of these and returns copies.

    Attributes:
        paths: Delivered transfers by path: inline, shared, nixl or pool.
        send_failures: Failed transfers as producer by reason.
        receive_failures: Failed transfers as consumer by reason.
        stages: Seconds of each of ``STAGES``.
        num_inflight_sends: Transfers as producer that have not ended.
        num_inflight_loads: Transfers as consumer that have not ended.
        num_leased_blocks: Blocks that in-flight sends keep allocated.
        num_reserved_blocks: Blocks that in-flight loads write into.
        num_quarantined_blocks: Blocks of loads that are over for their request, but into which a
            write may still land.
        oldest_lease_s: Age in seconds of the oldest in-flight send, 0 without one.
        store: Totals of the pool, as one engine sees it.
    """

    paths: dict[str, PathCounters] = field(default_factory=dict)
    send_failures: dict[str, int] = field(default_factory=dict)
    receive_failures: dict[str, int] = field(default_factory=dict)
    stages: dict[str, StageHistogram] = field(default_factory=dict)
    num_inflight_sends: int = 0
    num_inflight_loads: int = 0
    num_leased_blocks: int = 0
    num_reserved_blocks: int = 0
    num_quarantined_blocks: int = 0
    oldest_lease_s: float = 0.0
    store: StoreCounters = field(default_factory=StoreCounters)

    @classmethod
    def empty(cls) -> "TransferStats":
        """Make totals that start at zero."""
        return cls(stages={stage: StageHistogram() for stage in STAGES})

    def count_sent(self, path: str, num_bytes: int) -> None:
        """Count a transfer that was delivered to its consumer."""
        counters = self.paths.setdefault(path, PathCounters())
        counters.num_sent += 1
        counters.bytes_sent += num_bytes

    def count_received(self, path: str, num_bytes: int, times_s: tuple[float, ...]) -> None:
        """Count a load that has ended well.

        Args:
            path: Path of its payload.
            num_bytes: Bytes of it.
            times_s: Times at which it started, its first rows arrived, its last rows were written,
                and it was reported.
        """
        counters = self.paths.setdefault(path, PathCounters())
        counters.num_received += 1
        counters.bytes_received += num_bytes
        for stage, (start_s, end_s) in zip(STAGES[2:], pairwise(times_s), strict=False):
            self.stages[stage].observe(end_s - start_s)
        self.stages["total"].observe(times_s[-1] - times_s[0])


def count_failure(failures: dict[str, int], reason: FailureReason) -> None:
    """Count a transfer that failed."""
    failures[reason.value] = failures.get(reason.value, 0) + 1


class TransferInfo(Struct, frozen=True, kw_only=True):
    """Snapshot of one transfer under way, for diagnosis.

    Attributes:
        request_id: The request.
        role: Which end this engine is.
        peer: Incarnation of the other end; empty where it is not chosen yet.
        path: How its payload travels; ``pool`` for a load from a store.
        state: waiting (for the other end), computing, streaming, confirming.
        total_rows: Rows of 32 tokens that the transfer moves.
        ready_rows: Rows of these that the producer has computed, as far as this end knows.
        done_rows: Rows of these that were sent or written here.
        num_blocks: Blocks of this engine that it holds.
        age_s: Seconds since it began here.
        lease_left_s: Producer: seconds until its lease ends unless renewed.
    """

    request_id: str
    role: Role
    peer: str
    path: str
    state: str
    total_rows: int
    ready_rows: int
    done_rows: int
    num_blocks: int
    age_s: float
    lease_left_s: float | None = None


class KVConnectorScheduler(Protocol):
    """Scheduler side: decides which requests transfer, and with which blocks. Pure, no I/O."""

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        """Record a request; called before it is queued, or when its ticket arrives.

        The ticket says which end this engine is. Without one there is no transfer with another
        engine; a pool may still be asked.

        Args:
            request: The request.
            now_s: Monotonic clock.

        Raises:
            TicketError: When the ticket is forged, too old or not for this engine process.
            LayoutMismatchError: When it is for another KV layout.
            TransferError: When the request already has a transfer here.
        """

    def lend(self, request: TransferRequest, lent: SaveProgress, now_s: float) -> None:
        """Offer the KV of a request that keeps running here to the consumer of its ticket.

        The offer lasts until results name the request: ``sent`` or ``failed``. If the request is
        preempted, the offer is cancelled. If it finishes, its blocks stay allocated for the offer.

        Args:
            request: The request, with its ticket.
            lent: The part of its KV that is in full blocks, to which no step writes any more. A
                ticket for more tokens is cancelled, and results say so.
            now_s: Monotonic clock.

        Raises:
            TransferError: As ``on_new_request``, and when this engine is not the ticket's producer.
        """

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix hit will be loaded; free of side effects.

        Args:
            request_id: The request being considered for admission.
            num_computed_tokens: Its local prefix hit, a multiple of the block size.

        Returns:
            ``(n, is_async)``: n tokens come from elsewhere while this engine keeps stepping. None
            means "not known yet, ask again next step"; the worker side notifies the engine when it
            is. ``(0, False)`` for a request that loads nothing.
        """

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Record the blocks that were allocated for a load; idempotent.

        Args:
            request_id: The request.
            lane: Lane of the blocks.
            block_ids: For each KV group its whole block table, local prefix hits included.
            num_external_tokens: The n that ``get_num_new_matched_tokens`` returned.

        Raises:
            TransferError: When a table is too short for the tokens.
        """

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> ConnectorMeta:
        """Return everything that is new for the worker side, and clear it; once per step.

        Called after scheduling.

        Args:
            progress: One entry per scheduled request that prefills; entries of requests that are
                not saved are ignored.
        """

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Remove the transfers that ended.

        Returns:
            The ends that concern the engine. A connector made of several may return other ends than
            it was given.
        """

    def first_position_read(self, request_id: str) -> int | None:
        """Return the first position whose KV is still read here for a running request.

        Blocks from it on stay allocated even if a window leaves them behind. None: none is read
        that a window may leave.
        """

    def request_preempted(self, request_id: str) -> None:
        """Stop reading a producing request's blocks: they are about to be reused."""

    def request_finished(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether the blocks of a finished request must stay allocated (delayed free).

        A request that finishes before all of its KV was computed (producer) or loaded (consumer)
        is cancelled by this call.

        Args:
            request_id: The request; unknown ones are fine.
            block_ids: For each KV group its blocks; empty if it holds none.

        Returns:
            True when results will name the request later; free its blocks then, not now.
        """

    def cancel(self, request_id: str) -> None:
        """End a request's transfer in either role; results name it with reason ``cancelled``.

        A request without a transfer is ignored.
        """

    def has_pending_work(self) -> bool:
        """Return whether a step is needed to pass something to the worker side."""

    @property
    def num_inflight(self) -> int:
        """Transfers that have not ended; zero means drained."""


class KVConnectorWorker(Protocol):
    """Worker side: moves bytes between KV memory and other engines.

    Every method is called on the engine's core thread, and only ``start_load_kv``, the two layer
    calls, ``mark_ready`` and ``get_transfer_results`` touch KV memory. None blocks on a peer. The
    time that they spend on copying in one step is bounded (``step_budget``).
    """

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of this engine for others; valid after ``register_kv_caches``."""

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Attach the allocated cache and start listening; called once.

        Args:
            ios: One for each KV group.

        Raises:
            TransferError: When the address cannot be bound, or there are too many KV groups.
        """

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Begin a step before its forward: start and stop transfers, inject what arrived."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once a layer's loaded KV is in place; called before its attention."""

    def save_kv_layer(self, layer: int) -> None:
        """Record that a layer's KV was written and may be read from now on."""

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """Record after the forward that ``meta.saves`` is in the cache; extract and send."""

    def wait_for_save(self) -> None:
        """Return once no save of this step reads KV memory any more."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """Move what is due at the end of a step, and return what ended, as one snapshot."""

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the transfers under way."""

    def close(self, deadline_s: float) -> None:
        """Stop listening and leave no thread, socket or file; ends within ``deadline_s`` seconds.

        To their peers, transfers in flight end as if this engine had died. Idempotent.
        """


class KVConnector(Protocol):
    """Factory of the two sides of one way to move KV; returned by ``load_connector``."""

    def create_scheduler(
        self, settings: ConnectorSettings, layouts: Sequence[KVLayout]
    ) -> KVConnectorScheduler:
        """Make the scheduler side of one engine.

        Args:
            settings: The engine's settings.
            layouts: One for each KV group.

        Raises:
            TransferError: When there are too many KV groups.
        """

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> KVConnectorWorker:
        """Make the worker side of one engine.

        Args:
            settings: The engine's settings.
            notify: Called from any thread when the engine should make a step soon.
        """


_BUILT_IN = {
    "p2p": "kv_transfer.p2p:P2PConnector",
    "pooled": "kv_transfer.pooled:PooledConnector",
    "multi": "kv_transfer.multi:MultiConnector",
}


def load_connector(name: str) -> KVConnector:
    """Import a connector class and make an instance.

    Args:
        name: A built-in one, or ``"module:Class"`` of a class without constructor arguments.

    Raises:
        TransferError: When there is no such connector.
    """
    module_name, separator, class_name = _BUILT_IN.get(name, name).partition(":")
    if not separator:
        raise TransferError(
            f"unknown KV connector {name!r}: use one of {sorted(_BUILT_IN)} or 'module:Class'"
        )
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TransferError(f"cannot load KV connector {name!r}: {error}") from error
    return cast("KVConnector", factory())
