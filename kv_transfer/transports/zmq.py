"""ZMQ transport (TCP or IPC): messages and chunks, in one I/O thread.

The thread owns every socket: one bound ROUTER on which consumers reach this engine, and one DEALER
with its monitor per producer that this engine fetches from. It runs the two session state machines
and exchanges plain values with the core thread over two queues, whose bytes the credits bound. It
never touches KV memory and decides nothing about blocks. A producer of this host is reached over
an abstract Unix socket, and its KV memory is mapped for reading if it shares it.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings, KVMemory
from kv_transfer.consumer import SendToProducer
from kv_transfer.dtypes import acceptable_layouts
from kv_transfer.errors import TicketError, TransferError, WireError
from kv_transfer.io_threads import new_context
from kv_transfer.layout import KVLayout, RowLayout
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    Agent,
    PayloadPath,
    Staged,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from kv_transfer.producer import SendToConsumer
from kv_transfer.sessions import TransferSessions
from kv_transfer.shared_region import RegionServer
from kv_transfer.transport import CancelLoad, Command, Event, ProducerRoute, StartLoad, WireCounters
from kv_transfer.transports.core_watch import CoreWatch
from kv_transfer.transports.nixl_payload import NixlPayload, start_nixl
from kv_transfer.transports.options import set_options
from kv_transfer.transports.peers import Peer, Peers
from kv_transfer.transports.process import prepare_process
from kv_transfer.transports.routes import ProducerRoutes
from kv_transfer.transports.tcp import bind_tcp
from kv_transfer.transports.wake_up import WakeUp

logger = logging.getLogger(__name__)

_MAX_BATCH = 256
"""Messages read from one socket before the others get their turn."""

_LONGEST_WAIT_S = 3600.0
"""Bound on a poll: its timeout is a 32-bit number of milliseconds."""


class ZmqTransport:
    """``Transport`` over ZMQ.

    Owner: the I/O thread owns sockets and sessions; the queues and the wake-up are shared.
    """

    def __init__(
        self, settings: ConnectorSettings, memory: KVMemory, notify: Callable[[], None]
    ) -> None:
        """Bind and start the I/O thread.

        Raises:
            TransferError: When the address is a wildcard, not loopback although there is no
                secret, or cannot be bound.
        """
        prepare_process()
        self._settings = settings
        self._notify = notify
        self._layouts = acceptable_layouts(memory.layout, settings.accept_dtypes)
        self._max_bytes = max(
            MAX_MESSAGE_BYTES,
            *(_largest_payload(layout, settings) for layout in self._layouts.values()),
        )
        self._counters = WireCounters()
        self._context = new_context()
        self._router = self._context.socket(zmq.ROUTER)
        self._region_server: RegionServer | None = None
        try:
            self._endpoints = self._open(memory)
        except TransferError:
            self._end_context()
            raise
        self._wake_up = WakeUp()
        nixl = start_nixl(settings, self._max_bytes, self._wake_up.wake)
        paths: set[PayloadPath] = {"inline"}
        if memory.shared_region is not None:
            paths.add("shared")
        if nixl is not None:
            paths.add("nixl")
        self._sessions = TransferSessions(settings, memory.layout, self._counters, frozenset(paths))
        self._nixl = (
            None if nixl is None else NixlPayload(nixl, settings.incarnation, self._sessions)
        )
        self._commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._is_silent = False
        """True while messages are neither handled nor sent."""
        self._stopping = threading.Event()
        self._crash: BaseException | None = None
        self._core = CoreWatch(settings.config.probe_s, settings.config.no_data_s)
        self._poller = self._make_poller()
        self._peers = Peers(self._context, settings, self._max_bytes, self._poller)
        # The memory of a producer with several KV groups is not mapped.
        mappable = {key: x for key, x in self._layouts.items() if isinstance(x, KVLayout)}
        self._routes = ProducerRoutes(mappable, self._poller, has_nixl=nixl is not None)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # ---- core thread

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of this producer."""
        return self._endpoints

    @property
    def counters(self) -> WireCounters:
        """Totals of messages."""
        return self._counters

    def submit(self, commands: Sequence[Command]) -> None:
        """Queue commands for the I/O thread."""
        self._check_alive()
        self._core.answer(time.monotonic())
        self._commands.extend(commands)
        self._wake_up.wake()

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call."""
        self._check_alive()
        self._core.answer(time.monotonic())
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def lease_left_s(self, transfer_id: bytes, now_s: float) -> float:
        """Return the seconds until a producer's lease ends unless renewed."""
        return self._sessions.producer.left_s(transfer_id, now_s)

    def close(self, deadline_s: float) -> None:
        """Stop the I/O thread, which closes its sockets; idempotent.

        Raises:
            TransferError: The thread does not stop in time.
        """
        self._stopping.set()
        self._wake_up.wake()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TransferError(f"the KV transfer thread did not stop within {deadline_s} s")
        self._wake_up.close()

    def _check_alive(self) -> None:
        if self._crash is not None:
            raise TransferError("the KV transfer thread crashed: see the cause") from self._crash
        if self._stopping.is_set():
            raise TransferError("the KV transfer connector is closed")

    # ---- start and stop

    def _open(self, memory: KVMemory) -> tuple[str, ...]:
        """Bind the ROUTER, and serve the KV memory to engines of this host if it can be shared."""
        endpoints = _bind(self._router, self._settings, self._counters)
        if memory.shared_region is None or memory.region_layout is None:
            logger.info("KV transfer sends all payload: this engine's KV memory is not shared")
            return endpoints
        admits = partial(_admits, self._settings)
        self._region_server = RegionServer(memory.shared_region, memory.region_layout, admits)
        return (*endpoints, self._region_server.address)

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_up, zmq.POLLIN)
        if self._region_server is not None:
            poller.register(self._region_server, zmq.POLLIN)
        return poller

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:  # The top of a thread: poll and submit raise it.
            logger.exception("the KV transfer thread crashed; the next step of the engine fails")
            self._crash = error
            self._notify()
        finally:
            self._release()

    def _release(self) -> None:
        if self._nixl is not None:
            self._nixl.close()
        self._routes.close()
        if self._region_server is not None:
            self._region_server.close()
        self._peers.close_all()
        self._end_context()
        if self._endpoints[0].startswith("ipc:///"):
            Path(self._endpoints[0].removeprefix("ipc://")).unlink(missing_ok=True)

    def _end_context(self) -> None:
        """Close the ROUTER and end the context with its threads."""
        self._router.close(linger=0)
        self._context.term()

    # ---- I/O thread

    def _turn(self) -> None:
        """Wait for events, handle all of them, and send the resulting messages."""
        ready = dict(self._poller.poll(self._timeout_ms()))
        self._wake_up.drain()
        now_s = time.monotonic()
        self._is_silent = self._must_be_silent(now_s)
        if self._region_server is not None and self._region_server.fileno() in ready:
            self._region_server.serve()
        self._apply_commands(now_s)
        for load, route in self._routes.take_ready(now_s):
            self._load(load, route, now_s)
        if self._router in ready:
            self._receive_from_consumers(now_s)
        if self._nixl is not None:
            self._nixl.free_consumed()
            self._nixl.take_reads(self._routes.avoid_nixl, now_s)
        for peer in self._peers.ready(ready):
            self._receive_from_producer(peer, now_s)
        self._sessions.tick(now_s)
        self._send()
        self._publish()

    def _timeout_ms(self) -> int | None:
        now_s = time.monotonic()
        due_s = min((x for x in self._deadlines_s(now_s) if x is not None), default=None)
        if due_s is None:
            return None
        return max(0, int(1000 * min(due_s - now_s, _LONGEST_WAIT_S)) + 1)

    def _deadlines_s(self, now_s: float) -> list[float | None]:
        return [self._sessions.next_deadline_s(), self._routes.next_deadline_s()]

    def _must_be_silent(self, now_s: float) -> bool:
        """Return whether the core hangs, so that this engine could keep no promise it makes."""
        if not self._sessions.num_open:
            return False
        if self._core.must_ask(now_s):
            self._notify()
        return self._core.is_silent(now_s)

    def _apply_commands(self, now_s: float) -> None:
        while self._commands:
            command = self._commands.popleft()
            started = None
            if isinstance(command, StartLoad):
                route = self._routes.find(command, now_s)
                started = None if route is None else (command, route)
            elif isinstance(command, CancelLoad):
                started = self._routes.take_waiting(command.transfer_id)
            if started is not None:
                self._load(*started, now_s)
            if not isinstance(command, StartLoad):
                self._sessions.apply(command, now_s)

    def _load(self, load: StartLoad, route: ProducerRoute, now_s: float) -> None:
        self._peers.expect(route.endpoint, load.ticket.producer_incarnation)
        self._sessions.load(load, route, now_s)

    # ---- messages

    def _receive_from_consumers(self, now_s: float) -> None:
        for frames in _received(self._router):
            if self._is_silent:
                continue
            # Before a consumer is answered: the core may have withdrawn rows that it asks for.
            self._apply_commands(now_s)
            try:
                peer, message = frames
                self._sessions.producer.on_message(
                    peer.bytes, decode_to_producer(message.bytes), now_s
                )
            except (WireError, ValueError):
                self._counters.num_malformed += 1

    def _receive_from_producer(self, peer: Peer, now_s: float) -> None:
        """Handle the messages that have arrived, then a broken connection."""
        is_lost = peer.is_lost()
        for frames in _received(peer.dealer):
            if self._is_silent:
                continue
            payload = _as_bytes(frames[1]) if len(frames) == 2 else None
            try:
                message = decode_to_consumer(frames[0].bytes)
            except WireError:
                self._counters.num_malformed += 1
                continue
            if not isinstance(message, Staged | Agent):
                self._sessions.consumer.on_message(peer.endpoint, message, payload, now_s)
            elif self._nixl is None or not self._nixl.on_message(
                peer.endpoint, message, payload, now_s
            ):
                self._counters.num_malformed += 1
        if is_lost:
            self._drop_producer(peer.endpoint)

    def _drop_producer(self, endpoint: str) -> None:
        """Fail the loads from a producer that cannot be reached; a later load connects again."""
        self._peers.close(endpoint)
        self._routes.drop_producer(endpoint)
        if self._nixl is not None:
            self._nixl.drop_agent(endpoint)
        self._sessions.consumer.on_peer_lost(endpoint)

    def _send(self) -> None:
        for to_consumer in self._sessions.producer.take_sends():
            self._send_to_consumer(to_consumer)
        for to_producer in self._sessions.consumer.take_sends():
            self._send_to_producer(to_producer)

    def _send_to_consumer(self, send: SendToConsumer) -> None:
        """Send through the ROUTER, whose queue is bounded by the credits."""
        if self._is_silent:
            return
        staged = None if self._nixl is None else self._nixl.stage(send)
        head = [send.peer, encode(staged or send.message)]
        try:
            if staged is not None and self._nixl is not None and not self._nixl.has_met(send.peer):
                self._router.send_multipart([send.peer, *self._nixl.hello()], zmq.NOBLOCK)
                self._nixl.met(send.peer)
            if send.payload is None or staged is not None:
                self._router.send_multipart(head, zmq.NOBLOCK)
            else:
                self._router.send_multipart(head, zmq.NOBLOCK | zmq.SNDMORE)
                self._router.send(send.payload.data, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._sessions.producer.on_peer_lost(send.peer)

    def _send_to_producer(self, send: SendToProducer) -> None:
        if self._is_silent:
            return
        peer = self._peers.reach(send.endpoint)
        if peer is None:
            self._drop_producer(send.endpoint)
            return
        try:
            peer.dealer.send(encode(send.message), zmq.NOBLOCK)
        except zmq.Again:
            # The producer does not read. Its silence has a deadline, and every message is repeated.
            logger.debug("KV transfer message to %s dropped: queue full", send.endpoint)

    def _publish(self) -> None:
        events = self._sessions.take_events()
        if events:
            self._events.extend(events)
            self._notify()


def _bind(
    router: zmq.Socket[bytes], settings: ConnectorSettings, counters: WireCounters
) -> tuple[str, ...]:
    """Bind to ``settings.bind``, and to an abstract Unix socket for engines of this host."""
    set_options(router, MAX_MESSAGE_BYTES)
    router.set(zmq.ROUTER_MANDATORY, 1)
    # Refuse processes of other users on the Unix socket.
    router.set(zmq.IPC_FILTER_UID, os.geteuid())
    neighbours = f"ipc://@ttserve-kv-{secrets.token_hex(16)}"
    # Bound first: the security of TCP applies to whatever is bound after it.
    router.bind(neighbours)
    return bind_tcp(router, settings, counters), neighbours


def _admits(settings: ConnectorSettings, sealed: bytes) -> bool:
    """Return whether these bytes are a valid ticket for a transfer from this engine."""
    try:
        ticket = settings.keys.unseal(sealed, settings.unix_now_s())
    except TicketError:
        return False
    return bool(ticket.consumer) and ticket.producer_incarnation == settings.incarnation


def _largest_payload(layout: RowLayout, settings: ConnectorSettings) -> int:
    """Return the most bytes of one payload frame from a producer of this layout."""
    row_bytes = layout.row_bytes
    mapped = 16 * (settings.config.mapped_chunk_rows(row_bytes) + 1)
    return max(settings.config.chunk_rows(row_bytes) * row_bytes, mapped)


def _received(endpoint: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived, at most ``_MAX_BATCH``."""
    with contextlib.suppress(zmq.Again):
        for _ in range(_MAX_BATCH):
            yield endpoint.recv_multipart(zmq.NOBLOCK, copy=False)


def _as_bytes(frame: zmq.Frame) -> NDArray[np.uint8]:
    """Return a view of a frame, which lives as long as the view does."""
    return np.frombuffer(frame.buffer, np.uint8)
