"""DP groups: slots, KV blocks and prefix index that sequences are admitted to, with totals.

Owner: the scheduler, on the engine's core thread. It knows how a sequence gets and gives back what
it needs, never when: that is the scheduler's policy. Slots are global, block ids are a group's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kv_transfer.block_hash import extend_block_hashes, prefix_root
from replicas.engine.block_pool import BlockPool, PrefixWalk
from replicas.engine.sequence import SequenceStatus
from replicas.engine.slots import SlotTable
from replicas.messages import GroupCounters, GroupSnapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from replicas.config import EngineConfig
    from replicas.engine.sequence import Sequence


class DPGroups:
    """Slots and blocks of all DP groups; see the module docstring.

    Args:
        config: The engine's configuration.
        num_blocks: Blocks of each group, null block included.
        prefix_cache_key: Secret that the hashes of cached blocks depend on; 16 to 64 bytes.

    Attributes:
        stats: Totals of each group, counted by whoever knows; its gauges are not kept.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, prefix_cache_key: bytes) -> None:
        count = config.tt_data_parallel
        self._prefix_cache_key = prefix_cache_key
        self._block_size = config.block_size
        self._slots_per_group = config.slots_per_group
        self._enable_prefix_caching = bool(config.enable_prefix_caching)
        self._pools = [
            BlockPool(num_blocks, enable_prefix_caching=self._enable_prefix_caching)
            for _ in range(count)
        ]
        self._slots = SlotTable(count, config.slots_per_group)
        self.stats = [GroupCounters() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._pools)

    def __repr__(self) -> str:
        return f"DPGroups({self._slots!r}, {self._pools!r})"

    @property
    def num_empty_slots(self) -> int:
        """Free slots of all groups together."""
        return sum(self._slots.num_empty(g) for g in range(len(self._pools)))

    def without_slots(self) -> set[int]:
        """Groups that have no free slot."""
        return {g for g in range(len(self._pools)) if not self._slots.num_empty(g)}

    def choose(self, seq: Sequence, full_groups: Collection[int] = ()) -> int | None:
        """The asked group, or the one with the most empty slots; None if there is none.

        Args:
            seq: The sequence to place.
            full_groups: Groups that must not be chosen.
        """
        asked = [seq.dp_group] if seq.dp_group >= 0 else range(len(self._pools))
        return max(
            (g for g in asked if g not in full_groups and self._slots.num_empty(g)),
            key=lambda g: (self._slots.num_empty(g), self._pools[g].num_free_blocks, -g),
            default=None,
        )

    def place(
        self, seq: Sequence, num_tokens: int, full_groups: Collection[int] = ()
    ) -> tuple[int, list[int]] | None:
        """The first group, in the order of `choose`, with blocks for so many tokens.

        Returns:
            The group and the cached blocks that the sequence hits there, or None.
        """
        tried = set(full_groups)
        while (group := self.choose(seq, tried)) is not None:
            walk = self._find_prefix(seq, group)
            if self._fits(group, num_tokens, walk):
                return group, walk.block_ids
            tried.add(group)
        return None

    def admit(self, seq: Sequence, group: int, hits: list[int], num_tokens: int) -> None:
        """Give a sequence its slot, the blocks it hits, and new blocks up to `num_tokens`."""
        pool = self._pools[group]
        pool.share(hits)
        seq.walks.clear()
        seq.block_ids = [*hits, *pool.allocate(self._num_blocks_for(num_tokens) - len(hits))]
        seq.num_cached_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self._block_size
        seq.dp_group = group
        seq.slot = self._slots.take(group)
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats[group].prefix_cache_queries += seq.num_prompt_tokens
            self.stats[group].prefix_cache_hits += seq.num_computed_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Append the blocks that a sequence lacks for `num_tokens`.

        Returns:
            Those blocks; None, and nothing has changed, if its group has not so many.
        """
        num_missing = self._num_blocks_for(num_tokens) - len(seq.block_ids)
        if num_missing <= 0:
            return []
        pool = self._pools[seq.dp_group]
        if num_missing > pool.num_free_blocks:
            return None
        block_ids = pool.allocate(num_missing)
        seq.block_ids.extend(block_ids)
        return block_ids

    def can_grow_all(self, wanted: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether each of these could `grow` to its number of tokens, one after the other."""
        num_missing = [0] * len(self._pools)
        for seq, num_tokens in wanted:
            missing = self._num_blocks_for(num_tokens) - len(seq.block_ids)
            num_missing[seq.dp_group] += max(missing, 0)
        return all(n <= p.num_free_blocks for n, p in zip(num_missing, self._pools, strict=True))

    def cache_full_blocks(self, seq: Sequence, num_final_tokens: int) -> None:
        """Index the blocks that have just become full.

        A block that can be found is shared, and nobody may write to it any more.

        Args:
            seq: The sequence.
            num_final_tokens: Leading tokens whose KV is here and never computed or loaded again.
        """
        if seq.is_converted or not self._enable_prefix_caching:
            return
        full = num_final_tokens // self._block_size
        if full <= seq.num_cached_blocks:
            return
        self._extend_hashes(seq)
        pool = self._pools[seq.dp_group]
        for i in range(seq.num_cached_blocks, full):
            pool.cache(seq.block_ids[i], seq.block_hashes[i])
        seq.num_cached_blocks = full

    def give_back_slot(self, seq: Sequence) -> None:
        """Take the slot from a sequence; its blocks stay. Idempotent."""
        if seq.slot >= 0:
            self._slots.give_back(seq.slot)
            seq.slot = -1
        seq.is_known_to_runner = False

    def give_back_blocks(self, seq: Sequence) -> None:
        """Take the blocks from a sequence; it keeps its tokens. Idempotent."""
        if seq.block_ids:
            self._pools[seq.dp_group].free(seq.block_ids)
        seq.block_ids = []
        seq.num_computed_tokens = 0
        seq.num_cached_blocks = 0
        seq.is_converted = False

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; held ones stay held."""
        for pool in self._pools:
            pool.reset_prefix_cache()

    def snapshot(self, group: int, running: int, reserved: int, waiting: int) -> GroupSnapshot:
        """What a group has left.

        Args:
            group: The group.
            running: Sequences that run in it.
            reserved: Sequences that wait for their KV in it.
            waiting: Queued sequences that ask for it.
        """
        num_free_blocks = self._pools[group].num_free_blocks
        return GroupSnapshot(
            self._slots.num_empty(group), num_free_blocks, running, reserved, waiting
        )

    def counters(self, group: int, running: int, reserved: int) -> GroupCounters:
        """Totals and gauges of a group."""
        pool, totals = self._pools[group], self.stats[group]
        return msgspec.structs.replace(
            totals,
            num_running=running,
            num_reserved=reserved,
            num_slots=self._slots_per_group,
            num_empty_slots=self._slots.num_empty(group),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            requests_finished=dict(totals.requests_finished),
        )

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Every block and slot has exactly the holders that the sequences say.

        And no block that a sequence has yet to write to has another reader, or may get one.
        """
        self._slots.check_invariants()
        sequences = list(holders)
        slots = [s.slot for s in sequences if s.slot >= 0]
        assert len(set(slots)) == len(slots)
        assert self.num_empty_slots + len(slots) == self._slots_per_group * len(self._pools)
        for group, pool in enumerate(self._pools):
            pool.check_invariants()
            used = {b for s in sequences if s.dp_group == group for b in s.block_ids}
            assert pool.num_free_blocks + len(used) == pool.num_blocks, f"{self!r}"
        for seq in (s for s in sequences if s.status is not SequenceStatus.FINISHED):
            unwritten = seq.block_ids[seq.num_computed_tokens // self._block_size :]
            shared = [b for b in unwritten if not self._pools[seq.dp_group].is_private(b)]
            assert not shared, f"{seq.request_id} writes to blocks {shared} that others may read"

    def _find_prefix(self, seq: Sequence, group: int) -> PrefixWalk:
        """Cached leading blocks; at least one token is left to compute, for its logits."""
        walk = seq.walks.setdefault(group, PrefixWalk())
        if self._enable_prefix_caching:
            self._extend_hashes(seq)
            limit = (seq.num_tokens - 1) // self._block_size
            self._pools[group].bring_up_to_date(walk, seq.block_hashes, limit)
        return walk

    def _fits(self, group: int, num_tokens: int, walk: PrefixWalk) -> bool:
        """Whether a group has blocks for so many tokens, the first of them found already."""
        num_new_blocks = self._num_blocks_for(num_tokens) - walk.num_blocks
        return num_new_blocks + walk.num_evictable <= self._pools[group].num_free_blocks

    def _extend_hashes(self, seq: Sequence) -> None:
        if len(seq.block_hashes) < seq.num_tokens // self._block_size:
            root = prefix_root(self._prefix_cache_key, seq.request.cache_salt)
            extend_block_hashes(seq.block_hashes, seq.token_ids, self._block_size, root)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
