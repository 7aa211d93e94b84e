"""An ingress knows what engines of several KV groups would hit: no more, no less.

Their schedulers run random requests in few blocks, so that blocks are freed behind windows, shared,
evicted and cached again, and states kept at checkpoints; the ingress has only the events of their
prefix caches.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.routing.demand import Demand
from cluster.routing.placement import Placement
from cluster.routing.prefix_index import PrefixIndex
from replicas.messages import KVEventBatch
from tests.kv_groups import one_kv_group, states_group
from tests.replicas.engine.fakes import (
    PREFIX_CACHE_KEY,
    make_sequence,
    result_of,
    scheduler_of,
)

MAX_LEN = 48
STATES = "states"
SHAPES = {
    "a window": [(4, 6)],
    "a window of less than a block": [(4, 2)],
    "full and window": [(4, None), (4, 9)],
    "blocks of two sizes": [(2, None), (4, 7)],
    "two full, two windows": [(4, None), (2, None), (4, 5), (2, 11)],
    "full and states": [(4, None), (4, STATES)],
    "states of more tokens": [(2, None), (8, STATES)],
    "full, window and states": [(4, None), (4, 7), (2, STATES)],
}
"""Block size of each KV group, and its window, None, or STATES for recurrent layers."""


def kv_groups_of(shape):
    found = []
    for size, window in shape:
        num_blocks = 3 + MAX_LEN // size
        if window == STATES:
            found.append(states_group(num_blocks, size))
        else:
            found += one_kv_group(num_blocks, size, window=window)
    return tuple(found)


class Engine:
    """A scheduler without a device, that two ingresses could follow."""

    def __init__(self, shape, dice):
        self.groups = kv_groups_of(shape)
        self.scheduler = scheduler_of(
            kv_groups=self.groups, max_model_len=MAX_LEN, max_batch_size=2
        )
        self.dice = dice
        self.sequences = []
        self.prompts = [[2] * 5]

    def prompt(self):
        """A prompt, mostly one that begins like another."""
        old = self.dice.choice(self.prompts)
        kept = old[: self.dice.randrange(len(old) + 1)]
        new = [self.dice.randrange(1, 5) for _ in range(self.dice.randrange(1, 14))]
        return [*kept, *new][: MAX_LEN - 8]

    def run_some(self):
        if self.dice.random() < 0.05:
            self.scheduler.reset_prefix_cache()
        if self.dice.random() < 0.6:
            self.prompts.append(self.prompt())
            self.add(self.prompts[-1])
        self.step()

    def add(self, prompt):
        name = f"r{len(self.sequences)}"
        seq = make_sequence(name, prompt, max_tokens=6, ignore_eos=True)
        assert self.scheduler.add(seq, 0.0) is None
        self.sequences.append(seq)

    def step(self):
        """Compute a step; return whether there was one."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        rows = {seq.place.slot: seq for seq in self.sequences if seq.place.slot >= 0}
        is_whole = [rows[s].num_computed_tokens >= rows[s].num_tokens for s in batch.slots]
        tokens = [self.dice.randrange(1, 5) if whole else None for whole in is_whole]
        self.scheduler.update(batch, result_of(tokens))
        return True

    def num_hit(self, prompt):
        _, num_hit = self.scheduler._kv.find_prefix(make_sequence("asked", prompt), 0)
        return num_hit


def names(engine, prompt):
    demand = Demand("asked", prompt)
    return [demand.block_names(group.block_size, PREFIX_CACHE_KEY) for group in engine.groups]


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=30, deadline=None)
@example(seed=0)
@given(seed=st.integers(0, 2**32))
def test_an_ingress_finds_what_the_engine_would_hit(shape, seed):
    dice = random.Random(seed)
    engines = {Placement(name, 0): Engine(SHAPES[shape], dice) for name in "ab"}
    first, *_ = engines.values()
    index = PrefixIndex(first.groups)
    for place, engine in engines.items():
        engine.scheduler.prefix_feed.follow(is_followed=True)
        assert not index.take(place, KVEventBatch(0, 0, [], is_listing=True))
    for _ in range(40):
        for place, engine in engines.items():
            engine.run_some()
            for batch in engine.scheduler.prefix_feed.take():
                assert not index.take(place, batch)
        index.check_invariants()
        prompt = first.prompt()
        hits = {place: engine.num_hit(prompt) for place, engine in engines.items()}
        assert index.look_up(names(first, prompt)) == {p: n for p, n in hits.items() if n}


def test_a_prefix_counts_though_its_beginning_is_lost():
    """Of the first prompt only the last blocks are cached; those before them were evicted."""
    engine = Engine([(4, 6)], random.Random(1))
    place, prompt = Placement("a", 0), [2, 3] * 20
    index = PrefixIndex(engine.groups)
    for lost in (prompt, [4] * 20):
        engine.add(lost)
        while engine.step():
            pass
    [listing] = engine.scheduler.prefix_feed.listing()
    index.take(place, listing)
    [cached] = names(engine, [*prompt, 1])
    assert cached[0] not in index.reported(place, 0)
    assert engine.num_hit([*prompt, 1]) == 40
    assert index.look_up(names(engine, [*prompt, 1])) == {place: 40}


def test_a_prompt_that_was_sent_counts_in_every_group():
    shape = [(4, None), (2, 5)]
    engine, place = Engine(shape, random.Random(1)), Placement("a", 0)
    index = PrefixIndex(engine.groups)
    prompt = [*range(1, 12)]
    index.route(place, names(engine, prompt), until_s=5.0)
    assert index.look_up(names(engine, prompt)) == {place: 8}
    index.expire(5.0)
    assert index.look_up(names(engine, prompt)) == {}
    index.check_invariants()
