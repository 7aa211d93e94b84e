"""The seam between an engine and KV transfer: who calls what, when, in which order.

An engine owns two objects of one connector, both used from its core thread only. The *scheduler
side* is pure bookkeeping per request; the *worker side* moves bytes. Plain values travel between
them in ``ConnectorMeta`` (scheduler to worker) and ``TransferResults`` (worker to scheduler).

At start::

    connector = load_connector("p2p")
    worker = connector.create_worker(settings, notify)
    worker.register_kv_caches(io)                 # binds; worker.endpoint goes into `describe`
    scheduler = connector.create_scheduler(settings, io.layout)

When a request arrives with a ticket: ``on_new_request``. While it waits to be admitted, on the
decode side: ``get_num_new_matched_tokens``, then blocks are allocated for the whole prompt, then
``update_state_after_alloc``. In every step, whether or not there is anything to compute::

    preempted or aborted requests: scheduler.request_preempted / scheduler.cancel
    meta = scheduler.build_connector_meta(progress)   # what this step's forward will have computed
    worker.start_load_kv(meta, now_s)                 # starts, cancels; injects what arrived
    forward                                           # layer i: wait_for_layer_load / save_kv_layer
    worker.mark_ready(meta, now_s)                    # extracts what became ready, under credits
    worker.wait_for_save()
    results = worker.get_transfer_results(now_s)      # one snapshot; ids appear in it once, ever
    scheduler.update_connector_output(results)

When a request finishes for whatever reason: ``request_finished``; if it returns True its blocks
must stay allocated until one of ``results.sent``, ``received`` or ``failed`` names it.

An idle engine sleeps until an input arrives or ``notify`` is called (from another thread: set an
event, do nothing else), and then makes one step. Lease deadlines also end in ``notify``, so the
engine needs no timer for the connector. It must also step while ``scheduler.has_pending_work()``.

Source: vLLM ``distributed/kv_transfer/kv_connector/v1/base.py`` for names and roles.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.layout import KVLayout
from kv_transfer.ticket import Ticket


class KVDeviceIO(Protocol):
    """Read and write whole KV blocks of one engine as bytes; called on its core thread only."""

    @property
    def layout(self) -> KVLayout:
        """What a block's bytes mean."""

    def read_blocks(self, lane: int, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copy blocks out of the cache.

        Args:
            lane: The DP group's submesh inside this engine.
            block_ids: Blocks of that lane, in any order.

        Returns:
            ``(len(block_ids), layout.bytes_per_block)`` uint8, contiguous, writable, not aliased
            by the cache; row i is block ``block_ids[i]`` in (layer, K|V, head, row, dim) order.
        """

    def write_blocks(self, lane: int, block_ids: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks into the cache.

        Args:
            lane: The DP group's submesh inside this engine.
            block_ids: Blocks of that lane.
            data: ``(len(block_ids), layout.bytes_per_block)`` uint8, perhaps read-only; it is not
                valid after the call.
        """


class LinkFaults(Protocol):
    """What is made to go wrong with one engine's connections, on purpose and by a script.

    Asked on the transport's thread; ``now_s`` is the monotonic clock of the process.
    """

    def is_cut(self, now_s: float) -> bool:
        """Tell whether nothing gets in or out."""

    def corrupts(self, now_s: float) -> bool:
        """Tell whether payloads that leave have flipped bytes, behind their checksum."""

    def num_breaks(self, now_s: float) -> int:
        """Return how often every connection has broken so far."""

    def next_change_s(self, now_s: float) -> float | None:
        """Return when an answer changes next, or None."""


class NoLinkFaults:
    """Nothing is made to go wrong (see ``LinkFaults``)."""

    def is_cut(self, now_s: float) -> bool:
        """Tell that messages get through."""
        return False

    def corrupts(self, now_s: float) -> bool:
        """Tell that payloads stay as they are."""
        return False

    def num_breaks(self, now_s: float) -> int:
        """Return zero."""
        return 0

    def next_change_s(self, now_s: float) -> float | None:
        """Return None."""
        return None


class ConnectorSettings(Struct, frozen=True, kw_only=True):
    """What one engine's connector is told at start.

    Attributes:
        incarnation: Unique name of this engine process, the one that tickets name.
        bind: Where to listen: ``tcp://<address>:*`` for a free port, ``tcp://<address>:<port>``
            or ``ipc://<path>``. The address is one of this host, never a wildcard.
        config: Deadlines and sizes.
        link_faults: What is made to go wrong with the connections.
    """

    incarnation: str
    bind: str = "tcp://127.0.0.1:*"
    config: TransferConfig = field(default_factory=TransferConfig)
    link_faults: LinkFaults = field(default_factory=NoLinkFaults)


class SaveProgress(Struct, frozen=True, array_like=True):
    """How much of one producing request is in the cache once this step's forward has run.

    Attributes:
        request_id: The request.
        lane: Lane of its blocks.
        block_ids: Its block table so far, from position 0 (prefix hits included).
        num_computed_tokens: Tokens whose KV these blocks hold after the forward of this step.
    """

    request_id: str
    lane: int
    block_ids: tuple[int, ...]
    num_computed_tokens: int


class OfferSpec(Struct, frozen=True, array_like=True):
    """Start of a producer's side of a transfer."""

    request_id: str
    ticket: Ticket


class LoadSpec(Struct, frozen=True, array_like=True):
    """Start of a consumer's side of a transfer.

    Attributes:
        request_id: The request.
        ticket: What to fetch, and where.
        lane: Lane of the destination blocks.
        block_ids: Destination of every block of the transfer, from position 0.
        start_block: First block to fetch; those before it are local prefix hits.
    """

    request_id: str
    ticket: Ticket
    lane: int
    block_ids: tuple[int, ...]
    start_block: int


class ConnectorMeta(Struct, frozen=True, array_like=True):
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
    offers: tuple[OfferSpec, ...] = ()
    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveProgress, ...] = ()


