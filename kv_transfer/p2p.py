"""Point-to-point connector: one producer streams one request's blocks to one consumer.

``P2PConnectorScheduler`` decides which requests transfer, and with which blocks. Its worker side is
in ``p2p_worker``. Pure: neither side knows which transport carries the bytes.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kv_transfer.connector import (
    ConnectorSettings,
    LoadSpec,
    SaveProgress,
    TransferRequest,
    TransferResults,
    TransportFactory,
)
from kv_transfer.dtypes import acceptable_layouts
from kv_transfer.errors import LayoutMismatchError, TransferError
from kv_transfer.layout import ROW_TOKENS, KVLayout, RowLayout, join_layouts
from kv_transfer.p2p_worker import P2PConnectorWorker, P2PMeta
from kv_transfer.ticket import Role, Ticket, check_ticket


@dataclass(slots=True, eq=False)
class _Transfer:
    ticket: Ticket
    sealed: bytes
    role: Role
    num_saved_tokens: int = 0
    is_loading: bool = False
    is_lent: bool = False
    """The request keeps running: KV of blocks that it loses is not computed again here."""


class P2PConnectorScheduler:
    """Scheduler side of the point-to-point connector (see ``KVConnectorScheduler``).

    Owner: the engine's core thread.
    """

    def __init__(self, settings: ConnectorSettings, layout: RowLayout) -> None:
        self._incarnation = settings.incarnation
        self._keys = settings.keys
        self._unix_now_s = settings.unix_now_s
        self._layout = layout
        self._own_hash = layout.content_hash()
        self._layout_hashes = frozenset(acceptable_layouts(layout, settings.accept_dtypes))
        self._transfers: dict[str, _Transfer] = {}
        self._offers: list[Ticket] = []
        self._lent: list[SaveProgress] = []
        self._loads: dict[str, LoadSpec] = {}
        self._preempted: list[str] = []
        self._cancels: list[str] = []

    def __repr__(self) -> str:
        """Show the transfers in flight."""
        inflight = {request_id: x.role for request_id, x in self._transfers.items()}
        return f"P2PConnectorScheduler({inflight}, cancels={self._cancels})"

    @property
    def num_inflight(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def on_new_request(self, request: TransferRequest, now_s: float) -> None:
        """Record a request that brings a ticket."""
        if not request.ticket:
            return
        self._begin(request)

    def lend(self, request: TransferRequest, lent: SaveProgress, now_s: float) -> None:
        """Offer the full blocks of a request that keeps running here."""
        transfer = self._begin(request, only_role="producer")
        transfer.is_lent = True
        num_tokens = transfer.ticket.num_tokens
        is_behind = any(
            group.first_row(num_tokens) * ROW_TOKENS < first
            for group, first in zip(self._layout.groups, lent.first_positions, strict=False)
        )
        if is_behind or num_tokens > lent.num_computed_tokens:
            self.cancel(request.request_id)
            return
        transfer.num_saved_tokens = lent.num_computed_tokens
        self._lent.append(lent)

    def _begin(self, request: TransferRequest, only_role: Role | None = None) -> _Transfer:
        """Open a ticket and start its transfer, only in ``only_role`` if that is given."""
        request_id, num_tokens = request.request_id, len(request.prompt_token_ids)
        ticket = self._keys.unseal(request.ticket, self._unix_now_s())
        role = check_ticket(ticket, self._incarnation, self._layout_hashes)
        if only_role not in {None, role}:
            raise TransferError(
                f"the ticket of request {ticket.request_id} makes this engine its {role}, and only "
                f"its producer can lend"
            )
        if role == "producer" and ticket.layout_hash != self._own_hash:
            raise LayoutMismatchError(
                f"the ticket of request {request_id} is for KV layout {ticket.layout_hash}; this "
                f"producer has {self._own_hash}: mint a ticket from fresh snapshots"
            )
        if ticket.request_id != request_id or ticket.num_tokens > num_tokens:
            raise TransferError(
                f"request {request_id} has {num_tokens} tokens; its ticket is for "
                f"{ticket.num_tokens} tokens of request {ticket.request_id}"
            )
        known = request_id in self._transfers or any(
            x.ticket.transfer_id == ticket.transfer_id for x in self._transfers.values()
        )
        if known:
            raise TransferError(
                f"request {request_id} already has a transfer: use a new transfer_id for every "
                f"attempt, and only after the end of the previous one was reported"
            )
        transfer = self._transfers[request_id] = _Transfer(ticket, request.ticket, role)
        if role == "producer":
            self._offers.append(ticket)
        return transfer

    def get_num_new_matched_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix hit will be loaded."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.role == "producer":
            return 0, False
        num_external = max(0, transfer.ticket.num_tokens - num_computed_tokens)
        return num_external, num_external > 0

    def update_state_after_alloc(
        self,
        request_id: str,
        lane: int,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Record the blocks that were allocated for a load."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.role == "producer" or transfer.is_loading:
            return
        num_tokens = transfer.ticket.num_tokens
        tables = []
        for group, table in zip(self._layout.groups, block_ids, strict=True):
            num_blocks = group.num_blocks(num_tokens)
            if len(table) < num_blocks:
                raise TransferError(
                    f"request {request_id}: {len(table)} blocks allocated, {num_blocks} needed "
                    f"for the {num_tokens} tokens of its ticket"
                )
            tables.append(tuple(table[:num_blocks]))
        # Rounded down: a row that the local prefix covers in part is fetched whole.
        start_row = (num_tokens - num_external_tokens) // ROW_TOKENS
        start_row = max(start_row, self._layout.first_row(num_tokens))
        if num_external_tokens == 0:
            start_row = self._layout.num_rows(num_tokens)
        transfer.is_loading = True
        self._loads[request_id] = LoadSpec(
            transfer.ticket, transfer.sealed, lane, tuple(tables), start_row
        )

    def build_connector_meta(self, progress: Sequence[SaveProgress] = ()) -> P2PMeta:
        """Return everything that is new for the worker side, and clear it."""
        saves = self._lent.copy()
        for save in progress:
            transfer = self._transfers.get(save.request_id)
            if transfer is not None and transfer.role == "producer" and not transfer.is_lent:
                transfer.num_saved_tokens = save.num_computed_tokens
                saves.append(save)
        meta = P2PMeta(
            cancels=tuple(self._cancels),
            preempted=tuple(self._preempted),
            offers=tuple(self._offers),
            loads=tuple(self._loads.values()),
            saves=tuple(saves),
        )
        for pending in (self._cancels, self._preempted, self._offers, self._loads, self._lent):
            pending.clear()
        return meta

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Remove the transfers that ended."""
        for request_id in (*results.sent, *results.received, *results.failed):
            self._transfers.pop(request_id, None)
            self._loads.pop(request_id, None)
            if request_id in self._cancels:
                self._cancels.remove(request_id)
        return results

    def first_position_read(self, request_id: str) -> int | None:
        """Return the first position that is sent while its request decodes; None without one.

        A prefilling request needs no answer: its window has not left what its ticket is for.
        """
        transfer = self._transfers.get(request_id)
        if transfer is None or not transfer.is_lent:
            return None
        num_tokens = transfer.ticket.num_tokens
        # No window leaves a block of a group without one.
        windows = [group for group in self._layout.groups if group.window is not None]
        return min((x.first_row(num_tokens) for x in windows), default=0) * ROW_TOKENS

    def request_preempted(self, request_id: str) -> None:
        """Stop reading a producing request's blocks: they are about to be reused."""
        transfer = self._transfers.get(request_id)
        if transfer is not None and transfer.is_lent:
            self.cancel(request_id)
        elif transfer is not None and transfer.role == "producer":
            transfer.num_saved_tokens = 0
            self._preempted.append(request_id)

    def request_finished(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether the blocks of a finished request must stay allocated."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return False
        if transfer.role == "consumer" or transfer.num_saved_tokens < transfer.ticket.num_tokens:
            self.cancel(request_id)
        return True

    def cancel(self, request_id: str) -> None:
        """End a request's transfer in either role."""
        if request_id in self._transfers and request_id not in self._cancels:
            self._cancels.append(request_id)

    def has_pending_work(self) -> bool:
        """Return whether a step is needed to pass something to the worker side."""
        return bool(self._cancels or self._preempted or self._offers or self._loads)


class P2PConnector:
    """Built-in connector ``"p2p"`` (see ``KVConnector``)."""

    def create_scheduler(
        self, settings: ConnectorSettings, layouts: Sequence[KVLayout]
    ) -> P2PConnectorScheduler:
        """Make the scheduler side of one engine."""
        return P2PConnectorScheduler(settings, join_layouts(layouts))

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> P2PConnectorWorker:
        """Make the worker side of one engine, over ZMQ unless its settings name another transport.

        The transport is imported by name, so that the scheduler side stays free of sockets.
        """
        make_transport = settings.make_transport
        if make_transport is None:
            module = importlib.import_module("kv_transfer.transports.zmq")
            make_transport = cast("TransportFactory", module.ZmqTransport)
        return P2PConnectorWorker(settings, notify, make_transport)
