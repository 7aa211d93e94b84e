"""Sums and concatenations over the chips of a lane; nothing on a lane of one chip.

ttnn's all_reduce is a reduce-scatter and an all-gather, which keep their semaphores themselves and
go round where the fabric is a ring. tests/tt/test_programs.py asserts that they run.
"""

from __future__ import annotations

import ttnn

_CHIPS_AXIS = 1
"""A lane is a submesh of shape (1, tp)."""


def sum_over_chips(partial: ttnn.Tensor, tp: int, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
    """Return the sum of every chip's ``partial`` on all of them, and free ``partial``."""
    if tp == 1:
        return partial
    total = ttnn.all_reduce(partial, cluster_axis=_CHIPS_AXIS, memory_config=memory_config)
    ttnn.deallocate(partial)
    return total


def gather_over_chips(shard: ttnn.Tensor, tp: int) -> ttnn.Tensor:
    """Return the chips' shards side by side in the last dimension, on all of them."""
    if tp == 1:
        return shard
    return ttnn.all_gather(
        shard, dim=3, cluster_axis=_CHIPS_AXIS, memory_config=ttnn.DRAM_MEMORY_CONFIG
    )
