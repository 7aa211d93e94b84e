"""The seam between an engine and KV transfer: who calls what, when, in which order.

An engine owns two objects of one connector, both used from its core thread only. The *scheduler
side* is pure bookkeeping per request; the *worker side* moves bytes. Plain values travel between
them in ``ConnectorMeta`` (scheduler to worker) and ``TransferResults`` (worker to scheduler).

At start::

    connector = load_connector("p2p")
    worker = connector.create_worker(settings, notify)
    worker.register_kv_caches(ios)                # binds; worker.endpoints go into `describe`
    scheduler = connector.create_scheduler(settings, [io.layout for io in ios])

Layers that share one block table are a *KV group*. What an engine gives has an entry for each of
its KV groups, in an order that never changes: ``ios``, layouts, every ``block_ids``. A connector
that moves the KV of one group alone, as those here do, refuses an engine with several at start.

When a request arrives: ``on_new_request``; on the decode side, when its ticket does. While it waits
to be admitted: ``get_num_new_matched_tokens``, then blocks are allocated for the whole prompt, then
``update_state_after_alloc``. In every step in which a prompt is computed or the connector has
something at stake (``num_inflight``, ``has_pending_work``), with or without a forward::

    preempted or aborted requests: scheduler.request_preempted / scheduler.cancel
    meta = scheduler.build_connector_meta(progress)   # what this step's forward will have computed
    worker.start_load_kv(meta, now_s)                 # starts, cancels; injects what arrived
    forward                                           # layer i: wait_for_layer_load / save_kv_layer
    sampled tokens are published to the clients
    worker.mark_ready(meta, now_s)                    # extracts what became ready, under credits
    worker.wait_for_save()
    results = worker.get_transfer_results(now_s)      # one snapshot; ids appear in it once, ever
    ends = scheduler.update_connector_output(results)

When a request finishes for whatever reason: ``request_finished``; if it returns True its blocks
must stay allocated until one of ``ends.sent``, ``received`` or ``failed`` names it.

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

from kv_transfer.config import KVNetwork, TransferConfig
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.keys import KeyRing
from kv_transfer.layout import KVLayout
from kv_transfer.store import StoreConfig, StoreCounters
from kv_transfer.ticket import Role, Ticket
from kv_transfer.transport import Transport, WireCounters

if TYPE_CHECKING:
    from kv_transfer.shared_region import RegionLayout, SharedRegion


BlockTables = tuple[tuple[int, ...], ...]
"""For each KV group a request's block table, from position 0."""

_T = TypeVar("_T")


