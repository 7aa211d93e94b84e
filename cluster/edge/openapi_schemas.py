"""JSON schemas of the bodies of answers, for the OpenAPI document. Pure.

Further properties may appear; those of optional features are described where clients need them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.edge.explain import RoutesView
from cluster.edge.slots import SlotsView
from cluster.edge.transfers import TransfersView

JsonSchema = dict[str, Any]

_INTEGER: JsonSchema = {"type": "integer"}
_STRING: JsonSchema = {"type": "string"}
_BOOLEAN: JsonSchema = {"type": "boolean"}
_TOKEN_IDS: JsonSchema = {"type": "array", "items": _INTEGER}
_TEXT_OR_NULL: JsonSchema = {"type": ["string", "null"]}
_OBJECT: JsonSchema = {"type": "object"}
_OBJECT_OR_NULL: JsonSchema = {"type": ["object", "null"]}
_RESPONSE_STATUSES = (
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled",
)  # fmt: skip


def ref(name: str) -> JsonSchema:
    """Return the schema that stands for a named one."""
    return {"$ref": f"#/components/schemas/{name}"}


def _array(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _object(required: JsonSchema, optional: JsonSchema | None = None) -> JsonSchema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required]}


def _list_of(name: str) -> JsonSchema:
    return _object({"object": {"const": "list"}, "data": _array(ref(name))})


_CHOICE: JsonSchema = {
    "index": _INTEGER,
    "logprobs": _OBJECT_OR_NULL,
    "finish_reason": _TEXT_OR_NULL,
}
_STOP: JsonSchema = {"stop_reason": {"type": ["string", "integer", "null"]}}
_CHOICE_OPTIONS: JsonSchema = {
    **_STOP,
    "token_ids": _TOKEN_IDS,
    "prompt_token_ids": _TOKEN_IDS,
    "prompt_logprobs": _array(_OBJECT_OR_NULL),
}
_HEAD: JsonSchema = {"id": _STRING, "created": _INTEGER, "model": _STRING}

SCHEMAS: dict[str, JsonSchema] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _STRING, "type": _STRING, "param": _TEXT_OR_NULL, "code": _STRING}
            )
        }
    ),
    # One of a stream's server-sent events.
    "Event": _object({"data": _STRING}, {"event": _STRING, "id": _STRING}),
    "Usage": _object(
        {"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER},
        {
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
            "completion_tokens_details": _object({"reasoning_tokens": _INTEGER}),
        },
    ),
    "CompletionChoice": _object({**_CHOICE, "text": _STRING}, _CHOICE_OPTIONS),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _array(ref("CompletionChoice")),
            "usage": ref("Usage"),
        }
    ),
    "GeneratedChoice": _object({**_CHOICE, "token_ids": _TOKEN_IDS}, {"text": _STRING, **_STOP}),
    "Generated": _object(
        {
            "request_id": _STRING,
            "output_mode": _STRING,
            "model": _STRING,
            "created": _INTEGER,
            "choices": _array(ref("GeneratedChoice")),
            "usage": ref("Usage"),
        },
        {"prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _array(_OBJECT_OR_NULL)},
    ),
    "AnsweredCall": _object(
        {
            "id": _STRING,
            "type": {"const": "function"},
            "function": _object({"name": _STRING, "arguments": _STRING}),
        }
    ),
    "AnsweredMessage": _object(
        {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL},
        {
            "reasoning": _TEXT_OR_NULL,
            "tool_calls": _array(ref("AnsweredCall")),
            "function_call": _object({"name": _STRING, "arguments": _STRING}),
        },
    ),
    "ChatChoice": _object({**_CHOICE, "message": ref("AnsweredMessage")}, _CHOICE_OPTIONS),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _array(ref("ChatChoice")),
            "usage": ref("Usage"),
        },
        {"prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _array(_OBJECT_OR_NULL)},
    ),
    "AnthropicError": _object(
        {
            "type": {"const": "error"},
            "error": _object({"type": _STRING, "message": _STRING}, {"details": _OBJECT}),
            "request_id": _TEXT_OR_NULL,
        }
    ),
    "AnthropicMessage": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": _array(ref("AnsweredBlock")),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _TEXT_OR_NULL,
            "usage": _object(
                {
                    "input_tokens": _INTEGER,
                    "output_tokens": _INTEGER,
                    "cache_creation_input_tokens": _INTEGER,
                    "cache_read_input_tokens": _INTEGER,
                }
            ),
        }
    ),
    "AnsweredBlock": _object(
        {"type": {"enum": ["text", "thinking", "tool_use"]}},
        {
            "text": _STRING,
            "thinking": _STRING,
            "signature": _STRING,
            "id": _STRING,
            "name": _STRING,
            "input": _OBJECT,
        },
    ),
    "TokenCount": _object({"input_tokens": _INTEGER}),
    "ResponseItem": _object(
        {"id": _STRING, "type": {"enum": ["reasoning", "message", "function_call"]}},
        {
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
            "role": {"const": "assistant"},
            "content": _array({"type": "object"}),
            "summary": _array({"type": "object"}),
            "call_id": _STRING,
            "name": _STRING,
            "arguments": _STRING,
        },
    ),
    "ResponseUsage": _object(
        {
            "input_tokens": _INTEGER,
            "input_tokens_details": _object(
                {"cached_tokens": _INTEGER, "cache_write_tokens": _INTEGER}
            ),
            "output_tokens": _INTEGER,
            "output_tokens_details": _object({"reasoning_tokens": _INTEGER}),
            "total_tokens": _INTEGER,
        }
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _INTEGER,
            "completed_at": {"type": ["integer", "null"]},
            "status": {"enum": [*_RESPONSE_STATUSES]},
            "incomplete_details": _OBJECT_OR_NULL,
            "error": _OBJECT_OR_NULL,
            "model": _STRING,
            "output": _array(ref("ResponseItem")),
            "usage": {"anyOf": [ref("ResponseUsage"), {"type": "null"}]},
            "background": _BOOLEAN,
            "store": _BOOLEAN,
            "previous_response_id": _TEXT_OR_NULL,
        }
    ),
    "ResponseItems": _object(
        {
            "object": {"const": "list"},
            "data": _array({"type": "object"}),
            "first_id": _TEXT_OR_NULL,
            "last_id": _TEXT_OR_NULL,
            "has_more": _BOOLEAN,
        }
    ),
    "DeletedResponse": _object(
        {"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}}
    ),
    "PromptUsage": _object({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
    "Embedding": _object(
        {
            "object": {"const": "embedding"},
            "index": _INTEGER,
            "embedding": {"anyOf": [_array({"type": "number"}), _STRING]},
        }
    ),
    "Embeddings": _object(
        {
            **_HEAD,
            "object": {"const": "list"},
            "data": _array(ref("Embedding")),
            "usage": ref("PromptUsage"),
        }
    ),
    "RankedText": _object(
        {"index": _INTEGER, "relevance_score": {"type": "number"}},
        {"document": _object({"text": _STRING})},
    ),
    "Ranking": _object(
        {
            "id": _STRING,
            "model": _STRING,
            "results": _array(ref("RankedText")),
            "usage": ref("PromptUsage"),
        }
    ),
    "Model": _object(
        {
            "id": _STRING,
            "object": {"const": "model"},
            "created": _INTEGER,
            "owned_by": _STRING,
            "root": _STRING,
            "parent": _TEXT_OR_NULL,
            "max_model_len": _INTEGER,
        }
    ),
    "Models": _list_of("Model"),
    "Tokens": _object(
        {
            "count": _INTEGER,
            "max_model_len": _INTEGER,
            "tokens": _TOKEN_IDS,
            "token_strs": {"type": ["array", "null"], "items": _STRING},
        }
    ),
    "Text": _object({"prompt": _STRING}),
    "Health": _object({"status": _STRING}, {"reason": _STRING, "silent": _array(_STRING)}),
    "Load": _object({"server_load": _INTEGER}),
    "Version": _object({"version": _STRING}),
}
"""Schemas by name."""


def view_schemas() -> dict[str, JsonSchema]:
    """Return the schemas of the views for operators and of all that they hold, by name."""
    _, components = msgspec.json.schema_components(
        [TransfersView, SlotsView, RoutesView], ref_template="#/components/schemas/{name}"
    )
    return components
