"""Conversion of output deltas into OpenAI responses, whole or as the events of a stream.

Owner: a `ChunkWriter` belongs to one stream. Nothing here does I/O.
Source: vLLM 0.32 vllm/entrypoints/openai/{completion,chat_completion}/protocol.py; for log
probabilities also OpenAI's API reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import orjson

from cluster.edge.api import openai_error_body
from cluster.edge.families.message import (
    ArgumentsPiece,
    CallEnd,
    CallStart,
    ContentPiece,
    Message,
    MessageDelta,
    ReasoningPiece,
)
from cluster.edge.message_reader import NO_END, MessageReader
from cluster.edge.openai import AnsweredPrompt, Usage
from cluster.errors import InternalError
from replicas.messages import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.message import ToolCall
    from cluster.edge.openai import ModelCard, ResponseSpec
    from cluster.errors import ServingError
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer

Body = dict[str, Any]

_DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0
"""OpenAI's number for "very unlikely"; JSON has no infinity."""


class _Shape:
    """What the formats of both APIs share."""

    call_reason = "tool_calls"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt_logprobs(self, positions: list[list[TokenLogprob]]) -> list[Body | None]:
        """Return vLLM's log probabilities of a prompt: for each position an object by token id."""
        return [self._by_token_id(entries) if entries else None for entries in positions]

    def _by_token_id(self, entries: list[TokenLogprob]) -> Body:
        return {
            str(entry.token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": _shown(self._tokenizer.token_bytes(entry.token_id)),
            }
            for entry in entries
        }


