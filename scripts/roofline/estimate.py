"""Time of a step by `facts` and `ops`: the limit of the chip, and an estimate. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.roofline.facts import ASSUMPTIONS, CORES, Key, Topology, collective_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replicas.tt.meshes import MeshSpec
    from scripts.roofline.ops import Op

STATED: dict[Key, float] = {key: stated.value for key, stated in ASSUMPTIONS.items()}
SLOWER: dict[Key, float] = {
    key: stated.other if stated.other is not None and stated.other_is_slower else stated.value
    for key, stated in ASSUMPTIONS.items()
}
"""The slower value of each published pair, all together."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An op and its time.

    Attributes:
        op: The op.
        total_s: All of its runs, with the gaps before them.
        bound: Its bottleneck: "DRAM", "arithmetic", "links" or "kernel".
    """

    op: Op
    total_s: float
    bound: str


def limit_s(ops: Sequence[Op], mesh: MeshSpec) -> tuple[float, float]:
    """Seconds of a step's bytes at the peak of a chip's DRAM, and of its arithmetic on all engines.

    Both leave out all other costs. With `ops.BEST`'s programs no step can be faster.
    """
    cores = CORES[mesh.arch]
    num_bytes = sum(op.count * op.num_bytes for op in ops)
    math_s = sum(
        op.count * op.flops / cores.flops_per_s(cores.grid.num_cores, op.fidelity) for op in ops
    )
    return num_bytes / mesh.chip.dram_bytes_per_s, math_s


def timed(
    ops: Sequence[Op],
    mesh: MeshSpec,
    given: Mapping[Key, float] = STATED,
    topology: Topology = "line",
) -> list[Timed]:
    """Estimate each op.

    Args:
        ops: Of one chip.
        mesh: Its mesh, one lane.
        given: The assumptions.
        topology: How the lane's chips are joined; the usual fabrics of these meshes are lines.
    """
    return [_timed(op, mesh, given, topology) for op in ops]


def total_s(found: Sequence[Timed]) -> float:
    """Seconds of a step: ops run one after another."""
    return sum(each.total_s for each in found)


def _timed(op: Op, mesh: MeshSpec, given: Mapping[Key, float], topology: Topology) -> Timed:
    cores = CORES[mesh.arch]
    slower = CORES["wormhole"].hertz / cores.hertz
    times = {
        "DRAM": op.num_bytes / (mesh.chip.dram_bytes_per_s * given[op.read]),
        "arithmetic": op.flops / _flops_per_s(op, mesh, given),
        "kernel": given[op.kernel] * op.columns * slower if op.kernel is not None else 0.0,
        "links": 0.0,
    }
    if op.exchanged is not None:
        kind, num_bytes = op.exchanged
        times["links"] = collective_s(kind, topology, mesh.num_chips, num_bytes)
    bound = max(times, key=lambda name: times[name])
    return Timed(op, op.count * (times[bound] + given["gap"]), bound)


def _flops_per_s(op: Op, mesh: MeshSpec, given: Mapping[Key, float]) -> float:
    cores = CORES[mesh.arch]
    if op.program == "stripes":
        num_cores = mesh.chip.dram_banks * op.readers
        return cores.flops_per_s(num_cores, op.fidelity) * given["tuned"]
    return cores.flops_per_s(cores.grid.num_cores, op.fidelity) * given["unaided"]
