"""The router with real engine processes: tokens equal one engine's, whatever is lost."""

import asyncio
import contextlib
import itertools
import secrets
import signal
from functools import cache
from typing import get_args

import msgspec
import pytest

from cluster.config.schema import OrderName
from cluster.errors import (
    BadRequestError,
    NotReadyError,
    QueueTimeoutError,
)
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.store import StoreConfig
from kv_transfer.stores.shm import ensure_server
from replicas import async_client, launch
from replicas.messages import (
    LAPSED,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LoadKV,
    TokenOutput,
)
from tests import engines as local
from tests.cluster.engines import (
    BLOCK_SIZE,
    ScriptedEngine,
    accepts,
    engine_config,
    prefills,
    prompts,
    refusing,
    rig,
    running,
    sampling,
    scripted,
    until,
    until_idle,
)

pytestmark = pytest.mark.process

LONG = 1500
SEEDED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def pool():
    """Two prefill and two decode engines that every test leaves as it found them."""
    kinds = ["prefill", "prefill", "decode", "decode"]
    with running(*((kind, engine_config(kind)) for kind in kinds)) as engines:
        yield engines


@pytest.fixture(scope="module")
def spares():
    """Engines to kill or drain: a prefill engine with short steps, four decode engines."""
    slow = engine_config("prefill", max_num_batched_tokens=16)
    with running(("prefill", slow), *[("decode", engine_config("decode"))] * 4) as engines:
        yield {"prefill": engines[:1], "decode": engines[1:]}


@pytest.fixture
def victim(spares):
    """Return a spare engine of a role that no test has used."""
    return lambda role: spares[role].pop()


@cache
def _reference(raw):
    cases = msgspec.msgpack.decode(raw, type=list[tuple[list[int], local.SamplingParams]])
    config = engine_config("both", max_batch_size=32, tt_data_parallel=1, num_blocks=400)
    with local.engine_core(msgspec.structs.replace(config, max_num_batched_tokens=2048)) as core:
        return local.generate(core, [p for p, _ in cases], [s for _, s in cases])


def reference(*cases):
    """Return tokens of one local engine for (prompt, sampling) cases that run together."""
    return _reference(msgspec.msgpack.encode(cases))


async def transfers(made, *engines):
    """Return what engines have received: (transfers, bytes)."""
    total = [0, 0]
    for engine in engines:
        for counters in (await made.engine_metrics(engine)).transfer.paths.values():
            total[0] += counters.num_received
            total[1] += counters.bytes_received
    return total


def row_bytes(engine):
    """Return the bytes of the KV of 32 tokens."""
    [kv_group] = engine.description.kv_groups
    return kv_group.bytes_per_block * ROW_TOKENS // BLOCK_SIZE


