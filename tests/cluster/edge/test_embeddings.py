"""/v1/embeddings and /v1/rerank over a backend without engines."""

import asyncio
import base64
import math
import struct

import openai
import pytest

from cluster.edge.openai import Usage
from cluster.errors import SaturatedError
from replicas.output_processor import OutputDelta
from replicas.sampling_params import SamplingDefaults
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving
from tests.cluster.edge.test_routes import Client, call, make_app

EMBED, RERANK = "/v1/embeddings", "/v1/rerank"


def vector_of(token_ids):
    """A vector of length 1 that depends on the tokens: angle of their sum, in degrees."""
    angle = math.radians(sum(token_ids) % 90)
    return [math.cos(angle), math.sin(angle)]


class EmbeddingBackend(FakeBackend):
    """Every prompt's embedding is that of `vector_of`."""

    def __init__(self, error_at=None):
        super().__init__(self.embed)
        self.error_at = error_at

    async def embed(self, request, emit):
        if len(self.requests) == self.error_at:
            raise SaturatedError("the queue is full")
        raw = struct.pack("<2f", *vector_of(request.prompt_token_ids))
        await emit(OutputDelta(0, "x", [1], "length", embedding=raw))
        return Usage(len(request.prompt_token_ids), 1)


def ids(text):
    return FakeBackend().tokenizer.encode(text)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [ids("hi")]),
        (["hi", "you"], [ids("hi"), ids("you")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
def test_every_input_has_its_vector_in_order(given, prompts):
    backend = EmbeddingBackend()
    body = call(backend, "POST", EMBED, {"input": given}, headers=[("x-request-id", "a")]).body
    assert [request.prompt_token_ids for request in backend.requests] == prompts
    assert [entry["index"] for entry in body["data"]] == [*range(len(prompts))]
    for entry, prompt in zip(body["data"], prompts, strict=True):
        assert entry["object"] == "embedding"
        assert entry["embedding"] == pytest.approx(vector_of(prompt))
    count = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"], body["id"]) == ("list", "demo", "embd-a")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_engine_is_asked_for_one_plain_token_and_an_embedding(pooling):
    backend = EmbeddingBackend()
    backend.defaults = SamplingDefaults(
        temperature=0.7, top_k=9, repetition_penalty=1.4, max_tokens=40
    )
    call(backend, "POST", EMBED, {"input": "hi", "pooling": pooling, "cache_salt": "s"})
    [request] = backend.requests
    sampling = request.sampling
    assert (sampling.pooling, sampling.max_tokens, sampling.temperature) == (pooling, 1, 0.0)
    assert (sampling.repetition_penalty, request.cache_salt) == (1.0, "s")


def test_base64_has_the_same_numbers():
    answer = call(EmbeddingBackend(), "POST", EMBED, {"input": "hi", "encoding_format": "base64"})
    [entry] = answer.body["data"]
    found = struct.unpack("<2f", base64.b64decode(entry["embedding"]))
    assert found == pytest.approx(vector_of(ids("hi")))


@pytest.mark.parametrize(
    ("path", "body", "results"),
    [
        (EMBED, {"input": ["a"] * 256, "encoding_format": "float"}, "data"),
        (EMBED, {"input": ["a"] * 256, "encoding_format": "base64"}, "data"),
        (RERANK, {"query": "b", "documents": ["a"] * 255}, "results"),
    ],
    ids=["float", "base64", "rerank"],
)
def test_other_requests_run_while_a_large_answer_is_encoded(path, body, results):
    """Counted in turns of the event loop between the last embedding and the answer."""
    turns = []

    class Backend(EmbeddingBackend):
        async def embed(self, request, emit):
            usage = await super().embed(request, emit)
            turns.clear()
            return usage

    async def count_turns():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def run():
        counting = asyncio.create_task(count_turns())
        client = await Client(make_app(Backend())).request("POST", path, body)
        counting.cancel()
        return client

    answer = asyncio.run(run())
    assert len(turns) >= len(answer.body[results]) >= 255


@pytest.mark.parametrize("make", [lambda n: [5] * n, lambda n: "x" * n], ids=["tokens", "text"])
def test_an_input_may_be_as_long_as_a_sequence(make):
    backend = EmbeddingBackend()
    longest = backend.max_model_len
    extra = len(ids("x" * 10)) - 10
    fits = make(longest if isinstance(make(1), list) else longest - extra)
    assert call(backend, "POST", EMBED, {"input": fits}).status == 200
    assert len(backend.requests[0].prompt_token_ids) == longest
    error = call(backend, "POST", EMBED, {"input": make(longest + 1)}).body["error"]
    assert error["param"] == "input"
    assert f"max_model_len is {longest}" in error["message"]
    assert "output" not in error["message"]
    for most in (-1, longest):
        fields = {"input": make(longest + 9), "truncate_prompt_tokens": most}
        call(backend, "POST", EMBED, fields)
        assert len(backend.requests[-1].prompt_token_ids) == longest


def test_a_long_input_can_be_truncated():
    backend = EmbeddingBackend()
    call(backend, "POST", EMBED, {"input": "x" * 500, "truncate_prompt_tokens": 8})
    assert len(backend.requests[0].prompt_token_ids) == 8


def test_one_input_that_is_refused_refuses_all():
    answer = call(EmbeddingBackend(error_at=2), "POST", EMBED, {"input": ["a", "b", "c"]})
    assert answer.status == 429


def test_documents_are_ordered_by_similarity():
    backend = EmbeddingBackend()
    query, documents = "a", ["c", "a", "e", "b"]
    body = call(backend, "POST", RERANK, {"query": query, "documents": documents}).body
    wanted = [
        sum(a * b for a, b in zip(vector_of(ids(query)), vector_of(ids(text)), strict=True))
        for text in documents
    ]
    results = body["results"]
    assert [result["index"] for result in results] == sorted(range(4), key=lambda i: -wanted[i])
    for result in results:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-6)
        assert result["document"] == {"text": documents[result["index"]]}
    assert results[0]["relevance_score"] == pytest.approx(1.0)
    assert body["usage"]["prompt_tokens"] == 5


def test_the_best_documents_alone_and_without_their_texts():
    asked = {"query": "a", "documents": ["c", "a"], "top_n": 1, "return_documents": False}
    [result] = call(EmbeddingBackend(), "POST", RERANK, asked).body["results"]
    assert set(result) == {"index", "relevance_score"}
    assert result["index"] == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBED, {"input": ["a", [1]]}, "input[1]"),
        (EMBED, {}, "input"),
        (EMBED, {"input": []}, "input"),
        (EMBED, {"input": ""}, "input"),
        (EMBED, {"input": ["a", ""]}, "input[1]"),
        (EMBED, {"input": [[1], [999]]}, "input[1][0]"),
        (EMBED, {"input": "x" * 65}, "input"),
        (EMBED, {"input": ["a", "x" * 65]}, "input[1]"),
        (EMBED, {"input": ["a"] * 257}, "input"),
        (EMBED, {"input": [{"role": "user"}]}, "input[0]"),
        (EMBED, {"input": [1, "a"]}, "input[1]"),
        (EMBED, {"input": "a", "dimensions": 8}, "dimensions"),
        (EMBED, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBED, {"input": "a", "pooling": "max"}, "pooling"),
        (EMBED, {"input": "a", "use_activation": False}, "use_activation"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": ["x" * 65]}, "documents[0]"),
        (RERANK, {"query": "a", "documents": ["a"] * 256}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_a_bad_field_is_refused_by_its_path(path, body, param):
    backend = EmbeddingBackend()
    answer = call(backend, "POST", path, body)
    assert answer.status == 400, answer.body
    assert answer.body["error"]["param"] == param
    assert not backend.requests


def test_an_engine_without_an_embedding_is_an_error_of_the_server():
    async def forgets(request, emit):
        await emit(OutputDelta(0, "x", [1], "length"))
        return Usage(1, 1)

    assert call(FakeBackend(forgets), "POST", EMBED, {"input": "a"}).status == 500


def test_generating_routes_know_no_pooling():
    backend = FakeBackend()
    answer = call(backend, "POST", "/v1/completions", {"prompt": "hi", "pooling": "mean"})
    assert answer.headers["x-ttserve-ignored-fields"] == "pooling"
    assert backend.requests[0].sampling.pooling is None


def test_the_openai_client_reads_vectors():
    with serving(make_app(EmbeddingBackend())) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        with client:
            # The client asks for base64 by itself.
            found = client.embeddings.create(model="demo", input=["hi", "you"])
    assert found.data[1].embedding == pytest.approx(vector_of(ids("you")))
    assert found.usage.prompt_tokens == 5


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBED, {"input": ["a"] * 5}, "input"),
        (RERANK, {"query": "q", "documents": ["a"] * 4}, "documents"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
    ],
)
def test_more_texts_than_an_ingress_has_room_for_are_refused_before_work(
    monkeypatch, path, body, param
):
    backend = EmbeddingBackend()
    monkeypatch.setattr(backend.tokenizer, "encode", None)
    error = call(backend, "POST", path, body, max_ongoing_requests=4).body["error"]
    assert (error["code"], error["param"]) == ("bad_request", param)
    assert error["message"].startswith(f"{param} has 5 entries")
