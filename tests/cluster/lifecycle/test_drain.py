"""A replica that is told to stop: it goes when nothing of it is wanted any more, or in the end."""

import asyncio

from cluster.lifecycle.drain import drain_engine, is_idle
from replicas.messages import (
    AddRequest,
    Drain,
    EngineSnapshot,
    GroupSnapshot,
    LoadKV,
)
from tests.cluster.engines import ScriptedEngine, rig, until
from tests.cluster.routing.test_router_orders import (
    FIRST,
    PROMPT,
    cluster,
    decodes,
    fill,
    prefills,
    run,
)
from tests.cluster.routing.test_router_orders import tokens as tokens_of

NUM_BLOCKS = 64
"""What `make_member` gives a group."""


def silent(_message):
    return []


def test_prefill_replica_stays_until_the_last_lease_has_been_served():
    async def scenario():
        async with ScriptedEngine("prefill", "p", silent) as engine:
            draining = asyncio.ensure_future(drain_engine(engine.member.description, 20))
            await until(lambda: engine.received(Drain), "it is told")
            for num_free in (NUM_BLOCKS - 4, NUM_BLOCKS - 1):
                await engine.send(snapshot=engine.snapshot(4, num_free, draining=True))
            # A second client's connection shows that the first has been given the snapshots.
            async with rig() as made:
                await made.connect(engine.member)
                assert not draining.done(), "blocks are lent"
            await engine.send(snapshot=engine.snapshot(4, NUM_BLOCKS, draining=True))
            assert await draining

    run(scenario)


def test_prefill_replica_whose_leases_do_not_end_goes_at_the_deadline():
    async def scenario():
        async with ScriptedEngine("prefill", "p", silent) as engine:
            draining = asyncio.ensure_future(drain_engine(engine.member.description, 0.3))
            await until(lambda: engine.received(Drain), "it is told")
            await engine.send(snapshot=engine.snapshot(4, NUM_BLOCKS - 1, draining=True))
            assert not await draining

    run(scenario)


def test_replica_that_dies_while_it_drains_is_not_waited_for():
    async def scenario():
        async with ScriptedEngine("prefill", "p", silent) as engine:
            draining = asyncio.ensure_future(drain_engine(engine.member.description, 20))
            await until(lambda: engine.received(Drain), "it is told")
            engine.die()
            assert not await draining

    run(scenario)


def test_idle_means_that_nothing_runs_waits_is_reserved_or_lent():
    idle = GroupSnapshot(4, NUM_BLOCKS, 0, 0, 0)

    def of(*groups, num_waiting=0):
        return is_idle(EngineSnapshot(0, True, num_waiting, 0, 0, list(groups)), NUM_BLOCKS)

    assert of(idle, idle)
    assert not of(idle, num_waiting=1)
    for busy in (
        GroupSnapshot(3, NUM_BLOCKS, 1, 0, 0),
        GroupSnapshot(3, NUM_BLOCKS, 0, 1, 0),
        GroupSnapshot(4, NUM_BLOCKS - 1, 0, 0, 0),
    ):
        assert not of(idle, busy)


def test_kv_that_a_draining_replica_keeps_is_fetched_and_nothing_new_is_asked_of_it():
    async def scenario():
        engines = ("prefill", "p1", prefills), ("prefill", "p2", prefills), ("decode", "d", decodes)
        async with cluster(*engines) as (made, draining, other, decode):
            await fill(made, decode)
            outputs = made.generate(made.request(PROMPT))
            assert (await anext(outputs)).token_ids == [FIRST]
            rest = asyncio.ensure_future(tokens_of(outputs))
            await until(lambda: made.num_queued == 1, "it waits for a slot")
            await draining.send(snapshot=draining.snapshot(4, NUM_BLOCKS - 2, draining=True))
            await until(lambda: len(made.pools.prefill_views()) == 1, "known")
            await decode.send(snapshot=decode.snapshot(4))
            assert await rest == [6, 7]
            assert len(decode.received(LoadKV)) == 1
            assert await made.tokens(PROMPT) == [FIRST, 6, 7]
            assert len(draining.received(AddRequest)) == len(other.received(AddRequest)) == 1

    run(scenario)
