"""KV groups: sets of layers that share one block table, and the sizes of their blocks. Pure.

An engine gets its groups once, at start (`ModelFacts.kv_groups`). Sizes, pools, tables, snapshots
and a KV connector's settings have one entry for each group, in this order. Not to be confused with
DP groups: each DP group has a pool of blocks for every KV group.

Source of the term: vLLM v1/kv_cache_interface.py `KVCacheGroupSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """KV group of a model whose sequences keep blocks for all of their tokens.

    Attributes:
        layers: Indices of its layers, 0-based.
        block_size: Tokens per block.
        num_blocks: Blocks of each lane, null block included.
        bytes_per_block: Bytes of one block over all of these layers, K and V.
    """

    layers: tuple[int, ...]
    block_size: int
    num_blocks: int
    bytes_per_block: int

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of each lane that a sequence can have: all but the null block."""
        return self.num_blocks - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens needs."""
        return -(-num_tokens // self.block_size)

    def num_tokens_in(self, num_blocks: int) -> int:
        """Return the longest sequence, in tokens, that fits into so many blocks."""
        return num_blocks * self.block_size


def only_kv_group(kv_groups: Sequence[KVGroup], user: str) -> KVGroup:
    """Return the only KV group of a model.

    Args:
        kv_groups: The model's KV groups.
        user: The component that supports only one, for the error text.

    Raises:
        ConfigError: There are several.
    """
    if len(kv_groups) != 1:
        sizes = [group.block_size for group in kv_groups]
        raise ConfigError(
            f"{user} supports models with one KV group; this one has {len(kv_groups)}, with "
            f"blocks of {sizes} tokens; serve another model"
        )
    return kv_groups[0]
