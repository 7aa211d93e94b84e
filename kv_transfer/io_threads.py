"""ZeroMQ contexts whose threads are scheduled soon after they become ready.

A thread that moves messages works for some microseconds at a time, and a token that a client waits
for is often what wakes it. Linux may wake it on the core of a thread that computes, in a virtual
machine even where another core is idle. There it waits for the other thread's time slice to end. A
thread that asks for short slices (Linux 6.12) runs first, and gets no more time in total.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import zmq

SLICE_S = 1e-4
"""Shortest slice that Linux grants."""
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of `sched_setattr` and `sched_getattr`, which C libraries before glibc 2.41 lack."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""Linux's struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, two
clamps. For threads without real-time priority the runtime is the slice."""


class _Scheduling(NamedTuple):
    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    slice_ns: int  # Has an effect without real-time priority only; 0 before Linux 6.12.
    deadline_ns: int
    period_ns: int
    least_clamp: int
    most_clamp: int


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context and start its threads; the calling thread's scheduling is not changed.

    Raises:
        zmq.ZMQError: The threads cannot be started.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def begin() -> None:
        _ask_for_short_slices()
        # The first socket starts the threads, which inherit the scheduling of this one.
        context.socket(zmq.PAIR).close(linger=0)

    with ThreadPoolExecutor(1, "zmq-begin") as thread:
        thread.submit(begin).result()
    return context


def _ask_for_short_slices() -> None:
    """Ask for short slices for the calling thread; without effect where the system has none."""
    scheduling = _scheduling(0)
    if scheduling is None:
        return
    wanted = scheduling._replace(slice_ns=int(SLICE_S * 1e9))
    set_number, _ = _SYSCALLS[platform.machine()]
    raw = ctypes.create_string_buffer(_ATTRIBUTES.pack(*wanted), _ATTRIBUTES.size)
    ctypes.CDLL(None).syscall(set_number, 0, raw, 0)


def _scheduling(thread_id: int) -> _Scheduling | None:
    """Return the scheduling of a thread by its system id; None if this system does not say."""
    numbers = _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        return None
    raw = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(numbers[1], thread_id, raw, _ATTRIBUTES.size, 0) != 0:
        return None
    return _Scheduling(*_ATTRIBUTES.unpack(raw.raw))
