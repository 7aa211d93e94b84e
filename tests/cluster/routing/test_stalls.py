"""Engines that live without progress: their requests move, and no new ones come."""

import asyncio
import contextlib
import time
from typing import NamedTuple

import pytest

from cluster.errors import QueueTimeoutError, ReplicaLostError
from cluster.routing import leg
from cluster.routing.stalls import Stalls
from replicas import async_client
from replicas.config import SimulatedMeshConfig
from replicas.faults import Fault
from replicas.generators.simulated.tokens import expected_tokens
from replicas.messages import Abort, Accepted, Activate, AddRequest, Refused, TokenOutput
from tests.cluster.engines import (
    Rig,
    ScriptedEngine,
    accepts,
    engine_config,
    prefills,
    rig,
    running,
    sampling,
    scripted,
    silent,
    until,
    until_idle,
)

pytestmark = pytest.mark.process


def decodes(message):
    """Accept, and once activated give the second and last token."""
    if isinstance(message, Activate):
        num_had = len(message.token_ids[0]) if message.token_ids else 0
        return [TokenOutput(message.request_id, num_had, [6], "length")]
    return accepts(message)


def asked(engine):
    return len(engine.received(AddRequest))


def ask(made):
    return asyncio.ensure_future(made.tokens([1, 2, 3]))


async def stall(made, engine, stalled_s=5.5):
    """Let an engine stall, or recover, and wait until the router knows."""
    engine.stalled_s = stalled_s
    await until(lambda: bool(made.pools.stalled) == (stalled_s > 0), "known")


async def told_once(engine, request_id):
    """Wait until an engine that was left got the abort, which has a socket of its own."""
    await until(lambda: engine.received(Abort), "the abort arrived")
    assert engine.received(Abort) == [Abort([request_id])]


def answer_of(task):
    return asyncio.wait_for(task, 10)


# --- scripted engines ------------------------------------------------------------------------


async def test_a_stalled_prefill_engine_is_replaced():
    engines = ("prefill", "p1", accepts), ("prefill", "p2", prefills), ("decode", "d", decodes)
    async with scripted(*engines, policy="most_empty_slots") as (made, hung, other, decode):
        task = ask(made)
        await until(lambda: asked(hung), "asked")
        await stall(made, hung)
        assert await answer_of(task) == [5, 6]
        assert asked(other) == asked(decode) == 1
        await until(lambda: hung.received(Abort), "the hung engine got the abort")
        assert made.count("ttserve_router_stalled_legs_total", leg="prefill") == 1
        assert await answer_of(ask(made)) == [5, 6]
        assert asked(hung) == 1, "it gets nothing new"
        await stall(made, hung, 0.0)
        task = ask(made)
        await until(lambda: asked(hung) == 2, "it is asked again")
        task.cancel()
        await asyncio.wait({task})


async def test_the_last_prefill_engine_that_stalls_costs_the_decode_engine_the_prompt():
    engines = ("prefill", "p", accepts), ("decode", "d", decodes)
    async with scripted(*engines) as (made, hung, decode):
        task = ask(made)
        await until(lambda: asked(hung), "asked")
        await stall(made, hung)
        assert await answer_of(task) == [6]
        [activated] = decode.received(Activate)
        assert activated.token_ids == []


@pytest.mark.parametrize("answer", [silent, accepts])
async def test_a_decode_engine_stalled_before_its_first_token_is_replaced(answer):
    engines = ("both", "d1", answer), ("both", "d2", silent)
    async with scripted(*engines, num_connected=1) as (made, hung, other):
        task = ask(made)
        await until(lambda: asked(hung), "asked")
        await made.connect(other.member)
        await stall(made, hung)
        await until(lambda: asked(other), "the other is asked")
        request_id = other.received(AddRequest)[0].request.request_id
        await hung.send(TokenOutput(request_id, 0, [9], "length"))
        await other.send(Accepted(request_id, 0, 0, 0, 1))
        await other.send(TokenOutput(request_id, 0, [5], "length"))
        assert await answer_of(task) == [5], "late output of the hung engine is ignored"
        await told_once(hung, request_id)
        assert made.count("ttserve_router_stalled_legs_total", leg="decode") == 1


