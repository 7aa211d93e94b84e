"""KV blocks of one KV group in one DP group: ids, reference counts, free order, prefix index.

Owner: the scheduler, on the engine's core thread. Pure: it handles block ids, never KV bytes. A
block is in exactly one of three states: held (reference count > 0), cached (count 0, found by
`find_prefix` until the index is reset, evictable) or free (count 0, never found).

Source of the scheme: vLLM v1/core/block_pool.py (null block, lazy eviction in LRU order, duplicates
not merged so that block tables only ever grow).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from replicas.engine.kv_events import PrefixJournal

NULL_BLOCK = 0
"""Target of all padding in a page table; never handed out."""


@dataclass(slots=True, eq=False)
class PrefixWalk:
    """The cached prefix of one sequence in one pool, as of the last look; owned by the sequence.

    Attributes:
        found: The cached blocks, from the first on, each with the hash that it was found by.
        unheld: Those of them with reference count 0.
        as_of: The pool's `_num_changes` at the last look.
    """

    found: dict[int, bytes] = field(default_factory=dict)
    unheld: set[int] = field(default_factory=set)
    as_of: int = 0

    @property
    def block_ids(self) -> list[int]:
        """Return the cached blocks, from the first on."""
        return list(self.found)

    @property
    def num_blocks(self) -> int:
        """Return the number of cached blocks."""
        return len(self.found)

    def num_evictable(self, num_blocks: int) -> int:
        """Return how many of the first `num_blocks` count as free until they are shared."""
        if num_blocks == len(self.found):
            return len(self.unheld)
        return sum(b in self.unheld for b in islice(self.found, num_blocks))


class BlockPool:
    """Hands out, shares, finds and takes back the blocks of one KV group in one DP group.

    Args:
        num_blocks: Blocks including the null block, >= 2.
        enable_prefix_caching: Whether full blocks are indexed by hash.
        journal: Records which blocks can be found from now on, and which no longer; None records
            nothing.
        group_idx: Index of the KV group, for the journal.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        journal: PrefixJournal | None = None,
        group_idx: int = 0,
    ) -> None:
        assert num_blocks >= 2, f"{num_blocks=}"
        self._enable_prefix_caching = enable_prefix_caching
        self._journal = journal
        self._group_idx = group_idx
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        # Blocks are handed out in this order: freed ones, last in first out; never used ones, from
        # `_next_fresh` on; cached ones, least recently used first. An OrderedDict gives O(1) pop,
        # append and removal from the middle.
        self._free: list[int] = []
        self._next_fresh = 1
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Changes that may make a walk stale, oldest first, and their total number: a block lost its
        # hash, or was cached and got its first holder, or is cached and lost its last holder. A
        # walk has at most `num_blocks` blocks: if it missed more changes than it has blocks, it
        # checks its own blocks instead.
        self._changes: deque[int] = deque(maxlen=num_blocks)
        self._num_changes = 0

    def __repr__(self) -> str:
        cached = len(self._block_by_hash)
        return f"BlockPool(free={self.num_free_blocks}/{self.num_blocks}, {cached=})"

    @property
    def num_blocks(self) -> int:
        """Return the number of usable blocks: all but the null block."""
        return len(self._ref_counts) - 1

    @property
    def num_free_blocks(self) -> int:
        """Return the number of blocks that `allocate` can hand out: free, or cached and unheld."""
        return len(self._free) + len(self._ref_counts) - self._next_fresh + len(self._cached)

    @property
    def block_hashes(self) -> Collection[bytes]:
        """Return the hashes of all blocks that can be found, in the order of their storing."""
        return self._block_by_hash.keys()

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the least recently freed cached ones as needed.

        The caller checks `num_free_blocks` first: asking for more is a bug.
        """
        assert 0 <= count <= self.num_free_blocks, f"{count=} {self!r}"
        block_ids: list[int] = []
        while self._free and len(block_ids) < count:
            block_ids.append(self._free.pop())
        first = self._next_fresh
        self._next_fresh = min(first + count - len(block_ids), len(self._ref_counts))
        block_ids.extend(range(first, self._next_fresh))
        # Only cached blocks have a hash to drop.
        for _ in range(count - len(block_ids)):
            block_id, _ = self._cached.popitem(last=False)
            self._forget_hash(block_id)
            block_ids.append(block_id)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block.

        Cached blocks go to the back of the order deepest first, so that the end of a prefix is
        evicted before its beginning. Blocks without a hash are handed out next.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None
                    self._note_change(block_id)

    def find(self, block_hash: bytes) -> int | None:
        """Return the cached block of a hash, or None; takes no reference."""
        return self._block_by_hash.get(block_hash)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """Return how many of these cached blocks count as free until they are shared."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def find_prefix(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the block ids of the longest cached prefix of the hashes; takes no reference."""
        found: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def bring_up_to_date(
        self, walk: PrefixWalk, block_hashes: Sequence[bytes], num_blocks: int
    ) -> None:
        """Update a walk to the longest cached prefix as it is now.

        Queued sequences call this in every step. It costs one look-up, one for each change of the
        pool since the last call (never more than the walk is long), and one for each block that
        the walk gains or loses. A block may be evicted before those that follow it, if several
        sequences have freed the prefix.

        Args:
            walk: A walk of this pool; new, or updated before.
            block_hashes: Hashes of the sequence's blocks, all different; may only have grown since
                the last call.
            num_blocks: Most blocks of the prefix.
        """
        if walk.as_of != self._num_changes:
            self._drop_stale(walk)
        rest = range(len(walk.found), num_blocks)
        more = self.find_prefix(block_hashes[i] for i in rest)
        if more:
            walk.found.update((b, block_hashes[i]) for i, b in zip(rest, more, strict=False))
            walk.unheld.update(b for b in more if self._ref_counts[b] == 0)

    def share(self, block_ids: Sequence[int]) -> None:
        """Take one more reference to each cached block."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
                self._note_change(block_id)
            self._ref_counts[block_id] += 1

    def is_private(self, block_id: int) -> bool:
        """Return whether a block has one holder and no other sequence can find it."""
        return self._ref_counts[block_id] == 1 and self._hashes[block_id] is None

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Make a full, computed block findable; a second block of the same hash stays private."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not held"
        if self._enable_prefix_caching and block_hash not in self._block_by_hash:
            self._forget_hash(block_id)
            self._hashes[block_id] = block_hash
            self._block_by_hash[block_hash] = block_id
            if self._journal is not None:
                self._journal.store(block_hash, self._group_idx)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the prefix index; held ones stay held."""
        for block_id in block_ids:
            self._forget_hash(block_id)

    def reset_prefix_cache(self) -> None:
        """Forget every hash; held blocks stay held. Pools of one journal are reset together."""
        for block_id in self._block_by_hash.values():
            self._note_change(block_id)
        self._block_by_hash.clear()
        self._hashes = [None] * len(self._hashes)
        if self._journal is not None:
            self._journal.clear()

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one state, and that index and hashes agree."""
        unheld = [*self._free, *range(self._next_fresh, len(self._ref_counts)), *self._cached]
        assert NULL_BLOCK not in unheld
        assert self._ref_counts[NULL_BLOCK] == 0
        assert len(set(unheld)) == len(unheld) == self.num_free_blocks
        assert all(self._ref_counts[block_id] == 0 for block_id in unheld)
        assert sum(count > 0 for count in self._ref_counts) == self.num_blocks - len(unheld)
        for block_hash, block_id in self._block_by_hash.items():
            assert self._hashes[block_id] == block_hash
        assert sum(h is not None for h in self._hashes) == len(self._block_by_hash)

    def _forget_hash(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block_id] = None
            self._note_change(block_id)
            if self._journal is not None:
                self._journal.remove(block_hash, self._group_idx)

    def _drop_stale(self, walk: PrefixWalk) -> None:
        """Cut a walk before its first block that lost its hash, and update `unheld`."""
        found = walk.found
        num_missed, walk.as_of = self._num_changes - walk.as_of, self._num_changes
        missed: Iterable[int] = found
        if num_missed <= len(found):
            missed = islice(reversed(self._changes), num_missed)
        changed = {b for b in missed if b in found}
        if not changed:
            return
        gone = {b for b in changed if self._hashes[b] != found[b]}
        walk.unheld -= changed
        walk.unheld.update(b for b in changed if self._ref_counts[b] == 0)
        while gone:
            block_id, _ = found.popitem()
            walk.unheld.discard(block_id)
            gone.discard(block_id)

    def _note_change(self, block_id: int) -> None:
        self._changes.append(block_id)
        self._num_changes += 1
