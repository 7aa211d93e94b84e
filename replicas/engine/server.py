"""An engine as its clients see it: greetings and messages in, frames with events and snapshots out.

Owner: the engine's core thread. It knows clients by their ids and reads no clock: the engine
process puts sockets and threads around it, the simulator a virtual network and virtual time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.connector import only_kv_group
from kv_transfer.curve import server_public_key
from replicas.messages import (
    PROTOCOL_VERSION,
    EngineDescription,
    EngineFrame,
    Hello,
    NotGreeted,
    Refused,
)

if TYPE_CHECKING:
    from replicas.engine.core import EngineCore
    from replicas.messages import ClientMessage, WireEvent

logger = logging.getLogger(__name__)

SNAPSHOT_S = 0.01
"""Clients without outputs in a step get a changed snapshot after at most this long."""

Frames = list[tuple[bytes, EngineFrame]]
"""Frames to send, each with its client, in order."""


class EngineServer:
    """Serves the clients of one engine core; see the module docstring.

    Args:
        core: The engine.
        incarnation: Random id of this start of the engine.
    """

    def __init__(self, core: EngineCore, incarnation: str) -> None:
        self.core = core
        self._incarnation = incarnation
        # Clients, and which of them have not had the latest snapshot. Dictionaries, not sets:
        # frames leave in an order that does not depend on hashes.
        self._clients: dict[bytes, None] = {}
        self._behind: dict[bytes, None] = {}
        self._snapshot = core.snapshot(0)
        self._flushed_s = 0.0
        self._frames: Frames = []
        # Who spoke without having been greeted, since the last frames.
        self._strangers: dict[bytes, None] = {}

    def take(self, client: bytes, message: ClientMessage, now_s: float) -> None:
        """Handle one message; who was never greeted, or given up, is told so unless it greets."""
        if isinstance(message, Hello):
            self._greet(client, message)
        elif client in self._clients:
            self.core.handle(client, message, now_s)
        else:
            self._strangers[client] = None

    def take_unreadable(self, client: bytes, request_id: str, problem: str) -> None:
        """Refuse a request that nobody can read."""
        if client in self._clients:
            self._add_frame(client, [Refused(request_id, "invalid", problem)])
        else:
            self._strangers[client] = None

    def client_gone(self, client: bytes) -> None:
        """Drop a client that cannot be reached, and all that it asked for."""
        for clients in (self._clients, self._behind, self._strangers):
            clients.pop(client, None)
        # Whoever gets a frame is a client again, to those who send heartbeats.
        self._frames = [frame for frame in self._frames if frame[0] != client]
        num_dropped = self.core.client_gone(client)
        if num_dropped:
            logger.warning("client %s is gone: dropped %d", client.hex(), num_dropped)

    def drain(self) -> None:
        """Refuse every new request from now on; what runs goes on."""
        self.core.drain()

    @property
    def is_drained(self) -> bool:
        """Whether it refuses new requests, has none left, and has lent no block to a transfer."""
        return self._snapshot.draining and self.core.num_live == 0

    @property
    def clients(self) -> list[bytes]:
        """Whoever it serves, and whoever the core still has a request of."""
        return [*self._clients, *self.core.clients]

    def frames(self, now_s: float) -> Frames:
        """Take what is to be sent now: every client's events, and the snapshot where it is due."""
        if self._renew_snapshot():
            self._behind = dict.fromkeys(self._clients)
        for client, events in self.core.take_events().items():
            self._add_frame(client, events)
        for client in self._strangers:
            self._frames.append((client, EngineFrame(self._incarnation, [NotGreeted()])))
        self._strangers.clear()
        # The same sum as in `next_deadline_s`: rounded otherwise, a deadline would not be one.
        if self._behind and now_s >= self._flushed_s + SNAPSHOT_S:
            for client in list(self._behind):
                self._add_frame(client, [])
            self._flushed_s = now_s
        frames, self._frames = self._frames, []
        return frames

    def next_deadline_s(self) -> float | None:
        """When a step or a snapshot is due although no message comes; None if never."""
        deadline_s = self.core.next_deadline_s()
        if not self._behind:
            return deadline_s
        flush_s = self._flushed_s + SNAPSHOT_S
        return flush_s if deadline_s is None else min(deadline_s, flush_s)

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            logger.error(
                "client %s speaks protocol %d, this engine %d: run one version everywhere",
                client.hex(), hello.protocol_version, PROTOCOL_VERSION,
            )  # fmt: skip
            return
        self._strangers.pop(client, None)
        self._clients[client] = self._behind[client] = None
        self._add_frame(client, [])

    def _add_frame(self, client: bytes, events: list[WireEvent]) -> None:
        """Queue a frame, with the snapshot if the client has not had this one."""
        snapshot = self._snapshot if client in self._behind else None
        self._behind.pop(client, None)
        self._frames.append((client, EngineFrame(self._incarnation, events, snapshot)))

    def _renew_snapshot(self) -> bool:
        """Take a new snapshot; False if nothing has changed but how many steps there were."""
        old = self._snapshot
        new = self.core.snapshot(old.seq + 1)
        unchanged = msgspec.structs.replace(
            new, seq=old.seq, num_steps=old.num_steps, step_s=old.step_s
        )
        if unchanged == old:
            return False
        self._snapshot = new
        return True


def describe(
    core: EngineCore, incarnation: str, input_endpoint: str, output_endpoint: str, pid: int
) -> EngineDescription:
    """What clients, routers and tickets have to know of a started engine.

    Raises:
        ServerKeyError: It was started without a secret.
    """
    return EngineDescription(
        incarnation=incarnation,
        public_key=server_public_key(core.config.keys, incarnation),
        input_endpoint=input_endpoint,
        output_endpoint=output_endpoint,
        kv_endpoints=core.kv_endpoints,
        kv_layout_hash=only_kv_group(core.kv_layouts).content_hash() if core.kv_layouts else None,
        kv_groups=core.facts.kv_groups,
        model=core.config.model,
        max_model_len=core.max_model_len,
        vocab_size=core.facts.vocab_size,
        eos_token_ids=core.facts.eos_token_ids,
        dp_groups=core.config.tt_data_parallel,
        slots_per_group=core.config.slots_per_group,
        max_num_batched_tokens=core.config.max_num_batched_tokens,
        pid=pid,
    )