@pytest.mark.parametrize("old", ["accepted", "refused"])
async def test_a_late_answer_of_an_engine_that_was_left_hangs_no_request(old):
    engines = ("both", "d1", silent), ("both", "d2", accepts)
    async with scripted(*engines, num_connected=1) as (made, hung, other):
        task = ask(made)
        await until(lambda: asked(hung), "asked")
        await made.connect(other.member)
        await stall(made, hung)
        await until(lambda: asked(other), "the other is asked")
        await stall(made, hung, 0.0)
        other.die()
        await until(lambda: asked(hung) == 2, "it is asked again")
        request_id = hung.received(AddRequest)[0].request.request_id
        answers = [Accepted(request_id, 0, 0, 0, 1), Refused(request_id, "no_slot", "full")]
        # First its answer to the old question, then to the new one.
        for answer in answers if old == "accepted" else answers[::-1]:
            await hung.send(answer)
            await hung.send(TokenOutput(request_id, 0, [4], "length"))
        if old == "accepted":
            await hung.send(snapshot=hung.snapshot(num_empty_slots=4))
            await until(lambda: asked(hung) == 3, "it is asked again")
            await hung.send(Accepted(request_id, 0, 0, 0, 2))
            await hung.send(TokenOutput(request_id, 0, [5], "length"))
        assert await answer_of(task) == [5 if old == "accepted" else 4]


async def test_a_reservation_on_a_stalled_engine_is_repeated_elsewhere():
    engines = ("prefill", "p", accepts), ("decode", "d1", accepts), ("decode", "d2", decodes)
    async with scripted(*engines, num_connected=2) as (made, prefill, hung, other):
        task = ask(made)
        await until(lambda: asked(prefill), "prefill is asked")
        await made.connect(other.member)
        await stall(made, hung)
        await until(lambda: asked(prefill) == 2, "prefill is asked again")
        request_id = prefill.received(AddRequest)[0].request.request_id
        await prefill.send(TokenOutput(request_id, 0, [5]))
        assert await answer_of(task) == [5, 6]
        assert asked(other) == 1


async def stream_on(made, engine):
    """Return the outputs and the id of a request that has a token of an engine."""
    outputs = made.generate(made.request([1, 2, 3]))
    first = asyncio.ensure_future(anext(outputs))
    await until(lambda: asked(engine), "asked")
    request_id = engine.received(AddRequest)[0].request.request_id
    await engine.send(TokenOutput(request_id, 0, [5]))
    assert (await first).token_ids == [5]
    return outputs, request_id


async def rest_of(outputs):
    return [token async for output in outputs for token in output.token_ids]


async def test_a_migrated_stream_ignores_late_tokens_of_its_first_engine():
    engines = ("both", "d1", accepts), ("both", "d2", accepts)
    async with scripted(*engines, num_connected=1) as (made, hung, other):
        outputs, request_id = await stream_on(made, hung)
        await made.connect(other.member)
        rest = asyncio.ensure_future(rest_of(outputs))
        await stall(made, hung)
        await until(lambda: other.received(Activate), "the other engine continues")
        assert other.received(Activate)[0].token_ids == [[5]]
        hung.stalled_s = 0.0
        await hung.send(TokenOutput(request_id, 1, [9], "length"))
        await until(lambda: not made.pools.stalled, "it moves again")
        await other.send(TokenOutput(request_id, 1, [6], "length"))
        assert await answer_of(rest) == [6]
        await told_once(hung, request_id)
        assert made.count("ttserve_router_migrations_total", reason="stalled") == 1


async def test_a_stream_stays_on_a_stalled_engine_until_another_has_room():
    async with scripted(("both", "d1", accepts)) as (made, hung):
        outputs, request_id = await stream_on(made, hung)
        rest = asyncio.ensure_future(rest_of(outputs))
        await stall(made, hung)
        await asyncio.sleep(0.5)
        assert not rest.done()
        async with ScriptedEngine("both", "d2", decodes) as other:
            await made.connect(other.member)
            assert await answer_of(rest) == [6]
            await told_once(hung, request_id)


async def test_events_from_before_an_engine_was_left_are_ignored_when_it_is_asked_again():
    """An engine stalls, is left, and is asked again: an old output comes before its answer."""

    engines = ("both", "d1", accepts), ("both", "d2", accepts)
    async with scripted(*engines, num_connected=1) as (made, hung, other):
        outputs, request_id = await stream_on(made, hung)
        await made.connect(other.member)
        rest = asyncio.ensure_future(rest_of(outputs))
        await stall(made, hung)
        await until(lambda: other.received(Activate), "the other engine continues")
        hung.answer = silent
        hung.stalled_s = 0.0
        await until(lambda: not made.pools.stalled, "it moves again")
        other.die()
        await until(lambda: asked(hung) == 2, "it is asked again")
        await hung.send(TokenOutput(request_id, 7, [9], "length"))
        await hung.send(Accepted(request_id, 0, 0, 0, 2))
        await until(lambda: hung.received(Activate), "the stream continues")
        await hung.send(TokenOutput(request_id, 1, [6], "length"))
        assert await answer_of(rest) == [6]


