"""An ingress's knowledge of prefix caches, reported by real engines over real sockets."""

import asyncio

import pytest

from cluster.routing.demand import Demand
from cluster.routing.placement import ANY_GROUP, Placement
from cluster.routing.prefixes import ROUTED_S, Prefixes
from kv_transfer.block_hash import PREFIX_CACHE, block_names
from replicas.messages import BlockStored, KVEventBatch
from tests.cluster.engines import (
    BLOCK_SIZE,
    KEYS,
    Rig,
    engine_config,
    make_member,
    prompts,
    rig,
    running,
    until,
)
from tests.kv_groups import one_kv_group

[LONG, OTHER] = prompts(2, (130, 96))
[KEY] = KEYS.derive(PREFIX_CACHE)


def demand(prompt, request_id="r", **fields):
    return Demand(request_id, prompt, **fields)


def names_of(prompt):
    return block_names(demand(prompt).block_hashes(BLOCK_SIZE, KEY))


def told_by(incarnation, group, names, seq=0):
    return incarnation, [KVEventBatch(seq, group, [BlockStored(names)], True)]


def known(*incarnations):
    prefixes = Prefixes(KEYS)
    for incarnation in incarnations:
        prefixes.add(make_member("both", incarnation))
    return prefixes


def test_cached_tokens_are_of_whole_blocks_and_never_the_last_token():
    prefixes = known("a", "b")
    prefixes.take(*told_by("a", 1, names_of(LONG)))
    prefixes.take(*told_by("b", 0, names_of(LONG)[:1]))
    cached = {Placement("a", 1): 4 * BLOCK_SIZE, Placement("b", 0): BLOCK_SIZE}
    assert prefixes.cached_tokens(demand(LONG)) == cached
    cached[Placement("a", 1)] = 3 * BLOCK_SIZE
    assert prefixes.cached_tokens(demand(LONG[:128])) == cached, "the last token is computed"
    assert prefixes.cached_tokens(demand(LONG, cache_salt="other")) == {}
    assert prefixes.cached_tokens(demand(OTHER)) == {}


def test_engines_of_several_block_sizes_are_kept_apart():
    prefixes = known("a")
    groups = one_kv_group(9, 64, 16)
    prefixes.add(make_member("both", "big", kv_groups=groups))
    prefixes.take(*told_by("a", 0, names_of(LONG)))
    prefixes.take(*told_by("big", 0, block_names(demand(LONG).block_hashes(64, KEY))))
    cached = {Placement("a", 0): 128, Placement("big", 0): 128}
    assert prefixes.cached_tokens(demand(LONG)) == cached


def test_a_prompt_is_not_hashed_if_placement_ignores_caches():
    prefixes = Prefixes(KEYS, is_asked=False)
    prefixes.add(make_member("both", "a"))
    prefixes.note_routed(demand(LONG), Placement("a", 0), 0.0)
    assert prefixes.cached_tokens(demand(LONG)) == {}


def test_a_lost_engines_blocks_are_forgotten():
    prefixes = known("a", "b")
    for name in ("a", "b"):
        prefixes.take(*told_by(name, 0, names_of(LONG)))
    prefixes.remove("a")
    assert prefixes.cached_tokens(demand(LONG)).keys() == {Placement("b", 0)}
    assert not prefixes.take(*told_by("a", 0, names_of(LONG))), "the engine is not known any more"
    assert prefixes.cached_tokens(demand(LONG)).keys() == {Placement("b", 0)}


def test_prompts_sent_to_an_engine_without_reports_count_for_a_while():
    prefixes = known("a", "b")
    prefixes.note_routed(demand(LONG), Placement("a", 1), 1.0)
    prefixes.note_routed(demand(OTHER), Placement("b", ANY_GROUP), 2.0)
    prefixes.expire(ROUTED_S)
    assert prefixes.cached_tokens(demand(LONG)) == {Placement("a", 1): 128}
    assert prefixes.cached_tokens(demand(OTHER)) == {Placement("b", ANY_GROUP): 64}
    prefixes.expire(1.0 + ROUTED_S)
    assert prefixes.cached_tokens(demand(LONG)) == {}
    assert prefixes.cached_tokens(demand(OTHER)) == {Placement("b", ANY_GROUP): 64}


