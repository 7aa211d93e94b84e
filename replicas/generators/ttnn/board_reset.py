"""Names under which boards are locked, and the reset of boards that a dead process left open.

A name in TT_VISIBLE_DEVICES may mean different boards to different processes, and to `tt-smi`. So
boards are locked by their PCI addresses and reset by their device nodes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.errors import DeviceError
from replicas.tt.boards import VISIBLE_DEVICES, holders_text, named
from replicas.tt.tt_smi import find_tt_smi

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replicas.generators.ttnn.board_locks import BoardLocks
    from replicas.tt.boards import Device

_LOG = logging.getLogger(__name__)


def lock_names(names: Sequence[str], devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the lock names of boards: PCI addresses, or the given name if no board matches it.

    Args:
        names: Names in TT_VISIBLE_DEVICES; empty for all boards of the host.
        devices: The host's devices.
    """
    if not names:
        return tuple(device.address for device in devices if device.has_node)
    found = {name: [device.address for device in named(devices, name)] for name in names}
    return tuple(dict.fromkeys(a for name in names for a in (found[name] or [name])))


def reset_left_open(
    locks: BoardLocks, devices: Sequence[Device], environment: Mapping[str, str]
) -> None:
    """Reset boards that a process had open when it died.

    A Galaxy can only be reset as a whole, by a process that has locked all of it.

    Args:
        locks: The locks of this process, with the boards that were left open.
        devices: The host's devices.
        environment: Environment whose PATH is searched for tt-smi.

    Raises:
        DeviceError: The reset failed, or would affect other boards or processes that have them
            open; says what to do.
    """
    if not locks.left_open:
        return
    boards = [d for d in devices if d.address in locks.left_open and d.index is not None]
    nodes = [device.index for device in boards if device.index is not None]
    by_hand = _by_hand(boards, nodes)
    if len(boards) < len(locks.left_open):
        lost = sorted(set(locks.left_open) - {device.address for device in boards})
        _LOG.warning(
            "a process died with boards %s open, and this host has no device nodes for them; if "
            "opening them hangs, reset them by hand", ", ".join(lost),
        )  # fmt: skip
    if not boards:
        return
    tool = find_tt_smi(environment)
    if tool is None:
        _LOG.warning(
            "a process died with boards %s open and tt-smi is not on PATH to reset them; if "
            "opening them hangs, run %s on this host (pip install tt-smi)",
            ", ".join(device.address for device in boards), by_hand,
        )  # fmt: skip
        return
    if any(device.is_galaxy for device in boards):
        _check_whole_galaxy(locks, devices, by_hand)
        _check_nobody_else(locks, devices, by_hand)
        arguments = tool.galaxy_reset_arguments()
        environment = {k: v for k, v in environment.items() if k != VISIBLE_DEVICES}
    else:
        _check_nobody_else(locks, boards, by_hand)
        arguments = tool.reset_arguments(nodes)
    _LOG.warning(
        "a process died with boards %s open: resetting them with tt-smi %s",
        ", ".join(device.address for device in boards), " ".join(arguments),
    )  # fmt: skip
    tool.run(arguments, environment)


def _by_hand(boards: Sequence[Device], nodes: Sequence[int]) -> str:
    if any(device.is_galaxy for device in boards):
        return "`tt-smi -glx_reset`"
    return f"`tt-smi -r {','.join(f'/dev/tenstorrent/{node}' for node in nodes)}`"


def _check_nobody_else(locks: BoardLocks, devices: Sequence[Device], by_hand: str) -> None:
    """Refuse to reset devices that another process has open and may be using."""
    own = os.getpid()
    others = [replace(d, holders=tuple(pid for pid in d.holders if pid != own)) for d in devices]
    holders = holders_text(others)
    if holders:
        files = ", ".join(str(locks.file_of(board)) for board in locks.left_open)
        raise DeviceError(
            f"a process died with boards {', '.join(locks.left_open)} open, but a reset would "
            f"disrupt {holders}: end these processes, or run {by_hand} and delete {files}"
        )


def _check_whole_galaxy(locks: BoardLocks, devices: Sequence[Device], by_hand: str) -> None:
    others = [device for device in devices if device.address not in locks.boards]
    if others:
        raise DeviceError(
            f"a process died with chips of this Galaxy open, but a reset affects all "
            f"{len(devices)} of the machine, and this engine has {len(locks.boards)}: stop "
            f"every engine here, run {by_hand}, and delete {locks.folder}"
        )