async def test_without_another_engine_requests_wait_for_recovery_or_a_new_one():
    async with scripted(("both", "d1", accepts)) as (made, hung):
        early = ask(made)
        await until(lambda: asked(hung), "asked")
        await stall(made, hung)
        late = ask(made)
        await until(lambda: made.num_queued == 1, "queued")
        await asyncio.sleep(1.0)
        assert (asked(hung), made.num_queued, early.done()) == (1, 1, False)

        def finishes(message):
            accepted = accepts(message)
            tokens = [TokenOutput(e.request_id, 0, [5], "length") for e in accepted]
            return accepted + tokens

        async with ScriptedEngine("both", "d2", finishes) as other:
            await made.connect(other.member)
            assert await answer_of(asyncio.gather(early, late)) == [[5], [5]]
            await stall(made, hung, 0.0)


async def test_waits_for_a_stalled_engine_end_at_the_queues_timeout():
    async with scripted(("both", "d", accepts), queue_timeout_s=0.5) as (made, hung):
        await stall(made, hung)
        with pytest.raises(QueueTimeoutError):
            await answer_of(ask(made))


async def test_an_engine_that_is_busy_is_not_given_up():
    engines = ("prefill", "p1", accepts), ("prefill", "p2", prefills), ("decode", "d", decodes)
    async with scripted(*engines, num_connected=0) as (made, busy, other, decode):
        await made.connect(busy.member, decode.member)
        task = ask(made)
        await until(lambda: asked(busy), "asked")
        await made.connect(other.member)
        await asyncio.sleep(2.0)
        request_id = busy.received(AddRequest)[0].request.request_id
        await busy.send(TokenOutput(request_id, 0, [5]))
        assert await answer_of(task) == [5, 6]
        assert asked(other) == 0


async def test_an_engine_that_never_answers_is_given_up_after_a_time(monkeypatch):
    monkeypatch.setattr(leg, "ANSWER_S", 0.3)
    engines = [
        ("prefill", "p1", silent),
        ("prefill", "p2", prefills),
        ("decode", "d1", silent),
        ("decode", "d2", decodes),
    ]
    async with scripted(*engines) as (made, mute, other, deaf, decode):
        assert await answer_of(ask(made)) == [5, 6]
        assert [asked(engine) for engine in (mute, other, deaf, decode)] == [1, 1, 1, 1]


@pytest.mark.parametrize("is_heard", [False, True])
async def test_a_stalled_engine_is_not_late_before_it_recovers(is_heard, monkeypatch):
    monkeypatch.setattr(leg, "ANSWER_S", 1.5)
    async with scripted(("both", "d", silent), max_attempts=1) as (made, hung):
        task = ask(made)
        await until(lambda: asked(hung), "asked")
        await stall(made, hung)
        await asyncio.sleep(2.5)
        assert (task.done(), asked(hung)) == (False, 1)
        if is_heard:
            request_id = hung.received(AddRequest)[0].request.request_id
            await hung.send(Accepted(request_id, 0, 0, 0, 1))
            await hung.send(TokenOutput(request_id, 0, [5], "length"))
            assert await answer_of(task) == [5]
        await stall(made, hung, 0.0)
        if not is_heard:
            with pytest.raises(ReplicaLostError, match="did not answer"):
                await answer_of(task)