def num_rows(prompt):
    return -(-len(prompt) // ROW_TOKENS)


def start(made, prompt, params=None):
    """Start a request; return its outputs, to be read with anext and closed."""
    return made.generate(made.request(prompt, params))


async def token_of(outputs):
    return (await anext(outputs)).token_ids


async def rest_of(outputs):
    return [token for output in [o async for o in outputs] for token in output.token_ids]


async def until_reserved(made, engine, count=1):
    async def is_reserved():
        groups = (await made.engine_metrics(engine)).groups
        return sum(group.num_reserved for group in groups) == count

    await until(is_reserved, f"{count} reserved slots")


async def num_finished(made, engine):
    groups = (await made.engine_metrics(engine)).groups
    return sum(group.requests_finished.get("length", 0) for group in groups)


# --- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", get_args(OrderName))
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
async def test_concurrent_prompts_give_the_tokens_of_one_local_engine(pool, kind, order):
    changes = [SEEDED | {"seed": 100 + i} if kind == "seeded" else {} for i in range(32)]
    cases = [
        (prompt, sampling(12 + i % 5, **changes[i]))
        for i, prompt in enumerate(prompts(32 if kind == "greedy" else 64)[-32:])
    ]
    # Another first token, or the second run would find the blocks of the first.
    shift = 3 * get_args(OrderName).index(order)
    cases = [([2 + (prompt[0] + shift) % 250, *prompt[1:]], params) for prompt, params in cases]
    async with rig(*pool, order=order) as made:
        before = await transfers(made, *pool)
        results = await asyncio.gather(*(made.tokens(*case) for case in cases))
        await until_idle(made, *pool)
        after = await transfers(made, *pool)
        (num_transfers, num_bytes) = [b - a for a, b in zip(before, after, strict=True)]
    assert results == reference(*cases)
    assert len({tuple(r) for r in results}) > 16, "the prompts tell the outputs apart"
    assert num_transfers == 32, "every prompt went from one pool to the other"
    assert num_bytes == sum(num_rows(prompt) for prompt, _ in cases) * row_bytes(pool[2])


def test_prompt_longer_than_a_step_is_transferred_whole(pool):
    (prompt,) = prompts(1, lengths=(1000,))

    async def run():
        async with rig(pool[0], pool[2]) as made:
            before = await transfers(made, pool[2])
            result = await made.tokens(prompt)
            await until_idle(made, pool[0], pool[2])
            after = await transfers(made, pool[2])
            return result, after[1] - before[1]

    expected = reference((prompt, sampling()))[0]
    assert asyncio.run(run()) == (expected, 32 * row_bytes(pool[2]))


async def test_only_blocks_that_the_decode_engine_lacks_are_transferred(pool):
    (prompt,) = prompts(1, lengths=(150,))
    prompt = [token + 3 for token in prompt]
    async with rig(pool[0], pool[2]) as made:
        counts = [(await transfers(made, pool[2]))[1]]
        results = []
        for _ in range(2):
            results.append(await made.tokens(prompt))
            await until_idle(made, pool[0], pool[2])
            counts.append((await transfers(made, pool[2]))[1])
        num_bytes = [b - a for a, b in itertools.pairwise(counts)]
    assert results[0] == results[1] == reference((prompt, sampling()))[0]
    row = row_bytes(pool[2])
    assert num_bytes == [5 * row, row], "four full blocks of the prompt were there already"


async def test_prompts_below_the_threshold_are_computed_on_the_decode_engine(pool):
    short, long = prompts(2, lengths=(63, 64))
    short = [token + 1 for token in short]
    long = [token + 1 for token in long]
    async with rig(*pool, min_remote_prefill_tokens=64) as made:
        counts = [(await transfers(made, *pool))[0]]
        results = []
        for prompt in (short, long):
            results.append(await made.tokens(prompt))
            counts.append((await transfers(made, *pool))[0])
        await until_idle(made, *pool)
        num_transfers = [b - a for a, b in itertools.pairwise(counts)]
    assert results == [reference((p, sampling()))[0] for p in (short, long)]
    assert num_transfers == [0, 1]


async def test_request_that_ends_with_its_first_token_frees_the_reservation(pool):
    (prompt,) = prompts(1, lengths=(50,))
    async with rig(*pool) as made:
        assert await made.tokens(prompt, sampling(1)) == reference((prompt, sampling(1)))[0]
        await until_idle(made, *pool)


# --- the client leaves -------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def queued(made, prefill, decode):
    running_ones = [start(made, p, sampling(LONG)) for p in prompts(8, lengths=(5,))]
    for outputs in running_ones:
        await anext(outputs)
    task = asyncio.ensure_future(rest_of(start(made, [5, 6, 7])))
    await until(lambda: made.num_queued == 1, "one queued")
    yield task
    for outputs in running_ones:
        await outputs.aclose()


@contextlib.asynccontextmanager
async def asked(made, prefill, decode):
    with decode.stopped():
        task = asyncio.ensure_future(anext(start(made, [5, 6, 7])))
        await until(made.pools.holds, "a hold")
        yield task


@contextlib.asynccontextmanager
async def prefilling(made, prefill, decode):
    with prefill.stopped():
        task = asyncio.ensure_future(anext(start(made, prompts(1, lengths=(500,))[0])))
        await until_reserved(made, decode)
        yield task


@contextlib.asynccontextmanager
async def loading(made, prefill, decode):
    outputs = start(made, [token + 5 for token in prompts(1, lengths=(500,))[0]])
    with prefill.stopped():
        first = asyncio.ensure_future(anext(outputs))
        await until_reserved(made, decode)
        decode.signal(signal.SIGSTOP)
    try:
        assert (await first).index == 0
        yield asyncio.ensure_future(anext(outputs))
    finally:
        decode.signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def decoding(made, prefill, decode):
    outputs = start(made, [9, 8, 7], sampling(LONG))
    for _ in range(3):
        await anext(outputs)
    yield asyncio.ensure_future(rest_of(outputs))


@pytest.mark.parametrize("state", [queued, asked, prefilling, loading, decoding])
async def test_client_that_leaves_has_everything_freed(pool, state):
    prefill, decode = pool[0], pool[2]
    async with rig(prefill, decode) as made:
        num_whole = await num_finished(made, decode)
        async with state(made, prefill, decode) as task:
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: made.num_queued == 0, "the queue is empty")
        await until_idle(made, prefill, decode)
        assert await num_finished(made, decode) == num_whole, "nothing ran to its end"
        assert len(await made.tokens([4, 5, 6])) == 12, "the next request works"
        await until_idle(made, prefill, decode)


