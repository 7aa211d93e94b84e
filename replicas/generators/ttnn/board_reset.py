"""Which boards are whose, and how those that a dead process left open are brought back.

A name in TT_VISIBLE_DEVICES means another board to another process, and to `tt-smi` yet another:
so boards are locked by their PCI addresses, and reset by their device nodes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.boards import VISIBLE_DEVICES, holders_text, named
from replicas.errors import DeviceError
from replicas.tt_smi import find_tt_smi

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replicas.boards import Device
    from replicas.generators.ttnn.board_locks import BoardLocks

_LOG = logging.getLogger(__name__)


def lock_names(names: Sequence[str], devices: Sequence[Device]) -> tuple[str, ...]:
    """What boards are locked by: PCI addresses, and the name itself of a board that is not found.

    Args:
        names: As TT_VISIBLE_DEVICES has them; none for all boards of the host.
        devices: Those of the host.
    """
    if not names:
        return tuple(device.address for device in devices if device.has_node)
    found = {name: [device.address for device in named(devices, name)] for name in names}
    return tuple(dict.fromkeys(a for name in names for a in (found[name] or [name])))


def reset_left_open(
    locks: BoardLocks, devices: Sequence[Device], environment: Mapping[str, str]
) -> None:
    """Bring boards that a dead process had open back to a state that can be opened.

    A Galaxy is reset whole, and only by who has locked the whole of it.

    Args:
        locks: What this process has locked, and what was left open of that.
        devices: Those of the host.
        environment: Whose PATH has tt-smi, or has not.

    Raises:
        DeviceError: They were not reset, or would not be without resetting other boards too, or
            under other processes that have them open; says what to do.
    """
    if not locks.left_open:
        return
    boards = [d for d in devices if d.address in locks.left_open and d.index is not None]
    nodes = [device.index for device in boards if device.index is not None]
    by_hand = _by_hand(boards, nodes)
    if len(boards) < len(locks.left_open):
        lost = sorted(set(locks.left_open) - {device.address for device in boards})
        _LOG.warning(
            "a process died with boards %s open, and this host has no device nodes for them: if "
            "opening hangs, reset them by hand", ", ".join(lost),
        )  # fmt: skip
    if not boards:
        return
    tool = find_tt_smi(environment)
    if tool is None:
        _LOG.warning(
            "a process died with boards %s open and tt-smi is not on PATH to reset them: if "
            "opening hangs, run %s on this host (pip install tt-smi)",
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
    """See that no other process has a device open that is to be reset: it may be at work."""
    own = os.getpid()
    others = [replace(d, holders=tuple(pid for pid in d.holders if pid != own)) for d in devices]
    holders = holders_text(others)
    if holders:
        files = ", ".join(str(locks.file_of(board)) for board in locks.left_open)
        raise DeviceError(
            f"a process died with boards {', '.join(locks.left_open)} open, and resetting them "
            f"would take away {holders}: end them, or run {by_hand} and delete {files}"
        )


def _check_whole_galaxy(locks: BoardLocks, devices: Sequence[Device], by_hand: str) -> None:
    others = [device for device in devices if device.address not in locks.boards]
    if others:
        raise DeviceError(
            f"a process died with chips of this Galaxy open, and resetting them resets all "
            f"{len(devices)} of the machine, of which this engine has {len(locks.boards)}: stop "
            f"every engine here, run {by_hand}, and delete {locks.folder}"
        )
