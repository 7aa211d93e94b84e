"""Embeddings of a generative model: /v1/embeddings and /v1/rerank. Pure.

Each text is a request for one token that also asks for an embedding: the engine pools the final
hidden states of the prompt and scales the result to length 1. The token has no meaning.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import orjson

from cluster.edge.api import Api
from cluster.edge.embedding_fields import EMBEDDING_FIELDS, RERANK_FIELDS
from cluster.edge.fields import bad_field, read_fields
from cluster.edge.openai_limits import MAX_PROMPTS
from cluster.edge.openai_requests import ParsedRequest, TextPrompt, read_prompts
from cluster.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from cluster.edge.api import Body
    from cluster.edge.fields import FieldTable
    from cluster.edge.openai import ResponseSpec, Usage
    from cluster.edge.openai_requests import Prompt
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta

_NEUTRAL = {"temperature": 0.0, "repetition_penalty": 1.0}
"""Sampling of the token that has no meaning, whatever the model's defaults are."""


class _EmbeddingApi(Api):
    """What both APIs share: several texts whose embeddings come together."""

    def stream(self, request: EngineRequest, spec: ResponseSpec) -> NoReturn:
        """See `cluster.edge.api.Api.stream`; no field asks for one."""
        raise AssertionError("embeddings are not streamed")

    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """See `cluster.edge.api.Api.whole`."""
        *_, body = self.whole_steps(request, spec, deltas, usage)
        assert body is not None, "the last step"
        return body


class EmbeddingsApi(_EmbeddingApi):
    """The API of /v1/embeddings."""

    route: ClassVar[str] = "embeddings"
    summary: ClassVar[str] = "Return the embeddings of texts"
    fields: ClassVar[FieldTable] = EMBEDDING_FIELDS
    answer_schema: ClassVar[str] = "Embeddings"

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        del tenant
        values = read_fields(body, EMBEDDING_FIELDS)
        given = values["input"]
        for i, each in enumerate(given if isinstance(given, list) else ()):
            if type(each) is not type(given[0]):
                raise bad_field(f"input[{i}]", "is of another kind than input[0]; send one kind")
        prompts = read_prompts("input", values["input"], values.get("add_special_tokens", True))
        return _parsed(values, prompts, values.get("encoding_format", "float"))

    def whole_steps(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Iterator[Body | None]:
        """Encode one embedding in each step, as all of them may be a million numbers."""
        del request
        data: list[orjson.Fragment] = []
        for index, raw in enumerate(_embeddings(spec, deltas)):
            if data:
                yield None
            entry = {"object": "embedding", "index": index, "embedding": _encoded(raw, spec.own)}
            data.append(orjson.Fragment(orjson.dumps(entry)))
        yield {
            "id": f"embd-{spec.request_id}",
            "object": "list",
            "created": spec.created,
            "model": spec.model,
            "data": data,
            "usage": _usage(usage),
        }


@dataclass(frozen=True, slots=True)
class _Ranking:
    """What the answer of a rerank request repeats.

    Attributes:
        documents: The texts; empty if the answer leaves them out.
        top_n: Most results.
    """

    documents: list[str]
    top_n: int


class RerankApi(_EmbeddingApi):
    """The API of /v1/rerank: cosine similarity of a query and documents."""

    route: ClassVar[str] = "rerank"
    summary: ClassVar[str] = "Order texts by their similarity to a query"
    fields: ClassVar[FieldTable] = RERANK_FIELDS
    answer_schema: ClassVar[str] = "Ranking"

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        del tenant
        values = read_fields(body, RERANK_FIELDS)
        documents, top_n = values["documents"], values.get("top_n", 0)
        if len(documents) >= MAX_PROMPTS:
            text = f"has {len(documents)} texts, but may have at most {MAX_PROMPTS - 1}"
            raise bad_field("documents", f"{text}; send more requests")
        if top_n < 0:
            raise bad_field("top_n", f"must be at least 0, got {top_n}")
        is_special = values.get("add_special_tokens", True)
        texts = [("query", values["query"])]
        texts += [(f"documents[{i}]", text) for i, text in enumerate(documents)]
        for path, text in texts:
            if not text:
                raise bad_field(path, "is empty; give some text")
        shown = documents if values.get("return_documents", True) else []
        ranking = _Ranking(shown, top_n or len(documents))
        return _parsed(
            values, [TextPrompt(text, is_special, path) for path, text in texts], ranking
        )

    def whole_steps(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Iterator[Body | None]:
        """Compare and encode one document in each step; both may be megabytes in all."""
        del request
        first, *others = _embeddings(spec, deltas)
        query = _floats(first).astype(np.float64)
        scores: list[float] = []
        for raw in others:
            # All have length 1.
            scores.append(float(_floats(raw).astype(np.float64) @ query))
            yield None
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: spec.own.top_n]
        documents = spec.own.documents
        results: list[orjson.Fragment] = []
        for index in best:
            result: Body = {"index": index, "relevance_score": scores[index]}
            if documents:
                result["document"] = {"text": documents[index]}
            results.append(orjson.Fragment(orjson.dumps(result)))
            yield None
        yield {
            "id": f"rerank-{spec.request_id}",
            "model": spec.model,
            "results": results,
            "usage": _usage(usage),
        }


def _parsed(values: dict[str, Any], prompts: list[Prompt], own: object) -> ParsedRequest:
    """Return the request of several embeddings; `own` is for the answer."""
    values = {**values, **_NEUTRAL, "pooling": values.get("pooling", "last")}
    return ParsedRequest(
        prompt=prompts[0],
        more_prompts=tuple(prompts[1:]),
        values=values,
        response_options={"own": own, "prompt_logprobs": False},
        max_tokens=1,
    )


def _embeddings(spec: ResponseSpec, deltas: list[OutputDelta]) -> list[bytes]:
    """Return the embeddings of all texts, in order.

    Raises:
        InternalError: One is missing.
    """
    found = {delta.choice: delta.embedding for delta in deltas if delta.embedding is not None}
    if sorted(found) != [*range(max(len(spec.prompts), 1))]:
        raise InternalError("an engine gave no embedding")
    return [found[index] for index in sorted(found)]


def _floats(raw: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(raw, "<f4")


def _encoded(raw: bytes, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(raw).decode()
    values: list[float] = _floats(raw).tolist()
    return values


def _usage(usage: Usage) -> Body:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
