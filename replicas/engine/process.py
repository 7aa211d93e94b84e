"""The engine process: a core thread that steps, a thread that receives, a thread that sends.

Started as `python -m replicas.engine.process` by `replicas.launch`, which writes one line of JSON
to stdin and then keeps the pipe open: end of file means that the parent is gone, and so is this
process. Readiness, progress and start-up failure go back as JSON lines on the file descriptor that
it names, and so does a beat all the while: a device that hangs, or a call that never gives the
interpreter back, can only be noticed from outside.

Threads share nothing but two queues. A ZMQ socket belongs to one thread. Clients that are gone
(their connection broke, or they do not read) have their requests dropped. Both sockets let in only
clients of the engine's deployment (`kv_transfer.curve`); what the parent alone may say, to end and
to drain, comes through the pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from kv_transfer.addresses import check_listen_host
from kv_transfer.curve import Doorkeeper, secure_server
from kv_transfer.errors import KVTransferError
from replicas.codec import decode_client_message, encode, max_client_message_bytes
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.fault_injection import ClientLinks, EngineFaults, SignalSender, engine_faults
from replicas.engine.inbox import (
    DRAIN,
    GONE,
    STOP,
    WAKE,
    ClientGone,
    Drain,
    Inbox,
    Stop,
    Unreadable,
    Wake,
)
from replicas.engine.logs import log_to_standard_error
from replicas.engine.pulse import Pulse
from replicas.engine.reports import DRAIN_LINE, EngineArguments, EngineReport
from replicas.engine.server import EngineServer, describe
from replicas.errors import EngineError, UnreadableMessageError
from replicas.messages import EngineFrame, NotGreeted

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.engine.inbox import InboxItem, Said

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""A client that gets nothing else gets an empty frame this often."""
BEAT_S = 0.25
"""The parent gets a beat this often, unless nothing in this process moves."""
MAX_MESSAGES_PER_STEP = 4096
"""Messages that are taken between two steps."""
SWITCH_INTERVAL_S = 0.0002
"""Interpreter switch interval: at the default 5 ms the socket threads starve beside the core."""
_SEND_HWM = 100_000
_RECEIVE_HWM = 64
"""Messages of one connection that may wait behind the inbox.

Such a socket must have no ZMQ heartbeats: libzmq ends the process ("!_io_error") when a connection
breaks on which it had stopped reading, for its queue was full, and a heartbeat is due or waits to
be answered."""
_KEEPALIVE = {
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 1,
    "TCP_KEEPALIVE_INTVL": 1,
    "TCP_KEEPALIVE_CNT": 5,
}
"""So that the kernel breaks an idle connection whose other end has vanished, in 6 s.

Never TCP_MAXRT: it breaks one, too, whose other end lives and has no room, as a clogged engine."""
_MAX_THROWN_AWAY = 10_000
_MAX_SILENT_BYTES = 1024
"""Largest message that the output socket reads: clients say nothing there, only their ZMQ does."""
_ZMQ_HEARTBEAT_MS, _ZMQ_HEARTBEAT_TIMEOUT_MS = 1000, 5000


_START_ERRORS = (EngineError, KVTransferError, OSError, RuntimeError, ValueError, zmq.ZMQError)
"""What a start may fail with and the parent is told; anything else is a bug, with its traceback."""


class _Forget(msgspec.Struct, frozen=True):
    """The core has dropped all of a client's requests: it may be greeted again."""


_FORGET = _Forget()
Outbox = queue.SimpleQueue["tuple[bytes, EngineFrame | _Forget] | None"]


