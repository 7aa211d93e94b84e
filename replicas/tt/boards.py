"""Tenstorrent boards of this host and the installed software for them. Opens no device.

`read_host` collects facts from files below a root folder. `mesh_choices` and `mesh_problem` decide
which meshes the boards can form.

Sources: sysfs and procfs files, and PCI device ids, from tt-kmd's docs/sysfs-attributes.md and its
source; a Galaxy's subsystem ids from tt-smi; numbers in TT_VISIBLE_DEVICES from tt-umd's
pci_device.cpp; the TTNPU count from Ray 2.60's ttnpu.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.tt.meshes import MESHES, Arch, MeshSpec
from replicas.tt.tt_smi import TTSmi, find_tt_smi, snapshot
from replicas.tt.ttnn_package import (
    WantedVersions,
    find_sfpi,
    find_ttnn,
    sfpi_version,
    wanted_versions,
)
from replicas.user_cache import NO_HOME, user_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VENDOR_ID = "0x1e52"
RESOURCE = "TTNPU"
"""Name of Ray's resource; a host has one unit for each device node."""

VISIBLE_DEVICES = "TT_VISIBLE_DEVICES"
MOCK_DESCRIPTOR = "TT_METAL_MOCK_CLUSTER_DESC_PATH"
METAL_HOME = "TT_METAL_HOME"

