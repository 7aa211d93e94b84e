"""KV cache of an engine: slots, blocks and prefix index of sequences, with totals.

Owner of every sequence's `KVPlace`, on the engine's core thread. This module allocates and frees;
the scheduler decides when, and counts what is computed. Slots are global: a slot is a row of the
padded decode batch, and `dp_group = slot // slots_per_group`. Each DP group has a pool of blocks
for each KV group of the model, and block ids are local to a pool. A sequence gets blocks in all KV
groups at once, or in none.

A group of layers with a window needs the blocks of that window alone. It frees those behind it as
the sequence advances, and hits a prefix of which only the last window is cached. Its pool is its
own, like that of every group: blocks of different groups differ in bytes, so that a shared pool
would need pages of a common size, and layers that are cut to them. `replicas.kv_sizing` gives a
window as many blocks as the slots can use, and all other memory to the groups that keep all tokens.

A group of recurrent layers has states in its blocks, see `KVGroup`. A sequence needs one block, for
the state after its last token. It takes further ones for checkpoints as long as there are more than
empty slots: at the end of its prompt, where its prompt leaves what other sequences have cached, and
at regular distances. No sequence waits, or is preempted, for a checkpoint.
"""

from __future__ import annotations

import heapq
from math import gcd, lcm
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kv_transfer.block_hash import extend_block_hashes, prefix_root
from replicas.engine.block_pool import NULL_BLOCK, BlockPool, PrefixWalk
from replicas.engine.kv_events import PrefixFeed, PrefixJournal
from replicas.engine.sequence import Phase
from replicas.kv_groups import checkpoint_tokens, served_by_windows
from replicas.messages import GroupCounters, GroupSnapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from collections.abc import Sequence as SequenceOf

    from replicas.config import EngineConfig
    from replicas.engine.sequence import Sequence
    from replicas.kv_groups import KVGroup

_T = TypeVar("_T")


class Place(NamedTuple):
    """A DP group with room for a sequence.

    Attributes:
        dp_group: The DP group.
        hits: For each KV group the cached blocks that the sequence hits there; null behind the
            group's window.
        num_tokens: Tokens that these stand for; the same number in each KV group.
        is_converted: Whether some of their KV came in another dtype.
        is_whole: Whether there is room for all tokens of groups with windows, too.
        num_without_states: Tokens that the other groups would have served, had there been a state.
    """

    dp_group: int
    hits: list[list[int]]
    num_tokens: int
    is_converted: bool = False
    is_whole: bool = False
    num_without_states: int = 0


