"""Engine process: a core thread that steps and sends, a thread that receives, one that beats.

Started as `python -m replicas.engine_process.process` by `replicas.launch`, which writes one line
of JSON to stdin and keeps the pipe open: end of file means that the parent is gone, and this
process ends. Readiness, progress and start-up failures are reported as JSON lines on the given file
descriptor, and so are beats: a hung device, or a call that never releases the interpreter, can only
be noticed from outside.

Threads share only the inbox and the sender, which has a lock. Requests of disconnected clients
(their connection broke, or they do not read) are dropped. Both sockets accept only clients of the
engine's deployment (`kv_transfer.curve`); orders of the parent alone, to end and to drain, come
through the pipe.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from kv_transfer.errors import KVTransferError
from kv_transfer.transports.process import raise_descriptor_limit
from replicas.codec import max_client_message_bytes
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.hooks import NO_HOOKS
from replicas.engine_process.logs import log_to_standard_error
from replicas.engine_process.parent import (
    STOP,
    TURN_DUE,
    WAKE,
    ChangeRole,
    ClientGone,
    Drain,
    EngineArguments,
    EngineReport,
    Evacuate,
    HandOver,
    Inbox,
    Order,
    Probe,
    Profiled,
    Reopen,
    Stop,
    TurnDue,
    Unreadable,
    Wake,
)
from replicas.engine_process.profiler import Profiler
from replicas.engine_process.server import EngineServer, describe, gather_s
from replicas.engine_process.sockets import Receiver, Sender, SocketMaker
from replicas.errors import EngineError
from replicas.messages import Utility, UtilityResult
from replicas.stall_watch import dump_stacks_to
from replicas.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

    from replicas.config import EngineConfig
    from replicas.engine.gang import GangExecutor
    from replicas.engine.hooks import EngineHooks
    from replicas.engine.role_state import RoleState
    from replicas.engine_process.parent import Incoming

logger = logging.getLogger(__name__)

BEAT_S = 0.25
"""Seconds between two beats to the parent."""
REPORT_GRACE_S = 1.0
"""Seconds between a fatal report and the exit, for the parent to read the report."""
MAX_MESSAGES_PER_STEP = 4096
"""Most messages that are handled between two steps."""
SWITCH_INTERVAL_S = 0.0002
"""Interpreter switch interval: at the default 5 ms the socket threads starve beside the core."""

_MAX_DOING_BYTES = 2000
"""Limit of a report's text: several threads write to one pipe, which is atomic up to 4,096."""

_START_ERRORS = (EngineError, KVTransferError, OSError, RuntimeError, ValueError, zmq.ZMQError)
"""Errors of a start that are reported to the parent; any other is a bug and leaves a traceback."""


