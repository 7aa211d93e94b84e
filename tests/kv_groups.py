"""KV groups of models that exist on paper only."""

from __future__ import annotations

from replicas.kv_groups import KVGroup


def one_kv_group(
    num_blocks: int, block_size: int = 32, bytes_per_block: int = 1
) -> tuple[KVGroup, ...]:
    """The groups of a model whose layers, there is one, cache every token."""
    group = KVGroup(
        layers=(0,),
        block_size=block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
    )
    return (group,)
