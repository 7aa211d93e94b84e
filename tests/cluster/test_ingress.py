"""One ingress without HTTP: text, members that come and go, metrics."""

import asyncio
import contextlib
import shutil
import signal
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import ingress as ingress_module
from cluster.config.resolve import resolve
from cluster.errors import ClusterConfigError, InternalError, NotReadyError, ReplicaLostError
from cluster.ingress import Ingress
from kv_transfer.connector import TransferInfo
from kv_transfer.curve import server_public_key
from replicas import LLM, BeamSearchParams, async_client
from replicas.async_client import AsyncMPClient
from replicas.codec import encode
from replicas.messages import (
    Abort,
    Accepted,
    AddRequest,
    EngineRequest,
    KVTransfers,
    LoadKV,
    TokenOutput,
    Utility,
    UtilityResult,
)
from replicas.sampling_params import SamplingDefaults
from tests import engines as local
from tests.cluster.edge.test_routes import OPERATOR, Client, make_app
from tests.cluster.engines import (
    BLOCK_SIZE,
    KEYS,
    ScriptedEngine,
    engine_config,
    is_idle,
    make_member,
    model_folder,
    prompts,
    running,
    sampling,
    until,
)
from tests.streams import pulled

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pool():
    """One prefill and two decode engines; the last one is killed by the last test."""
    kinds = ["prefill", "decode", "decode"]
    with running(*((kind, engine_config(kind)) for kind in kinds)) as engines:
        yield engines


@contextlib.asynccontextmanager
async def serving(*members, pools=("prefill", "decode"), **router):
    """A service that has connected to these members."""
    config = resolve(
        {
            "model": str(model_folder()),
            "engine": {"dtype": "float32", "num_blocks": 300},
            "pools": {role: {} for role in pools},
            "router": router,
        }
    )
    service = Ingress(config, KEYS)
    try:
        service.fleet.add(members)
        await connected(service, members)
        yield service
    finally:
        await service.close()


@contextlib.asynccontextmanager
async def scripted_service(answer):
    """A scripted engine alone, and a service that has connected to it."""
    async with (
        ScriptedEngine("both", "e", answer) as engine,
        serving(engine.member, pools=["both"]) as service,
    ):
        yield engine, service


async def connected(service, members):
    names = {m.description.incarnation for m in members}
    await until(
        lambda: names <= service.fleet.client.incarnations and not service.fleet._connecting,
        "connected",
    )


def ask(prompt, params=None, request_id="r"):
    return EngineRequest(request_id, list(prompt), params or sampling())


async def collect(service, request):
    """A request's deltas and its token counts."""
    deltas = []

    async def emit(delta):
        deltas.append(delta)

    usage = await service.generate(request, emit)
    assert deltas[-1].finish_reason is not None
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return deltas, usage


def start(service, request):
    """A request's deltas, to be asked for one by one."""
    return pulled(lambda emit: service.generate(request, emit))


def tokens_of(events):
    return [token for event in events for token in event.token_ids]


def text_of(events):
    return "".join(event.text for event in events)


def reference(prompt, params=None):
    with local.engine_core(engine_config("both", tt_data_parallel=1)) as core:
        return local.generate(core, [prompt], params or sampling())[0]


async def until_idle(service, engine):
    async def idle():
        return is_idle(await service.fleet.client.metrics(engine.incarnation))

    await until(idle, "idle")


async def ended(service, engine, reason):
    """How many sequences of an engine have ended for this reason."""
    groups = (await service.fleet.client.metrics(engine.incarnation)).groups
    return sum(group.requests_finished.get(reason, 0) for group in groups)


def finished(service, reason):
    name = "ttserve_ingress_requests_total"
    return service.metrics.registry.get_sample_value(name, {"finished_reason": reason}) or 0


# --- requests ----------------------------------------------------------------------------------


