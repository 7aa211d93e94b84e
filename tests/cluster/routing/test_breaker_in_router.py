"""A failing engine gets no more requests through the router until a probe succeeds."""

import asyncio

import pytest

from cluster.errors import BadRequestError, InternalError, SaturatedError
from cluster.routing import breaker
from cluster.routing.breaker import MAX_OPEN_S, THRESHOLD
from replicas.messages import (
    BAD_GRAMMAR,
    GRAMMARS_BUSY,
    LAPSED,
    Accepted,
    AddRequest,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.cluster.engines import (
    scripted,
    until,
)


def answering(error):
    """Accept every request and end it with a token, or with the error in `error`."""

    def answer(message):
        if not isinstance(message, AddRequest):
            return []
        request_id = message.request.request_id
        accepted = Accepted(request_id, 0, 0, 0, 1)
        if error:
            return [accepted, TokenOutput(request_id, 0, [], "error", error=error[0])]
        return [accepted, TokenOutput(request_id, 0, [5], "length")]

    return answer


async def preferred(made, engine, other):
    """Connect both; the first has more room, so it gets each request that comes alone."""
    await made.connect(engine.member)
    await made.connect(other.member)
    await engine.send(snapshot=engine.snapshot(8))
    await other.send(snapshot=other.snapshot(1))
    await until(
        lambda: {v.num_empty_slots for v in made.pools.decode_views()} == {8, 1},
        "both snapshots came",
    )


async def test_an_engine_that_fails_every_request_is_left_and_tried_again_with_one():
    error = ["its device is broken"]
    engines = ("both", "bad", answering(error)), ("both", "good", answering([]))
    async with scripted(*engines, num_connected=0, policy="most_empty_slots") as (made, bad, good):
        await preferred(made, bad, good)
        for _ in range(THRESHOLD):
            with pytest.raises(InternalError, match="its device is broken"):
                await made.tokens([1])
        assert made.pools.breakers.state("bad") == "open"
        for _ in range(3):
            assert await made.tokens([1]) == [5]
        assert len(bad.received(AddRequest)) == THRESHOLD
        error.clear()
        assert made.pools.expire(asyncio.get_running_loop().time() + MAX_OPEN_S)
        assert await made.tokens([1]) == [5]
        assert len(bad.received(AddRequest)) == THRESHOLD + 1
        assert made.pools.breakers.state("bad") == "closed"


async def test_the_only_engine_is_asked_however_often_it_fails():
    error = ["its device is broken"]
    async with scripted(("both", "bad", answering(error))) as (made, _bad):
        for _ in range(3 * THRESHOLD):
            with pytest.raises(InternalError):
                await made.tokens([1])
        error.clear()
        assert await made.tokens([1]) == [5]
        assert made.pools.breakers.state("bad") == "closed"


async def test_a_request_aborted_without_a_token_does_not_close_a_breaker():
    """As by a pause of the engine: it tells nothing of whether the engine works."""
    ends = [("error", "its device is broken")]

    def answer(message):
        if not isinstance(message, AddRequest):
            return []
        request_id, (reason, error) = message.request.request_id, ends[0]
        accepted = Accepted(request_id, 0, 0, 0, 1)
        return [accepted, TokenOutput(request_id, 0, [], reason, error=error)]

    async with scripted(("both", "bad", answer)) as (made, _bad):
        for _ in range(THRESHOLD - 1):
            with pytest.raises(InternalError):
                await made.tokens([1])
        ends[0] = ("abort", None)
        assert await made.tokens([1]) == []
        assert made.pools.breakers.state("bad") == "closed"
        ends[0] = ("error", "its device is broken")
        with pytest.raises(InternalError):
            await made.tokens([1])
        assert made.pools.breakers.state("bad") == "open"


async def test_a_lapsed_reservation_is_no_failure_of_an_engine():
    async with scripted(("both", "e", answering([LAPSED]))) as (made, _engine):
        for _ in range(2 * THRESHOLD):
            with pytest.raises(Exception, match="lapsed"):
                await made.tokens([1])
        assert made.pools.breakers.state("e") == "closed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (f"{BAD_GRAMMAR}: structured_outputs.regex is wrong", BadRequestError),
        (GRAMMARS_BUSY, SaturatedError),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_no_failure_of_an_engine(error, kind):
    async with scripted(("both", "e", answering([error]))) as (made, _engine):
        for _ in range(2 * THRESHOLD):
            with pytest.raises(kind) as caught:
                await made.tokens([1])
        assert caught.value.param == ("structured_outputs" if kind is BadRequestError else None)
        assert made.pools.breakers.state("e") == "closed"


async def test_an_engine_whose_connection_keeps_breaking_is_shut_out():
    engines = ("both", "e", answering([])), ("both", "other", answering([]))
    async with scripted(*engines, num_connected=0, policy="most_empty_slots") as (
        made,
        engine,
        other,
    ):
        await made.connect(other.member)
        for _ in range(THRESHOLD):
            await made.connect(engine.member)
            [link] = [x for i, x in made.client._links.items() if i == "e"]
            made.client._lost(link, "its connection broke")
        await made.connect(engine.member)
        assert {view.incarnation for view in made.pools.decode_views()} == {"other"}


async def test_a_breaker_half_opens_on_time_while_discovery_hangs(monkeypatch):
    """Discovery may never answer, and a replica that is gone is no longer shut out."""
    monkeypatch.setattr(breaker, "FIRST_OPEN_S", 0.2)
    error = ["its device is broken"]
    engines = ("both", "bad", answering(error)), ("both", "good", answering([]))
    async with scripted(*engines, num_connected=0, policy="most_empty_slots") as (made, bad, good):
        await preferred(made, bad, good)
        for _ in range(THRESHOLD):
            with pytest.raises(InternalError):
                await made.tokens([1])
        assert made.pools.num_shut == 1
        await until(lambda: made.pools.breakers.state("bad") == "half_open", "due")
        with pytest.raises(InternalError):
            await made.tokens([1])
        assert made.pools.breakers.state("bad") == "open"
        await until(lambda: made.pools.breakers.state("bad") == "half_open", "due again")
        bad.die()
        await until(lambda: made.lost == ["bad"], "lost")
        assert made.pools.num_shut == 0


async def test_a_successful_probe_wakes_queued_requests():
    """The other engine is full and the probe continues: no other event reports the room."""
    error = ["its device is broken"]
    fails = answering(error)

    def answer(message):
        if error or not isinstance(message, AddRequest) or message.request.sampling.max_tokens == 1:
            return fails(message)
        request_id = message.request.request_id
        return [Accepted(request_id, 0, 0, 0, 1), TokenOutput(request_id, 0, [5])]

    engines = ("both", "bad", answer), ("both", "full", lambda _message: [])
    async with scripted(*engines, num_connected=0, policy="most_empty_slots") as (made, bad, full):
        await preferred(made, bad, full)
        for _ in range(THRESHOLD):
            with pytest.raises(InternalError):
                await made.tokens([1])
        await full.send(snapshot=full.snapshot(0))
        await until(lambda: not made.pools.decode_views()[0].num_empty_slots, "full")
        error.clear()
        probe = asyncio.create_task(made.tokens([1], SamplingParams(max_tokens=9)))
        await until(lambda: len(made.router.queue) == 1, "the probe waits")
        waiting = asyncio.create_task(made.tokens([1], SamplingParams(max_tokens=1)))
        await until(lambda: len(made.router.queue) == 2, "both wait")
        made.fleet._expire(asyncio.get_running_loop().time() + MAX_OPEN_S)
        assert await waiting == [5]
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
