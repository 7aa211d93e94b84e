"""Start an engine process, follow its start, notice its end or that it hangs, stop it.

Owner of the child process: whoever holds the `EngineHandle`. Closing it closes the pipe that the
engine lives by, so an engine never outlives its parent, however the parent ends.

A device that hangs takes the engine's core thread with it, and maybe the whole interpreter, so it
is this process that watches: the engine sends beats that say how far its core thread is, and one
that stays in a step, or sends no beat, for `step_timeout_s` is killed. Routers have long given it
nothing new by then (`replicas.engine.pulse`): the kill is for what is left on it and for its mesh.
When it begins to stall its stacks are logged (`replicas.stall_watch`), a kill leaves none.
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
from replicas.engine.pulse import STALL_S, first_turn_s
from replicas.engine.reports import (
    DRAIN_LINE,
    HAND_OVER_LINE,
    PROBE_LINE,
    STOP_S,
    EngineArguments,
    EngineReport,
)
from replicas.errors import ConfigError, EngineDeadError, EngineStartError
from replicas.generators.targets import with_registered_generator
from replicas.kernel_settings import KERNEL_SETTINGS
from replicas.mesh_environment import make_folders, mesh_environment, with_places
from replicas.stall_watch import StallReports, new_dump_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replicas.config import EngineConfig, Role
    from replicas.messages import EngineDescription

LOOK_S = 0.5
"""How often an engine's beats are looked at."""
_LOOK_DRAINED_S = 0.1
HAND_OVER_SHARE = 0.75
"""Of the time that an engine has to drain: what still runs after this share of it might not end."""
_ENGINE = "replicas.engine.process"
KNOWN_STEP_S = 60.0
"""Longest step, at least, of an engine whose warm-up has run all that will ever run."""
UNKNOWN_STEP_S = 300.0
"""And of one that may yet compile, or whose host computes: minutes are no sign of a fault there."""
MESH_STOP_S = 60.0
"""How long an engine may take to close a mesh; one that was not closed has to be reset."""

Hang = Literal["step", "frozen"]
"""step: the core thread does not get on; frozen: nothing in the process does."""


