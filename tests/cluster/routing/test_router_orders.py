"""The orders of prompt and slot: messages to each engine, and releases on losses."""

import asyncio
import functools
import time
from typing import get_args

import pytest

from cluster.config.schema import OrderName
from cluster.errors import (
    BadRequestError,
    KVTransferFailedError,
    NotReadyError,
    QueueTimeoutError,
    ReplicaLostError,
    SaturatedError,
)
from replicas.messages import (
    KV_TRANSFER_FAILED,
    NO_ALLOWED_TOKEN,
    Abort,
    Activate,
    AddRequest,
    KVLoaded,
    LoadKV,
    Refused,
    TokenOutput,
)
from replicas.sampling_params import StructuredOutputs
from tests.cluster.engines import (
    KEYS,
    accepts,
    prefills,
    refusing,
    sampling,
    scripted,
    silent,
    until,
)

PROMPT = [7] * 40
EARLY = ["prefill_first", "predicted"]
"""Orders in which a prompt may be asked for before there is a slot."""
FIRST = 5


def decodes(message):
    """A decode engine that loads at once, and ends an activated request with two tokens."""
    if isinstance(message, LoadKV):
        return [KVLoaded(message.request_id, message.epoch, None)]
    if isinstance(message, Activate):
        index = len(message.token_ids[0]) if message.token_ids else 0
        return [TokenOutput(message.request_id, index, [6, 7], "length")]
    return accepts(message)


refuses = refusing("queue_full")


cluster = functools.partial(scripted, order="prefill_first")


def start(made):
    return made.generate(made.request(PROMPT))


async def tokens(outputs):
    return [token for output in [o async for o in outputs] for token in output.token_ids]


async def fill(made, *engines):
    """Let decode engines report that every slot is taken."""
    for engine in engines:
        await engine.send(snapshot=engine.snapshot(0))
    await until(lambda: not any(v.num_empty_slots for v in made.pools.decode_views()), "full")


async def let_have(made, engine, num_slots):
    """Let one decode engine report this many free slots."""
    await engine.send(snapshot=engine.snapshot(num_slots))
    incarnation = engine.member.description.incarnation

    def is_known():
        return made.pools.snapshot(incarnation).groups[0].num_empty_slots == num_slots

    await until(is_known, f"{num_slots} slots are free")


def ticket_of(message):
    return KEYS.unseal(message.ticket, time.time())


async def told(engine, kind, count=1):
    await until(lambda: len(engine.received(kind)) >= count, f"{kind.__name__} {count}")
    return engine.received(kind)[count - 1]


def holds(made):
    return made.pools.holds()


# --- prefill first: the plain way ---------------------------------------------------------------


@pytest.mark.parametrize("order", EARLY)
async def test_first_token_is_delivered_before_a_decode_slot_is_free(order):
    engines = ("prefill", "p", prefills), ("decode", "d", decodes)
    async with cluster(*engines, order=order) as (made, p, d):
        await fill(made, d)
        outputs = start(made)
        output = await anext(outputs)
        assert (output.index, output.token_ids) == (0, [FIRST])
        rest = asyncio.ensure_future(tokens(outputs))
        await until(lambda: made.num_queued == 1, "it waits for a slot")
        assert d.messages == [], "the decode engine was not asked yet"
        offer = ticket_of(p.received(AddRequest)[0])
        assert offer.consumer == "", "any engine may fetch it"
        await d.send(snapshot=d.snapshot(1))
        assert await rest == [6, 7]
        assert [type(m) for m in d.messages] == [AddRequest, LoadKV, Activate]
        add, load, activate = d.messages
        assert (add.mode, activate.token_ids) == ("decode", [[FIRST]])
        ticket = ticket_of(load)
        assert ticket.consumer == "d"
        assert (ticket.transfer_id, ticket.epoch) == (offer.transfer_id, offer.epoch)
        assert load.epoch == ticket.epoch
        assert p.received(Abort) == [], "it let go by itself when all was fetched"


async def test_ticket_names_producer_layout_and_transfer():
    async with cluster(("prefill", "p", prefills), ("decode", "d", decodes)) as (made, p, d):
        await tokens(start(made))
        ticket = ticket_of(p.received(AddRequest)[0])
        description = p.member.description
        assert ticket.producer_endpoints == description.kv_endpoints
        assert ticket.producer_incarnation == "p"
        assert ticket.layout_hash == description.kv_layout_hash
        assert ticket.num_tokens == len(PROMPT)
        assert ticket_of(d.received(LoadKV)[0]).expires_ms >= ticket.expires_ms


