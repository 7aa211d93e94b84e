"""Each block is held, cached or free, exactly one of these, after any operations on a pool."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from itertools import takewhile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.engine.block_pool import BlockPool, PrefixWalk


def test_pool_without_prefix_caching_finds_nothing():
    pool = BlockPool(3, enable_prefix_caching=False)
    [block] = pool.allocate(1)
    pool.cache(block, b"1")
    assert pool.find_prefix([b"1"]) == []


@pytest.mark.parametrize("count", [-1, 3])
def test_asking_for_more_than_is_free_is_a_bug(count):
    with pytest.raises(AssertionError):
        BlockPool(3).allocate(count)


def test_freeing_twice_is_a_bug():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


# --- walks ----------------------------------------------------------------------------------------


class CountingIndex(dict):
    """A prefix index that counts how often anything is looked for in it."""

    num_lookups = 0

    def get(self, *args):
        self.num_lookups += 1
        return super().get(*args)


class CountingList(list):
    """A list that counts how often one of its values is read."""

    num_reads = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


class FullPool:
    """A pool of cached blocks alone, half of them of one prefix, and a walk along that."""

    def __init__(self, num_blocks):
        self.pool = BlockPool(2 * num_blocks + 1)
        self.hashes = [b"own%d" % n for n in range(num_blocks)]
        self.own, self.others = (self.pool.allocate(num_blocks) for _ in range(2))
        for n, (own, other) in enumerate(zip(self.own, self.others, strict=True)):
            self.pool.cache(own, self.hashes[n])
            self.pool.cache(other, b"other%d" % n)
        self.walk = PrefixWalk()
        self.look()
        self.index = self.pool._block_by_hash = CountingIndex(self.pool._block_by_hash)
        self.blocks = self.pool._hashes = CountingList(self.pool._hashes)

    def look(self):
        self.pool.bring_up_to_date(self.walk, self.hashes, len(self.hashes))

    def cost_of_a_look(self):
        """Look-ups and blocks looked at; the walk is right after it."""
        before = self.index.num_lookups + self.blocks.num_reads
        self.look()
        cost = self.index.num_lookups + self.blocks.num_reads - before
        assert self.walk.block_ids == self.pool.find_prefix(self.hashes)
        assert self.walk.num_evictable(self.walk.num_blocks) == sum(
            self.pool._ref_counts[b] == 0 for b in self.own
        )
        return cost


@pytest.mark.parametrize("own_is_held", [True, False])
def test_evicting_blocks_of_others_costs_a_walk_nothing(own_is_held):
    full = FullPool(200)
    full.pool.free(full.others)
    if not own_is_held:
        full.pool.free(full.own)
    full.look()
    for _ in range(200):
        full.pool.allocate(1)
        assert full.cost_of_a_look() == 0
    assert full.walk.block_ids == full.own


def test_evicting_the_end_of_a_walk_costs_no_walk_along_the_rest():
    full = FullPool(200)
    full.pool.free(full.own)
    full.look()
    for left in range(199, -1, -1):
        full.pool.allocate(1)
        # Two look-ups: whether that block is unchanged, and whether another one is found.
        assert full.cost_of_a_look() <= 2
        assert full.walk.num_blocks == full.walk.num_evictable(full.walk.num_blocks) == left


def test_a_walk_that_missed_much_looks_at_each_of_its_own_blocks_once():
    full = FullPool(20)
    for _ in range(50):
        full.pool.free(full.others)
        full.pool.share(full.others)
    assert full.cost_of_a_look() <= 20


def test_a_block_that_goes_before_those_that_follow_it_ends_a_walk_there():
    """Two sequences compute a prefix at once; the one that was ahead ends, its block goes."""
    pool = BlockPool(5)
    ahead, behind = pool.allocate(1), pool.allocate(3)
    pool.cache(ahead[0], b"1")
    for block_id, block_hash in zip(behind, [b"1", b"2", b"3"], strict=True):
        pool.cache(block_id, block_hash)
    walk = PrefixWalk()
    pool.bring_up_to_date(walk, [b"1", b"2", b"3"], 3)
    assert walk.block_ids == [*ahead, *behind[1:]]
    pool.free(ahead)
    [another] = pool.allocate(1)
    pool.bring_up_to_date(walk, [b"1", b"2", b"3"], 3)
    assert (walk.block_ids, walk.num_evictable(walk.num_blocks)) == ([], 0)
    pool.cache(another, b"1")
    pool.bring_up_to_date(walk, [b"1", b"2", b"3"], 3)
    assert walk.block_ids == [another, *behind[1:]]


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_is_what_a_new_one_would_be_whatever_happened_since(seed):
    """Blocks of one chain are indexed, held, freed and evicted in any order, so holes come up."""
    dice, pool, tables = random.Random(seed), BlockPool(8), []
    hashes = [b"a", b"b", b"c", b"d", b"e"]
    # The first is brought up to date after each step, the last one seldom.
    walks = [PrefixWalk() for _ in range(4)]
    num_holes = 0
    for _ in range(5000):
        match dice.randrange(5):
            case 0 | 1 if pool.num_free_blocks:
                tables.append(pool.allocate(1))
                if dice.random() < 0.7:
                    pool.cache(tables[-1][0], dice.choice(hashes))
            case 2:
                tables.append(pool.find_prefix(hashes[: dice.randrange(6)]))
                pool.share(tables[-1])
            case 3 | 4 if tables:
                pool.free(tables.pop(dice.randrange(len(tables))))
        if dice.random() < 0.005:
            pool.reset_prefix_cache()
        fresh = PrefixWalk()
        pool.bring_up_to_date(fresh, hashes, len(hashes))
        for n, walk in enumerate(walks):
            if dice.random() < 0.25**n:
                blocks = [pool._hashes[b] == h for b, h in walk.found.items()]
                num_holes += blocks != sorted(blocks, reverse=True)
                pool.bring_up_to_date(walk, hashes, len(hashes))
                assert (walk.found, walk.unheld) == (fresh.found, fresh.unheld)
    assert num_holes > 20


HASH = st.sampled_from([b"a", b"b", b"c", b"d"])
HASHES = st.lists(HASH, unique=True)


class Pool(RuleBasedStateMachine):
    """A pool beside a plain model of it: holders, found prefixes, and the next block."""

    @initialize(num_blocks=st.integers(2, 6))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks - 1
        self.tables: list[list[int]] = []
        self.found: dict[bytes, int] = {}
        # In the order in which they are handed out, without the null block: returned blocks, blocks
        # that were never used, blocks that were cached when they were returned.
        self.returned: list[int] = []
        self.fresh = list(range(1, num_blocks))
        self.cached: list[int] = []
        # Blocks that were cached while they were held: their owner has moved on.
        self.full: set[int] = set()
        self.walks: list[tuple[list[bytes], PrefixWalk]] = []

    @property
    def held(self):
        return {b for table in self.tables for b in table}

    def find(self, hashes):
        return [self.found[h] for h in takewhile(self.found.__contains__, hashes)]

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.pool.num_free_blocks))
        blocks = [*self.returned, *self.fresh, *self.cached][:count]
        assert self.pool.allocate(count) == blocks
        for queue in (self.returned, self.fresh, self.cached):
            queue[:] = [b for b in queue if b not in blocks]
        self.found = {h: b for h, b in self.found.items() if b not in blocks}
        self.full -= set(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.held - self.full)
    @rule(data=st.data(), block_hash=HASH)
    def cache(self, data, block_hash):
        block = data.draw(st.sampled_from(sorted(self.held - self.full)))
        self.pool.cache(block, block_hash)
        self.full.add(block)
        self.found.setdefault(block_hash, block)

    @rule(hashes=HASHES)
    def share(self, hashes):
        blocks = self.find(hashes)
        assert self.pool.find_prefix(hashes) == blocks
        self.pool.share(blocks)
        self.cached = [b for b in self.cached if b not in blocks]
        self.tables.append(blocks)

    @rule(hashes=HASHES)
    def walk(self, hashes):
        self.walks.append((hashes, PrefixWalk()))
        self.pool.bring_up_to_date(self.walks[-1][1], hashes, len(hashes))

    @precondition(lambda self: self.walks)
    @rule(data=st.data())
    def walk_on(self, data):
        hashes, walk = data.draw(st.sampled_from(self.walks))
        self.pool.bring_up_to_date(walk, hashes, len(hashes))
        assert walk.block_ids == self.find(hashes)
        for count in range(walk.num_blocks + 1):
            unheld = set(walk.block_ids[:count]) - self.held
            assert walk.num_evictable(count) == len(unheld)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        for block in reversed(table):
            if block not in self.held:
                is_found = block in self.found.values()
                self.cached.append(block) if is_found else self.returned.insert(0, block)

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()
        self.found = {}

    @invariant()
    def every_block_has_its_holders(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        hashes = self.pool._hashes
        assert not any(hashes[b] for b in self.pool._free), "a free block could be found"
        assert not any(hashes[self.pool._next_fresh :])
        counts = Counter(b for table in self.tables for b in table)
        assert self.pool._ref_counts == [counts[b] for b in range(self.num_blocks + 1)]
        assert self.pool.num_free_blocks == self.num_blocks - len(counts)

    @invariant()
    def every_walk_is_what_a_new_one_would_be(self):
        """However long ago it was brought up to date: only a copy is brought so here."""
        for hashes, walk in getattr(self, "walks", ()):
            old, new = deepcopy(walk), PrefixWalk()
            for each in (old, new):
                self.pool.bring_up_to_date(each, hashes, len(hashes))
            assert (old.found, old.unheld) == (new.found, new.unheld)

    def teardown(self):
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.free(table)
            assert self.pool.num_free_blocks == self.num_blocks
            self.pool.check_invariants()


TestPool = Pool.TestCase
