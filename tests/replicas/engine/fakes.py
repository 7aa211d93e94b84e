"""Requests, and a KV connector without bytes, for tests of the pure engine parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.connector import ConnectorMeta, SaveProgress, TransferResults
from kv_transfer.errors import TicketError
from kv_transfer.ticket import Ticket
from replicas.config import EngineConfig
from replicas.engine.sequence import Sequence
from replicas.messages import EngineRequest, RequestMode
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

EOS = 0


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


def make_sequence(
    request_id: str,
    prompt: SequenceOf[int],
    *,
    mode: RequestMode = "local",
    dp_group: int = -1,
    client: bytes = b"client",
    **sampling: object,
) -> Sequence:
    """A new sequence, greedy unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling})
    request = EngineRequest(request_id, list(prompt), params)
    return Sequence(request, mode, client, list(prompt), dp_group=dp_group)


def make_ticket(request_id: str, num_tokens: int, epoch: int = 0, **changes: object) -> Ticket:
    """A ticket from engine `prefill` to engine `decode`."""
    fields: dict[str, object] = {
        "transfer_id": request_id.encode().ljust(16, b".")[:15] + bytes([epoch % 256]),
        "request_id": request_id,
        "epoch": epoch,
        "producer_endpoint": "tcp://127.0.0.1:1",
        "producer_incarnation": "prefill",
        "consumer": "decode",
        "num_tokens": num_tokens,
        "layout_hash": "0" * 32,
    }
    return Ticket(**{**fields, **changes})


@dataclass
class FakeTransfer:
    """A transfer that has not ended; `block_ids` and `start_block` are set for a load only."""

    ticket: Ticket
    num_saved_tokens: int = 0
    lane: int = -1
    block_ids: tuple[int, ...] = ()
    start_block: int = 0

    @property
    def is_load(self) -> bool:
        return bool(self.block_ids)


class FakeConnector:
    """Scheduler side of a connector whose transfers end when a test says so."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.transfers: dict[str, FakeTransfer] = {}
        self.cancelled: set[str] = set()
        self.preempted: list[str] = []
        self.refuse: str | None = None

    @property
    def num_inflight(self) -> int:
        return len(self.transfers)

    def on_new_request(self, request_id: str, ticket: Ticket) -> None:
        if self.refuse is not None:
            raise TicketError(self.refuse)
        assert request_id not in self.transfers, f"{request_id} has a transfer already"
        self.transfers[request_id] = FakeTransfer(ticket)

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self.transfers[request_id].ticket.num_tokens
        return num_tokens - num_computed_tokens, num_tokens > num_computed_tokens

    def update_state_after_alloc(
        self, request_id: str, lane: int, block_ids: SequenceOf[int], num_external_tokens: int
    ) -> None:
        transfer = self.transfers[request_id]
        transfer.lane = lane
        num_blocks = -(-transfer.ticket.num_tokens // self._block_size)
        transfer.block_ids = tuple(block_ids[:num_blocks])
        transfer.start_block = (
            transfer.ticket.num_tokens - num_external_tokens
        ) // self._block_size

    def build_connector_meta(self, progress: SequenceOf[SaveProgress] = ()) -> ConnectorMeta:
        for save in progress:
            if save.request_id in self.transfers:
                self.transfers[save.request_id].num_saved_tokens = save.num_computed_tokens
        return ConnectorMeta(saves=tuple(progress))

    def update_connector_output(self, results: TransferResults) -> None:
        for request_id in (*results.sent, *results.received, *results.failed):
            del self.transfers[request_id]
            self.cancelled.discard(request_id)

    def request_preempted(self, request_id: str) -> None:
        if request_id in self.transfers:
            self.transfers[request_id].num_saved_tokens = 0
            self.preempted.append(request_id)

    def request_finished(self, request_id: str, block_ids: SequenceOf[int]) -> bool:
        transfer = self.transfers.get(request_id)
        if transfer is None:
            return False
        if transfer.is_load or transfer.num_saved_tokens < transfer.ticket.num_tokens:
            self.cancelled.add(request_id)
        return True

    def cancel(self, request_id: str) -> None:
        if request_id in self.transfers:
            self.cancelled.add(request_id)

    def has_pending_work(self) -> bool:
        return bool(self.cancelled)
