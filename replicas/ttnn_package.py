"""The installed ttnn, its compiler, and the versions that it wants of what is around it.

ttnn is not imported: that takes seconds and looks for boards.

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

    from replicas.meshes import Arch

PACKAGE = "ttnn"

OLDEST_FIRMWARE: Mapping[Arch, str] = {"wormhole": "18.3.0", "blackhole": "18.5.0"}
"""Bundles before these ttnn refuses."""

_OLD_FIRMWARE = 80
_COMPILER = "compiler/bin/riscv-tt-elf-g++"
_ELF = b"\x7fELF"
_COMPILERS_VERSION = re.compile(rb"tenstorrent/sfpi[-\w]*:(\d[\w.-]*)")
_WANTED_SFPI = re.compile(r"^sfpi_version='?([\w.-]+)'?$", re.MULTILINE)
_RELEASE = re.compile(r"^\|\s*\[?(\d+\.\d+\.\d+)\b.*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|[^|]*\|\s*$")


@dataclass(frozen=True, slots=True)
class TtnnPackage:
    """What is installed.

    Attributes:
        version: "from source" for a package without metadata.
        folder: Of the package.
        description: Of its metadata; "" without.
    """

    version: str
    folder: Path
    description: str = ""


@dataclass(frozen=True, slots=True)
class WantedVersions:
    """What a ttnn wants; None where it does not say.

    Attributes:
        sfpi: The compiler, exactly.
        release: The release of tt-metal that the next two were named for: the last one that the
            package lists, which may be older than itself.
        firmware: The bundle that it was tested with.
        driver: The driver that it was tested with.
    """

    sfpi: str | None = None
    release: str | None = None
    firmware: str | None = None
    driver: str | None = None


def find_ttnn(packages: Sequence[str] | None = None) -> TtnnPackage | None:
    """Look for it.

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
    """What the package says, or for the compiler a checkout of tt-metal before it."""
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
    """The compiler in the places where tt-metal looks for it."""
    folders = [Path(metal_home) / "runtime/sfpi"] if metal_home is not None else []
    folders += [package.folder / "runtime/sfpi"] if package is not None else []
    folders.append(root / "opt/tenstorrent/sfpi")
    compilers = (folder / _COMPILER for folder in folders)
    return next((path for path in compilers if path.is_file()), None)


def sfpi_version(compiler: Path) -> tuple[bool, str | None]:
    """Whether it is an executable and not a script in its place; and the version in it, or None."""
    try:
        content = compiler.read_bytes()
    except OSError:
        return False, None
    found = _COMPILERS_VERSION.search(content)
    return content.startswith(_ELF), None if found is None else found[1].decode()


def version_number(text: str | None) -> tuple[int, ...]:
    """The numbers of a version, to compare it by; empty for none."""
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def firmware_number(text: str | None) -> tuple[int, ...]:
    """The numbers of a firmware bundle's version, to compare it by.

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
