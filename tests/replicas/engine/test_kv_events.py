"""An engine's reports of its prefix caches to followers: a listing, then every change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.block_hash import block_names
from replicas.engine.block_pool import BlockPool
from replicas.engine.core import EngineCore
from replicas.engine.kv_events import PrefixFeed, PrefixJournal
from replicas.engine_process.server import SNAPSHOT_S, EngineServer
from replicas.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineRequest,
    Hello,
)
from replicas.sampling_params import SamplingParams
from tests.replicas.engine.virtual import CountingClock, OneWorker, virtual_worker
from tests.replicas.generators.simulated.engines import simulated_config

A, B = b"a", b"b"
FOLLOW = Hello(PROTOCOL_VERSION, follows_prefixes=True)
HASHES = [bytes([i]) * 32 for i in range(6)]


class Follower:
    """A follower that applies every report and checks that none is missing."""

    def __init__(self):
        self.names = {}
        self.seqs = {}
        self.num_listings = 0

    def take(self, batches):
        for batch in batches:
            names = self.names.setdefault(batch.data_parallel_rank, set())
            if batch.is_listing:
                self.num_listings += 1
                names.clear()
            else:
                assert batch.seq == self.seqs[batch.data_parallel_rank] + 1
            self.seqs[batch.data_parallel_rank] = batch.seq
            for event in batch.events:
                if isinstance(event, BlockStored):
                    assert not names & set(event.block_hashes)
                    names |= set(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    assert names >= set(event.block_hashes)
                    names -= set(event.block_hashes)
                else:
                    names.clear()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 6), st.integers(0, 30), st.randoms(use_true_random=False))
def test_a_follower_knows_what_can_be_found_whenever_it_came(num_blocks, joins, dice):
    journal = PrefixJournal()
    pool = BlockPool(num_blocks, journal=journal)
    feed = PrefixFeed([journal], lambda _group: [pool.block_hashes])
    follower, tables = Follower(), []
    for turn in range(30):
        if turn == joins:
            feed.follow(is_followed=True)
            assert not feed.take(), "nothing is kept for nobody"
            follower.take(feed.listing())
        for _ in range(dice.randrange(4)):
            match dice.randrange(3):
                case 0 if pool.num_free_blocks:
                    tables.append(pool.allocate(1))
                    pool.cache(tables[-1][0], dice.choice(HASHES))
                case 1 if tables:
                    pool.free(tables.pop(dice.randrange(len(tables))))
                case 2 if dice.random() < 0.1:
                    pool.reset_prefix_cache()
        if turn >= joins:
            follower.take(feed.take())
            assert follower.names[0] == set(block_names(pool.block_hashes))


def test_what_was_cleared_needs_no_more_words():
    journal = PrefixJournal()
    journal.is_kept = True
    journal.store(HASHES[0])
    journal.clear()
    journal.store(HASHES[1])
    assert journal.take() == [AllBlocksCleared(), BlockStored(block_names([HASHES[1]]))]


def test_events_name_the_kv_group_of_their_blocks():
    journal = PrefixJournal()
    journal.is_kept = True
    pools = [BlockPool(3, journal=journal, group_idx=index) for index in range(2)]
    feed = PrefixFeed([journal], lambda _group: [pool.block_hashes for pool in pools])
    for pool in pools:
        [block_id] = pool.allocate(1)
        pool.cache(block_id, HASHES[0])
    pools[1].forget([1])
    [name] = block_names(HASHES[:1])
    [changes], [listing] = feed.take(), feed.listing()
    assert changes.events == [BlockStored([name]), BlockStored([name], 1), BlockRemoved([name], 1)]
    assert listing.events == [BlockStored([name]), BlockStored([], 1)]
    for pool in pools:
        pool.reset_prefix_cache()
    [changes] = feed.take()
    assert changes.events == [AllBlocksCleared()]


# --- over a real core ---------------------------------------------------------------------------


@pytest.fixture
def core():
    config = simulated_config(tt_data_parallel=2, max_batch_size=4)
    return EngineCore(config, OneWorker(virtual_worker(config, CountingClock())), "e.1")


class Serving:
    """A server, and its reports of prefixes to clients."""

    def __init__(self, core):
        self.core = core
        self.server = EngineServer(core, "e.1")
        self.told = {A: Follower(), B: Follower()}
        self.now_s = 1.0

    def send(self):
        frames = self.server.frames(self.now_s)
        for client, frame in frames:
            self.told[client].take(frame.kv_events)
        return frames

    def run(self, client, first_token, num_steps=5):
        params = SamplingParams(max_tokens=3, temperature=0.0, seed=0, ignore_eos=True)
        prompt = [first_token + i % 7 for i in range(70)]
        request = EngineRequest(f"r{first_token}", prompt, params)
        self.server.take(client, AddRequest(request), self.now_s)
        for _ in range(num_steps):
            self.now_s += SNAPSHOT_S
            self.core.step(self.now_s)
            self.send()

    def truth(self):
        return {
            b.data_parallel_rank: set(b.events[0].block_hashes)
            for b in self.core.prefix_feed.listing()
        }


def test_who_follows_is_told_and_nobody_else(core):
    serving = Serving(core)
    serving.server.take(A, Hello(PROTOCOL_VERSION), 0.0)
    serving.run(A, 20)
    serving.server.take(B, FOLLOW, 0.0)
    serving.run(A, 40)
    assert sum(map(len, serving.truth().values())) == 4
    assert serving.told[B].names == serving.truth()
    assert serving.told[A].names == {}


def test_a_change_is_told_though_there_is_nothing_else_to_say(core):
    serving = Serving(core)
    serving.server.take(B, FOLLOW, 0.0)
    serving.run(B, 20)
    core.reset_prefix_cache()
    assert [client for client, _ in serving.send()] == [B]
    core.reset_prefix_cache()
    assert serving.send() == []
    assert serving.server.next_deadline_s() == serving.now_s + SNAPSHOT_S
    serving.now_s += SNAPSHOT_S
    assert [client for client, _ in serving.send()] == [B]
    assert serving.told[B].names == {0: set(), 1: set()}
    assert serving.server.next_deadline_s() is None


def test_who_greets_again_gets_a_listing_again(core):
    serving = Serving(core)
    serving.server.take(B, FOLLOW, 0.0)
    serving.run(B, 20)
    assert serving.told[B].num_listings == 2, "one of each group"
    serving.told[B] = Follower()
    serving.server.take(B, FOLLOW, 0.0)
    serving.run(B, 40)
    assert serving.told[B].names == serving.truth()
    assert serving.told[B].num_listings == 2


def test_when_the_last_follower_has_gone_nothing_is_kept(core):
    serving = Serving(core)
    serving.server.take(A, FOLLOW, 0.0)
    serving.server.take(B, FOLLOW, 0.0)
    serving.send()
    serving.server.client_gone(A)
    serving.run(B, 20)
    assert serving.told[B].names == serving.truth()
    serving.server.client_gone(B)
    serving.server.take(A, Hello(PROTOCOL_VERSION), 0.0)
    serving.told[A] = Follower()
    serving.run(A, 40)
    assert core.prefix_feed.take() == []
    assert serving.told[A].names == {}
