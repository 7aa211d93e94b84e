"""Answers of /v1/responses, whole or as the events of a stream. Pure but for the clock.

Source: OpenAI API reference (openai-python 3.57 types of responses); the Open Responses
specification, which ends a stream with `[DONE]`.
"""

from __future__ import annotations

import bisect
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.edge.api import openai_error_body
from cluster.edge.families.message import ContentPiece, ReasoningPiece
from cluster.edge.message_reader import MessageReader, check_end
from cluster.edge.openai_responses import ChatShape
from cluster.edge.responses.events import DONE, EventEncoder, begin_events, error_event, last_event
from cluster.edge.responses.items import OutputItems
from cluster.edge.responses.recording import (
    KnownOutput,
    Part,
    decode_parts,
    encode_part,
    part_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.edge.openai import ResponseSpec, Usage
    from cluster.edge.responses.items import Event
    from cluster.errors import ServingError
    from replicas.messages import EngineRequest, TokenLogprob
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What an answer needs to know of its request.

    Attributes:
        response_id: Its id.
        repeated: Fields of the answer that repeat the request.
        has_logprobs: Whether texts have log probabilities.
        namespaces: See `cluster.edge.responses.translation.Translation`.
        is_stored: Whether the answer is kept.
        is_background: Whether it is made without a connection.
        items: The request's own input.
        previous: Encoded items of the conversation before that, one entry per response.
        body: The request's body, if it is in the background.
        recording: Recording of the output so far, if another ingress has begun it.
    """

    response_id: str
    repeated: dict[str, Any]
    has_logprobs: bool = False
    namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    is_stored: bool = False
    is_background: bool = False
    items: list[dict[str, Any]] = field(default_factory=list)
    previous: tuple[bytes, ...] = ()
    body: dict[str, Any] = field(default_factory=dict)
    recording: bytes = b""


class ResponseBuilder:
    """Builder of one response from the deltas of its output.

    Args:
        tokenizer: Tokenizer of the model.
        request: The engines' request.
        spec: Options of the answer.

    Attributes:
        recording: Recording of the output so far, if the events may be asked for again.
    """

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest, spec: ResponseSpec) -> None:
        self._shape = ChatShape(tokenizer)
        self._request = request
        self._spec = spec
        self._options: ResponseOptions = spec.own
        self._reader = MessageReader(spec, holds_calls=not spec.stream)
        key = self._options.response_id.removeprefix("resp_")
        self._output = OutputItems(key)
        own = self._options
        # The items of any other answer tell which events it would have had.
        self._is_recorded = own.is_background or (own.is_stored and spec.stream)
        self.recording = bytearray(own.recording)
        known = decode_parts(own.recording)
        for part in known:
            self._output.add(part)
        self._known = KnownOutput(known)
        # Of tokens whose text no piece has had yet.
        self._logprobs: list[list[TokenLogprob]] = []
        self._finish_reason: str | None = None

    def add(self, delta: OutputDelta) -> list[Event]:
        """Add a delta; return its events."""
        self._logprobs += delta.logprobs or ()
        self._finish_reason = delta.finish_reason
        events: list[Event] = []
        for piece in self._reader.read(delta).pieces:
            logprobs: list[Body] = []
            if isinstance(piece, ContentPiece | ReasoningPiece):
                logprobs = self._take_logprobs(piece.text)
            part = part_of(piece, logprobs, self._options.namespaces)
            events += self._add_part(part)
        return events

    def begin(self) -> None:
        """Record the beginning of a response in the background."""
        self._add_part(Part("begin"))

    def _add_part(self, part: Part) -> list[Event]:
        new = self._known.new_part(part)
        if new is None:
            return []
        if self._is_recorded:
            self.recording += encode_part(new)
        return self._output.add(new)

    def finish(self, usage: Usage) -> tuple[list[Event], Body]:
        """End the output; return its last events, and the response.

        Raises:
            InternalError: The output has no end.
            NotReadyError: It was aborted.
        """
        check_end(self._finish_reason)
        status = "incomplete" if self._finish_reason == "length" else "completed"
        events = self._output.finish("incomplete" if status == "incomplete" else "completed")
        response = self.response(status, self._usage_body(usage))
        response["output"] = self._output.whole_items()
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return events, response

    def fail(self, error: ServingError) -> Body:
        """End the output where it is; return the response."""
        self._output.close("incomplete")
        return {
            **self.response("failed"),
            "error": {"code": error.code, "message": error.message},
        }

    def cancel(self) -> Body:
        """End the output where it is, as its client wishes; return the response."""
        self._output.close("incomplete")
        return self.response("cancelled")

    def response(self, status: str, usage: Body | None = None) -> Body:
        """Return the response as it is now."""
        sampling = self._request.sampling
        return {
            "id": self._options.response_id,
            "object": "response",
            "created_at": self._spec.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": self._options.is_background,
            "error": None,
            "incomplete_details": None,
            "model": self._spec.model,
            "output": list(self._output.items),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "service_tier": "default",
            "store": self._options.is_stored,
            "usage": usage,
            **self._options.repeated,
        }

    def _take_logprobs(self, text: str) -> list[Body]:
        """Return the log probabilities of a text's tokens.

        Tokens before them are markup; those behind them are of white space that was held back.
        """
        if not (self._options.has_logprobs and self._logprobs):
            return []
        tokens: list[Body] = self._shape.logprobs(self._logprobs, 0)[0]["content"]
        begin, end = _tokens_of(text, [bytes(token["bytes"]) for token in tokens])
        self._logprobs = self._logprobs[end:]
        return tokens[begin:end]

    def _usage_body(self, usage: Usage) -> Body:
        cached_tokens = usage.cached_tokens if self._spec.prompt_tokens_details else 0
        return {
            "input_tokens": usage.prompt_tokens,
            # OpenAI counts tokens that it charges for as written to its cache.
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _tokens_of(text: str, spelled: list[bytes]) -> tuple[int, int]:
    """Return where the tokens of a text begin and end among the spelled ones.

    A text that is not there has hidden tokens within it, and counts from the first one.
    """
    ends = list(itertools.accumulate(map(len, spelled)))
    encoded = text.encode()
    start = max(b"".join(spelled).find(encoded), 0)
    end = bisect.bisect_left(ends, start + len(encoded)) + 1
    return bisect.bisect_right(ends, start), min(end, len(spelled))


class ResponseEvents:
    """Writer of one response's events; the stream begins with the first delta.

    Args:
        builder: Builder of the response.
        keep: Called with the finished response.
    """

    def __init__(self, builder: ResponseBuilder, keep: Callable[[Body], None]) -> None:
        self._builder = builder
        self._keep = keep
        self._events = EventEncoder()

    def add(self, delta: OutputDelta) -> bytes:
        """Add a delta; return the events to send now, or b""."""
        return self._begin() + self._events.encode(self._builder.add(delta))

    def skip(self, delta: OutputDelta) -> None:
        """Streams of responses cannot be resumed."""
        raise NotImplementedError

    def finish(self, usage: Usage) -> bytes:
        """Return the end of the stream.

        Raises:
            InternalError: The output has no end.
            NotReadyError: It was aborted.
        """
        events, response = self._builder.finish(usage)
        self._keep(response)
        return self._events.encode([*events, last_event(response)]) + DONE

    def fail(self, error: ServingError) -> bytes:
        """Return the end of a stream that fails after its first byte."""
        begin = self._begin()
        details = openai_error_body(error)["error"]
        events = [error_event(details), last_event(self._builder.fail(error))]
        return begin + self._events.encode(events)

    def _begin(self) -> bytes:
        if self._events.num_events:
            return b""
        return self._events.encode(begin_events(self._builder.response("in_progress")))
