"""JSON has one kind of number, so that 2.0 is an integer on every route."""

import msgspec
import pytest

from cluster.edge.anthropic.fields import COUNT_TOKENS_FIELDS, MESSAGES_FIELDS
from cluster.edge.embedding_fields import EMBEDDING_FIELDS, RERANK_FIELDS
from cluster.edge.openai_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
)
from cluster.edge.responses.fields import RESPONSES_FIELDS
from cluster.edge.tokens_api import GENERATE_FIELDS, SAMPLING_FIELDS
from replicas.messages import EngineRequest
from tests.cluster.edge.test_embeddings import EmbeddingBackend
from tests.cluster.edge.test_routes import Client, make_app

HI = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/completions": (COMPLETION_FIELDS, {"prompt": "hi"}),
    "/v1/chat/completions": (CHAT_FIELDS, {"messages": HI}),
    "/v1/messages": (MESSAGES_FIELDS, {"messages": HI, "max_tokens": 2}),
    "/v1/messages/count_tokens": (COUNT_TOKENS_FIELDS, {"messages": HI}),
    "/v1/responses": (RESPONSES_FIELDS, {"input": "hi"}),
    "/v1/embeddings": (EMBEDDING_FIELDS, {"input": "hi"}),
    "/v1/rerank": (RERANK_FIELDS, {"query": "hi", "documents": ["a", "b"]}),
    "/inference/v1/generate": (GENERATE_FIELDS, {"token_ids": [1], "sampling_params": {}}),
    "/tokenize": (TOKENIZE_FIELDS, {"prompt": "hi"}),
    "/detokenize": (DETOKENIZE_FIELDS, {"tokens": [1]}),
}


def with_number(schema, number):
    """The value of a schema with a number in it, or None if it takes no integer."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == "integer":
            return number
        if branch.get("type") == "array" and branch.get("items", {}).get("type") == "integer":
            return [number]
    return None


def bodies(path, number):
    """A body for each field that takes integers."""
    table, body = ROUTES[path]
    fields = {name: with_number(field.schema, number) for name, field in table.items()}
    found = {name: {**body, name: value} for name, value in fields.items() if value is not None}
    if table is GENERATE_FIELDS:
        for name, field in SAMPLING_FIELDS.items():
            value = with_number(field.schema, number)
            if value is not None:
                found[f"sampling_params.{name}"] = {**body, "sampling_params": {name: value}}
    return found


async def answers(path, number):
    """Status and engines' requests of each of the bodies."""
    found, backend = {}, EmbeddingBackend()
    app = make_app(backend)
    for name, body in bodies(path, number).items():
        client = await Client(app).request("POST", path, body)
        found[name] = client.status, [as_sent(request) for request in backend.requests]
        backend.requests.clear()
    return found


def as_sent(request):
    """A request as an engine decodes it, without what is drawn for each."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    sampling = msgspec.structs.replace(sent.sampling, seed=None)
    return msgspec.structs.replace(sent, request_id="", sampling=sampling)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_float_that_is_an_integer_is_one(path):
    assert await answers(path, 2.0) == await answers(path, 2)
