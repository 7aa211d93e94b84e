"""Start, supervise and stop an engine process.

Owner of the child process: the holder of the `EngineHandle`. The engine ends when the pipe on its
stdin closes, so it never outlives its parent, however the parent ends.

A hung device blocks the engine's core thread and possibly the whole interpreter, so the parent
watches: the engine sends beats with the state of its core thread, and an engine that stays in one
step, or sends no beat, for `step_timeout_s` is killed. Routers have long stopped sending it
requests by then (`replicas.watchdog`); the kill ends its remaining requests and frees its
mesh. Its stacks are logged when it begins to stall (`replicas.stall_watch`), because a kill leaves
none.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from kv_transfer.addresses import check_listen_host
from kv_transfer.errors import AddressError
from kv_transfer.keys import NEW_KEY_BYTES, KeyRing
from replicas.engine_process.parent import (
    STOP_S,
    ChangeRole,
    Drain,
    EngineArguments,
    EngineReport,
    Evacuate,
    HandOver,
    Probe,
    Reopen,
)
from replicas.errors import ConfigError, EngineDeadError, EngineStartError
from replicas.generators.targets import with_registered_generator
from replicas.kernel_settings import KERNEL_SETTINGS
from replicas.mesh_environment import make_folders, mesh_environment, with_places
from replicas.stall_watch import StallReports, new_dump_file
from replicas.tt.triage import REPORT, prepare_report, with_report
from replicas.user_cache import user_cache
from replicas.watchdog import KNOWN_STEP_S, STALL_S, first_turn_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from replicas.config import EngineConfig, Role
    from replicas.engine_process.parent import Order
    from replicas.messages import EngineDescription

LOOK_S = 0.5
"""Interval at which an engine's beats are checked."""
_LOOK_DRAINED_S = 0.1
HAND_OVER_SHARE = 0.75
"""Share of the drain timeout after which the remaining requests are handed to other engines."""
_ENGINE = "replicas.engine_process.process"
_FAULTY_ENGINE = "replicas.simulation.faulty_process"
"""Program of an engine for which faults are planned."""
UNKNOWN_STEP_S = 300.0
"""Least step timeout of an engine that may still compile, or that computes on the host's CPU."""
MESH_STOP_S = 60.0
"""Time for an engine to close its mesh; a mesh that was not closed must be reset."""

Hang = Literal["step", "frozen"]
"""step: the core thread is stuck in a step. frozen: no thread sends beats."""


class HangWatch:
    """Detector of a hung engine, as opposed to a slow or idle one.

    Counts its own checks and reads no clock, so that a suspended machine does not kill its engines.

    Args:
        timeout_s: Longest step and longest time without a beat; rounded up to whole checks. A step
            that waits for other engines of a gang may take twice as long: the engine that holds up
            the gang is killed first, and the others learn of that.
    """

    def __init__(self, timeout_s: float) -> None:
        self._max_looks = max(math.ceil(timeout_s / LOOK_S), 1)
        self._count = 0
        self._num_looks_in_step = 0
        self._num_looks_without_beat = 0

    def look(self, beats: Sequence[int], *, stalls: bool = False) -> Hang | None:
        """Process the beats since the last check, `LOOK_S` ago; return the kind of hang, or None.

        Args:
            beats: Values of `Watchdog.count`, in order.
            stalls: Whether the engine reported a stall with the last of them.
        """
        self._num_looks_without_beat = 0 if beats else self._num_looks_without_beat + 1
        count = beats[-1] if beats else self._count
        works = count % 2 == 1
        is_same_step = count == self._count and (works or stalls)
        self._num_looks_in_step = self._num_looks_in_step + 1 if is_same_step else 0
        self._count = count
        if self._num_looks_without_beat >= self._max_looks:
            return "frozen"
        max_looks = self._max_looks if works else 2 * self._max_looks
        return "step" if self._num_looks_in_step >= max_looks else None