_ARCHS: Mapping[str, Arch] = {"0x401e": "wormhole", "0xb140": "blackhole"}
HUGEPAGES_FILE = "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
_FREE_HUGEPAGES_FILE = "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages"
_CHIPS_PER_BOARD: Mapping[str | None, int] = {"n300": 2, "p300": 2}
_CHIPS_PER_DEVICE: Mapping[str | None, int] = {"n300": 2}
_GALAXIES: Mapping[int, str] = {0x35: "galaxy-wormhole", 0x47: "galaxy-blackhole"}
"""Subsystem id of a chip -> Galaxy board that it is on."""
_CARD = re.compile(r"^(?:tt-)?(galaxy|[np]\d{3})(?:-(wormhole|blackhole|wh|bh))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One Tenstorrent PCIe device.

    Attributes:
        address: Its PCI address.
        arch: Its architecture; None for a chip that ttnn does not support.
        index: N of /dev/tenstorrent/N; None without a driver.
        has_node: Whether that node exists here; a container sees only the nodes that it was given.
        is_usable: Whether this user may read and write the node.
        board: "n150", "n300", "p100", "p150", "p300", "galaxy-wormhole" or "galaxy-blackhole"; None
            where neither the driver nor tt-smi reports it.
        firmware: Version of the firmware bundle, or None.
        holders: Ids of processes that have it open; 0 for one outside this container.
    """

    address: str
    arch: Arch | None
    index: int | None
    has_node: bool
    is_usable: bool
    board: str | None
    firmware: str | None
    holders: tuple[int, ...]

    @property
    def is_galaxy(self) -> bool:
        """Return whether it is one of a Galaxy's chips."""
        return (self.board or "").startswith("galaxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Facts about a host's boards and software.

    Attributes:
        devices: Its devices, ordered by device node.
        num_ray_devices: `TTNPU` units that Ray would detect by itself.
        driver: Version of the loaded driver; "" if it reports none; None without a driver.
        num_hugepages: Configured huge pages of 1 GiB.
        num_free_hugepages: Unused ones among these; None where the kernel does not report it.
        has_hugepage_mount: Whether /dev/hugepages-1G exists.
        has_iommu: Whether an IOMMU translates for every device.
        python: (major, minor) version of the interpreter.
        ttnn: Version of the installed package; "from source" without metadata; None if missing.
        sfpi: Path of the SFPI compiler, which builds kernels; None without one.
        is_sfpi_real: Whether that is an ELF executable and not a placeholder script.
        sfpi_version: Version of that compiler, or None.
        wanted: Versions of compiler, firmware and driver that ttnn expects.
        blocked_folders: Folders that engines write to and this user may not.
        metal_home: Value of TT_METAL_HOME, or None.
        has_metal_home: Whether `metal_home` is a folder.
        mock_descriptor: File that describes a mock cluster in place of boards, or None.
        has_mock_descriptor: Whether `mock_descriptor` exists.
        visible_devices: Value of TT_VISIBLE_DEVICES, or None.
        tt_smi: The command that resets boards, or None.
    """

    devices: tuple[Device, ...]
    num_ray_devices: int
    driver: str | None
    num_hugepages: int
    num_free_hugepages: int | None
    has_hugepage_mount: bool
    has_iommu: bool
    python: tuple[int, int]
    ttnn: str | None
    sfpi: str | None
    is_sfpi_real: bool
    sfpi_version: str | None
    wanted: WantedVersions
    blocked_folders: tuple[str, ...]
    metal_home: str | None
    has_metal_home: bool
    mock_descriptor: str | None
    has_mock_descriptor: bool
    visible_devices: str | None
    tt_smi: TTSmi | None

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that a process of this user and environment can open."""
        return tuple(d for d in self.devices if d.is_usable and self.is_visible(d))

    @property
    def visible_names(self) -> tuple[str, ...]:
        """Names in `visible_devices`; see `replicas.tt.boards.visible_names`."""
        return visible_names(self.visible_devices)

    def is_visible(self, device: Device) -> bool:
        """Return whether TT_VISIBLE_DEVICES lets ttnn open a device."""
        names = self.visible_names
        return not names or any(device in named(self.devices, name) for name in names)


def visible_names(visible_devices: str | None) -> tuple[str, ...]:
    """Return the names in TT_VISIBLE_DEVICES: numbers and PCI addresses; empty for all devices.

    Args:
        visible_devices: Its value; None if it is not set. Empty names are dropped.
    """
    names = (name.strip() for name in (visible_devices or "").split(","))
    return tuple(name for name in names if name)


def named(devices: Sequence[Device], name: str) -> tuple[Device, ...]:
    """Return the devices that a name in TT_VISIBLE_DEVICES matches.

    Args:
        devices: All devices of the host.
        name: A part of a PCI address, or a number: an index into the sorted addresses of the
            devices that have a node here. It need not be the N of /dev/tenstorrent/N.
    """
    if not name.isdigit():
        return tuple(d for d in devices if name.lower() in d.address.lower())
    return tuple(d for d in devices if visible_number(devices, d) == int(name))


def visible_number(devices: Sequence[Device], device: Device) -> int | None:
    """Return the number of a device in TT_VISIBLE_DEVICES; None without a node. See `named`."""
    addresses = sorted(d.address for d in devices if d.has_node)
    return addresses.index(device.address) if device.has_node else None


def holders_text(devices: Sequence[Device]) -> str:
    """Describe which processes have which devices open; return "" for none."""
    return "; ".join(
        f"/dev/tenstorrent/{d.index} by "
        + ", ".join("a process elsewhere" if pid == 0 else f"process {pid}" for pid in d.holders)
        for d in devices
        if d.holders
    )


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """A mesh that the boards of this host can form.

    Attributes:
        mesh: A value for `MeshConfig.name`.
        num_replicas: How many engines with such a mesh fit on this host.
        condition: Further requirement that files do not show; "" for none.
    """

    mesh: str
    num_replicas: int
    condition: str = ""


def read_host(
    environment: Mapping[str, str],
    *,
    root: Path = Path("/"),
    python: tuple[int, int] = sys.version_info[:2],
    packages: Sequence[str] | None = None,
) -> HostReport:
    """Collect the facts about this host.

    Args:
        environment: The process's environment.
        root: Folder that contains dev, sys, proc and opt.
        python: Version of the interpreter that engines run in.
        packages: Folders to look for ttnn in; None takes this interpreter's.
    """
    tool = find_tt_smi(environment)
    devices = _name_boards(read_devices(root), tool, environment)
    package = find_ttnn(packages)
    home = environment.get(METAL_HOME) or None
    sfpi = find_sfpi(root, package, home)
    is_sfpi_real, version = (False, None) if sfpi is None else sfpi_version(sfpi)
    free = _read(root / _FREE_HUGEPAGES_FILE)
    mock = environment.get(MOCK_DESCRIPTOR) or None
    pci = root / "sys/bus/pci/devices"
    return HostReport(
        devices=devices,
        num_ray_devices=len(list((root / "dev/tenstorrent").glob("*"))),
        driver=_driver(root),
        num_hugepages=int(_read(root / HUGEPAGES_FILE) or 0),
        num_free_hugepages=int(free) if free else None,
        has_hugepage_mount=(root / "dev/hugepages-1G").is_dir(),
        has_iommu=bool(devices)
        and all(
            (_read(pci / device.address / "iommu_group/type") or "identity") != "identity"
            for device in devices
        ),
        python=python,
        ttnn=None if package is None else package.version,
        sfpi=None if sfpi is None else str(sfpi),
        is_sfpi_real=is_sfpi_real,
        sfpi_version=version,
        wanted=wanted_versions(package, home),
        blocked_folders=_blocked_folders(environment),
        metal_home=home,
        has_metal_home=home is not None and Path(home).is_dir(),
        mock_descriptor=mock,
        has_mock_descriptor=mock is not None and Path(mock).is_file(),
        visible_devices=environment.get(VISIBLE_DEVICES),
        tt_smi=tool,
    )


def read_devices(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return this host's Tenstorrent devices, ordered by node, from the driver's files alone.

    Args:
        root: Folder that contains dev, sys and proc.
    """
    return tuple(sorted(_devices(root), key=lambda d: (d.index is None, d.index, d.address)))


def can_write(folder: Path) -> bool:
    """Return whether this user may write in a folder, or create it."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _blocked_folders(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return unwritable folders for converted weights and logs, or for ttnn's kernels."""
    cache = user_cache(environment.get("HOME"))
    if cache is None:
        return (f"~ ({NO_HOME})",)
    kernels = environment.get("TT_METAL_CACHE")
    folders = cache, Path(kernels) if kernels else cache.parent / "tt-metal-cache"
    return tuple(str(folder) for folder in folders if not can_write(folder))


def mesh_choices(report: HostReport) -> tuple[MeshChoice, ...]:
    """Return the meshes that the usable boards can form, the largest first.

    A board of unknown kind is left out: its chip does not distinguish an n150 from an n300.
    """
    choices = []
    for board, num_devices in Counter(d.board for d in report.usable).most_common():
        specs = [s for s in MESHES.values() if s.board == board and s.num_hosts == 1]
        fitting = {s.shape: s for s in specs if s.num_pcie_devices <= num_devices}
        for spec in sorted(fitting.values(), key=lambda s: -s.num_chips):
            is_several_boards = spec.num_chips > _CHIPS_PER_BOARD.get(board, 1)
            choices.append(
                MeshChoice(
                    spec.name,
                    num_devices // spec.num_pcie_devices,
                    "its boards are cabled to each other"
                    if is_several_boards and not spec.is_galaxy
                    else "",
                )
            )
    return tuple(choices)


def mesh_problem(report: HostReport, spec: MeshSpec) -> str | None:
    """Return why the boards of this host cannot form a mesh, or None if they can.

    Boards of unknown kind count as fitting. A mesh that is only a grid is judged by its number of
    chips of the architecture.
    """
    if report.mock_descriptor is not None:
        return None
    if spec.num_hosts > 1:
        return f"it spans {spec.num_hosts} hosts and an engine runs on one; use a mesh of one host"
    if spec.board is None:
        num_chips = sum(_chips_of_grid(report, spec))
        if num_chips >= spec.num_chips:
            return None
        others: Arch = "blackhole" if spec.arch == "wormhole" else "wormhole"
        is_other = any(d.arch == others for d in report.usable) and not num_chips
        return f"it needs {spec.num_chips} {spec.arch} chips, and this host has {num_chips}" + (
            f"; for {others} chips set mesh.arch: {others}" if is_other else ""
        )
    devices = [d for d in report.usable if d.arch == spec.arch and d.board in {None, spec.board}]
    if len(devices) < spec.num_pcie_devices:
        return (
            f"it needs {spec.num_pcie_devices} {spec.board} devices under /dev/tenstorrent, and "
            f"this host has {len(devices)}"
        )
    return None


def num_devices(report: HostReport, spec: MeshSpec) -> int:
    """Return how many PCIe devices of this host a mesh needs; for a grid the boards decide.

    Among boards with different numbers of chips it assumes those with the fewest, as Ray may assign
    any. Falls back to `spec.num_pcie_devices` where this host cannot tell.
    """
    chips = sorted(_chips_of_grid(report, spec))
    is_unknown = any(d.board is None for d in report.usable if d.arch == spec.arch)
    if spec.board is not None or is_unknown or sum(chips) < spec.num_chips:
        return spec.num_pcie_devices
    return next(n for n in range(1, len(chips) + 1) if sum(chips[:n]) >= spec.num_chips)


def _chips_of_grid(report: HostReport, spec: MeshSpec) -> list[int]:
    """Return the number of chips of each usable device of the grid's architecture."""
    return [_CHIPS_PER_DEVICE.get(d.board, 1) for d in report.usable if d.arch == spec.arch]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _driver(root: Path) -> str | None:
    module = root / "sys/module/tenstorrent"
    return (_read(module / "version") or "") if module.is_dir() else None


def _devices(root: Path) -> list[Device]:
    with contextlib.suppress(OSError):
        return [
            _device(root, folder)
            for folder in (root / "sys/bus/pci/devices").iterdir()
            if _read(folder / "vendor") == VENDOR_ID
        ]
    return []


def _device(root: Path, folder: Path) -> Device:
    # The driver adds a folder for its class below the PCI device: tenstorrent/tenstorrent!0.
    index, attributes = None, folder
    for attributes in (folder / "tenstorrent").glob("tenstorrent!*"):
        with contextlib.suppress(ValueError):
            index = int(attributes.name.partition("!")[2])
            break
    node = root / "dev/tenstorrent" / str(index)
    pids = _read(root / f"proc/driver/tenstorrent/{index}/pids") if index is not None else None
    has_node = index is not None and node.exists()
    return Device(
        address=folder.name,
        arch=_ARCHS.get(_read(folder / "device") or ""),
        index=index,
        has_node=has_node,
        is_usable=has_node and os.access(node, os.R_OK | os.W_OK),
        board=_board(_read(attributes / "tt_card_type")) or _galaxy(folder),
        firmware=_read(attributes / "tt_fw_bundle_ver") or None,
        holders=tuple(sorted({int(pid) for pid in (pids or "").split() if pid.isdigit()})),
    )


def _board(name: str | None) -> str | None:
    """Return the kind of board for a name that the driver or tt-smi reports, such as "p150b"."""
    card = _CARD.match((name or "").lower())
    if card is None:
        return None
    if card[1] != "galaxy":
        return card[1]
    if card[2] is None:
        return None
    return "galaxy-wormhole" if card[2] in {"wh", "wormhole"} else "galaxy-blackhole"


def _galaxy(folder: Path) -> str | None:
    """Return the kind of Galaxy by the PCI subsystem id, which every driver version has."""
    with contextlib.suppress(ValueError):
        return _GALAXIES.get(int(_read(folder / "subsystem_device") or "0", 16))
    return None


def _name_boards(
    devices: tuple[Device, ...], tool: TTSmi | None, environment: Mapping[str, str]
) -> tuple[Device, ...]:
    """Fill in boards that older drivers do not report from tt-smi, unless a board is in use."""
    unnamed = any(d.has_node and d.board is None for d in devices)
    if not unnamed or tool is None or any(d.holders for d in devices):
        return devices
    of_address = snapshot(tool, environment)
    return tuple(_told(d, of_address.get(d.address)) for d in devices)


def _told(device: Device, chip: Mapping[str, Mapping[str, str]] | None) -> Device:
    if chip is None:
        return device
    return replace(
        device,
        board=device.board or _board(chip["board_info"].get("board_type")),
        firmware=device.firmware or chip.get("firmwares", {}).get("fw_bundle_version"),
    )