class TransferResults(Struct, frozen=True):
    """Transfers that ended since the last snapshot; each request appears once, ever.

    Attributes:
        sent: Producing requests whose consumer holds a verified copy: blocks may be freed.
        received: Consuming requests whose blocks are all written and verified.
        failed: Requests whose transfer ended without delivery. Producer: the blocks may be freed.
            Consumer: nothing more will be written to the blocks, which may hold some of the data.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: dict[str, FailureReason] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Tell whether anything ended."""
        return bool(self.sent or self.received or self.failed)


class TransferStats(Struct, frozen=True, kw_only=True):
    """Totals since start, and gauges, of one worker side. Plain numbers for metrics.

    Attributes:
        num_sent: Transfers delivered by this engine as producer.
        num_received: Transfers delivered to this engine as consumer.
        blocks_sent: Blocks of those ``num_sent`` transfers that went over the wire.
        blocks_received: Blocks of those ``num_received`` transfers that came over the wire.
        bytes_sent: ``blocks_sent * bytes_per_block``.
        bytes_received: ``blocks_received * bytes_per_block``.
        send_failures: Failed transfers as producer by reason.
        receive_failures: Failed transfers as consumer by reason.
        num_inflight_sends: Transfers as producer that have not ended.
        num_inflight_loads: Transfers as consumer that have not ended.
        num_leased_blocks: Blocks that in-flight sends keep allocated.
        oldest_lease_s: Age in seconds of the oldest in-flight send, 0 without one.
        stage_seconds: Sums over received transfers: ``rendezvous`` (load started to first chunk),
            ``stream`` (first chunk to last injection) and ``total``.
        num_retransmits: Chunks that were asked for again.
        num_checksum_failures: Chunks that arrived corrupted.
        num_dropped_chunks: Chunks that were late, duplicated, or of another epoch or incarnation.
        num_unknown_ids: Messages about transfers that this engine does not know.
        num_malformed: Frames that are no message of the protocol.
    """

    num_sent: int = 0
    num_received: int = 0
    blocks_sent: int = 0
    blocks_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    send_failures: dict[str, int] = field(default_factory=dict)
    receive_failures: dict[str, int] = field(default_factory=dict)
    num_inflight_sends: int = 0
    num_inflight_loads: int = 0
    num_leased_blocks: int = 0
    oldest_lease_s: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    num_retransmits: int = 0
    num_checksum_failures: int = 0
    num_dropped_chunks: int = 0
    num_unknown_ids: int = 0
    num_malformed: int = 0