# --- engines die -------------------------------------------------------------------------------


async def test_prefill_engine_killed_while_computing_is_replaced(pool, victim):
    prefill, decode = pool[0], pool[2]
    lost = victim("prefill")
    (prompt,) = prompts(1, lengths=(1900,))
    async with rig(lost, decode) as made:
        task = asyncio.ensure_future(made.tokens(prompt))

        async def computes():
            return (await made.engine_metrics(lost)).scheduled_tokens

        await until(computes, "the prompt is being computed")
        await made.connect(prefill.member)
        assert 0 < await computes() < len(prompt)
        lost.kill()
        result = await task
        await until_idle(made, prefill, decode)
    assert result == reference((prompt, sampling()))[0]


def mixed_cases(num_tokens):
    """Return eight prompts: greedy ones and seeded ones."""
    return [
        (prompt, sampling(num_tokens, **(SEEDED | {"seed": 70 + i} if i % 2 else {})))
        for i, prompt in enumerate(prompts(8, lengths=(40, 65, 7, 130)))
    ]


async def begin(made, cases):
    """Start requests; return their streams and first tokens, of a decode engine too."""
    streams = [start(made, *case) for case in cases]

    async def head(outputs):
        return await token_of(outputs) + await token_of(outputs)

    return streams, await asyncio.gather(*map(head, streams))


async def finish(streams, heads):
    """Return the whole outputs of started streams."""
    rests = await asyncio.wait_for(asyncio.gather(*map(rest_of, streams)), 60)
    return [head + rest for head, rest in zip(heads, rests, strict=True)]


async def test_streams_of_a_killed_decode_engine_continue_with_the_same_tokens(pool, victim):
    prefill, other, lost = pool[0], pool[2], victim("decode")
    cases = mixed_cases(LONG)
    async with rig(prefill, other, lost) as made:
        streams, heads = await begin(made, cases)
        lost.kill()
        results = await finish(streams, heads)
        assert made.lost == [lost.incarnation]
        num_migrated = made.count("ttserve_router_migrations_total", reason="lost")
        assert 0 < num_migrated < len(cases)
        gaps = "ttserve_router_migration_gap_seconds"
        assert made.count(f"{gaps}_count", model_name="tiny", kv="recomputed") == num_migrated
        await until_idle(made, prefill, other)
    assert results == reference(*cases)


@pytest.mark.silence
async def test_streams_of_a_frozen_decode_engine_continue_with_the_same_tokens(pool, monkeypatch):
    monkeypatch.setattr(async_client, "SILENCE_S", 2.0)
    prefill, other, frozen = pool[0], pool[2], pool[3]
    cases = mixed_cases(LONG)
    async with rig(prefill, other, frozen) as made:
        streams, heads = await begin(made, cases)
        with frozen.stopped():
            results = await finish(streams, heads)
        assert made.lost == [frozen.incarnation]
        assert made.count("ttserve_router_migrations_total", reason="lost") > 0
        await made.connect(frozen.member)
        await until_idle(made, prefill, other, frozen)
    assert results == reference(*cases)


