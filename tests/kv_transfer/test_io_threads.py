"""The threads of ZeroMQ: this system's own scheduler says what slices they have."""

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

import pytest
import zmq

from kv_transfer import io_threads
from kv_transfer.io_threads import SLICE_S, new_context


def slice_s(thread):
    scheduling = io_threads._scheduling(thread)
    return scheduling and scheduling.slice_ns / 1e9


KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
has_slices = pytest.mark.skipif(
    os.uname().sysname != "Linux" or KERNEL < (6, 12) or not slice_s(0),
    reason="this system has no time slices of one's own",
)


def zmq_threads():
    """Return the threads with ZeroMQ's names; one that has just ended may be missing."""
    found = set()
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().startswith("ZMQbg"):
                found.add(int(folder.name))
    return found


def begun_since(before):
    """One that moves messages and one that clears up; each names itself once it runs."""
    while len(begun := zmq_threads() - before) < 2:
        time.sleep(0.001)
    return begun


def ping(context):
    """A message through both sockets of a pair."""
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("tcp://127.0.0.1:*")
        other.connect(one.get_string(zmq.LAST_ENDPOINT))
        other.send(b"ping")
        assert one.poll(5000)
        return one.recv()


@has_slices
def test_only_the_threads_of_zmq_have_short_slices():
    own_s, before = slice_s(0), zmq_threads()
    context = new_context()
    begun = begun_since(before)
    assert [slice_s(thread) for thread in begun] == [pytest.approx(SLICE_S)] * 2
    assert ping(context) == b"ping"
    context.term()
    assert slice_s(0) == own_s > SLICE_S


def refuse(monkeypatch):
    """A system that forbids it, as some containers do."""

    class Refusing:
        def syscall(self, *_args):
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Refusing())


def other_machine(monkeypatch):
    monkeypatch.setattr(io_threads.platform, "machine", lambda: "riscv64")


def other_system(monkeypatch):
    monkeypatch.setattr(io_threads.platform, "system", lambda: "Darwin")


@pytest.mark.parametrize("change", [refuse, other_machine, other_system])
def test_without_short_slices_messages_still_arrive(change, monkeypatch):
    change(monkeypatch)
    assert slice_s(0) is None
    context = new_context()
    assert ping(context) == b"ping"
    context.term()


@has_slices
def test_a_thread_with_a_priority_of_its_own_keeps_it():
    if os.geteuid() != 0:
        pytest.skip("nobody else may have one")
    found = []

    def begin():
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            return
        before = zmq_threads()
        context = new_context()
        threads = {0, *begun_since(before)}
        found.extend(map(os.sched_getscheduler, threads))
        context.term()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    if not found:
        pytest.skip("this container may not give one")
    assert found == [os.SCHED_RR] * 3
