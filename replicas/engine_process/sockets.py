"""An engine's two sockets to its clients, and the threads that own them.

Both sockets accept only clients of the engine's deployment (`kv_transfer.curve`). The core drops
disconnected clients (their connection broke, or they do not read).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from kv_transfer.addresses import check_listen_host
from kv_transfer.curve import CurveAuthenticator, secure_server
from kv_transfer.io_threads import new_context
from replicas.codec import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    decode_client_message,
    encode,
)
from replicas.engine_process.parent import GONE, Inbox, Unreadable
from replicas.errors import UnreadableMessageError
from replicas.messages import EngineFrame, NotGreeted

if TYPE_CHECKING:
    from replicas.engine_process.parent import EngineArguments, InboxItem
    from replicas.watchdog import Watchdog

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Seconds after its last frame after which a client gets an empty frame."""
_SEND_HWM = 100_000
"""Most frames that may wait for one client; a client that is further behind counts as gone."""
_RECEIVE_HWM = 64
"""Most messages of one connection that may wait behind the inbox.

A socket with this limit must have no ZMQ heartbeats. libzmq aborts the process ("!_io_error") if a
connection breaks while it is not read, because its queue is full, and a heartbeat is due or
unanswered."""
_KEEPALIVE = {
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 1,
    "TCP_KEEPALIVE_INTVL": 1,
    "TCP_KEEPALIVE_CNT": 5,
}
"""TCP options with which the kernel breaks an idle connection to a vanished peer within 6 s.

TCP_MAXRT is not used, because it also breaks connections to a live peer whose buffers are full."""
_MAX_THROWN_AWAY = 64
"""Most messages read from the output socket between two frames, so that a flood cannot delay
frames."""
_MAX_SILENT_BYTES = 1024
"""Largest message on the output socket, where clients send nothing but ZMQ's own commands."""


