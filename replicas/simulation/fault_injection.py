"""Injection of a fault plan into a real engine on a simulated mesh.

The plan says which fault holds at which second (`replicas.faults`). This module applies it to the
engine process's clocks, signals and sockets. Kill and freeze come from a small process beside the
engine. A partition, in one or both directions, drops frames at the sockets, and a full inbox is a
socket that is not read. Dropped links, corrupted payloads and the KV part of a partition are
applied by a special KV transport. Slow and hung steps are applied by the simulated device.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import zmq

from kv_transfer.transports.connections import break_accepted
from kv_transfer.transports.faulty import FaultyTransport
from replicas.faults import NO_FAULTS, PlanClock, ReplicaFaults
from replicas.simulation import fault_signals

if TYPE_CHECKING:
    from kv_transfer.connector import TransportFactory
    from replicas.config import EngineConfig


_LOOK_S = 0.01
"""Seconds between looks whether a full inbox has room again."""


class EngineFaults:
    """The planned faults of this engine, by its monotonic clock.

    Also the `kv_transfer.transports.faulty.LinkFaults` of its KV connections.

    Attributes:
        faults: The plan's part for this replica.
        clock: Converts monotonic seconds to the plan's.
    """

    def __init__(self, faults: ReplicaFaults = NO_FAULTS, clock: PlanClock | None = None) -> None:
        self.faults = faults
        self.clock = clock or PlanClock()

    @property
    def make_transport(self) -> TransportFactory:
        """Return a factory of KV transports with these faults."""
        return partial(FaultyTransport, self)

    def is_cut(self, now_s: float) -> bool:
        """Return whether the engine can neither send nor receive."""
        return self.faults.is_partitioned(self.clock.plan_s(now_s))

    def corrupts(self, now_s: float) -> bool:
        """Return whether outgoing KV payloads have flipped bytes."""
        return self.faults.corrupts(self.clock.plan_s(now_s))

    def num_breaks(self, now_s: float) -> int:
        """Return how often the KV connections have broken so far."""
        plan_s = self.clock.plan_s(now_s)
        return sum(at_s <= plan_s for at_s in self.faults.link_drops())

    def num_heals(self, now_s: float) -> int:
        """Return how many periods of lost messages between engine and clients have ended."""
        plan_s = self.clock.plan_s(now_s)
        return sum(window.end_s <= plan_s for window in self.faults.gaps())

    def unix_now_s(self) -> float:
        """Return the wall clock, shifted as planned."""
        return time.time() + self.faults.clock_shift_s(self.clock.plan_s(time.monotonic()))

    def ignores_sigterm(self) -> bool:
        """Return whether the engine ignores orders to end now."""
        return self.faults.ignores_sigterm(self.clock.plan_s(time.monotonic()))

    def next_change_s(self, now_s: float) -> float | None:
        """Return when the next fault begins or ends, or None."""
        change_s = self.faults.next_change_s(self.clock.plan_s(now_s))
        return None if change_s is None else self.clock.clock_s(change_s)


def engine_faults(config: EngineConfig) -> EngineFaults:
    """Return the faults that an engine's configuration plans; reads both clocks once."""
    mesh = config.simulated_mesh
    if mesh is None:
        return EngineFaults()
    clock = PlanClock.since(mesh.fault_epoch_unix_s, unix_s=time.time(), now_s=time.monotonic())
    return EngineFaults(ReplicaFaults(mesh.faults), clock)


