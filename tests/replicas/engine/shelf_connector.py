"""A third party's KV connector: it keeps prompts on a shelf, and records every call.

Whole blocks of a prompt are read after its last chunk, and written for the next request with the
same beginning. Every copy ends within its step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_transfer.connector import (
    ConnectorMeta,
    TransferInfo,
    TransferResults,
    TransferStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import (
        BlockTables,
        ConnectorSettings,
        KVConnectorScheduler,
        KVConnectorWorker,
        KVDeviceIO,
        SaveProgress,
        TransferRequest,
    )
    from kv_transfer.layout import KVLayout

calls: list[tuple[Any, ...]] = []
"""Names of the calls, in order, each with its relevant arguments."""
shelf: dict[tuple[object, ...], Any] = {}
"""Rows of KV by layout and salt, and token ids."""


class ShelfMeta(ConnectorMeta, frozen=True):
    """The scheduler side's message: (request, key, lane, blocks, tokens), each way."""

    loads: tuple[tuple[Any, ...], ...] = ()
    saves: tuple[tuple[Any, ...], ...] = ()


class ShelfScheduler:
    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._requests: dict[str, TransferRequest] = {}
        self._loads: list[tuple[Any, ...]] = []
        self._inflight: set[str] = set()

    def _key(self, request_id: str) -> tuple[object, ...]:
        request = self._requests[request_id]
        size = self._layout.block_size
        whole = (len(request.prompt_token_ids) - 1) // size * size
        root = (self._layout.content_hash(), request.cache_salt)
        return root, *request.prompt_token_ids[:whole]

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        calls.append(("on_new_request", request.request_id))
        self._requests[request.request_id] = request

    def lend(self, request: TransferRequest, lent: SaveProgress, now_s: float) -> None:
        raise AssertionError("nobody fetches from a shelf")

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        calls.append(("get_num_new_matched_tokens", request_id, num_computed_tokens))
        key = self._key(request_id)
        num = max(0, len(key) - 1 - num_computed_tokens) if key in shelf else 0
        return num, num > 0

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        calls.append(("update_state_after_alloc", request_id, num_external_tokens))
        self._loads.append((request_id, self._key(request_id), lane, tuple(map(tuple, block_ids))))
        self._inflight.add(request_id)

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> ShelfMeta:
        calls.append(("build_connector_meta", [p.num_computed_tokens for p in progress]))
        saves = []
        for save in progress:
            key = self._key(save.request_id)
            if save.num_computed_tokens >= len(key) - 1 > 0 and key not in shelf:
                saves.append((save.request_id, key, save.lane, save.block_ids))
        loads, self._loads = self._loads, []
        return ShelfMeta(tuple(loads), tuple(saves))

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        calls.append(("update_connector_output",))
        self._inflight -= results.received
        return results

    def first_position_read(self, request_id: str) -> int | None:
        return None

    def request_preempted(self, request_id: str) -> None:
        calls.append(("request_preempted", request_id))

    def request_finished(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        calls.append(("request_finished", request_id))
        del self._requests[request_id]
        return request_id in self._inflight

    def cancel(self, request_id: str) -> None:
        calls.append(("cancel", request_id))

    def has_pending_work(self) -> bool:
        return bool(self._loads)


class ShelfWorker:
    endpoints = ("tcp://127.0.0.1:1",)

    def __init__(self) -> None:
        self._io: KVDeviceIO | None = None
        self._received: set[str] = set()

    def _move(self, key: tuple[object, ...], lane: int, tables: BlockTables) -> None:
        assert self._io is not None
        [block_ids] = tables
        num_rows = self._io.layout.num_rows(len(key) - 1)
        if key in shelf:
            self._io.write_rows(lane, block_ids, 0, shelf[key])
        else:
            shelf[key] = self._io.read_rows(lane, block_ids, 0, num_rows)

    def register_kv_caches(self, ios: Sequence[KVDeviceIO]) -> None:
        calls.append(("register_kv_caches",))
        [self._io] = ios

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        calls.append(("start_load_kv",))
        assert isinstance(meta, ShelfMeta)
        for request_id, key, lane, block_ids in meta.loads:
            self._move(key, lane, block_ids)
            self._received.add(request_id)

    def wait_for_layer_load(self, layer: int) -> None:
        calls.append(("wait_for_layer_load", layer))

    def save_kv_layer(self, layer: int) -> None:
        calls.append(("save_kv_layer", layer))

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        calls.append(("mark_ready",))
        assert isinstance(meta, ShelfMeta)
        for _request_id, key, lane, block_ids in meta.saves:
            self._move(key, lane, block_ids)

    def wait_for_save(self) -> None:
        calls.append(("wait_for_save",))

    def get_transfer_results(self, now_s: float) -> TransferResults:
        calls.append(("get_transfer_results",))
        received, self._received = frozenset(self._received), set()
        return TransferResults(received=received)

    def stats(self, now_s: float) -> TransferStats:
        return TransferStats(num_inflight_loads=len(self._received), num_reserved_blocks=7)

    def transfers(self, now_s: float) -> list[TransferInfo]:
        return [
            TransferInfo(
                request_id="r", role="consumer", peer="", path="shelf", state="waiting",
                total_rows=4, ready_rows=4, done_rows=1, num_blocks=4, age_s=now_s,
            )
        ]  # fmt: skip

    def close(self, deadline_s: float) -> None:
        calls.append(("close",))


class ShelfConnector:
    """See the module docstring."""

    def create_scheduler(
        self, settings: ConnectorSettings, layouts: Sequence[KVLayout]
    ) -> KVConnectorScheduler:
        return ShelfScheduler(*layouts)

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> KVConnectorWorker:
        return ShelfWorker()


SHELVES = f"{__name__}:ShelfConnector"