class Door:
    """Where clients may connect: makes the two sockets, for clients of the deployment alone.

    Owner of the context and of the thread that checks who connects.

    Args:
        arguments: What the parent says.

    Raises:
        AddressError: The address is not one that an engine may listen on.
        ServerKeyError: There is no secret.
    """

    def __init__(self, arguments: EngineArguments) -> None:
        # With a secret always: without one no socket of this door can be made.
        check_listen_host(arguments.host, has_secrets=True)
        self.incarnation = arguments.incarnation
        self._host, self._keys = arguments.host, arguments.config.keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        Doorkeeper(self.context, self._keys, self._on_denied)

    def bind(self, max_message_bytes: int, **options: int) -> zmq.Socket[bytes]:
        """A socket that listens on a free port.

        Args:
            max_message_bytes: A connection that brings more at once is closed.
            **options: Further ones of ZMQ's, by name.
        """
        socket = self.context.socket(zmq.ROUTER)
        secure_server(socket, self._keys, self.incarnation)
        socket.set(zmq.LINGER, 0)
        # A client that reconnects under its identity takes over from its own dead connection.
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.set(zmq.MAXMSGSIZE, max_message_bytes)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        socket.bind(f"tcp://{self._host}:*")
        return socket

    def _on_denied(self) -> None:
        logger.warning("turned away a connection without a key of this deployment")


class Receiver(threading.Thread):
    """Reads client messages into the inbox; owns the input socket.

    Args:
        socket: The input socket.
        inbox: Where they go; while it is full nothing is read.
        links: Whether they get through.
    """

    def __init__(self, socket: zmq.Socket[bytes], inbox: Inbox, links: ClientLinks) -> None:
        super().__init__(name="engine-receiver", daemon=True)
        self._inbox = inbox
        self._links = links
        self._socket = socket
        self.endpoint = _endpoint(self._socket)
        links.add(self.endpoint)

    def run(self) -> None:
        """Receive until the context is terminated."""
        try:
            while True:
                frames = self._socket.recv_multipart()
                if self._links.hears():
                    self._take(frames)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            logger.warning("dropped a message of %d parts", len(frames))
            return
        client, raw = frames
        try:
            item: InboxItem = client, decode_client_message(raw)
        except UnreadableMessageError as error:
            logger.warning("cannot read a message of %d bytes: %s", len(raw), error)
            if error.request_id is None:
                return
            item = client, Unreadable(error.request_id, str(error))
        self._inbox.put_message(item, max(len(raw), 1))


