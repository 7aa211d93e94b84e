"""Connector ``"multi"``: loads from the pool first, and the rest from another engine.

It runs a point-to-point connector and a pooled one side by side and adds no transfer of its own. It
decides which part of a request each of them gets, one after the other, and when a request has
ended:

* A request that fetches its KV from another engine gets its leading units from the pool, as far as
  they are there, and then the rows behind them from the other engine. Which rows these are depends
  on the pool's answer, so a fetch may start up to ``SPLIT_WAIT_S`` later than it could.
* Every other request gets its leading units from the pool and computes the rest. The computed KV
  is saved to the pool, and offered to the other engine if the request has a ticket.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from msgspec import field

from kv_transfer.connector import (
    STAGES,
    BlockTables,
    ConnectorMeta,
    ConnectorSettings,
    Failure,
    KVConnectorWorker,
    KVDeviceIO,
    SaveProgress,
    StageHistogram,
    TransferInfo,
    TransferRequest,
    TransferResults,
    TransferStats,
    only_kv_group,
)
from kv_transfer.errors import TransferError
from kv_transfer.layout import KVLayout
from kv_transfer.p2p import P2PConnector, P2PConnectorScheduler
from kv_transfer.p2p_worker import P2PMeta
from kv_transfer.pooled import PooledConnector, PooledConnectorScheduler
from kv_transfer.pooled_meta import PooledMeta

SPLIT_WAIT_S = 0.05
"""Longest time that a fetch from another engine waits for the pool's answer."""

_Outcome: TypeAlias = Literal["sent", "received"] | Failure


class MultiMeta(ConnectorMeta, frozen=True):
    """Message of one step from scheduler side to worker side.

    Attributes:
        p2p: For the point-to-point connector.
        pooled: For the pooled connector.
    """

    p2p: P2PMeta
    pooled: PooledMeta


class MultiResults(TransferResults, frozen=True):
    """Ends of both connectors' parts; the scheduler side derives the ends of requests from them.

    Attributes:
        p2p: Ends in the point-to-point connector.
        pooled: Ends in the pooled connector.
    """

    p2p: TransferResults = field(default_factory=TransferResults)
    pooled: TransferResults = field(default_factory=TransferResults)

    def __bool__(self) -> bool:
        """Return whether either part holds anything."""
        return bool(self.p2p) or bool(self.pooled)


@dataclass(slots=True, eq=False)
class _Fetching:
    """Request whose KV another engine sends, until its end is reported."""

    num_tokens: int
    lane: int = 0
    block_ids: BlockTables = ()
    num_local: int = 0
    """Leading tokens whose KV is in its blocks from the local prefix or the pool."""
    is_allocated: bool = False
    is_started: bool = False
    """The other engine was asked for the rest, or must not be asked any more."""


