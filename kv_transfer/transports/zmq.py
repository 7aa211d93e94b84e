"""Carry messages and chunks over ZMQ (tcp or ipc) in one I/O thread.

The thread owns every socket: one bound ROUTER on which consumers reach this engine, and one DEALER
with its monitor per producer that this engine fetches from. It runs the two session state machines
and exchanges plain values with the core thread over two queues, whose bytes the credits bound. It
never touches KV memory and decides nothing about blocks. A producer of this host is reached over
an abstract Unix socket, and its KV memory mapped for reading, where it hands that out.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from kv_transfer.connector import ConnectorSettings, KVDeviceIO
from kv_transfer.consumer import Route, SendToProducer
from kv_transfer.dtypes import acceptable_layouts
from kv_transfer.errors import ServerKeyError, TicketError, TransferError, WireError
from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    Agent,
    Data,
    PayloadPath,
    Staged,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from kv_transfer.producer import SendToConsumer
from kv_transfer.sessions import TransferSessions
from kv_transfer.shared_region import RegionServer
from kv_transfer.transport import CancelLoad, Command, Event, Load, WireCounters
from kv_transfer.transports.core_watch import CoreWatch
from kv_transfer.transports.far import address_of, bind_far, connect_far
from kv_transfer.transports.nixl import (
    NixlEnd,
    RemoteRows,
    Staging,
    has_rdma_device,
    is_installed,
)
from kv_transfer.transports.process import prepare_process
from kv_transfer.transports.routes import Routes

logger = logging.getLogger(__name__)

_MAX_BATCH = 256
"""Messages taken from one socket before the others get their turn."""

HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0
"""Interval of ZMQ's own heartbeats, and the silence after which it drops a connection."""

_LONGEST_WAIT_S = 3600.0
"""A poll's timeout is a 32-bit number of milliseconds, and a deadline may be far away."""

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
"""Monitor events after which a producer counts as gone: the connection broke, or was refused."""


