"""Tenstorrent chips and meshes: names, shapes and counts. Facts and arithmetic, no device.

A mesh is what one engine opens: a card, or the chips of a machine as one grid. Its name is what
`MeshConfig.name` says; an unnamed grid is written "(rows,cols)".

Sources: names and shapes as opened from vllm-tt-plugin (dp_discovery's presets and the worker);
what upstream calls them, and the part of a Galaxy that is a T3K, from tt-inference-server;
physical shapes and hosts from the mesh graph descriptors in the ttnn 0.81.1 wheel; fabric from
the plugin's worker; DRAM from the wheel's SoC descriptors, its bandwidth from product pages; PCIe
devices from tt-umd's cluster descriptors. Unsure, because no public description says so: the DRAM
of a p100 (7 of 8 channels), and the grid of N150x4, whose cards share no board. TG is here the
machine of 32 chips that each have a PCIe device; the older one, whose 32 chips are behind four
cards, is configured with the same name and `resources: {TTNPU: 4}`. What boards a "(rows,cols)"
grid is made of cannot be known without them: where it has another number of PCIe devices than
`mesh_spec` supposes, the pool says so in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from replicas.errors import ConfigError

Arch = Literal["wormhole", "blackhole"]

_GRID = re.compile(r"^\s*[(\[]\s*(\d+)\s*,\s*(\d+)\s*[)\]]\s*$")
_BIG_MACHINE = 32


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip.

    Attributes:
        name: Its name here.
        family: "wormhole" or "blackhole": chips of a family differ by memory alone.
        dram_bytes: Memory.
        dram_bytes_per_s: Peak bandwidth of the memory.
        dram_banks: Banks that ttnn divides the memory into.
    """

    name: str
    family: Arch
    dram_bytes: int
    dram_bytes_per_s: float
    dram_banks: int


