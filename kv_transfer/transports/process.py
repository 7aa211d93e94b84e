"""Process-wide settings for a transport: heap, descriptors and thread switching.

They are made when the first transport of the process starts.
"""

import ctypes
import logging
import resource
import sys

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_MMAP_THRESHOLD = 32 << 20
"""Largest value that glibc accepts."""

_TRIM_THRESHOLD = 256 << 20

_MAX_DESCRIPTORS = 65536

_SWITCH_S = 0.0005
"""Time that an I/O thread waits for the interpreter while the core copies or hashes small pieces. A
tenth of Python's default, because an idle peer waits with the I/O thread."""


def prepare_process() -> None:
    """Keep freed memory, raise the descriptor limit, and switch threads sooner."""
    keep_heap()
    raise_descriptor_limit()
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))


def keep_heap() -> None:
    """Let this process keep up to 256 MiB of freed memory, and take large buffers from it.

    ZMQ allocates every received frame, and PyTorch every result. By default the C library maps a
    large buffer and unmaps it when it is freed. Then each megabyte costs 256 page faults, which
    take more time than copying it. A C library other than glibc is not changed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("this C library has no mallopt: every large buffer costs new page faults")
        return
    mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system does, at most 65,536.

    Without a free descriptor, libzmq aborts the process when it accepts on a Unix socket.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
