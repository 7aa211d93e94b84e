"""A replica that is told to stop: it goes when nothing of it is wanted any more, or in the end."""

import asyncio

import pytest

from cluster.routing.tickets import TicketOffice
from replicas.messages import AddRequest, EngineRequest, LoadKV, TokenOutput
from tests.cluster.engines import KEYS, engine_config, rig, running, sampling, until
from tests.cluster.routing.test_router_orders import (
    FIRST,
    PROMPT,
    cluster,
    decodes,
    fill,
    prefills,
)
from tests.cluster.routing.test_router_orders import tokens as tokens_of

NUM_BLOCKS = 64
"""What `make_member` gives a group."""


async def keep_kv(made, engine, request_id):
    """Let an engine compute a prompt, and keep its KV for somebody who does not come."""
    request = EngineRequest(request_id, list(range(2, 102)), sampling(4))
    office = TicketOffice(KEYS)
    ticket = office.seal(office.begin(request, 1, engine.description), "nobody")
    message = AddRequest(request, "prefill", -1, ticket)
    stream = made.client.open_stream(engine.incarnation, request_id, message)
    while not isinstance(await stream.get(), TokenOutput):
        pass
    return stream


@pytest.mark.process
async def test_prefill_replica_stays_until_the_last_lease_is_over():
    with running(("prefill", engine_config("prefill"))) as [engine]:
        async with rig(engine) as made:
            stream = await keep_kv(made, engine, "kept")
            draining = asyncio.ensure_future(asyncio.to_thread(engine.handle.drain, 20.0))
            await until(lambda: not made.pools.prefill_views(), "it drains")
            assert not await asyncio.to_thread(engine.handle.drain, 1.0), "blocks are lent"
            assert not draining.done()
            stream.close(abort=True)
            assert await draining


@pytest.mark.process
async def test_draining_does_not_wait_for_a_dead_replica():
    with running(("prefill", engine_config("prefill"))) as [engine]:
        async with rig(engine) as made:
            await keep_kv(made, engine, "kept")
            draining = asyncio.ensure_future(asyncio.to_thread(engine.handle.drain, 60.0))
            await until(lambda: not made.pools.prefill_views(), "it drains")
            engine.kill()
            assert not await asyncio.wait_for(draining, 20.0)
        assert not engine.handle.drain(60.0), "nor one that is dead already"


async def test_a_draining_replica_serves_its_kv_and_gets_no_new_requests():
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
