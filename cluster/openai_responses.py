"""Generation events to OpenAI response bodies, whole or in chunks; plain dicts, ready for JSON.

Owner: a `ChunkWriter` or `BodyWriter` belongs to one response. Neither knows of HTTP or SSE.
Source: vLLM 0.32 vllm/entrypoints/openai/{completion,chat_completion}/protocol.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cluster.openai import Finished, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.errors import ServingError
    from cluster.openai import GenerateRequest, GenerationEvent, ModelCard

Body = dict[str, Any]


class Shape(Protocol):
    """How one of the two APIs spells a response."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    prompt_token_ids_in_choice: bool

    def whole_choice(self, text: str) -> Body:
        """The fields of a finished choice that hold its text."""

    def chunk_choice(self, text: str, *, is_first: bool) -> Body:
        """The fields of a streamed choice that hold a piece of text."""


class CompletionShape:
    """/v1/completions: text is a field of the choice."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_token_ids_in_choice = True

    def whole_choice(self, text: str) -> Body:
        """{"text": …}."""
        return {"text": text}

    def chunk_choice(self, text: str, *, is_first: bool) -> Body:
        """{"text": …}, the first like the others."""
        del is_first
        return {"text": text}


class ChatShape:
    """/v1/chat/completions: text is the content of the assistant's message."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_token_ids_in_choice = False

    def whole_choice(self, text: str) -> Body:
        """{"message": …}."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def chunk_choice(self, text: str, *, is_first: bool) -> Body:
        """{"delta": …}; the first names the role."""
        if is_first:
            return {"delta": {"role": "assistant", "content": text}}
        return {"delta": {"content": text} if text else {}}


def usage_body(usage: Usage) -> Body:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class BodyWriter:
    """Collects the events of one generation into one response body."""

    def __init__(
        self, shape: Shape, request: GenerateRequest, request_id: str, created: int
    ) -> None:
        self._shape = shape
        self._request = request
        self._head = {
            "id": f"{shape.id_prefix}-{request_id}",
            "object": shape.whole_object,
            "created": created,
            "model": request.model,
        }
        self._events: list[GenerationEvent] = []

    def add(self, event: GenerationEvent) -> None:
        """Take an event."""
        self._events.append(event)

    def finish(self) -> Body:
        """The body; the last event taken must have been `Finished`."""
        last = self._events[-1]
        assert isinstance(last, Finished), last
        choice: Body = {
            "index": 0,
            **self._shape.whole_choice("".join(event.text for event in self._events)),
            "logprobs": None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        body = {**self._head, "choices": [choice], "usage": usage_body(last.usage)}
        if self._request.return_token_ids:
            choice["token_ids"] = [t for event in self._events for t in event.token_ids]
            holder = choice if self._shape.prompt_token_ids_in_choice else body
            holder["prompt_token_ids"] = self._request.prompt_token_ids
        return body


class ChunkWriter:
    """Turns the events of one generation into the chunks of a stream.

    Events without text give no chunk; their token ids wait for the next one. The last choice has
    `finish_reason`; a chunk of token counts alone follows it when asked for.
    """

    def __init__(
        self, shape: Shape, request: GenerateRequest, request_id: str, created: int
    ) -> None:
        self._shape = shape
        self._request = request
        self._head = {
            "id": f"{shape.id_prefix}-{request_id}",
            "object": shape.chunk_object,
            "created": created,
            "model": request.model,
        }
        self._is_first = True
        self._unsent_token_ids: list[int] = []
        self._num_tokens = 0

    def add(self, event: GenerationEvent) -> list[Body]:
        """Take an event; returns the chunks to send now."""
        self._num_tokens += len(event.token_ids)
        self._unsent_token_ids += event.token_ids
        is_last = isinstance(event, Finished)
        if not (event.text or is_last or self._is_first):
            return []
        usage = event.usage if isinstance(event, Finished) else self._usage_so_far()
        chunk: Body = {**self._head, "choices": [self._choice(event)]}
        if self._request.return_token_ids and self._is_first:
            in_choice = self._shape.prompt_token_ids_in_choice
            holder = chunk["choices"][0] if in_choice else chunk
            holder["prompt_token_ids"] = self._request.prompt_token_ids
        self._is_first = False
        if self._request.continuous_usage_stats:
            chunk["usage"] = usage_body(usage)
        elif self._request.include_usage:
            chunk["usage"] = None
        if is_last and self._request.include_usage:
            return [chunk, {**self._head, "choices": [], "usage": usage_body(usage)}]
        return [chunk]

    def _choice(self, event: GenerationEvent) -> Body:
        choice: Body = {
            "index": 0,
            **self._shape.chunk_choice(event.text, is_first=self._is_first),
            "logprobs": None,
            "finish_reason": None,
        }
        if isinstance(event, Finished):
            choice["finish_reason"] = event.finish_reason
            choice["stop_reason"] = event.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"], self._unsent_token_ids = self._unsent_token_ids, []
        return choice

    def _usage_so_far(self) -> Usage:
        return Usage(len(self._request.prompt_token_ids), self._num_tokens)


def error_body(error: ServingError) -> Body:
    """What a client gets instead of an answer, alone or as the last event of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def model_body(card: ModelCard) -> Body:
    """One model object."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "ttserve",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }


def models_body(cards: Sequence[ModelCard]) -> Body:
    """The /v1/models list."""
    return {"object": "list", "data": [model_body(card) for card in cards]}


def tokenize_body(token_ids: list[int], max_model_len: int, token_strs: list[str] | None) -> Body:
    """The /tokenize answer."""
    return {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }
