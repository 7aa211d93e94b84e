"""Loads from a pool into KV memory: lease units, then copy them in chunks, each load in turn."""

from collections import deque
from dataclasses import dataclass, field

from kv_transfer.connector import Failure, TransferInfo, count_failure, only_kv_group
from kv_transfer.errors import FailureReason
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.pooled_context import PoolContext
from kv_transfer.pooled_meta import PoolLoadSpec
from kv_transfer.store import Lease
from kv_transfer.store_thread import CHECKSUM_BYTES, FetchJob, ReleaseJob

_UNITS_AHEAD = 2
"""Least number of units to lease ahead: one arrives while another is copied."""


@dataclass(slots=True, eq=False)
class _Load:
    spec: PoolLoadSpec
    started_s: float
    progress_s: float
    num_units: int
    """Units that will come; lowered once one of them is known to be missing."""
    next_row: int
    """First row that is not written."""
    num_asked: int = 0
    num_written: int = 0
    num_done: int = 0
    """Units written from values that stayed protected until the copy was complete."""
    fault: FailureReason | None = None
    jobs: list[FetchJob] = field(default_factory=list)
    units: deque[tuple[int, Lease]] = field(default_factory=deque)
    """Units to copy, each with its number among the load's."""
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.spec.end_row - self.spec.start_row

    @property
    def num_ahead(self) -> int:
        """Units that are requested or here, and not written."""
        return self.num_asked - self.num_written


class PoolLoads:
    """Loads of one worker. Owner: the worker, on the engine's core thread."""

    def __init__(self, context: PoolContext) -> None:
        self._context = context
        self._loads: dict[str, _Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_blocks(self) -> int:
        """Blocks that in-flight loads write."""
        return sum(map(self._num_blocks, self._loads.values()))

    @property
    def have_units(self) -> bool:
        """True if a unit is waiting to be copied."""
        return any(load.units for load in self._loads.values())

    def infos(self, now_s: float) -> list[TransferInfo]:
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

    def cancel(self, request_id: str, now_s: float) -> None:
        """End the load of a request, if there is one."""
        if request_id in self._loads:
            self._end(self._loads[request_id], FailureReason.CANCELLED, now_s)

    def expire(self, heard_s: float, now_s: float) -> None:
        """End the loads that have made no progress for too long."""
        for load in list(self._loads.values()):
            if now_s >= self._stalled_s(load, heard_s):
                self._end(load, FailureReason.STALLED, now_s)

    def deadlines_s(self, heard_s: float) -> list[float]:
        """Return the times at which loads end without progress."""
        return [self._stalled_s(load, heard_s) for load in self._loads.values()]

    def _stalled_s(self, load: _Load, heard_s: float) -> float:
        return max(load.progress_s, heard_s) + self._context.config.no_progress_s

    def _num_blocks(self, load: _Load) -> int:
        return load.num_rows // self._context.io.layout.rows_per_block

    def start_load(self, spec: PoolLoadSpec, now_s: float) -> None:
        """Start a load."""
        self._loads[spec.request_id] = _Load(
            spec, now_s, now_s, num_units=len(spec.keys), next_row=spec.start_row
        )

    def _end(self, load: _Load, reason: FailureReason | None, now_s: float) -> None:
        """Report a load and release its leases; nothing is written for it after this."""
        request_id = load.spec.request_id
        del self._loads[request_id]
        for job in load.jobs:
            job.is_dropped = True
        for _, lease in load.units:
            self._release(None, lease)
        if reason is None:
            self._context.ended.received.add(request_id)
            num_bytes = load.num_rows * self._context.io.layout.row_bytes
            first_s = load.last_s if load.first_s is None else load.first_s
            times_s = (load.started_s, first_s, load.last_s, now_s)
            self._context.totals.count_received("pool", num_bytes, times_s)
            return
        count_failure(self._context.totals.receive_failures, reason)
        # The blocks of a cancelled load may belong to another request already.
        is_kept = reason is not FailureReason.CANCELLED
        self._context.ended.failed[request_id] = Failure(
            reason, self._num_verified_tokens(load) * is_kept
        )

    def _num_verified_tokens(self, load: _Load) -> int:
        spec = load.spec
        if not load.num_done:
            return spec.start_row * ROW_TOKENS
        return (
            min(spec.end_row, (spec.first_unit + load.num_done) * self._context.unit_rows)
            * ROW_TOKENS
        )

    def on_fetched(self, job: FetchJob, now_s: float) -> None:
        """Queue the units that arrived."""
        load = self._live(job.owner)
        if job.reason is FailureReason.CHECKSUM:
            self._context.totals.num_checksum_failures += 1
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
                self._end(load, load.fault, now_s)

    def on_released(self, job: ReleaseJob, now_s: float) -> None:
        """Count a unit as done if its value stayed protected; else fail the load."""
        load = self._live(job.owner)
        if load is None:
            return
        if not job.was_protected:
            self._end(load, FailureReason.STORE, now_s)
            return
        load.num_done += 1
        if load.num_done == load.num_units:
            self._end(load, load.fault, now_s)

    def _live(self, owner: object) -> _Load | None:
        """Return the load that a job was for; None if it has ended."""
        if isinstance(owner, _Load) and self._loads.get(owner.spec.request_id) is owner:
            return owner
        return None

    def _release(self, owner: _Load | None, lease: Lease) -> None:
        self._context.executor.submit(ReleaseJob(owner, lease))

    def write_next(self, now_s: float) -> bool:
        """Copy one chunk of the next load in turn; return whether there was one."""
        load = next((load for load in self._loads.values() if load.units), None)
        if load is None:
            return False
        self._write(load, now_s)
        request_id = load.spec.request_id
        self._loads[request_id] = self._loads.pop(request_id)  # To the end of the order of turns.
        return True

    def _write(self, load: _Load, now_s: float) -> None:
        """Copy one chunk of a load's next unit."""
        number, lease = load.units[0]
        spec, layout = load.spec, self._context.io.layout
        first = (spec.first_unit + number) * self._context.unit_rows
        end = min(
            load.next_row + self._context.chunk_rows, first + self._context.unit_rows, spec.end_row
        )
        rows = lease.value[CHECKSUM_BYTES:].reshape(self._context.unit_rows, layout.row_bytes)
        wanted = rows[load.next_row - first : end - first]
        table = only_kv_group(spec.block_ids)
        self._context.io.write_rows(spec.lane, table, load.next_row, wanted)
        load.next_row = end
        load.progress_s = load.last_s = now_s
        if load.first_s is None:
            load.first_s = now_s
        if end in {first + self._context.unit_rows, spec.end_row}:
            load.units.popleft()
            load.num_written += 1
            self._release(load, lease)

    def fetch(self) -> None:
        """Request the next units, for the loads in the order of their turns."""
        room = max(_UNITS_AHEAD, self._context.config.window_bytes // self._context.unit_bytes)
        room -= sum(load.num_ahead for load in self._loads.values())
        for load in self._loads.values():
            keys = load.spec.keys[load.num_asked : load.num_units][: max(0, room)]
            if keys:
                job = FetchJob(load, load.num_asked, keys, self._context.unit_bytes)
                load.num_asked += len(keys)
                load.jobs.append(job)
                room -= len(keys)
                self._context.executor.submit(job)
