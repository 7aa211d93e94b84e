"""Sums and concatenations over the chips of a lane; no-ops on a lane of one chip.

A sum is a reduce-scatter followed by an all-gather. Both use a ring if the mesh was opened with a
ring fabric and ttnn finds the lane's chips to form one. Their semaphores are created once, not per
step. Output tensors are newly allocated, so each collective waits until the chips that it writes to
have allocated theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ttnn

from replicas.generators.ttnn.turns import NUM_SETS, Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHIPS_AXIS = 1
"""A lane is a submesh of shape (1, tp)."""
_SUMMING, _GATHERING = 3, 2
"""Number of semaphores for a reduce-scatter, and for an all-gather."""
_LAST = 3
"""The dimension of columns."""
_PACE = {"chunks_per_sync": 10, "num_workers_per_link": 2, "num_buffers_per_channel": 2}
"""Settings for all tensors. Source: tt-metal's models/tt_transformers/tt/ccl.py."""
_RINGS = ("FABRIC_1D_RING", "FABRIC_2D_TORUS_X", "FABRIC_2D_TORUS_Y", "FABRIC_2D_TORUS_XY")
"""Ring fabrics; on others a ring collective hangs. Source: tt-metal, demos/qwen38_27b_t3k."""
_FEW_CHIPS = 8
"""Largest Wormhole mesh whose chips have only one link per neighbour left beside dispatch."""


@dataclass(frozen=True, slots=True, eq=False)
class _Semaphores:
    """Semaphores of one collective: its own, and its barrier's."""

    own: Sequence[object]
    barrier: object


class Collectives:
    """Collective operations of a lane.

    Owns the semaphores, in the L1 of every core, until ``close``. They must exist before anything
    is captured.
    anything is captured.

    Args:
        device: The lane.
    """

    def __init__(self, device: ttnn.MeshDevice) -> None:
        self._tp = device.get_num_devices()
        self._how = {**_PACE, "topology": _topology(), **_links()}
        self._sums: tuple[_Semaphores, ...] = ()
        self._gathers: tuple[_Semaphores, ...] = ()
        self._sum_turns, self._gather_turns = Turns(), Turns()
        if self._tp > 1:
            self._sums = _sets(device, _SUMMING)
            self._gathers = _sets(device, _GATHERING)

    def begin_call(self) -> None:
        """Begin a call of the lane, with at least two operations of each kind that it uses."""
        self._sum_turns.begin_call()
        self._gather_turns.begin_call()

    def summed(self, partial: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
        """Return the sum of every chip's ``partial`` on all of them, and free ``partial``.

        Args:
            partial: Interleaved; its columns are as many tiles for each chip.
            memory_config: Of the sum.
        """
        if self._tp == 1:
            return partial
        taken = self._sums[self._sum_turns.next_set()]
        part = ttnn.experimental.reduce_scatter_minimal_async(
            partial,
            dim=_LAST,
            multi_device_global_semaphore=taken.own,
            barrier_semaphore=taken.barrier,
            memory_config=memory_config,
            intermediate_memory_config=ttnn.DRAM_MEMORY_CONFIG,
            cluster_axis=_CHIPS_AXIS,
            **self._how,
        )
        ttnn.deallocate(partial)
        total = self._gathered(part, memory_config)
        ttnn.deallocate(part)
        return total

    def gathered(self, shard: ttnn.Tensor) -> ttnn.Tensor:
        """Return the chips' shards side by side in the last dimension, on all of them."""
        return shard if self._tp == 1 else self._gathered(shard, ttnn.DRAM_MEMORY_CONFIG)

    def close(self) -> None:
        """Free the semaphores; idempotent. Release traces that use them before."""
        self._sums = self._gathers = ()

    def _gathered(self, shard: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
        taken = self._gathers[self._gather_turns.next_set()]
        return ttnn.experimental.all_gather_async(
            shard,
            dim=_LAST,
            multi_device_global_semaphore=taken.own,
            barrier_semaphore=taken.barrier,
            memory_config=memory_config,
            cluster_axis=_CHIPS_AXIS,
            **self._how,
        )


def _topology() -> ttnn.Topology:
    fabric = ttnn.get_fabric_config()
    is_round = fabric in [ttnn.FabricConfig.__members__.get(name) for name in _RINGS]
    return ttnn.Topology.Ring if is_round else ttnn.Topology.Linear


def _links() -> dict[str, int]:
    """Return the number of links if ttnn does not know it. Source: ccl.py's `get_num_links`."""
    is_few = "wormhole" in ttnn.get_arch_name().lower() and ttnn.get_num_devices() <= _FEW_CHIPS
    return {"num_links": 1} if is_few else {}


def _sets(device: ttnn.MeshDevice, num_semaphores: int) -> tuple[_Semaphores, ...]:
    grid = device.compute_with_storage_grid_size()
    last = ttnn.CoreCoord(grid.x - 1, grid.y - 1)
    cores = ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), last)])

    def made() -> object:
        return ttnn.create_global_semaphore(device, cores, 0)

    return tuple(
        _Semaphores([made() for _ in range(num_semaphores)], made()) for _ in range(NUM_SETS)
    )
