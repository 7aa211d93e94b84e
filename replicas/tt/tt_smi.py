"""Wrapper of Tenstorrent's `tt-smi` command: its path, version, reports and resets.

A number after `-r` is the N of /dev/tenstorrent/N up to version 4.1. From 4.2 on it is an index
into the sorted PCI addresses, another board wherever the two orders differ; these versions also
accept device nodes.

Sources: the arguments of tt-smi at its tags v3.0.20 to v6.2.1, and its README on Galaxy resets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from replicas.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Snapshot: TypeAlias = "dict[str, Mapping[str, Mapping[str, str]]]"
"""PCI address -> section of the report -> key -> value."""

NAME = "tt-smi"
_TAKES_NODES = (4, 2)
_RESETS_GALAXIES = (3, 0, 21)
_LOOK_TIMEOUT_S = 30.0
_RESET_TIMEOUT_S = 300.0
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_NODES = "/dev/tenstorrent"


@dataclass(frozen=True, slots=True)
class TTSmi:
    """The `tt-smi` command of a host.

    Attributes:
        path: Path of the executable.
        version: The version that it prints, such as "6.2.1"; None if it prints none.
    """

    path: str
    version: str | None

    @property
    def takes_nodes(self) -> bool:
        """Whether resets are given device nodes instead of numbers."""
        return self._number >= _TAKES_NODES

    @property
    def resets_galaxies(self) -> bool:
        """Whether it can reset the trays of a Galaxy."""
        return self._number >= _RESETS_GALAXIES

    def reset_arguments(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Return the arguments that reset these boards and no others.

        Args:
            nodes: The N of each /dev/tenstorrent/N. Must not be empty: tt-smi would reset all
            boards.

        Raises:
            DeviceError: Its version is unknown, and with it the meaning of its numbers.
        """
        assert nodes
        if self.version is None:
            raise DeviceError(
                f"`{self.path} -v` prints no version, so board numbers are ambiguous: repair "
                f"tt-smi, or reset {', '.join(f'{_NODES}/{node}' for node in nodes)} by hand"
            )
        prefix = f"{_NODES}/" if self.takes_nodes else ""
        return "-r", ",".join(f"{prefix}{node}" for node in nodes)

    def galaxy_reset_arguments(self) -> tuple[str, ...]:
        """Return the arguments that reset a whole Galaxy.

        Raises:
            DeviceError: This tt-smi is too old.
        """
        if not self.resets_galaxies:
            raise DeviceError(
                f"tt-smi {self.version or 'of unknown version'} cannot reset a Galaxy, and its -r "
                "may drop all 32 chips: install 3.0.21 or newer, or restart the machine"
            )
        return ("-glx_reset",)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a reset and wait for it.

        Args:
            arguments: The command's arguments.
            environment: The command's environment. TT_VISIBLE_DEVICES limits which boards a reset
                by nodes checks afterwards; tt-smi does not reset a Galaxy while it is set.

        Raises:
            DeviceError: It failed or took longer than five minutes; quotes its last line.
        """
        command = f"`tt-smi {' '.join(arguments)}`"
        try:
            done = subprocess.run(
                [self.path, *arguments],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                check=False, timeout=_RESET_TIMEOUT_S, env=dict(environment),
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(f"{command} did not reset the boards: {error}") from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise DeviceError(
                f"{command} did not reset the boards, exit code {done.returncode}: "
                f"{said[-1] if said else 'it printed nothing'}"
            )

    @property
    def _number(self) -> tuple[int, ...]:
        return tuple(int(part) for part in (self.version or "").split(".") if part)


def find_tt_smi(environment: Mapping[str, str]) -> TTSmi | None:
    """Return the command on this PATH or beside this interpreter, or None.

    Runs it once for its version, which touches no board.
    """
    folders = (environment.get("PATH"), os.path.dirname(sys.executable))
    path = shutil.which(NAME, path=os.pathsep.join(folder for folder in folders if folder))
    if path is None:
        return None
    said = _VERSION.search(_said(path, ["-v"], environment) or "")
    return TTSmi(path, None if said is None else said[0])


def snapshot(tool: TTSmi, environment: Mapping[str, str]) -> Snapshot:
    """Return tt-smi's report of each chip by PCI address; empty if it fails.

    It accesses every board, so no process may be using any of them.
    """
    text = _said(tool.path, ["-s", "--snapshot_no_tty"], environment) or ""
    try:
        told = json.loads(text[text.index("{") : text.rindex("}") + 1])
        # The second chip of an n300 has no PCIe device and hence no address.
        return {chip["board_info"]["bus_id"]: chip for chip in told["device_info"]}
    except (ValueError, KeyError, TypeError):
        return {}


def _said(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the command's output; None if it fails."""
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=True, timeout=_LOOK_TIMEOUT_S, env=dict(environment),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