class HangWatch:
    """Tells an engine that hangs from one that is slow or idle.

    Counts its own looks and reads no clock: a machine that slept must not end its engines.

    Args:
        timeout_s: How long a step may take, and how long no beat may come; rounded up to looks. A
            step that waits for other engines may take twice as long: who holds them all up is
            ended first, and the others hear of that.
    """

    def __init__(self, timeout_s: float) -> None:
        self._max_looks = max(math.ceil(timeout_s / LOOK_S), 1)
        self._count = 0
        self._num_looks_in_step = 0
        self._num_looks_without_beat = 0

    def look(self, beats: Sequence[int], *, stalls: bool = False) -> Hang | None:
        """Take the beats since the last look, `LOOK_S` ago; says whether the engine hangs.

        Args:
            beats: Values of `Pulse.count`, in order.
            stalls: Whether it has said that it does, with the last of them.
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
    """A started engine process.

    Args:
        process: The process.
        description: What the engine is.
        keys: The secrets with which it was started.
        stop_s: How long it may take to end when it is told to.
        role: What it was started with.

    Attributes:
        description: What the engine is.
        keys: What a client proves itself to it with.
        role: What it takes; while it changes that, what it took.
        next_role: What it was last told to take.
        drained: Set once the engine has said that it is; see `drain`.
        failure: Why it was killed, if it hung, or what it said when it ended; otherwise None.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        description: EngineDescription,
        keys: KeyRing,
        stop_s: float = STOP_S,
        role: Role = "both",
    ) -> None:
        self._process = process
        self._stop_s = stop_s
        self.role = self.next_role = role
        self._watcher: threading.Thread | None = None
        self.description = description
        self.keys = keys
        self.drained = threading.Event()
        self.failure: EngineDeadError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs and does not hang."""
        return self.failure is None and self._process.poll() is None

    def wait(self) -> int:
        """Block until the process ends; its exit code."""
        return self._process.wait()

    def call_at_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread of its own once the process has ended.

        Whatever it said before that is known by then.
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
        """Hear the process from now on, and kill it if it hangs; the descriptors are owned."""
        self._watcher = threading.Thread(
            target=_watch_for_hang,
            args=(self, self._process, reports, process_fd, dump_fd, step_timeout_s),
            name="engine-hang-watch",
            daemon=True,
        )
        self._watcher.start()

    def drain(self, timeout_s: float) -> bool:
        """Let the engine take no more requests, and wait until those that it has are done.

        Nobody else can: it goes through the pipe that this process alone holds. What still runs
        when little of the time is left is asked to go on elsewhere (`HAND_OVER_SHARE`).

        Args:
            timeout_s: How long to wait.

        Returns:
            Whether it is idle now; False if the time was too short or the engine is gone.
        """
        began_s = time.monotonic()
        for line, share in ((DRAIN_LINE, HAND_OVER_SHARE), (HAND_OVER_LINE, 1.0)):
            if not self._say(line):
                return False
            until_s = began_s + share * timeout_s
            while self.is_alive and time.monotonic() < until_s:
                if self.drained.wait(_LOOK_DRAINED_S):
                    return True
        return self.drained.is_set() and self.is_alive

    def change_role(self, role: Role) -> bool:
        """Let the engine take another role once nothing is left of this one; returns at once.

        The engine takes nothing new until then, and `role` is the new one from then on. Told to
        take its present role, it stays with it.

        Args:
            role: Prefill or decode.

        Returns:
            Whether it was told; False if the engine is gone.
        """
        self.next_role = role
        return self._say(b"role " + role.encode())

    def probe(self) -> None:
        """Let an engine without requests take a step, and return: if it hangs it is killed."""
        self._say(PROBE_LINE)

    def _say(self, line: bytes) -> bool:
        """Tell the engine something; False if it has ended, or was stopped."""
        assert self._process.stdin is not None
        try:
            # Not through its buffer, which would keep what nobody reads, and fail again at its end.
            os.write(self._process.stdin.fileno(), line + b"\n")
        except (OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """End the process: ask by closing its stdin, kill if it takes too long. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # A process that is stuck in a driver's call ends only when the call does.
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
    """Kill the process if it hangs. Runs on a thread of its own until the process ends."""
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
                # Before the process ends: whoever notices that must find out why.
                handle.failure = _hang_error(hang, timeout_s)
                process.kill()
                return
        # Its last words, as why it ended.
        _hear(handle, reports)


def _hear(handle: EngineHandle, reports: _Reports) -> list[EngineReport]:
    """What the engine has said since the last time."""
    said = reports.read(0.0) or []
    if any(report.is_drained for report in said):
        handle.drained.set()
    for report in said:
        if report.role is not None:
            handle.role = report.role
        if report.failed is not None:
            handle.failure = EngineDeadError(report.failed)
    return said


def _hang_error(hang: Hang, timeout_s: float) -> EngineDeadError:
    what = "a step did not end" if hang == "step" else "nothing in its process moved"
    return EngineDeadError(
        f"the engine hung and was killed: {what} within {timeout_s:g} s, its step_timeout_s"
    )


