"""Hand-over of a stream with its KV: the messages, and when the first engine is left."""

import asyncio
import contextlib
import time
from typing import NamedTuple

import msgspec
import pytest

from cluster.routing.pools import Member
from replicas import async_client
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LendKV,
    LoadKV,
    TokenOutput,
)
from tests.cluster.engines import (
    KEYS,
    Rig,
    ScriptedEngine,
    accepts,
    scripted,
    silent,
    until,
)

PROMPT = list(range(2, 90))
"""With one token two blocks of 32 are full, and the third one is not."""
GAPS = "ttserve_router_migration_gap_seconds_count"


class Stream(NamedTuple):
    """A stream whose engine drains, and its successor, which has been asked."""

    made: Rig
    lender: ScriptedEngine
    heir: ScriptedEngine
    request_id: str
    tokens: list[int]
    reader: asyncio.Future[None]

    async def accept(self, num_cached_tokens=0):
        await self.heir.send(Accepted(self.request_id, 0, 0, num_cached_tokens, 1))

    async def lend(self):
        """Accept, wait until both engines know of the transfer, and return its number."""
        await self.accept()
        await until(lambda: self.heir.received(LoadKV), "the other is to fetch")
        await until(lambda: self.lender.received(LendKV), "the one that has it is to lend")
        return self.heir.received(LoadKV)[-1].epoch

    async def end(self, *, activated):
        """Continue on the successor with these tokens, and end the stream."""
        await until(lambda: self.heir.received(Activate), "the other engine continues")
        assert self.heir.received(Activate)[0].token_ids == [activated]
        await self.heir.send(TokenOutput(self.request_id, len(activated), [9], "length"))
        await asyncio.wait_for(self.reader, 10)
        assert self.tokens == [*activated, 9]

    def count(self, kv):
        return self.made.count(GAPS, model_name="tiny", kv=kv)


@contextlib.asynccontextmanager
async def a_stream(prompt=PROMPT, *, kv_endpoints=("tcp://127.0.0.1:1",)):
    """A stream with one token on a draining engine, and a successor that was asked."""
    engines = ("both", "d1", accepts), ("both", "d2", silent)
    async with scripted(*engines, num_connected=1) as (made, lender, heir):
        tokens = []

        async def follow():
            async for output in made.generate(made.request(prompt)):
                tokens.extend(output.token_ids)

        reader = asyncio.ensure_future(follow())
        await until(lambda: lender.received(AddRequest), "asked")
        request_id = lender.received(AddRequest)[0].request.request_id
        await lender.send(TokenOutput(request_id, 0, [5]))
        await until(lambda: tokens == [5], "a stream")
        described = msgspec.structs.replace(heir.member.description, kv_endpoints=kv_endpoints)
        await made.connect(Member("both", "both-d2", described))
        leaving = lender.snapshot(num_empty_slots=3, draining=True, hands_over=True)
        await lender.send(snapshot=leaving)
        await until(lambda: heir.received(AddRequest), "the other is asked")
        try:
            yield Stream(made, lender, heir, request_id, tokens, reader)
        finally:
            reader.cancel()
            await asyncio.wait({reader})


async def test_a_stream_stays_until_its_successor_has_fetched_its_full_blocks():
    async with a_stream() as stream:
        assert stream.heir.received(AddRequest)[0].token_ids == [[5]]
        epoch = await stream.lend()
        [load], [lend] = stream.heir.received(LoadKV), stream.lender.received(LendKV)
        assert (load.ticket, load.epoch) == (lend.ticket, lend.epoch)
        ticket = KEYS.unseal(load.ticket, time.time())
        assert (ticket.producer_incarnation, ticket.consumer) == ("d1", "d2")
        assert (ticket.num_tokens, ticket.epoch) == (64, epoch)
        await stream.lender.send(TokenOutput(stream.request_id, 1, [6]))
        await until(lambda: stream.tokens == [5, 6], "the stream continues")
        assert not stream.lender.received(Abort)
        assert not stream.heir.received(Activate)
        await stream.heir.send(KVLoaded(stream.request_id, epoch - 1, None))
        await stream.heir.send(KVLoaded(stream.request_id, epoch, None))
        await stream.end(activated=[5, 6])
        await until(lambda: stream.lender.received(Abort), "it is left")
        assert (stream.count("moved"), stream.count("recomputed")) == (1, 0)


