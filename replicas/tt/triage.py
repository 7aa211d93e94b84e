"""ttnn's timeout of a device operation, and the report of tt-triage that it leaves.

Without a timeout ttnn polls a hung device for ever, and holds the interpreter's lock meanwhile.
With one it runs a command when the device's dispatch has made no progress for that long, and then
raises. The command is tt-triage, Tenstorrent's debugger: it reads what every core is doing, which a
reset of the board would destroy.

Sources: tt-metal's rtoptions.cpp and system_memory_manager.cpp for the variables;
tt-inference-server's run_vllm_api_server.py, which sets both by default, for the places of the
script. Its 5 s were too short for a first compilation of a third-party class there.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT = "TT_METAL_OPERATION_TIMEOUT_SECONDS"
COMMAND = "TT_METAL_DISPATCH_TIMEOUT_COMMAND_TO_EXECUTE"
REPORT = "TTSERVE_TRIAGE_REPORT"
"""File that the default command writes to; set by the process that starts an engine."""

_TIMEOUT_SHARE = 1 / 3
_TRIAGE_SHARE = 1 / 2
"""Shares of the time after which an engine is killed; the rest is for its end."""
_IN_CHECKOUT = ("tools/triage/triage.py", "scripts/debugging_scripts/triage.py")


def find_triage(metal_home: str | None, ttnn_folder: Path | None) -> Path | None:
    """Return tt-triage's script in the tt-metal checkout, else beside the ttnn package, or None.

    Args:
        metal_home: The checkout that the engine uses.
        ttnn_folder: The folder of the ttnn package.
    """
    places = [Path(metal_home) / place for place in _IN_CHECKOUT] if metal_home is not None else []
    if ttnn_folder is not None:
        places.append(ttnn_folder.parent / "triage" / "triage.py")
    return next((place for place in places if place.is_file()), None)


def timeout_variables(script: Path | None, kill_s: float) -> dict[str, str]:
    """Return the variables that make ttnn time out, and triage, before the engine is killed.

    Args:
        script: tt-triage's script; without one ttnn only times out.
        kill_s: Seconds without a beat after which the parent kills the engine. ttnn may hold the
            interpreter's lock while it waits and while the command runs, so no beat is sent then.
    """
    variables = {TIMEOUT: f"{_TIMEOUT_SHARE * kill_s:g}"}
    if script is not None:
        call = shlex.join([
            "timeout", f"{_TRIAGE_SHARE * kill_s:g}", sys.executable, str(script),
            "--disable-progress", "--skip-version-check",
        ])  # fmt: skip
        variables[COMMAND] = f'{call} > "${{{REPORT}:-/dev/stderr}}" 2>&1'
    return variables


def prepare_report(environment: Mapping[str, str], folder: Path | None, name: str) -> Path | None:
    """Return the file for an engine's triage report, in a folder that is created.

    None if the environment has another command, if there is no folder, or if it cannot be created:
    the report then goes to the engine's log.

    Args:
        environment: The engine's.
        folder: Where reports are kept.
        name: Unique name of the engine's start.
    """
    if REPORT not in environment.get(COMMAND, "") or folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder / f"{name}.txt"


def with_report(reason: str, report: Path | None) -> str:
    """Return why an engine ended, with the path of its triage report if there is one."""
    if report is None or not report.exists():
        return reason
    return f"{reason}; tt-triage's report is in {report}"