@pytest.mark.parametrize("order", EARLY)
async def test_answer_of_one_token_needs_no_decode_slot(order):
    def ends(message):
        if isinstance(message, AddRequest):
            end = TokenOutput(message.request.request_id, 0, [FIRST], "length")
            return [*accepts(message), end]
        return []

    engines = ("prefill", "p", ends), ("decode", "d", decodes)
    async with cluster(*engines, order=order) as (made, _, d):
        await fill(made, d)
        assert await tokens(start(made)) == [FIRST]
        assert d.messages == []
        assert made.num_queued == 0
        assert not holds(made)


async def test_short_prompt_asks_no_prefill_engine():
    def computes(message):
        if isinstance(message, AddRequest):
            assert message.mode == "local"
            return [*accepts(message), TokenOutput(message.request.request_id, 0, [8], "stop")]
        return []

    engines = ("prefill", "p", prefills), ("decode", "d", computes)
    async with cluster(*engines, min_remote_prefill_tokens=41) as (made, p, _):
        assert await tokens(start(made)) == [8]
        assert p.messages == []


# --- prefill first: who refuses, dies or is late -------------------------------------------------


async def test_prefill_engine_that_refuses_gives_way_to_another_with_another_transfer():
    engines = ("prefill", "p1", refuses), ("prefill", "p2", prefills), ("decode", "d", decodes)
    async with cluster(*engines) as (made, first, second, d):
        assert await tokens(start(made)) == [FIRST, 6, 7]
        one, two = (ticket_of(p.received(AddRequest)[0]) for p in (first, second))
        assert one.transfer_id != two.transfer_id
        assert one.epoch < two.epoch == ticket_of(d.received(LoadKV)[0]).epoch
        assert made.count("ttserve_router_retries_total", reason="prefill") == 1


async def test_prefill_engine_that_dies_before_the_first_token_gives_way_to_another():
    engines = ("prefill", "p1", accepts), ("prefill", "p2", prefills), ("decode", "d", decodes)
    async with cluster(*engines) as (made, first, second, d):
        result = asyncio.ensure_future(tokens(start(made)))
        await told(first, AddRequest)
        first.die()
        assert await result == [FIRST, 6, 7]
        assert made.count("ttserve_router_lost_legs_total", leg="prefill") == 1
        transfer = ticket_of(second.received(AddRequest)[0]).transfer_id
        assert ticket_of(d.received(LoadKV)[0]).transfer_id == transfer


async def test_last_words_of_an_engine_that_refused_do_not_end_the_request():
    def refuses_twice(message):
        if isinstance(message, AddRequest):
            error = TokenOutput(message.request.request_id, 0, [], "error", error="it is gone")
            return [*refuses(message), error]
        return []

    engines = [("prefill", "p1", refuses_twice), ("prefill", "p2", prefills)]
    async with cluster(*engines, ("decode", "d", decodes)) as (made, *_):
        assert await tokens(start(made)) == [FIRST, 6, 7]


async def test_decode_engine_computes_the_prompt_if_every_prefill_engine_fails():
    async with cluster(("prefill", "p", refuses), ("decode", "d", accepts)) as (made, _, d):
        result = asyncio.ensure_future(tokens(start(made)))
        add = await told(d, AddRequest)
        assert add.mode == "local"
        await d.send(TokenOutput(add.request.request_id, 0, [1, 2], "length"))
        assert await result == [1, 2]
        assert not d.received(LoadKV)
        assert not d.received(Activate)


@pytest.mark.parametrize("order", EARLY)
async def test_slot_timeout_after_the_first_token_is_an_error_and_frees_prefill(order):
    engines = ("prefill", "p", prefills), ("decode", "d", decodes)
    async with cluster(*engines, order=order, queue_timeout_s=0.2) as (made, p, d):
        await fill(made, d)
        outputs = start(made)
        assert (await anext(outputs)).token_ids == [FIRST]
        with pytest.raises(QueueTimeoutError):
            await anext(outputs)
        await told(p, Abort)
        assert not holds(made)
        assert made.num_queued == 0


