"""The engine process: a core thread that steps, a thread that receives, a thread that sends.

Started as `python -m replicas.engine.process` by `replicas.launch`, which writes one line of JSON
to stdin and then keeps the pipe open: end of file means that the parent is gone, and so is this
process. Readiness, progress and start-up failure go back as JSON lines on the file descriptor that
it names, and so does a beat all the while: a device that hangs, or a call that never gives the
interpreter back, can only be noticed from outside.

Threads share nothing but two queues. A ZMQ socket belongs to one thread. Clients that are gone
(their connection broke, or they do not read) have their requests dropped.
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

from kv_transfer.errors import KVTransferError
from replicas.codec import MAX_MESSAGE_BYTES, decode_client_message, encode
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.fault_injection import ClientLinks, EngineFaults, SignalSender, engine_faults
from replicas.engine.pulse import Pulse
from replicas.engine.reports import EngineArguments, EngineReport
from replicas.engine.server import EngineServer, describe
from replicas.errors import EngineError
from replicas.messages import EngineFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.messages import ClientMessage

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
_ZMQ_HEARTBEAT_MS, _ZMQ_HEARTBEAT_TIMEOUT_MS = 1000, 5000


class _Wake(msgspec.Struct, frozen=True):
    """A step is due although no message came."""


class _ClientGone(msgspec.Struct, frozen=True):
    """The sender cannot reach a client any more."""


class _Stop(msgspec.Struct, frozen=True):
    """End the process."""


_WAKE, _GONE, _STOP = _Wake(), _ClientGone(), _Stop()
InboxItem = tuple[bytes, "ClientMessage | _Wake | _ClientGone | _Stop"]
Inbox = queue.SimpleQueue[InboxItem]
Outbox = queue.SimpleQueue["tuple[bytes, EngineFrame] | None"]


class Receiver(threading.Thread):
    """Reads client messages into the inbox; owns the input socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        inbox: Inbox,
        links: ClientLinks,
    ) -> None:
        super().__init__(name="engine-receiver", daemon=True)
        self._inbox = inbox
        self._links = links
        self._socket = _bind_router(context, host)
        self.endpoint = _endpoint(self._socket)
        links.add(self.endpoint)

    def run(self) -> None:
        """Receive until the context is terminated."""
        try:
            while True:
                frames = self._socket.recv_multipart()
                if len(frames) != 2 or not self._links.hears():
                    continue
                try:
                    message = decode_client_message(frames[1])
                except msgspec.MsgspecError as error:
                    logger.warning(
                        "dropped a malformed message of %d bytes: %s", len(frames[1]), error
                    )
                    continue
                self._inbox.put((frames[0], message))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)


class Sender(threading.Thread):
    """Sends frames and heartbeats; owns the output socket and the set of reachable clients."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
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
        self._last_sent_s: dict[bytes, float] = {}
        self._socket = _bind_router(context, host)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
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
            client, frame = item
            self._send(client, encode(frame))
            self._send_heartbeats()

    def _send(self, client: bytes, raw: bytes) -> None:
        if not self._links.speaks():
            return
        try:
            self._socket.send_multipart((client, raw), flags=zmq.NOBLOCK)
            self._last_sent_s[client] = time.monotonic()
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            # One that is still connecting has no requests yet, and says Hello again.
            self._last_sent_s.pop(client, None)
            self._inbox.put((client, _GONE))

    def _send_heartbeats(self) -> None:
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
    """

    def __init__(self, server: EngineServer, inbox: Inbox, outbox: Outbox) -> None:
        self._server = server
        self._inbox = inbox
        self._outbox = outbox
        self._pulse = server.core.pulse
        self._stopped = False

    def run(self) -> None:
        """Loop until `_STOP` comes."""
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

    def _take(self, client: bytes, message: ClientMessage | _Wake | _ClientGone | _Stop) -> None:
        match message:
            case _Wake():
                pass
            case _ClientGone():
                self._server.client_gone(client)
            case _Stop():
                self._stopped = True
            case _:
                self._server.take(client, message, time.monotonic())


def main() -> None:
    """Run an engine until the parent closes stdin or sends SIGTERM."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s engine[%(process)d] %(message)s"
    )
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineArguments)
    # Not for processes of ours, a compiler for one: the parent takes its end for ours.
    os.set_inheritable(arguments.ready_fd, False)
    report = os.fdopen(arguments.ready_fd, "wb", buffering=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    # Ctrl-C reaches the whole process group: the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faults = engine_faults(arguments.config)

    def stop() -> None:
        if not faults.clings():
            inbox.put((b"", _STOP))

    signal.signal(signal.SIGTERM, lambda _signal, _frame: stop())
    threading.Thread(
        target=_stop_at_eof,
        args=(stop, faults, arguments.stop_timeout_s),
        name="parent-watch",
        daemon=True,
    ).start()

    def tell(line: EngineReport) -> None:
        report.write(msgspec.json.encode(line) + b"\n")

    pulse = Pulse()
    threading.excepthook = _die_with_thread
    threading.Thread(target=_beat, args=(tell, pulse), name="engine-beat", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        signal_sender = SignalSender(faults)
        links = ClientLinks(faults)
        executor = UniProcExecutor(
            arguments.config,
            arguments.incarnation,
            notify=lambda: inbox.put((b"", _WAKE)),
            progress=lambda stage, fraction: tell(EngineReport(stage=stage, fraction=fraction)),
        )
        core = EngineCore(
            arguments.config, executor, arguments.incarnation, faults.unix_now_s, pulse
        )
        receiver = Receiver(context, arguments.host, inbox, links)
        sender = Sender(
            context, arguments.host, arguments.incarnation, (outbox, inbox), links, pulse
        )
    except (EngineError, KVTransferError, OSError, RuntimeError, ValueError, zmq.ZMQError) as error:
        tell(EngineReport(failed=f"{type(error).__name__}: {error}"))
        sys.exit(1)
    receiver.start()
    sender.start()
    tell(
        EngineReport(
            ready=describe(
                core, arguments.incarnation, receiver.endpoint, sender.endpoint, os.getpid()
            ),
            warm_up_s=core.warm_up_s,
        )
    )
    EngineProcess(EngineServer(core, arguments.incarnation), inbox, outbox).run()
    core.shutdown()
    outbox.put(None)
    sender.join(timeout=1.0)
    context.term()
    signal_sender.close()


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


def _stop_at_eof(stop: Callable[[], None], faults: EngineFaults, timeout_s: float) -> None:
    """Ask for the end once the parent closes stdin, and insist if the core thread is stuck."""
    # Not through the buffered reader: this thread may still wait when the interpreter ends, which
    # aborts if somebody holds the buffer's lock. Nothing is in the buffer: one line was sent.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()
    # One that is to cling does so for longer than its parent waits, and not for ever: whatever
    # happens to the parent, nothing of it is to be left.
    time.sleep(3 * timeout_s if faults.clings() else timeout_s)
    os._exit(1)


def _bind_router(context: zmq.Context[zmq.Socket[bytes]], host: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    # A client that reconnects under its identity takes over from its own dead connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ZMQ_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ZMQ_HEARTBEAT_TIMEOUT_MS)
    socket.bind(f"tcp://{host}:*")
    return socket


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


if __name__ == "__main__":
    main()
