"""Worker side of the pooled connector: copies units between KV memory and a store's values.

Copies run on the engine's core thread only; calls of the store run in a ``StoreExecutor``. The core
thread alone touches the blocks and reports the ends of loads, so nothing is written for a load
after its end was reported. A failure of the store costs hits and never a step: every call has a
deadline, and saves that the store cannot keep up with are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from kv_transfer.connector import (
    ConnectorMeta,
    ConnectorSettings,
    KVDeviceIO,
    PathCounters,
    TransferInfo,
    TransferResults,
    TransferStats,
    only_kv_group,
)
from kv_transfer.errors import TransferError
from kv_transfer.pooled_context import PoolContext
from kv_transfer.pooled_loads import PoolLoads
from kv_transfer.pooled_meta import LookupSpec, PooledMeta, PooledResults
from kv_transfer.pooled_saves import PoolSaves
from kv_transfer.step_budget import StepBudget
from kv_transfer.store import StoreConfig
from kv_transfer.store_thread import CountJob, FetchJob, PutJob, ReleaseJob, StoreExecutor

ExecutorFactory = Callable[[StoreConfig, Callable[[], None]], StoreExecutor]

_NAME_DIGITS = 16


@dataclass(slots=True, eq=False)
class _Lookup:
    request_id: str
    asked_s: float
    deadline_s: float
    job: CountJob = field(init=False)


def require_store(settings: ConnectorSettings) -> StoreConfig:
    """Return the store's configuration.

    Raises:
        TransferError: When there is none.
    """
    if settings.store is None:
        raise TransferError("kv_connector 'pooled' and 'multi' need a pool: set kv_store")
    return settings.store


class PooledConnectorWorker:
    """Worker side of the pooled connector (see ``KVConnectorWorker``).

    Owner: the engine's core thread. ``now_s`` is any monotonic clock; deadlines are kept on it, and
    the executor wakes the engine at the next one. Loads in turn, and one of the saves after each,
    copy a chunk until the step's budget is spent.

    Args:
        settings: The engine's settings.
        notify: Wakes the engine.
        make_executor: Makes the executor of store calls.

    Raises:
        TransferError: When no store is set.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        notify: Callable[[], None],
        make_executor: ExecutorFactory,
    ) -> None:
        self._store = require_store(settings)
        self._config = settings.config
        self._notify = notify
        self._make_executor = make_executor
        self._executor: StoreExecutor | None = None
        """None until ``register_kv_caches``, which also sets the three fields below."""
        self._context: PoolContext
        self._loads: PoolLoads
        self._saves: PoolSaves
        self._lookups: dict[str, _Lookup] = {}
        self._budget = StepBudget(
            settings.config.copy_s, settings.config.copy_share, settings.step_now_s
        )
        self._is_saves_turn = False
        """True if the last chunk was a load's, so that a save is next."""
        self._heard_s = 0.0
        """Time at which the store last answered any call."""
        self._is_stuck = False
        """True once the store was silent for longer than a call may take, until it answers."""

    # ---- life cycle

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Empty: other engines do not reach this one."""
        return ()

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Attach the cache and open the store.

        Raises:
            TransferError: When the store's backend is unknown or not installed, or there are
                several KV groups.
        """
        if self._executor is not None:
            raise TransferError("register_kv_caches was called twice: call it once")
        io = only_kv_group(ios)
        # A default name per layout: engines whose KV differ can use none of each other's values.
        name = self._store.name or io.layout.content_hash()[:_NAME_DIGITS]
        executor = self._make_executor(replace(self._store, name=name), self._notify)
        self._context = PoolContext(
            io=io, config=self._config, executor=executor, unit_tokens=self._store.unit_tokens
        )
        self._context.totals.paths["pool"] = PathCounters()
        self._loads, self._saves = PoolLoads(self._context), PoolSaves(self._context)
        self._executor = executor

    def close(self, deadline_s: float) -> None:
        """Close the store, which releases every lease, and stop its thread. Idempotent."""
        if self._executor is not None:
            self._executor.close(deadline_s)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Begin a step: start and stop lookups and loads, then write what arrived."""
        if not isinstance(meta, PooledMeta):
            raise TransferError(f"{type(meta).__name__} is not from connector 'pooled'")
        self._budget.start_step()
        for request_id in meta.drops:
            self._drop(request_id)
        for lookup in meta.lookups:
            self._look_up(lookup, now_s)
        for load in meta.loads:
            self._loads.start_load(load, now_s)
        for request_id in meta.cancels:
            self._loads.cancel(request_id, now_s)
        self._advance(now_s)

    def wait_for_layer_load(self, layer: int) -> None:
        """Return at once: a load becomes visible only when it is complete."""

    def save_kv_layer(self, layer: int) -> None:
        """Do nothing: units are read when all of their layers are computed, by ``mark_ready``."""

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """Queue after the forward the units that are complete; read some of them."""
        if not isinstance(meta, PooledMeta):
            raise TransferError(f"{type(meta).__name__} is not from connector 'pooled'")
        for spec in meta.saves:
            self._saves.announce(spec)
        for request_id in meta.finished:
            self._saves.finish(request_id)
        self._move(now_s)

    def wait_for_save(self) -> None:
        """Return at once: units are read on this thread."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """Copy what is due at the end of a step, and return what ended."""
        self._advance(now_s)
        self._set_alarm(now_s)
        ended = msgspec.structs.asdict(self._context.ended.drain())
        results = PooledResults(**ended, saved=frozenset(self._saves.saved))
        self._saves.saved.clear()
        return results

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""
        totals, executor = self._context.totals, self._require_executor()
        store = executor.counters
        num_wrong = executor.num_errors + totals.num_checksum_failures
        return replace(
            totals,
            num_inflight_loads=len(self._loads),
            num_reserved_blocks=self._loads.num_blocks,
            store=replace(
                store,
                drops=store.drops + totals.store.drops,
                errors=store.errors + totals.store.errors + num_wrong,
            ),
        )

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the loads under way."""
        return self._loads.infos(now_s)

    # ---- helpers

    def _drop(self, request_id: str) -> None:
        """End a request's lookup and saves without reporting it."""
        self._saves.drop(request_id)
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.job.is_dropped = True

    def _look_up(self, spec: LookupSpec, now_s: float) -> None:
        if self._is_stuck:
            # A store that does not answer would cost each request its full lookup timeout.
            self._context.ended.found[spec.request_id] = 0
            return
        lookup = _Lookup(spec.request_id, now_s, now_s + spec.timeout_s)
        lookup.job = CountJob(lookup, spec.keys)
        self._lookups[spec.request_id] = lookup
        self._require_executor().submit(lookup.job)

    def _advance(self, now_s: float) -> None:
        """Handle the store's answers, copy, request more units, and handle deadlines."""
        self._poll(now_s)
        self._move(now_s)
        self._loads.fetch()
        self._expire(now_s)

    def _poll(self, now_s: float) -> None:
        for job in self._require_executor().poll():
            self._heard_s = now_s
            self._is_stuck = False
            if isinstance(job, CountJob):
                self._on_counted(job)
            elif isinstance(job, FetchJob):
                self._loads.on_fetched(job, now_s)
            elif isinstance(job, ReleaseJob):
                self._loads.on_released(job, now_s)
            elif isinstance(job, PutJob):
                self._saves.on_put()

    def _on_counted(self, job: CountJob) -> None:
        lookup = job.owner
        if isinstance(lookup, _Lookup) and self._lookups.get(lookup.request_id) is lookup:
            del self._lookups[lookup.request_id]
            self._context.ended.found[lookup.request_id] = job.num_present * self._store.unit_tokens

    def _move(self, now_s: float) -> None:
        """Copy chunks of loads and saves alternately, until the step's budget is spent."""
        self._budget.resume()
        while self._budget.has_room:
            # Tries both: if one side has nothing to copy, the other uses its turn.
            for _ in range(2):
                self._is_saves_turn = not self._is_saves_turn
                if self._move_chunk(now_s):
                    break
            else:
                return
            self._budget.charge()
        if self._saves or self._loads.have_units:
            self._notify()

    def _move_chunk(self, now_s: float) -> bool:
        """Copy one chunk for the side whose turn it is; return whether there was one."""
        if self._is_saves_turn:
            return self._loads.write_next(now_s)
        return self._saves.read_next()

    def _expire(self, now_s: float) -> None:
        """End lookups and loads that the store has not answered in time; they count as misses."""
        for lookup in [x for x in self._lookups.values() if now_s >= x.deadline_s]:
            del self._lookups[lookup.request_id]
            lookup.job.is_dropped = True
            self._context.ended.found[lookup.request_id] = 0
            self._context.totals.store.errors += 1
            silent_s = now_s - max(lookup.asked_s, self._heard_s)
            self._is_stuck = self._is_stuck or silent_s >= self._store.timeout_s
        self._loads.expire(self._heard_s, now_s)

    def _set_alarm(self, now_s: float) -> None:
        deadlines = [lookup.deadline_s for lookup in self._lookups.values()]
        deadlines += self._loads.deadlines_s(self._heard_s)
        due_s = min(deadlines, default=None)
        self._require_executor().wake_in(None if due_s is None else max(0.0, due_s - now_s))

    def _require_executor(self) -> StoreExecutor:
        if self._executor is None:
            raise TransferError("call register_kv_caches first")
        return self._executor
