"""Carry messages and chunks over ZMQ (tcp or ipc) in one I/O thread.

The thread owns every socket: one bound ROUTER on which consumers reach this engine, and one DEALER
with its monitor per producer that this engine fetches from. It runs the two session state machines
and exchanges plain values with the core thread over two queues, whose bytes the credits bound. It
never sees KV memory and decides nothing about blocks. What ``LinkFaults`` script happens here, at
the wire: behind the sessions, so that they see what they would see of a network's own faults.
"""

import logging
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

from kv_transfer.connector import ConnectorSettings
from kv_transfer.consumer import SendToProducer
from kv_transfer.errors import TransferError, WireError
from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from kv_transfer.producer import SendToConsumer
from kv_transfer.sessions import TransferSessions
from kv_transfer.transport import Command, Event, WireCounters
from kv_transfer.transports.connections import break_accepted

logger = logging.getLogger(__name__)

_MAX_BATCH = 256
"""Messages taken from one socket before the others get their turn."""

_LONGEST_WAIT_S = 3600.0
"""A poll's timeout is a 32-bit number of milliseconds, and a scripted fault may be far away."""

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
"""Monitor events after which a producer counts as gone: the connection broke, or was refused."""


class _Peer:
    """Connection to one producer. Owner: the I/O thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.dealer = context.socket(zmq.DEALER)
        self.monitor: zmq.Socket[bytes] | None = None

    def connect(self, settings: ConnectorSettings, max_bytes: int) -> None:
        """Start to connect, watched from before the first attempt."""
        _set_options(self.dealer, settings, max_bytes)
        self.monitor = self.dealer.get_monitor_socket(_LOST)
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
        self, settings: ConnectorSettings, layout: KVLayout, notify: Callable[[], None]
    ) -> None:
        """Bind and start.

        Raises:
            TransferError: When the address is a wildcard or cannot be bound.
        """
        config = settings.config
        chunk_bytes = config.chunk_blocks(layout.bytes_per_block) * layout.bytes_per_block
        self._settings = settings
        self._notify = notify
        self._max_bytes = max(chunk_bytes, MAX_MESSAGE_BYTES)
        self._counters = WireCounters()
        incarnation = settings.incarnation
        self._sessions = TransferSessions(incarnation, layout, config, self._counters)
        self._commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._peers: dict[str, _Peer] = {}
        self._faults = settings.link_faults
        self._num_breaks = self._faults.num_breaks(time.monotonic())
        self._is_cut = False
        self._corrupts = False
        self._stopping = threading.Event()
        self._crash: BaseException | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._endpoint = self._bind()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # ---- core thread

    @property
    def endpoint(self) -> str:
        """Where consumers find this producer."""
        return self._endpoint

    @property
    def counters(self) -> WireCounters:
        """Totals about messages."""
        return self._counters

    def submit(self, commands: Sequence[Command]) -> None:
        """Pass commands on to the I/O thread."""
        self._check_alive()
        self._commands.extend(commands)
        self._wake()

    def poll(self) -> Sequence[Event]:
        """Take the events since the last call."""
        self._check_alive()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

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
        try:
            self._wake_sender.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: a wake-up is pending already. Closed: there is nobody left to wake.
            return

    # ---- start and stop

    def _bind(self) -> str:
        bind = self._settings.bind
        if bind.startswith(("tcp://*", "tcp://0.0.0.0", "tcp://[::]")) or not bind.startswith(
            ("tcp://", "ipc://")
        ):
            self._context.destroy(linger=0)
            raise TransferError(
                f"cannot bind KV transfer to {bind!r}: name one address of this host, as in "
                f"tcp://127.0.0.1:*, or ipc://<path>"
            )
        _set_options(self._router, self._settings, MAX_MESSAGE_BYTES)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransferError(f"cannot bind KV transfer to {bind!r}: {error}") from error
        return self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

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

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._router.close(linger=0)
        self._context.term()
        self._wake_receiver.close()
        if self._endpoint.startswith("ipc:///"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # ---- I/O thread

    def _turn(self) -> None:
        """Wait for something, handle all of it, send what follows from it."""
        self._poller.poll(self._timeout_ms())
        self._drain_wake()
        now_s = time.monotonic()
        self._apply_faults(now_s)
        while self._commands:
            self._sessions.apply(self._commands.popleft(), now_s)
        self._receive_from_consumers(now_s)
        for peer in list(self._peers.values()):
            self._receive_from_producer(peer, now_s)
        self._sessions.tick(now_s)
        self._send()
        self._publish()

    def _timeout_ms(self) -> int | None:
        now_s = time.monotonic()
        deadlines = (self._sessions.next_deadline_s(), self._faults.next_change_s(now_s))
        due_s = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if due_s is None:
            return None
        return max(0, int(1000 * min(due_s - now_s, _LONGEST_WAIT_S)) + 1)

    def _apply_faults(self, now_s: float) -> None:
        """Learn what is wrong now; break every connection when that is due."""
        self._is_cut = self._faults.is_cut(now_s)
        self._corrupts = self._faults.corrupts(now_s)
        num_breaks = self._faults.num_breaks(now_s)
        if num_breaks > self._num_breaks:
            self._num_breaks = num_breaks
            for peer in list(self._peers.values()):
                self._drop_peer(peer)
            break_accepted(self._endpoint)

    def _drain_wake(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            return

    def _receive_from_consumers(self, now_s: float) -> None:
        for _ in range(_MAX_BATCH):
            frames = _receive(self._router)
            if frames is None:
                return
            if self._is_cut:
                continue
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
            if self._is_cut:
                continue
            payload = _as_bytes(frames[1]) if len(frames) == 2 else None
            try:
                message = decode_to_consumer(frames[0].bytes)
            except WireError:
                self._counters.num_malformed += 1
                continue
            self._sessions.consumer.on_message(peer.endpoint, message, payload, now_s)
        if is_lost:
            self._drop_peer(peer)

    def _drop_peer(self, peer: _Peer) -> None:
        """Fail what was expected from a producer; a later load connects anew."""
        del self._peers[peer.endpoint]
        self._poller.unregister(peer.dealer)
        self._poller.unregister(peer.monitor)
        peer.close()
        self._sessions.consumer.on_peer_lost(peer.endpoint)

    def _send(self) -> None:
        for to_consumer in self._sessions.producer.take_sends():
            self._send_to_consumer(to_consumer)
        for to_producer in self._sessions.consumer.take_sends():
            self._send_to_producer(to_producer)

    def _send_to_consumer(self, send: SendToConsumer) -> None:
        """Send through the ROUTER, whose queue the credits bound."""
        if self._is_cut:
            return
        head = [send.peer, encode(send.message)]
        try:
            if send.payload is None:
                self._router.send_multipart(head, zmq.NOBLOCK)
            else:
                self._router.send_multipart(head, zmq.NOBLOCK | zmq.SNDMORE)
                if self._corrupts:
                    send.payload[:, 0] ^= 0xFF  # A byte of every block, after the checksum.
                self._router.send(send.payload.data, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._sessions.producer.on_peer_lost(send.peer)

    def _send_to_producer(self, send: SendToProducer) -> None:
        if self._is_cut:
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
        peer = _Peer(self._context, endpoint)
        try:
            peer.connect(self._settings, self._max_bytes)
        except zmq.ZMQError as error:
            logger.warning("cannot connect KV transfer to %s: %s", endpoint, error)
            peer.close()
            self._sessions.consumer.on_peer_lost(endpoint)
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


def _set_options(endpoint: zmq.Socket[bytes], settings: ConnectorSettings, max_bytes: int) -> None:
    config = settings.config
    endpoint.set(zmq.LINGER, 0)
    endpoint.set(zmq.MAXMSGSIZE, max_bytes)
    endpoint.set(zmq.HEARTBEAT_IVL, int(1000 * config.heartbeat_s))
    endpoint.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * config.heartbeat_timeout_s))
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
