"""Worker side of the pooled connector: copies units between KV memory and a store's values.

It does so on the engine's core thread and nowhere else; calls of the store run in a
``StoreExecutor``. Because this thread alone both touches the blocks and reports the end of a load,
nothing is written for a load once its end has been reported. Whatever the store does or fails to do
costs hits, never a step: its calls are waited for by a deadline, and saves that it cannot keep up
with are dropped.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kv_transfer.connector import (
    BlockTables,
    ConnectorMeta,
    ConnectorSettings,
    Failure,
    KVDeviceIO,
    PathCounters,
    TransferInfo,
    TransferResults,
    TransferStats,
    count_failure,
    only_kv_group,
)
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.step_budget import StepBudget
from kv_transfer.store import Lease, StoreConfig
from kv_transfer.store_thread import (
    CHECKSUM_BYTES,
    Count,
    Fetch,
    Put,
    Release,
    StoreExecutor,
)

ExecutorFactory = Callable[[StoreConfig, Callable[[], None]], StoreExecutor]

_UNITS_AHEAD = 2
"""Least number of units got from the store before they are copied: one arrives as one is copied."""


_NAME_DIGITS = 16


class LookupSpec(Struct, frozen=True, array_like=True):
    """A prompt to look up.

    Attributes:
        request_id: The request.
        keys: Keys of its units, from position 0.
        timeout_s: After this long the pool counts as having nothing.
    """

    request_id: str
    keys: tuple[bytes, ...]
    timeout_s: float


class PoolLoadSpec(Struct, frozen=True, array_like=True):
    """Start of a load.

    Attributes:
        request_id: The request.
        lane: Lane of the destination blocks.
        block_ids: The request's block tables.
        first_unit: Number of the first unit to get.
        keys: Keys of the units to get.
        start_row: First row to write; those before it are there already. In the first unit.
        end_row: First row not to write. In the last unit, or at its end.
    """

    request_id: str
    lane: int
    block_ids: BlockTables
    first_unit: int
    keys: tuple[bytes, ...]
    start_row: int
    end_row: int


class PoolSaveSpec(Struct, frozen=True, array_like=True):
    """Units that this step's forward completes.

    Attributes:
        request_id: The request.
        lane: Lane of its blocks.
        block_ids: Its block tables.
        first_unit: Number of the first of these units.
        keys: Their keys.
    """

    request_id: str
    lane: int
    block_ids: BlockTables
    first_unit: int
    keys: tuple[bytes, ...]


class PooledMeta(ConnectorMeta, frozen=True):
    """What the scheduler side tells the worker side in one step, in order of execution.

    Attributes:
        drops: Requests whose lookup and saves end now; results do not name them.
        lookups: Prompts to look up.
        loads: Loads to start.
        cancels: Requests whose load ends now; results name them.
        saves: What this step's forward will have computed.
        finished: Requests whose blocks may be freed once their saves have been read; results name
            them then.
    """

    drops: tuple[str, ...] = ()
    lookups: tuple[LookupSpec, ...] = ()
    loads: tuple[PoolLoadSpec, ...] = ()
    cancels: tuple[str, ...] = ()
    saves: tuple[PoolSaveSpec, ...] = ()
    finished: tuple[str, ...] = ()


class PooledResults(TransferResults, frozen=True):
    """``TransferResults`` with more news for the scheduler side.

    Attributes:
        saved: Requests of which nothing that was announced is left to read.
    """

    saved: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Tell whether there is anything to tell."""
        return bool(self.sent or self.received or self.failed or self.found or self.saved)


@dataclass(slots=True, eq=False)
class _Lookup:
    request_id: str
    asked_s: float
    deadline_s: float
    job: Count = field(init=False)


@dataclass(slots=True, eq=False)
class _Load:
    spec: PoolLoadSpec
    started_s: float
    progress_s: float
    num_units: int
    """Units that will come: fewer than were asked for once one of them is known to be missing."""
    next_row: int
    """First row that is not written."""
    num_asked: int = 0
    num_written: int = 0
    num_done: int = 0
    """Units that are written from values which proved protected while they were read."""
    fault: FailureReason | None = None
    jobs: list[Fetch] = field(default_factory=list)
    units: deque[tuple[int, Lease]] = field(default_factory=deque)
    """Units to copy, each with its number among the load's."""
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.spec.end_row - self.spec.start_row

    @property
    def num_ahead(self) -> int:
        """Units that are asked for or here, and not written."""
        return self.num_asked - self.num_written


