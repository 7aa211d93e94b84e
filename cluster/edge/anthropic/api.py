"""The API of /v1/messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cluster.edge.anthropic.answers import (
    OVERLOADED,
    MessageWriter,
    error_body,
    error_status,
    whole_message,
)
from cluster.edge.anthropic.fields import MESSAGES_FIELDS
from cluster.edge.anthropic.requests import parse_messages
from cluster.edge.api import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.edge.api import Body
    from cluster.edge.fields import FieldTable
    from cluster.edge.openai import ResponseSpec, Usage
    from cluster.edge.openai_requests import ParsedRequest
    from cluster.errors import ServingError
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta


class MessagesApi(Api):
    """The API of /v1/messages."""

    route: ClassVar[str] = "messages"
    summary: ClassVar[str] = "Answer a conversation of Anthropic's Messages API"
    fields: ClassVar[FieldTable] = MESSAGES_FIELDS
    answer_schema: ClassVar[str] = "AnthropicMessage"
    error_schema: ClassVar[str] = "AnthropicError"
    more_statuses: ClassVar[tuple[int, ...]] = (OVERLOADED,)
    request_id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id", b"request-id")

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        del tenant
        return parse_messages(body)

    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """See `cluster.edge.api.Api.whole`."""
        del request
        return whole_message(spec, deltas, usage)

    def stream(self, request: EngineRequest, spec: ResponseSpec) -> MessageWriter:
        """See `cluster.edge.api.Api.stream`."""
        return MessageWriter(len(request.prompt_token_ids), spec)

    @staticmethod
    def error_status(error: ServingError) -> int:
        """See `cluster.edge.api.Api.error_status`."""
        return error_status(error)

    @staticmethod
    def error_body(error: ServingError, request_id: str | None) -> Body:
        """See `cluster.edge.api.Api.error_body`."""
        return error_body(error, request_id)
