"""Search of cached prefixes for sequences, and registration of their full blocks.

Pure. The blocks belong to `DPGroups`; hashes and walks are kept by their sequences.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import TYPE_CHECKING

from kv_transfer.block_hash import extend_block_hashes, prefix_root
from replicas.engine.block_pool import PrefixWalk

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from replicas.engine.block_pool import BlockPool
    from replicas.engine.sequence import Sequence


class PrefixCache:
    """Prefix cache of all DP groups, by the hashes of sequences' blocks.

    Args:
        pools: For each DP group one pool per KV group.
        block_sizes: Block size of each KV group.
        key: Secret that the hashes of cached blocks depend on; None caches nothing.
    """

    def __init__(
        self, pools: SequenceOf[SequenceOf[BlockPool]], block_sizes: list[int], key: bytes | None
    ) -> None:
        self._pools = pools
        self._block_sizes = block_sizes
        self._key = key
        self._multiple = lcm(*block_sizes)
        self._divisor = gcd(*block_sizes)

    def find(self, seq: Sequence, group: int) -> tuple[list[PrefixWalk], int]:
        """Return the cached leading blocks of each KV group, and the tokens that all groups have.

        At least one token is left to compute, because its logits are needed.
        """
        walks = seq.walks.get(group)
        if walks is None:
            walks = seq.walks[group] = [PrefixWalk() for _ in self._block_sizes]
        if self._key is None:
            return walks, 0
        self._extend_hashes(seq)
        num_hit = last = len(seq.token_ids) - 1
        for index, pool in enumerate(self._pools[group]):
            walk, size = walks[index], self._block_sizes[index]
            pool.bring_up_to_date(walk, seq.block_hashes[index], last // size)
            num_hit = min(num_hit, len(walk.found) * size)
        return walks, num_hit - num_hit % self._multiple

    def cache_full_blocks(self, seq: Sequence, num_final_tokens: int) -> None:
        """Index the blocks that have just become full.

        An indexed block may be shared, so it must not be written to again.

        Args:
            seq: The sequence.
            num_final_tokens: Leading tokens whose KV is here and never computed or loaded again.
        """
        if seq.is_converted or self._key is None:
            return
        num_indexed, divisor = seq.num_indexed_tokens, self._divisor
        if num_final_tokens // divisor <= num_indexed // divisor:
            return
        self._extend_hashes(seq)
        for index, pool in enumerate(self._pools[seq.dp_group]):
            size, hashes = self._block_sizes[index], seq.block_hashes[index]
            for i in range(num_indexed // size, num_final_tokens // size):
                pool.cache(seq.block_ids[index][i], hashes[i])
        seq.num_indexed_tokens = num_final_tokens

    def reset(self) -> None:
        """Forget every cached block; held ones stay held."""
        for pools in self._pools:
            for pool in pools:
                pool.reset_prefix_cache()

    def _extend_hashes(self, seq: Sequence) -> None:
        assert self._key is not None
        if not seq.block_hashes:
            seq.block_hashes = [[] for _ in self._block_sizes]
        num_tokens = seq.num_tokens
        for index, hashes in enumerate(seq.block_hashes):
            size = self._block_sizes[index]
            if len(hashes) < num_tokens // size:
                root = prefix_root(self._key, seq.request.cache_salt)
                extend_block_hashes(hashes, seq.token_ids, size, root)
