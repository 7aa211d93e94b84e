"""What the seams carry beyond what anything uses today, from an HTTP body to engines and back.

A policy that reads every field of demand and view, an engine that returns three choices with log
probabilities, a replica that changes its role, and a configuration that was changed after it was
read: each goes the whole way, over real sockets.
"""

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import get_args

import pytest

import configs
from cluster.config.resolve import resolve
from cluster.config.schema import OrderName
from cluster.config.serve_file import read_serve_file
from cluster.ingress import Ingress
from cluster.routing import router as router_module
from cluster.routing.cost import Policies
from kv_transfer.block_hash import PREFIX_CACHE
from replicas.messages import (
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    EngineSnapshot,
    GroupSnapshot,
    KVLoaded,
    LoadKV,
    TokenLogprob,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.cluster.edge.test_routes import Client, make_app
from tests.cluster.engines import KEYS, ScriptedEngine, model_folder, until

pytestmark = pytest.mark.process

PROMPT = "the quick brown fox jumps over the lazy dog"
A, B, C = (2 + 32 + i for i in range(3))
"""Three tokens of the byte tokenizer."""


@contextlib.asynccontextmanager
async def serving(*engines, args=None, **fields):
    """An HTTP client of an ingress that has found these engines."""
    config = resolve(
        args
        or {
            "model": str(model_folder()),
            "pools": {engine.role: {} for engine in engines},
            **fields,
        }
    )
    ingress = Ingress(config, KEYS)
    try:
        ingress.fleet.add([engine.member for engine in engines])
        await until(lambda: ingress.is_ready()[0], "ready")
        app = make_app(ingress)
        yield ingress, lambda *request: Client(app).request(*request)
    finally:
        await ingress.close()


def ask(post, path="/v1/completions", **fields):
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {}
    return post("POST", path, {**prompt, "max_tokens": 4, **fields})


def accepts(message):
    return [Accepted(message.request.request_id, 0, 0, 0, 1)]


# --- a policy that reads everything --------------------------------------------------------------


class Reader:
    """A policy that reads every field of its arguments, and takes the first place."""

    def __init__(self):
        self.seen = []

    def place(self, demand, views, refused=(), spared=()):
        view = next(view for view in views if view.placement not in {*refused, *spared})
        fields = {f.name: getattr(demand, f.name) for f in dataclasses.fields(demand)}
        fields |= {
            "num_prompt_tokens": demand.num_prompt_tokens,
            "num_blocks": demand.num_blocks(view.kv_groups[0]),
            "block_hashes": demand.block_hashes(
                view.kv_groups[0].block_size, KEYS.derive(PREFIX_CACHE)[0]
            ),
        }
        self.seen.append((fields, {f: getattr(view, f) for f in view.__struct_fields__}))
        return view.placement


async def test_a_policy_sees_all_of_the_request_and_of_every_group(monkeypatch):
    decode, prefill = Reader(), Reader()
    monkeypatch.setattr(router_module, "make_policies", lambda *_: Policies(decode, prefill))
    async with (
        ScriptedEngine("prefill", "p", prefills) as first,
        ScriptedEngine("decode", "d", decodes) as second,
        serving(first, second) as (ingress, _),
    ):
        groups = [GroupSnapshot(3, [60], 1, 2, 0)]
        await second.send(snapshot=EngineSnapshot(9, False, 0, 77, 5, groups, "decode", 0.25))
        pools = ingress.fleet.pools
        await until(lambda: pools.decode_views()[0].num_empty_slots == 3, "its load is known")
        request = EngineRequest(
            "r", [7] * 43, SamplingParams(max_tokens=9, seed=1, ignore_eos=True),
            cache_salt="pepper", adapter="poet", priority=-1, tenant="acme", timeout_s=30.0,
            session="of two",
        )  # fmt: skip
        now_s = asyncio.get_running_loop().time()

        async def emit(_delta):
            pass

        await ingress.generate(request, emit)
    [(asked, view)] = decode.seen
    assert asked["prompt_token_ids"] == [7] * asked["num_prompt_tokens"] == [7] * 43
    assert (asked["num_blocks"], len(asked["block_hashes"])) == (2, 1)
    assert (asked["num_choices"], asked["expected_output_tokens"]) == (1, 9)
    assert (asked["cache_salt"], asked["adapter"], asked["tenant"]) == ("pepper", "poet", "acme")
    assert (asked["priority"], asked["session"]) == (-1, "of two")
    assert now_s + 30.0 <= asked["deadline_s"] <= now_s + 31.0
    assert (view["incarnation"], view["dp_group"], view["role"]) == ("d", 0, "decode")
    assert [kv_group.block_size for kv_group in view["kv_groups"]] == [32]
    assert (view["num_empty_slots"], view["num_free_blocks"]) == (3, [60])
    assert (view["num_active"], view["num_queued_tokens"], view["step_s"]) == (3, 77, 0.25)
    [(of_prefill, engine)] = prefill.seen
    assert of_prefill["request_id"] == asked["request_id"]
    assert (engine["incarnation"], engine["dp_group"], engine["role"]) == ("p", -1, "prefill")


# --- three choices with log probabilities --------------------------------------------------------


def one(token_id, logprob=-0.5):
    """Log probabilities of one drawn token, with one likelier."""
    return [[TokenLogprob(token_id, logprob, 2), TokenLogprob(A, -0.25, 1)]]


def prefills(message):
    """The first token of every choice, and nothing more."""
    if not isinstance(message, AddRequest):
        return []
    request = message.request
    firsts = [
        TokenOutput(
            request.request_id, 0, [A + i], choice=i,
            logprobs=one(A + i) if request.sampling.logprobs is not None else None,
        )
        for i in range(request.sampling.n)
    ]  # fmt: skip
    return [*accepts(message), *firsts]


def decodes(message):
    """The rest, interleaved: the second choice ends first, the third by a stop token."""
    match message:
        case AddRequest():
            return accepts(message)
        case LoadKV():
            return [KVLoaded(message.request_id, message.epoch, None)]
        case Activate():
            name, count = message.request_id, len(message.token_ids)
            outputs = [
                TokenOutput(name, 1, [B], "length", choice=1, logprobs=one(B)),
                TokenOutput(name, 1, [C], choice=0, logprobs=one(C)),
                TokenOutput(name, 1, [A], choice=2, logprobs=one(A)),
                TokenOutput(name, 2, [B], "stop", B, choice=2, logprobs=one(B)),
                TokenOutput(name, 2, [B], "length", choice=0, logprobs=one(B)),
            ]
            if count == 0:
                return [TokenOutput(name, 0, [A], "length")]
            if count == 1:
                return [TokenOutput(name, 1, [B], "length")]
            return [output for output in outputs if output.choice < count]
    return []


@pytest.mark.parametrize("order", get_args(OrderName))
@pytest.mark.parametrize("stream", [False, True])
async def test_three_choices_with_log_probabilities_come_through(order, stream):
    async with (
        ScriptedEngine("prefill", "p", prefills) as prefill,
        ScriptedEngine("decode", "d", decodes) as decode,
        serving(prefill, decode, router={"order": order}) as (_, post),
    ):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        response = await ask(post, n=3, logprobs=1, return_token_ids=True, **options)
        activated = decode.received(Activate)[0].token_ids
        added = decode.received(AddRequest)
    assert response.status == 200
    assert added[0].request.sampling == SamplingParams(
        max_tokens=4, n=3, logprobs=1, seed=added[0].request.sampling.seed
    )
    assert activated == [[A], [B], [C]], "the decode engine goes on from each choice's first token"
    bodies = [e for e in response.events if e != "[DONE]"] if stream else [response.body]
    tokens, reasons, logprobs = {0: [], 1: [], 2: []}, {}, {0: [], 1: [], 2: []}
    for body in bodies:
        for choice in body["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
            logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert tokens == {0: [A, C, B], 1: [B, B], 2: [C, A, B]}
    assert reasons == {0: "length", 1: "length", 2: "stop"}
    assert {i: len(values) for i, values in logprobs.items()} == {0: 3, 1: 2, 2: 3}
    counts = [body["usage"] for body in bodies if body.get("usage")]
    assert [usage["completion_tokens"] for usage in counts] == [8], "once, of the whole request"


# --- a replica that changes its role -------------------------------------------------------------


async def test_replicas_that_trade_roles_are_asked_for_their_new_parts():
    def plays_both(engine):
        def answer(message):
            is_prefill = isinstance(message, AddRequest) and message.mode == "prefill"
            return prefills(message) if is_prefill else decodes(message)

        return answer

    async with (
        ScriptedEngine("prefill", "one", plays_both(1)) as one_,
        ScriptedEngine("decode", "two", plays_both(2)) as two,
        serving(one_, two) as (ingress, post),
    ):
        assert (await ask(post)).status == 200
        one_.role, two.role = "decode", "prefill"
        for engine in (one_, two):
            await engine.send(snapshot=engine.snapshot(4))
        await until(
            lambda: [v.incarnation for v in ingress.fleet.pools.decode_views()] == ["one"],
            "the ingress believes it",
        )
        assert (await ask(post)).status == 200
        text = (await ingress.metrics_text()).decode()
        modes = [[m.mode for m in e.received(AddRequest)] for e in (one_, two)]
    assert modes == [["prefill", "decode"], ["decode", "prefill"]]
    assert "ttserve_router_refusals_total{" not in text


async def test_a_role_change_during_placement_does_not_harm_the_request():
    """The engine that was asked to decode prefills from now on, and the other way round."""

    def answers_late(message):
        return (
            []
            if isinstance(message, AddRequest) and message.mode == "decode"
            else (decodes(message) or prefills(message))
        )

    async with (
        ScriptedEngine("prefill", "one", prefills) as one_,
        ScriptedEngine("decode", "two", answers_late) as two,
        serving(one_, two) as (ingress, post),
    ):
        asked = asyncio.ensure_future(ask(post))
        await until(lambda: two.received(AddRequest), "asked to decode")
        one_.role, two.role = "decode", "prefill"
        for engine in (one_, two):
            await engine.send(snapshot=engine.snapshot(4))
        await until(
            lambda: [v.incarnation for v in ingress.fleet.pools.prefill_views()] == ["two"],
            "the ingress believes it",
        )
        await two.send(*accepts(two.received(AddRequest)[0]))
        response = await asked
        status = response.status
        holds = ingress.fleet.pools.holds()
    assert (status, holds) == (200, [])


# --- a configuration that arrives by override ----------------------------------------------------


async def test_an_overridden_configuration_is_served():
    file = read_serve_file(Path(configs.__file__).parent / "single.yaml")
    changed = file.override(args={"model": str(model_folder()), "model_name": "changed"})
    async with (
        ScriptedEngine("both", "e", finishes) as engine,
        serving(engine, args=changed.args) as (_, post),
    ):
        models = (await post("GET", "/v1/models")).body["data"]
        by_name = [(await ask(post, model=name)).status for name in ("changed", "demo")]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("changed", 8192)]
    assert by_name == [200, 404]


def finishes(message):
    if isinstance(message, AddRequest):
        return [*accepts(message), TokenOutput(message.request.request_id, 0, [A], "length")]
    return []