async def test_streams_longer_than_a_drain_continue_elsewhere(pool, victim, monkeypatch):
    monkeypatch.setattr(launch, "HAND_OVER_SHARE", 0.01)
    prefill, other, leaving = pool[0], pool[2], victim("decode")
    cases = mixed_cases(LONG)
    async with rig(prefill, other, leaving) as made:
        streams, heads = await begin(made, cases)
        drained = asyncio.ensure_future(asyncio.to_thread(leaving.handle.drain, 20.0))
        results = await finish(streams, heads)
        assert await drained, "nothing is left there before its time is over"
        assert made.lost == []
        assert made.count("ttserve_router_migrations_total", reason="leaving") > 0
        await until_idle(made, prefill, other, leaving)
    assert results == reference(*cases)


async def test_decode_engine_killed_during_the_transfer_gives_the_prefill_blocks_back(pool, victim):
    prefill, lost = pool[0], victim("decode")
    async with rig(prefill, lost, queue_timeout_s=0.5) as made:
        async with loading(made, prefill, lost) as task:
            leased = (await made.engine_metrics(prefill)).transfer.num_leased_blocks
            assert leased == 16, "blocks wait for the decode engine"
            lost.kill()
            # The client has its first token, and no engine can continue.
            with pytest.raises(QueueTimeoutError):
                await asyncio.wait_for(task, 5)
        await until_idle(made, prefill)


def test_prompt_of_one_replica_is_found_on_another_under_the_same_salt():
    """Two replicas that do everything, and a store."""
    name = f"test-{secrets.token_hex(8)}"
    # Patient: what a busy machine makes the store late for is dropped, as it should be.
    store = StoreConfig(
        backend="shm", capacity_bytes=2**26, address=name, unit_tokens=64, timeout_s=10.0
    )
    config = engine_config("both", kv_connector="pooled", kv_store=store)
    (prompt,) = prompts(1, lengths=(200,))

    async def cached(made, salt):
        request = msgspec.structs.replace(made.request(prompt), cache_salt=salt)
        outputs = [output async for output in made.generate(request)]
        token_ids = [token for output in outputs for token in output.token_ids]
        return token_ids, outputs[0].num_cached_tokens

    async def run(one, other):
        async with rig(one) as first, rig(other) as second:

            async def stores(made, engine, salt):
                """Whether all three units are stored; what comes before the server is dropped."""

                async def counters():
                    return (await made.engine_metrics(engine)).transfer.store

                before = await counters()
                results.append(await cached(made, salt))

                async def is_done():
                    now = await counters()
                    return now.puts + now.drops == before.puts + before.drops + 3

                await until(is_done, "the store has had three units")
                return (await counters()).puts == before.puts + 3

            results = []
            for place in ((first, one), (second, other)):
                await until(
                    lambda place=place: stores(*place, secrets.token_hex(8)), "the server is there"
                )
            results.clear()
            assert await stores(first, one, "a")
            results += [await cached(second, salt) for salt in ("b", "", "a")]
            await until_idle(first, one)
            await until_idle(second, other)
            return results

    with running(("both", config), ("both", config)) as engines:
        # Not before: engines may take longer to start than it waits for them.
        ensure_server(store, idle_s=20.0)
        results = asyncio.run(run(*engines))
    expected = reference((prompt, sampling()))[0]
    assert [token_ids for token_ids, _ in results] == [expected] * 4
    assert [num_cached for _, num_cached in results] == [0, 0, 0, 192]


async def test_two_ingresses_race_for_few_slots_and_blocks_and_lose_nothing(pool):
    prefill = pool[0]
    config = engine_config(
        "decode", max_batch_size=3, tt_data_parallel=1, num_blocks=9, max_model_len=256
    )
    cases = [(p, sampling(24)) for p in prompts(24, lengths=(20, 60, 120, 200))]
    with running(("decode", config)) as (small,):
        async with rig(prefill, small) as one, rig(prefill, small) as other:
            results = await asyncio.gather(
                *((one, other)[i % 2].tokens(*case) for i, case in enumerate(cases))
            )
            await until_idle(one, prefill, small)
            refusals = sum(
                made.count("ttserve_router_refusals_total", reason=reason)
                for made in (one, other)
                for reason in ("no_slot", "no_blocks")
            )
    assert results == reference(*cases)
    assert refusals > 0, "they met"


# --- the queue, and races, against scripted engines --------------------------------------------


