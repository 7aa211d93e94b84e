"""Streams resumed at another ingress, over real engines: every token exactly once."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.resolve import resolve
from cluster.config.schema import IngressConfig
from cluster.edge.routes import create_app
from cluster.ingress import Ingress, split_into_tokens
from replicas.messages import EngineRequest, TokenOutput
from replicas.output_processor import OutputProcessor
from replicas.tokenizer import Tokenizer
from tests.cluster.edge.test_resume import ID
from tests.cluster.edge.test_routes import Client
from tests.cluster.engines import (
    KEYS,
    engine_config,
    is_idle,
    model_folder,
    running,
    sampling,
    until,
)

PROMPT = "the quick brown fox jumps over the lazy dog"
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def pool():
    kinds = ["prefill", "decode", "decode"]
    with running(*((kind, engine_config(kind)) for kind in kinds)) as engines:
        yield engines


@contextlib.asynccontextmanager
async def serving(engines):
    """An ingress that has found these engines, and its app."""
    pools = {"prefill": {}, "decode": {"replicas": 2}}
    config = resolve({"model": str(model_folder()), "engine": {"dtype": "float32"}, "pools": pools})
    ingress = Ingress(config, KEYS)
    try:
        ingress.fleet.add([engine.member for engine in engines])
        await until(lambda: len(ingress.fleet.pools.decode_views()) == 4, "all lanes are known")
        await until(lambda: ingress.fleet.pools.can_prefill, "prefill is known")
        yield (
            ingress,
            create_app(
                ingress, IngressConfig(max_body_bytes=2**20, request_timeout_s=60), version="0"
            ),
        )
    finally:
        await ingress.close()


async def idle(ingress, engine):
    return is_idle(await ingress.fleet.client.metrics(engine.incarnation))


async def post(app, body, last_event_id):
    headers = [("last-event-id", last_event_id)]
    return await Client(app).request("POST", "/v1/completions", body, headers)


def events(client):
    blocks = b"".join(client.chunks).decode().split("\n\n")
    assert blocks.pop() == ""
    return blocks


def tokens(blocks):
    bodies = [json.loads(ID.sub("", block)[6:]) for block in blocks if "[DONE]" not in block]
    return [token for body in bodies for token in body["choices"][0]["token_ids"]]


def text(blocks):
    bodies = [json.loads(ID.sub("", block)[6:]) for block in blocks if "[DONE]" not in block]
    return "".join(body["choices"][0]["text"] for body in bodies)


@pytest.mark.process
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_another_ingress_resumes_the_stream_of_a_lost_one(pool, temperature):
    """The client chose no seed; it has the seed only in the event id."""
    body = {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with serving(pool) as (_, undisturbed):
        whole = events(await post(undisturbed, body, "0"))
    async with serving(pool) as (first, app), serving(pool) as (second, other):
        # By the seed of the first answer, from its first event on: the same request.
        id_ = ID.match(whole[0])[1]
        client = Client(app)
        headers = [("last-event-id", id_)]
        asking = asyncio.create_task(client.request("POST", "/v1/completions", body, headers))
        await until(lambda: len(client.chunks) >= 5, "five events")
        # Its connections break as its process ends, and its engines drop the request.
        await first.fleet.client.close()
        had = events(client)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        had = [block for block in had if ID.match(block)]
        assert 5 <= len(had) < NUM_TOKENS - 2
        last = ID.match(had[-1])[1]
        rest = events(await post(other, body, last))
        refused = await post(other, body, f"{last[:-8]}{int(last[-8:], 16) ^ 1:08x}")
        assert refused.status == 409
        assert json.loads(b"".join(refused.chunks))["error"]["code"] == "tokens_differ"
        for engine in pool:
            await until(lambda engine=engine: idle(second, engine), "idle")
    assert tokens(whole[:1]) + tokens(had) + tokens(rest) == tokens(whole)
    assert len(tokens(whole)) == NUM_TOKENS
    assert text(whole[:1]) + text(had) + text(rest) == text(whole)
    assert rest[-1] == "data: [DONE]"


def pieces_of(ids, stop):
    """Return the text of the first tokens of an unfinished stream."""
    tokenizer = Tokenizer.from_folder(model_folder())
    request = EngineRequest("r", [5], sampling(100, stop=stop))
    processor = OutputProcessor(tokenizer, request, tokenizer.eos_token_ids)
    gathered = split_into_tokens(TokenOutput("r", 0, ids), 0)
    return "".join(processor.take(part).text for part in gathered)


@given(st.data())
def test_new_text_does_not_depend_on_the_grouping_of_tokens(data):
    """Ends of characters, stop strings and the end token included."""
    tokenizer = Tokenizer.from_folder(model_folder())
    words = "no 你好 more STO STOP words"
    ids = [*tokenizer.encode(words), *tokenizer.eos_token_ids]
    stop = data.draw(st.sampled_from([(), ("STOP",)]))
    num_known = data.draw(st.integers(0, len(ids)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=6)))

    def run(cuts, num_known):
        request = EngineRequest("r", [5], sampling(100, stop=stop))
        processor = OutputProcessor(tokenizer, request, tokenizer.eos_token_ids)
        pieces, taken = [], []
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            reason = "stop" if end == len(ids) else None
            for part in split_into_tokens(
                TokenOutput("r", start, ids[start:end], reason), num_known
            ):
                delta = processor.take(part)
                if delta is not None and part.index >= num_known:
                    pieces.append(delta.text)
                    taken += delta.token_ids
            if processor.is_finished:
                break
        return "".join(pieces), taken

    whole, all_ids = run(range(1, len(ids)), 0)
    if num_known < len(all_ids):
        # What a client got of the first so many tokens, however these came.
        others = data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=6))
        first, first_ids = run(sorted({*others, num_known} - {0}), 0)
        assert (first, first_ids) == (whole, all_ids)
        text, new_ids = run(cuts, num_known)
        assert all_ids[:num_known] + new_ids == all_ids
        assert first.endswith(text)
        assert pieces_of(ids[:num_known], stop) + text == whole
