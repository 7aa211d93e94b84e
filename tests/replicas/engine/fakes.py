"""Requests, and a KV connector without bytes, for tests of the pure engine parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from kv_transfer.connector import (
    BlockTables,
    ConnectorMeta,
    SaveProgress,
    TransferRequest,
    TransferResults,
)
from kv_transfer.errors import TicketError
from kv_transfer.keys import KeyRing
from kv_transfer.ticket import Ticket
from replicas.config import EngineConfig
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import KVPlace, Sequence
from replicas.engine.step import StepResult
from replicas.messages import EngineRequest, RequestMode
from replicas.sampling_params import SamplingParams
from tests.kv_groups import one_kv_group

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from replicas.kv_groups import KVGroup

EOS = 0
KEYS = KeyRing((b"a secret of this cluster's router",))
PREFIX_CACHE_KEY = b"of the tests' prefix caches"
FOREVER_MS = 1 << 52
"""An expiry that no clock of a test reaches."""


def make_config(**changes: object) -> EngineConfig:
    """An engine of one group with four slots and blocks of four tokens; every choice is made."""
    settings: dict[str, object] = {
        "model": "/none",
        "max_batch_size": 4,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "mixed_batches": True,
        "reservation_timeout_s": 10.0,
    }
    config = EngineConfig(**{**settings, **changes})
    config.validate()
    return config


def scheduler_of(
    num_blocks: int = 9,
    *,
    kv_groups: SequenceOf[KVGroup] | None = None,
    max_model_len: int = 32,
    connector: FakeConnector | None = None,
    resumes_prefill: bool = True,
    chunk_alignment: int = 1,
    **changes: object,
) -> Scheduler:
    """A scheduler with so many blocks, or with these KV groups; changes are those of its config."""
    config = make_config(**changes)
    return Scheduler(
        config,
        kv_groups=kv_groups or one_kv_group(num_blocks, config.block_size),
        prefix_cache_key=PREFIX_CACHE_KEY,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        connector=connector,
        resumes_prefill=resumes_prefill,
        chunk_alignment=chunk_alignment,
    )


def make_sequence(
    request_id: str,
    prompt: SequenceOf[int],
    *,
    mode: RequestMode = "local",
    dp_group: int = -1,
    client: bytes = b"client",
    cache_salt: str = "",
    priority: int = 0,
    output: SequenceOf[int] = (),
    **sampling: object,
) -> Sequence:
    """A new sequence, greedy unless told otherwise; one to prefill brings a ticket.

    With `output` another engine has begun to decode it.
    """
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling})
    request = EngineRequest(request_id, list(prompt), params, cache_salt, priority=priority)
    ticket = make_ticket(request_id, len(prompt), producer="here") if mode == "prefill" else b""
    transfer = TransferRequest(request_id, list(prompt), ticket, cache_salt)
    token_ids = [*prompt, *output]
    return Sequence(request, mode, client, token_ids, place=KVPlace(dp_group), transfer=transfer)


def make_siblings(seq: Sequence) -> list[Sequence]:
    """The other choices of a request, with the same output so far."""
    return [
        Sequence(
            seq.request,
            seq.mode,
            seq.client,
            [*seq.token_ids],
            place=KVPlace(dp_group=seq.place.dp_group),
            choice=choice,
            parent=seq,
        )
        for choice in range(1, seq.request.sampling.n)
    ]


def make_ticket(
    request_id: str, num_tokens: int, epoch: int = 0, *, producer: str = "there"
) -> bytes:
    """A sealed ticket; `FakeConnector` is `here`."""
    ticket = Ticket(
        transfer_id=request_id.encode().ljust(16, b".")[:15] + bytes([epoch % 256]),
        request_id=request_id,
        epoch=epoch,
        producer_endpoints=("tcp://127.0.0.1:1",),
        producer_incarnation=producer,
        consumer="there" if producer == "here" else "here",
        num_tokens=num_tokens,
        layout_hash="0" * 32,
        expires_ms=FOREVER_MS,
    )
    return KEYS.seal(ticket)


@dataclass
class FakeTransfer:
    """A transfer that has not ended: to another engine, or from one, or from a store.

    Attributes:
        request_id: The request.
        num_tokens: Where it ends, counted from the prompt's first token.
        is_load: Whether KV comes here.
        num_saved_tokens: Of what leaves: computed so far.
        lane: Of the blocks of a load.
        block_ids: Of a load, once it has some: for each KV group.
        start: First token that comes.
        lent: Of a sequence that keeps running here: the tokens whose KV is in `block_ids`.
    """

    request_id: str
    num_tokens: int
    is_load: bool
    num_saved_tokens: int = 0
    lane: int = -1
    block_ids: BlockTables = ()
    start: int = 0
    lent: tuple[int, ...] = ()


class FakeConnector:
    """Scheduler side of a connector whose transfers end when a test ends them.

    Args:
        block_sizes: Tokens per block of each KV group.
        kv_groups: The groups, if some of them may have windows.

    Attributes:
        transfers: Those that have not ended.
        pool: Leading tokens of requests without a ticket that a store has; None: not known yet.
        announced: Requests that were announced without a ticket.
        cancelled: Transfers that are to end.
        preempted: Requests that have lost their blocks.
        refuse: Why tickets are refused, if they are.
    """

    def __init__(self, *block_sizes: int, kv_groups: SequenceOf[KVGroup] = ()) -> None:
        self._block_sizes = block_sizes
        self._kv_groups = kv_groups
        self.transfers: dict[str, FakeTransfer] = {}
        self.pool: dict[str, int | None] = {}
        self.announced: list[str] = []
        self.cancelled: set[str] = set()
        self.preempted: list[str] = []
        self.refuse: str | None = None
        self._starts: dict[str, int] = {}

    @property
    def num_inflight(self) -> int:
        return len(self.transfers)

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        request_id = request.request_id
        assert request_id not in self.transfers, f"{request_id} already has a transfer"
        if not request.ticket:
            self.announced.append(request_id)
            return
        if self.refuse is not None:
            raise TicketError(self.refuse)
        ticket = KEYS.unseal(request.ticket, now_s)
        is_load = ticket.consumer == "here"
        self.transfers[request_id] = FakeTransfer(request_id, ticket.num_tokens, is_load)

    def lend(self, request: TransferRequest, lent: SaveProgress, now_s: float) -> None:
        request_id, num_here = request.request_id, lent.num_computed_tokens
        assert request_id == lent.request_id
        assert request_id not in self.transfers, f"{request_id} already has a transfer"
        ticket = KEYS.unseal(request.ticket, now_s)
        assert ticket.producer_incarnation == "here"
        self.transfers[request_id] = FakeTransfer(
            request_id, ticket.num_tokens, is_load=False, num_saved_tokens=num_here,
            lane=lent.lane, block_ids=lent.block_ids,
            lent=tuple(request.prompt_token_ids[: ticket.num_tokens]),
        )  # fmt: skip
        is_behind = any(
            kv_group.first_position_moved(ticket.num_tokens) < first
            for kv_group, first in zip(self._kv_groups, lent.first_positions, strict=False)
        )
        if is_behind or ticket.num_tokens > num_here:
            self.cancelled.add(request_id)

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        transfer = self.transfers.get(request_id)
        if transfer is None or request_id in self.pool:
            end = self.pool.get(request_id, 0)
        else:
            end = transfer.num_tokens if transfer.is_load else 0
        if end is None:
            return None, True
        self._starts[request_id] = num_computed_tokens
        return max(0, end - num_computed_tokens), end > num_computed_tokens

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: SequenceOf[SequenceOf[int]],
        num_external_tokens: int,
    ) -> None:
        start = self._starts.pop(request_id)
        end = start + num_external_tokens
        if request_id not in self.transfers:
            self.transfers[request_id] = FakeTransfer(request_id, end, is_load=True)
        transfer = self.transfers[request_id]
        transfer.lane, transfer.start, transfer.num_tokens = lane, start, end
        transfer.block_ids = tuple(
            tuple(table[: -(-end // size)])
            for table, size in zip(block_ids, self._block_sizes, strict=True)
        )

    def build_connector_meta(self, progress: SequenceOf[SaveProgress] = ()) -> ConnectorMeta:
        for save in progress:
            if save.request_id in self.transfers and not self.transfers[save.request_id].lent:
                self.transfers[save.request_id].num_saved_tokens = save.num_computed_tokens
        return ConnectorMeta()

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        for request_id in (*results.sent, *results.received, *results.failed):
            del self.transfers[request_id]
            self.cancelled.discard(request_id)
        return results

    def first_position_read(self, request_id: str) -> int | None:
        transfer = self.transfers.get(request_id)
        return 0 if transfer is not None and transfer.lent else None

    def request_preempted(self, request_id: str) -> None:
        if request_id in self.transfers and self.transfers[request_id].lent:
            self.cancelled.add(request_id)
        elif request_id in self.transfers:
            self.transfers[request_id].num_saved_tokens = 0
            self.preempted.append(request_id)

    def request_finished(self, request_id: str, block_ids: SequenceOf[SequenceOf[int]]) -> bool:
        self.pool.pop(request_id, None)
        transfer = self.transfers.get(request_id)
        if transfer is None:
            return False
        if transfer.is_load or transfer.num_saved_tokens < transfer.num_tokens:
            self.cancelled.add(request_id)
        return True

    def cancel(self, request_id: str) -> None:
        if self.pool.get(request_id, 0) is None:
            self.pool[request_id] = 0
        if request_id in self.transfers:
            self.cancelled.add(request_id)

    def has_pending_work(self) -> bool:
        return bool(self.cancelled)


def result_of(
    runs: SequenceOf[SequenceOf[int] | int | None], num_drafts: SequenceOf[int] = ()
) -> StepResult:
    """A step's result with a run or a token for each row, None where a prompt is not complete."""
    lists = [[] if run is None else [run] if isinstance(run, int) else list(run) for run in runs]
    counts = [len(run) for run in lists]
    return StepResult(
        list(chain.from_iterable(lists)),
        [0.0],
        counts=[] if set(counts) == {1} else counts,
        num_drafts=list(num_drafts),
    )