def finishes(message):
    """Accept every request and end it with one token."""
    if isinstance(message, AddRequest):
        request_id = message.request.request_id
        return [Accepted(request_id, 0, 0, 0, 1), TokenOutput(request_id, 0, [5], "length")]
    return []


async def test_lost_races_for_a_slot_never_end_a_request():
    num_refusals = 7
    answer = refusing("no_slot", first=num_refusals, then=finishes)
    async with scripted(("both", "e", answer), max_attempts=2) as (made, engine):
        task = asyncio.ensure_future(made.tokens([1]))

        async def is_done_after_a_snapshot():
            await engine.send(snapshot=engine.snapshot(1))
            return task.done()

        await until(is_done_after_a_snapshot, "it has run")
        assert await task == [5]
        assert len(engine.received(AddRequest)) == num_refusals + 1


async def test_request_that_no_engine_can_ever_run_is_400():
    answer = refusing("invalid", "the prompt has 9 tokens")
    async with scripted(("both", "e", answer)) as (made, engine):
        with pytest.raises(BadRequestError, match="9 tokens"):
            await made.tokens([1] * 9)
        assert len(engine.received(AddRequest)) == 1


async def test_requests_wait_for_an_engine_that_is_paused():
    async with scripted(("both", "e", finishes)) as (made, engine):
        await engine.send(snapshot=engine.snapshot(1, paused=True))
        await until(lambda: made.pools.num_draining == 1, "it is paused")
        task = asyncio.ensure_future(made.tokens([1]))
        await until(lambda: made.num_queued == 1, "the request waits")
        await engine.send(snapshot=engine.snapshot(2, paused=True))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert engine.received(AddRequest) == []
        await engine.send(snapshot=engine.snapshot(1))
        assert await task == [5]


async def test_draining_engine_gives_way_and_is_not_asked_for_ever():
    engines = ("both", "a", refusing("draining")), ("both", "b", refusing("draining"))
    async with scripted(*engines, max_attempts=2) as (made, one, other):
        for _ in range(2):
            with pytest.raises(NotReadyError):
                await made.tokens([1])
        assert len(one.received(AddRequest)) == len(other.received(AddRequest)) == 1
        assert made.pools.num_draining == 2


async def test_engines_that_drain_cost_a_request_none_of_its_attempts():
    """Their snapshots have not arrived, as in an update of one replica after the other."""

    drains = refusing("draining", "draining")
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(ScriptedEngine("both", f"e{i}", answer))
            for i, answer in enumerate([drains] * 3 + [finishes])
        ]
        made = await stack.enter_async_context(rig(max_attempts=2))
        await made.connect(*(engine.member for engine in engines))
        await engines[3].send(snapshot=engines[3].snapshot(1))  # The last that is chosen.
        await until(lambda: made.pools.snapshot("e3").groups[0].num_empty_slots == 1, "known")
        assert await made.tokens([1]) == [5]
        assert [len(engine.received(AddRequest)) for engine in engines] == [1] * 4


async def test_a_repeatedly_refused_request_times_out_like_any_other():
    answer = refusing("no_slot", "taken")
    async with scripted(("both", "e", answer), queue_timeout_s=0.5) as (made, engine):
        task = asyncio.ensure_future(made.tokens([1]))
        while not task.done():
            # It says that it has room, and has not.
            await engine.send(snapshot=engine.snapshot(1))
            await asyncio.sleep(0.01)
            assert len(engine.received(AddRequest)) < 1000
        with pytest.raises(QueueTimeoutError):
            await task
        assert len(engine.received(AddRequest)) > 1


async def test_reservation_that_lapses_while_prefill_is_silent_is_an_error_not_a_hang():
    engines = ("prefill", "p", accepts), ("decode", "d", accepts)
    async with scripted(*engines) as (made, prefill, decode):
        task = asyncio.ensure_future(made.tokens([1]))
        await until(lambda: prefill.received(AddRequest) and decode.received(LoadKV), "asked")
        request_id = prefill.received(AddRequest)[0].request.request_id
        await decode.send(TokenOutput(request_id, 0, [], "error", error="it lapsed"))
        with pytest.raises(QueueTimeoutError, match="it lapsed"):
            await asyncio.wait_for(task, 5)
        await until(lambda: prefill.received(Abort), "prefill got the abort")


