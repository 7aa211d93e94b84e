"""The engine as its clients see it: messages in, frames with events and snapshots out.

Reads no clock and no socket, so that the simulator runs it in virtual time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kv_transfer.curve import server_public_key
from kv_transfer.layout import join_layouts
from replicas.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineDescription,
    EngineFrame,
    Hello,
    NotGreeted,
    Refused,
)

if TYPE_CHECKING:
    from replicas.config import EngineConfig
    from replicas.engine.core import EngineCore
    from replicas.engine_process.parent import Incoming
    from replicas.messages import ClientMessage, KVEventBatch, UtilityResult, WireEvent

logger = logging.getLogger(__name__)

SNAPSHOT_S = 0.01
"""Seconds after which clients get a changed snapshot at the latest. Clients with outputs in a step
get it at once, unless only the number of free blocks has changed."""

GATHER_S = 0.002
"""Seconds for which an idle engine with lanes waits for more prompts."""

Frames = list[tuple[bytes, EngineFrame]]
"""Frames to send, each with its client, in order."""


class EngineServer:
    """One engine core with its clients, their snapshots and their followed prefix caches.

    Args:
        core: The engine.
        incarnation: Random id of this start of the engine.
    """

    def __init__(self, core: EngineCore, incarnation: str) -> None:
        self.core = core
        self._incarnation = incarnation
        # Clients, and those of them without the latest snapshot. Dictionaries instead of sets, so
        # that the order of frames does not depend on hashes.
        self._clients: dict[bytes, None] = {}
        self._behind: dict[bytes, None] = {}
        self._snapshot, self._state = core.snapshot(0), core.state()
        # Whether the number of free blocks has changed since the snapshot.
        self._is_stale = False
        # Clients that follow the prefix caches, with their unsent batches; None for a client that
        # needs a listing first.
        self._followers: dict[bytes, list[KVEventBatch] | None] = {}
        self._flushed_s = 0.0
        self._frames: Frames = []
        # Senders of messages without a Hello, since the last frames.
        self._unknown_senders: dict[bytes, None] = {}

    def take(self, client: bytes, message: ClientMessage, now_s: float) -> None:
        """Handle one message; a sender that has not said Hello gets `NotGreeted`."""
        if isinstance(message, Hello):
            self._greet(client, message)
        elif client in self._clients:
            self.core.handle(client, message, now_s)
        else:
            self._unknown_senders[client] = None

    def take_unreadable(self, client: bytes, request_id: str, problem: str) -> None:
        """Refuse a request that could not be decoded."""
        if client in self._clients:
            self._add_frame(client, [Refused(request_id, "invalid", problem)])
        else:
            self._unknown_senders[client] = None

    def answer(self, client: bytes, result: UtilityResult) -> None:
        """Answer a call that was made outside of the core, unless its client is gone."""
        if client in self._clients:
            self._add_frame(client, [result])

    def client_gone(self, client: bytes) -> None:
        """Drop a client that cannot be reached, and all its requests."""
        for clients in (self._clients, self._behind, self._unknown_senders):
            clients.pop(client, None)
        if client in self._followers:
            del self._followers[client]
            self.core.prefix_feed.follow(is_followed=bool(self._followers))
        # The sender counts every recipient of a frame as a client and sends it heartbeats.
        self._frames = [frame for frame in self._frames if frame[0] != client]
        num_dropped = self.core.client_gone(client)
        if num_dropped:
            logger.warning("client %s is gone: dropped its %d requests", client.hex(), num_dropped)

    @property
    def is_drained(self) -> bool:
        """Return whether the engine drains, has no request left and no block lent."""
        is_known = self._snapshot.draining and self.core.role_state.is_draining
        return is_known and self.core.num_live == 0

    @property
    def clients(self) -> list[bytes]:
        """Return the clients that have said Hello, and those with requests in the core."""
        return [*self._clients, *self.core.clients]

    def frames(self, now_s: float) -> Frames:
        """Remove and return the frames to send now: events, and the snapshot where it is due."""
        # The same sum as in `next_deadline_s`, so that rounding cannot make a deadline too early.
        is_due = now_s >= self._flushed_s + SNAPSHOT_S
        is_renewed = self._renew_snapshot(is_due=is_due)
        if is_renewed:
            self._behind = dict.fromkeys(self._clients)
        if self._followers:
            self._queue_kv_events()
        for client, events in self.core.take_events().items():
            self._add_frame(client, events)
        for client in self._unknown_senders:
            self._frames.append((client, EngineFrame(self._incarnation, [NotGreeted()])))
        self._unknown_senders.clear()
        if is_due and (is_renewed or self._is_late):
            waiting = (client for client, batches in self._followers.items() if batches)
            for client in dict.fromkeys((*self._behind, *waiting)):
                self._add_frame(client, [])
            self._flushed_s = now_s
        frames, self._frames = self._frames, []
        return frames

    def next_deadline_s(self) -> float | None:
        """Return when a step or a snapshot is due even if no message arrives; None if never."""
        deadline_s = self.core.next_deadline_s()
        if not self._is_late:
            return deadline_s
        flush_s = self._flushed_s + SNAPSHOT_S
        return flush_s if deadline_s is None else min(deadline_s, flush_s)

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            logger.error(
                "client %s speaks protocol %d, but this engine %d; run one version everywhere",
                client.hex(), hello.protocol_version, PROTOCOL_VERSION,
            )  # fmt: skip
            return
        self._unknown_senders.pop(client, None)
        self._clients[client] = self._behind[client] = None
        if hello.follows_prefixes:
            self.core.prefix_feed.follow(is_followed=True)
            self._followers[client] = None
        self._add_frame(client, [])

    def _add_frame(self, client: bytes, events: list[WireEvent]) -> None:
        """Queue a frame, with the snapshot if the client does not have it yet."""
        snapshot = self._snapshot if client in self._behind else None
        self._behind.pop(client, None)
        batches = self._followers.get(client)
        if batches:
            self._followers[client] = []
        frame = EngineFrame(self._incarnation, events, snapshot, kv_events=batches or [])
        self._frames.append((client, frame))

    @property
    def _is_late(self) -> bool:
        """Return whether a snapshot or prefix events have not been sent to some client."""
        return self._is_stale or bool(self._behind) or any(self._followers.values())

    def _queue_kv_events(self) -> None:
        """Queue for every follower the changes of the prefix caches, or a first listing."""
        batches = self.core.prefix_feed.take()
        for client, waiting in self._followers.items():
            if waiting is None:
                self._followers[client] = self.core.prefix_feed.listing()
            else:
                waiting.extend(batches)

    def _renew_snapshot(self, *, is_due: bool) -> bool:
        """Take a new snapshot if one is needed, and return whether it was taken.

        A changed number of free blocks alone waits until frames are due: a full batch gets blocks
        in almost every step, and a snapshot examines every row.
        """
        state = self.core.state()
        self._is_stale = state != self._state and not is_due and state[0] == self._state[0]
        if state == self._state or self._is_stale:
            return False
        self._snapshot, self._state = self.core.snapshot(self._snapshot.seq + 1), state
        return True


def gather_s(config: EngineConfig, message: Incoming) -> float:
    """Return how long an idle engine waits for more prompts before it begins a step.

    Lanes compute several prompts of one step in the time of one, but prompts that were sent
    together arrive one by one.
    """
    has_lanes = config.tt_data_parallel > 1 and not config.mixed_batches
    is_prompt = isinstance(message, AddRequest) and message.mode != "decode"
    return GATHER_S if has_lanes and is_prompt else 0.0


def describe(
    core: EngineCore, incarnation: str, input_endpoint: str, output_endpoint: str, pid: int
) -> EngineDescription:
    """Return the description of a started engine for clients, routers and tickets.

    Raises:
        ServerKeyError: The engine was started without a secret.
    """
    return EngineDescription(
        incarnation=incarnation,
        public_key=server_public_key(core.config.keys, incarnation),
        input_endpoint=input_endpoint,
        output_endpoint=output_endpoint,
        kv_endpoints=core.kv_endpoints,
        kv_layout_hash=join_layouts(core.kv_layouts).content_hash() if core.kv_layouts else None,
        kv_groups=core.facts.kv_groups,
        model=core.config.model,
        max_model_len=core.max_model_len,
        vocab_size=core.facts.vocab_size,
        eos_token_ids=core.facts.eos_token_ids,
        dp_groups=core.config.tt_data_parallel,
        slots_per_group=core.config.slots_per_group,
        max_num_batched_tokens=core.config.token_budget(core.max_model_len),
        pid=pid,
        max_logprobs=core.config.max_logprobs,
        scheduling_policy=core.config.scheduling_policy,
        logprobs_mode=core.config.logprobs_mode,
    )
