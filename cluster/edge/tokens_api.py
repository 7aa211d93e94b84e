"""vLLM's API of token ids in and out: /inference/v1/generate.

A body is translated into a completion of one prompt of token ids. Answers have token ids, and with
`output_mode: text` the text, too. Source: vLLM 0.32
vllm/entrypoints/scale_out/token_in_token_out/protocol.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from cluster.edge.api import Api, openai_error_body
from cluster.edge.field_names import naming_fields
from cluster.edge.fields import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    FieldTable,
    acts,
    array_of,
    choice,
    no_effect,
    not_yet,
    read_fields,
)
from cluster.edge.message_reader import NO_END
from cluster.edge.openai import Usage
from cluster.edge.openai_fields import COMPLETION_FIELDS
from cluster.edge.openai_requests import parse_completion
from cluster.edge.openai_responses import ChatShape, deltas_by_choice, usage_body
from cluster.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.edge.api import Body
    from cluster.edge.openai import ResponseSpec
    from cluster.edge.openai_requests import ParsedRequest
    from cluster.errors import ServingError
    from replicas.messages import EngineRequest, TokenLogprob
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer

_SAMPLING = (
    "max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "allowed_token_ids", "bad_words",
    "logprobs", "logprob_token_ids", "prompt_logprobs", "skip_special_tokens",
    "structured_outputs", "spaces_between_special_tokens", "stream_interval",
    "thinking_token_budget", "repetition_detection",
)  # fmt: skip
_SHARED = ("model", "stream", "stream_options", "cache_salt", "priority", "return_token_ids")

SAMPLING_FIELDS = FieldTable(
    "SamplingParams",
    {
        **{name: COMPLETION_FIELDS[name] for name in _SAMPLING},
        "detokenize": no_effect(BOOLEAN, "output_mode says whether there is text."),
        "output_kind": no_effect(INTEGER, "stream says whether deltas are sent."),
    },
)

GENERATE_FIELDS = FieldTable(
    "GenerateRequest",
    {
        "token_ids": acts({**array_of(INTEGER), "minItems": 1}, "The prompt.", is_required=True),
        "sampling_params": acts(SAMPLING_FIELDS, "How tokens are drawn.", is_required=True),
        **{name: COMPLETION_FIELDS[name] for name in _SHARED},
        "output_mode": acts(choice("tokens", "text"), "text adds the text of the output."),
        "request_id": no_effect(STRING, "The header x-request-id names a request."),
        "token_offsets": no_effect(array_of(array_of(INTEGER)), "Offsets in a text not sent."),
        "reasoning_ended": not_yet(BOOLEAN, "Where structured output begins."),
        "reasoning_parser_kwargs": not_yet(OBJECT, "Options of a parser.", neutral=({},)),
        "features": not_yet(OBJECT, "Images, sound or video, preprocessed."),
        "content_parts": not_yet(array_of(OBJECT), "Images, sound or video.", neutral=([],)),
        "kv_transfer_params": COMPLETION_FIELDS["kv_transfer_params"],
        "ec_transfer_params": COMPLETION_FIELDS["ec_transfer_params"],
    },
)

_FIELD_NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in _SAMPLING}}
_DONE = b"data: [DONE]\n\n"


class TokensApi(Api):
    """The API of /inference/v1/generate."""

    route: ClassVar[str] = "generate_tokens"
    summary: ClassVar[str] = "Continue token ids"
    fields: ClassVar[FieldTable] = GENERATE_FIELDS
    answer_schema: ClassVar[str] = "Generated"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._shape = ChatShape(tokenizer)

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        del tenant
        values = read_fields(body, GENERATE_FIELDS)
        sampling = read_fields(values["sampling_params"], SAMPLING_FIELDS, "sampling_params.")
        completion = {
            "prompt": values["token_ids"],
            **{name: values[name] for name in _SHARED if name in values},
            # As they came: some checks change the type.
            **{name: values["sampling_params"][name] for name in sampling},
        }
        with naming_fields(_FIELD_NAMES):
            parsed = parse_completion(completion)
        options = {**parsed.response_options, "own": values.get("output_mode", "tokens")}
        return dataclasses.replace(
            parsed,
            # Without a limit the output has all the room that the prompt leaves, as in chats.
            max_tokens=sampling.get("max_tokens"),
            response_options=options,
            field_names=_FIELD_NAMES,
        )

    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """See `cluster.edge.api.Api.whole`."""
        by_choice = deltas_by_choice(deltas, request.sampling.n)
        body = {
            **_head(spec),
            "model": spec.model,
            "created": spec.created,
            "choices": [_choice(self._shape, spec, own) for own in by_choice],
            "usage": usage_body(usage, spec),
        }
        if spec.prompt_logprobs:
            found = by_choice[0][0].prompt_logprobs or []
            body["prompt_logprobs"] = self._shape.prompt_logprobs(found)
        if spec.return_token_ids:
            body["prompt_token_ids"] = request.prompt_token_ids
        return body

    def stream(self, request: EngineRequest, spec: ResponseSpec) -> TokensWriter:
        """See `cluster.edge.api.Api.stream`."""
        return TokensWriter(self._shape, request, spec)


class TokensWriter:
    """A `StreamWriter` of token ids: one event for each delta, or for `stream_interval` tokens.

    Args:
        shape: Form of log probabilities of text.
        request: The request.
        spec: Options of the answer.
    """

    def __init__(self, shape: ChatShape, request: EngineRequest, spec: ResponseSpec) -> None:
        self._shape = shape
        self._spec = spec
        self._prompt_token_ids = request.prompt_token_ids
        self._num_open = request.sampling.n
        self._num_tokens = 0
        self._is_first = True
        self._unsent: list[list[OutputDelta]] = [[] for _ in range(request.sampling.n)]
        # The first event of each choice comes at once.
        self._least = [1] * request.sampling.n

    def add(self, delta: OutputDelta) -> bytes:
        """Add a delta; return the event to send now, or b""."""
        unsent = self._unsent[delta.choice]
        unsent.append(delta)
        self._num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._num_open -= 1
        elif sum(len(each.token_ids) for each in unsent) < self._least[delta.choice]:
            return b""
        body = {**_head(self._spec), "choices": [_choice(self._shape, self._spec, unsent)]}
        if self._is_first and self._spec.return_token_ids:
            body["prompt_token_ids"] = self._prompt_token_ids
        self._is_first = False
        if self._spec.continuous_usage_stats:
            usage = Usage(len(self._prompt_token_ids), self._num_tokens)
            body["usage"] = usage_body(usage, self._spec)
        self._least[delta.choice] = self._spec.stream_interval
        unsent.clear()
        return _event(body)

    def skip(self, delta: OutputDelta) -> None:
        """Never called: these streams cannot be resumed."""
        raise NotImplementedError

    def finish(self, usage: Usage) -> bytes:
        """Return the counts if requested, and the end of the stream.

        Raises:
            InternalError: A choice has not finished.
        """
        if self._num_open > 0:
            raise InternalError(NO_END)
        if not self._spec.include_usage:
            return _DONE
        counts = {**_head(self._spec), "choices": [], "usage": usage_body(usage, self._spec)}
        return _event(counts) + _DONE

    def fail(self, error: ServingError) -> bytes:
        """Return the last event of a failed stream, which then has no `[DONE]`."""
        return _event(openai_error_body(error))


def _event(body: Body) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _head(spec: ResponseSpec) -> Body:
    return {"request_id": spec.request_id, "output_mode": spec.own}


def _choice(shape: ChatShape, spec: ResponseSpec, deltas: list[OutputDelta]) -> Body:
    """Return the part of a choice that deltas have."""
    last = deltas[-1]
    body: Body = {
        "index": last.choice,
        "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "logprobs": None,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
    positions = [position for delta in deltas for position in delta.logprobs or ()]
    if spec.own == "text":
        body["text"] = "".join(delta.text for delta in deltas)
        if positions:
            body["logprobs"], _ = shape.logprobs(positions, 0)
    elif positions:
        body["logprobs"] = {"content": [_logprobs(position) for position in positions]}
    return body


def _logprobs(position: list[TokenLogprob]) -> Body:
    """Return the drawn token, and its candidates with the drawn one first."""
    entries = [_entry(entry) for entry in position]
    return {**entries[0], "top_logprobs": entries}


def _entry(entry: TokenLogprob) -> Body:
    # JSON has no infinity.
    logprob = entry.logprob if math.isfinite(entry.logprob) else -9999.0
    return {"token_id": entry.token_id, "logprob": logprob, "rank": entry.rank}