async def test_reservation_that_lapses_while_its_activation_is_on_the_way_is_a_timeout_not_a_bug():
    engines = ("prefill", "p", prefills), ("decode", "d", accepts)
    async with scripted(*engines) as (made, prefill, decode):
        outputs = start(made, [1])
        assert await token_of(outputs) == [5]
        task = asyncio.ensure_future(anext(outputs))
        await until(lambda: decode.received(Activate), "activated")
        request_id = prefill.received(AddRequest)[0].request.request_id
        await decode.send(TokenOutput(request_id, 0, [], "error", error=LAPSED))
        with pytest.raises(QueueTimeoutError, match="lapsed"):
            await asyncio.wait_for(task, 5)
        await until(lambda: prefill.received(Abort), "prefill got the abort")
        assert made.count("ttserve_router_lapsed_reservations_total", model_name="tiny") == 1


async def test_failed_transfer_of_an_earlier_ticket_does_not_abort_the_present_one():
    refuses = refusing("queue_full", "full")
    engines = ("prefill", "p1", refuses), ("prefill", "p2", accepts), ("decode", "d", accepts)
    async with scripted(*engines) as (made, _first, second, decode):
        outputs = start(made, [1])
        task = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(decode.received(LoadKV)) == 2, "two tickets")
        await until(lambda: second.received(AddRequest), "the second is asked")
        old, new = decode.received(LoadKV)
        assert (old.epoch, new.epoch) == (0, 1)
        await decode.send(KVLoaded(new.request_id, old.epoch, "peer_lost"))
        await second.send(TokenOutput(new.request_id, 0, [5]))
        assert (await task).token_ids == [5]
        assert [m.token_ids for m in decode.received(Activate)] in ([], [[[5]]])
        await decode.send(TokenOutput(new.request_id, 1, [6]))
        assert (await anext(outputs)).token_ids == [6]
        assert second.received(Abort) == [], "its transfer is under way"
        await decode.send(TokenOutput(new.request_id, 2, [7], "length"))
        assert await rest_of(outputs) == [7]


CHOICES = local.SamplingParams(max_tokens=10, temperature=1.5, seed=3, n=2, ignore_eos=True)


def alone(params):
    """Return the parameters of as many requests of one choice."""
    seeds = range(params.seed, params.seed + params.n)
    return [msgspec.structs.replace(params, n=1, seed=seed) for seed in seeds]


async def choices_of(outputs, num_choices):
    """Read a request to its end; return the tokens of its choices."""
    tokens = [[] for _ in range(num_choices)]
    async for output in outputs:
        known = tokens[output.choice]
        known += output.token_ids[len(known) - output.index :]
    return tokens


async def test_choices_decode_behind_a_prefill_whose_kv_is_fetched_once(pool):
    prompt = [7 * i % 150 + 3 for i in range(100)]
    wanted = reference(*((prompt, params) for params in alone(CHOICES)))
    async with rig(pool[0], pool[2]) as made:
        before = await transfers(made, pool[2])
        outputs = made.generate(made.request(prompt, CHOICES))
        assert await choices_of(outputs, CHOICES.n) == wanted
        assert (await transfers(made, pool[2]))[0] == before[0] + 1
        await until_idle(made, pool[0], pool[2])


async def test_choices_continue_on_another_engine_when_theirs_is_lost(pool, victim):
    prompt = [11 * i % 150 + 3 for i in range(60)]
    params = msgspec.structs.replace(CHOICES, max_tokens=60)
    wanted = reference(*((prompt, one) for one in alone(params)))
    prefill, other, lost = pool[0], pool[2], victim("decode")
    async with rig(prefill, lost) as made:
        outputs = made.generate(made.request(prompt, params))
        tokens = [[], []]
        while min(map(len, tokens)) < 5:
            output = await anext(outputs)
            tokens[output.choice] += output.token_ids
        await made.connect(other.member)
        lost.kill()
        async for output in outputs:
            known = tokens[output.choice]
            known += output.token_ids[len(known) - output.index :]
        assert tokens == wanted
        await until_idle(made, prefill, other)
