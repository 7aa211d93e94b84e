"""Tenstorrent chips and meshes: names, shapes and counts. Facts and arithmetic, no device.

A mesh is the set of chips that one engine opens: a card, or the chips of a machine as one grid.
`MeshConfig.name` takes its name, or "(rows,cols)" for an unnamed grid.

Sources: names and shapes as opened from vllm-tt-plugin (dp_discovery's presets and the worker);
upstream's names, and the part of a Galaxy that is a T3K, from tt-inference-server; physical shapes
and hosts from the mesh graph descriptors in the ttnn 0.81.1 wheel; fabric from the plugin's worker;
DRAM from the wheel's SoC descriptors, its bandwidth from product pages; PCIe devices from tt-umd's
cluster descriptors.

Unsure, as no public description states it: the DRAM of a p100 (7 of 8 channels), and the grid of
N150x4, whose cards share no board.

TG here is the machine of 32 chips that each have a PCIe device. The older one, with 32 chips behind
four cards, is configured with the same name and `resources: {TTNPU: 4}`. The boards of a
"(rows,cols)" grid are unknown here: if their number of PCIe devices differs from the assumption of
`mesh_spec`, the pool states it in the same way.
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
    """One type of chip.

    Attributes:
        name: Its name in this module.
        family: "wormhole" or "blackhole"; chips of one family differ only in memory.
        dram_bytes: Size of the memory.
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
    """Chips, shape and wiring of a mesh.

    Attributes:
        name: Its name in configurations.
        chip: Type of its chips, which are all alike.
        shape: (rows, columns) as opened.
        physical_shape: (rows, columns) as wired.
        board: Kind of its cards, as named in `replicas.tt.boards`; None if unknown.
        num_pcie_devices: Device nodes under /dev/tenstorrent on all hosts together, which Ray
            counts as `TTNPU`. An n300 is one device for two chips, a p300 two for two. Only an
            assumption if `board` is None.
        num_hosts: Number of machines that it spans.
        is_galaxy: Whether it consists of whole Galaxies, whose rows and columns are rings.
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
        """Its name in MESH_DEVICE, a variable of Tenstorrent's own programs."""
        return _MESH_DEVICES.get(self.name, self.name)

    @property
    def num_chips(self) -> int:
        """Number of chips."""
        return self.shape[0] * self.shape[1]

    @property
    def dram_bytes_per_chip(self) -> int:
        """Memory of each chip."""
        return self.chip.dram_bytes

    @property
    def fabric(self) -> str | None:
        """Member of `ttnn.FabricConfig` to set before opening it; None for one chip."""
        if self.num_chips == 1:
            return None
        if not self.is_galaxy:
            return "FABRIC_1D"
        return "FABRIC_1D_RING" if self.arch == "wormhole" else "FABRIC_2D_TORUS_XY"

    @property
    def dispatch_core_axis(self) -> Literal["row", "col"]:
        """Axis of ttnn's dispatch cores by default, on chips of this architecture."""
        return "row" if self.arch == "wormhole" else "col"

    def check_one_host(self) -> None:
        """Refuse a mesh of several machines, which a single engine process cannot open.

        Raises:
            ConfigError: It spans several hosts.
        """
        if self.num_hosts > 1:
            raise ConfigError(
                f"mesh {self.name} spans {self.num_hosts} hosts, but an engine runs on one; use a "
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
"""Meshes by name. T3K is also the Wormhole QuietBox and LoudBox; P150x4 and P300x2 are those of
Blackhole. GalaxyT3K is a tray of a Wormhole Galaxy, whose eight chips are wired like a T3K's."""

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
    """Return a mesh by its name or grid.

    Args:
        name: One of `MESHES` in any case, with or without dashes and underscores; or "(rows,cols)".
        arch: Architecture of a mesh given as a grid; None is "wormhole". It determines chips,
            memory and fabric, and the assumed PCIe devices (on Wormhole one device for two chips,
            as on an n300, unless it is a Galaxy or a single chip). A named mesh has its own
            architecture.

    Raises:
        ConfigError: There is no such mesh (lists the known ones), or its architecture is not
            `arch`.
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
            f"mesh {spec.name} has {spec.arch} chips, but arch is {arch!r}; remove arch, which "
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
    """Return the shape of one lane: a row of chips that share one copy of the model.

    Raises:
        ConfigError: The number of lanes does not divide the number of chips; gives both.
    """
    if tt_data_parallel < 1 or spec.num_chips % tt_data_parallel:
        raise ConfigError(
            f"tt_data_parallel {tt_data_parallel} does not divide the {spec.num_chips} chips of "
            f"mesh {spec.name}"
        )
    return 1, spec.num_chips // tt_data_parallel