async def test_a_snapshot_is_named_by_its_repository_not_by_its_revision(tmp_path):
    snapshot = tmp_path / "models--some-org--Some-1B" / "snapshots" / "b968826d9c46"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model_folder(), target_is_directory=True)
    engine = {"dtype": "float32", "num_blocks": 300}
    config = resolve({"model": str(snapshot), "engine": engine, "pools": {"both": {}}})

    service = Ingress(config, KEYS)
    [card] = service.models()
    await service.close()
    assert (card.id, card.root) == ("Some-1B", "Some-1B")


async def test_every_name_of_the_model_has_a_card():
    args = {"model_name": ["demo", "gpt-4o"], "engine": {"dtype": "float32", "num_blocks": 300}}
    service = Ingress(resolve({**args, "pools": {"both": {}}}), KEYS)
    cards = service.models()
    await service.close()
    assert [(card.id, card.parent) for card in cards] == [("demo", None), ("gpt-4o", None)]
    assert len({card.root for card in cards}) == 1


def test_defaults_of_the_model_folder_reach_the_edge(tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 1}')
    engine = {"dtype": "float32", "num_blocks": 300}
    args = {"model": str(folder), "engine": engine, "pools": {"both": {}}}

    async def defaults(**more):
        service = Ingress(resolve({**args, **more}), KEYS)
        try:
            return service.models()[0].defaults
        finally:
            await service.close()

    own = SamplingDefaults(temperature=0.6, top_k=20)
    assert asyncio.run(defaults()) == own
    assert asyncio.run(defaults(generation_config="vllm")) == SamplingDefaults()
    file.write_text('{"temperature": 60}')
    with pytest.raises(ClusterConfigError, match=r"generation_config.json: temperature .* got 60"):
        resolve(args)


async def test_a_beam_search_over_http_equals_the_offline_search(pool):
    prompt = "the quick brown fox jumps over the lazy dog"
    params = {"length_penalty": 0.7, "ignore_eos": True}
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 5, "return_token_ids": True, **params}
    async with serving(*(e.member for e in pool)) as service:
        app = make_app(service, prompt_tokens_details=True)
        for _ in range(2):  # the second search finds the prompt's first block cached
            body = {"prompt": prompt, **fields}
            answer = await Client(app).request("POST", "/v1/completions", body)
    with LLM(str(model_folder()), multiprocess=False, dtype="float32", num_blocks=300) as llm:
        beams = BeamSearchParams(beam_width=3, max_tokens=5, **params)
        [expected] = llm.beam_search([prompt], beams)
    choices, usage = answer.body["choices"], answer.body["usage"]
    num_prompt_tokens = len(prompt)
    assert [c["token_ids"] for c in choices] == [
        s.tokens[num_prompt_tokens:] for s in expected.sequences
    ]
    assert [c["text"] for c in choices] == [s.text for s in expected.sequences]
    assert {c["finish_reason"] for c in choices} == {"length"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt_tokens, 15)
    assert usage["prompt_tokens_details"]["cached_tokens"] == BLOCK_SIZE


async def test_text_and_tokens_equal_those_of_a_local_engine(pool):
    (prompt,) = prompts(1, lengths=(40,))
    async with serving(*(e.member for e in pool)) as service:
        events, usage = await collect(service, ask(prompt))
        text = service.tokenizer.decode(tokens_of(events))
        num_finished = finished(service, "length")
    assert tokens_of(events) == reference(prompt)
    assert text_of(events) == text
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 12)
    assert num_finished == 1


async def test_a_stop_string_ends_the_request_and_frees_its_slot(pool):
    (prompt,) = prompts(1, lengths=(41,))
    prefill, decode, _ = pool
    async with serving(prefill.member, decode.member) as service:
        whole = text_of((await collect(service, ask(prompt, sampling(200), "whole")))[0])
        stop = next(whole[i : i + 2] for i in range(8, 99) if whole[i : i + 2].isascii())
        reasons = ("length", "stop", "abort")
        before = [await ended(service, decode, reason) for reason in reasons]
        events, _ = await collect(service, ask(prompt, sampling(1900, stop=(stop,)), "stopped"))
        await until_idle(service, prefill)
        await until_idle(service, decode)
        after = [await ended(service, decode, reason) for reason in reasons]
        counts = [b - a for a, b in zip(before, after, strict=True)]
    assert counts == [0, 1, 0], "the engine was told to stop, and that all is well"
    assert text_of(events) == whole[: whole.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)