async def test_full_queue_turns_away_before_anything_is_computed_and_never_after():
    engines = ("prefill", "p", accepts), ("decode", "d", decodes)
    async with cluster(*engines, max_queued_requests=1) as (made, p, d):
        await fill(made, d)
        streams = [start(made) for _ in range(2)]
        firsts = [asyncio.ensure_future(anext(outputs)) for outputs in streams]
        await told(p, AddRequest, 2)
        for message in p.received(AddRequest):
            await p.send(TokenOutput(message.request.request_id, 0, [FIRST]))
        for first in firsts:
            assert (await first).token_ids == [FIRST]
        rest = [asyncio.ensure_future(tokens(outputs)) for outputs in streams]
        await until(lambda: made.num_queued == 2, "both wait, whatever the bound is")
        with pytest.raises(SaturatedError):
            await anext(start(made))
        assert len(p.received(AddRequest)) == 2, "nothing is computed for the third"
        await d.send(snapshot=d.snapshot(2))
        assert await asyncio.gather(*rest) == [[6, 7]] * 2


async def test_nothing_is_computed_while_nothing_can_decode():
    async with cluster(("prefill", "p", prefills)) as (made, p):
        with pytest.raises(NotReadyError):
            await anext(start(made))
        assert p.messages == []


async def test_decode_engine_that_dies_before_a_token_gives_way_with_the_same_transfer():
    engines = ("prefill", "p", prefills), ("decode", "d1", accepts), ("decode", "d2", decodes)
    async with cluster(*engines) as (made, p, lost, d):
        result = asyncio.ensure_future(tokens(start(made)))
        await told(lost, Activate)
        lost.die()
        assert await result == [FIRST, 6, 7], "the client gets its first token once"
        before, after = (ticket_of(e.received(LoadKV)[0]) for e in (lost, d))
        assert (before.consumer, after.consumer) == ("d1", "d2")
        assert before.transfer_id == after.transfer_id
        assert d.received(Activate)[0].token_ids == [[FIRST]]
        assert len(p.received(AddRequest)) == 1
        assert p.received(Abort) == []
        assert made.count("ttserve_router_retries_total", reason="decode_lost") == 1


async def test_successor_of_a_decode_engine_lost_with_the_kv_computes_the_prompt():
    engines = ("prefill", "p", prefills), ("decode", "d1", accepts), ("decode", "d2", decodes)
    async with cluster(*engines) as (made, p, lost, d):
        result = asyncio.ensure_future(tokens(start(made)))
        load = await told(lost, LoadKV)
        await lost.send(KVLoaded(load.request_id, load.epoch, None))
        # The next event behind it: it has been heard of when the snapshot has.
        seen = made.pools.num_snapshots
        await lost.send(snapshot=lost.snapshot(3))
        await until(lambda: made.pools.num_snapshots > seen, "heard")
        await asyncio.sleep(0)
        lost.die()
        assert await result == [FIRST, 6, 7]
        assert d.received(LoadKV) == [], "there is nothing to fetch any more"
        assert d.received(Activate)[0].token_ids == [[FIRST]]
        assert p.received(Abort) == []


async def test_decode_engine_that_refuses_after_all_gives_way_with_the_kv_kept():
    drains = refusing("draining", "draining")
    engines = ("prefill", "p", prefills), ("decode", "d1", drains), ("decode", "d2", decodes)
    async with cluster(*engines) as (made, p, draining, d):
        assert await tokens(start(made)) == [FIRST, 6, 7]
        assert not draining.received(LoadKV)
        assert ticket_of(d.received(LoadKV)[0]).consumer == "d2"
        assert p.received(Abort) == []


async def test_prefill_engine_that_dies_with_the_kv_leaves_the_prompt_to_the_decode_engine():
    async with cluster(("prefill", "p", prefills), ("decode", "d", decodes)) as (made, p, d):
        await fill(made, d)
        outputs = start(made)
        await anext(outputs)
        rest = asyncio.ensure_future(tokens(outputs))
        await until(lambda: made.num_queued == 1, "it waits")
        p.die()
        await until(lambda: made.lost == ["p"], "known")
        await d.send(snapshot=d.snapshot(1))
        assert await rest == [6, 7]
        assert d.received(LoadKV) == []
        assert d.received(Activate)[0].token_ids == [[FIRST]]


