"""An ingress's connections to engines in the simulator; stands for `AsyncMPClient`.

Owns the links of one ingress. Streams and the distribution of frames are the production's
(`replicas.streams`); a link stands for the two sockets.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.lab.simulation.network import Channel
from replicas.dealer import CONNECT_S, NOT_GREETED
from replicas.errors import EngineDeadError
from replicas.messages import TokenOutput
from replicas.streams import StreamTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.monitors import ProtocolMonitor
    from cluster.lab.simulation.network import Network
    from cluster.lab.simulation.recorder import Recorder
    from replicas.messages import (
        ClientMessage,
        EngineDescription,
        EngineFrame,
        EngineSnapshot,
    )
    from replicas.streams import EngineStream, Inbox, OnKVEvents

NOTICE_S = 0.25
"""Seconds until an engine notices that a client is gone: a heartbeat."""


class VirtualLink:
    """One ingress's connection to one engine.

    Args:
        client_id: The engine's id of the connection; each connection has a new one.

    Attributes:
        is_open: Whether the connection is open.
        is_heard_of: Set by the engine's first frame, and when the connection ends.
        newest: The latest snapshot, in the engine's order, that has arrived.
        num_sent: Messages that were sent.
        num_heard: Frames that have arrived.
    """

    def __init__(
        self, client: VirtualClient, client_id: bytes, host: VirtualHost, network: Network
    ) -> None:
        self.host = host
        self.is_open = True
        self.is_heard_of = asyncio.Event()
        self.newest: EngineSnapshot | None = None
        self.table = StreamTable(
            host.engine.description,
            self.send,
            client.take_snapshot,
            client.take_moves,
            client.take_kv_events,
        )
        self._client = client
        self._client_id = client_id
        self._loop = network.loop
        self.num_sent = 0
        self.num_heard = 0
        self._up = Channel(network, lambda: host.is_deaf)
        self._down = Channel(network, lambda: host.is_mute)
        host.links[client_id] = self.send_frame
        self.table.greet()

    def send(self, message: ClientMessage) -> None:
        """Send a message; drop it if the connection is closed."""
        if self.is_open:
            self.num_sent += 1
            self._client.observer.sent(self.host, message, is_stalled=self.is_stalled)
            self._up.send(self._reach_engine, message)

    def send_frame(self, frame: EngineFrame, step_times_s: list[float]) -> None:
        """Send a frame to the client, with the end times of its steps if there are several."""
        self._down.send(self._reach_client, frame, step_times_s)

    def close(self) -> None:
        """End the connection; the engine notices a little later. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.is_heard_of.set()
            self._loop.call_later(NOTICE_S, self.host.client_gone, self._client_id)

    @property
    def is_stalled(self) -> bool:
        """Whether the ingress knows that the engine stalls, and the engine does not hand over."""
        return self.table.stalled is not None and self.table.leaving is None

    @property
    def is_quiet(self) -> bool:
        """Whether no message is on its way in either direction."""
        return not self._up.num_on_way and not self._down.num_on_way

    @property
    def num_lost(self) -> int:
        """Messages that were sent, but are neither on their way nor in the inbox."""
        num_taken = self.host.inbox.num_taken.get(self._client_id, 0)
        return self.num_sent - self._up.num_on_way - num_taken

    def _reach_engine(self, message: ClientMessage) -> None:
        if self.is_open:
            self.host.receive(self._client_id, message)

    def _reach_client(self, frame: EngineFrame, step_times_s: list[float]) -> None:
        if not self.is_open:
            return
        self.num_heard += 1
        events = self.table.read([frame])
        for event in events:
            self._client.observer.arrived(self.host, event)
            if step_times_s and isinstance(event, TokenOutput):
                self._client.token_times_s[event.request_id, event.choice] = step_times_s
        snapshot = frame.snapshot
        if snapshot is not None and (self.newest is None or snapshot.seq >= self.newest.seq):
            self.newest = snapshot
            self._client.observer.snapshot_received(self.host, snapshot)
        if self.table.hand_out([frame], events):
            self.is_heard_of.set()
        else:
            self._client.lose(self.host.incarnation, NOT_GREETED)


class VirtualClient:
    """The connections of one ingress to its engines.

    Args:
        hosts: Every living host, by incarnation.
        observer: Gets every message between the ingress and the engines.
        on_snapshot: Called with (incarnation, snapshot) in the order the engine took them.
        on_dead: Called once with (incarnation, reason) when an engine is lost.
        on_moves: Called with (incarnation, whether it makes progress) when that changes.
        on_kv_events: See `StreamTable`.

    Attributes:
        token_times_s: For choices of requests whose last output is of several steps, the end times
            of the steps that produced its tokens.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: one callback for each kind of event
        self,
        name: str,
        network: Network,
        hosts: Mapping[str, VirtualHost],
        observer: Recorder | ProtocolMonitor,
        *,
        on_snapshot: Callable[[str, EngineSnapshot], None],
        on_dead: Callable[[str, str], None],
        on_moves: Callable[[str, bool], None],
        on_kv_events: OnKVEvents | None,
    ) -> None:
        self.observer = observer
        self.take_snapshot = on_snapshot
        self.take_moves = on_moves
        self.take_kv_events = on_kv_events
        self.token_times_s: dict[tuple[str, int], list[float]] = {}
        self._name = name
        self._network = network
        self._hosts = hosts
        self._on_dead = on_dead
        self._links: dict[str, VirtualLink] = {}
        self._num_links = 0

    async def connect(self, description: EngineDescription) -> None:
        """See `AsyncMPClient.connect`."""
        host = self._hosts.get(description.incarnation)
        if host is None:
            raise EngineDeadError(f"engine {description.incarnation} does not listen")
        if host.incarnation in self._links:
            return
        self._num_links += 1
        client_id = f"{self._name}/{self._num_links}".encode()
        link = self._links[host.incarnation] = VirtualLink(self, client_id, host, self._network)
        try:
            await asyncio.wait_for(link.is_heard_of.wait(), CONNECT_S)
        except asyncio.TimeoutError:
            del self._links[host.incarnation]
            link.close()
        if not link.is_open:
            raise EngineDeadError(f"engine {host.incarnation} does not answer")

    @property
    def incarnations(self) -> frozenset[str]:
        """See `AsyncMPClient.incarnations`."""
        return frozenset(self._links)

    @property
    def links(self) -> list[VirtualLink]:
        """Every open link."""
        return list(self._links.values())

    def open_stream(
        self, incarnation: str, request_id: str, message: ClientMessage, inbox: Inbox | None = None
    ) -> EngineStream:
        """See `AsyncMPClient.open_stream`."""
        return self._link(incarnation).table.open(request_id, message, inbox)

    def send(self, incarnation: str, message: ClientMessage) -> None:
        """See `AsyncMPClient.send`."""
        self._link(incarnation).send(message)

    def lose(self, incarnation: str, reason: str) -> None:
        """End the connection to an engine and fail its streams."""
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()
            link.table.fail(reason)
            self._on_dead(incarnation, reason)

    def die(self) -> None:
        """End the ingress's process: it sends nothing more, and engines notice after `NOTICE_S`."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def mark_unresponsive(self, incarnation: str) -> None:
        """Mark an engine that has sent nothing for `QUIET_S`."""
        link = self._links.get(incarnation)
        if link is not None:
            self.observer.became_unresponsive(link.host)
            link.table.mark_quiet()

    def _link(self, incarnation: str) -> VirtualLink:
        link = self._links.get(incarnation)
        if link is None:
            raise EngineDeadError(f"engine {incarnation} is not connected")
        return link