async def test_request_without_a_seed_gets_one_and_a_given_one_is_kept():
    async with scripted_service(finishes) as (engine, service):
        client = Client(make_app(service))
        for seed in (None, None, 0):
            body = {"prompt": "x", "max_tokens": 1, "seed": seed}
            assert (await client.request("POST", "/v1/completions", body)).status == 200
        first, second, given = [m.request.sampling.seed for m in engine.received(AddRequest)]
    assert first != second
    assert given == 0


async def test_a_ticket_in_a_body_never_reaches_an_engine():
    """Free-form fields that are taken and mean nothing here must not be passed on either."""
    mark = "tcp://10.9.8.7:6"
    free = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": mark}}
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 1,
        "metadata": free,
        "prediction": free,
        "chat_template_kwargs": free,
        "user": mark,
        "prompt_cache_key": mark,
        "cache_salt": "pepper",
    }
    headers = [("x-kv-ticket", mark), ("x-prefiller-host-port", mark)]
    async with (
        ScriptedEngine("prefill", "p", finishes) as prefill,
        ScriptedEngine("decode", "d", finishes) as decode,
        serving(prefill.member, decode.member) as service,
    ):
        app = make_app(service)
        client = await Client(app).request("POST", "/v1/chat/completions", body, headers)
        status = client.status
        messages = [*prefill.messages, *decode.messages]
    assert status == 200
    adds = [message for message in messages if isinstance(message, AddRequest)]
    assert {add.mode for add in adds} == {"prefill", "decode"}
    assert {add.request.cache_salt for add in adds} == {"pepper"}
    for message in messages:
        assert mark.encode() not in encode(message)
    for message in messages:
        if isinstance(message, LoadKV | AddRequest) and message.ticket is not None:
            ticket = KEYS.unseal(message.ticket, time.time())
            assert ticket.producer_endpoints == prefill_endpoints()


def prefill_endpoints():
    return make_member("prefill", "p").description.kv_endpoints


async def test_tokens_that_come_twice_are_shown_once():
    def repeats(message):
        if not isinstance(message, AddRequest):
            return []
        request_id = message.request.request_id
        return [
            Accepted(request_id, 0, 0, 0, 1),
            TokenOutput(request_id, 0, [40]),
            TokenOutput(request_id, 0, [40]),
            TokenOutput(request_id, 0, [40, 41]),
            TokenOutput(request_id, 2, [42], "length"),
        ]

    async with scripted_service(repeats) as (_engine, service):
        result = (await collect(service, ask([5], sampling(3))))[0]
    assert [event.token_ids for event in result] == [[40], [41], [42]]


def finishes(message):
    if isinstance(message, AddRequest):
        request_id = message.request.request_id
        return [Accepted(request_id, 0, 0, 0, 1), TokenOutput(request_id, 0, [40], "length")]
    return []


def starts(message):
    if isinstance(message, AddRequest):
        request_id = message.request.request_id
        return [Accepted(request_id, 0, 0, 0, 1), TokenOutput(request_id, 0, [40])]
    return []


def fails(message):
    if isinstance(message, AddRequest):
        request_id = message.request.request_id
        return [
            Accepted(request_id, 0, 0, 0, 1),
            TokenOutput(request_id, 0, [], "error", error="no"),
        ]
    return []


async def test_request_that_fails_is_counted_as_an_error():
    async with scripted_service(fails) as (_engine, service):
        with pytest.raises(InternalError, match="no"):
            await collect(service, ask([5]))
        assert (finished(service, "error"), finished(service, "abort")) == (1, 0)