async def test_failed_transfer_releases_prefill_and_the_request_continues():
    def fails(message):
        if isinstance(message, LoadKV):
            return [KVLoaded(message.request_id, message.epoch, "expired")]
        return decodes(message)

    async with cluster(("prefill", "p", prefills), ("decode", "d", fails)) as (made, p, _):
        assert await tokens(start(made)) == [FIRST, 6, 7]
        await told(p, Abort)
        assert made.count("ttserve_router_retries_total", reason="kv_expired") == 1


async def test_a_request_that_forbids_every_token_is_its_clients_fault():
    async with cluster(("prefill", "p", prefills), ("decode", "d", forbids)) as (made, _, _):
        for _ in range(5):
            with pytest.raises(BadRequestError, match="allowed_token_ids"):
                await tokens(start(made))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": (1,)}, "allowed_token_ids"),
        ({"bad_words_token_ids": ((1,),)}, "bad_words"),
        ({"structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs(regex="a"), "allowed_token_ids": (1,)}, None),
    ],
)
async def test_the_field_that_forbids_every_token_is_named_if_no_other_could(fields, param):
    async with cluster(("prefill", "p", prefills), ("decode", "d", forbids)) as (made, _, _):
        with pytest.raises(BadRequestError, match="no token is allowed") as caught:
            await made.tokens(PROMPT, sampling(**fields))
        assert caught.value.param == param


def forbids(message):
    """Answer as a decode engine that finds no allowed token."""
    if isinstance(message, Activate):
        return [TokenOutput(message.request_id, 1, [], "error", error=NO_ALLOWED_TOKEN)]
    return accepts(message)


async def test_engine_that_must_not_recompute_ends_the_request_with_its_error():
    def gives_up(message):
        if isinstance(message, Activate):
            error = f"{KV_TRANSFER_FAILED}: expired"
            return [TokenOutput(message.request_id, 1, [], "error", error=error)]
        return accepts(message)

    async with cluster(("prefill", "p", prefills), ("decode", "d", gives_up)) as (made, p, _):
        outputs = start(made)
        await anext(outputs)
        with pytest.raises(KVTransferFailedError, match="expired") as caught:
            await anext(outputs)
        assert caught.value.status == 503
        await told(p, Abort)


def begins(message):
    """A decode engine that gives one token only."""
    if isinstance(message, Activate):
        return [TokenOutput(message.request_id, len(message.token_ids[0]), [6])]
    return accepts(message)


@pytest.mark.parametrize("order", get_args(OrderName))
async def test_a_request_continues_after_the_output_of_another_router(order):
    engines = ("prefill", "p", prefills), ("decode", "d", decodes)
    async with cluster(*engines, order=order) as (made, p, d):
        request, outputs = made.request(PROMPT), []

        async def emit(output):
            outputs.append((output.index, output.token_ids, output.finish_reason))
            return True

        await made.router.run(request, emit, [FIRST, 6])
        assert outputs == [(2, [6, 7], "length")]
        [add], [activate] = d.received(AddRequest), d.received(Activate)
        assert (add.mode, activate.token_ids) == ("decode", [[FIRST, 6]])
        assert add.request.prompt_token_ids == PROMPT
        assert not p.messages, "the decode engine computes the prompt"
        traffic = made.router.traffic
        assert (traffic.num_waiting, traffic.num_decoding) == (0, 0)


@pytest.mark.parametrize("order", get_args(OrderName))
async def test_successor_of_a_decode_engine_continues_from_its_tokens(order):
    engines = ("prefill", "p", prefills), ("decode", "d1", begins), ("decode", "d2", decodes)
    async with cluster(*engines, order=order) as (made, p, lost, d):
        await let_have(made, d, 0)
        outputs = start(made)
        assert [(await anext(outputs)).token_ids for _ in range(2)] == [[FIRST], [6]]
        await let_have(made, d, 4)
        lost.die()
        rest = [(o.index, o.token_ids, o.finish_reason) async for o in outputs]
        assert rest == [(2, [6, 7], "length")]
        assert [type(m) for m in d.messages if type(m) is not LoadKV] == [AddRequest, Activate]
        [add], [activate] = d.received(AddRequest), d.received(Activate)
        assert (add.mode, activate.token_ids) == ("decode", [[FIRST, 6]])
        assert add.request.prompt_token_ids == PROMPT
        assert len(p.received(AddRequest)) == 1, "the prompt is not computed again"
        assert made.count("ttserve_router_migrations_total", reason="lost") == 1