@pytest.mark.parametrize(
    ("role", "answer"), [("both", accepts), ("both", silent), ("decode", accepts)]
)
async def test_engines_stalling_one_after_another_never_count_as_lost(role, answer):
    """Each compiles its first shape; the last one that may be tried is waited for."""

    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(ScriptedEngine(role, f"d{i}", answer)) for i in range(5)
        ]
        made = await stack.enter_async_context(rig())
        await made.connect(*(engine.member for engine in engines))
        if role == "decode":
            prefill = await stack.enter_async_context(ScriptedEngine("prefill", "p", accepts))
            await made.connect(prefill.member)
        task = ask(made)
        stalling = []
        for num in range(made.router.config.max_attempts):
            await until(lambda num=num: sum(map(asked, engines)) > num, "one more is asked")
            [last] = [e for e in engines if asked(e) and e not in stalling]
            stalling.append(last)
            last.stalled_s = 8.5
            await until(lambda num=num: len(made.pools.stalled) == num + 1, "known")
        await asyncio.sleep(1.0)
        assert not task.done()
        assert sum(map(asked, engines)) == len(stalling)
        request_id = last.received(AddRequest)[0].request.request_id
        last.stalled_s = 0.0
        if answer is silent:
            await last.send(Accepted(request_id, 0, 0, 0, 1))
        if role == "decode":
            await prefill.send(TokenOutput(request_id, 0, [5]))
            await until(lambda: last.received(Activate), "activated")
        await last.send(TokenOutput(request_id, int(role == "decode"), [6], "length"))
        assert await answer_of(task) == ([5, 6] if role == "decode" else [6])
        num_left = len(stalling) - 1
        assert made.count("ttserve_router_stalled_legs_total", leg="decode") == num_left


async def test_a_stalled_engine_is_left_only_for_one_with_room():
    engines = ("both", "d1", accepts), ("both", "d2", accepts)
    async with scripted(*engines, num_connected=1) as (made, hung, other):
        task = ask(made)
        await until(lambda: asked(hung), "asked")
        await made.connect(other.member)
        await other.send(snapshot=other.snapshot(num_empty_slots=0))
        await until(lambda: made.pools.snapshot("d2").groups[0].num_empty_slots == 0, "it is full")
        await stall(made, hung)
        await asyncio.sleep(1.0)
        assert (asked(hung), asked(other), made.num_queued) == (1, 0, 0)
        await other.send(snapshot=other.snapshot(num_empty_slots=4))
        await until(lambda: asked(other), "the other is asked")
        task.cancel()
        await asyncio.wait({task})


async def test_a_silent_engine_gets_no_requests_before_it_counts_as_dead(
    monkeypatch,
):
    monkeypatch.setattr(async_client, "QUIET_S", 0.5)
    engines = ("both", "d1", accepts), ("both", "d2", accepts)
    async with scripted(*engines, policy="most_empty_slots") as (made, quiet, other):
        quiet.is_silent = True
        await until(lambda: len(made.pools.stalled) == 1, "nothing is heard of it")
        tasks = [ask(made) for _ in range(3)]
        await until(lambda: asked(other) == 3, "the other is asked")
        assert asked(quiet) == 0
        assert made.lost == []
        quiet.is_silent = False
        await until(lambda: len(made.pools.stalled) == 0, "it speaks again")
        tasks.append(ask(made))
        await until(lambda: asked(quiet), "asked")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- an engine that hands over ----------------------------------------------------------------


async def hand_over(engine):
    """Let an engine drain, with little time left."""
    leaving = engine.snapshot(num_empty_slots=3, draining=True, hands_over=True)
    await engine.send(snapshot=leaving)


def read(outputs):
    """Read a stream to its end; return the outputs so far, and the reader."""
    tokens = []

    async def follow():
        async for output in outputs:
            tokens.extend(output.token_ids)

    return tokens, asyncio.ensure_future(follow())


async def fill(made, engine):
    await engine.send(snapshot=engine.snapshot(num_empty_slots=0))
    incarnation = engine.member.description.incarnation
    await until(
        lambda: not made.pools.snapshot(incarnation).groups[0].num_empty_slots, "it is full"
    )


class Stream(NamedTuple):
    """A stream on one engine, whose first token was read, and its possible successor."""

    made: Rig
    engine: ScriptedEngine
    other: ScriptedEngine
    request_id: str
    tokens: list[int]
    reader: asyncio.Future[None]


@contextlib.asynccontextmanager
async def a_stream_beside(answer):
    """A stream, beside an engine that answers like this."""
    engines = ("both", "d1", accepts), ("both", "d2", answer)
    async with scripted(*engines, num_connected=1) as (made, engine, other):
        outputs, request_id = await stream_on(made, engine)
        tokens, reader = read(outputs)
        await made.connect(other.member)
        yield Stream(made, engine, other, request_id, tokens, reader)