class MultiConnectorScheduler:
    """Scheduler side of the connector ``"multi"`` (see ``KVConnectorScheduler``).

    Owner: the engine's core thread.
    """

    def __init__(
        self, p2p: P2PConnectorScheduler, pooled: PooledConnectorScheduler, layout: KVLayout
    ) -> None:
        self._p2p = p2p
        self._pooled = pooled
        self._layout = layout
        self._fetching: dict[str, _Fetching] = {}
        self._lent: set[str] = set()
        """Finished requests whose blocks stay for a p2p transfer; pool saves continue meanwhile."""
        self._late: dict[str, _Outcome] = {}
        """Ends of p2p parts that are reported only after the request's load from the pool ended."""

    def __repr__(self) -> str:
        """Show both connectors."""
        return f"MultiConnectorScheduler({self._p2p!r}, {self._pooled!r})"

    @property
    def num_inflight(self) -> int:
        """Parts of requests that have not ended."""
        return self._p2p.num_inflight + self._pooled.num_inflight + len(self._late)

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        """Record a request, and look it up in the pool."""
        request_id = request.request_id
        self._pooled.check_unused(request_id)
        self._p2p.on_new_request(request, now_s)
        num_fetched, _ = self._p2p.get_num_new_matched_tokens(request_id, 0)
        if num_fetched:
            self._fetching[request_id] = _Fetching(num_fetched)
        self._pooled.on_new_request(
            msgspec.structs.replace(request, ticket=b""),
            now_s,
            lookup_timeout_s=SPLIT_WAIT_S if num_fetched else None,
        )

    def lend(self, request: TransferRequest, lent: SaveProgress, now_s: float) -> None:
        """Offer the full blocks of a request that keeps running here; the pool is not used."""
        self._p2p.lend(request, lent, now_s)

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix hit will be loaded, from either source."""
        fetching = self._fetching.get(request_id)
        if fetching is not None and (fetching.is_allocated or fetching.is_started):
            # The request has lost its blocks; nothing is known before its end was reported.
            return None, True
        if fetching is not None:
            return self._p2p.get_num_new_matched_tokens(request_id, num_computed_tokens)
        return self._pooled.get_num_new_matched_tokens(request_id, num_computed_tokens)

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Record the blocks that were allocated for a load."""
        fetching = self._fetching.get(request_id)
        if fetching is None:
            self._pooled.update_state_after_alloc(request_id, lane, block_ids, num_external_tokens)
        elif not fetching.is_allocated:
            num_blocks = self._layout.num_blocks(fetching.num_tokens)
            table = only_kv_group(block_ids)
            if len(table) < num_blocks:
                raise TransferError(
                    f"request {request_id}: {len(table)} blocks allocated, {num_blocks} needed "
                    f"for the {fetching.num_tokens} tokens of its ticket"
                )
            fetching.lane, fetching.block_ids = lane, (tuple(table),)
            fetching.num_local = fetching.num_tokens - num_external_tokens
            fetching.is_allocated = True
            self._go_on(request_id, fetching)

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> MultiMeta:
        """Return everything that is new for the worker side, and clear it."""
        p2p = self._p2p.build_connector_meta(progress)
        return MultiMeta(p2p, self._pooled.build_connector_meta(progress))

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Pass each connector its ends, continue waiting requests, return the ends of requests."""
        if not isinstance(results, MultiResults):
            raise TransferError(f"{type(results).__name__} is not from connector 'multi'")
        self._p2p.update_connector_output(results.p2p)
        self._pooled.update_connector_output(results.pooled)
        self._late.update(_outcomes(results.p2p))
        ends: dict[str, _Outcome] = {}
        for request_id, outcome in _outcomes(results.pooled):
            fetching = self._fetching.get(request_id)
            if fetching is not None and isinstance(outcome, Failure):
                fetching.num_local = outcome.num_tokens
            elif fetching is None and request_id not in self._lent:
                ends[request_id] = outcome
        for request_id in [x for x in self._late if self._is_due(x) and x not in ends]:
            ends[request_id] = self._late.pop(request_id)
            # Fetched KV is not saved here: the engine that computed it saves it.
            was_fetching = self._fetching.pop(request_id, None) is not None
            if (was_fetching and ends[request_id] == "received") or request_id in self._lent:
                self._lent.discard(request_id)
                self._pooled.drop_request(request_id)
        for request_id, fetching in self._fetching.items():
            self._go_on(request_id, fetching)
        return TransferResults(
            sent=frozenset(x for x, outcome in ends.items() if outcome == "sent"),
            received=frozenset(x for x, outcome in ends.items() if outcome == "received"),
            failed={x: outcome for x, outcome in ends.items() if isinstance(outcome, Failure)},
        )

    def first_position_read(self, request_id: str) -> int | None:
        """Return the first position that either connector still reads; None: none."""
        reads = (c.first_position_read(request_id) for c in (self._p2p, self._pooled))
        return min((first for first in reads if first is not None), default=None)

    def request_preempted(self, request_id: str) -> None:
        """Stop touching a request's blocks: they are about to be reused."""
        if request_id in self._fetching:
            self.cancel(request_id)
            return
        self._p2p.request_preempted(request_id)
        self._pooled.request_preempted(request_id)

    def request_finished(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether the blocks of a finished request must stay allocated."""
        if not self._p2p.request_finished(request_id, block_ids):
            self._late.pop(request_id, None)
            return self._pooled.request_finished(request_id, block_ids)
        fetching = self._fetching.get(request_id)
        if fetching is not None:
            fetching.is_started = True
        # Apart from its load the pool needs no blocks after this: saves end with the p2p transfer.
        self._lent.add(request_id)
        if self._pooled.is_loading(request_id):
            self._pooled.request_finished(request_id, block_ids)
        return True

    def cancel(self, request_id: str) -> None:
        """End both parts of a request's transfer."""
        fetching = self._fetching.get(request_id)
        if fetching is not None:
            fetching.is_started = True
        self._p2p.cancel(request_id)
        self._pooled.cancel(request_id)

    def has_pending_work(self) -> bool:
        """Return whether a step is needed to inform the worker side or to report an end."""
        is_due = any(map(self._is_due, self._late))
        return is_due or self._p2p.has_pending_work() or self._pooled.has_pending_work()

    def _is_due(self, request_id: str) -> bool:
        """Return whether the pool has stopped writing to a request's blocks."""
        return not self._pooled.is_loading(request_id)

    def _go_on(self, request_id: str, fetching: _Fetching) -> None:
        """Load what the pool has, then fetch the rest; wait while the pool has not answered."""
        if fetching.is_started or not fetching.is_allocated or not self._is_due(request_id):
            return
        lane, block_ids = fetching.lane, fetching.block_ids
        num_external = fetching.num_tokens - fetching.num_local
        if num_external:
            num_pooled, _ = self._pooled.get_num_new_matched_tokens(request_id, fetching.num_local)
            if num_pooled is None:
                return
            if num_pooled:
                fetching.num_local += num_pooled
                self._pooled.update_state_after_alloc(request_id, lane, block_ids, num_pooled)
                return
        fetching.is_started = True
        self._p2p.update_state_after_alloc(request_id, lane, block_ids, num_external)


class MultiConnectorWorker:
    """Worker side of the connector ``"multi"``: runs both connectors one after the other.

    Owner: the engine's core thread.
    """

    def __init__(self, p2p: KVConnectorWorker, pooled: KVConnectorWorker) -> None:
        self._p2p = p2p
        self._pooled = pooled

    # ---- life cycle

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of this engine for others."""
        return self._p2p.endpoints

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Attach the cache, open the store and start listening."""
        self._pooled.register_kv_caches(ios)
        self._p2p.register_kv_caches(ios)

    def close(self, deadline_s: float) -> None:
        """Stop both; each gets half of the time. Idempotent."""
        try:
            self._p2p.close(deadline_s / 2)
        finally:
            self._pooled.close(deadline_s / 2)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Begin a step: start and stop transfers, then write what arrived."""
        meta = _require_meta(meta)
        self._p2p.start_load_kv(meta.p2p, now_s)
        self._pooled.start_load_kv(meta.pooled, now_s)

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once a layer's loaded KV is in place."""
        self._p2p.wait_for_layer_load(layer)
        self._pooled.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Record that a layer's KV was written."""
        self._p2p.save_kv_layer(layer)
        self._pooled.save_kv_layer(layer)

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """Record after the forward what is in the cache; send it and save it."""
        meta = _require_meta(meta)
        self._p2p.mark_ready(meta.p2p, now_s)
        self._pooled.mark_ready(meta.pooled, now_s)

    def wait_for_save(self) -> None:
        """Return once no save of this step reads KV memory any more."""
        self._p2p.wait_for_save()
        self._pooled.wait_for_save()

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """Copy what is due at the end of a step, and return what ended in either part."""
        p2p = self._p2p.get_transfer_results(now_s)
        return MultiResults(p2p=p2p, pooled=self._pooled.get_transfer_results(now_s))

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges of both."""
        return _add(self._p2p.stats(now_s), self._pooled.stats(now_s))

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the transfers under way, both parts of a request separately."""
        return [*self._p2p.transfers(now_s), *self._pooled.transfers(now_s)]


class MultiConnector:
    """Built-in connector ``"multi"`` (see ``KVConnector``)."""

    def create_scheduler(
        self, settings: ConnectorSettings, layouts: Sequence[KVLayout]
    ) -> MultiConnectorScheduler:
        """Make the scheduler side of one engine.

        Raises:
            TransferError: When the engine converts KV, no store is set, or there are several KV
                groups.
        """
        _refuse_conversion(settings)
        p2p = P2PConnector().create_scheduler(settings, layouts)
        pooled = PooledConnector().create_scheduler(settings, layouts)
        return MultiConnectorScheduler(p2p, pooled, only_kv_group(layouts))

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> MultiConnectorWorker:
        """Make the worker side of one engine.

        Raises:
            TransferError: When the engine converts KV, or no store is set.
        """
        _refuse_conversion(settings)
        # Half of a step's budget each, so that neither part starves the other.
        config = settings.config.with_half_of_a_step()
        settings = msgspec.structs.replace(settings, config=config)
        p2p = P2PConnector().create_worker(settings, notify)
        pooled = PooledConnector().create_worker(settings, notify)
        return MultiConnectorWorker(p2p, pooled)


def _refuse_conversion(settings: ConnectorSettings) -> None:
    """Keep converted KV, which may be less precise, out of the pool: its keys do not show it.

    Raises:
        TransferError: When the engine accepts other dtypes.
    """
    if settings.accept_dtypes:
        raise TransferError(
            "KV converted from another engine's dtype would be saved to the pool as if it had been "
            "computed here: give both engines the same KV dtype and leave kv_accept_dtypes empty, "
            "or set kv_connector to 'p2p'"
        )


def _outcomes(results: TransferResults) -> Iterator[tuple[str, _Outcome]]:
    for request_id in results.sent:
        yield request_id, "sent"
    for request_id in results.received:
        yield request_id, "received"
    yield from results.failed.items()


def _require_meta(meta: ConnectorMeta) -> MultiMeta:
    if not isinstance(meta, MultiMeta):
        raise TransferError(f"{type(meta).__name__} is not from connector 'multi'")
    return meta


def _add(p2p: TransferStats, pooled: TransferStats) -> TransferStats:
    """Return totals of both connectors; fields that only one of them counts come from that one."""
    failures = Counter(p2p.receive_failures)
    failures.update(pooled.receive_failures)
    return msgspec.structs.replace(
        p2p,
        paths={**p2p.paths, **pooled.paths},
        receive_failures=dict(failures),
        stages={x: _add_stage(p2p.stages.get(x), pooled.stages.get(x)) for x in STAGES},
        num_inflight_loads=p2p.num_inflight_loads + pooled.num_inflight_loads,
        num_reserved_blocks=p2p.num_reserved_blocks + pooled.num_reserved_blocks,
        num_checksum_failures=p2p.num_checksum_failures + pooled.num_checksum_failures,
        store=pooled.store,
    )


def _add_stage(one: StageHistogram | None, other: StageHistogram | None) -> StageHistogram:
    one, other = one or StageHistogram(), other or StageHistogram()
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return StageHistogram(counts, one.total_s + other.total_s)
