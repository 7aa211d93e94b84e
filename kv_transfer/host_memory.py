"""Reservation of shared memory in full at start, with an error that says how much there is.

A memfd gets its pages as they are written. If memory is short by then, the kernel kills a process
(OOM), or the writer gets SIGBUS: at any time, and without a hint at the size that was asked for.
"""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kv_transfer.errors import SharedMemoryError

_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)
"""Files of a control group, version 2 and 1: limit, use, statistics, key of droppable bytes."""


def reserve(descriptor: int, num_bytes: int, *, purpose: str, advice: str) -> None:
    """Give a memfd its size and all of its memory.

    Args:
        descriptor: The memfd, still empty.
        num_bytes: Its size.
        purpose: Use of the memory, for the error's text.
        advice: Remedy, for the error's text.

    Raises:
        SharedMemoryError: The host, or this process's control group, has not that much left, or
            the kernel refuses; says both numbers.
    """
    # Checked before: an allocation beyond that would not fail, the kernel would kill a process.
    require(num_bytes, purpose=purpose, advice=advice)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        available, where = available_bytes()
        problem = f"{error.strerror}, with {available} bytes available {where}"
        raise _shortage(num_bytes, purpose, problem, advice) from error


def require(num_bytes: int, *, purpose: str, advice: str) -> None:
    """Refuse to allocate more memory than there is.

    Args:
        num_bytes: Bytes that will be allocated.
        purpose: As for ``reserve``.
        advice: As for ``reserve``.

    Raises:
        SharedMemoryError: There is less; says both numbers.
    """
    available, where = available_bytes()
    if num_bytes > available:
        problem = f"only {available} bytes are available {where}"
        raise _shortage(num_bytes, purpose, problem, advice)


def _shortage(num_bytes: int, purpose: str, problem: str, advice: str) -> SharedMemoryError:
    return SharedMemoryError(
        f"cannot reserve {num_bytes} bytes of shared memory for {purpose}: {problem}; {advice}"
    )


def available_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Return how much memory can be had without taking it from a process, and which limit says so.

    Args:
        proc: Mount point of procfs.
        cgroups: Mount point of the control groups.
    """
    left = [(_host_bytes(proc, "MemAvailable"), "on this host")]
    left += [(group.left, f"in control group {group.name}") for group in _groups(proc, cgroups)]
    return min(left)


def total_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this host, or the limit of a control group around this process.

    Args:
        proc: Mount point of procfs.
        cgroups: Mount point of the control groups.
    """
    limits = [group.limit for group in _groups(proc, cgroups)]
    return min([_host_bytes(proc, "MemTotal"), *limits])


class _Group(NamedTuple):
    """A control group: its folder, its limit, and the bytes that may still be allocated."""

    name: str
    limit: int
    left: int


def _host_bytes(proc: Path, wanted: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == wanted:
            return int(value.removesuffix("kB")) << 10
    raise OSError(errno.ENODATA, f"no {wanted} in {proc / 'meminfo'}")


def _groups(proc: Path, cgroups: Path) -> Iterator[_Group]:
    """Yield each limited control group around this process."""
    for folder in group_folders("memory", proc, cgroups):
        found = _read_group(folder)
        if found is not None:
            yield found


def group_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of the control groups around this process, some of which may be missing.

    Args:
        controller: Name of the controller in version 1, such as "memory".
        proc: Mount point of procfs.
        cgroups: Mount point of the control groups.
    """
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers
        # A container may see its own group as the root, whatever its path on the host is.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == root:
                break


def _read_group(folder: Path) -> _Group | None:
    for limit_name, used_name, stat_name, droppable_name in _CGROUP_FILES:
        try:
            limit, used = (int((folder / x).read_text()) for x in (limit_name, used_name))
            stat = dict(x.split() for x in (folder / stat_name).read_text().splitlines())
        except (OSError, ValueError):  # No such file, or "max".
            continue
        left = max(0, limit - used + int(stat.get(droppable_name, 0)))
        # Version 1 writes a number near 2^63 for no limit.
        return _Group(str(folder), limit, left) if left < sys.maxsize else None
    return None