WORMHOLE = Chip("wormhole", "wormhole", 12 * 2**30, 288e9, dram_banks=12)
P100_CHIP = Chip("p100", "blackhole", 28 * 10**9, 448e9, dram_banks=7)
P150_CHIP = Chip("p150", "blackhole", 8 * 4_278_190_080, 512e9, dram_banks=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """A mesh.

    Attributes:
        name: As a configuration names it.
        chip: Its chips, all alike.
        shape: (rows, columns) as it is opened.
        physical_shape: (rows, columns) as the chips are wired.
        board: The card it is made of, as `replicas.boards` names it; None where that is not known.
        num_pcie_devices: Device nodes under /dev/tenstorrent, all hosts together; what Ray counts
            as `TTNPU`. An n300 is one for two chips, a p300 two for two. Only supposed where
            `board` is None.
        num_hosts: Machines that it spans.
        is_galaxy: Whether it is made of whole Galaxies, whose rows and columns are rings.
    """

    name: str
    chip: Chip
    shape: tuple[int, int]
    physical_shape: tuple[int, int]
    board: str | None
    num_pcie_devices: int
    num_hosts: int = 1
    is_galaxy: bool = False

    @property
    def arch(self) -> Arch:
        """Architecture of the chips."""
        return self.chip.family

    @property
    def mesh_device(self) -> str:
        """What Tenstorrent's own programs call it in MESH_DEVICE."""
        return _MESH_DEVICES.get(self.name, self.name)

    @property
    def num_chips(self) -> int:
        """How many chips it has."""
        return self.shape[0] * self.shape[1]

    @property
    def dram_bytes_per_chip(self) -> int:
        """Memory of each chip."""
        return self.chip.dram_bytes

    @property
    def fabric(self) -> str | None:
        """Member of `ttnn.FabricConfig` to set before it is opened; None for one chip."""
        if self.num_chips == 1:
            return None
        if not self.is_galaxy:
            return "FABRIC_1D"
        return "FABRIC_1D_RING" if self.arch == "wormhole" else "FABRIC_2D_TORUS_XY"

    @property
    def dispatch_core_axis(self) -> Literal["row", "col"]:
        """Where ttnn keeps its dispatch cores by default, on chips of this architecture."""
        return "row" if self.arch == "wormhole" else "col"

    def check_one_host(self) -> None:
        """Refuse a mesh of several machines, which an engine's one process cannot open.

        Raises:
            ConfigError: It spans several hosts.
        """
        if self.num_hosts > 1:
            raise ConfigError(
                f"mesh {self.name} spans {self.num_hosts} hosts, and an engine runs on one; use a "
                f"replica for each Galaxy"
            )


def _meshes(*specs: MeshSpec) -> dict[str, MeshSpec]:
    return {spec.name: spec for spec in specs}


MESHES = _meshes(
    MeshSpec(
        name="N150", chip=WORMHOLE, shape=(1, 1), physical_shape=(1, 1),
        board="n150", num_pcie_devices=1,
    ),
    MeshSpec(
        name="N150x4", chip=WORMHOLE, shape=(1, 4), physical_shape=(1, 4),
        board="n150", num_pcie_devices=4,
    ),
    MeshSpec(
        name="N300", chip=WORMHOLE, shape=(1, 2), physical_shape=(1, 2),
        board="n300", num_pcie_devices=1,
    ),
    MeshSpec(
        name="T3K", chip=WORMHOLE, shape=(1, 8), physical_shape=(2, 4),
        board="n300", num_pcie_devices=4,
    ),
    MeshSpec(
        name="TG", chip=WORMHOLE, shape=(8, 4), physical_shape=(8, 4),
        board="galaxy-wormhole", num_pcie_devices=32, is_galaxy=True,
    ),
    MeshSpec(
        name="Galaxy", chip=WORMHOLE, shape=(8, 4), physical_shape=(8, 4),
        board="galaxy-wormhole", num_pcie_devices=32, is_galaxy=True,
    ),
    MeshSpec(
        name="GalaxyT3K", chip=WORMHOLE, shape=(1, 8), physical_shape=(2, 4),
        board="galaxy-wormhole", num_pcie_devices=8,
    ),
    MeshSpec(
        name="DualGalaxy", chip=WORMHOLE, shape=(8, 8), physical_shape=(8, 8),
        board="galaxy-wormhole", num_pcie_devices=64, num_hosts=2, is_galaxy=True,
    ),
    MeshSpec(
        name="QuadGalaxy", chip=WORMHOLE, shape=(8, 16), physical_shape=(8, 16),
        board="galaxy-wormhole", num_pcie_devices=128, num_hosts=4, is_galaxy=True,
    ),
    MeshSpec(
        name="P100", chip=P100_CHIP, shape=(1, 1), physical_shape=(1, 1),
        board="p100", num_pcie_devices=1,
    ),
    MeshSpec(
        name="P150", chip=P150_CHIP, shape=(1, 1), physical_shape=(1, 1),
        board="p150", num_pcie_devices=1,
    ),
    MeshSpec(
        name="P150x2", chip=P150_CHIP, shape=(1, 2), physical_shape=(1, 2),
        board="p150", num_pcie_devices=2,
    ),
    MeshSpec(
        name="P150x4", chip=P150_CHIP, shape=(1, 4), physical_shape=(2, 2),
        board="p150", num_pcie_devices=4,
    ),
    MeshSpec(
        name="P150x8", chip=P150_CHIP, shape=(1, 8), physical_shape=(2, 4),
        board="p150", num_pcie_devices=8,
    ),
    MeshSpec(
        name="P300", chip=P150_CHIP, shape=(1, 2), physical_shape=(1, 2),
        board="p300", num_pcie_devices=2,
    ),
    MeshSpec(
        name="P300x2", chip=P150_CHIP, shape=(1, 4), physical_shape=(2, 2),
        board="p300", num_pcie_devices=4,
    ),
    MeshSpec(
        name="BHGalaxy", chip=P150_CHIP, shape=(8, 4), physical_shape=(8, 4),
        board="galaxy-blackhole", num_pcie_devices=32, is_galaxy=True,
    ),
)  # fmt: skip
"""By name. T3K is the Wormhole QuietBox and LoudBox too, P150x4 and P300x2 the Blackhole ones;
GalaxyT3K is a tray of a Wormhole Galaxy, whose eight chips are wired as a T3K's are."""

_MESH_DEVICES = {
    "Galaxy": "TG",
    "GalaxyT3K": "T3K",
    "DualGalaxy": "(8,8)",
    "QuadGalaxy": "(8,16)",
    "BHGalaxy": "BH-Galaxy",
}

_ALIASES = {
    "whgalaxy": "Galaxy",
    "singlegalaxy": "Galaxy",
    "t3000": "T3K",
    "blackholegalaxy": "BHGalaxy",
    "galaxyx2": "DualGalaxy",
    "galaxyx4": "QuadGalaxy",
}


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


_BY_KEY = {_key(name): name for name in MESHES} | _ALIASES


def mesh_spec(name: str, *, arch: Arch | None = None) -> MeshSpec:
    """A mesh by name, or by its grid.

    Args:
        name: One of `MESHES` in any case, with or without dashes and underscores; or "(rows,cols)".
        arch: Architecture of a mesh that is only a grid, None for "wormhole": its chips, memory
            and fabric follow from it, and what its PCIe devices are supposed to be (on Wormhole
            two chips to a device, as on an n300, unless it is a Galaxy or one chip). A mesh with
            a name has its own.

    Raises:
        ConfigError: There is no such mesh; names the known ones. Or it is of another architecture
            than `arch`; names both.
    """
    if (grid := _GRID.match(name)) is not None:
        return _grid_spec(int(grid[1]), int(grid[2]), arch or "wormhole")
    known = _BY_KEY.get(_key(name))
    if known is None:
        raise ConfigError(
            f"mesh {name!r} is not known; use one of {', '.join(MESHES)}, or a grid of chips such "
            'as "(2,4)"'
        )
    spec = MESHES[known]
    if arch not in {None, spec.arch}:
        raise ConfigError(
            f"mesh {spec.name} is of {spec.arch} chips, and arch is {arch!r}; remove arch, which "
            "is for grids"
        )
    return spec


def _grid_spec(rows: int, cols: int, arch: Arch) -> MeshSpec:
    num_chips = rows * cols
    if num_chips < 1:
        raise ConfigError(f"mesh ({rows},{cols}) has no chips; rows and columns must be at least 1")
    is_galaxy = num_chips >= _BIG_MACHINE
    is_paired = arch == "wormhole" and not is_galaxy
    return MeshSpec(
        name=f"({rows},{cols})",
        chip=WORMHOLE if arch == "wormhole" else P150_CHIP,
        shape=(rows, cols),
        physical_shape=(rows, cols),
        board=None,
        num_pcie_devices=-(-num_chips // 2) if is_paired else num_chips,
        num_hosts=-(-num_chips // _BIG_MACHINE),
        is_galaxy=is_galaxy,
    )


def lane_shape(spec: MeshSpec, tt_data_parallel: int) -> tuple[int, int]:
    """Shape of one lane: a row of chips that share a copy of the model.

    Raises:
        ConfigError: The lanes do not divide the chips; names both numbers.
    """
    if tt_data_parallel < 1 or spec.num_chips % tt_data_parallel:
        raise ConfigError(
            f"tt_data_parallel {tt_data_parallel} does not divide the {spec.num_chips} chips of "
            f"mesh {spec.name}"
        )
    return 1, spec.num_chips // tt_data_parallel
