"""KV groups of models that exist on paper only."""

from __future__ import annotations

from replicas.kv_groups import KVGroup, KVSpec


def one_kv_group(
    num_blocks: int, block_size: int = 32, bytes_per_token: int = 2, window: int | None = None
) -> tuple[KVGroup, ...]:
    """The groups of a model whose layers, there is one, cache every token, or see a window."""
    group = KVGroup(
        layers=(0,),
        spec=KVSpec(
            heads=1,
            width=bytes_per_token // 2,
            dtype="bfloat16",
            planes=1,
            kind="full" if window is None else "window",
            window=window,
        ),
        block_size=block_size,
        num_blocks=num_blocks,
    )
    return (group,)


def states_group(num_blocks: int, block_size: int) -> KVGroup:
    """The group of a recurrent layer."""
    spec = KVSpec(heads=1, width=1, dtype="float32", planes=1, kind="state")
    return KVGroup(
        layers=(1,), spec=spec, block_size=block_size, num_blocks=num_blocks, max_blocks=1
    )
