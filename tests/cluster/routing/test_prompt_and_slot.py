"""Prompt and slot are asked for together: prefill may answer before the decode engine."""

import asyncio

import pytest

from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    LoadKV,
    Refused,
    TokenOutput,
)
from tests.cluster.engines import (
    accepts,
    prefills,
    refusing,
    sampling,
    scripted,
    silent,
    until,
)

PROMPT = list(range(2, 66))

pytestmark = pytest.mark.process


def request_id(engine):
    """Return the id of the last request that an engine was asked for."""
    return engine.received(AddRequest)[-1].request.request_id


async def accept(engine):
    """Send the answer of a decode engine that has a slot."""
    await until(lambda: engine.received(AddRequest), "asked")
    await engine.send(Accepted(request_id(engine), 0, 0, 0, 1))


def told(engine):
    """Return the messages that an engine got, in their order."""
    return [type(message) for message in engine.messages]


async def end(engine, task):
    """Let a started decode engine give its last token."""
    await until(lambda: engine.received(Activate), "it may start")
    assert engine.received(Activate)[-1].token_ids == [[5]]
    await engine.send(TokenOutput(request_id(engine), 1, [6], "length"))
    assert await asyncio.wait_for(task, 5) == [5, 6]


async def test_prompt_is_computed_while_the_decode_engine_has_not_answered():
    engines = ("prefill", "p", prefills), ("decode", "d", silent)
    async with scripted(*engines) as (made, prefill, decode):
        task = asyncio.ensure_future(made.tokens(PROMPT))
        await until(lambda: prefill.received(AddRequest), "the prompt is asked for")
        await until(lambda: [i for i, _ in made.pools.holds()] == ["d"], "and answered")
        await until(lambda: decode.messages, "the slot is asked for beside it")
        assert told(decode) == [AddRequest]
        await accept(decode)
        await end(decode, task)
        assert told(decode)[:3] == [AddRequest, LoadKV, Activate]


async def test_refused_slot_costs_the_prompt_that_was_begun_with_it():
    refuse = refusing("no_slot")
    engines = ("prefill", "p", accepts), ("decode", "d", refuse)
    async with scripted(*engines, order="decode_first") as (made, prefill, decode):
        task = asyncio.ensure_future(made.tokens(PROMPT))
        await until(lambda: made.num_queued == 1, "it waits")
        await until(lambda: prefill.received(Abort), "prefill got the abort")
        assert told(prefill) == [AddRequest, Abort]
        assert not made.pools.holds()
        decode.answer = accepts
        prefill.answer = prefills
        await decode.send(snapshot=decode.snapshot(1))
        await end(decode, task)
        first, second = (m.ticket for m in prefill.received(AddRequest))
        assert first != second
        assert decode.received(LoadKV)[-1].ticket == second


@pytest.mark.parametrize("trouble", ["dies", "stalls", "refuses"])
async def test_prefill_engine_lost_before_the_decode_engine_answers_costs_another_one(trouble):
    engines = ("prefill", "p", silent), ("prefill", "q", silent), ("decode", "d", silent)
    async with scripted(*engines) as (made, one, other, decode):
        task = asyncio.ensure_future(made.tokens(PROMPT))
        await until(lambda: one.messages or other.messages, "the prompt is asked for")
        asked, spare = (one, other) if one.messages else (other, one)
        spare.answer = prefills
        if trouble == "dies":
            asked.die()
            await until(lambda: made.lost, "known")
        elif trouble == "stalls":
            asked.stalled_s = 5.5
            await until(lambda: len(made.pools.stalled) == 1, "known")
        else:
            await asked.send(Refused(request_id(asked), "queue_full", "no"))
        await accept(decode)
        await end(decode, task)
        assert len(spare.received(AddRequest)) == 1
        assert made.count("ttserve_router_retries_total", reason="prefill") == 1


async def test_prefill_engine_that_is_late_while_the_decode_engine_stalls_costs_another_one(
    monkeypatch,
):
    monkeypatch.setattr("cluster.routing.leg.ANSWER_S", 1.0)
    engines = ("prefill", "p", silent), ("decode", "d", silent)
    async with scripted(*engines) as (made, prefill, decode):
        task = asyncio.ensure_future(made.tokens(PROMPT))
        await until(lambda: prefill.messages, "the prompt is asked for")
        decode.stalled_s = 5.5
        await until(lambda: len(made.pools.stalled) == 1, "known")
        await until(lambda: prefill.received(Abort), "it had its time")
        decode.stalled_s = 0.0
        await until(lambda: len(made.pools.stalled) == 0, "known")
        prefill.answer = prefills
        await accept(decode)
        await until(lambda: decode.received(Activate), "it may start")
        await decode.send(TokenOutput(request_id(decode), 0, [6], "length"))
        assert await asyncio.wait_for(task, 5) == [6]


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_reservation_that_its_engine_drops_ends_the_request_before_its_prompt(num_choices):
    engines = ("prefill", "p", silent), ("decode", "d", silent)
    async with scripted(*engines) as (made, prefill, decode):
        request = made.request(PROMPT, sampling(n=num_choices))
        task = asyncio.ensure_future(outputs_of(made, request))
        await accept(decode)
        await until(lambda: decode.received(LoadKV), "its prompt is waited for")
        await decode.send(TokenOutput(request.request_id, 0, [], "abort"))
        outputs = await asyncio.wait_for(task, 5)
        assert [(o.choice, o.index, o.token_ids, o.finish_reason) for o in outputs] == [
            (choice, 0, [], "abort") for choice in range(num_choices)
        ]
        await until(lambda: prefill.received(Abort), "nothing computes the prompt")
        assert not decode.received(Activate)


async def outputs_of(made, request):
    """Return all outputs of a request."""
    return [output async for output in made.generate(request)]