class _Peer:
    """Connection to one producer. Owner: the I/O thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.dealer = context.socket(zmq.DEALER)
        self.monitor: zmq.Socket[bytes] | None = None

    def connect(self, settings: ConnectorSettings, max_bytes: int, producer: str) -> None:
        """Start to connect to this incarnation, watched from before the first attempt."""
        _set_options(self.dealer, max_bytes)
        self.monitor = self.dealer.get_monitor_socket(_LOST)
        if self.endpoint.startswith("tcp://"):
            connect_far(self.dealer, self.endpoint, settings, producer)
        else:
            self.dealer.connect(self.endpoint)

    def is_lost(self) -> bool:
        """Tell whether the monitor has seen the connection break or be refused."""
        while self.monitor is not None and self.monitor.poll(0):
            if int(recv_monitor_message(self.monitor)["event"]) & _LOST:
                return True
        return False

    def close(self) -> None:
        """Close both sockets, dropping what is queued."""
        if self.monitor is not None:
            self.dealer.disable_monitor()
            self.monitor.close(linger=0)
        self.dealer.close(linger=0)


class ZmqTransport:
    """A ``Transport`` over ZMQ.

    Owner: the I/O thread owns sockets and sessions; the queues and the wake-up socket are shared.
    """

    def __init__(
        self, settings: ConnectorSettings, io: KVDeviceIO, notify: Callable[[], None]
    ) -> None:
        """Bind and start.

        Raises:
            TransferError: When the address is a wildcard, not loopback although there is no
                secret, or cannot be bound.
        """
        prepare_process()
        self._settings = settings
        self._notify = notify
        self._layouts = acceptable_layouts(io.layout, settings.accept_dtypes)
        self._max_bytes = max(
            MAX_MESSAGE_BYTES,
            *(_largest_payload(layout, settings) for layout in self._layouts.values()),
        )
        self._counters = WireCounters()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._endpoints = self._bind()
        self._region_server = self._share(io)
        self._nixl = self._start_nixl()
        self._staging = None if self._nixl is None else Staging(self._nixl)
        self._met: set[bytes] = set()
        paths: set[PayloadPath] = {"inline"}
        if io.shared_region is not None:
            paths.add("shared")
        if self._nixl is not None:
            paths.add("nixl")
        self._sessions = TransferSessions(settings, io.layout, self._counters, frozenset(paths))
        self._commands: deque[Command] = deque()
        self._is_waking = False
        self._events: deque[Event] = deque()
        self._peers: dict[str, _Peer] = {}
        self._producers: dict[str, str] = {}
        """By endpoint, the incarnation that has to answer there."""
        self._is_silent = False
        """Nothing gets in or out."""
        self._stopping = threading.Event()
        self._crash: BaseException | None = None
        config = settings.config
        self._core = CoreWatch(config.probe_s, config.no_data_s)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = self._make_poller()
        self._routes = Routes(self._layouts, self._poller, has_nixl=self._nixl is not None)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # ---- core thread

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where consumers find this producer."""
        return self._endpoints

    @property
    def counters(self) -> WireCounters:
        """Totals about messages."""
        return self._counters

    def submit(self, commands: Sequence[Command]) -> None:
        """Pass commands on to the I/O thread."""
        self._check_alive()
        self._core.answer(time.monotonic())
        self._commands.extend(commands)
        self._wake()

    def poll(self) -> Sequence[Event]:
        """Take the events since the last call."""
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
        """Stop the I/O thread, which closes the sockets; idempotent."""
        self._stopping.set()
        self._wake()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TransferError(f"the KV transfer thread did not stop within {deadline_s} s")
        self._wake_sender.close()

    def _check_alive(self) -> None:
        if self._crash is not None:
            raise TransferError("the KV transfer thread has crashed") from self._crash
        if self._stopping.is_set():
            raise TransferError("the KV transfer connector is closed")

    def _wake(self) -> None:
        """Let the I/O thread look at the commands, if it will not do so anyway.

        Why the flag: each system call gives the interpreter up to the other thread.
        """
        if self._is_waking:
            return
        self._is_waking = True
        try:
            self._wake_sender.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: a wake-up is pending already. Closed: there is nobody left to wake.
            return

    # ---- start and stop

    def _bind(self) -> tuple[str, ...]:
        """Bind where the settings say, and for neighbours where no file is left behind."""
        _set_options(self._router, MAX_MESSAGE_BYTES)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        # Neighbours of other users have no business here.
        self._router.set(zmq.IPC_FILTER_UID, os.geteuid())
        neighbours = f"ipc://@ttserve-kv-{secrets.token_hex(16)}"
        # First: what secures TCP is for what is bound after it.
        self._router.bind(neighbours)
        try:
            return bind_far(self._router, self._settings, self._counters), neighbours
        except TransferError:
            self._end_context()
            raise

    def _share(self, io: KVDeviceIO) -> RegionServer | None:
        """Hand the KV memory out to neighbours, where it can be."""
        if io.shared_region is None or io.region_layout is None:
            logger.info("KV transfer: payload travels, as this engine's KV memory is not shared")
            return None
        try:
            server = RegionServer(io.shared_region, io.region_layout, self._admits)
        except TransferError:
            self._end_context()
            raise
        self._endpoints = (*self._endpoints, server.address)
        return server

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._region_server is not None:
            poller.register(self._region_server, zmq.POLLIN)
        return poller

    def _admits(self, sealed: bytes) -> bool:
        """Tell whether this is a ticket of a transfer from here."""
        settings = self._settings
        try:
            ticket = settings.keys.unseal(sealed, settings.unix_now_s())
        except TicketError:
            return False
        return bool(ticket.consumer) and ticket.producer_incarnation == settings.incarnation

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:  # the top of a thread: poll and submit report it
            logger.exception("KV transfer thread crashed")
            self._crash = error
            self._notify()
        finally:
            self._release()

    def _start_nixl(self) -> NixlEnd | None:
        """Start NIXL where it is and gains something; where it fails, payload goes another way."""
        config = self._settings.config
        if not (is_installed() and has_rdma_device()):
            return None
        if self._settings.network != "plain":
            logger.info(
                "KV transfer: NIXL and an RDMA device are here and stay unused, as kv_network is "
                "encrypted and NIXL carries plain text"
            )
            return None
        try:
            return NixlEnd(
                self._settings.incarnation,
                slot_bytes=self._max_bytes,
                num_slots=max(2, config.max_inflight_bytes // self._max_bytes),
                deadline_s=config.no_progress_s,
                wake=self._wake,
            )
        except TransferError as error:
            logger.warning("%s", error)
            return None

    def _release(self) -> None:
        if self._nixl is not None:
            self._nixl.close(1.0)
        self._routes.close()
        if self._region_server is not None:
            self._region_server.close()
        for peer in self._peers.values():
            peer.close()
        self._end_context()
        self._wake_receiver.close()
        if self._endpoints[0].startswith("ipc:///"):
            Path(self._endpoints[0].removeprefix("ipc://")).unlink(missing_ok=True)

    def _end_context(self) -> None:
        """Close the ROUTER and end what else the context has a thread for."""
        self._router.close(linger=0)
        self._context.term()

    # ---- I/O thread

    def _turn(self) -> None:
        """Wait for something, handle all of it, send what follows from it."""
        ready = dict(self._poller.poll(self._timeout_ms()))
        self._drain_wake()
        now_s = time.monotonic()
        self._is_silent = self._must_be_silent(now_s)
        if self._region_server is not None and self._region_server.fileno() in ready:
            self._region_server.serve()
        self._apply_commands(now_s)
        for load, route in self._routes.take_ready(now_s):
            self._load(load, route, now_s)
        if self._router in ready:
            self._receive_from_consumers(now_s)
        if self._staging is not None:
            self._staging.free_consumed(self._sessions.producer.consumed_row)
        self._take_reads(now_s)
        for peer in list(self._peers.values()):
            if peer.dealer in ready or peer.monitor in ready:
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
        """Tell whether the core hangs: nothing that this engine would say could be kept."""
        if not self._sessions.num_open:
            return False
        if self._core.must_ask(now_s):
            self._notify()
        return self._core.is_silent(now_s)

    def _apply_commands(self, now_s: float) -> None:
        while self._commands:
            command = self._commands.popleft()
            started = None
            if isinstance(command, Load):
                route = self._routes.find(command, now_s)
                started = None if route is None else (command, route)
            elif isinstance(command, CancelLoad):
                started = self._routes.take_waiting(command.transfer_id)
            if started is not None:
                self._load(*started, now_s)
            if not isinstance(command, Load):
                self._sessions.apply(command, now_s)

    def _load(self, load: Load, route: Route, now_s: float) -> None:
        self._producers[route.endpoint] = load.ticket.producer_incarnation
        self._sessions.load(load, route, now_s)

    # ---- messages

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        # Between the two: whoever adds a command after they are read has to wake this thread again,
        # and while the flag is up a wake-up must still be on its way, or the commands unread.
        self._is_waking = False

    def _receive_from_consumers(self, now_s: float) -> None:
        for _ in range(_MAX_BATCH):
            frames = _receive(self._router)
            if frames is None:
                return
            if self._is_silent:
                continue
            # Whatever the core has taken back is taken back before anybody is told that it holds.
            self._apply_commands(now_s)
            try:
                peer, message = frames
                self._sessions.producer.on_message(
                    peer.bytes, decode_to_producer(message.bytes), now_s
                )
            except (WireError, ValueError):
                self._counters.num_malformed += 1

    def _receive_from_producer(self, peer: _Peer, now_s: float) -> None:
        """Take what has arrived, then look whether the producer is gone."""
        is_lost = peer.is_lost()
        for _ in range(_MAX_BATCH):
            frames = _receive(peer.dealer)
            if frames is None:
                break
            if self._is_silent:
                continue
            payload = _as_bytes(frames[1]) if len(frames) == 2 else None
            try:
                message = decode_to_consumer(frames[0].bytes)
            except WireError:
                self._counters.num_malformed += 1
                continue
            if isinstance(message, Staged | Agent):
                self._on_nixl(peer.endpoint, message, payload, now_s)
            else:
                self._sessions.consumer.on_message(peer.endpoint, message, payload, now_s)
        if is_lost:
            self._drop_peer(peer)

    # ---- payload over NIXL

    def _on_nixl(
        self,
        endpoint: str,
        message: Staged | Agent,
        payload: NDArray[np.uint8] | None,
        now_s: float,
    ) -> None:
        if self._nixl is None or isinstance(message, Agent) != (payload is not None):
            self._counters.num_malformed += 1
        elif isinstance(message, Staged):
            if not self._sessions.consumer.expects(message.data, message.num_bytes):
                self._counters.num_malformed += 1
                return
            rows = RemoteRows(endpoint, message.address, message.num_bytes)
            self._nixl.read((endpoint, message.data), rows, now_s)
        elif payload is not None:
            self._nixl.introduce(endpoint, payload.tobytes())

    def _take_reads(self, now_s: float) -> None:
        """Hand in what was read; what could not be is asked for again, to come another way."""
        for read in self._nixl.take_reads() if self._nixl is not None else ():
            endpoint, data = read.tag
            if read.payload is not None:
                self._sessions.consumer.on_message(endpoint, data, read.payload, now_s, "nixl")
            else:
                self._routes.avoid_nixl(endpoint)
                self._sessions.consumer.lost(data, now_s)

    def _drop_peer(self, peer: _Peer) -> None:
        """Fail what was expected from a producer; a later load connects anew."""
        del self._peers[peer.endpoint]
        self._poller.unregister(peer.dealer)
        self._poller.unregister(peer.monitor)
        peer.close()
        self._forget(peer.endpoint)

    def _forget(self, endpoint: str) -> None:
        """Let go of a producer that cannot be reached: its memory, its agent, what it owes."""
        self._producers.pop(endpoint, None)
        self._routes.forget(endpoint)
        if self._nixl is not None:
            self._nixl.forget(endpoint)
        self._sessions.consumer.on_peer_lost(endpoint)

    def _send(self) -> None:
        for to_consumer in self._sessions.producer.take_sends():
            self._send_to_consumer(to_consumer)
        for to_producer in self._sessions.consumer.take_sends():
            self._send_to_producer(to_producer)

    def _send_to_consumer(self, send: SendToConsumer) -> None:
        """Send through the ROUTER, whose queue the credits bound."""
        if self._is_silent:
            return
        staged = None
        if (
            self._staging is not None
            and send.payload is not None
            and isinstance(send.message, Data)
            and self._sessions.producer.path(send.message.transfer_id) == "nixl"
        ):
            staged = self._staging.stage(send.message, send.payload)
        head = [send.peer, encode(staged or send.message)]
        try:
            if staged is not None and self._nixl is not None and send.peer not in self._met:
                hello = [send.peer, encode(Agent(self._settings.incarnation)), self._nixl.metadata]
                self._router.send_multipart(hello, zmq.NOBLOCK)
                # Those that no transfer belongs to any more are gone, or will be greeted anew.
                self._met = (self._met & self._sessions.producer.peers) | {send.peer}
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
        peer = self._peers.get(send.endpoint) or self._connect(send.endpoint)
        if peer is None:
            return
        try:
            peer.dealer.send(encode(send.message), zmq.NOBLOCK)
        except zmq.Again:
            # The producer reads nothing. Its silence has a deadline, and every message is repeated.
            logger.debug("KV transfer message to %s dropped: queue full", send.endpoint)

    def _connect(self, endpoint: str) -> _Peer | None:
        peer = None
        try:
            peer = _Peer(self._context, endpoint)
            peer.connect(self._settings, self._max_bytes, self._producers.get(endpoint, ""))
        except (zmq.ZMQError, ServerKeyError) as error:
            logger.warning("cannot connect KV transfer to %s: %s", address_of(endpoint), error)
            if peer is not None:
                peer.close()
            self._forget(endpoint)
            return None
        self._peers[endpoint] = peer
        self._poller.register(peer.dealer, zmq.POLLIN)
        self._poller.register(peer.monitor, zmq.POLLIN)
        return peer

    def _publish(self) -> None:
        events = self._sessions.take_events()
        if events:
            self._events.extend(events)
            self._notify()


def _largest_payload(layout: KVLayout, settings: ConnectorSettings) -> int:
    """Return the most bytes of one payload frame from a producer of this layout."""
    row_bytes = layout.row_bytes
    mapped = 16 * (settings.config.mapped_chunk_rows(row_bytes) + 1)
    return max(settings.config.chunk_rows(row_bytes) * row_bytes, mapped)


def _set_options(endpoint: zmq.Socket[bytes], max_bytes: int) -> None:
    endpoint.set(zmq.LINGER, 0)
    endpoint.set(zmq.MAXMSGSIZE, max_bytes)
    endpoint.set(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
    endpoint.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * HEARTBEAT_TIMEOUT_S))
    # No limit in messages: a ROUTER silently drops above it. Credits limit the bytes.
    endpoint.set(zmq.SNDHWM, 0)


def _receive(endpoint: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    try:
        return endpoint.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def _as_bytes(frame: zmq.Frame) -> NDArray[np.uint8]:
    """Return a view of a frame, which lives as long as the view does."""
    return np.frombuffer(frame.buffer, np.uint8)
