"""Boards of ttnn's mock device, and the environment that opens one."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from scripts.tt_mock import COMPILER, compiler_folder

BOARD_VARIABLE = "TTSERVE_MOCK_BOARD"

DESCRIPTIONS = {
    path.stem.upper(): path for path in sorted((Path(__file__).parent / "boards").glob("*.yaml"))
}
"""By the name of the mesh that takes all of the board."""


def what_is_missing() -> str | None:
    """Return why no test here can run, or None. Does not import ttnn."""
    spec = importlib.util.find_spec("ttnn")
    if spec is None or spec.origin is None:
        return "ttnn is not installed (it has wheels for Python 3.10 and 3.12): make test-tt"
    compiler = compiler_folder(Path(spec.origin).parent) / COMPILER
    if not compiler.exists():
        return "ttnn has no kernel compiler: make test-tt, or scripts/tt_mock.py toolchain PYTHON"
    if shutil.which("riscv64-unknown-elf-ld") is None:
        return "the linker for kernels is missing: apt-get install binutils-riscv64-unknown-elf"
    return None


def environment(board: str | None) -> dict[str, str]:
    """Return the variables that a process needs before it imports ttnn.

    Args:
        board: The board that it opens; None for none.
    """
    spec = importlib.util.find_spec("ttnn")
    assert spec is not None
    assert spec.origin is not None
    # Kernels of a stand-in must never be found by a process on silicon, nor those of another one.
    compiler = compiler_folder(Path(spec.origin).parent) / COMPILER
    digest = hashlib.sha256(compiler.read_bytes() + spec.origin.encode()).hexdigest()[:12]
    scratch = Path(tempfile.gettempdir()) / f"ttserve-mock-{os.getuid()}-{digest}"
    for name in ("kernels", "logs"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    variables = {
        "TT_METAL_CACHE": str(scratch / "kernels"),
        "TT_METAL_LOGS_PATH": str(scratch / "logs"),
        # As in `replicas.launch`: or every process leaves a file in /dev/shm.
        "OMPI_MCA_btl": "self",
        "TT_LOGGER_LEVEL": "FATAL",
        "LOGURU_LEVEL": "WARNING",
    }
    if board is not None:
        variables["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = str(DESCRIPTIONS[board.upper()])
        variables[BOARD_VARIABLE] = board
    return variables