async def test_choices_of_unequal_length_each_continue_and_end_once():
    def several(message):
        if isinstance(message, AddRequest):
            request_id = message.request.request_id
            return [*accepts(message), *(TokenOutput(request_id, 0, [i], choice=i) for i in (0, 1))]
        return []

    def goes_on(message):
        if isinstance(message, Activate):
            # A choice that had ended ends again; known tokens come again with new ones.
            first, second = message.token_ids
            return [
                TokenOutput(message.request_id, len(first), [], "stop", choice=0),
                TokenOutput(message.request_id, 0, [*second, 8], choice=1),
                TokenOutput(message.request_id, len(second) + 1, [9], "length", choice=1),
            ]
        return accepts(message)

    engines = ("both", "d1", several), ("both", "d2", goes_on)
    async with cluster(*engines) as (made, lost, d):
        await let_have(made, d, 0)
        params = sampling(5, n=2, temperature=1.0, seed=3)
        outputs = made.generate(made.request(PROMPT, params))
        for _ in range(2):
            await anext(outputs)
        request_id = lost.received(AddRequest)[0].request.request_id
        await lost.send(TokenOutput(request_id, 1, [4], choice=1))
        await lost.send(TokenOutput(request_id, 1, [3], "stop", choice=0))
        assert [(await anext(outputs)).choice for _ in range(2)] == [1, 0]
        await let_have(made, d, 4)
        lost.die()
        rest = [(o.choice, o.index, o.token_ids) async for o in outputs]
        [activate] = d.received(Activate)
        assert activate.token_ids == [[0, 3], [1, 4]]
        drop = Abort([request_id], "stop", [0])
        assert d.messages.index(drop) < d.messages.index(activate)
        assert rest[-1] == (1, 3, [9]), "it ends with the choice that had not ended"
        assert rest[-2] == (1, 0, [1, 4, 8])


async def test_an_interrupted_stream_is_placed_before_later_requests():
    engines = ("both", "d1", accepts), ("both", "d2", accepts)
    async with cluster(*engines) as (made, lost, d):
        await let_have(made, d, 0)
        outputs = start(made)
        first = asyncio.ensure_future(anext(outputs))
        asked = await told(lost, AddRequest)
        await lost.send(TokenOutput(asked.request.request_id, 0, [6]))
        assert (await first).token_ids == [6]
        await let_have(made, lost, 0)
        late = asyncio.ensure_future(tokens(start(made)))
        await until(lambda: made.num_queued == 1, "the late one waits")
        rest = asyncio.ensure_future(tokens(outputs))
        lost.die()
        await until(lambda: made.num_queued == 2, "both wait")
        await let_have(made, d, 1)
        assert (await told(d, AddRequest)).request == asked.request
        for task in (late, rest):
            task.cancel()
        await asyncio.wait({late, rest})


async def hand_over(engine):
    """Let an engine drain, with little time left."""
    await engine.send(snapshot=engine.snapshot(3, draining=True, hands_over=True))


@pytest.mark.parametrize("order", get_args(OrderName))
async def test_streams_of_a_draining_engine_continue_elsewhere_without_a_loss(order):
    engines = ("prefill", "p", prefills), ("decode", "d1", begins), ("decode", "d2", decodes)
    async with cluster(*engines, order=order, max_attempts=1) as (made, _, leaving, d):
        await let_have(made, d, 0)
        outputs = start(made)
        assert [(await anext(outputs)).token_ids for _ in range(2)] == [[FIRST], [6]]
        await let_have(made, d, 4)
        await hand_over(leaving)
        assert await tokens(outputs) == [6, 7]
        assert d.received(Activate)[0].token_ids == [[FIRST, 6]]
        await told(leaving, Abort)
        assert made.count("ttserve_router_migrations_total", reason="leaving") == 1


