"""Pooled connector: prompts find the KV of their first units in a store that engines share.

``PooledConnectorScheduler`` names the units of a prompt by keys, asks which of them the pool has,
and decides which to load and which to save. Its worker side is in ``pooled_worker``. Pure: no I/O,
and no clock, since the worker side keeps the deadlines.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kv_transfer.block_hash import HASH_BYTES, extend_block_hashes, prefix_root
from kv_transfer.connector import (
    ConnectorSettings,
    SaveProgress,
    TransferRequest,
    TransferResults,
    only_kv_group,
)
from kv_transfer.errors import TransferError
from kv_transfer.layout import ROW_TOKENS, KVLayout
from kv_transfer.pooled_meta import (
    LookupSpec,
    PooledMeta,
    PooledResults,
    PoolLoadSpec,
    PoolSaveSpec,
)
from kv_transfer.pooled_worker import PooledConnectorWorker, require_store
from kv_transfer.store_thread import StoreThread

_UNIT_VERSION = 3
"""Rises when the bytes of a value, or the inputs of its key, change."""


def unit_keys(content_hash: str, request: TransferRequest, unit_tokens: int) -> tuple[bytes, ...]:
    """Return the keys of a prompt's whole units: equal keys mean equal KV, at any block size.

    Args:
        content_hash: ``KVLayout.content_hash()``, which covers model, dtype and byte order.
        request: The request; equal prompts share no key under two salts, adapters or images.
        unit_tokens: Tokens per unit.

    Returns:
        One 32-byte key per whole unit, each a hash of everything up to the end of its unit.
    """
    covered = msgspec.msgpack.encode((_UNIT_VERSION, unit_tokens, content_hash))
    # No secret: engines that share a pool need not share one. No collision is known.
    key = hashlib.blake2b(covered, digest_size=HASH_BYTES, person=b"ttserve kv root").digest()
    root = prefix_root(key, request.cache_salt, request.adapter, request.images)
    keys: list[bytes] = []
    extend_block_hashes(keys, request.prompt_token_ids, unit_tokens, root)
    return tuple(keys)


@dataclass(slots=True, eq=False)
class _PooledRequest:
    num_prompt_tokens: int
    keys: tuple[bytes, ...]
    lookup_timeout_s: float
    found: int | None = None
    """Leading tokens in the pool; None while the pool has not answered."""
    is_loading: bool = False
    """True from the allocation of blocks until results name the request."""
    is_cancelled: bool = False
    """True once the load under way was cancelled."""
    num_settled: int = 0
    """Leading units that are in the pool, or were passed to the worker side to be saved."""
    is_saving: bool = False
    """True while the worker side has not read all of the units passed to it."""
    first_unread: int = 0
    """While saving: the first unit that may not have been read."""
    is_finished: bool = False
    """True once the engine has finished it and keeps its blocks until results name it."""

    def num_loadable(self, block_size: int) -> int:
        """Return how many leading tokens the pool can give, in whole blocks."""
        # The last token is always computed here: its logits give the next one.
        num_whole = (self.num_prompt_tokens - 1) // block_size * block_size
        return min(self.found or 0, num_whole)

    @property
    def is_busy(self) -> bool:
        """True if the worker side has, or will get, work for it."""
        return (
            self.found is None
            or self.is_loading
            or self.is_saving
            or self.is_finished
            or self.num_settled < len(self.keys)
        )


class PooledConnectorScheduler:
    """Scheduler side of the pooled connector (see ``KVConnectorScheduler``).

    Every request whose prompt has a whole unit is looked up. Whole blocks of the units found are
    loaded, and units computed here are saved. A lookup is no transfer: its answer only says how
    much there is to load. Owner: the engine's core thread.

    Args:
        settings: The engine's settings.
        layout: The engine's KV layout.

    Raises:
        TransferError: When no store is set, or its units are no multiple of the block size.
    """

    def __init__(self, settings: ConnectorSettings, layout: KVLayout) -> None:
        store = require_store(settings)
        if store.unit_tokens % layout.block_size:
            raise TransferError(
                f"the KV store's unit_tokens ({store.unit_tokens}) is no multiple of block_size "
                f"({layout.block_size}), and only whole blocks can be loaded: change one of the two"
            )
        self._store = store
        self._layout = layout
        self._requests: dict[str, _PooledRequest] = {}
        self._drops: list[str] = []
        self._lookups: dict[str, LookupSpec] = {}
        self._loads: dict[str, PoolLoadSpec] = {}
        self._cancels: list[str] = []
        self._finished: list[str] = []

    def __repr__(self) -> str:
        """Show the loads in flight."""
        loading = [request_id for request_id, x in self._requests.items() if x.is_loading]
        return f"PooledConnectorScheduler(loading={loading}, cancels={self._cancels})"

    @property
    def num_inflight(self) -> int:
        """Requests for which the worker side has, or will get, work."""
        return sum(request.is_busy for request in self._requests.values())

    def on_new_request(
        self, request: TransferRequest, now_s: float, lookup_timeout_s: float | None = None
    ) -> None:
        """Look up a request's prompt.

        Args:
            request: The request, without a ticket.
            now_s: Monotonic clock.
            lookup_timeout_s: How long to wait for the pool's answer; the store's ``timeout_s`` by
                default.

        Raises:
            TransferError: When it brings a ticket, or an earlier request of this id has not ended.
        """
        request_id = request.request_id
        if request.ticket:
            raise TransferError(
                f"request {request_id} brings a ticket and kv_connector 'pooled' transfers nothing "
                f"between engines: set kv_connector to 'multi' or 'p2p'"
            )
        self.check_unused(request_id)
        self.drop_request(request_id)
        prompt, unit_tokens = request.prompt_token_ids, self._store.unit_tokens
        keys = unit_keys(self._layout.content_hash(), request, unit_tokens)
        if keys:
            timeout_s = self._store.timeout_s if lookup_timeout_s is None else lookup_timeout_s
            new = _PooledRequest(len(prompt), keys, timeout_s)
            self._requests[request_id] = new
            self._look_up(request_id, new)

    def lend(self, request: TransferRequest, lent: SaveProgress, now_s: float) -> None:
        """Refuse to lend: no engine fetches from this one.

        Raises:
            TransferError: Always.
        """
        raise TransferError(
            f"request {request.request_id} cannot be lent: kv_connector 'pooled' transfers nothing "
            f"between engines; set kv_connector to 'multi' or 'p2p'"
        )

    def check_unused(self, request_id: str) -> None:
        """Check that a new request may have this id.

        Raises:
            TransferError: When results have yet to name an earlier request of this id.
        """
        known = self._requests.get(request_id)
        if known is not None and (known.is_loading or known.is_finished):
            raise TransferError(
                f"request {request_id} already has a transfer: wait until its end was reported"
            )

    def is_loading(self, request_id: str) -> bool:
        """Return whether results have yet to name the end of a request's load."""
        request = self._requests.get(request_id)
        return request is not None and request.is_loading

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix hit will be loaded, in whole blocks."""
        request = self._requests.get(request_id)
        if request is None:
            return 0, False
        if request.found is None or request.is_cancelled:
            return None, True
        num_external = max(0, request.num_loadable(self._layout.block_size) - num_computed_tokens)
        return num_external, num_external > 0

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Record the blocks that were allocated for a load."""
        request = self._requests.get(request_id)
        if request is None or request.is_loading or num_external_tokens == 0:
            return
        end = request.num_loadable(self._layout.block_size)
        num_computed = end - num_external_tokens
        if not 0 <= num_computed < end:
            raise TransferError(
                f"request {request_id} is to load {num_external_tokens} tokens, and the pool has "
                f"{end} in whole blocks: pass what get_num_new_matched_tokens returned"
            )
        table = only_kv_group(block_ids)
        if len(table) < self._layout.num_blocks(end):
            raise TransferError(
                f"request {request_id}: {len(table)} blocks allocated, "
                f"{self._layout.num_blocks(end)} needed for {end} tokens from the pool"
            )
        unit_tokens = self._store.unit_tokens
        start_row = max(num_computed // ROW_TOKENS, self._layout.first_row(end))
        first_unit, stop_unit = start_row * ROW_TOKENS // unit_tokens, -(-end // unit_tokens)
        request.is_loading = True
        self._loads[request_id] = PoolLoadSpec(
            request_id,
            lane,
            (tuple(table),),
            first_unit,
            request.keys[first_unit:stop_unit],
            start_row,
            end // ROW_TOKENS,
        )

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> PooledMeta:
        """Return everything that is new for the worker side, and clear it."""
        saves = [spec for spec in map(self._save, progress) if spec is not None]
        meta = PooledMeta(
            drops=tuple(self._drops),
            lookups=tuple(self._lookups.values()),
            loads=tuple(self._loads.values()),
            cancels=tuple(self._cancels),
            saves=tuple(saves),
            finished=tuple(self._finished),
        )
        for pending in (self._drops, self._lookups, self._loads, self._cancels, self._finished):
            pending.clear()
        return meta

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Record the pool's answers, and remove the requests that ended."""
        for request_id, num_tokens in results.found.items():
            request = self._requests.get(request_id)
            if request is not None and request.found is None:
                request.found = num_tokens
                self._settle(request, num_tokens)
        if isinstance(results, PooledResults):
            for request_id in results.saved:
                self._end_saves(request_id)
        for request_id in results.received:
            self._end_load(request_id)
        for request_id, failure in results.failed.items():
            self._end_load(request_id, failure.num_tokens)
        for request_id in results.sent:
            request = self._requests.get(request_id)
            if request is not None and request.is_finished:
                del self._requests[request_id]
        return results

    def first_position_read(self, request_id: str) -> int | None:
        """Return the first position of a running request that has yet to be read; None: none."""
        request = self._requests.get(request_id)
        if request is None or not request.is_saving:
            return None
        return request.first_unread * self._store.unit_tokens

    def request_preempted(self, request_id: str) -> None:
        """Stop touching a request's blocks, look it up again, and start its saves again.

        A load under way is cancelled, and results say so.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.is_loading:
            self.cancel(request_id)
        else:
            self._drop(request_id, request)
            request.is_saving = False
            request.num_settled = 0
            self._look_up(request_id, request)

    def request_finished(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether the blocks must stay allocated: while a load writes or a save reads them.

        A load under way is cancelled by this call; saves are not.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.is_loading:
            self.cancel(request_id)
        elif request.is_saving:
            self._finished.append(request_id)
        else:
            self.drop_request(request_id)
            return False
        request.is_finished = True
        return True

    def cancel(self, request_id: str) -> None:
        """End a load, which results then name, or a lookup, after which there is nothing to load.

        Saves continue: the KV that they read is worth keeping, and they hold blocks for a step or
        two. So this does nothing to a finished request, whose end results will name in any case.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return
        if request.is_loading:
            if not request.is_cancelled:
                request.is_cancelled = True
                self._cancels.append(request_id)
        elif request.found is None:
            self._drop(request_id, request)
            request.found = 0

    def drop_request(self, request_id: str) -> None:
        """Stop the lookup and the saves of a request, whose blocks may be freed at once.

        Only for a request that is not being loaded; results no longer name it.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._drop(request_id, request)
            if request_id in self._finished:
                self._finished.remove(request_id)

    def has_pending_work(self) -> bool:
        """Return whether a step is needed to pass something to the worker side."""
        return bool(self._drops or self._lookups or self._loads or self._cancels or self._finished)

    # ---- helpers

    def _look_up(self, request_id: str, request: _PooledRequest) -> None:
        request.found = None
        self._lookups[request_id] = LookupSpec(request_id, request.keys, request.lookup_timeout_s)

    def _drop(self, request_id: str, request: _PooledRequest) -> None:
        """End the worker side's lookup and saves for a request, if there are any."""
        is_asked = self._lookups.pop(request_id, None) is None and request.found is None
        if is_asked or request.is_saving:
            self._drops.append(request_id)

    def _save(self, progress: SaveProgress) -> PoolSaveSpec | None:
        """Return the units of a request that became whole since the last call, or None."""
        request = self._requests.get(progress.request_id)
        if request is None or request.is_loading:
            return None
        first = request.num_settled
        self._settle(request, progress.num_computed_tokens)
        if request.num_settled == first:
            return None
        # Units whose beginning is behind the window are gone.
        gone = max(progress.first_positions, default=0)
        first = max(first, -(-gone // self._store.unit_tokens))
        if first >= request.num_settled:
            return None
        if not request.is_saving:
            request.is_saving, request.first_unread = True, first
        return PoolSaveSpec(
            progress.request_id,
            progress.lane,
            progress.block_ids,
            first,
            request.keys[first : request.num_settled],
        )

    def _settle(self, request: _PooledRequest, num_tokens: int) -> None:
        num_units = min(num_tokens // self._store.unit_tokens, len(request.keys))
        request.num_settled = max(request.num_settled, num_units)

    def _end_saves(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.is_saving = False

    def _end_load(self, request_id: str, num_verified_tokens: int | None = None) -> None:
        """Record that a load is over; one that failed is not tried again."""
        request = self._requests.get(request_id)
        if request is None or not request.is_loading:
            return
        request.is_loading = request.is_cancelled = False
        self._loads.pop(request_id, None)
        if request_id in self._cancels:
            self._cancels.remove(request_id)
        if request.is_finished:
            del self._requests[request_id]
        elif num_verified_tokens is not None:
            request.found = 0
            request.num_settled = num_verified_tokens // self._store.unit_tokens


class PooledConnector:
    """Built-in connector ``"pooled"`` (see ``KVConnector``)."""

    def create_scheduler(
        self, settings: ConnectorSettings, layouts: Sequence[KVLayout]
    ) -> PooledConnectorScheduler:
        """Make the scheduler side of one engine."""
        return PooledConnectorScheduler(settings, only_kv_group(layouts))

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> PooledConnectorWorker:
        """Make the worker side of one engine, with a thread for its store."""
        return PooledConnectorWorker(settings, notify, StoreThread)
