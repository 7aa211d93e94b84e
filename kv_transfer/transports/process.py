"""Set up this process for a transport: memory that is kept, and room for connections.

Both are settings of the whole process, made when its first transport starts.
"""

import ctypes
import logging
import resource
import sys

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_MMAP_THRESHOLD = 32 << 20
"""The most that glibc takes."""

_TRIM_THRESHOLD = 256 << 20

_MAX_DESCRIPTORS = 65536

_SWITCH_S = 0.0005
"""How long an I/O thread waits for the interpreter while the core copies or hashes small pieces: a
tenth of Python's default, as a peer with nothing to do waits with it."""


def prepare_process() -> None:
    """Keep freed buffers, and allow as many descriptors as the system does, within reason."""
    keep_heap()
    raise_descriptor_limit()
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))


def keep_heap() -> None:
    """Let this process keep up to 256 MiB of freed memory, and take large buffers from it.

    Why: ZMQ allocates every received frame anew, and PyTorch every result. By default the C library
    maps what is large and unmaps it when it is freed, so that each megabyte costs 256 page faults:
    more time than its copying. A C library other than glibc is left as it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("no mallopt: every large buffer will cost its page faults anew")
        return
    mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system does, at most 65,536.

    Why: libzmq aborts the process when it cannot accept on a Unix socket for want of one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