class KVConnectorScheduler(Protocol):
    """Scheduler side: which requests transfer, and with which blocks. Pure, no I/O, no clock."""

    def on_new_request(self, request_id: str, ticket: Ticket) -> None:
        """Take note of a request that brings a ticket; called before it is queued.

        The ticket tells which end this engine is.

        Raises:
            TicketError: When the ticket is not for this engine process.
            LayoutMismatchError: When it is for another KV layout.
            TransferError: When the request already has a transfer here.
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
            means "ask again next step". ``(0, False)`` for a request that loads nothing.
        """

    def update_state_after_alloc(
        self, request_id: str, lane: int, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Take the blocks that were allocated for a load; calling it twice changes nothing.

        Args:
            request_id: The request.
            lane: Lane of the blocks.
            block_ids: Its whole block table, local prefix hits included.
            num_external_tokens: What ``get_num_new_matched_tokens`` said.

        Raises:
            TransferError: When the table is too short for the tokens.
        """

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> ConnectorMeta:
        """Hand over everything that is new, once per step, after scheduling; drains.

        Args:
            progress: One entry per scheduled request that prefills; entries of requests without a
                transfer are ignored.
        """

    def update_connector_output(self, results: TransferResults) -> None:
        """Forget the transfers that ended."""

    def request_preempted(self, request_id: str) -> None:
        """Stop reading a producing request's blocks: they are about to be reused."""

    def request_finished(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Tell whether the blocks of a finished request must stay allocated (delayed free).

        A request that finishes before all of its KV was computed (producer) or loaded (consumer)
        is cancelled by this call.

        Args:
            request_id: The request; unknown ones are fine.
            block_ids: Its blocks.

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

    Every method is called on the engine's core thread, and only ``start_load_kv``, ``mark_ready``,
    ``save_kv_layer`` and ``get_transfer_results`` touch KV memory. None blocks on a peer.
    """

    @property
    def endpoint(self) -> str:
        """Where other engines reach this one; valid after ``register_kv_caches``."""

    def register_kv_caches(self, io: KVDeviceIO) -> None:
        """Take the cache and start listening; once, after the cache is allocated.

        Raises:
            TransferError: When the address cannot be bound.
        """

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Before the forward: start and stop transfers, then inject what arrived."""

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

    def close(self, deadline_s: float) -> None:
        """Stop listening and leave no thread, socket or file; ends within ``deadline_s`` seconds.

        Transfers in flight end as a death of this engine does for their peers. Idempotent.
        """


class KVConnector(Protocol):
    """A way to move KV: makes the two sides. What ``load_connector`` returns."""

    def create_scheduler(
        self, settings: ConnectorSettings, layout: KVLayout
    ) -> KVConnectorScheduler:
        """Make the scheduler side of one engine."""

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> KVConnectorWorker:
        """Make the worker side of one engine.

        Args:
            settings: The engine's settings.
            notify: Called from any thread when the engine should make a step soon.
        """


_BUILT_IN = {"p2p": "kv_transfer.p2p:P2PConnector"}


def load_connector(name: str) -> KVConnector:
    """Find a connector and make it.

    Args:
        name: ``"p2p"``, or ``"module:Class"`` of a class without constructor arguments.

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
