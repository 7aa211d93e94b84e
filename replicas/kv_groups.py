"""KV groups: layers whose KV shares one block table, and what their blocks are. Pure.

An engine is told of its groups once, at start (`ModelFacts.kv_groups`); sizes, pools, tables,
snapshots and what a KV connector is told have an entry for each of them, in their order. Not to be
confused with DP groups: each of these has a pool of blocks for every KV group.
Source of the term: vLLM v1/kv_cache_interface.py `KVCacheGroupSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group of a model: its sequences keep blocks for all of their tokens.

    Attributes:
        layers: The layers that are in it, 0-based.
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
        """Blocks that a sequence of so many tokens needs, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_tokens_in(self, num_blocks: int) -> int:
        """The longest sequence that needs no more than so many blocks, in tokens."""
        return num_blocks * self.block_size


def only_kv_group(kv_groups: Sequence[KVGroup], user: str) -> KVGroup:
    """The one KV group that there is.

    Args:
        kv_groups: Of the model.
        user: Who cannot do with several.

    Raises:
        ConfigError: There are several.
    """
    if len(kv_groups) != 1:
        sizes = [group.block_size for group in kv_groups]
        raise ConfigError(
            f"{user} takes models with one KV group, and this one has {len(kv_groups)}, of blocks "
            f"of {sizes} tokens; serve another model"
        )
    return kv_groups[0]