class SlotTable:
    """Free and taken slots, lowest free slot first.

    Args:
        dp_groups: Number of DP groups.
        slots_per_group: Slots of each.
    """

    def __init__(self, dp_groups: int, slots_per_group: int) -> None:
        assert dp_groups > 0, f"{dp_groups=}"
        assert slots_per_group > 0, f"{slots_per_group=}"
        self._slots_per_group = slots_per_group
        self._empty = [
            list(range(g * slots_per_group, (g + 1) * slots_per_group)) for g in range(dp_groups)
        ]
        self._taken: set[int] = set()

    def __repr__(self) -> str:
        return f"SlotTable(empty={[len(e) for e in self._empty]})"

    def num_empty(self, dp_group: int) -> int:
        """Return the number of free slots of a DP group."""
        return len(self._empty[dp_group])

    def take(self, dp_group: int) -> int:
        """Take the lowest free slot of a group; the caller checks `num_empty` first."""
        slot = heapq.heappop(self._empty[dp_group])
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Return a taken slot."""
        assert slot in self._taken, f"slot {slot} is not taken"
        self._taken.remove(slot)
        heapq.heappush(self._empty[slot // self._slots_per_group], slot)

    def check_invariants(self) -> None:
        """Assert that every slot is either taken, or free once, in its own group."""
        for group, empty in enumerate(self._empty):
            assert len(set(empty)) == len(empty)
            assert all(s // self._slots_per_group == group for s in empty)
        free = {s for empty in self._empty for s in empty}
        assert not free & self._taken
        assert len(free) + len(self._taken) == len(self._empty) * self._slots_per_group


class KVCacheManager:
    """Slots, blocks and prefix index of all DP groups.

    Args:
        config: The engine's configuration.
        kv_groups: The model's KV groups.
        prefix_cache_key: Secret that the hashes of cached blocks depend on; 16 to 64 bytes.
        max_pass_tokens: Most tokens behind a sequence's computed ones whose KV a pass writes.
        num_kept_tokens: Tokens by which a window's blocks are freed later than they could be.

    Attributes:
        block_multiple: A multiple of this many tokens fills whole blocks in each KV group.
        block_divisor: Only a multiple of this many tokens can fill a block in any KV group.
        stats: Totals of each group, counted by this class and the scheduler; gauges stay 0.
        left_slots: Slots given back since the last `pop_left_slots`.
        prefix_feed: Events of the prefix caches.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_groups: SequenceOf[KVGroup],
        prefix_cache_key: bytes,
        max_pass_tokens: int,
        num_kept_tokens: int = 0,
    ) -> None:
        self._max_pass_tokens = max_pass_tokens
        self._num_kept_tokens = num_kept_tokens
        count = config.tt_data_parallel
        self._kv_groups = kv_groups
        self._block_sizes = [kv_group.block_size for kv_group in kv_groups]
        self._rolling = [i for i, g in enumerate(kv_groups) if g.is_rolling]
        self._states = [i for i, g in enumerate(kv_groups) if g.spec.kind == "state"]
        self._checkpoint_tokens = checkpoint_tokens(
            [(g.spec, g.layers) for g in kv_groups], lcm(*self._block_sizes)
        )
        self.block_multiple = lcm(*self._block_sizes)
        self.block_divisor = gcd(*self._block_sizes)
        self._slots_per_group = config.slots_per_group
        journals = [PrefixJournal() for _ in range(count)]
        # One pool per KV group in each DP group.
        self._pools = [
            [
                BlockPool(
                    g.num_blocks,
                    enable_prefix_caching=bool(config.enable_prefix_caching),
                    journal=journal,
                    group_idx=index,
                )
                for index, g in enumerate(kv_groups)
            ]
            for journal in journals
        ]
        # Without a key nothing is cached.
        self._key = prefix_cache_key if config.enable_prefix_caching else None
        self.prefix_feed = PrefixFeed(
            journals, lambda group: [pool.block_hashes for pool in self._pools[group]]
        )
        self._slots = SlotTable(count, config.slots_per_group)
        self.stats = [GroupCounters() for _ in range(count)]
        self.left_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._pools)

    def __repr__(self) -> str:
        return f"KVCacheManager({self._slots!r}, {self._pools!r})"

    @property
    def num_empty_slots(self) -> int:
        """Return the number of free slots in all groups."""
        return sum(self._slots.num_empty(g) for g in range(len(self._pools)))

    def without_slots(self) -> set[int]:
        """Return the groups without a free slot."""
        return {g for g in range(len(self._pools)) if not self._slots.num_empty(g)}

    def has_slot(self, seq: Sequence) -> bool:
        """Return whether the sequence's group, or any if it has none, has a free slot."""
        return bool(self._with_slots(seq, ()))

    def find_place(
        self,
        seq: Sequence,
        num_tokens: int,
        full_groups: Collection[int] = (),
        prompt_tokens: SequenceOf[int] = (),
        *,
        is_whole: bool = False,
    ) -> Place | None:
        """Return a group with a free slot and blocks for `num_tokens`, or None.

        Of several the group that would compute the prompt first is chosen, then the one with the
        most empty slots, then the one with the most free blocks of the first KV group.

        Args:
            seq: The sequence to place.
            num_tokens: Tokens that it needs blocks for.
            full_groups: Groups that must not be chosen.
            prompt_tokens: Prompt tokens that each group computes before this sequence's. If empty,
                neither these nor cached blocks influence the choice.
            is_whole: Whether groups with windows need blocks for all tokens as well. Otherwise
                those of the first pass are enough.
        """
        groups = self._with_slots(seq, full_groups)
        prefixes = {}
        if prompt_tokens and len(groups) > 1:
            prefixes = {g: self.find_prefix(seq, g) for g in groups}
            groups.sort(key=lambda g: prompt_tokens[g] - prefixes[g][1])
        for group in groups:
            walks, num_hit = prefixes.get(group) or self.find_prefix(seq, group)
            if self._fits(seq, group, num_tokens, walks, num_hit, is_whole=is_whole):
                found = zip(walks, self._block_sizes, strict=True)
                hits = [w.block_ids[: num_hit // s] for w, s in found]
                for index in self._rolling:
                    hits[index] = self._window_hits(seq, group, index, num_hit)
                num_without_states = 0
                if self._states:
                    num_without_states = min(
                        (
                            walk.num_blocks * kv_group.block_size
                            for walk, kv_group in zip(walks, self._kv_groups, strict=True)
                            if not kv_group.is_rolling
                        ),
                        default=0,
                    )
                    num_without_states -= num_without_states % self.block_multiple
                return Place(
                    group,
                    hits,
                    num_hit,
                    is_whole=is_whole,
                    num_without_states=num_without_states,
                )
        return None

    def whole_place(self, seq: Sequence, place: Place, num_tokens: int) -> Place | None:
        """Return a place that `find_place` has found with room for all tokens, or None."""
        if self._rolling:
            walks, num_hit = self.find_prefix(seq, place.dp_group)
            if not self._fits(seq, place.dp_group, num_tokens, walks, num_hit, is_whole=True):
                return None
        return place._replace(is_whole=True)

    def fork(
        self, seq: Sequence, parent: Sequence, num_tokens: int, full_groups: Collection[int] = ()
    ) -> Place | None:
        """Return room for a sequence beside another with the same prompt, or None.

        It shares the full blocks of the prompt, which needs no prefix cache, unless the other
        sequence has left some of them behind its window, or its state has moved on.

        Args:
            seq: The sequence to place.
            parent: A sequence that has computed the prompt, and has its blocks.
            num_tokens: Tokens that it needs blocks for.
            full_groups: Groups that must not be chosen.
        """
        group = parent.place.dp_group
        if group in full_groups or not self._slots.num_empty(group):
            return None
        num_shared = seq.num_shared_tokens(self.block_multiple)
        if not self._has_window_of(parent, num_shared):
            return None
        hits = []
        for kv_group, pool, table in self._each_kv_group(group, parent.place.block_ids):
            hits.append(table[: num_shared // kv_group.block_size])
            seen = hits[-1][kv_group.first_block_seen(num_shared) :]
            if NULL_BLOCK in seen or (kv_group.spec.kind == "state" and hits[-1]):
                return None
            hits[-1][: -len(seen) or None] = [NULL_BLOCK] * (len(hits[-1]) - len(seen))
            num_blocks = self._num_first_blocks(kv_group, num_shared, num_tokens, is_whole=False)
            num_new = 1 if kv_group.spec.kind == "state" else num_blocks - len(hits[-1])
            if num_new > pool.num_free_blocks:
                return None
        return Place(group, hits, num_shared, parent.place.is_converted)

    def _with_slots(self, seq: Sequence, full_groups: Collection[int]) -> list[int]:
        """Return the sequence's group, or all if it has none, that have slots; emptiest first."""
        asked = [seq.place.dp_group] if seq.place.dp_group >= 0 else range(len(self._pools))
        groups = [g for g in asked if g not in full_groups and self._slots.num_empty(g)]
        if len(groups) > 1:
            groups.sort(
                key=lambda g: (-self._slots.num_empty(g), -self._pools[g][0].num_free_blocks)
            )
        return groups

    def admit(self, seq: Sequence, found: Place, num_tokens: int) -> int:
        """Give a sequence its slot, the blocks it hits, and new blocks up to `num_tokens`.

        Of a group with a window it gets those of its first pass, unless the place is whole; `grow`
        appends the next ones, as `settle` frees those that the window has left.

        Returns:
            The leading tokens whose KV is in the blocks that it hits.
        """
        place, group = seq.place, found.dp_group
        place.walks.clear()
        place.dp_group = group
        place.num_without_states = found.num_without_states
        place.block_ids = []
        place.num_behind = [
            kv_group.first_block_seen(found.num_tokens) for kv_group in self._kv_groups
        ]
        place.num_missing = [0] * len(self._kv_groups)
        for kv_group, pool, hits in self._each_kv_group(group, found.hits):
            pool.share([block_id for block_id in hits if block_id != NULL_BLOCK])
            num_blocks = self._num_first_blocks(
                kv_group, found.num_tokens, num_tokens, is_whole=found.is_whole
            )
            place.block_ids.append(list(hits))
            self._extend_table(seq, kv_group, pool, place.block_ids[-1], num_blocks - len(hits))
        place.capacity = self._capacity(seq)
        place.num_indexed_tokens = found.num_tokens
        place.is_converted = found.is_converted
        place.slot = self._slots.take(group)
        if place.num_cached_tokens < 0:
            place.num_cached_tokens = found.num_tokens
            # Other choices find what choice 0 has computed.
            if seq.parent is None and seq.request.sampling.reads_prefix_cache:
                self.stats[group].prefix_cache_queries += seq.num_prompt_tokens
                self.stats[group].prefix_cache_hits += found.num_tokens
        return found.num_tokens

    def first_positions(self, seq: Sequence) -> tuple[int, ...]:
        """Return for each KV group the first position whose KV the sequence's blocks hold."""
        place = seq.place
        rows = zip(place.num_behind, self._block_sizes, place.num_missing, strict=False)
        return tuple(max(num_behind * size, missing) for num_behind, size, missing in rows)

    def is_served_by(self, num_local: int, end: int, num_tokens: int) -> bool:
        """Return whether a sequence can continue behind `num_tokens` after a load.

        Args:
            num_local: Tokens that it had before; each of its windows was complete there.
            end: End of the load. Of groups with a window only the last window was requested.
            num_tokens: Tokens that have arrived, at most `end`.
        """
        return all(
            kv_group.first_position_moved(end)
            <= max(num_local, kv_group.first_position_moved(num_tokens))
            for kv_group in self._kv_groups
        )

    def _has_window_of(self, seq: Sequence, num_tokens: int) -> bool:
        """Return whether a sequence has the KV that a token behind `num_tokens` sees."""
        return all(
            first <= kv_group.first_position_moved(num_tokens)
            for kv_group, first in zip(self._kv_groups, seq.place.num_missing, strict=True)
        )

    def note_loaded(self, seq: Sequence, num_new: int, end: int, *, is_converted: bool) -> None:
        """Note that KV has been loaded into a sequence's blocks, and index the full ones.

        Converted KV is not indexed, and neither is a block with the last known token, because that
        token may be computed again. So may the whole prompt, see `Sequence.needs_whole_prompt`.

        Args:
            seq: The sequence, whose progress contains the tokens.
            num_new: Tokens whose KV was loaded.
            end: End of the load, of which these may be a part; see `is_served_by`.
            is_converted: Whether their KV came in another dtype and so must not be shared.
        """
        place = seq.place
        if seq.phase is Phase.LOADING and not seq.num_preemptions:
            place.num_cached_tokens += num_new
        place.is_converted |= is_converted and num_new > 0
        if num_new:
            num_local = seq.num_computed_tokens - num_new
            for index in self._rolling:
                first = self._kv_groups[index].first_position_moved(end)
                if first > num_local:
                    place.num_missing[index] = first
        if seq.needs_whole_prompt:
            return
        self.settle(seq, min(seq.num_computed_tokens, seq.num_tokens - 1))

    def grow(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[list[int]]] | None:
        """Append the blocks that sequences lack, each for its number of tokens.

        Returns:
            For each sequence and KV group the new blocks; an empty list if the sequence lacks none.
            None, with nothing changed, if a DP group has too few blocks.
        """
        missing: list[list[int]] = []
        for index, kv_group in enumerate(self._kv_groups):
            nums, sums = [], [0] * len(self._pools)
            for seq, num_tokens in wanted:
                num = max(kv_group.table_length(num_tokens) - len(seq.place.block_ids[index]), 0)
                nums.append(num)
                if kv_group.spec.kind != "state":
                    sums[seq.place.dp_group] += num
            for group, num in enumerate(sums):
                if num > self._pools[group][index].num_free_blocks:
                    return None
            missing.append(nums)
        rows = zip(wanted, *missing, strict=True)
        return [
            self._append_blocks(seq, nums) if num_tokens > seq.place.capacity else []
            for (seq, num_tokens), *nums in rows
        ]

    def free_slot(self, seq: Sequence) -> None:
        """Free the slot of a sequence; it keeps its blocks. Idempotent."""
        place = seq.place
        if place.slot >= 0:
            self._slots.give_back(place.slot)
            self.left_slots.append(place.slot)
            place.slot = -1

    def pop_left_slots(self) -> list[int]:
        """Remove and return the slots that were given back since the last call."""
        left, self.left_slots = self.left_slots, []
        return left

    def forget_blocks(self, seq: Sequence) -> None:
        """Remove a sequence's blocks from the prefix index, because their KV is wrong."""
        for pool, block_ids in zip(
            self._pools[seq.place.dp_group], seq.place.block_ids, strict=True
        ):
            pool.forget(block_ids)
        # Those behind a window are held no longer, but may be cached.
        for index in self._rolling if seq.place.block_hashes else ():
            pool = self._pools[seq.place.dp_group][index]
            hashes = seq.place.block_hashes[index][: seq.place.num_behind[index]]
            pool.forget(b for b in map(pool.find, hashes) if b is not None)

    def free_blocks(self, seq: Sequence) -> None:
        """Free the blocks of a sequence; it keeps its tokens. Idempotent."""
        place = seq.place
        for index, block_ids in enumerate(place.block_ids):
            held = _distinct(block_ids[place.num_behind[index] :])
            self._pools[place.dp_group][index].free(held)
        place.block_ids = []
        place.num_behind = []
        place.num_missing = []
        place.capacity = 0
        place.num_indexed_tokens = 0
        place.is_converted = False

    # --- prefix index --------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence, group: int) -> tuple[list[PrefixWalk], int]:
        """Return the cached leading blocks of each KV group, and the tokens that all groups serve.

        A group with a window, or of states, serves a prefix if it has the blocks that the token
        behind it sees; their walks stay empty.
        At least one token is left to compute, because its logits are needed. A request that does
        not read the cache hits nothing, but its blocks are indexed.
        """
        walks = seq.place.walks.get(group)
        if walks is None:
            walks = seq.place.walks[group] = [PrefixWalk() for _ in self._block_sizes]
        if self._key is None or not seq.request.sampling.reads_prefix_cache:
            return walks, 0
        self._extend_hashes(seq)
        num_hit = last = len(seq.token_ids) - 1
        for index, pool in enumerate(self._pools[group]):
            if self._kv_groups[index].is_rolling:
                continue
            walk, size = walks[index], self._block_sizes[index]
            pool.bring_up_to_date(walk, seq.place.block_hashes[index], last // size)
            num_hit = min(num_hit, len(walk.found) * size)
        num_hit -= num_hit % self.block_multiple
        if self._rolling and num_hit:
            pools, hashes = self._pools[group], seq.place.block_hashes
            num_hit = served_by_windows(
                self._kv_groups,
                num_hit,
                lambda index, number: pools[index].find(hashes[index][number]) is not None,
            )
        return walks, num_hit

    def _window_hits(self, seq: Sequence, group: int, index: int, num_tokens: int) -> list[int]:
        """Return the blocks with which a rolling group serves a prefix."""
        if not num_tokens:
            return []
        kv_group, find = self._kv_groups[index], self._pools[group][index].find
        first = kv_group.first_block_seen(num_tokens)
        hashes = seq.place.block_hashes[index][first : num_tokens // kv_group.block_size]
        found = [block_id for block_id in map(find, hashes) if block_id is not None]
        assert len(found) == len(hashes), "a block of a hit is not cached"
        return [NULL_BLOCK] * first + found

    def settle(self, seq: Sequence, num_final_tokens: int, first_read: int | None = None) -> None:
        """Index the blocks that have just become full, and free those behind a window.

        An indexed block may be shared, so it must not be written to again.

        Args:
            seq: The sequence.
            num_final_tokens: Leading tokens whose KV is here and never computed or loaded again.
                No step under way computes an earlier one, so none sees what is freed.
            first_read: First position whose KV the connector still reads; None: it reads none.
        """
        self.index_full_blocks(seq, num_final_tokens)
        for index in self._rolling:
            kv_group, place = self._kv_groups[index], seq.place
            begin = place.num_behind[index]
            end = kv_group.first_block_seen(num_final_tokens - self._num_kept_tokens)
            if first_read is not None:
                end = min(end, first_read // kv_group.block_size)
            if begin < end:
                table = place.block_ids[index]
                # A state may continue in the same block after these entries.
                left = [b for b in _distinct(table[begin:end]) if b not in table[end : end + 1]]
                self._pools[place.dp_group][index].free(left)
                table[begin:end] = [NULL_BLOCK] * (end - begin)
                place.num_behind[index] = end
                if kv_group.spec.window is not None:
                    self.stats[place.dp_group].window_blocks_freed += end - begin

    def index_full_blocks(self, seq: Sequence, num_final_tokens: int) -> None:
        """Index the blocks of a sequence that have just become full; see `settle`."""
        if seq.place.is_converted or self._key is None:
            return
        num_indexed, divisor = seq.place.num_indexed_tokens, self.block_divisor
        if num_final_tokens // divisor <= num_indexed // divisor:
            return
        self._extend_hashes(seq)
        for index, pool in enumerate(self._pools[seq.place.dp_group]):
            size, hashes = self._block_sizes[index], seq.place.block_hashes[index]
            # Of a load with a window the first block may be there in part.
            first = max(num_indexed // size, -(-seq.place.num_missing[index] // size))
            table, is_state = seq.place.block_ids[index], index in self._states
            for i in range(first, num_final_tokens // size):
                if not is_state or _keeps_state(table, i):
                    pool.cache(table[i], hashes[i])
        seq.place.num_indexed_tokens = num_final_tokens

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; held ones stay held."""
        for pools in self._pools:
            for pool in pools:
                pool.reset_prefix_cache()

    # --- views ---------------------------------------------------------------------------------

    def snapshot(self, group: int, running: int, reserved: int, waiting: int) -> GroupSnapshot:
        """Return the free slots and blocks of a group.

        Args:
            group: The group.
            running: Sequences that run in it.
            reserved: Sequences in it that wait for KV.
            waiting: Queued sequences that ask for it.
        """
        num_empty, num_free_blocks = self._slots.num_empty(group), self._free_blocks(group)
        return GroupSnapshot(num_empty, num_free_blocks, running, reserved, waiting)

    def counters(self, group: int, running: int, reserved: int) -> GroupCounters:
        """Return totals and gauges of a group."""
        pools, totals = self._pools[group], self.stats[group]
        return msgspec.structs.replace(
            totals,
            num_running=running,
            num_reserved=reserved,
            num_slots=self._slots_per_group,
            num_empty_slots=self._slots.num_empty(group),
            num_blocks=[pool.num_blocks for pool in pools],
            num_free_blocks=self._free_blocks(group),
            requests_finished=dict(totals.requests_finished),
        )

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Assert that blocks and slots have exactly the holders that the sequences name.

        Also that no block that a sequence will still write to has, or may get, another reader.
        """
        self._slots.check_invariants()
        sequences = list(holders)
        slots = [s.place.slot for s in sequences if s.place.slot >= 0]
        assert len(set(slots)) == len(slots)
        assert self.num_empty_slots + len(slots) == self._slots_per_group * len(self._pools)
        for group, pools in enumerate(self._pools):
            tables = [
                s.place.block_ids
                for s in sequences
                if s.place.dp_group == group and s.place.block_ids
            ]
            for index, pool in enumerate(pools):
                pool.check_invariants()
                used = {b for block_ids in tables for b in block_ids[index]} - {NULL_BLOCK}
                assert pool.num_free_blocks + len(used) == pool.num_blocks, f"{self!r}"
        for seq in (s for s in sequences if s.place.block_ids):
            assert seq.place.capacity == self._capacity(seq)
            for table, num_behind in zip(seq.place.block_ids, seq.place.num_behind, strict=True):
                assert table[:num_behind] == [NULL_BLOCK] * num_behind
                assert NULL_BLOCK not in table[num_behind:]
            if seq.is_over:
                continue
            for kv_group, pool, table in self._each_kv_group(
                seq.place.dp_group, seq.place.block_ids
            ):
                unwritten = table[seq.num_computed_tokens // kv_group.block_size :]
                shared = [b for b in unwritten if not pool.is_private(b)]
                assert not shared, f"{seq.request_id} writes to blocks {shared} others may read"

    def _extend_hashes(self, seq: Sequence) -> None:
        assert self._key is not None
        if not seq.place.block_hashes:
            # Groups of equal blocks share one list.
            by_size: dict[int, list[bytes]] = {size: [] for size in self._block_sizes}
            seq.place.block_hashes = [by_size[size] for size in self._block_sizes]
        num_tokens = seq.num_tokens
        for index, hashes in enumerate(seq.place.block_hashes):
            size = self._block_sizes[index]
            if len(hashes) < num_tokens // size:
                request = seq.request
                root = prefix_root(self._key, request.cache_salt, request.adapter, request.images)
                extend_block_hashes(hashes, seq.token_ids, size, root)

    def _each_kv_group(
        self, group: int, values: Iterable[_T]
    ) -> Iterator[tuple[KVGroup, BlockPool, _T]]:
        """Return each KV group with its pool in a DP group and its entry of `values`."""
        return zip(self._kv_groups, self._pools[group], values, strict=True)

    def _fits(
        self,
        seq: Sequence,
        group: int,
        num_tokens: int,
        walks: list[PrefixWalk],
        num_hit: int,
        *,
        is_whole: bool,
    ) -> bool:
        """Return whether a group has blocks for `num_tokens`, of which `num_hit` are cached."""
        for index, pool in enumerate(self._pools[group]):
            kv_group = self._kv_groups[index]
            num_found = num_hit // kv_group.block_size
            num_first = self._num_first_blocks(kv_group, num_hit, num_tokens, is_whole=is_whole)
            num_taken = num_first - num_found
            if kv_group.spec.kind == "state":
                num_taken = 1
            if not kv_group.is_rolling:
                num_taken += walks[index].num_evictable(num_found)
            else:
                hits = self._window_hits(seq, group, index, num_hit)
                num_taken += pool.num_unheld(hits[kv_group.first_block_seen(num_hit) :])
            if num_taken > pool.num_free_blocks:
                return False
        return True

    def _num_first_blocks(
        self, kv_group: KVGroup, num_hit: int, num_tokens: int, *, is_whole: bool
    ) -> int:
        """Return the length of a sequence's first table, for `num_tokens` after `num_hit`."""
        if kv_group.is_rolling and not is_whole:
            num_tokens = min(num_tokens, num_hit + self._max_pass_tokens)
        return kv_group.table_length(num_tokens)

    def _append_blocks(self, seq: Sequence, nums: list[int]) -> list[list[int]]:
        """Append `nums` entries per KV group; the caller has checked that there are enough."""
        place = seq.place
        each = self._each_kv_group(place.dp_group, zip(place.block_ids, nums, strict=True))
        appended = [
            self._extend_table(seq, kv_group, pool, table, num)
            for kv_group, pool, (table, num) in each
        ]
        place.capacity = self._capacity(seq)
        return appended

    def _extend_table(
        self, seq: Sequence, kv_group: KVGroup, pool: BlockPool, table: list[int], num: int
    ) -> list[int]:
        """Append so many entries to a table, with new blocks, and return them.

        Entries of states take the block before them, unless it is a checkpoint's.
        """
        if kv_group.spec.kind != "state":
            new = pool.allocate(num)
        else:
            new, begin = [], len(table)
            # What a prefix hit has found is not written to.
            last = table[-1] if table and pool.is_private(table[-1]) else NULL_BLOCK
            for entry in range(begin, begin + num):
                if last == NULL_BLOCK or (
                    self._is_checkpoint(seq, entry * kv_group.block_size)
                    and pool.num_free_blocks > self._slots.num_empty(seq.place.dp_group)
                ):
                    [last] = pool.allocate(1)
                new.append(last)
        table += new
        return new

    def _is_checkpoint(self, seq: Sequence, num_tokens: int) -> bool:
        """Return whether the state after so many tokens is to be kept; they fill whole blocks."""
        if self._key is None or not num_tokens:
            return False
        last = seq.num_prompt_tokens - 1
        at_ends = last - last % self.block_multiple, seq.place.num_without_states
        return num_tokens in at_ends or num_tokens % self._checkpoint_tokens == 0

    def _capacity(self, seq: Sequence) -> int:
        capacity: int = min(map(mul, map(len, seq.place.block_ids), self._block_sizes))
        return capacity

    def _free_blocks(self, group: int) -> list[int]:
        return [pool.num_free_blocks for pool in self._pools[group]]


def _distinct(block_ids: Iterable[int]) -> list[int]:
    """Return blocks in order, each once: states have one in several entries."""
    return list(dict.fromkeys(block_ids))


def _keeps_state(table: list[int], entry: int) -> bool:
    """Return whether no later token overwrites the state at the end of an entry of a table."""
    return entry + 1 < len(table) and table[entry + 1] != table[entry]
