"""An engine without a model for connectors with a pool: real KV memory, and a step loop.

KV is a function of the tokens up to and including a row, as in a model, so that what a load brought
can be compared with what computing would have given. Blocks have owners: touching one that is not
the request's fails.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_transfer.connector import (
    Failure,
    KVConnectorScheduler,
    KVConnectorWorker,
    SaveProgress,
    TransferRequest,
)
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import ROW_TOKENS, KVLayout

LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=2,
    head_dim=2,
    block_size=32,
    dtype="float32",
    rope="hf",
    model_fingerprint="fake",
)


def layout_of(block_size: int) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, block_size=block_size)


def kv_rows(token_ids: Sequence[int], first_row: int, num_rows: int) -> NDArray[np.uint8]:
    """KV that a model would compute for whole rows of a prompt."""
    rows = []
    for row in range(first_row, first_row + num_rows):
        prefix = np.asarray(token_ids[: (row + 1) * ROW_TOKENS], np.int32)
        assert len(prefix) == (row + 1) * ROW_TOKENS
        seed = xxhash.xxh3_64_intdigest(prefix.tobytes())
        rows.append(np.random.default_rng(seed).integers(0, 256, LAYOUT.row_bytes, np.uint8))
    return np.array(rows, np.uint8).reshape(num_rows, LAYOUT.row_bytes)


class PoolIO:
    """KV memory of one lane whose blocks belong to requests."""

    host_blocks = None
    shared_region = None
    region_layout = None

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        shape = (num_blocks, layout.piece_bytes)
        pieces = [np.full(shape, 0xEE, np.uint8) for _ in range(layout.num_pieces)]
        self.blocks = HostBlocks(layout, pieces)
        self.pieces = pieces
        self.moves_whole_blocks = True
        """True if any other access is an error, as it would be inefficient on a device."""
        self.readable: dict[int, str] = {}
        """Blocks that may be read, with their request."""
        self.writable: dict[int, str] = {}
        """Blocks that a load may write."""

    def _touched(self, block_ids: Sequence[int], first_row: int, num_rows: int) -> Sequence[int]:
        per_block = self.layout.rows_per_block
        if self.moves_whole_blocks:
            assert first_row % per_block == 0
            assert num_rows % per_block == 0
        assert num_rows > 0
        return block_ids[first_row // per_block : -(-(first_row + num_rows) // per_block)]

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        owners = {self.readable.get(x) for x in self._touched(block_ids, first_row, num_rows)}
        assert None not in owners, "read of a block that is not to be read"
        assert len(owners) == 1
        return self.blocks.read_rows(block_ids, first_row, num_rows)

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        owners = {self.writable.get(x) for x in self._touched(block_ids, first_row, len(data))}
        assert None not in owners, "write to a block that is not to be written"
        assert len(owners) == 1
        self.blocks.write_rows(block_ids, first_row, data)

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with bytes that belong to no request."""
        for piece in self.pieces:
            piece[list(block_ids)] = 0xEE

    def is_wiped(self, block_ids: Sequence[int]) -> bool:
        return all((piece[list(block_ids)] == 0xEE).all() for piece in self.pieces)


@dataclass(eq=False)
class Job:
    """One request inside the fake engine."""

    request_id: str
    token_ids: list[int]
    num_local: int = 0
    """Tokens that the local prefix cache holds, whole blocks."""
    num_decodes: int = 1
    """Steps that it still runs after its prompt is computed."""
    mode: str = "local"
    """local, producer or consumer; the latter two bring a ticket."""
    waits_for_pool: bool = True
    """True if the engine asks how much there is to load before the request runs."""
    state: str = "waiting"
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_loaded: list[int] = field(default_factory=list)
    """Tokens of every load that was received."""
    failures: list[Failure] = field(default_factory=list)
    asked: int = 0
    """Tokens of the load under way."""
    was_sent: bool = False


