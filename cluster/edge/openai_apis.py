"""OpenAI's generating APIs: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cluster.edge.api import Api
from cluster.edge.function_calls import parse_functions
from cluster.edge.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from cluster.edge.openai_requests import parse_chat_completion, parse_completion
from cluster.edge.openai_responses import (
    ChatShape,
    ChunkWriter,
    CompletionShape,
    FunctionCallShape,
    whole_body,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.edge.api import Body
    from cluster.edge.fields import FieldTable
    from cluster.edge.openai import ResponseSpec, Usage
    from cluster.edge.openai_requests import ParsedRequest
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer


class CompletionsApi(Api):
    """The API of /v1/completions."""

    route: ClassVar[str] = "completions"
    summary: ClassVar[str] = "Continue a text"
    is_resumable: ClassVar[bool] = True
    fields: ClassVar[FieldTable] = COMPLETION_FIELDS
    answer_schema: ClassVar[str] = "Completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._shape = CompletionShape(tokenizer)

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        del tenant
        return parse_completion(body)

    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """See `cluster.edge.api.Api.whole`."""
        return whole_body(self._shape, request, spec, deltas, usage)

    def stream(self, request: EngineRequest, spec: ResponseSpec) -> ChunkWriter:
        """See `cluster.edge.api.Api.stream`."""
        return ChunkWriter(self._shape, request, spec)


class ChatCompletionsApi(Api):
    """The API of /v1/chat/completions."""

    route: ClassVar[str] = "chat_completions"
    summary: ClassVar[str] = "Answer a conversation"
    is_resumable: ClassVar[bool] = True
    fields: ClassVar[FieldTable] = CHAT_FIELDS
    answer_schema: ClassVar[str] = "ChatCompletion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._shape = ChatShape(tokenizer)
        self._function_call_shape = FunctionCallShape(tokenizer)

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        del tenant
        if "functions" in body or "function_call" in body:
            return parse_functions(body)
        return parse_chat_completion(body)

    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """See `cluster.edge.api.Api.whole`."""
        shape = self._function_call_shape if spec.own else self._shape
        return whole_body(shape, request, spec, deltas, usage)

    def stream(self, request: EngineRequest, spec: ResponseSpec) -> ChunkWriter:
        """See `cluster.edge.api.Api.stream`."""
        shape = self._function_call_shape if spec.own else self._shape
        return ChunkWriter(shape, request, spec)