class SocketMaker:
    """Maker of the two sockets, to which only clients of the deployment can connect.

    Owner of the ZMQ context and of the thread that authenticates connections.

    Args:
        arguments: Arguments of the engine's start.

    Raises:
        AddressError: The address is not one that an engine may listen on.
        ServerKeyError: There is no secret.
    """

    def __init__(self, arguments: EngineArguments) -> None:
        # A secret is certain: without one `_bind` fails.
        check_listen_host(arguments.host, has_secrets=True)
        self.incarnation = arguments.incarnation
        self._host, self._keys = arguments.host, arguments.config.keys
        self.context = new_context()
        CurveAuthenticator(self.context, self._keys, self._on_denied)

    def open_input(self, max_message_bytes: int) -> zmq.Socket[bytes]:
        """Open the socket for clients' messages, of at most this many bytes."""
        return self._bind(max_message_bytes, RCVHWM=_RECEIVE_HWM, **_KEEPALIVE)

    def open_output(self) -> zmq.Socket[bytes]:
        """Open the socket for frames to clients."""
        return self._bind(
            _MAX_SILENT_BYTES,
            # No limit, because of the heartbeats (see `_RECEIVE_HWM`); `_throw_away` empties it.
            RCVHWM=0,
            SNDHWM=_SEND_HWM,
            ROUTER_MANDATORY=1,
            HEARTBEAT_IVL=HEARTBEAT_MS,
            HEARTBEAT_TIMEOUT=HEARTBEAT_TIMEOUT_MS,
        )

    def _bind(self, max_message_bytes: int, **options: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        secure_server(socket, self._keys, self.incarnation)
        socket.set(zmq.LINGER, 0)
        # A client that reconnects under its identity takes over from its own dead connection.
        socket.set(zmq.ROUTER_HANDOVER, 1)
        # ZMQ closes a connection that sends a larger message.
        socket.set(zmq.MAXMSGSIZE, max_message_bytes)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        socket.bind(f"tcp://{self._host}:*")
        return socket

    def _on_denied(self) -> None:
        logger.warning("rejected a connection without a key of this deployment")


class Receiver(threading.Thread):
    """Thread that reads clients' messages into the inbox; owner of the input socket.

    Args:
        socket: The input socket.
        inbox: Receives the messages; while it is full nothing is read.
    """

    def __init__(self, socket: zmq.Socket[bytes], inbox: Inbox) -> None:
        super().__init__(name="engine-receiver", daemon=True)
        self._inbox = inbox
        self._socket = socket
        self.endpoint = _endpoint(self._socket)

    def run(self) -> None:
        """Receive until the context is terminated."""
        try:
            while True:
                self._take(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            logger.warning("dropped a malformed message of %d parts", len(frames))
            return
        client, raw = frames
        try:
            item: InboxItem = client, decode_client_message(raw)
        except UnreadableMessageError as error:
            logger.warning("dropped an unreadable message of %d bytes: %s", len(raw), error)
            if error.request_id is None:
                return
            item = client, Unreadable(error.request_id, str(error))
        self._inbox.put_message(item, max(len(raw), 1))


class Sender(threading.Thread):
    """Sender of frames, and a thread that sends heartbeats.

    Owner of the output socket and of the set of reachable clients, both under one lock. The core
    thread sends its frames itself: handing each to another thread would make both wait for the
    interpreter lock several times.

    A client that cannot be reached has missed a frame. It gets nothing more until the core, which
    is notified, has dropped its requests.

    Args:
        socket: The output socket.
        incarnation: The engine's incarnation.
        inbox: Receives a `ClientGone` for each client that cannot be reached.
        watchdog: Progress of the core, which heartbeats report.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        incarnation: str,
        inbox: Inbox,
        watchdog: Watchdog,
    ) -> None:
        super().__init__(name="engine-sender", daemon=True)
        self._inbox = inbox
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._watchdog = watchdog
        self._heartbeat = EngineFrame(incarnation)
        # Clients that have said Hello; and unreachable ones that the core has not dropped yet.
        self._last_sent_s: dict[bytes, float] = {}
        self._given_up: set[bytes] = set()
        self._next_look_s = 0.0
        self._socket = socket
        self.endpoint = _endpoint(self._socket)

    def run(self) -> None:
        """Send heartbeats until `stop`."""
        while not self._stopped.wait(max(self._next_look_s - time.monotonic(), 0.0)):
            with self._lock:
                self._send_heartbeats()
        with self._lock:
            self._socket.close(linger=500)

    def stop(self) -> None:
        """Close the socket once all frames have been sent; no more may follow."""
        self._stopped.set()

    def forget(self, client: bytes) -> None:
        """Allow a client to say Hello again, as the core has dropped its requests."""
        with self._lock:
            self._given_up.discard(client)
            self._last_sent_s.pop(client, None)

    def send(self, client: bytes, frame: EngineFrame) -> None:
        """Send a client a frame, if it can be reached; never waits for it."""
        with self._lock:
            self._send_frame(client, frame)

    def _send_frame(self, client: bytes, frame: EngineFrame) -> None:
        if frame.events and isinstance(frame.events[0], NotGreeted):
            # The recipient has not said Hello: keep no state of it, and send it no heartbeats.
            if client not in self._given_up:
                self._is_sent(client, encode(frame))
        elif client not in self._given_up:
            self._send(client, encode(frame))

    def _send(self, client: bytes, raw: bytes) -> None:
        """Send a frame to a client that has said Hello."""
        if self._is_sent(client, raw):
            self._last_sent_s[client] = time.monotonic()
        else:
            # A client that is still connecting has no requests yet, and says Hello again.
            self._last_sent_s.pop(client, None)
            self._given_up.add(client)
            self._inbox.put((client, GONE))

    def _throw_away(self, now_s: float) -> None:
        """Read and drop messages on the output socket, so that they cannot pile up."""
        if now_s < self._next_look_s:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_THROWN_AWAY):
                self._socket.recv_multipart(zmq.NOBLOCK)
            return  # There is more: the next look is due at once.
        self._next_look_s = now_s + HEARTBEAT_S

    def _is_sent(self, client: bytes, raw: bytes) -> bool:
        """Send a frame; return False if the client is not connected, or does not read."""
        try:
            self._socket.send_multipart((client, raw), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            return False
        return True

    def _send_heartbeats(self) -> None:
        now_s = time.monotonic()
        self._throw_away(now_s)
        due = [c for c, last_s in self._last_sent_s.items() if now_s - last_s >= HEARTBEAT_S]
        if not due:
            return
        # This thread lives on when the core thread hangs in a device call.
        stalled_s = self._watchdog.stalled_s(now_s)
        raw = encode(msgspec.structs.replace(self._heartbeat, stalled_s=stalled_s))
        for client in due:
            self._send(client, raw)


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
