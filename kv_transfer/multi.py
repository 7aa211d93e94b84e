"""The connector ``"multi"``: what the local prefix lacks comes from the pool, the rest from a peer.

It is a point-to-point connector and a pooled one side by side, and does nothing that they do. It
says which part of a request each of them gets, and makes one end out of the ends of the parts:

* A request that fetches its KV from another engine gets its leading units from the pool, as far as
  they are there, and only the rows behind them from the other engine. Which rows these are depends
  on the pool's answer, so that a fetch starts up to ``SPLIT_WAIT_S`` later than it could.
* Every other request gets its leading units from the pool and computes the rest. What it computes
  is saved to the pool, and offered to the other engine if it has a ticket.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

import msgspec
from msgspec import field

from kv_transfer.connector import (
    STAGES,
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
)
from kv_transfer.errors import TransferError
from kv_transfer.layout import KVLayout
from kv_transfer.p2p import P2PConnector, P2PConnectorScheduler
from kv_transfer.p2p_worker import P2PMeta
from kv_transfer.pooled import PooledConnector, PooledConnectorScheduler
from kv_transfer.pooled_worker import PooledMeta, PooledResults

SPLIT_WAIT_S = 0.05
"""Longest time that a fetch from another engine waits for the pool's answer."""

_Outcome: TypeAlias = Literal["sent", "received"] | Failure


class MultiMeta(ConnectorMeta, frozen=True):
    """What the scheduler side tells the worker side in one step.

    Attributes:
        p2p: For the point-to-point connector.
        pooled: For the pooled connector.
        joint: Requests that end once, when both of their parts have.
    """

    p2p: P2PMeta
    pooled: PooledMeta
    joint: tuple[str, ...] = ()


class MultiResults(TransferResults, frozen=True):
    """``TransferResults`` of requests, and of their parts for the two scheduler sides.

    Attributes:
        p2p: Ends of what is in ``sent``, ``received`` and ``failed``, as that connector knows it.
        pooled: The same, and news that are no ends.
    """

    p2p: TransferResults = field(default_factory=TransferResults)
    pooled: PooledResults = field(default_factory=PooledResults)

    def __bool__(self) -> bool:
        """Tell whether there is anything to tell."""
        return bool(self.p2p) or bool(self.pooled)


@dataclass(slots=True, eq=False)
class _Fetching:
    """A request whose KV another engine sends, until its end is reported."""

    num_tokens: int
    lane: int = 0
    block_ids: tuple[int, ...] = ()
    num_external_tokens: int = 0
    is_allocated: bool = False
    is_started: bool = False
    """It was decided where which part comes from, or that it is not wanted any more."""