class ClientLinks:
    """Connectivity between this engine and its clients.

    During a partition frames are lost, and a client that stays connected through a short one would
    not notice. So when it ends, the connections that survived it are broken before anything else is
    sent. Clients then start again, as after any broken connection.

    Shared by the receiving and the sending thread.

    Args:
        faults: The engine's planned faults.
    """

    def __init__(self, faults: EngineFaults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._endpoints: list[str] = []
        self._num_heals = faults.num_heals(time.monotonic())

    def add(self, endpoint: str) -> None:
        """Add an endpoint that clients connect to."""
        self._endpoints.append(endpoint)

    def hears(self) -> bool:
        """Return whether received messages get through; while the inbox counts as full, wait."""
        while self._is_backpressured():
            time.sleep(_LOOK_S)
        self._break_healed()
        return not self._faults.faults.is_deaf(self._plan_s())

    def speaks(self) -> bool:
        """Return whether sent messages get through."""
        self._break_healed()
        return not self._faults.faults.is_mute(self._plan_s())

    def _break_healed(self) -> None:
        """Break the connections that have lost messages, once messages get through again."""
        with self._lock:
            num_heals = self._faults.num_heals(time.monotonic())
            if num_heals > self._num_heals:
                self._num_heals = num_heals
                for endpoint in self._endpoints:
                    break_accepted(endpoint)

    def _is_backpressured(self) -> bool:
        return self._faults.faults.is_backpressured(self._plan_s())

    def _plan_s(self) -> float:
        return self._faults.clock.plan_s(time.monotonic())


class _FaultySocket:
    """One of an engine's sockets to its clients, with the faults of its links."""

    def __init__(self, socket: zmq.Socket[bytes], links: ClientLinks) -> None:
        self._socket = socket
        self._links = links
        links.add(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


class HearingSocket(_FaultySocket):
    """An input socket that drops lost messages."""

    def recv_multipart(self) -> list[bytes]:
        """Return the next message that gets through."""
        while True:
            frames = self._socket.recv_multipart()
            if self._links.hears():
                return frames


class SpeakingSocket(_FaultySocket):
    """An output socket whose frames may be lost."""

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        """Send a frame, or drop it silently if it is lost."""
        if self._links.speaks():
            self._socket.send_multipart(frames, flags)


def client_sockets(
    faults: EngineFaults, hears: zmq.Socket[bytes], speaks: zmq.Socket[bytes]
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return an engine's input and output socket with its faults."""
    links = ClientLinks(faults)
    faulty = HearingSocket(hears, links), SpeakingSocket(speaks, links)
    return cast("tuple[zmq.Socket[bytes], zmq.Socket[bytes]]", faulty)


def schedule_signals(faults: EngineFaults, now_s: float) -> list[tuple[float, int]]:
    """Return the signals for an engine's planned kills and freezes.

    Past kills are left out: they hit the engine that this one replaces. A freeze that has begun and
    not ended continues.

    Args:
        faults: The engine's planned faults.
        now_s: The monotonic clock.

    Returns:
        (monotonic time, signal number), in order.
    """
    clock = faults.clock
    kills_s = map(clock.clock_s, faults.faults.kills())
    found: list[tuple[float, int]] = [(at_s, signal.SIGKILL) for at_s in kills_s if at_s > now_s]
    for window in faults.faults.freezes():
        start_s, end_s = clock.clock_s(window.start_s), clock.clock_s(window.end_s)
        if end_s > now_s:
            found.append((max(start_s, now_s), signal.SIGSTOP))
            if not math.isinf(end_s):
                found.append((end_s, signal.SIGCONT))
    return sorted(found)


class SignalSender:
    """The process that sends an engine its scheduled signals; not started if there are none.

    It inherits the engine's standard input, whose end of file means that the engine's parent is
    gone. It ends with the engine, however the engine ends.

    Owner: the engine's main thread.

    Args:
        faults: The engine's planned faults.
    """

    def __init__(self, faults: EngineFaults) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        schedule = schedule_signals(faults, time.monotonic())
        if not schedule:
            return
        # Only this process holds the other end; closing it ends the helper.
        alive_fd, self._held_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", str(Path(fault_signals.__file__).resolve()),
                    str(os.getpid()), str(alive_fd), msgspec.json.encode(schedule).decode(),
                ],
                pass_fds=(alive_fd,),
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(alive_fd)

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process is not None:
            os.close(self._held_fd)
            self._process.wait()
            self._process = None