@dataclass(slots=True, eq=False)
class _Save:
    request_id: str
    lane: int
    block_ids: tuple[int, ...]
    key: bytes
    next_row: int
    end_row: int
    pieces: list[NDArray[np.uint8]] = field(default_factory=list)


def require_store(settings: ConnectorSettings) -> StoreConfig:
    """Return the store's configuration.

    Raises:
        TransferError: When there is none.
    """
    if settings.store is None:
        raise TransferError("this KV connector needs a pool: set kv_store")
    return settings.store


class PooledConnectorWorker:
    """Worker side of the pooled connector (see ``KVConnectorWorker``).

    Owner: the engine's core thread. ``now_s`` is any monotonic clock; deadlines are kept on it, and
    the executor ends the wait for them. Loads in turn, and one of the saves after each, copy a
    chunk until the step's budget is spent.

    Args:
        settings: The engine's settings.
        notify: Wakes the engine.
        make_executor: Makes what calls the store.

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
        self._io: KVDeviceIO | None = None
        self._lookups: dict[str, _Lookup] = {}
        self._loads: dict[str, _Load] = {}
        self._budget = StepBudget(
            settings.config.copy_s, settings.config.copy_share, settings.step_now_s
        )
        self._is_saves_turn = False
        """A save is next to copy a chunk, not a load."""
        self._saves: deque[_Save] = deque()
        self._num_unread: Counter[str] = Counter()
        """Entries of ``_saves`` by request."""
        self._finished: set[str] = set()
        self._waiting_bytes = 0
        """Bytes of saves that the store has not taken yet."""
        self._heard_s = 0.0
        """When the store last answered anything."""
        self._is_stuck = False
        """Nothing was heard for longer than a call may take, and nothing since."""
        self._found: dict[str, int] = {}
        self._saved: set[str] = set()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: dict[str, Failure] = {}
        self._totals = TransferStats.empty()
        self._totals.paths["pool"] = PathCounters()

    # ---- life cycle

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Nothing: other engines do not reach this one."""
        return ()

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        """Take the cache and open the store.

        Raises:
            TransferError: When the store's backend is unknown or not installed, or there are
                several KV groups.
        """
        if self._io is not None:
            raise TransferError("register_kv_caches was called before")
        io = only_kv_group(ios)
        # Where nobody named the store: engines whose KV differs have no use for each other's.
        name = self._store.name or io.layout.content_hash()[:_NAME_DIGITS]
        self._executor = self._make_executor(replace(self._store, name=name), self._notify)
        self._io = io

    def close(self, deadline_s: float) -> None:
        """Close the store, which gives every lease back, and stop its thread. Idempotent."""
        if self._executor is not None:
            self._executor.close(deadline_s)

    # ---- one step

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Before the forward: start and stop lookups and loads, then write what arrived."""
        if not isinstance(meta, PooledMeta):
            raise TransferError(f"{type(meta).__name__} is of another connector")
        self._budget.begin()
        for request_id in meta.drops:
            self._drop(request_id)
        for lookup in meta.lookups:
            self._look_up(lookup, now_s)
        for load in meta.loads:
            self._start_load(load, now_s)
        for request_id in meta.cancels:
            cancelled = self._loads.get(request_id)
            if cancelled is not None:
                self._end_load(cancelled, FailureReason.CANCELLED, now_s)
        self._advance(now_s)

    def wait_for_layer_load(self, layer: int) -> None:
        """Return at once: a load becomes visible only when it is whole."""

    def save_kv_layer(self, layer: int) -> None:
        """Do nothing: units are read when all of their layers are computed, by ``mark_ready``."""

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """After the forward: what ``meta.saves`` announced is in the cache; read some of it."""
        if not isinstance(meta, PooledMeta):
            raise TransferError(f"{type(meta).__name__} is of another connector")
        for spec in meta.saves:
            self._announce(spec)
        for request_id in meta.finished:
            self._finished.add(request_id)
            self._report_if_read(request_id)
        self._move(now_s)

    def wait_for_save(self) -> None:
        """Return at once: units are read on this thread."""

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """At the end of the step: move what is due and report what ended."""
        self._advance(now_s)
        self._set_alarm(now_s)
        results = PooledResults(
            sent=frozenset(self._sent),
            received=frozenset(self._received),
            failed=dict(self._failed),
            found=dict(self._found),
            saved=frozenset(self._saved),
        )
        for reported in (self._sent, self._received, self._failed, self._found, self._saved):
            reported.clear()
        return results

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges for metrics."""
        totals, executor = self._totals, self._require_executor()
        store = executor.counters
        num_wrong = executor.num_errors + totals.num_checksum_failures
        return replace(
            totals,
            num_inflight_loads=len(self._loads),
            num_reserved_blocks=sum(map(self._num_blocks, self._loads.values())),
            store=replace(
                store,
                drops=store.drops + totals.store.drops,
                errors=store.errors + totals.store.errors + num_wrong,
            ),
        )

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the loads under way."""
        return [
            TransferInfo(
                request_id=request_id,
                role="consumer",
                peer="",
                path="pool",
                state="waiting" if load.first_s is None else "streaming",
                total_rows=load.num_rows,
                ready_rows=load.num_rows,
                done_rows=load.next_row - load.spec.start_row,
                num_blocks=self._num_blocks(load),
                age_s=now_s - load.started_s,
            )
            for request_id, load in self._loads.items()
        ]

    # ---- starting and stopping

    def _drop(self, request_id: str) -> None:
        """End a request's lookup and saves without a word."""
        self._finished.discard(request_id)
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.job.is_dropped = True
        if self._num_unread.pop(request_id, 0):
            self._saves = deque(save for save in self._saves if save.request_id != request_id)

    def _look_up(self, spec: LookupSpec, now_s: float) -> None:
        if self._is_stuck:
            # Whoever waits for a store that does not answer waits in vain, each time anew.
            self._found[spec.request_id] = 0
            return
        lookup = _Lookup(spec.request_id, now_s, now_s + spec.timeout_s)
        lookup.job = Count(lookup, spec.keys)
        self._lookups[spec.request_id] = lookup
        self._require_executor().submit(lookup.job)

    def _start_load(self, spec: PoolLoadSpec, now_s: float) -> None:
        self._loads[spec.request_id] = _Load(
            spec, now_s, now_s, num_units=len(spec.keys), next_row=spec.start_row
        )

    def _end_load(self, load: _Load, reason: FailureReason | None, now_s: float) -> None:
        """Report a load and give back what it holds; nothing is written for it from here on."""
        request_id = load.spec.request_id
        del self._loads[request_id]
        for job in load.jobs:
            job.is_dropped = True
        for _, lease in load.units:
            self._release(None, lease)
        if reason is None:
            self._received.add(request_id)
            num_bytes = load.num_rows * self._require_io().layout.row_bytes
            first_s = load.last_s if load.first_s is None else load.first_s
            times_s = (load.started_s, first_s, load.last_s, now_s)
            self._totals.count_received("pool", num_bytes, times_s)
            return
        count_failure(self._totals.receive_failures, reason)
        # The blocks of a cancelled load may have been taken away already.
        is_kept = reason is not FailureReason.CANCELLED
        self._failed[request_id] = Failure(reason, self._num_verified_tokens(load) * is_kept)

    def _num_verified_tokens(self, load: _Load) -> int:
        spec = load.spec
        if not load.num_done:
            return spec.start_row * ROW_TOKENS
        return min(spec.end_row, (spec.first_unit + load.num_done) * self._unit_rows) * ROW_TOKENS

    # ---- lookups and loads

    def _advance(self, now_s: float) -> None:
        """Take what the store answered, copy, ask for more, and let deadlines pass."""
        self._poll(now_s)
        self._move(now_s)
        self._fetch()
        self._expire(now_s)

    def _poll(self, now_s: float) -> None:
        for job in self._require_executor().poll():
            self._heard_s = now_s
            self._is_stuck = False
            if isinstance(job, Count):
                self._on_counted(job)
            elif isinstance(job, Fetch):
                self._on_fetched(job, now_s)
            elif isinstance(job, Release):
                self._on_released(job, now_s)
            elif isinstance(job, Put):
                self._waiting_bytes -= self._unit_bytes

    def _on_counted(self, job: Count) -> None:
        lookup = job.owner
        if isinstance(lookup, _Lookup) and self._lookups.get(lookup.request_id) is lookup:
            del self._lookups[lookup.request_id]
            self._found[lookup.request_id] = job.num_present * self._store.unit_tokens

    def _on_fetched(self, job: Fetch, now_s: float) -> None:
        load = self._live(job.owner)
        if job.reason is FailureReason.CHECKSUM:
            self._totals.num_checksum_failures += 1
        if load is None:
            for lease in job.leases:
                self._release(None, lease)
            return
        load.jobs.remove(job)
        for number, lease in enumerate(job.leases, job.first):
            if number < load.num_units:
                load.units.append((number, lease))
            else:
                self._release(None, lease)
        num_units = job.first + len(job.leases)
        if len(job.leases) < len(job.keys) and num_units < load.num_units:
            load.num_units, load.fault = num_units, job.reason
            if load.num_done == num_units:
                self._end_load(load, load.fault, now_s)

    def _on_released(self, job: Release, now_s: float) -> None:
        load = self._live(job.owner)
        if load is None:
            return
        if not job.was_protected:
            self._end_load(load, FailureReason.STORE, now_s)
            return
        load.num_done += 1
        if load.num_done == load.num_units:
            self._end_load(load, load.fault, now_s)

    def _live(self, owner: object) -> _Load | None:
        """Return the load that a job was for, unless that is over."""
        if isinstance(owner, _Load) and self._loads.get(owner.spec.request_id) is owner:
            return owner
        return None

    def _release(self, owner: _Load | None, lease: Lease) -> None:
        self._require_executor().submit(Release(owner, lease))

    def _move(self, now_s: float) -> None:
        """Copy chunks, to a load and of a save by turns, as far as the step's budget goes."""
        self._budget.resume()
        while self._budget.has_room:
            # Both are tried: the turn of one that has nothing to copy is the other's.
            for _ in range(2):
                self._is_saves_turn = not self._is_saves_turn
                if self._write_next(now_s) if self._is_saves_turn else self._read_next():
                    break
            else:
                return
            self._budget.charge()
        if self._saves or any(load.units for load in self._loads.values()):
            self._notify()

    def _write_next(self, now_s: float) -> bool:
        """Write a chunk of the load whose turn it is; returns whether there was one."""
        load = next((load for load in self._loads.values() if load.units), None)
        if load is None:
            return False
        self._write(load, now_s)
        request_id = load.spec.request_id
        self._loads[request_id] = self._loads.pop(request_id)  # Behind the others.
        return True

    def _write(self, load: _Load, now_s: float) -> None:
        """Write a chunk of a load's next unit."""
        number, lease = load.units[0]
        spec, layout = load.spec, self._require_io().layout
        first = (spec.first_unit + number) * self._unit_rows
        end = min(load.next_row + self._chunk_rows, first + self._unit_rows, spec.end_row)
        rows = lease.value[CHECKSUM_BYTES:].reshape(self._unit_rows, layout.row_bytes)
        wanted = rows[load.next_row - first : end - first]
        table = only_kv_group(spec.block_ids)
        self._require_io().write_rows(spec.lane, table, load.next_row, wanted)
        load.next_row = end
        load.progress_s = load.last_s = now_s
        if load.first_s is None:
            load.first_s = now_s
        if end in {first + self._unit_rows, spec.end_row}:
            load.units.popleft()
            load.num_written += 1
            self._release(load, lease)

    def _fetch(self) -> None:
        """Ask for the next units, of the load whose turn to be written comes first."""
        room = max(_UNITS_AHEAD, self._config.window_bytes // self._unit_bytes)
        room -= sum(load.num_ahead for load in self._loads.values())
        for load in self._loads.values():
            keys = load.spec.keys[load.num_asked : load.num_units][: max(0, room)]
            if keys:
                job = Fetch(load, load.num_asked, keys, self._unit_bytes)
                load.num_asked += len(keys)
                load.jobs.append(job)
                room -= len(keys)
                self._require_executor().submit(job)

    def _expire(self, now_s: float) -> None:
        """Give up what the store has not answered in time; no answer is no KV."""
        for lookup in [x for x in self._lookups.values() if now_s >= x.deadline_s]:
            del self._lookups[lookup.request_id]
            lookup.job.is_dropped = True
            self._found[lookup.request_id] = 0
            self._totals.store.errors += 1
            silent_s = now_s - max(lookup.asked_s, self._heard_s)
            self._is_stuck = self._is_stuck or silent_s >= self._store.timeout_s
        for load in list(self._loads.values()):
            if now_s >= self._stalled_s(load):
                self._end_load(load, FailureReason.STALLED, now_s)

    def _stalled_s(self, load: _Load) -> float:
        return max(load.progress_s, self._heard_s) + self._config.no_progress_s

    def _set_alarm(self, now_s: float) -> None:
        deadlines = [lookup.deadline_s for lookup in self._lookups.values()]
        deadlines += map(self._stalled_s, self._loads.values())
        due_s = min(deadlines, default=None)
        self._require_executor().wake_in(None if due_s is None else max(0.0, due_s - now_s))

    # ---- saves

    def _announce(self, spec: PoolSaveSpec) -> None:
        """Queue units to be read; their blocks stay what they are until that was reported."""
        unit_rows, table = self._unit_rows, only_kv_group(spec.block_ids)
        for number, key in enumerate(spec.keys, spec.first_unit):
            start, end = number * unit_rows, (number + 1) * unit_rows
            self._saves.append(_Save(spec.request_id, spec.lane, table, key, start, end))
        self._num_unread[spec.request_id] += len(spec.keys)
        self._saved.discard(spec.request_id)

    def _read_next(self) -> bool:
        """Read a chunk of the first save, and pass it on once it is whole; False without saves."""
        while self._saves:
            save = self._saves[0]
            if save.pieces or self._has_room:
                self._read(save)
                if save.next_row == save.end_row:
                    self._waiting_bytes += self._unit_bytes
                    self._require_executor().submit(Put(save.key, save.pieces))
                    self._end_save(save)
                return True
            self._totals.store.drops += 1
            self._end_save(save)
        return False

    def _end_save(self, save: _Save) -> None:
        """Forget the first save."""
        self._saves.popleft()
        self._num_unread[save.request_id] -= 1
        self._report_if_read(save.request_id)

    @property
    def _has_room(self) -> bool:
        """Whether one more unit may wait for the store."""
        is_idle = self._waiting_bytes == 0
        return is_idle or (
            self._waiting_bytes + self._unit_bytes <= self._config.max_inflight_bytes
        )

    def _read(self, save: _Save) -> None:
        num_rows = min(self._chunk_rows, save.end_row - save.next_row)
        io = self._require_io()
        save.pieces.append(io.read_rows(save.lane, save.block_ids, save.next_row, num_rows))
        save.next_row += num_rows

    def _report_if_read(self, request_id: str) -> None:
        if self._num_unread[request_id]:
            return
        del self._num_unread[request_id]
        if request_id in self._finished:
            self._finished.discard(request_id)
            self._sent.add(request_id)
        else:
            self._saved.add(request_id)

    # ---- inside

    def _num_blocks(self, load: _Load) -> int:
        """Return how many blocks a load writes."""
        return load.num_rows // self._require_io().layout.rows_per_block

    @property
    def _unit_rows(self) -> int:
        return self._store.unit_tokens // ROW_TOKENS

    @property
    def _unit_bytes(self) -> int:
        return self._unit_rows * self._require_io().layout.row_bytes

    @property
    def _chunk_rows(self) -> int:
        """Rows to copy at once: whole blocks, because a device moves nothing smaller."""
        layout = self._require_io().layout
        num_blocks = self._config.chunk_bytes // layout.bytes_per_block
        return max(1, num_blocks) * layout.rows_per_block

    def _require_io(self) -> KVDeviceIO:
        if self._io is None:
            raise TransferError("call register_kv_caches first")
        return self._io

    def _require_executor(self) -> StoreExecutor:
        if self._executor is None:
            raise TransferError("call register_kv_caches first")
        return self._executor
