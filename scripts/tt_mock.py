"""Set up ttnn's mock device: a Python 3.12 with ttnn, and a stand-in for its compiler.

    python3 scripts/tt_mock.py find-python          print a Python 3.12
    python3 scripts/tt_mock.py binutils             install Debian's RISC-V binutils if missing
    python3 scripts/tt_mock.py toolchain PYTHON     install the stand-in where that Python's ttnn is

ttnn opens a device that is only described by a file (``TT_METAL_MOCK_CLUSTER_DESC_PATH``), checks
every call as for silicon, and computes nothing. But it compiles kernels for it, with Tenstorrent's
SFPI compiler. The stand-in (``tests/tt/mock/toolchain``) compiles an empty kernel instead. It never
replaces a real SFPI, which works as well.

Needs the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent.parent / "tests" / "tt" / "mock" / "toolchain"
COMPILER = "riscv-tt-elf-g++"
_MARK = b"ttserve stand-in"
_ASSEMBLER = "riscv64-unknown-elf-as"
_PACKAGE = "binutils-riscv64-unknown-elf"


class SetUpError(Exception):
    """A missing dependency, with the command that installs it."""


def find_python() -> str:
    """Path of a Python 3.12: from PATH, or from pyenv.

    Raises:
        SetUpError: There is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which("python3.12")]
    candidates += [str(path) for path in sorted(pyenv.glob("3.12*/bin/python3.12"), reverse=True)]
    for candidate in candidates:
        # pyenv's own python3.12 on PATH is a script that fails where no 3.12 is selected.
        if candidate and _is_3_12(candidate):
            return candidate
    raise SetUpError(
        "ttnn needs Python 3.12 (its wheels are for 3.10 and 3.12): none on PATH and none under "
        f"{pyenv}; install one (pyenv install 3.12), or name one: make TTNN_PYTHON=/path test-tt"
    )


def install_binutils() -> None:
    """Install the assembler and linker for RISC-V, if they are not there.

    Raises:
        SetUpError: They are missing and cannot be installed from here.
    """
    if shutil.which(_ASSEMBLER):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetUpError(f"{_ASSEMBLER} is not on PATH: sudo apt-get install -y {_PACKAGE}")
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "-y", "-o", "DPkg::Lock::Timeout=600", _PACKAGE],
    ):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode:
            raise SetUpError(f"`{' '.join(command)}` failed; see above")


def ttnn_package(python: str) -> Path:
    """Folder of the ttnn package of another interpreter.

    Raises:
        SetUpError: It has none.
    """
    code = "import importlib.util as u; s = u.find_spec('ttnn'); print(s.origin if s else '')"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.strip():
        raise SetUpError(f"{python} has no ttnn {found.stderr.strip()}".rstrip())
    return Path(found.stdout.strip()).parent


def install_toolchain(package: Path) -> bool:
    """Put the stand-in into a ttnn package, unless a real SFPI is there, which works as well.

    Args:
        package: Folder of the package.

    Returns:
        Whether the compiler there is the stand-in now.

    Raises:
        SetUpError: There is no assembler.
    """
    folder = compiler_folder(package)
    compiler = folder / COMPILER
    if compiler.is_symlink() or (compiler.exists() and _MARK not in compiler.read_bytes()[:400]):
        return False
    if shutil.which(_ASSEMBLER) is None:
        raise SetUpError(f"{_ASSEMBLER} is not on PATH: sudo apt-get install -y {_PACKAGE}")
    folder.mkdir(parents=True, exist_ok=True)
    source, compiled = str(_SOURCES / "kernel.s"), str(folder / "kernel.o")
    command = [_ASSEMBLER, "-march=rv32im", "-mabi=ilp32", source, "-o", compiled]
    subprocess.run(command, check=True)
    shutil.copyfile(_SOURCES / COMPILER, compiler)
    compiler.chmod(0o755)
    return True


def compiler_folder(package: Path) -> Path:
    """Return the folder in which a ttnn package looks for its compiler first."""
    return package / "runtime" / "sfpi" / "compiler" / "bin"


def _is_3_12(python: str) -> bool:
    code = "import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))"
    try:
        return (
            subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


def main() -> None:
    """Run one of the commands; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("find-python", help="print a Python 3.12")
    commands.add_parser("binutils", help="install RISC-V binutils if they are missing")
    toolchain = commands.add_parser("toolchain", help="install the stand-in for SFPI")
    toolchain.add_argument("python", help="interpreter whose ttnn it is for")
    arguments = parser.parse_args()
    try:
        if arguments.command == "find-python":
            print(find_python())
        elif arguments.command == "binutils":
            install_binutils()
        else:
            package = ttnn_package(arguments.python)
            what = "stand-in for SFPI" if install_toolchain(package) else "SFPI, left as it is,"
            print(f"{what} in {compiler_folder(package)}")
    except SetUpError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