@pytest.mark.parametrize("room", ["no other", "full"])
async def test_a_stream_that_no_engine_can_continue_ends_with_the_loss(room):
    engines = [("both", "d1", accepts), ("both", "d2", accepts)]
    async with cluster(*engines, queue_timeout_s=0.5) as (made, lost, other):
        await let_have(made, other, 0)
        outputs = start(made)
        first = asyncio.ensure_future(anext(outputs))
        asked = await told(lost, AddRequest)
        await lost.send(TokenOutput(asked.request.request_id, 0, [6]))
        await first
        if room == "no other":
            other.die()
            await until(lambda: len(made.pools.members()) == 1, "gone")
        lost.die()
        with pytest.raises(ReplicaLostError, match="mid-request"):
            await anext(outputs)
        assert not made.count("ttserve_router_migrations_total", reason="lost")


async def test_losing_decode_engines_repeatedly_ends_the_request_and_frees_prefill():
    engines = ("prefill", "p", prefills), ("decode", "d1", accepts), ("decode", "d2", accepts)
    async with cluster(*engines, max_attempts=2) as (made, p, *lost):
        result = asyncio.ensure_future(tokens(start(made)))
        for engine in lost:
            await told(engine, Activate)
            engine.die()
        with pytest.raises(ReplicaLostError, match="2 replicas"):
            await result
        await told(p, Abort)
        assert not holds(made)


@pytest.mark.parametrize("order", get_args(OrderName))
async def test_a_request_that_kills_engines_loses_at_most_max_attempts(order):
    killed = []

    def dies(message, engine):
        """A prefill engine dies of every prompt, a decode engine of those it computes itself."""
        if not isinstance(message, AddRequest) or message.mode == "decode":
            return decodes(message)
        killed.append(engine)
        asyncio.get_running_loop().call_soon(engine.die)
        return []

    names = [(role, f"{role}{i}") for role in ("prefill", "decode") for i in range(6)]
    async with cluster(*[(*name, decodes) for name in names], order=order) as (made, *engines):
        for engine in engines:
            engine.answer = functools.partial(dies, engine=engine)
        with pytest.raises(ReplicaLostError, match="3 replicas were lost"):
            await tokens(start(made))
        assert len(killed) == 3
        assert not holds(made)


@pytest.mark.parametrize("order", EARLY)
@pytest.mark.parametrize("moment", ["computing", "waiting", "asking", "loading"])
async def test_client_that_leaves_has_prefill_and_decode_let_go(moment, order):
    prefill = accepts if moment == "computing" else prefills
    decode = (lambda _message: []) if moment == "asking" else accepts
    engines = ("prefill", "p", prefill), ("decode", "d", decode)
    async with cluster(*engines, order=order) as (made, p, d):
        if moment == "waiting":
            await fill(made, d)
        result = asyncio.ensure_future(tokens(start(made)))
        await told(p, AddRequest)
        if moment == "waiting":
            await until(lambda: made.num_queued == 1, "it waits")
        elif moment != "computing":
            await told(d, AddRequest if moment == "asking" else Activate)
        result.cancel()
        with pytest.raises(asyncio.CancelledError):
            await result
        await told(p, Abort)
        if moment in {"asking", "loading"}:
            await told(d, Abort)
        assert not holds(made)
        assert made.num_queued == 0


# --- decode first --------------------------------------------------------------------------------


async def test_decode_first_names_its_consumer_from_the_start():
    engines = ("prefill", "p", prefills), ("decode", "d", decodes)
    async with cluster(*engines, order="decode_first") as (made, p, d):
        assert await tokens(start(made)) == [FIRST, 6, 7]
        assert [type(m) for m in d.messages] == [AddRequest, LoadKV, Activate]
        offer, load = p.received(AddRequest)[0], d.received(LoadKV)[0]
        assert offer.ticket == load.ticket
        assert ticket_of(load).consumer == "d"


async def test_decode_first_successor_of_an_engine_without_tokens_computes_the_prompt():
    engines = ("prefill", "p", prefills), ("decode", "d1", accepts), ("decode", "d2", decodes)
    async with cluster(*engines, order="decode_first") as (made, p, lost, d):
        result = asyncio.ensure_future(tokens(start(made)))
        await told(lost, Activate)
        lost.die()
        assert await result == [FIRST, 6, 7], "the client gets its first token once"
        assert d.received(LoadKV) == [], "only the lost engine could have fetched it"
        assert made.count("ttserve_router_lost_legs_total", leg="decode") == 1
        assert d.received(Activate)[0].token_ids == [[FIRST]]
        await told(p, Abort)
        assert len(p.received(AddRequest)) == 1