class PoolEngine:
    """Calls a connector as an engine's core does, one ``step`` at a time."""

    def __init__(
        self,
        scheduler: KVConnectorScheduler,
        worker: KVConnectorWorker,
        layout: KVLayout,
        clock: Callable[[], float],
        *,
        num_blocks: int = 64,
        chunk_tokens: int = 96,
        seed: int = 0,
    ) -> None:
        self.scheduler, self.worker, self.layout, self.clock = scheduler, worker, layout, clock
        self.io = PoolIO(layout, num_blocks)
        worker.register_kv_caches([self.io])
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.chunk_tokens = chunk_tokens
        self.dice = random.Random(seed)
        self.jobs: dict[str, Job] = {}
        self.held: dict[str, Job] = {}
        self.over: list[Job] = []

    # ---- what clients and the engine's scheduler do

    def submit(self, job: Job, cache_salt: str = "", ticket: bytes = b"") -> Job:
        request = TransferRequest(job.request_id, job.token_ids, ticket, cache_salt)
        self.scheduler.on_new_request(request, self.clock())
        self.jobs[job.request_id] = job
        return job

    def lend(self, job: Job, num_tokens: int, ticket: bytes) -> None:
        """Let another engine fetch what a request has computed here, while it keeps running."""
        request = TransferRequest(job.request_id, job.token_ids, ticket)
        lent = SaveProgress(job.request_id, 0, (tuple(job.block_ids),), num_tokens)
        self.scheduler.lend(request, lent, self.clock())
        job.mode = "producer"

    def abort(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is not None:
            self.scheduler.cancel(request_id)
            self._finish(job)
        elif request_id in self.held:
            self.scheduler.cancel(request_id)

    def preempt(self, request_id: str) -> None:
        """Take the blocks of a request that runs or loads."""
        job = self.jobs[request_id]
        self.scheduler.request_preempted(request_id)
        if job.state == "loading":
            # Nothing may be written any more; its end has yet to be reported.
            job.asked = -1
        self._free(job)
        job.state, job.num_computed, job.num_local = "waiting", 0, 0
        if job.mode == "consumer":
            # Its KV came once; from here on it is a request like others.
            job.mode = "local"

    def step(self) -> bool:
        """Make one step of the engine and return whether it brought news."""
        self._admit()
        progress = [x for x in map(self._plan, self.jobs.values()) if x is not None]
        meta = self.scheduler.build_connector_meta(progress)
        self.worker.start_load_kv(meta, self.clock())
        for save in progress:
            self._compute(self.jobs[save.request_id], save.num_computed_tokens)
        self.worker.mark_ready(meta, self.clock())
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(self.clock())
        for job in [x for x in self.jobs.values() if x.state == "running"]:
            self._advance(job)
        news, results = bool(results), self.scheduler.update_connector_output(results)
        for request_id in results.sent:
            self._sent(request_id)
        for request_id in results.received:
            self._received(request_id)
        for request_id, failure in results.failed.items():
            self._failed(request_id, failure)
        return news

    # ---- inside

    def _admit(self) -> None:
        for job in [x for x in self.jobs.values() if x.state == "waiting"]:
            if job.asked == -1:
                num_new, _ = self.scheduler.get_num_new_matched_tokens(job.request_id, 0)
                assert num_new is None, "a load started before the end of another was reported"
                continue
            num_new: int | None = 0
            if job.waits_for_pool:
                num_new, _ = self.scheduler.get_num_new_matched_tokens(
                    job.request_id, job.num_local
                )
            num_blocks = self.layout.num_blocks(len(job.token_ids))
            if num_new is None or num_blocks > len(self.free):
                continue
            if job.mode == "consumer":
                assert num_new + job.num_local == len(job.token_ids)
            else:
                assert num_new % self.layout.block_size == 0
                assert job.num_local + num_new < len(job.token_ids)
            self.dice.shuffle(self.free)
            job.block_ids = [self.free.pop() for _ in range(num_blocks)]
            assert self.io.is_wiped(job.block_ids), "a free block was written"
            num_cached = job.num_local // ROW_TOKENS
            if num_cached:
                rows = kv_rows(job.token_ids, 0, num_cached)
                self.io.blocks.write_rows(job.block_ids, 0, rows)
            job.num_computed = job.num_local
            self.scheduler.update_state_after_alloc(job.request_id, 0, [job.block_ids], num_new)
            if num_new or job.mode == "consumer":
                job.state, job.asked = "loading", num_new
                first = job.num_local // self.layout.block_size
                for block_id in job.block_ids[first:]:
                    self.io.writable[block_id] = job.request_id
            else:
                self._run(job)

    def _run(self, job: Job) -> None:
        job.state = "running"
        for block_id in job.block_ids:
            self.io.writable.pop(block_id, None)
            self.io.readable[block_id] = job.request_id

    def _plan(self, job: Job) -> SaveProgress | None:
        if job.state != "running" or job.num_computed >= len(job.token_ids):
            return None
        num_tokens = min(job.num_computed + self.chunk_tokens, len(job.token_ids))
        return SaveProgress(job.request_id, 0, (tuple(job.block_ids),), num_tokens)

    def _compute(self, job: Job, num_tokens: int) -> None:
        first, end = job.num_computed // ROW_TOKENS, num_tokens // ROW_TOKENS
        if end > first:
            rows = kv_rows(job.token_ids, first, end - first)
            self.io.blocks.write_rows(job.block_ids, first, rows)
        job.num_computed = num_tokens

    def _advance(self, job: Job) -> None:
        if job.num_computed < len(job.token_ids):
            return
        if job.num_decodes == 0:
            self._finish(job)
        job.num_decodes -= 1

    def _finish(self, job: Job) -> None:
        del self.jobs[job.request_id]
        self.over.append(job)
        state, job.state = job.state, "over"
        if self.scheduler.request_finished(job.request_id, [job.block_ids]):
            assert state != "waiting" or job.asked == -1 or job.mode != "local"
            self.held[job.request_id] = job
        else:
            assert state != "loading"
            self._free(job)

    def _sent(self, request_id: str) -> None:
        if request_id in self.held:
            job = self.held.pop(request_id)
            self._free(job)
        else:
            # The other engine has everything before it was computed here.
            job = self.jobs[request_id]
            assert job.mode == "producer"
        job.was_sent = True

    def _received(self, request_id: str) -> None:
        if request_id in self.held:
            self._free(self.held.pop(request_id))
            return
        job = self.jobs[request_id]
        assert job.state == "loading"
        job.num_loaded.append(job.asked)
        job.num_computed += job.asked
        job.asked = 0
        self.check(job)
        self._run(job)

    def _failed(self, request_id: str, failure: Failure) -> None:
        if request_id in self.held:
            self._free(self.held.pop(request_id))
            return
        job = self.jobs[request_id]
        assert job.state == "loading" or job.asked == -1 or job.mode == "producer"
        job.failures.append(failure)
        if job.state == "loading":
            assert failure.num_tokens in range(job.num_local + job.asked + 1)
            job.num_computed = max(job.num_local, failure.num_tokens)
            self.check(job)
            self._run(job)
        # The failure may be the consumer's, which no longer needs this prompt's KV.
        job.asked = 0

    def check(self, job: Job) -> None:
        """Compare computed whole rows with what a model would have computed."""
        num_rows = job.num_computed // ROW_TOKENS
        rows = self.io.blocks.read_rows(job.block_ids, 0, num_rows)
        assert (rows == kv_rows(job.token_ids, 0, num_rows)).all()

    def _free(self, job: Job) -> None:
        for block_id in job.block_ids:
            self.io.readable.pop(block_id, None)
            self.io.writable.pop(block_id, None)
        self.io.wipe(job.block_ids)
        self.free.extend(job.block_ids)
        job.block_ids = []

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not self.held

    def check_drained(self) -> None:
        """Assert that nothing is left of anything."""
        assert self.is_idle
        assert self.scheduler.num_inflight == 0
        assert not self.scheduler.has_pending_work()
        assert sorted(self.free) == list(range(self.num_blocks))
        assert not self.worker.transfers(self.clock())
        assert self.io.is_wiped(self.free)