async def test_client_that_leaves_aborts_its_request_and_is_counted():
    async with scripted_service(starts) as (engine, service):
        events = start(service, ask([5], request_id="closed"))
        await anext(events)
        await events.aclose()
        await until(lambda: engine.received(Abort) == [Abort(["closed"])], "aborted")
        task = asyncio.ensure_future(collect(service, ask([5], request_id="cancelled")))
        await until(lambda: len(engine.received(AddRequest)) == 2, "asked")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: len(engine.received(Abort)) == 2, "aborted")
        assert (finished(service, "abort"), finished(service, "error")) == (2, 0)


# --- members -----------------------------------------------------------------------------------


async def test_service_is_ready_once_every_pool_has_had_a_replica(pool):
    prefill, decode, _ = pool
    async with serving() as service:
        assert service.is_ready() == (False, "no replica yet in pool prefill, decode")
        service.fleet.add([decode.member])
        await connected(service, [decode.member])
        assert service.is_ready() == (False, "no replica yet in pool prefill")
        service.fleet.add([decode.member, prefill.member])
        await connected(service, [decode.member, prefill.member])
        assert service.is_ready() == (True, "")
        service.fleet._set_moves(prefill.incarnation, moves=False)
        assert service.is_ready() == (True, "stalled replicas: 1")
        metrics = (await service.metrics_text()).decode()
        own = f'ingress="{service.metrics.ingress}",model_name="tiny"'
        assert f"ttserve_router_stalled_replicas{{{own}}} 1.0" in metrics
        service.fleet._set_moves(decode.incarnation, moves=False)
        assert service.is_ready() == (True, "stalled replicas: 2")
        service.router.queue.check_open()  # As /health says.
        for engine in (prefill, decode):
            service.fleet._set_moves(engine.incarnation, moves=True)
        assert service.is_ready() == (True, "")
        snapshot = service.fleet.pools.snapshot(decode.incarnation)
        drains = msgspec.structs.replace(snapshot, seq=snapshot.seq + 1, draining=True)
        service.fleet._take_snapshot(decode.incarnation, drains)
        assert service.is_ready() == (False, "no replica can decode (1 draining)")
        opens = msgspec.structs.replace(snapshot, seq=snapshot.seq + 2)
        service.fleet._take_snapshot(decode.incarnation, opens)
        service.fleet._lose(prefill.incarnation, "test")
        is_ready, reason = service.is_ready()
        assert is_ready, "the decode pool can do without"
        assert reason == "stalled replicas: 1"
        service.fleet._lose(decode.incarnation, "test")
        assert service.is_ready() == (False, "no replica can decode")
        with pytest.raises(NotReadyError):
            await collect(service, ask([5]))


async def test_member_that_is_not_listed_any_more_keeps_its_requests(pool):
    """A replica that drains, or answers late, is missing from the list and still runs."""
    prefill, decode, _ = pool
    (prompt,) = prompts(1, lengths=(42,))
    async with serving(prefill.member, decode.member) as service:
        events = start(service, ask(prompt, sampling(300)))
        first = await anext(events)
        service.fleet.add([])
        rest = [event async for event in events]
        await until_idle(service, decode)
        result = [*first.token_ids, *tokens_of(rest)]
    assert result == reference(prompt, sampling(300))


async def test_member_that_does_not_answer_is_given_no_requests(pool):
    prefill, decode, other = pool
    nobody = msgspec.structs.replace(
        other.description,
        incarnation="nobody",
        input_endpoint="tcp://127.0.0.1:1",
        public_key=server_public_key(KEYS, "nobody"),
    )
    member = type(other.member)("decode", "decode-nobody", nobody)
    async with serving(prefill.member, decode.member) as service:
        service.fleet.add([prefill.member, decode.member, member])
        await until(lambda: service.fleet.pools.member("nobody"), "it is being connected")
        assert len(tokens_of((await collect(service, ask([5, 6, 7])))[0])) == 12