def only_kv_group(of_groups: Sequence[_T]) -> _T:
    """Return what there is of the one KV group, for who moves the KV of one alone.

    Args:
        of_groups: Something of each KV group.

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
    """Read and write the blocks of one KV group as rows of bytes; on the core thread only.

    ``block_ids`` is always a request's block table from position 0, so that row r of the request
    is in block ``block_ids[r // layout.rows_per_block]``.
    """

    @property
    def layout(self) -> KVLayout:
        """What the bytes mean."""

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
        """The blocks of each lane where this process can address them; None for a device."""

    @property
    def shared_region(self) -> "SharedRegion | None":
        """The memory of ``host_blocks``, where other processes of this host may map it."""

    @property
    def region_layout(self) -> "RegionLayout | None":
        """Where the blocks are in ``shared_region``."""


class ConnectorSettings(Struct, frozen=True, kw_only=True):
    """What one engine's connector is told at start.

    Attributes:
        incarnation: Unique name of this engine process, the one that tickets name.
        bind: Where to listen: ``tcp://<address>:*`` for a free port, ``tcp://<address>:<port>``
            or ``ipc://<path>``. The address is one of this host, never a wildcard; and loopback
            where there are no keys.
        config: Deadlines and sizes.
        keys: What tickets are sealed with, and connections over the network are secured with.
        network: Whether KV that leaves the host is encrypted, and its connections prove that they
            hold a secret; or "plain": whoever has a ticket is served, and can be listened to.
        unix_now_s: Wall clock of this host, in Unix seconds: tickets expire by it. Read whenever
            one is checked and never kept, as it may be set at any time.
        step_now_s: Monotonic clock of this engine's steps: what copying costs is measured by it.
        accept_dtypes: KV dtypes of producers that this engine takes although they are not its own;
            converting them may lose precision.
        store: The pool of the connectors that have one.
        make_transport: What carries messages and chunks; over ZMQ without one.
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


TransportFactory = Callable[[ConnectorSettings, KVDeviceIO, Callable[[], None]], Transport]
"""Makes the transport of an engine; the last argument wakes the engine, from any thread."""


class TransferRequest(Struct, frozen=True, array_like=True):
    """What a connector learns of a request.

    Attributes:
        request_id: The request.
        prompt_token_ids: Its prompt; of one that is decoded already, also what followed.
        ticket: Sealed ticket of its transfer; empty without one.
        cache_salt: Tenant: KV in a pool is found under the same salt only.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    ticket: bytes = b""
    cache_salt: str = ""


class SaveProgress(Struct, frozen=True, array_like=True):
    """How much of one prefilling request is in the cache once this step's forward has run.

    Attributes:
        request_id: The request.
        lane: Lane of its blocks.
        block_ids: Its block tables so far (prefix hits included).
        num_computed_tokens: Tokens whose KV these blocks hold after the forward of this step.
    """

    request_id: str
    lane: int
    block_ids: BlockTables
    num_computed_tokens: int


class LoadSpec(Struct, frozen=True, array_like=True):
    """Start of a consumer's side of a transfer.

    Attributes:
        ticket: What to fetch, and where.
        sealed: The ticket as it came, for the producer.
        lane: Lane of the destination blocks.
        block_ids: The request's block tables.
        start_row: First row to fetch; those before it are there already.
    """

    ticket: Ticket
    sealed: bytes
    lane: int
    block_ids: BlockTables
    start_row: int


class ConnectorMeta(Struct, frozen=True):
    """What a scheduler side tells its worker side in one step; each connector has its own kind.

    Nobody else looks into it. It is plain data, so that the two sides may be in two processes.
    """


class Failure(Struct, frozen=True, array_like=True):
    """How a transfer failed.

    Attributes:
        reason: Why.
        num_tokens: Consumer: leading tokens of the request whose KV is verified and in its blocks
            all the same, local hits included.
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
            No end of anything: news for the scheduler side.
        converted: Of ``received`` and ``failed``, those whose KV came in another dtype: what is in
            their blocks is not what this engine computes, and nobody else may be given it.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: dict[str, Failure] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    converted: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Tell whether there is anything to tell."""
        return bool(self.sent or self.received or self.failed or self.found)


STAGE_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of a ``StageHistogram``'s buckets but the last, which has none."""

STAGES = ("rendezvous", "handover", "first_chunk", "stream", "commit", "total")
"""Producer: rendezvous (offered to attached), handover (last row computed to delivered). Consumer:
first_chunk (load started to first rows here), stream (to last rows written), commit (to reported),
total (load started to reported)."""


class StageHistogram(Struct):
    """How long one stage took, over all transfers. Owner: the worker side's core thread.

    Attributes:
        counts: Transfers per bucket of ``STAGE_BOUNDS_S``, not cumulative.
        total_s: Sum.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(STAGE_BOUNDS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one more."""
        self.counts[bisect.bisect_left(STAGE_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class PathCounters(Struct):
    """Delivered transfers over one path. Owner: the worker side's core thread.

    Attributes:
        num_sent: As producer.
        num_received: As consumer.
        bytes_sent: Of those sent.
        bytes_received: Of those received.
    """

    num_sent: int = 0
    num_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class TransferStats(WireCounters, kw_only=True):
    """Totals since start, and gauges, of one worker side. Plain numbers for metrics.

    Owner: the worker side's core thread, which counts in one of these and gives out others.

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
        """Make totals to count in."""
        return cls(stages={stage: StageHistogram() for stage in STAGES})

    def count_sent(self, path: str, num_bytes: int) -> None:
        """Count a transfer that was delivered."""
        counters = self.paths.setdefault(path, PathCounters())
        counters.num_sent += 1
        counters.bytes_sent += num_bytes

    def count_received(self, path: str, num_bytes: int, times_s: tuple[float, ...]) -> None:
        """Count a load that came.

        Args:
            path: How.
            num_bytes: Bytes of it.
            times_s: When it was started, its first rows were here, its last ones were written, and
                it is reported.
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
    """One transfer under way, for people who look.

    Attributes:
        request_id: The request.
        role: Which end this engine is.
        peer: Incarnation of the other end; empty where it is not chosen yet.
        path: How its payload travels; ``pool`` for a load from a store.
        state: waiting (for the other end), computing, streaming, confirming.
        total_rows: Rows of 32 tokens that the transfer moves.
        ready_rows: Of these, computed by the producer, as far as this end knows.
        done_rows: Of these, sent or written here.
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
    """Scheduler side: which requests transfer, and with which blocks. Pure, no I/O."""

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        """Take note of a request; called before it is queued, or when its ticket arrives.

        The ticket tells which end this engine is. Without one there is no transfer with another
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
        """Offer the KV of a request that runs here and goes on, to the consumer of its ticket.

        It lasts until results name the request: ``sent`` or ``failed``. Of a request that is
        preempted it is cancelled; of one that finishes, the blocks stay allocated for it.

        Args:
            request: The request, with its ticket.
            lent: How much of it is here, in blocks that nobody writes to any more. A ticket for
                more is cancelled, as results then say.
            now_s: Monotonic clock.

        Raises:
            TransferError: As ``on_new_request``, and when this engine is not the ticket's producer.
        """

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tell how many tokens beyond the local prefix hit will be loaded. Free of side effects.

        Args:
            request_id: The request being considered for admission.
            num_computed_tokens: Its local prefix hit, a multiple of the block size.

        Returns:
            ``(n, is_async)``: n tokens come from the other engine, while this one goes on; None
            means "not known yet, ask again next step": the worker side notifies the engine when it
            is. ``(0, False)`` for a request that loads nothing.
        """

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Take the blocks that were allocated for a load; calling it twice changes nothing.

        Args:
            request_id: The request.
            lane: Lane of the blocks.
            block_ids: For each KV group its whole block table, local prefix hits included.
            num_external_tokens: What ``get_num_new_matched_tokens`` said.

        Raises:
            TransferError: When a table is too short for the tokens.
        """

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> ConnectorMeta:
        """Hand over everything that is new, once per step, after scheduling; drains.

        Args:
            progress: One entry per scheduled request that prefills; entries of requests that are
                not saved are ignored.
        """

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Forget the transfers that ended.

        Returns:
            What has ended for the engine: of a connector made of several not the same.
        """

    def request_preempted(self, request_id: str) -> None:
        """Stop reading a producing request's blocks: they are about to be reused."""

    def request_finished(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        """Tell whether the blocks of a finished request must stay allocated (delayed free).

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
        """Tell whether a step is needed to hand something to the worker side."""

    @property
    def num_inflight(self) -> int:
        """Transfers that have not ended; zero means drained."""


class KVConnectorWorker(Protocol):
    """Worker side: moves bytes between KV memory and other engines.

    Every method is called on the engine's core thread, and only ``start_load_kv``, the two layer
    calls, ``mark_ready`` and ``get_transfer_results`` touch KV memory. None blocks on a peer, and
    what all of them copy in one step is bounded (``step_budget``).
    """

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where other engines reach this one; valid after ``register_kv_caches``."""

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Take the cache and start listening; once, after the cache is allocated.

        Args:
            ios: One for each KV group.

        Raises:
            TransferError: When the address cannot be bound, or there are too many KV groups.
        """

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Before the forward: begin a step, start and stop transfers, inject what arrived."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Before a layer's attention: return once its loaded KV is in place."""

    def save_kv_layer(self, layer: int) -> None:
        """After a layer's KV was written: it may be read from now on."""

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """After the forward: what ``meta.saves`` announced is in the cache; extract and send."""

    def wait_for_save(self) -> None:
        """Return once no save of this step reads KV memory any more."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """At the end of the step: move what is due and report what ended, as one snapshot."""

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return what is under way."""

    def close(self, deadline_s: float) -> None:
        """Stop listening and leave no thread, socket or file; ends within ``deadline_s`` seconds.

        Transfers in flight end as a death of this engine does for their peers. Idempotent.
        """


class KVConnector(Protocol):
    """A way to move KV: makes the two sides. What ``load_connector`` returns."""

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
    """Find a connector and make it.

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