class EngineProcess:
    """The core thread's loop: drain the inbox, step, send frames.

    Args:
        server: The engine and its clients.
        inbox: Messages from the receiver, and orders.
        sender: Sends frames to clients.
        on_drained: Called once, when a draining engine has no request left.
        report: Called with a report of the role each time that the engine accepts requests again,
            and with one of each `Evacuate` order that is carried out.
        gang: Executor of the engine's gang, if it is in one.
    """

    def __init__(
        self,
        server: EngineServer,
        inbox: Inbox,
        sender: Sender,
        on_drained: Callable[[], None] = lambda: None,
        report: Callable[[EngineReport], None] = lambda _report: None,
        gang: GangExecutor | None = None,
    ) -> None:
        self._server = server
        self._inbox = inbox
        self._sender = sender
        self._watchdog = server.core.watchdog
        self._config = server.core.config
        self._on_drained = on_drained
        self._report = report
        # Number of the order to evacuate that is not carried out yet.
        self._evacuation: int | None = None
        self._gang = gang
        self._is_draining = False
        self._stopped = False

    def run(self) -> None:
        """Loop until `STOP` arrives."""
        core, ran = self._server.core, False
        self._profiler = Profiler(threading.get_ident())
        epoch = core.role_state.epoch
        if self._gang is not None:
            self._gang.rank.idle()
        while not self._stopped:
            self._watchdog.work(time.monotonic())
            # After a step that ran nothing, wait for a message or a deadline instead of spinning.
            self._drain_inbox(wait=not ran)
            step = core.begin_step(time.monotonic())
            if self._gang is not None and step.batch is None:
                self._gang.rank.idle()
            # Send tokens before `end_step` copies KV, so that no client waits for the copy.
            core.collect_step(step)
            self._send_frames()
            ran = core.end_step(step, time.monotonic())
            if step.meta is not None:
                self._send_frames()
            if core.role_state.epoch != epoch:
                epoch = core.role_state.epoch
                self._report(EngineReport(role=core.role_state.role))
            if self._is_draining and self._server.is_drained:
                self._is_draining = False
                self._on_drained()
            if self._evacuation is not None and self._server.is_drained:
                number, self._evacuation = self._evacuation, None
                self._report(EngineReport(evacuated=number))

    def _send_frames(self) -> None:
        timer = self._server.core.timer
        with timer.frames:
            frames = self._server.frames(time.monotonic())
        with timer.encode:
            for client, frame in frames:
                self._sender.send(client, frame)

    def _drain_inbox(self, *, wait: bool) -> None:
        """Handle the queued messages; with `wait`, first block until one arrives or a deadline."""
        try:
            if wait:
                self._watchdog.rest(time.monotonic())
            item = self._inbox.get(block=wait, timeout=self._wait_s())
            self._watchdog.work(time.monotonic())
            begins_s = time.monotonic() + (gather_s(self._config, item[1]) if wait else 0.0)
            # Bounded, so that a flood of messages cannot stop the core from stepping.
            for _ in range(MAX_MESSAGES_PER_STEP):
                self._take(*item)
                left_s = begins_s - time.monotonic()
                item = self._inbox.get(block=left_s > 0.0, timeout=max(left_s, 0.0))
            self._take(*item)
        except queue.Empty:
            return
        finally:
            self._watchdog.work(time.monotonic())

    def _wait_s(self) -> float | None:
        deadline_s = self._server.next_deadline_s()
        return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)

    def _take(self, client: bytes, message: Incoming) -> None:
        match message:
            case Wake():
                pass
            case TurnDue():
                assert self._gang is not None
                self._gang.follow()
            case ClientGone():
                self._server.client_gone(client)
                self._sender.forget(client)
            case Unreadable(request_id, problem):
                self._server.take_unreadable(client, request_id, problem)
            case Drain() | ChangeRole() | Evacuate() | Reopen() | HandOver():
                self._follow(message, self._server.core.role_state)
            case Probe():
                self._server.core.probes.ask_silently()
            case Stop():
                self._stopped = True
            case Utility(method="profile"):
                self._start_profile(client, message)
            case Profiled(call_id, profile):
                self._server.answer(client, UtilityResult(call_id, profile))
            case _:
                self._server.take(client, message, time.monotonic())

    def _start_profile(self, client: bytes, call: Utility) -> None:
        """Start a profile, which is answered when it is complete, or refuse it."""
        seconds = call.args[0] if call.args else None
        problem: str | None = "a profile needs its seconds as a number"
        if isinstance(seconds, int | float):
            problem = self._profiler.start(
                seconds,
                lambda profile: self._inbox.put((client, Profiled(call.call_id, profile))),
            )
        if problem is not None:
            self._server.answer(client, UtilityResult(call.call_id, error=problem))

    def _follow(
        self, order: Drain | ChangeRole | Evacuate | Reopen | HandOver, role_state: RoleState
    ) -> None:
        match order:
            case Drain():
                role_state.end()
                self._is_draining = True
            case ChangeRole(role):
                role_state.change(role)
            case Evacuate(number):
                role_state.evacuate()
                self._evacuation = number
            case Reopen():
                role_state.reopen()
                self._evacuation = None
            case HandOver():
                role_state.hand_over()