def test_nothing_is_guessed_of_an_engine_that_tells():
    prefixes = known("a")
    prefixes.take(*told_by("a", 0, []))
    prefixes.note_routed(demand(LONG), Placement("a", 0), 1.0)
    prefixes.note_routed(demand(LONG), Placement("a", ANY_GROUP), 1.0)
    assert prefixes.cached_tokens(demand(LONG)) == {}


def test_a_hot_prefix_does_not_count_until_requests_end_or_copies_exist():
    """Groups of four slots: one request with a prefix is all that a holder should have."""
    prefixes = known("a", "b")
    prefixes.take(*told_by("a", 0, names_of(LONG)))
    first, second, other = demand(LONG, "1"), demand(LONG, "2"), demand(OTHER, "3")
    assert prefixes.cached_tokens(other) == {}
    for _ in range(2):
        assert prefixes.cached_tokens(first) == {Placement("a", 0): 128}, "asking again is no more"
    assert prefixes.cached_tokens(second) == {}
    prefixes.end(first)
    assert prefixes.cached_tokens(second) == {Placement("a", 0): 128}
    assert prefixes.cached_tokens(first) == {}
    prefixes.take(*told_by("b", 0, names_of(LONG)))
    both = {Placement("a", 0): 128, Placement("b", 0): 128}
    assert prefixes.cached_tokens(first) == both
    assert prefixes.cached_tokens(demand(LONG, "4")) == both, "no holder is left"
    prefixes.take(*told_by("b", 0, [], seq=1))
    prefixes.remove("b")
    assert prefixes.cached_tokens(first) == {Placement("a", 0): 128}
    for request_id in "1234":
        prefixes.end(demand(LONG, request_id))
        prefixes.end(demand(LONG, request_id))
    assert prefixes.num_counted == 0


# --- real engines ---------------------------------------------------------------------------------


def cached(made, prompt):
    return dict(made.fleet.prefixes.cached_tokens(demand(prompt)))


@pytest.mark.process
def test_real_engines_report_their_blocks_to_every_ingress():
    async def run(first, second):
        async with rig(first, second) as made, rig(first) as late:
            await made.tokens(LONG)
            # Of the prompt and the output as many whole blocks are full.
            await until(lambda: cached(made, LONG), "reported")
            [(place, num_tokens)] = cached(made, LONG).items()
            assert num_tokens == 128
            engine = first if place.incarnation == first.incarnation else second
            output = await made.engine_metrics(engine)
            assert output.groups[place.dp_group].prompt_tokens == len(LONG)
            again = Rig()
            await again.connect(first.member, second.member)
            await until(lambda: cached(again, LONG) == {place: 128}, "a listing")
            if engine is first:
                await until(lambda: cached(late, LONG) == {place: 128}, "reported as well")
            engine.kill()
            await until(lambda: cached(again, LONG) == {}, "it died with what it held")
            await again.client.close()

    both = engine_config("both")
    with running(("both", both), ("both", both)) as engines:
        asyncio.run(run(*engines))


class DeafRig(Rig):
    """A rig that can lose batches of prefix cache events.

    Attributes:
        loses: Whether the next batches are lost.
        num_lost: Number of lost batches.
    """

    def __init__(self):
        self.loses, self.num_lost = False, 0
        super().__init__()

    def _make_client(self, on_snapshot, on_dead, on_moves, on_kv_events):
        def take(incarnation, batches):
            if self.loses and batches:
                self.loses, self.num_lost = False, len(batches)
                return False
            return on_kv_events(incarnation, batches)

        return super()._make_client(on_snapshot, on_dead, on_moves, take)


@pytest.mark.process
async def test_lost_events_are_repaired_by_a_listing():
    [first, lost, last] = prompts(3, (130, 96, 64))
    with running(("both", engine_config("both", tt_data_parallel=1))) as [engine]:
        made = DeafRig()
        await made.connect(engine.member)
        try:
            await made.tokens(first)
            await until(lambda: cached(made, first), "the engine tells what it holds")
            made.loses = True
            await made.tokens(lost)
            await until(lambda: made.num_lost, "events are lost")
            await made.tokens(last)
            for prompt in (first, lost, last):
                await until(lambda p=prompt: cached(made, p), "the listing has it")
        finally:
            await made.client.close()