class EngineHandle:
    """Handle of a started engine process.

    Args:
        process: The process.
        description: What the engine is.
        keys: The secrets with which it was started.
        stop_s: Seconds that the engine may take to end when asked to.
        role: The role that it was started with.
        triage_report: File that exists once a device operation has timed out; see
            `replicas.tt.triage`.

    Attributes:
        description: What the engine is.
        keys: The secrets that clients authenticate with.
        role: Its role; during a change still the old one.
        next_role: The role that was last requested.
        is_evacuating: Whether it was ordered to hand over its requests, and not to reopen since.
        drained: Set once the engine reports that it is drained; see `drain`.
        failure: Why a hung engine was killed, or the reason that it reported at its end, with the
            path of the triage report if a device operation timed out; else None.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        description: EngineDescription,
        keys: KeyRing,
        stop_s: float = STOP_S,
        role: Role = "both",
        triage_report: Path | None = None,
    ) -> None:
        self._process = process
        self._stop_s = stop_s
        self._triage_report = triage_report
        self.role = self.next_role = role
        self.is_evacuating = False
        # Numbers of the last order to evacuate, and of the last one that was carried out.
        self._evacuation = self._evacuated = 0
        self._watcher: threading.Thread | None = None
        self.description = description
        self.keys = keys
        self.drained = threading.Event()
        self.failure: EngineDeadError | None = None

    def record_failure(self, reason: str) -> None:
        """Set `failure`."""
        self.failure = EngineDeadError(with_report(reason, self._triage_report))

    def record_end(self) -> None:
        """Set `failure` if the process ended without a reason after its device timed out."""
        report = self._triage_report
        if self.failure is None and report is not None and report.exists():
            self.record_failure("the engine ended because an operation of its device timed out")

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and does not hang."""
        return self.failure is None and self._process.poll() is None

    def wait(self) -> int:
        """Block until the process ends; return its exit code."""
        return self._process.wait()

    def call_at_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a separate thread once the process has ended.

        All reports of the process have been read by then.
        """

        def watch() -> None:
            code = self._process.wait()
            if self._watcher is not None:
                self._watcher.join()
            callback(code)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def watch(
        self, reports: _Reports, process_fd: int, dump_fd: int, step_timeout_s: float
    ) -> None:
        """Start reading the process's reports, and kill it if it hangs; owns the descriptors."""
        self._watcher = threading.Thread(
            target=_watch_for_hang,
            args=(self, self._process, reports, process_fd, dump_fd, step_timeout_s),
            name="engine-hang-watch",
            daemon=True,
        )
        self._watcher.start()

    def drain(self, timeout_s: float) -> bool:
        """Make the engine refuse new requests, and wait until its requests are done.

        Only the parent can do this, as the order goes through the pipe that only it holds. Requests
        that still run after `HAND_OVER_SHARE` of the time are handed over to other engines.

        Args:
            timeout_s: Longest time to wait.

        Returns:
            Whether the engine is idle; False if the time ran out or the engine is gone.
        """
        began_s = time.monotonic()
        for order, share in ((Drain(), HAND_OVER_SHARE), (HandOver(), 1.0)):
            if not self._say(order):
                return False
            until_s = began_s + share * timeout_s
            while self.is_alive and time.monotonic() < until_s:
                if self.drained.wait(_LOOK_DRAINED_S):
                    return True
        return self.drained.is_set() and self.is_alive

    def change_role(self, role: Role) -> bool:
        """Order the engine to change its role once its present requests are done; return at once.

        The engine refuses new requests until then; afterwards `role` is the new one. Ordered to its
        present role, it keeps it.

        Args:
            role: Prefill or decode.

        Returns:
            Whether the order was sent; False if the engine is gone.
        """
        self.next_role = role
        return self._say(ChangeRole(role))

    def evacuate(self) -> bool:
        """Order the engine to refuse new requests and hand over the others; return at once.

        Returns:
            Whether the order was sent; False if the engine is gone.
        """
        self.is_evacuating = True
        self._evacuation += 1
        return self._say(Evacuate(self._evacuation))

    def reopen(self) -> bool:
        """Order the engine to accept requests again; return at once, as `evacuate`."""
        self.is_evacuating = False
        return self._say(Reopen())

    @property
    def is_evacuated(self) -> bool:
        """Whether the engine has no request left since `evacuate`."""
        return self.is_evacuating and self._evacuated == self._evacuation

    def record_evacuated(self, number: int) -> None:
        """Record the engine's report that an order to evacuate is carried out."""
        self._evacuated = number

    def probe(self) -> None:
        """Make an idle engine run a step, so that a hung device is noticed; return at once."""
        self._say(Probe())

    def _say(self, order: Order) -> bool:
        """Send the engine an order; return False if it has ended or was stopped."""
        assert self._process.stdin is not None
        try:
            # Bypass the buffered writer: it would keep unread bytes and raise again when it closes.
            os.write(self._process.stdin.fileno(), msgspec.json.encode(order) + b"\n")
        except (OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """End the process: close its stdin, and kill it after `stop_s`. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # A process stuck in a driver call ends only when that call returns.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_S)


def _watch_for_hang(
    handle: EngineHandle,
    process: subprocess.Popen[bytes],
    reports: _Reports,
    process_fd: int,
    dump_fd: int,
    timeout_s: float,
) -> None:
    """Kill the process if it hangs. Runs on its own thread until the process ends."""
    watch = HangWatch(timeout_s)
    stalls = StallReports(process.pid, process_fd, dump_fd, LOOK_S, STALL_S)
    ended = select.poll()
    ended.register(process_fd, select.POLLIN)
    with reports, contextlib.closing(stalls):
        while not ended.poll(LOOK_S * 1000):
            said = _hear(handle, reports)
            stalls.look(said)
            beats = [report.beat for report in said if report.beat is not None]
            hang = watch.look(beats, stalls=stalls.is_stalled)
            if hang is not None and not ended.poll(0):
                # Set before the kill, so that code woken by the process's end finds the reason.
                handle.record_failure(_hang_reason(hang, timeout_s))
                process.kill()
                return
        # The last report says why the process ended.
        _hear(handle, reports)
        handle.record_end()


def _hear(handle: EngineHandle, reports: _Reports) -> list[EngineReport]:
    """Read the engine's new reports, apply them to the handle and return them."""
    said = reports.read(0.0) or []
    if any(report.is_drained for report in said):
        handle.drained.set()
    for report in said:
        if report.role is not None:
            handle.role = report.role
        if report.evacuated is not None:
            handle.record_evacuated(report.evacuated)
        if report.failed is not None:
            handle.record_failure(report.failed)
    return said


def _hang_reason(hang: Hang, timeout_s: float) -> str:
    what = "a step did not end" if hang == "step" else "its process sent no beat"
    return f"the engine hung and was killed: {what} within {timeout_s:g} s (step_timeout_s)"


def start_engine(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
    progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> EngineHandle:
    """Start an engine and wait until it is ready.

    Args:
        config: The engine's configuration; without keys a secret is generated, see
            `EngineHandle.keys`.
        host: Address of this host that the engine listens on; must be loopback without keys.
        env: The child's whole environment (device binding, thread counts); None inherits. A mesh's
            `visible_devices` override it.
        progress: Called with (stage, fraction done) as the engine reports it.

    Raises:
        EngineStartError: The engine failed, ended or hung before it was ready, or may not listen on
            that address; carries the reason.
    """
    config = with_registered_generator(_with_secret(config, host))
    config = with_places(config, _inherited(env))
    try:
        environment = child_environment(config, env)
        make_folders(config, environment)
    except ConfigError as error:
        raise EngineStartError(str(error)) from error
    mesh = config.simulated_mesh
    incarnation = secrets.token_hex(8)
    triage_report = _prepare_triage(environment, incarnation)
    program = _FAULTY_ENGINE if mesh is not None and mesh.faults else _ENGINE
    process, reports, ready_fd, dump_fd = _spawn(program, environment)
    # Open the pidfd before the process can be reaped and its id reused.
    process_fd = os.pidfd_open(process.pid)
    arguments = EngineArguments(
        config=config,
        incarnation=incarnation,
        host=host,
        ready_fd=ready_fd,
        dump_fd=dump_fd,
        stop_timeout_s=stop_timeout_s(config),
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(arguments) + b"\n")
        process.stdin.flush()
        ready = _await_ready(reports, process, progress, config.start_timeout_s)
    except BaseException as error:
        reports.close()
        os.close(dump_fd)
        os.close(process_fd)
        process.kill()
        process.communicate()  # Closes its stdin, broken or not, and reaps it.
        if isinstance(error, EngineStartError):
            raise EngineStartError(with_report(str(error), triage_report)) from error
        raise
    assert ready.ready is not None
    stop_s = stop_timeout_s(config)
    handle = EngineHandle(process, ready.ready, config.keys, stop_s, config.role, triage_report)
    step_s = step_timeout_s(config, ready.warm_up_s, ready.ready.max_num_batched_tokens)
    handle.watch(reports, process_fd, dump_fd, step_s)
    return handle


def _prepare_triage(environment: dict[str, str], name: str) -> Path | None:
    """Add the file of the engine's triage report to its environment, and return it."""
    cache = user_cache(environment.get("HOME"))
    folder = None if cache is None else cache / "triage"
    report = prepare_report(environment, folder, name)
    if report is not None:
        environment[REPORT] = str(report)
    return report


def _spawn(
    program: str, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], _Reports, int, int]:
    """Start an engine process, which then waits for its arguments.

    Returns:
        The process, its reports, the descriptor that it writes them to, and the file for its
        stacks.
    """
    read_fd, write_fd = os.pipe()
    dump_fd = new_dump_file()
    try:
        process = start_process(program, {**KERNEL_SETTINGS, **environment}, (write_fd, dump_fd))
    except BaseException:
        os.close(read_fd)
        os.close(dump_fd)
        raise
    finally:
        os.close(write_fd)
    return process, _Reports(read_fd), write_fd, dump_fd


def start_process(
    program: str, environment: Mapping[str, str], fds: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start the program of an engine with a pipe to its stdin.

    Args:
        program: Its main module.
        environment: Its whole environment.
        fds: Descriptors that it inherits, under the same numbers.
    """
    return subprocess.Popen(
        [sys.executable, "-m", program], stdin=subprocess.PIPE, pass_fds=fds, env=environment
    )


def _with_secret(config: EngineConfig, host: str) -> EngineConfig:
    """Return the configuration with a secret, so that only clients that hold it can connect.

    An engine without configured keys, such as an offline one, gets a random secret.
    """
    try:
        check_listen_host(host, has_secrets=bool(config.keys.secrets))
    except AddressError as error:
        raise EngineStartError(str(error)) from error
    if config.keys.secrets:
        return config
    keys = KeyRing((secrets.token_bytes(NEW_KEY_BYTES),))
    return msgspec.structs.replace(config, keys=keys)


def step_timeout_s(config: EngineConfig, warm_up_s: float, max_num_tokens: int) -> float:
    """Return how long a step of an engine may take before the engine is killed.

    ttserve's own generators run every shape on a mesh during warm-up, including all compilation, so
    no later step takes longer than the whole warm-up. A third-party class may compile during a
    request, and a kill would only repeat that; on the CPU no device hangs, and a step is as slow as
    its host. The timeout is never shorter than the time after which a step of the largest batch
    counts as stalled.

    Args:
        config: The engine's configuration; its `step_timeout_s` takes precedence.
        warm_up_s: Duration of its warm-up.
        max_num_tokens: Most tokens of one of its steps.
    """
    if config.step_timeout_s is not None:
        return config.step_timeout_s
    is_known = config.uses_native_generator or config.simulated_mesh is not None
    least_s = KNOWN_STEP_S if is_known else UNKNOWN_STEP_S
    return max(least_s, warm_up_s, first_turn_s(max_num_tokens))


def stop_timeout_s(config: EngineConfig) -> float:
    """Return how long an engine may take to end before it is killed."""
    return STOP_S if config.mesh is None else MESH_STOP_S


def child_environment(config: EngineConfig, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment to start an engine with; raises as `mesh_environment` does.

    Args:
        config: The engine's configuration; a mesh's `visible_devices` are bound.
        env: The caller's environment; None is this process's own.
    """
    return mesh_environment(config, _inherited(env))


def _inherited(env: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if env is None else env  # noqa: TID251 - handed on whole


class _Reports:
    """Reader of the report lines that an engine writes to its ready descriptor.

    Args:
        fd: Read end of the pipe; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Not select(), which rejects descriptors above 1,023.
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._rest = b""
        self._is_open = True

    def __enter__(self) -> _Reports:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._fd)

    def read(self, timeout_s: float) -> list[EngineReport] | None:
        """Return the reports that arrive within `timeout_s`; None after the end of the stream."""
        if not self._poll.poll(timeout_s * 1000):
            return []
        raw = os.read(self._fd, 1 << 16)
        if not raw:
            return None
        *lines, self._rest = (self._rest + raw).split(b"\n")
        return [msgspec.json.decode(line, type=EngineReport) for line in lines]


def _await_ready(
    reports: _Reports,
    process: subprocess.Popen[bytes],
    progress: Callable[[str, float], None],
    timeout_s: float,
) -> EngineReport:
    """Wait for the report that the engine is ready and return it."""
    watch = HangWatch(timeout_s)
    stage, num_stages = "before its first stage", 0
    signs: list[int] = []
    next_look_s = time.monotonic() + LOOK_S
    while (lines := reports.read(LOOK_S)) is not None:
        for report in lines:
            if report.failed is not None:
                raise EngineStartError(report.failed)
            if report.ready is not None:
                return report
            if report.stage is not None:
                stage, num_stages = report.stage, num_stages + 1
                progress(report.stage, report.fraction)
            # The watch sees the start as steps: an odd count is "in a step", each stage a new one.
            signs.append(2 * num_stages + 1)
        if time.monotonic() >= next_look_s:
            if watch.look(signs) is not None:
                raise EngineStartError(
                    f"the engine hung at its start ({stage}): no progress within {timeout_s:g} s "
                    "(start_timeout_s)"
                )
            signs.clear()
            next_look_s = time.monotonic() + LOOK_S
    raise EngineStartError(
        f"the engine process ended with code {process.wait()} before it was ready; its log says why"
    )
