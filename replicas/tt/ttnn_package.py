"""The installed ttnn, its compiler, and the versions of software that it expects.

Does not import ttnn, which takes seconds and looks for boards.

Sources: where tt-metal looks for SFPI (jit_build), its file sfpi-version, and the table of releases
in its README, which the package carries as its description; the oldest firmware from tt-umd's
firmware_info_provider.cpp.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replicas.tt.meshes import Arch

PACKAGE = "ttnn"

OLDEST_FIRMWARE: Mapping[Arch, str] = {"wormhole": "18.3.0", "blackhole": "18.5.0"}
"""Oldest firmware bundle that ttnn accepts."""

_OLD_FIRMWARE = 80
_COMPILER = "compiler/bin/riscv-tt-elf-g++"
_ELF = b"\x7fELF"
_COMPILERS_VERSION = re.compile(rb"tenstorrent/sfpi[-\w]*:(\d[\w.-]*)")
_WANTED_SFPI = re.compile(r"^sfpi_version='?([\w.-]+)'?$", re.MULTILINE)
_RELEASE = re.compile(r"^\|\s*\[?(\d+\.\d+\.\d+)\b.*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|[^|]*\|\s*$")


@dataclass(frozen=True, slots=True)
class TtnnPackage:
    """The installed ttnn package.

    Attributes:
        version: "from source" for a package without metadata.
        folder: The package's folder.
        description: Description in its metadata; "" without one.
    """

    version: str
    folder: Path
    description: str = ""


@dataclass(frozen=True, slots=True)
class WantedVersions:
    """Versions that a ttnn expects; None where it does not state one.

    Attributes:
        sfpi: Exact version of the compiler.
        release: The tt-metal release for which the next two are listed: the latest one in the
            package's table, which may be older than the package.
        firmware: The firmware bundle that it was tested with.
        driver: The driver that it was tested with.
    """

    sfpi: str | None = None
    release: str | None = None
    firmware: str | None = None
    driver: str | None = None


def find_ttnn(packages: Sequence[str] | None = None) -> TtnnPackage | None:
    """Find the installed ttnn.

    Args:
        packages: Folders to look in; None takes this interpreter's.
    """
    path = sys.path if packages is None else list(packages)
    for found in importlib.metadata.distributions(name=PACKAGE, path=path):
        folder = Path(str(found.locate_file(PACKAGE)))
        return TtnnPackage(found.version, folder, found.read_text("METADATA") or "")
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE, path)
    if spec is None or spec.origin is None:
        return None
    return TtnnPackage("from source", Path(spec.origin).parent)


def wanted_versions(package: TtnnPackage | None, metal_home: str | None) -> WantedVersions:
    """Return the expected versions; for the compiler a tt-metal checkout takes precedence."""
    roots = [Path(metal_home)] if metal_home is not None else []
    roots += [package.folder] if package is not None else []
    texts = (_text(root / "tt_metal/sfpi-version") for root in roots)
    sfpi = next((m[1] for text in texts if (m := _WANTED_SFPI.search(text)) is not None), None)
    if package is None:
        return WantedVersions(sfpi)
    rows = [m for line in package.description.splitlines() if (m := _RELEASE.match(line))]
    rows = [row for row in rows if version_number(row[1]) <= version_number(package.version)]
    if not rows:
        return WantedVersions(sfpi)
    newest = max(rows, key=lambda row: version_number(row[1]))
    return WantedVersions(sfpi, newest[1], newest[2], newest[3])


def find_sfpi(root: Path, package: TtnnPackage | None, metal_home: str | None) -> Path | None:
    """Return the path of the compiler, searched in the order in which tt-metal does."""
    folders = [Path(metal_home) / "runtime/sfpi"] if metal_home is not None else []
    folders += [package.folder / "runtime/sfpi"] if package is not None else []
    folders.append(root / "opt/tenstorrent/sfpi")
    compilers = (folder / _COMPILER for folder in folders)
    return next((path for path in compilers if path.is_file()), None)


def sfpi_version(compiler: Path) -> tuple[bool, str | None]:
    """Return whether the compiler is an ELF executable, and the version found in it, or None."""
    try:
        content = compiler.read_bytes()
    except OSError:
        return False, None
    found = _COMPILERS_VERSION.search(content)
    return content.startswith(_ELF), None if found is None else found[1].decode()


def version_number(text: str | None) -> tuple[int, ...]:
    """Return a version as a tuple of numbers to compare by; empty for none."""
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def firmware_number(text: str | None) -> tuple[int, ...]:
    """Return a firmware bundle's version as a tuple of numbers to compare by.

    Bundles whose numbers begin with 80 or more are older than all others.
    """
    number = version_number(text)
    if number and number[0] >= _OLD_FIRMWARE:
        return 0, *number[1:]
    return number


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