class Sender(threading.Thread):
    """Sends frames and heartbeats; owns the output socket and the set of reachable clients.

    A client that cannot be reached has missed a frame: it gets nothing more until the core, which
    is told, has dropped its requests.

    Args:
        socket: The output socket.
        incarnation: The engine's.
        queues: What is to be sent, and where the core is told who is gone.
        links: Whether frames get through.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        incarnation: str,
        queues: tuple[Outbox, Inbox],
        links: ClientLinks,
        pulse: Pulse,
    ) -> None:
        super().__init__(name="engine-sender", daemon=True)
        self._outbox, self._inbox = queues
        self._links = links
        self._pulse = pulse
        self._heartbeat = EngineFrame(incarnation)
        # Those that were greeted; and those that the core does not know yet to be gone.
        self._last_sent_s: dict[bytes, float] = {}
        self._given_up: set[bytes] = set()
        self._socket = socket
        self.endpoint = _endpoint(self._socket)
        links.add(self.endpoint)

    def run(self) -> None:
        """Send until None comes."""
        while True:
            try:
                item = self._outbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                self._send_heartbeats()
                continue
            if item is None:
                self._socket.close(linger=500)
                return
            self._take(*item)
            self._send_heartbeats()

    def _take(self, client: bytes, frame: EngineFrame | _Forget) -> None:
        if isinstance(frame, _Forget):
            self._given_up.discard(client)
            self._last_sent_s.pop(client, None)
        elif frame.events and isinstance(frame.events[0], NotGreeted):
            # It may be anybody: nothing is kept of it, and nothing is owed to it.
            if client not in self._given_up and self._links.speaks():
                self._is_sent(client, encode(frame))
        elif client not in self._given_up:
            self._send(client, encode(frame))

    def _send(self, client: bytes, raw: bytes) -> None:
        """Send something to a client that was greeted."""
        if not self._links.speaks():
            return
        if self._is_sent(client, raw):
            self._last_sent_s[client] = time.monotonic()
        else:
            # One that is still connecting has no requests yet, and says Hello again.
            self._last_sent_s.pop(client, None)
            self._given_up.add(client)
            self._inbox.put((client, GONE))

    def _throw_away(self) -> None:
        """Read what clients say here, where they have nothing to say, lest it piles up."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_THROWN_AWAY):
                self._socket.recv_multipart(zmq.NOBLOCK)

    def _is_sent(self, client: bytes, raw: bytes) -> bool:
        """Whether it is on its way; not if nobody is connected, or reads, under that name."""
        try:
            self._socket.send_multipart((client, raw), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            return False
        return True

    def _send_heartbeats(self) -> None:
        self._throw_away()
        now_s = time.monotonic()
        due = [c for c, last_s in self._last_sent_s.items() if now_s - last_s >= HEARTBEAT_S]
        if not due:
            return
        # This thread lives on when the core thread hangs in a device call.
        stalled_s = self._pulse.stalled_s(now_s)
        raw = encode(msgspec.structs.replace(self._heartbeat, stalled_s=stalled_s))
        for client in due:
            self._send(client, raw)


class EngineProcess:
    """The core thread's loop: drain the inbox, step, hand out frames.

    Args:
        server: The engine behind its clients.
        inbox: Messages from the receiver, and wake-ups.
        outbox: Frames for the sender.
        on_drained: Called once, when nothing is left of what it had before it was told to drain.
    """

    def __init__(
        self,
        server: EngineServer,
        inbox: Inbox,
        outbox: Outbox,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = server
        self._inbox = inbox
        self._outbox = outbox
        self._pulse = server.core.pulse
        self._on_drained = on_drained
        self._is_draining = False
        self._stopped = False

    def run(self) -> None:
        """Loop until `STOP` comes."""
        ran = False
        while not self._stopped:
            self._pulse.work(time.monotonic())
            # After a step that ran nothing, another one would spin: wait for a message or a
            # deadline.
            self._drain_inbox(wait=not ran)
            step = self._server.core.begin_step(time.monotonic())
            # Tokens leave before KV is copied for anybody: the copy costs their clients nothing.
            self._server.core.publish(step)
            self._send_frames()
            ran = self._server.core.end_step(step, time.monotonic())
            if step.meta is not None:
                self._send_frames()
            if self._is_draining and self._server.is_drained:
                self._is_draining = False
                self._on_drained()

    def _send_frames(self) -> None:
        for item in self._server.frames(time.monotonic()):
            self._outbox.put(item)

    def _drain_inbox(self, *, wait: bool) -> None:
        """Take every message that is there; with `wait`, block until one is or a deadline."""
        try:
            if wait:
                self._pulse.rest(time.monotonic())
            item = self._inbox.get(block=wait, timeout=self._wait_s())
            self._pulse.work(time.monotonic())
            # Bounded, so that a flood of messages cannot keep the core from stepping.
            for _ in range(MAX_MESSAGES_PER_STEP):
                self._take(*item)
                item = self._inbox.get_nowait()
            self._take(*item)
        except queue.Empty:
            return
        finally:
            self._pulse.work(time.monotonic())

    def _wait_s(self) -> float | None:
        deadline_s = self._server.next_deadline_s()
        return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)

    def _take(self, client: bytes, message: Said) -> None:
        match message:
            case Wake():
                pass
            case ClientGone():
                self._server.client_gone(client)
                self._outbox.put((client, _FORGET))
            case Unreadable(request_id, problem):
                self._server.take_unreadable(client, request_id, problem)
            case Drain():
                self._server.drain()
                self._is_draining = True
            case Stop():
                self._stopped = True
            case _:
                self._server.take(client, message, time.monotonic())


def main() -> None:
    """Run an engine until the parent closes stdin or sends SIGTERM."""
    log_to_standard_error()
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineArguments)
    # Not for processes of ours, a compiler for one: the parent takes its end for ours.
    os.set_inheritable(arguments.ready_fd, False)
    report = os.fdopen(arguments.ready_fd, "wb", buffering=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    inbox = Inbox()
    outbox: Outbox = queue.SimpleQueue()
    # Ctrl-C reaches the whole process group: the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faults = engine_faults(arguments.config)

    signal.signal(signal.SIGTERM, lambda _signal, _frame: _ask_to_stop(inbox, faults))
    threading.Thread(
        target=_obey,
        args=(inbox, faults, arguments.stop_timeout_s),
        name="parent-watch",
        daemon=True,
    ).start()

    def tell(line: EngineReport) -> None:
        report.write(msgspec.json.encode(line) + b"\n")

    pulse = Pulse()
    threading.excepthook = _die_with_thread
    threading.Thread(target=_beat, args=(tell, pulse), name="engine-beat", daemon=True).start()
    with contextlib.closing(SignalSender(faults)):
        try:
            door = Door(arguments)
            executor = UniProcExecutor(
                arguments.config,
                arguments.incarnation,
                notify=lambda: inbox.put((b"", WAKE)),
                progress=lambda stage, fraction: tell(EngineReport(stage=stage, fraction=fraction)),
            )
            core = EngineCore(
                arguments.config, executor, arguments.incarnation, faults.unix_now_s, pulse
            )
            receiver, sender = _open_sockets(door, core, (inbox, outbox), faults)
        except _START_ERRORS as error:
            tell(EngineReport(failed=f"{type(error).__name__}: {error}"))
            sys.exit(1)
        receiver.start()
        sender.start()
        described = describe(
            core, arguments.incarnation, receiver.endpoint, sender.endpoint, os.getpid()
        )
        tell(EngineReport(ready=described, warm_up_s=core.warm_up_s))
        EngineProcess(
            EngineServer(core, arguments.incarnation), inbox, outbox,
            on_drained=lambda: tell(EngineReport(is_drained=True)),
        ).run()  # fmt: skip
        inbox.close()
        core.shutdown()
        outbox.put(None)
        sender.join(timeout=1.0)
        door.context.term()


def _open_sockets(
    door: Door, core: EngineCore, queues: tuple[Inbox, Outbox], faults: EngineFaults
) -> tuple[Receiver, Sender]:
    inbox, outbox = queues
    links = ClientLinks(faults)
    from_clients = door.bind(
        max_client_message_bytes(core.max_model_len), RCVHWM=_RECEIVE_HWM, **_KEEPALIVE
    )
    to_clients = door.bind(
        _MAX_SILENT_BYTES,
        RCVHWM=0,
        SNDHWM=_SEND_HWM,
        ROUTER_MANDATORY=1,
        HEARTBEAT_IVL=_ZMQ_HEARTBEAT_MS,
        HEARTBEAT_TIMEOUT=_ZMQ_HEARTBEAT_TIMEOUT_MS,
    )
    receiver = Receiver(from_clients, inbox, links)
    return receiver, Sender(to_clients, door.incarnation, (outbox, inbox), links, core.pulse)


def _die_with_thread(args: threading.ExceptHookArgs) -> None:
    """An engine without one of its threads would look alive and serve nobody: end it."""
    logger.critical(
        "thread %s failed", args.thread.name if args.thread else "?",
        exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
    )  # fmt: skip
    os._exit(1)


def _beat(tell: Callable[[EngineReport], None], pulse: Pulse) -> None:
    """Tell the parent that this process moves, until nobody reads it."""
    with contextlib.suppress(OSError):
        while True:
            tell(EngineReport(beat=pulse.count))
            time.sleep(BEAT_S)


def _ask_to_stop(inbox: Inbox, faults: EngineFaults) -> None:
    """Tell the core thread to end, unless it is made to refuse."""
    if not faults.clings():
        inbox.put((b"", STOP))


def _obey(inbox: Inbox, faults: EngineFaults, timeout_s: float) -> None:
    """Drain when the parent says so, and end once it closes stdin: ask the core, then insist."""
    # Not through the buffered reader: this thread may still wait when the interpreter ends, which
    # aborts if somebody holds the buffer's lock. Nothing is in the buffer: the parent says nothing
    # before it has been told that the engine runs.
    rest = b""
    while said := os.read(sys.stdin.fileno(), 4096):
        *lines, rest = (rest + said).split(b"\n")
        if DRAIN_LINE in lines:
            inbox.put((b"", DRAIN))
    _ask_to_stop(inbox, faults)
    # One that is to cling does so for longer than its parent waits, and not for ever: whatever
    # happens to the parent, nothing of it is to be left.
    time.sleep(3 * timeout_s if faults.clings() else timeout_s)
    os._exit(1)


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


if __name__ == "__main__":
    main()
