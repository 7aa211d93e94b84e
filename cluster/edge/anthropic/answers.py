"""Answers of /v1/messages, whole and streamed, and the errors of its paths.

Owner: a `MessageWriter` belongs to one stream. Nothing here does I/O.
Source: Anthropic's API reference, "Messages", "Streaming messages" and "Errors".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.edge.anthropic.blocks import BlockWriter, content_blocks, event
from cluster.edge.families.message import MessageDelta
from cluster.edge.message_reader import MessageReader, check_end
from cluster.edge.openai import Usage
from cluster.errors import (
    NotReadyError,
    OverloadedError,
    SaturatedError,
    ThreadsUnsupportedError,
)

if TYPE_CHECKING:
    from cluster.edge.api import Body
    from cluster.edge.openai import ResponseSpec
    from cluster.errors import ServingError
    from replicas.output_processor import OutputDelta

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""Types of errors by status; others are `invalid_request_error` below 500, else `api_error`."""
_NO_CAPACITY = (SaturatedError, OverloadedError, NotReadyError)
OVERLOADED = 529
"""Status of an error while there is no capacity; it has no name of its own."""


def whole_message(spec: ResponseSpec, deltas: list[OutputDelta], usage: Usage) -> Body:
    """Return the body of an answer that is not streamed.

    Raises:
        InternalError: The generation has not finished.
        NotReadyError: It was aborted.
    """
    reader, message = MessageReader(spec, holds_calls=True), MessageDelta()
    for delta in deltas:
        message.extend(reader.read(delta))
    end = _end(deltas[-1] if deltas else None, has_calls=reader.has_calls)
    counts = _usage(usage._replace(reasoning_tokens=reader.num_reasoning_tokens), spec)
    return {**_head(spec), "content": content_blocks(message), **end, "usage": counts}


class MessageWriter:
    """Converter of one request's deltas into the events of a message.

    The last delta is held back until `finish`, which has the token counts.

    Args:
        num_prompt_tokens: Tokens of the request's prompt.
        spec: Options of the answer.
    """

    def __init__(self, num_prompt_tokens: int, spec: ResponseSpec) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._spec = spec
        self._reader = MessageReader(spec, holds_calls=False)
        self._blocks = BlockWriter()
        self._is_started = False
        self._last: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> bytes:
        """Add a delta; return the events to send now, or b""."""
        if delta.finish_reason is not None:
            self._last = delta
            return b""
        return self._begin() + self._blocks.add(self._reader.read(delta))

    def skip(self, delta: OutputDelta) -> None:
        """Do nothing: these streams cannot be resumed."""

    def finish(self, usage: Usage) -> bytes:
        """Return the rest of the message, its end and the token counts.

        Raises:
            InternalError: The generation has not finished.
            NotReadyError: It was aborted.
        """
        last = self._last
        rest = b"" if last is None else self._blocks.add(self._reader.read(last))
        end = _end(last, has_calls=self._reader.has_calls)
        num_reasoning = self._reader.num_reasoning_tokens
        counts = _usage(usage._replace(reasoning_tokens=num_reasoning), self._spec)
        fields = {"delta": end, "usage": {name: counts[name] for name in _DELTA_USAGE}}
        events = self._begin() + rest + self._blocks.close()
        return events + event("message_delta", fields) + event("message_stop", {})

    def fail(self, error: ServingError) -> bytes:
        """Return the last event of a failed stream."""
        return event("error", error_body(error, self._spec.request_id))

    def _begin(self) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        end = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}
        usage = _usage(Usage(self._num_prompt_tokens, 0), self._spec)
        message = {**_head(self._spec), "content": [], **end, "usage": usage}
        return event("message_start", {"message": message}) + event("ping", {})


_DELTA_USAGE = (
    "input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens",
    "output_tokens_details", "server_tool_use",
)  # fmt: skip


def error_status(error: ServingError) -> int:
    """Return the status of an error: 529 while there is no capacity, which no quota causes."""
    return OVERLOADED if isinstance(error, _NO_CAPACITY) else error.status


def error_body(error: ServingError, request_id: str | None) -> Body:
    """Return the JSON object of an error, for a response or the last event of a stream."""
    status = error_status(error)
    other = "invalid_request_error" if status < 500 else "api_error"
    fields: Body = {"type": _ERROR_TYPES.get(status, other), "message": error.message}
    if isinstance(error, ThreadsUnsupportedError):
        # Anthropic's client then continues without threads by itself.
        fields["details"] = {"error_code": error.code}
    return {"type": "error", "error": fields, "request_id": request_id}


def _head(spec: ResponseSpec) -> Body:
    message_id = f"msg_{spec.request_id}"
    return {"id": message_id, "type": "message", "role": "assistant", "model": spec.model}


def _end(last: OutputDelta | None, *, has_calls: bool) -> Body:
    """Return the fields that say why a message ends."""
    check_end(None if last is None else last.finish_reason)
    assert last is not None
    sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
    reason = "end_turn"
    if last.finish_reason == "length":
        reason = "max_tokens"
    elif has_calls:
        reason, sequence = "tool_use", None
    elif sequence is not None:
        reason = "stop_sequence"
    end = {"stop_reason": reason, "stop_sequence": sequence}
    return {**end, "stop_details": None, "container": None}


def _usage(usage: Usage, spec: ResponseSpec) -> Body:
    """Return the token counts; cached ones only where `args.ingress` lets clients know them."""
    num_cached = usage.cached_tokens if spec.prompt_tokens_details else 0
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - num_cached,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "cache_creation": None,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
        "server_tool_use": None,
    }
    return {**counts, "inference_geo": None, "service_tier": "standard"}