async def test_the_client_may_be_closed_while_it_loses_an_engine():
    closing = []
    client = AsyncMPClient(
        KEYS,
        on_dead=lambda _incarnation, _reason: closing.append(asyncio.ensure_future(client.close())),
    )
    async with ScriptedEngine("both", "e", finishes) as engine:
        await client.connect(engine.member.description)
    await until(lambda: closing, "lost")
    await asyncio.wait_for(closing[0], 5)


async def test_a_reconnecting_client_drops_its_old_requests(pool):
    _, decode, _ = pool
    async with serving(decode.member, queue_timeout_s=0.5) as service:
        num_whole = await ended(service, decode, "length")
        events = start(service, ask([5, 5, 6], sampling(1900)))
        await anext(events)
        await service.fleet.client.disconnect(decode.incarnation)
        with pytest.raises(ReplicaLostError):
            await collect_rest(events)
        await service.fleet.client.connect(decode.description)
        await until_idle(service, decode)
        result = await ended(service, decode, "length") - num_whole
    assert result == 0, "no client would have read it"


@pytest.mark.silence
async def test_an_engine_falsely_thought_lost_drops_its_old_requests(pool, monkeypatch):
    monkeypatch.setattr(async_client, "SILENCE_S", 2.0)
    prefill, decode, _ = pool
    async with serving(prefill.member, decode.member, queue_timeout_s=0.5) as service:
        reasons = ("abort", "length")
        before = [await ended(service, decode, reason) for reason in reasons]
        events = start(service, ask([5, 5, 5], sampling(1900)))
        for _ in range(3):
            await anext(events)
        with decode.stopped():
            with pytest.raises(ReplicaLostError):
                await asyncio.wait_for(collect_rest(events), 10)
            # The list still has it: the replica's actor is well.
            service.fleet.add([prefill.member, decode.member])
        await connected(service, [decode.member])
        await until_idle(service, decode)
        after = [await ended(service, decode, reason) for reason in reasons]
        num_aborted, num_finished = [b - a for a, b in zip(before, after, strict=True)]
    assert num_aborted >= 1
    assert num_finished == 0, "nobody would have read them"


# --- metrics -----------------------------------------------------------------------------------


async def test_metrics_leave_out_an_engine_that_does_not_answer():
    async with scripted_service(finishes) as (_engine, service):
        text = (await service.metrics_text()).decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert "vllm:time_to_first_token_seconds" in families


