"""Split of KV heads over the device shards of an engine. Pure.

Rows on the wire do not know shards (see ``layout``). Each end assembles rows from its own shards,
so the numbers of shards of two engines need not divide each other.
"""

from __future__ import annotations

from itertools import pairwise

from kv_transfer.errors import InvalidLayoutError


def head_shards(num_kv_heads: int, num_shards: int) -> tuple[range, ...]:
    """Split KV heads over tensor-parallel shards.

    Args:
        num_kv_heads: KV heads of the model; 1 for a latent cache, which every shard then holds.
        num_shards: Shards; they need not divide the heads.

    Returns:
        The heads of each shard. With no more shards than heads these are consecutive and disjoint,
        and the first shards hold one head more where the division leaves a remainder. With more
        shards, each holds one head, and the replicas of a head are neighbours.

    Raises:
        InvalidLayoutError: A number is not positive.
    """
    for name, count in (("num_kv_heads", num_kv_heads), ("num_shards", num_shards)):
        if count <= 0:
            raise InvalidLayoutError(f"{name} must be positive, got {count}")
    if num_shards > num_kv_heads:
        heads = (shard * num_kv_heads // num_shards for shard in range(num_shards))
        return tuple(range(head, head + 1) for head in heads)
    size, rest = divmod(num_kv_heads, num_shards)
    bounds = (shard * size + min(shard, rest) for shard in range(num_shards + 1))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
