"""The threads of a pass: the OpenMP team of PyTorch, which kernels of our own use as well."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def in_team() -> Callable[[int | ctypes._FuncPointer, object, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP that PyTorch uses, which runs a function on each thread."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            found = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        found.restype = None
        return found
    return None


class TeamHelpers(threading.local):
    """The other threads of the team that a thread computes with, kept off its core.

    A system may wake a thread on the core of the one that woke it. There a helper waits until the
    time slice of whom it should help is over, some three milliseconds, while other cores are idle.

    Owner: which cores these threads may run on. Each thread has a team, and hence one of this, of
    its own.
    """

    def __init__(self) -> None:
        # How many threads, the core of this one, and which ones it may run on, when it was last
        # seen to.
        self._seen: tuple[int, int, set[int]] | None = None
        self._is_off = not hasattr(os, "sched_setaffinity") or in_team() is None

    def keep_off(self, num_threads: int) -> None:
        """Call before a pass of so many threads, which begins on this one."""
        this_core = None if self._is_off else _this_core()
        if this_core is None:
            return
        seen = num_threads, this_core(), os.sched_getaffinity(0)
        _, core, cores = seen
        # With more threads than cores, one has to share it.
        if seen == self._seen or core not in cores or num_threads > len(cores):
            return
        try:
            # Listed each time: OpenMP ends threads and makes new ones, and the system may give the
            # number of an ended one to a stranger.
            for thread in _others_in_team(num_threads):
                os.sched_setaffinity(thread, cores - {core})
        except OSError as error:
            # Not an error: computation works on any core, only slower.
            self._is_off = True
            logger.warning("cannot pin compute threads to cores, steps may be slower: %s", error)
        self._seen = seen


HELPERS = TeamHelpers()


@cache
def _this_core() -> Callable[[], int] | None:
    """Return a function for the current core's number, or None; it keeps the interpreter lock."""
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)


def _others_in_team(num_threads: int) -> list[int]:
    """Return the system's numbers of the threads that this one computes with."""
    found: list[int] = []
    note = _Function(lambda _: found.append(threading.get_native_id()))
    run = in_team()
    assert run is not None
    run(note, None, num_threads, 0)
    return [thread for thread in found if thread != threading.get_native_id()]