@pytest.mark.parametrize("who", ["heir", "lender"])
async def test_where_kv_cannot_be_had_the_other_engine_computes_it(who):
    async with a_stream() as stream:
        epoch = await stream.lend()
        await getattr(stream, who).send(KVLoaded(stream.request_id, epoch, "expired"))
        await stream.end(activated=[5])
        assert (stream.count("moved"), stream.count("recomputed")) == (0, 1)


@pytest.mark.parametrize("why", ["stalled", "quiet", "dead"])
async def test_a_stalled_lender_is_left_without_its_kv(why, monkeypatch):
    monkeypatch.setattr(async_client, "QUIET_S", 0.5)
    async with a_stream() as stream:
        await stream.lend()
        if why == "stalled":
            stream.lender.stalled_s = 6.0
        elif why == "quiet":
            stream.lender.is_silent = True
        else:
            stream.lender.die()
        await stream.end(activated=[5])
        assert stream.count("recomputed") == 1


async def test_an_engine_stalled_before_lending_is_left_at_once():
    async with a_stream() as stream:
        stream.lender.stalled_s = 6.0
        await until(lambda: len(stream.made.pools.stalled) == 1, "it stalls")
        await stream.accept()
        await stream.end(activated=[5])
        assert not stream.lender.received(LendKV)
        assert stream.count("recomputed") == 1


async def test_a_successor_with_all_blocks_cached_fetches_nothing():
    async with a_stream() as stream:
        await stream.accept(num_cached_tokens=64)
        await stream.end(activated=[5])
        assert not stream.lender.received(LendKV)
        assert stream.count("cached") == 1


@pytest.mark.parametrize(
    ("prompt", "kv_endpoints"), [(PROMPT[:20], ("tcp://127.0.0.1:1",)), (PROMPT, None)]
)
async def test_where_nothing_can_be_lent_the_stream_is_handed_over_at_once(prompt, kv_endpoints):
    async with a_stream(prompt, kv_endpoints=kv_endpoints) as stream:
        await stream.accept()
        await stream.end(activated=[5])
        assert not stream.lender.received(LendKV)
        assert stream.count("recomputed") == 1


async def test_a_stream_that_ends_during_its_transfer_ends_on_both_engines():
    async with a_stream() as stream:
        await stream.lend()
        await stream.lender.send(TokenOutput(stream.request_id, 1, [6], "length"))
        await asyncio.wait_for(stream.reader, 10)
        assert stream.tokens == [5, 6]
        await until(lambda: stream.heir.received(Abort), "the other engine got the abort")
        assert not stream.heir.received(Activate)


async def test_a_stream_stays_when_its_successor_dies_while_fetching():
    async with a_stream() as stream:
        await stream.lend()
        stream.heir.die()
        await until(lambda: stream.made.lost == ["d2"], "it is gone")
        await stream.lender.send(TokenOutput(stream.request_id, 1, [6], "length"))
        await asyncio.wait_for(stream.reader, 10)
        assert stream.tokens == [5, 6]
        assert not stream.lender.received(Abort)


async def test_a_stream_stays_when_its_successor_drops_it():
    async with a_stream() as stream:
        await stream.lend()
        await stream.heir.send(TokenOutput(stream.request_id, 1, [], "abort"))
        await until(lambda: stream.heir.received(Abort), "it is left")
        await stream.heir.send(snapshot=stream.heir.snapshot(1))
        await until(lambda: len(stream.heir.received(AddRequest)) == 2, "asked for another slot")
        await stream.lender.send(TokenOutput(stream.request_id, 1, [6], "length"))
        await asyncio.wait_for(stream.reader, 10)
        assert stream.tokens == [5, 6]