async def test_concurrent_callers_share_one_poll_of_the_engines(monkeypatch):
    monkeypatch.setattr(ingress_module, "_TRANSFERS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ingress_module, "_SCRAPE_TIMEOUT_S", 0.1)

    async with scripted_service(lambda _: []) as (engine, service):
        app, started_s = make_app(service), time.monotonic()
        paths = ["/metrics", "/kv"] * 50
        looks = [
            asyncio.create_task(Client(app).request("GET", path, headers=OPERATOR))
            for path in paths
        ]
        await asyncio.sleep(0)
        for look in looks[:40]:  # who leaves takes no answer from the others
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        first = len(engine.received(Utility))
        for _ in range(3):
            await asyncio.gather(
                *(Client(app).request("GET", path, headers=OPERATOR) for path in paths)
            )
        num_asked = len(engine.received(Utility))
    assert first == 2
    assert num_asked == 2 * (1 + 3)
    assert time.monotonic() - started_s >= 3 * ingress_module.MIN_ASK_INTERVAL_S
    assert {look.result().status for look in looks if not look.cancelled()} == {200}


async def test_transfers_are_polled_and_an_engine_without_answer_is_silent(monkeypatch):
    monkeypatch.setattr(ingress_module, "_TRANSFERS_TIMEOUT_S", 0.2)
    under_way = TransferInfo(
        request_id="r", role="producer", peer="d", path="inline", state="streaming",
        total_rows=4, ready_rows=3, done_rows=2, num_blocks=4, age_s=1.0, lease_left_s=9.0,
    )  # fmt: skip

    def answers(message):
        if isinstance(message, Utility):
            assert message.method == "kv_transfers"
            result = KVTransfers(transfers=[under_way], num_leased_blocks=4)
            return [UtilityResult(message.call_id, result)]
        return []

    async with (
        ScriptedEngine("prefill", "p", answers) as prefill,
        ScriptedEngine("decode", "d", lambda _: []) as silent_one,
        serving(prefill.member, silent_one.member) as service,
    ):
        quiet, known = (await service.transfers()).replicas
    assert (quiet.replica, quiet.is_silent) == ("decode-d", True)
    assert (known.is_silent, known.leased_blocks) == (False, 4)
    assert [t.peer for t in known.transfers] == ["decode-d"]
    assert known.transfers[0].request not in {"", "r"}, "no client can name it to an engine"


async def test_engines_at_rest_have_no_transfers(pool):
    async with serving(*(e.member for e in pool)) as service:
        await collect(service, ask(prompts(1, lengths=(71,))[0]))
        for engine in pool:
            await until_idle(service, engine)
        view = await service.transfers()
    assert len(view.replicas) == len(pool)
    assert not any(replica.is_silent or replica.transfers for replica in view.replicas)


@pytest.mark.silence
async def test_deep_health_names_an_engine_that_takes_no_step(pool):
    async with serving(*(e.member for e in pool)) as service:
        all_step = await service.probe()
        with pool[1].stopped():
            others_step = await service.probe()
    assert all_step == {engine.member.replica_id: True for engine in pool}
    assert others_step == {**all_step, pool[1].member.replica_id: False}


async def test_a_storm_of_deep_health_checks_does_not_wait_for_a_slow_step():
    asked = []

    def answers(message):
        if not isinstance(message, Utility):
            return []
        asked.append(message)
        # The first step ends; the next one does not.
        return [UtilityResult(message.call_id, True)] if len(asked) == 1 else []

    async with scripted_service(answers) as (_engine, service):
        app = make_app(service)

        def check():
            return Client(app).request("GET", "/health_generate", b"", OPERATOR)

        assert (await check()).status == 200
        checks = [asyncio.create_task(check()) for _ in range(1000)]
        await until(lambda: len(asked) == 2, "the second round has begun")
        done, waiting = await asyncio.wait(checks, timeout=0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        statuses = {task.result().status for task in done}
        num_waiting = len(waiting)
    assert statuses == {200}
    assert num_waiting <= 8


async def test_metrics_of_every_engine_are_merged(pool):
    async with serving(*(e.member for e in pool)) as service:
        await collect(service, ask(prompts(1, lengths=(70,))[0]))
        text = (await service.metrics_text()).decode()
    slots = {
        (sample.labels["pool"], sample.labels["replica"], sample.labels["dp_group"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "ttserve_slots"
    }
    assert slots == {
        (engine.member.pool, engine.member.replica_id, str(group)): (
            engine.description.slots_per_group
        )
        for engine in pool
        for group in range(engine.description.dp_groups)
    }


async def test_killed_decode_replica_leaves_the_other_serving(pool):
    prefill, decode, other = pool
    async with serving(prefill.member, other.member, queue_timeout_s=0.5) as service:
        events = start(service, ask([5, 5, 5], sampling(1900)))
        for _ in range(3):
            await anext(events)
        other.signal(signal.SIGKILL)
        with pytest.raises(ReplicaLostError):
            await asyncio.wait_for(collect_rest(events), 5)
        assert service.fleet._look.is_set(), "discovery looks again at once"
        assert not service.is_ready()[0]
        assert finished(service, "error") == 1
        service.fleet.add([prefill.member, decode.member])
        await connected(service, [decode.member])
        assert len(tokens_of((await collect(service, ask([5, 6, 7], request_id="next")))[0])) == 12
        await until_idle(service, prefill)


async def collect_rest(events):
    return [event async for event in events]