class CompletionShape(_Shape):
    """Format of /v1/completions: text is a field of the choice."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_token_ids_in_choice = True

    def whole_choice(self, text: str) -> Body:
        """Return the field of a finished choice with its text."""
        return {"text": text}

    def chunk_choice(self, text: str, *, is_first: bool) -> bytes:
        """Return the field of a streamed choice with a piece of text, as JSON."""
        del is_first
        return b'"text":' + orjson.dumps(text)

    def logprobs(
        self, positions: list[list[TokenLogprob]], offset: int, *, as_ids: bool = False
    ) -> tuple[Body, int]:
        """Return the log probabilities of tokens, one list for each kind of value.

        Args:
            positions: For each position the sampled token first, then the likeliest ones. The
                first token of a prompt, which nothing predicts, has NaN.
            offset: Offset of the first token in the choice's text, in characters.
            as_ids: Whether tokens are named by their ids.

        Returns:
            The object, and the offset of the next token.
        """
        body: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entries in positions:
            spelled = [self._tokenizer.token_bytes(entry.token_id) for entry in entries]
            values = [_finite(entry.logprob) for entry in entries]
            tokens = [
                f"token_id:{entry.token_id}" if as_ids else _shown(spelling)
                for entry, spelling in zip(entries, spelled, strict=True)
            ]
            is_first = values[0] is None
            body["tokens"].append(tokens[0])
            body["token_logprobs"].append(values[0])
            likeliest = None if is_first else dict(zip(tokens, values, strict=True))
            body["top_logprobs"].append(likeliest)
            body["text_offset"].append(offset)
            offset += sum(byte & 0xC0 != 0x80 for byte in spelled[0])  # a character's first byte
        return body, offset


class ChatShape(_Shape):
    """Format of /v1/chat/completions: text is the content of the assistant's message."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_token_ids_in_choice = False

    def whole_choice(self, text: str) -> Body:
        """Return the field of a finished choice with its text."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def chunk_choice(self, text: str, *, is_first: bool) -> bytes:
        """Return the field of a streamed choice with a piece of text; the first has the role."""
        if is_first:
            return b'"delta":{"role":"assistant","content":' + orjson.dumps(text) + b"}"
        return b'"delta":{"content":' + orjson.dumps(text) + b"}" if text else b'"delta":{}'

    def whole_message(
        self, message: Message, echo: str, *, has_reasoning: bool, has_reasoned: bool
    ) -> Body:
        """Return the field of a finished choice that a parser has read."""
        body: Body = {"role": "assistant", "content": echo + message.content, "refusal": None}
        if has_reasoning:
            body["reasoning"] = message.reasoning or None
        if not body["content"] and (message.calls or has_reasoned):
            body["content"] = None
        if message.calls:
            body |= self._calls([_call_body(call) for call in message.calls])
        return {"message": body}

    def chunk_message(self, message: MessageDelta, *, is_first: bool) -> bytes:
        """Return the field of a streamed choice with a part of a message; the first has the role.

        A call's first entry has its index, id, type and name; all have a part of its arguments.

        Args:
            message: The part.
            is_first: Whether it is the first of its choice.
        """
        delta: Body = {"role": "assistant", "content": ""} if is_first else {}
        calls: dict[int, Body] = {}
        for piece in message.pieces:
            if isinstance(piece, ContentPiece):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, ReasoningPiece):
                delta["reasoning"] = delta.get("reasoning", "") + piece.text
            elif isinstance(piece, CallStart):
                head = {"id": piece.call_id, "type": "function"}
                function = {"name": piece.name, "arguments": ""}
                calls[piece.index] = {"index": piece.index, **head, "function": function}
            elif isinstance(piece, ArgumentsPiece):
                more = {"index": piece.index, "function": {"arguments": ""}}
                calls.setdefault(piece.index, more)["function"]["arguments"] += piece.text
        if calls:
            delta |= self._calls(list(calls.values()))
        return b'"delta":' + orjson.dumps(delta)

    def _calls(self, calls: list[Body]) -> Body:
        """Return the field of a message with its calls."""
        return {"tool_calls": calls}

    def logprobs(
        self, positions: list[list[TokenLogprob]], offset: int, *, as_ids: bool = False
    ) -> tuple[Body, int]:
        """Return the log probabilities, one object per token; see `CompletionShape.logprobs`."""
        content = []
        for entries in positions:
            drawn, *likeliest = (self._token(entry, as_ids=as_ids) for entry in entries)
            content.append({**drawn, "top_logprobs": likeliest})
        return {"content": content}, offset

    def _token(self, entry: TokenLogprob, *, as_ids: bool) -> Body:
        spelling = self._tokenizer.token_bytes(entry.token_id)
        token = f"token_id:{entry.token_id}" if as_ids else _shown(spelling)
        return {"token": token, "logprob": _finite(entry.logprob), "bytes": list(spelling)}


class FunctionCallShape(ChatShape):
    """Format of a chat with `functions`, the former name of tools: a message has one call."""

    call_reason = "function_call"

    def _calls(self, calls: list[Body]) -> Body:
        [call] = calls
        return {"function_call": call["function"]}


Shape: TypeAlias = CompletionShape | ChatShape


def whole_body(
    shape: Shape,
    request: EngineRequest,
    spec: ResponseSpec,
    deltas: list[OutputDelta],
    usage: Usage,
) -> Body:
    """Return the body of a response that is not streamed.

    Raises:
        InternalError: A choice has not finished.
    """
    prompts, num_choices = _prompts(request, spec), request.sampling.n
    by_choice = deltas_by_choice(deltas, len(prompts) * num_choices)
    choices: list[Body] = []
    num_reasoning: int | None = None
    for index, own in enumerate(by_choice):
        prompt = prompts[index // num_choices]
        kept = [_without_output(own)] if spec.drops_output else own
        all_text = "".join(delta.text for delta in kept)
        has_calls = False
        if isinstance(shape, ChatShape) and spec.new_parser is not None:
            reader = MessageReader(spec, holds_calls=True)
            text = _whole_message(shape, spec, reader, kept)
            has_calls = reader.has_calls
            num_reasoning = (num_reasoning or 0) + reader.num_reasoning_tokens
        else:
            text = shape.whole_choice(prompt.echo + all_text)
        details, _ = _details(shape, prompt, spec, kept, len(prompt.echo), has_calls=has_calls)
        choices.append({"index": index, **text, **details})
    body = {**_head(spec, shape.id_prefix, shape.whole_object), "choices": choices}
    if spec.drops_output:
        usage = usage._replace(completion_tokens=0)
    body["usage"] = usage_body(usage._replace(reasoning_tokens=num_reasoning), spec)
    _add_prompts(shape, body, prompts, num_choices, spec, by_choice)
    return body


def deltas_by_choice(deltas: list[OutputDelta], num_choices: int) -> list[list[OutputDelta]]:
    """Return the deltas of each choice.

    Raises:
        InternalError: A choice has not finished.
    """
    by_choice: list[list[OutputDelta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        by_choice[delta.choice].append(delta)
    if any(not own or own[-1].finish_reason is None for own in by_choice):
        raise InternalError(NO_END)
    return by_choice


def _whole_message(
    shape: ChatShape, spec: ResponseSpec, reader: MessageReader, deltas: list[OutputDelta]
) -> Body:
    """Return the field of a finished choice that a parser reads."""
    parts = MessageDelta()
    for delta in deltas:
        parts.extend(reader.read(delta))
    return shape.whole_message(
        Message.of(parts),
        spec.echo,
        has_reasoning=spec.include_reasoning,
        has_reasoned=reader.has_reasoned,
    )


def _add_prompts(
    shape: Shape,
    body: Body,
    prompts: Sequence[AnsweredPrompt],
    num_choices: int,
    spec: ResponseSpec,
    by_choice: list[list[OutputDelta]],
) -> None:
    """Add what an answer shows of its prompts, where its API has that."""
    if spec.return_prompt_text:
        body["prompt_text"] = spec.prompt_text
    choices = body["choices"]
    for index, holder in enumerate(choices if shape.prompt_token_ids_in_choice else [body]):
        if spec.prompt_logprobs:
            # Engines give them with the first choice of each prompt.
            [first, *_] = by_choice[index // num_choices * num_choices]
            holder["prompt_logprobs"] = shape.prompt_logprobs(first.prompt_logprobs or [])
        if spec.return_token_ids:
            holder["prompt_token_ids"] = prompts[index // num_choices].token_ids


class ChunkWriter:
    """Converter of one request's deltas into the events of a stream.

    A delta without text produces no event, unless it is the first or last of its choice; its token
    ids and log probabilities go out with the choice's next event. The request's last delta is held
    back until `finish`, which has the token counts. The common part of all events is encoded once.

    Args:
        shape: Format of the API.
        request: The request of the deltas.
        spec: Options of the response.
    """

    def __init__(self, shape: Shape, request: EngineRequest, spec: ResponseSpec) -> None:
        self._shape = shape
        self._spec = spec
        prompts, num_choices = _prompts(request, spec), request.sampling.n
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        head = orjson.dumps(_head(spec, shape.id_prefix, shape.chunk_object))
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._choices = [
            _StreamedChoice(
                self._head + b'{"index":%d,' % i,
                prompts[i // num_choices],
                offset=len(prompts[i // num_choices].echo),
            )
            for i in range(len(prompts) * num_choices)
        ]
        self._num_open = len(self._choices)
        self._num_tokens = 0
        self._last = self._choices[0]
        sampling = request.sampling
        has_logprobs = sampling.logprobs is not None or bool(sampling.logprob_token_ids)
        self._interval = spec.stream_interval
        self._is_plain = not (
            has_logprobs
            or spec.return_token_ids
            or spec.continuous_usage_stats
            or spec.return_prompt_text
            or self._interval > 1
        )
        if isinstance(shape, ChatShape) and spec.new_parser is not None:
            self._is_plain = False
            for choice in self._choices:
                choice.message = _StreamedMessage(shape, MessageReader(spec, holds_calls=True))
        counts = {"usage": None} if spec.include_usage else {}
        self._plain_end = _end({"logprobs": None, "finish_reason": None}, counts)

    def skip(self, delta: OutputDelta) -> None:
        """Count a delta that the client already has, without an event; for a single choice."""
        self._num_tokens += len(delta.token_ids)
        self._last.is_first = False
        if self._last.message is not None:
            self._last.message.add(delta)
            self._last.message.take()
        if delta.logprobs:
            _, self._last.offset = self._shape.logprobs(delta.logprobs, self._last.offset)

    def add(self, delta: OutputDelta) -> bytes:
        """Add a delta; return the event to send now, or b""."""
        choice = self._choices[delta.choice]
        self._num_tokens += len(delta.token_ids)
        has_chunk = choice.is_first or delta.text != ""
        if choice.message is not None:
            has_chunk = choice.message.add(delta) or choice.is_first
        if delta.finish_reason is None and self._is_plain:
            return self._beginning(choice, delta.text) + self._plain_end if has_chunk else b""
        choice.unsent.append(delta)
        if self._interval > 1 and not choice.is_first:
            choice.has_unsent_text |= has_chunk
            choice.num_unsent += len(delta.token_ids)
            has_chunk = choice.has_unsent_text and choice.num_unsent >= self._interval
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._last = choice
            has_chunk = self._num_open > 0
        if not has_chunk:
            return b""
        return self._chunk(choice, Usage(self._num_prompt_tokens, self._num_tokens))

    def finish(self, usage: Usage) -> bytes:
        """Return the last delta's event, the counts if requested, and the end of the stream.

        Raises:
            InternalError: A choice has not finished.
        """
        if self._num_open > 0:
            raise InternalError(NO_END)
        readers = [c.message.reader for c in self._choices if c.message is not None]
        if readers:
            num_reasoning = sum(reader.num_reasoning_tokens for reader in readers)
            usage = usage._replace(reasoning_tokens=num_reasoning)
        end = self._chunk(self._last, usage)
        if self._spec.include_usage:
            end += self._head + b"]" + _rest({"usage": usage_body(usage, self._spec)}) + b"\n\n"
        return end + _DONE

    def fail(self, error: ServingError) -> bytes:
        """Return the last event of a failed stream, which then has no `[DONE]`."""
        return b"data: " + orjson.dumps(openai_error_body(error)) + b"\n\n"

    def _chunk(self, choice: _StreamedChoice, usage: Usage) -> bytes:
        unsent, choice.unsent = choice.unsent, []
        choice.num_unsent, choice.has_unsent_text = 0, False
        message = choice.message
        has_calls = message is not None and message.reader.has_calls
        inner, choice.offset = _details(
            self._shape, choice.prompt, self._spec, unsent, choice.offset, has_calls=has_calls
        )
        outer: Body = {}
        if self._spec.return_token_ids and choice.is_first:
            holder = inner if self._shape.prompt_token_ids_in_choice else outer
            holder["prompt_token_ids"] = choice.prompt.token_ids
        if self._spec.return_prompt_text and choice.is_first:
            outer["prompt_text"] = self._spec.prompt_text
        if self._spec.continuous_usage_stats:
            outer["usage"] = usage_body(usage, self._spec)
        elif self._spec.include_usage:
            outer["usage"] = None
        beginning = (
            self._beginning(choice, "".join([delta.text for delta in unsent]))
            if message is None
            else self._message_beginning(choice, message)
        )
        return beginning + _end(inner, outer)

    def _message_beginning(self, choice: _StreamedChoice, message: _StreamedMessage) -> bytes:
        if choice.is_first and choice.prompt.echo:
            part = MessageDelta([ContentPiece(choice.prompt.echo)])
            part.extend(message.part)
            message.part = part
        piece = message.chunk(is_first=choice.is_first)
        choice.is_first = False
        return choice.head + piece

    def _beginning(self, choice: _StreamedChoice, text: str) -> bytes:
        if choice.is_first:
            text = choice.prompt.echo + text
        piece = self._shape.chunk_choice(text, is_first=choice.is_first)
        choice.is_first = False
        return choice.head + piece


@dataclass(slots=True)
class _StreamedChoice:
    """State of a choice: its events' common head, unsent deltas, and length of the sent text.

    `message` is there if a parser reads the choice.
    """

    head: bytes
    prompt: AnsweredPrompt
    is_first: bool = True
    unsent: list[OutputDelta] = field(default_factory=list)
    num_unsent: int = 0
    has_unsent_text: bool = False
    offset: int = 0
    message: _StreamedMessage | None = None


class _StreamedMessage:
    """The message of a choice: its reader, and the part that was not sent yet."""

    def __init__(self, shape: ChatShape, reader: MessageReader) -> None:
        self._shape = shape
        self.reader = reader
        self.part = MessageDelta()

    def add(self, delta: OutputDelta) -> bool:
        """Read a delta; return whether there is a part to send."""
        self.part.extend(self.reader.read(delta))
        return any(not isinstance(piece, CallEnd) for piece in self.part.pieces)

    def take(self) -> MessageDelta:
        """Return the part that was not sent."""
        part, self.part = self.part, MessageDelta()
        return part

    def chunk(self, *, is_first: bool) -> bytes:
        """Return the field of an event with the part that was not sent."""
        return self._shape.chunk_message(self.take(), is_first=is_first)


def _prompts(request: EngineRequest, spec: ResponseSpec) -> Sequence[AnsweredPrompt]:
    """Return the prompts of a request; each has `sampling.n` choices."""
    return spec.prompts or [AnsweredPrompt(request.prompt_token_ids, spec.echo)]


def _without_output(deltas: list[OutputDelta]) -> OutputDelta:
    """Return the end of a choice, with the prompt's log probabilities and no output."""
    return msgspec.structs.replace(
        deltas[-1],
        text="",
        token_ids=[],
        logprobs=None,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


def _details(
    shape: Shape,
    prompt: AnsweredPrompt,
    spec: ResponseSpec,
    deltas: list[OutputDelta],
    offset: int,
    *,
    has_calls: bool,
) -> tuple[Body, int]:
    """Return a choice's fields other than its text, and the offset at which its text ends."""
    last = deltas[-1]
    reason: str | None = last.finish_reason
    if has_calls and reason == "stop":
        reason = shape.call_reason
    fields: Body = {"logprobs": None, "finish_reason": reason}
    if positions := [position for delta in deltas for position in delta.logprobs or ()]:
        as_ids = spec.return_tokens_as_token_ids
        fields["logprobs"], offset = shape.logprobs(positions, offset, as_ids=as_ids)
    if spec.echoes_logprobs and deltas[0].prompt_logprobs:
        [_, *others] = deltas[0].prompt_logprobs
        first = [TokenLogprob(prompt.token_ids[0], math.nan, 0)]
        as_ids = spec.return_tokens_as_token_ids
        echoed, _ = shape.logprobs([first, *others], 0, as_ids=as_ids)
        own = fields["logprobs"] or {}
        fields["logprobs"] = {name: [*echoed[name], *own.get(name, ())] for name in echoed}
    if last.finish_reason is not None:
        fields["stop_reason"] = last.stop_reason
    if spec.return_token_ids:
        fields["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
    return fields, offset


def _call_body(call: ToolCall) -> Body:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _head(spec: ResponseSpec, id_prefix: str, kind: str) -> Body:
    response_id = f"{id_prefix}-{spec.request_id}"
    body = {"id": response_id, "object": kind, "created": spec.created, "model": spec.model}
    return body if spec.service_tier is None else {**body, "service_tier": "default"}


def _end(inner: Body, outer: Body) -> bytes:
    """Return the end of an event: the rest of the choice, then the rest of the body."""
    return _rest(inner) + b"]" + _rest(outer) + b"\n\n"


def _rest(fields: Body) -> bytes:
    """Return further fields of an open JSON object, and its closing brace."""
    return b"," + orjson.dumps(fields)[1:] if fields else b"}"


def _shown(spelling: bytes) -> str:
    r"""Return a token as text; incomplete characters as OpenAI shows them: \xe4\xbd."""
    return spelling.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, _MIN_LOGPROB)


def usage_body(usage: Usage, spec: ResponseSpec) -> Body:
    """Return the `usage` object."""
    body: Body = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if spec.prompt_tokens_details:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def model_body(card: ModelCard) -> Body:
    """Return a model object of /v1/models."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "ttserve",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }
