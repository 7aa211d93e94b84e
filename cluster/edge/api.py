"""Interface of a generating API: its request bodies, its answers, and its errors.

An API translates its own body into a `ParsedRequest`. `cluster.edge.pipeline` runs every one of
them in the same way. `cluster.edge.apis` lists the APIs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cluster.edge.fields import FieldTable
    from cluster.edge.openai import ResponseSpec, Usage
    from cluster.edge.openai_requests import ParsedRequest
    from cluster.errors import ServingError
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer

Body: TypeAlias = dict[str, Any]


class StreamWriter(Protocol):
    """Converter of one request's deltas into the events of a stream; does no I/O."""

    def add(self, delta: OutputDelta) -> bytes:
        """Add a delta; return the events to send now, or b""."""

    def skip(self, delta: OutputDelta) -> None:
        """Count a delta that a resuming client already has; see `Api.is_resumable`."""

    def finish(self, usage: Usage) -> bytes:
        """Return the end of the stream.

        Raises:
            InternalError: A choice has not finished.
        """

    def fail(self, error: ServingError) -> bytes:
        """Return the end of a stream that fails after its first event."""


class Api(ABC):
    """One generating route, with errors of OpenAI's form; an application makes one object of each.

    Args:
        tokenizer: Tokenizer of the served models.

    Attributes:
        route: Name of the route in `cluster.edge.route_table`.
        summary: What the route does, for its documentation.
        fields: The fields of its bodies. With `stream` among them answers may be streamed.
        answer_schema: Name of the schema of its answers in `cluster.edge.openapi_schemas`.
        error_schema: Likewise, of its errors.
        more_statuses: Statuses of errors that only this API has.
        is_resumable: Whether a client may resume a stream by `Last-Event-ID`. The writer's `finish`
            must then begin with the one event that has the finish reason.
        request_id_headers: Headers of every answer with the request's id.
    """

    route: ClassVar[str]
    summary: ClassVar[str]
    fields: ClassVar[FieldTable]
    answer_schema: ClassVar[str]
    error_schema: ClassVar[str] = "Error"
    more_statuses: ClassVar[tuple[int, ...]] = ()
    is_resumable: ClassVar[bool] = False
    request_id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """Check the fields of a body, and translate them.

        `ParsedRequest.field_names` names the client's own fields where the translated request has
        other ones. What the answer repeats of the body goes into `ParsedRequest.response_options`
        as `own`, see `ResponseSpec.own`.

        Args:
            body: The decoded body.
            tenant: The request's tenant, for what an API keeps of it.

        Raises:
            ServingError: A field is wrong; `param` is its path in the client's body.
        """

    @abstractmethod
    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """Return the body of an answer that is not streamed.

        Raises:
            InternalError: A choice has not finished.
        """

    def whole_steps(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Iterator[Body | None]:
        """Make the body of `whole` in steps of bounded work.

        Yields:
            None while other requests may run; at last the body.

        Raises:
            InternalError: A choice has not finished.
        """
        yield self.whole(request, spec, deltas, usage)

    @abstractmethod
    def stream(self, request: EngineRequest, spec: ResponseSpec) -> StreamWriter:
        """Return the writer of a streamed answer."""

    @staticmethod
    def error_status(error: ServingError) -> int:
        """Return the status of an error before the first byte."""
        return error.status

    @staticmethod
    def error_body(error: ServingError, request_id: str | None) -> Body:
        """Return the body of an error before the first byte, on any path below the route's.

        Args:
            error: The error.
            request_id: Id of the request, as in its `x-request-id`; None if it was refused before
                it had one.
        """
        del request_id
        return openai_error_body(error)


def openai_error_body(error: ServingError) -> Body:
    """Return the JSON object of an error, for a response or the last event of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