# --- predicted -----------------------------------------------------------------------------------


async def test_predicted_asks_for_the_slot_at_once_if_the_prompt_is_next():
    engines = ("prefill", "p", accepts), ("decode", "d", silent)
    async with cluster(*engines, order="predicted") as (made, p, d):
        result = asyncio.ensure_future(tokens(start(made)))
        reserve, add = await told(d, AddRequest), await told(p, AddRequest)
        d.answer = decodes
        await d.send(*accepts(reserve))
        load = await told(d, LoadKV)
        offer, ticket = ticket_of(add), ticket_of(load)
        assert (offer.consumer, ticket.consumer) == ("", "d"), "KV may flow from now on"
        assert (offer.transfer_id, offer.epoch) == (ticket.transfer_id, ticket.epoch)
        await p.send(TokenOutput(load.request_id, 0, [FIRST]))
        assert await result == [FIRST, 6, 7]
        assert p.received(AddRequest) == [add]
        assert [type(m) for m in d.messages] == [AddRequest, LoadKV, Activate]
        made.router.moments.check_empty()


async def test_refused_slot_does_not_abort_an_earlier_prompt():
    engines = ("prefill", "p", accepts), ("decode", "d", silent)
    async with cluster(*engines, order="predicted") as (made, p, d):
        outputs = start(made)
        first = asyncio.ensure_future(anext(outputs))
        reserve, add = await told(d, AddRequest), await told(p, AddRequest)
        d.answer = decodes
        await d.send(Refused(reserve.request.request_id, "no_slot", "taken"))
        await until(lambda: made.num_queued == 1, "it waits on")
        await p.send(TokenOutput(add.request.request_id, 0, [FIRST]))
        assert (await first).token_ids == [FIRST], "the client does not wait for the slot"
        rest = asyncio.ensure_future(tokens(outputs))
        await d.send(snapshot=d.snapshot(1))
        assert await rest == [6, 7]
        assert (p.received(AddRequest), p.received(Abort)) == ([add], [])
        assert ticket_of(d.received(LoadKV)[0]).transfer_id == ticket_of(add).transfer_id


async def test_engine_lost_after_it_may_have_begun_to_fetch_costs_the_prompt():
    engines = ("prefill", "p", accepts), ("decode", "d1", accepts), ("decode", "d2", decodes)
    async with cluster(*engines, order="predicted") as (made, p, lost, d):
        result = asyncio.ensure_future(tokens(start(made)))
        await told(lost, LoadKV)
        p.answer = prefills
        lost.die()
        assert await result == [FIRST, 6, 7]
        one, two = map(ticket_of, p.received(AddRequest))
        assert one.transfer_id != two.transfer_id
        assert one.epoch < two.epoch
        await told(p, Abort)
        assert ticket_of(d.received(LoadKV)[0]).transfer_id == two.transfer_id
        assert made.count("ttserve_router_lost_legs_total", leg="decode") == 1


async def test_decode_engine_computes_a_prompt_refused_before_there_was_a_slot():
    engines = ("prefill", "p", refuses), ("decode", "d", accepts)
    async with cluster(*engines, order="predicted") as (made, _, d):
        await fill(made, d)
        result = asyncio.ensure_future(tokens(start(made)))
        refused = "ttserve_router_refusals_total"
        await until(lambda: made.count(refused, reason="queue_full") == 1, "refused")
        await let_have(made, d, 1)
        add = await told(d, AddRequest)
        assert add.mode == "local"
        await d.send(TokenOutput(add.request.request_id, 0, [1, 2], "length"))
        assert await result == [1, 2]


async def test_requests_with_prompts_under_way_count_as_queued():
    engines = ("prefill", "p", accepts), ("decode", "d", decodes)
    async with cluster(*engines, order="predicted", max_queued_requests=1) as (made, p, d):
        await fill(made, d)
        first = asyncio.ensure_future(tokens(start(made)))
        await told(p, AddRequest)
        with pytest.raises(SaturatedError):
            await anext(start(made))
        assert len(p.received(AddRequest)) == 1, "nothing is computed for the second"
        first.cancel()
        await asyncio.wait({first})