async def test_a_stream_continues_until_another_engine_has_accepted_it():
    async with a_stream_beside(silent) as (made, leaving, other, request_id, tokens, reader):
        await hand_over(leaving)
        await until(lambda: asked(other), "the other is asked")
        assert leaving.received(Abort) == [], "it has not answered"
        await leaving.send(TokenOutput(request_id, 1, [6]))
        await until(lambda: tokens == [6], "the stream continues")
        await other.send(Refused(request_id, "no_slot", "taken"))
        await leaving.send(TokenOutput(request_id, 2, [7]))
        await until(lambda: tokens == [6, 7], "a refusal costs it nothing")
        await other.send(snapshot=other.snapshot(num_empty_slots=4))
        await until(lambda: asked(other) == 2, "the other is asked again")
        await other.send(Accepted(request_id, 0, 0, 0, 1))
        await until(lambda: other.received(Activate), "the other engine continues")
        assert other.received(Activate)[0].token_ids == [[5, 6, 7]]
        await leaving.send(TokenOutput(request_id, 3, [9], "length"))
        await other.send(TokenOutput(request_id, 3, [8], "length"))
        await answer_of(reader)
        assert tokens == [6, 7, 8]
        await told_once(leaving, request_id)
        assert made.count("ttserve_router_migrations_total", reason="leaving") == 1
        queued = "vllm:request_queue_time_seconds_count"
        assert made.count(queued, model_name="tiny") == 1, "it has waited for a slot once"


async def test_a_handed_over_stream_is_placed_before_later_requests():
    async with a_stream_beside(decodes) as (made, leaving, other, request_id, tokens, reader):
        await fill(made, leaving)
        await fill(made, other)
        late = [ask(made) for _ in range(2)]
        await until(lambda: made.num_queued == 2, "others wait for a slot")
        await hand_over(leaving)
        await until(lambda: made.num_queued == 3, "and so does the stream")
        await other.send(snapshot=other.snapshot(num_empty_slots=1))
        await until(lambda: asked(other), "a request is placed")
        assert other.received(AddRequest)[0].request.request_id == request_id
        await answer_of(reader)
        assert tokens == [6]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


@pytest.mark.parametrize("end", ["finished", "left", "lost"])
async def test_nothing_is_left_of_a_hand_over_that_is_not_needed(end):
    async with a_stream_beside(silent) as stream:
        _, leaving, other, request_id, tokens, reader = stream
        await hand_over(leaving)
        await until(lambda: asked(other), "the other is asked")
        if end == "finished":
            await leaving.send(TokenOutput(request_id, 1, [6], "length"))
            await answer_of(reader)
        elif end == "left":
            reader.cancel()
            await asyncio.wait({reader})
        else:
            leaving.die()
            await until(lambda: asked(other) == 2, "it begins again")
            for handle in (1, 2):
                await other.send(Accepted(request_id, 0, 0, 0, handle))
            await other.send(TokenOutput(request_id, 1, [6], "length"))
            await answer_of(reader)
        assert tokens == ([] if end == "left" else [6])
        await until(lambda: other.received(Abort), "the other engine got the abort")


# --- an engine that is quiet, and may speak again -----------------------------------------------


@pytest.fixture
def quiet_soon(monkeypatch):
    """Let engines count as silent soon, and as dead only when their connection breaks."""
    monkeypatch.setattr(async_client, "QUIET_S", 0.5)


async def mark_silent(made, engine):
    engine.is_silent = True
    await until(lambda: len(made.pools.stalled) == 1, "nothing is heard of it")


async def follow_on(stream):
    """Let the successor begin at the end of the stream."""
    await until(lambda: asked(stream.other), "the other is asked")
    await stream.other.send(Accepted(stream.request_id, 0, 0, 0, 1))
    await until(lambda: stream.other.received(Activate), "it begins")
    assert stream.other.received(Activate)[-1].token_ids == [[5]]
    assert stream.engine.received(Abort) == [], "it may be late, no more"


@pytest.mark.parametrize("end", ["quiet", "dead"])
async def test_a_silent_engines_stream_continues_on_the_engine_that_has_begun(end, quiet_soon):
    async with a_stream_beside(silent) as stream:
        made, quiet, other, request_id, tokens, reader = stream
        await mark_silent(made, quiet)
        await follow_on(stream)
        if end == "dead":
            quiet.die()
            await until(lambda: made.lost, "its connection broke")
        await other.send(TokenOutput(request_id, 1, [6]))
        await until(lambda: tokens == [6], "the other engine continues")
        await other.send(TokenOutput(request_id, 2, [7], "length"))
        await answer_of(reader)
        assert tokens == [6, 7]
        assert asked(other) == len(other.received(Activate)) == 1
        reason = "lost" if end == "dead" else "quiet"
        assert made.count("ttserve_router_migrations_total", reason=reason) == 1
        if end == "quiet":
            await until(lambda: quiet.received(Abort), "it is to drop the request")
        assert made.pools.holds() == []


