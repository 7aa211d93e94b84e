"""The engine process: a core thread that steps, a thread that receives, a thread that sends.

Started as `python -m replicas.engine.process` by `replicas.launch`, which writes one line of JSON
to stdin and then keeps the pipe open: end of file means that the parent is gone, and so is this
process. Readiness, progress and start-up failure go back as JSON lines on the file descriptor that
it names.

Threads share nothing but two queues. A ZMQ socket belongs to one thread. Clients that are gone
(their connection broke, or they do not read) have their requests dropped.
"""

from __future__ import annotations

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
from replicas.config import EngineConfig
from replicas.engine.core import EngineCore
from replicas.errors import EngineError
from replicas.messages import (
    PROTOCOL_VERSION,
    EngineDescription,
    EngineFrame,
    Hello,
)

if TYPE_CHECKING:
    from replicas.messages import ClientMessage, EngineEvent

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""A client that gets nothing else gets an empty frame this often."""
SNAPSHOT_S = 0.01
"""Clients without outputs in a step get a changed snapshot after at most this long."""
MAX_MESSAGES_PER_STEP = 4096
"""Messages that are taken between two steps."""
SWITCH_INTERVAL_S = 0.0002
"""Interpreter switch interval: at the default 5 ms the socket threads starve beside the core."""
_SEND_HWM = 100_000
_ZMQ_HEARTBEAT_MS, _ZMQ_HEARTBEAT_TIMEOUT_MS = 1000, 5000


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON on stdin.

    Attributes:
        config: The engine's configuration.
        incarnation: Random id of this start.
        host: Address to bind the two client sockets to, on free ports.
        ready_fd: Inherited descriptor for `EngineReport` lines.
    """

    config: EngineConfig
    incarnation: str
    host: str
    ready_fd: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line on the ready descriptor; exactly one of the fields is set.

    Attributes:
        stage: What is being done, with `fraction` done of it.
        fraction: 0 to 1.
        ready: The engine runs.
        failed: It does not: why, for a person.
    """

    stage: str | None = None
    fraction: float = 0.0
    ready: EngineDescription | None = None
    failed: str | None = None


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

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, inbox: Inbox) -> None:
        super().__init__(name="engine-receiver", daemon=True)
        self._inbox = inbox
        self._socket = _bind_router(context, host)
        self.endpoint = _endpoint(self._socket)

    def run(self) -> None:
        """Receive until the context is terminated."""
        try:
            while True:
                frames = self._socket.recv_multipart()
                if len(frames) != 2:
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
        outbox: Outbox,
        inbox: Inbox,
    ) -> None:
        super().__init__(name="engine-sender", daemon=True)
        self._outbox = outbox
        self._inbox = inbox
        self._heartbeat = encode(EngineFrame(incarnation))
        self._last_sent_s: dict[bytes, float] = {}
        self._socket = _bind_router(context, host)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self.endpoint = _endpoint(self._socket)

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
        for client, last_s in list(self._last_sent_s.items()):
            if now_s - last_s >= HEARTBEAT_S:
                self._send(client, self._heartbeat)


class EngineProcess:
    """The core thread's loop: drain the inbox, step, hand out frames.

    Args:
        core: The engine.
        incarnation: Random id of this start.
        inbox: Messages from the receiver, and wake-ups.
        outbox: Frames for the sender.
    """

    def __init__(self, core: EngineCore, incarnation: str, inbox: Inbox, outbox: Outbox) -> None:
        self._core = core
        self._incarnation = incarnation
        self._inbox = inbox
        self._outbox = outbox
        self._clients: set[bytes] = set()
        self._snapshot = core.snapshot(0)
        # Clients that have not had the latest snapshot.
        self._behind: set[bytes] = set()
        self._flushed_s = 0.0
        self._stopped = False

    def run(self) -> None:
        """Loop until `_STOP` comes."""
        ran = False
        while not self._stopped:
            # After a step that ran nothing, another one would spin: wait for a message or a
            # deadline.
            self._drain_inbox(wait=not ran)
            ran = self._core.step(time.monotonic())
            self._publish()

    def _drain_inbox(self, *, wait: bool) -> None:
        """Take every message that is there; with `wait`, block until one is or a deadline."""
        try:
            item = self._inbox.get(block=wait, timeout=self._wait_s())
            # Bounded, so that a flood of messages cannot keep the core from stepping.
            for _ in range(MAX_MESSAGES_PER_STEP):
                self._take(*item)
                item = self._inbox.get_nowait()
            self._take(*item)
        except queue.Empty:
            return

    def _wait_s(self) -> float | None:
        now_s = time.monotonic()
        waits = []
        deadline_s = self._core.next_deadline_s()
        if deadline_s is not None:
            waits.append(deadline_s - now_s)
        if self._behind:
            waits.append(self._flushed_s + SNAPSHOT_S - now_s)
        return max(min(waits), 0.0) if waits else None

    def _take(self, client: bytes, message: ClientMessage | _Wake | _ClientGone | _Stop) -> None:
        match message:
            case Hello():
                self._greet(client, message)
            case _Wake():
                pass
            case _ClientGone():
                self._clients.discard(client)
                self._behind.discard(client)
                num_dropped = self._core.client_gone(client)
                if num_dropped:
                    logger.warning("client %s is gone: dropped %d", client.hex(), num_dropped)
            case _Stop():
                self._stopped = True
            case _ if client in self._clients:
                self._core.handle(client, message, time.monotonic())
            case _:
                # Never greeted, of another protocol, or given up: it gets no answer to anything.
                pass

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            logger.error(
                "client %s speaks protocol %d, this engine %d: run one version everywhere",
                client.hex(), hello.protocol_version, PROTOCOL_VERSION,
            )  # fmt: skip
            return
        self._clients.add(client)
        self._behind.add(client)
        self._send(client, [])

    def _publish(self) -> None:
        """Send each client its events, and the snapshot where it changed."""
        if self._renew_snapshot():
            self._behind = set(self._clients)
        for client, events in self._core.take_events().items():
            self._send(client, events)
        now_s = time.monotonic()
        if self._behind and now_s - self._flushed_s >= SNAPSHOT_S:
            for client in list(self._behind):
                self._send(client, [])
            self._flushed_s = now_s

    def _send(self, client: bytes, events: list[EngineEvent]) -> None:
        """Queue a frame, with the snapshot if the client has not had this one."""
        snapshot = self._snapshot if client in self._behind else None
        self._behind.discard(client)
        self._outbox.put((client, EngineFrame(self._incarnation, events, snapshot)))

    def _renew_snapshot(self) -> bool:
        """Take a new snapshot; False if nothing but the step count has changed."""
        old = self._snapshot
        new = self._core.snapshot(old.seq + 1)
        if msgspec.structs.replace(new, seq=old.seq, num_steps=old.num_steps) == old:
            return False
        self._snapshot = new
        return True


def describe(
    core: EngineCore, incarnation: str, input_endpoint: str, output_endpoint: str
) -> EngineDescription:
    """What clients, routers and tickets have to know of a started engine."""
    return EngineDescription(
        incarnation=incarnation,
        input_endpoint=input_endpoint,
        output_endpoint=output_endpoint,
        kv_endpoint=core.kv_endpoint,
        kv_layout_hash=core.kv_layout.layout_hash() if core.kv_layout is not None else None,
        bytes_per_block=core.facts.bytes_per_block,
        model=core.config.model,
        max_model_len=core.max_model_len,
        vocab_size=core.facts.vocab_size,
        eos_token_ids=core.facts.eos_token_ids,
        block_size=core.config.block_size,
        dp_groups=core.config.tt_data_parallel,
        slots_per_group=core.config.slots_per_group,
        blocks_per_group=core.facts.num_blocks - 1,
        max_num_batched_tokens=core.config.max_num_batched_tokens,
        pid=os.getpid(),
    )


def main() -> None:
    """Run an engine until the parent closes stdin or sends SIGTERM."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s engine[%(process)d] %(message)s"
    )
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineArguments)
    report = os.fdopen(arguments.ready_fd, "wb", buffering=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    # Ctrl-C reaches the whole process group: the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: inbox.put((b"", _STOP)))
    threading.Thread(target=_stop_at_eof, args=(inbox,), name="parent-watch", daemon=True).start()

    def tell(line: EngineReport) -> None:
        report.write(msgspec.json.encode(line) + b"\n")

    threading.excepthook = _die_with_thread
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        core = EngineCore(
            arguments.config,
            arguments.incarnation,
            notify=lambda: inbox.put((b"", _WAKE)),
            progress=lambda stage, fraction: tell(EngineReport(stage=stage, fraction=fraction)),
        )
        receiver = Receiver(context, arguments.host, inbox)
        sender = Sender(context, arguments.host, arguments.incarnation, outbox, inbox)
    except (EngineError, KVTransferError, OSError, RuntimeError, ValueError, zmq.ZMQError) as error:
        tell(EngineReport(failed=f"{type(error).__name__}: {error}"))
        sys.exit(1)
    receiver.start()
    sender.start()
    tell(
        EngineReport(
            ready=describe(core, arguments.incarnation, receiver.endpoint, sender.endpoint)
        )
    )
    EngineProcess(core, arguments.incarnation, inbox, outbox).run()
    core.shutdown()
    outbox.put(None)
    sender.join(timeout=1.0)
    context.term()


def _die_with_thread(args: threading.ExceptHookArgs) -> None:
    """An engine without one of its threads would look alive and serve nobody: end it."""
    logger.critical(
        "thread %s failed", args.thread.name if args.thread else "?",
        exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
    )  # fmt: skip
    os._exit(1)


def _stop_at_eof(inbox: Inbox) -> None:
    """Ask for the end once the parent closes stdin, and insist if the core thread is stuck."""
    while sys.stdin.buffer.read(4096):
        pass
    inbox.put((b"", _STOP))
    time.sleep(5.0)
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