def main(make_hooks: Callable[[EngineConfig], EngineHooks] = lambda _config: NO_HOOKS) -> None:
    """Run an engine until the parent closes stdin or sends SIGTERM.

    Args:
        make_hooks: Returns what a simulation replaces.
    """
    log_to_standard_error()
    # Every connection takes a descriptor, even before it is authenticated.
    raise_descriptor_limit()
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineArguments)
    pipe = _open_reports(arguments)
    os.nice(arguments.config.niceness)  # before any thread starts: niceness is per thread
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    inbox = Inbox()
    # Ctrl-C reaches the whole process group, but the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hooks = make_hooks(arguments.config)

    signal.signal(signal.SIGTERM, lambda _signal, _frame: _ask_to_stop(inbox, hooks))
    threading.Thread(
        target=_follow_orders,
        args=(inbox, hooks, arguments.stop_timeout_s),
        name="parent-watch",
        daemon=True,
    ).start()

    report = partial(_report, pipe)
    report_start = partial(_report_start, report)

    def doing(stalled_s: float) -> str:
        return _doing(stalled_s, watchdog, core)

    watchdog = Watchdog()
    threading.excepthook = _die_with_thread
    threading.Thread(
        target=_beat, args=(report, watchdog, doing), name="engine-beat", daemon=True
    ).start()
    with hooks.beside():
        try:
            sockets = SocketMaker(arguments)
            executor, gang = _make_executor(arguments, hooks, inbox, watchdog, report, report_start)
            core = EngineCore(
                arguments.config, executor, arguments.incarnation, hooks.unix_now_s, watchdog
            )
            input_socket, output_socket = hooks.client_sockets(
                sockets.open_input(_max_message_bytes(core)), sockets.open_output()
            )
            receiver = Receiver(input_socket, inbox)
            sender = Sender(output_socket, sockets.incarnation, inbox, core.watchdog)
        except _START_ERRORS as error:
            report_start(EngineReport(failed=f"{type(error).__name__}: {error}"))
            sys.exit(1)
        receiver.start()
        sender.start()
        described = describe(
            core, arguments.incarnation, receiver.endpoint, sender.endpoint, os.getpid()
        )
        _freeze_heap()
        report_start(EngineReport(ready=described, warm_up_s=core.warm_up_s))
        EngineProcess(
            EngineServer(core, arguments.incarnation), inbox, sender,
            on_drained=_report_drained(report) if gang is None else gang.rank.drained,
            report=report, gang=gang,
        ).run()  # fmt: skip
        inbox.close()
        core.shutdown()
        sender.stop()
        sender.join(timeout=1.0)
        sockets.context.term()


def _max_message_bytes(core: EngineCore) -> int:
    slots = core.config.slots_per_group
    return max_client_message_bytes(core.max_model_len, core.facts.vocab_size, slots)


def _make_executor(
    arguments: EngineArguments,
    hooks: EngineHooks,
    inbox: Inbox,
    watchdog: Watchdog,
    report: Callable[[EngineReport], None],
    report_start: Callable[[EngineReport], None],
) -> tuple[UniProcExecutor | GangExecutor, GangExecutor | None]:
    """Return the executor, and the same object again if it belongs to a gang, else None."""

    def notify() -> None:
        inbox.put((b"", WAKE))

    def progress(stage: str, fraction: float) -> None:
        report_start(EngineReport(stage=stage, fraction=fraction))

    config = arguments.config
    if config.gang is None:
        return UniProcExecutor(config, arguments.incarnation, notify, progress, hooks), None
    # Imported here because only gangs need it.
    from replicas.engine.gang import GangExecutor, GangWorker
    from replicas.gang.rank import GangRank

    rank = GangRank(
        config, arguments.host, watchdog,
        wake=lambda: inbox.put((b"", TURN_DUE)),
        on_loss=lambda reason: _die_with_gang(reason, report),
        on_drained=_report_drained(report),
    )  # fmt: skip
    worker = GangWorker(config, arguments.incarnation, notify, progress, hooks, rank)
    gang = GangExecutor(worker, rank, watchdog)
    return gang, gang


def _report(pipe: IO[bytes], line: EngineReport) -> None:
    pipe.write(msgspec.json.encode(line) + b"\n")


