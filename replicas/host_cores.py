"""Number of processor cores that this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

from kv_transfer.host_memory import group_folders

_VERSION_1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that affinity and the quotas of control groups leave, at least one.

    A part of a core is left out: threads that wait for each other would all wait while the quota is
    used up.

    Args:
        proc: Mount point of procfs.
        cgroups: Mount point of the control groups.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    try:
        for folder in group_folders("cpu", proc, cgroups):
            cores = min(cores, _quota(folder))
    except FileNotFoundError:  # not Linux
        pass
    return max(int(cores), 1)


def _quota(folder: Path) -> float:
    """Return the cores that a control group's quota is worth."""
    names = ("cpu.max",) if (folder / "cpu.max").exists() else _VERSION_1
    try:
        quota, period = " ".join((folder / name).read_text() for name in names).split()
        cores = int(quota) / int(period)
    except (OSError, ValueError):  # No such file, or "max".
        return float("inf")
    # Version 1 writes -1 for no limit.
    return cores if cores > 0 else float("inf")