def start_engine(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
    progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> EngineHandle:
    """Start an engine and wait until it is ready.

    Args:
        config: The engine's configuration; without keys it gets a secret of its own, which the
            handle has.
        host: Address of this host that the engine listens on: loopback, if it has no keys.
        env: The child's whole environment (device binding, thread counts); None inherits. A mesh
            that names its devices is bound to these, whatever it says.
        progress: Called with (stage, fraction done) as the engine reports it.

    Raises:
        EngineStartError: The engine failed, ended, or hung before it was ready, or may not listen
            on that address; carries the reason.
    """
    config = with_registered_generator(_with_secret(config, host))
    config = with_places(config, _inherited(env))
    try:
        environment = child_environment(config, env)
        make_folders(config, environment)
    except ConfigError as error:
        raise EngineStartError(str(error)) from error
    process, reports, ready_fd, dump_fd = _spawn(environment)
    # Before anybody may wait for it, and its number be another's.
    process_fd = os.pidfd_open(process.pid)
    arguments = EngineArguments(
        config=config,
        incarnation=secrets.token_hex(8),
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
    except BaseException:
        reports.close()
        os.close(dump_fd)
        os.close(process_fd)
        process.kill()
        process.communicate()  # Closes its stdin, broken or not, and reaps it.
        raise
    assert ready.ready is not None
    stop_s = stop_timeout_s(config)
    handle = EngineHandle(process, ready.ready, config.keys, stop_s, config.role)
    handle.watch(reports, process_fd, dump_fd, step_timeout_s(config, ready.warm_up_s))
    return handle


def _spawn(environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], _Reports, int, int]:
    """Start a process that waits for its arguments.

    Returns:
        The process, its reports, where it writes these, and the file for its stacks.
    """
    read_fd, write_fd = os.pipe()
    dump_fd = new_dump_file()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", _ENGINE],
            stdin=subprocess.PIPE,
            pass_fds=(write_fd, dump_fd),
            env={**KERNEL_SETTINGS, **environment},
        )
    except BaseException:
        os.close(read_fd)
        os.close(dump_fd)
        raise
    finally:
        os.close(write_fd)
    return process, _Reports(read_fd), write_fd, dump_fd


def _with_secret(config: EngineConfig, host: str) -> EngineConfig:
    """The configuration of an engine that nobody can speak to who was not given its secret.

    One that is its parent's alone, as an offline one is, gets a secret of its own.
    """
    try:
        check_listen_host(host, has_secrets=bool(config.keys.secrets))
    except AddressError as error:
        raise EngineStartError(str(error)) from error
    if config.keys.secrets:
        return config
    keys = KeyRing((secrets.token_bytes(NEW_KEY_BYTES),))
    return msgspec.structs.replace(config, keys=keys)


def step_timeout_s(config: EngineConfig, warm_up_s: float) -> float:
    """How long a step of an engine may take before the engine is killed.

    This package's generators run every shape on a mesh in their warm-up, where all compiling is
    done: no later step takes as long as the whole of it. A class of somebody else may compile what
    a request brings, and a kill in the middle would only begin it anew; on the CPU there is no
    device that hangs, and a step is as slow as its host. No step is ended that may take so long by
    its number of tokens before it counts as stalled.

    Args:
        config: The engine's configuration; what it says is taken.
        warm_up_s: How long its warm-up took.
    """
    if config.step_timeout_s is not None:
        return config.step_timeout_s
    is_known = config.uses_native_generator or config.simulated_mesh is not None
    least_s = KNOWN_STEP_S if is_known else UNKNOWN_STEP_S
    return max(least_s, warm_up_s, first_turn_s(config.max_num_batched_tokens))


def stop_timeout_s(config: EngineConfig) -> float:
    """How long an engine of this configuration may take to end before it is killed."""
    return STOP_S if config.mesh is None else MESH_STOP_S


def child_environment(config: EngineConfig, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment to start an engine with; see `mesh_environment`, which may raise.

    Args:
        config: The engine's configuration; a mesh that names its devices is bound to these.
        env: What the caller gives; None stands for this process's own.
    """
    return mesh_environment(config, _inherited(env))


def _inherited(env: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if env is None else env  # noqa: TID251 - handed on whole


class _Reports:
    """The lines that an engine sends on its ready descriptor.

    Args:
        fd: Where they are read; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Not select(), which takes no descriptor over 1,023.
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._rest = b""
        self._is_open = True

    def __enter__(self) -> _Reports:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._fd)

    def read(self, timeout_s: float) -> list[EngineReport] | None:
        """Whatever has come, waiting at most so long for it; None once nothing can come."""
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
    """The report that says that the engine is ready."""
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
            # A start is one long step, but for what it says of its progress.
            signs.append(2 * num_stages + 1)
        if time.monotonic() >= next_look_s:
            if watch.look(signs) is not None:
                raise EngineStartError(
                    f"the engine hung in its start ({stage}): no progress within {timeout_s:g} s, "
                    "its start_timeout_s"
                )
            signs.clear()
            next_look_s = time.monotonic() + LOOK_S
    raise EngineStartError(
        f"the engine process ended with code {process.wait()} before it was ready; its log says why"
    )