class MultiConnectorScheduler:
    """Scheduler side (see ``KVConnectorScheduler`` and the module docstring).

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
        """Finished requests whose blocks the other engine keeps; they are saved meanwhile."""
        self._joint: list[str] = []

    def __repr__(self) -> str:
        """Show both."""
        return f"MultiConnectorScheduler({self._p2p!r}, {self._pooled!r})"

    @property
    def num_inflight(self) -> int:
        """Parts of requests that have not ended."""
        return self._p2p.num_inflight + self._pooled.num_inflight

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        """Take note of a request, and look it up in the pool."""
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

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tell how many tokens beyond the local prefix hit will be loaded, from wherever."""
        fetching = self._fetching.get(request_id)
        if fetching is not None and (fetching.is_allocated or fetching.is_started):
            # It has lost its blocks; what comes next is open until the end was reported.
            return None, True
        if fetching is not None:
            return self._p2p.get_num_new_matched_tokens(request_id, num_computed_tokens)
        return self._pooled.get_num_new_matched_tokens(request_id, num_computed_tokens)

    def update_state_after_alloc(
        self, request_id: str, lane: int, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Take the blocks that were allocated for a load."""
        fetching = self._fetching.get(request_id)
        if fetching is None:
            self._pooled.update_state_after_alloc(request_id, lane, block_ids, num_external_tokens)
        elif not fetching.is_allocated:
            num_blocks = self._layout.num_blocks(fetching.num_tokens)
            if len(block_ids) < num_blocks:
                raise TransferError(
                    f"request {request_id}: {len(block_ids)} blocks allocated, {num_blocks} needed "
                    f"for the {fetching.num_tokens} tokens of its ticket"
                )
            fetching.lane, fetching.block_ids = lane, tuple(block_ids)
            fetching.num_external_tokens = num_external_tokens
            fetching.is_allocated = True
            self._split(request_id, fetching)

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> MultiMeta:
        """Hand over everything that is new; drains."""
        p2p = self._p2p.build_connector_meta(progress)
        pooled = self._pooled.build_connector_meta(progress)
        meta = MultiMeta(p2p, pooled, tuple(self._joint))
        self._joint.clear()
        return meta

    def update_connector_output(self, results: TransferResults) -> None:
        """Tell each side the ends of its parts, and start what waited for the pool's answer."""
        if not isinstance(results, MultiResults):
            raise TransferError(f"{type(results).__name__} is of another connector")
        self._p2p.update_connector_output(results.p2p)
        self._pooled.update_connector_output(results.pooled)
        for request_id, outcome in _outcomes(results.p2p):
            # Of what was fetched nothing is saved: the other engine does that.
            fetched = self._fetching.pop(request_id, None) is not None and outcome == "received"
            if fetched or request_id in self._lent:
                self._lent.discard(request_id)
                self._pooled.forget(request_id)
        for request_id in results.found:
            fetching = self._fetching.get(request_id)
            if fetching is not None:
                self._split(request_id, fetching)

    def request_preempted(self, request_id: str) -> None:
        """Stop touching a request's blocks: they are about to be reused."""
        if request_id in self._fetching:
            self.cancel(request_id)
            return
        self._p2p.request_preempted(request_id)
        self._pooled.request_preempted(request_id)

    def request_finished(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Tell whether the blocks of a finished request must stay allocated."""
        if not self._p2p.request_finished(request_id, block_ids):
            return self._pooled.request_finished(request_id, block_ids)
        fetching = self._fetching.get(request_id)
        if fetching is not None:
            fetching.is_started = True
        if self._pooled.is_loading(request_id):
            self._pooled.request_finished(request_id, block_ids)
            self._joint.append(request_id)
        else:
            # The pool's part asks for no blocks of its own: it ends with the other one.
            self._lent.add(request_id)
        return True

    def cancel(self, request_id: str) -> None:
        """End a request's transfer, both parts of it."""
        fetching = self._fetching.get(request_id)
        if fetching is not None:
            fetching.is_started = True
        self._p2p.cancel(request_id)
        self._pooled.cancel(request_id)

    def has_pending_work(self) -> bool:
        """Tell whether a step is needed to hand something to the worker side."""
        return self._p2p.has_pending_work() or self._pooled.has_pending_work()

    def _split(self, request_id: str, fetching: _Fetching) -> None:
        """Start a fetch behind what the pool has, as soon as it is known what that is."""
        if fetching.is_started or not fetching.is_allocated:
            return
        num_external = fetching.num_external_tokens
        num_pooled = 0
        if num_external:
            num_local = fetching.num_tokens - num_external
            answer, _ = self._pooled.get_num_new_matched_tokens(request_id, num_local)
            if answer is None:
                return
            num_pooled = answer
        fetching.is_started = True
        lane, block_ids = fetching.lane, fetching.block_ids
        if num_pooled:
            self._pooled.update_state_after_alloc(request_id, lane, block_ids, num_pooled)
            self._joint.append(request_id)
        self._p2p.update_state_after_alloc(request_id, lane, block_ids, num_external - num_pooled)


@dataclass(slots=True, eq=False)
class _Parts:
    """How far the two parts of a joint request have ended."""

    p2p: _Outcome | None = None
    pooled: _Outcome | None = None
    first_failure: Failure | None = None

    def end_p2p(self, outcome: _Outcome) -> None:
        self.p2p = outcome
        self._note(outcome)

    def end_pooled(self, outcome: _Outcome) -> None:
        self.pooled = outcome
        self._note(outcome)

    def _note(self, outcome: _Outcome) -> None:
        if self.first_failure is None and isinstance(outcome, Failure):
            self.first_failure = outcome

    def end(self, p2p: _Outcome, pooled: _Outcome) -> _Outcome:
        """Return how the request ended whose parts ended so.

        The reason of a failure is that of the part that failed first. What the pool wrote comes
        before what the other engine sent: without it, that is of no use.
        """
        if self.first_failure is None:
            return p2p
        leading = pooled if isinstance(pooled, Failure) else p2p
        num_tokens = leading.num_tokens if isinstance(leading, Failure) else 0
        return Failure(self.first_failure.reason, num_tokens)


class MultiConnectorWorker:
    """Worker side (see ``KVConnectorWorker`` and the module docstring).

    Owner: the engine's core thread.
    """

    def __init__(
        self, p2p: KVConnectorWorker, pooled: KVConnectorWorker, notify: Callable[[], None]
    ) -> None:
        self._p2p = p2p
        self._pooled = pooled
        self._notify = notify
        self._joint: dict[str, _Parts] = {}
        self._pool_loads: set[str] = set()
        """Requests that the pool's part still writes for."""
        self._late: dict[str, _Outcome] = {}
        """Ends of the other part that were not told because of that."""

    # ---- life cycle

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where other engines reach this one."""
        return self._p2p.endpoints

    def register_kv_caches(self, io: KVDeviceIO) -> None:
        """Take the cache, start listening and open the store."""
        self._pooled.register_kv_caches(io)
        self._p2p.register_kv_caches(io)

    def close(self, deadline_s: float) -> None:
        """Stop both; each gets half of the time. Idempotent."""
        try:
            self._p2p.close(deadline_s / 2)
        finally:
            self._pooled.close(deadline_s / 2)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Before the forward: start and stop transfers, then write what arrived."""
        meta = _require_meta(meta)
        for request_id in meta.joint:
            if request_id not in self._joint:
                self._joint[request_id] = parts = _Parts()
                if request_id in self._late:
                    parts.end_p2p(self._late.pop(request_id))
        self._pool_loads.update(load.request_id for load in meta.pooled.loads)
        # An ended part must not be cancelled: it would end again.
        wanted = [x for x in meta.p2p.cancels if not self._has_ended(x)]
        cancels = dict.fromkeys([*wanted, *self._useless])
        p2p = msgspec.structs.replace(meta.p2p, cancels=tuple(cancels))
        self._p2p.start_load_kv(p2p, now_s)
        self._pooled.start_load_kv(meta.pooled, now_s)

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once a layer's loaded KV is in place."""
        self._p2p.wait_for_layer_load(layer)
        self._pooled.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Take note that a layer's KV was written."""
        self._p2p.save_kv_layer(layer)
        self._pooled.save_kv_layer(layer)

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """After the forward: what was announced is in the cache; send it and save it."""
        meta = _require_meta(meta)
        self._p2p.mark_ready(meta.p2p, now_s)
        self._pooled.mark_ready(meta.pooled, now_s)

    def wait_for_save(self) -> None:
        """Return once no save of this step reads KV memory any more."""
        self._p2p.wait_for_save()
        self._pooled.wait_for_save()

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """At the end of the step: move what is due and report what ended, parts as one request."""
        p2p_news = self._p2p.get_transfer_results(now_s)
        pooled_news = self._pooled.get_transfer_results(now_s)
        due = [request_id for request_id in self._late if request_id not in self._pool_loads]
        p2p_ends = {request_id: self._late.pop(request_id) for request_id in due}
        pooled_ends: dict[str, _Outcome] = {}
        for request_id, outcome in _outcomes(p2p_news):
            if request_id in self._joint:
                self._joint[request_id].end_p2p(outcome)
            elif request_id in self._pool_loads:
                self._late[request_id] = outcome
            else:
                p2p_ends[request_id] = outcome
        for request_id, outcome in _outcomes(pooled_news):
            self._pool_loads.discard(request_id)
            if request_id in self._joint:
                self._joint[request_id].end_pooled(outcome)
            else:
                pooled_ends[request_id] = outcome
        ends = {**p2p_ends, **pooled_ends, **self._end_joint(p2p_ends, pooled_ends)}
        if self._useless or not self._late.keys() <= self._pool_loads:
            self._notify()
        return MultiResults(
            **_by_kind(ends),
            found=pooled_news.found,
            p2p=TransferResults(**_by_kind(p2p_ends)),
            pooled=PooledResults(
                **_by_kind(pooled_ends), found=pooled_news.found, saved=_saved(pooled_news)
            ),
        )

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges of both."""
        return _add(self._p2p.stats(now_s), self._pooled.stats(now_s))

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return what is under way, each part for itself."""
        return [*self._p2p.transfers(now_s), *self._pooled.transfers(now_s)]

    # ---- inside

    def _end_joint(
        self, p2p_ends: dict[str, _Outcome], pooled_ends: dict[str, _Outcome]
    ) -> dict[str, _Outcome]:
        """Return the joint requests of which both parts ended; add these to the ends of parts."""
        ends: dict[str, _Outcome] = {}
        for request_id, parts in self._joint.items():
            if parts.p2p is not None and parts.pooled is not None:
                p2p_ends[request_id], pooled_ends[request_id] = parts.p2p, parts.pooled
                ends[request_id] = parts.end(parts.p2p, parts.pooled)
        for request_id in ends:
            del self._joint[request_id]
        return ends

    @property
    def _useless(self) -> list[str]:
        """Requests to cancel: without the pool's rows those behind them are of no use."""
        return [
            request_id
            for request_id, parts in self._joint.items()
            if isinstance(parts.pooled, Failure) and parts.p2p is None
        ]

    def _has_ended(self, request_id: str) -> bool:
        """Tell whether the other engine's part ended, which nobody was told yet."""
        parts = self._joint.get(request_id)
        return request_id in self._late or (parts is not None and parts.p2p is not None)


class MultiConnector:
    """The built-in connector ``"multi"`` (see ``KVConnector``)."""

    def create_scheduler(
        self, settings: ConnectorSettings, layout: KVLayout
    ) -> MultiConnectorScheduler:
        """Make the scheduler side of one engine.

        Raises:
            TransferError: When the engine converts KV, or no store is set.
        """
        _refuse_conversion(settings)
        p2p = P2PConnector().create_scheduler(settings, layout)
        pooled = PooledConnector().create_scheduler(settings, layout)
        return MultiConnectorScheduler(p2p, pooled, layout)

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> MultiConnectorWorker:
        """Make the worker side of one engine.

        Raises:
            TransferError: When the engine converts KV, or no store is set.
        """
        _refuse_conversion(settings)
        # Half of a step's budget each, so that neither part waits for the other.
        config = settings.config.with_half_of_a_step()
        settings = msgspec.structs.replace(settings, config=config)
        p2p = P2PConnector().create_worker(settings, notify)
        pooled = PooledConnector().create_worker(settings, notify)
        return MultiConnectorWorker(p2p, pooled, notify)


def _refuse_conversion(settings: ConnectorSettings) -> None:
    """Keep converted KV, which may be less precise, out of the pool: its keys do not show it."""
    if settings.accept_dtypes:
        raise TransferError(
            "KV converted from another engine's dtype would be saved to the pool as if it had been "
            "computed here: give both engines the same KV dtype and leave kv_accept_dtypes empty, "
            "or set kv_connector to 'p2p'"
        )


class _Ends(TypedDict):
    sent: frozenset[str]
    received: frozenset[str]
    failed: dict[str, Failure]


def _outcomes(results: TransferResults) -> Iterator[tuple[str, _Outcome]]:
    for request_id in results.sent:
        yield request_id, "sent"
    for request_id in results.received:
        yield request_id, "received"
    yield from results.failed.items()


def _by_kind(ends: dict[str, _Outcome]) -> _Ends:
    return {
        "sent": frozenset(x for x, outcome in ends.items() if outcome == "sent"),
        "received": frozenset(x for x, outcome in ends.items() if outcome == "received"),
        "failed": {x: outcome for x, outcome in ends.items() if isinstance(outcome, Failure)},
    }


def _saved(results: TransferResults) -> frozenset[str]:
    return results.saved if isinstance(results, PooledResults) else frozenset()


def _require_meta(meta: ConnectorMeta) -> MultiMeta:
    if not isinstance(meta, MultiMeta):
        raise TransferError(f"{type(meta).__name__} is of another connector")
    return meta


def _add(p2p: TransferStats, pooled: TransferStats) -> TransferStats:
    """Add what both have; the rest is of one of them only."""
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