async def test_a_stream_stays_on_an_engine_that_recovers_before_anothers_token(quiet_soon):
    async with a_stream_beside(silent) as stream:
        made, late, other, request_id, tokens, reader = stream
        await mark_silent(made, late)
        await follow_on(stream)
        late.is_silent = False
        await late.send(TokenOutput(request_id, 1, [6]))
        await until(lambda: other.received(Abort), "the other is not needed")
        await other.send(TokenOutput(request_id, 1, [9]))
        await late.send(TokenOutput(request_id, 2, [7], "length"))
        await answer_of(reader)
        assert tokens == [6, 7]
        assert late.received(Abort) == []
        assert made.pools.holds() == []


async def test_a_successors_token_is_ignored_once_the_silent_engine_recovers(quiet_soon):
    async with a_stream_beside(silent) as stream:
        made, late, other, request_id, tokens, reader = stream
        await mark_silent(made, late)
        await follow_on(stream)
        late.is_silent = False
        await until(lambda: len(made.pools.stalled) == 0, "it beats again")
        await other.send(TokenOutput(request_id, 1, [9]))
        await until(lambda: other.received(Abort), "the other is not needed")
        await late.send(TokenOutput(request_id, 1, [6], "length"))
        await answer_of(reader)
        assert tokens == [6]


async def test_an_engine_that_speaks_again_is_not_asked_to_follow_on_itself(quiet_soon):
    async with a_stream_beside(silent) as stream:
        made, late, other, request_id, tokens, reader = stream
        await fill(made, other)
        await mark_silent(made, late)
        await until(lambda: made.num_queued == 1, "the stream waits for a slot")
        late.is_silent = False
        await until(lambda: made.num_queued == 0, "the only room is where it is")
        assert asked(late) == 1
        assert asked(other) == 0
        assert made.pools.holds() == []
        await other.send(snapshot=other.snapshot(num_empty_slots=4))
        await mark_silent(made, late)
        await follow_on(stream)
        await other.send(TokenOutput(request_id, 1, [6], "length"))
        await answer_of(reader)
        assert tokens == [6]


# --- a real engine whose device hangs ----------------------------------------------------------


async def test_a_hung_prefill_engine_is_replaced_and_the_reservation_waits():
    """Heartbeats continue meanwhile; a reservation lapses only after two minutes."""
    hang = Fault(at_s=0.0, target="prefill/0", kind="slow", factor=1e7)

    def simulated(role, *faults):
        mesh = SimulatedMeshConfig(
            model="Llama-3.2-1B", board="n150", faults=faults, fault_epoch_unix_s=time.time()
        )
        return role, engine_config(
            role, simulated_mesh=mesh, dtype="auto", max_model_len=1024, tt_data_parallel=1
        )

    with running(simulated("prefill", hang), simulated("prefill"), simulated("decode")) as engines:
        hung, prefill, decode = engines
        async with rig(hung, decode) as made:
            task = asyncio.ensure_future(made.tokens([7] * 70, sampling(6)))
            await until(lambda: not made.pools.holds(), "both have answered")
            await made.connect(prefill.member)
            tokens = await asyncio.wait_for(task, 40)
            facts = decode.description
            right = expected_tokens([7] * 70, 6, facts.vocab_size, facts.eos_token_ids)
            assert tokens == right
            await until_idle(made, prefill, decode)
            assert hung.handle.is_alive


def test_a_request_without_room_keeps_no_other_on_a_stalled_engine():
    class Queue:
        def has_room(self, demand):
            return demand == "short"

    class Stream:
        away = object()

        def __init__(self):
            self.told = []

        def put(self, event):
            self.told.append(event)

    stalls = Stalls(Queue())
    streams = {demand: Stream() for demand in ("long", "short")}
    for demand, stream in streams.items():
        stalls.stay(stream, demand)
    stalls.capacity_changed()
    stalls.capacity_changed()
    assert streams["short"].told == [Stream.away]
    assert streams["long"].told == []
    stalls.check_invariants()