def _report_start(report: Callable[[EngineReport], None], line: EngineReport) -> None:
    """Report to the waiting parent; end this process if the parent is gone."""
    try:
        report(line)
    except BrokenPipeError:
        # An exception would be reported through the same broken pipe.
        logger.critical("the process that started this engine is gone; ending the engine")
        sys.exit(1)


def _report_drained(report: Callable[[EngineReport], None]) -> Callable[[], None]:
    return lambda: report(EngineReport(is_drained=True))


def _die_with_gang(reason: str, report: Callable[[EngineReport], None]) -> None:
    """End the process at once: the core thread may wait for a collective that never ends."""
    logger.critical("%s", reason)
    with contextlib.suppress(OSError):
        report(EngineReport(failed=reason))
    # Give the parent time to read the reason.
    time.sleep(REPORT_GRACE_S)
    os._exit(1)


def _open_reports(arguments: EngineArguments) -> IO[bytes]:
    """Open the parent's pipe for reports, and register the file for dumps of stacks."""
    # A child process, such as a compiler, must not hold the pipe open: the parent takes its end of
    # file for the end of this process.
    os.set_inheritable(arguments.ready_fd, False)
    if arguments.dump_fd is not None:
        os.set_inheritable(arguments.dump_fd, False)
        dump_stacks_to(arguments.dump_fd)
    return os.fdopen(arguments.ready_fd, "wb", buffering=0)


def _freeze_heap() -> None:
    """Exclude the present objects, which stay alive, from later garbage collections.

    A collection that visits them takes as long as many steps.
    """
    gc.collect()
    gc.freeze()


def _die_with_thread(args: threading.ExceptHookArgs) -> None:
    """End the process: without one of its threads it would look alive and serve no requests."""
    logger.critical(
        "thread %s failed", args.thread.name if args.thread else "?",
        exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
    )  # fmt: skip
    os._exit(1)


def _beat(
    report: Callable[[EngineReport], None], watchdog: Watchdog, doing: Callable[[float], str]
) -> None:
    """Report beats, with the core's progress, until the parent no longer reads them."""
    with contextlib.suppress(OSError):
        while True:
            stalled_s = watchdog.stalled_s(time.monotonic())
            report(EngineReport(beat=watchdog.count, doing=doing(stalled_s) if stalled_s else ""))
            time.sleep(BEAT_S)


def _doing(stalled_s: float, watchdog: Watchdog, core: EngineCore) -> str:
    """Describe a stalled core: its present turn and its remaining work."""
    try:
        state = repr(core)
    except RuntimeError:  # the core has moved on and changed a collection during `repr`
        state = "its state changes"
    doing = f"{stalled_s:.1f} s in a turn of {watchdog.num_tokens} tokens, {state}"
    return doing.encode()[:_MAX_DOING_BYTES].decode(errors="ignore")


def _ask_to_stop(inbox: Inbox, hooks: EngineHooks) -> None:
    """Order the core thread to end, unless a simulation makes the engine ignore that."""
    if not hooks.ignores_sigterm():
        inbox.put((b"", STOP))


def _follow_orders(inbox: Inbox, hooks: EngineHooks, timeout_s: float) -> None:
    """Follow the parent's orders; when it closes stdin, end the core, then force the exit."""
    # Unbuffered: the interpreter aborts at exit if this thread still holds the lock of stdin's
    # buffer. The buffer is empty, because the parent sends no order before the engine is ready.
    rest = b""
    while said := os.read(sys.stdin.fileno(), 4096):
        *lines, rest = (rest + said).split(b"\n")
        for line in lines:
            inbox.put((b"", msgspec.json.decode(line, type=Order)))
    _ask_to_stop(inbox, hooks)
    # An engine that ignores orders does so for longer than its parent waits, but not for ever, so
    # that no process is left behind if the parent is gone.
    time.sleep(3 * timeout_s if hooks.ignores_sigterm() else timeout_s)
    os._exit(1)


if __name__ == "__main__":
    main()
