"""Fields of /v1/messages and /v1/messages/count_tokens, with their support here. Pure.

Source: Anthropic's API reference (anthropic-sdk-python 2.14 request types, beta ones included);
vLLM 0.32 `AnthropicMessagesRequest` for `chat_template_kwargs`.
"""

from __future__ import annotations

from typing import NoReturn

from cluster.edge.fields import (
    ANYTHING,
    BOOLEAN,
    OBJECT,
    STRING,
    FieldTable,
    Schema,
    acts,
    any_of,
    array_of,
    choice,
    no_effect,
    not_yet,
)
from cluster.edge.openai_fields import CHAT_FIELDS
from cluster.errors import ThreadsUnsupportedError


def _refuse_thread(value: object, path: str) -> NoReturn:
    """Refuse a conversation that the server keeps, in the way that clients know."""
    del value, path
    raise ThreadsUnsupportedError


EFFORTS = ("low", "medium", "high", "xhigh", "max")
_CACHE = no_effect(OBJECT, "Every prompt is cached as far as memory allows.")

_CITATIONS = no_effect(ANYTHING, "There are no citations.")

RESULT_BLOCK_FIELDS = FieldTable(
    "ToolResultContent",
    {
        "type": acts(STRING, "text.", is_required=True),
        "text": acts(STRING, "Its text."),
        "citations": _CITATIONS,
        "cache_control": _CACHE,
    },
)

CONTENT_BLOCK_FIELDS = FieldTable(
    "ContentBlock",
    {
        "type": acts(
            STRING,
            "text, tool_use, tool_result, thinking or redacted_thinking.",
            is_required=True,
        ),
        "text": acts(STRING, "Of a text block: its text."),
        "thinking": acts(STRING, "Of a thinking block: reasoning of an earlier answer."),
        "id": acts(STRING, "Of a tool_use block: the call's id."),
        "name": acts(STRING, "Of a tool_use block: the tool's name."),
        "input": acts(OBJECT, "Of a tool_use block: the call's arguments."),
        "tool_use_id": acts(STRING, "Of a tool_result block: id of its call."),
        "content": acts(
            any_of(STRING, array_of(RESULT_BLOCK_FIELDS)), "Of a tool_result block: its text."
        ),
        "is_error": acts(BOOLEAN, "Of a tool_result block: true puts 'Error: ' before its text."),
        "signature": no_effect(STRING, "Of a thinking block; it is not checked."),
        "data": no_effect(STRING, "Of a redacted_thinking block, which is left out."),
        "caller": no_effect(OBJECT, "Of a tool_use block; only the model itself calls tools."),
        "citations": _CITATIONS,
        "cache_control": _CACHE,
    },
)
"""A block of any supported type; the code that reads it knows which fields it must have."""

_CONTENT: Schema = any_of(STRING, array_of(CONTENT_BLOCK_FIELDS))

MESSAGE_FIELDS = FieldTable(
    "InputMessage",
    {
        "role": acts(
            choice("user", "assistant", "system"),
            "system may stand anywhere; behind the first turn its text joins that of the user.",
            is_required=True,
        ),
        "content": acts(_CONTENT, "A text, or blocks.", is_required=True),
    },
)

TOOL_FIELDS = FieldTable(
    "AnthropicTool",
    {
        "type": acts(STRING, "custom, or left out: Anthropic's own tools are not offered."),
        "name": acts(STRING, "1 to 128 letters, digits, dots, underscores and hyphens."),
        "description": acts(STRING, "What it does, for the model."),
        "input_schema": acts(OBJECT, "A JSON schema of its arguments."),
        "strict": acts(BOOLEAN, "A grammar makes arguments follow the schema."),
        "input_examples": no_effect(array_of(OBJECT), "Chat templates have no place for them."),
        "eager_input_streaming": no_effect(BOOLEAN, "Calls are streamed in pieces anyway."),
        "defer_loading": not_yet(BOOLEAN, "A tool that a search finds.", neutral=(False,)),
        "allowed_callers": not_yet(
            array_of(STRING), "What may call the tool.", neutral=([], ["direct"])
        ),
        "cache_control": _CACHE,
    },
)

TOOL_CHOICE_FIELDS = FieldTable(
    "AnthropicToolChoice",
    {
        "type": acts(choice("auto", "any", "tool", "none"), "Which calls.", is_required=True),
        "name": acts(STRING, "With type tool: the tool's name."),
        "disable_parallel_tool_use": acts(BOOLEAN, "True allows one call in an answer."),
    },
)

THINKING_FIELDS = FieldTable(
    "Thinking",
    {
        "type": acts(
            choice("enabled", "adaptive", "between_tools", "disabled"),
            "disabled turns the reasoning of the model's family off, the others turn it on.",
            is_required=True,
        ),
        "display": acts(
            choice("summarized", "omitted"),
            "omitted leaves thinking blocks out. They are never shortened.",
        ),
        "budget_tokens": acts(
            {"type": "integer", "minimum": 1024},
            "Most tokens of the reasoning, for models whose reasoning can be ended.",
        ),
    },
)

OUTPUT_FORMAT_FIELDS = FieldTable(
    "OutputFormat",
    {
        "type": acts(choice("json_schema"), "Form of the answer.", is_required=True),
        "schema": acts(OBJECT, "The JSON schema that the answer follows.", is_required=True),
    },
)

OUTPUT_CONFIG_FIELDS = FieldTable(
    "OutputConfig",
    {
        "effort": acts(choice(*EFFORTS), "The variable reasoning_effort of the chat template."),
        "format": acts(OUTPUT_FORMAT_FIELDS, "Form of the answer."),
        "task_budget": no_effect(OBJECT, "A hint about the length of a task."),
    },
)

METADATA_FIELDS = FieldTable(
    "Metadata", {"user_id": no_effect(STRING, "For the client's own records.")}
)

COUNT_TOKENS_FIELDS = FieldTable(
    "CountTokensRequest",
    {
        "model": CHAT_FIELDS["model"],
        "messages": acts(
            array_of(MESSAGE_FIELDS),
            "The conversation; an answer continues a last turn of the assistant.",
            is_required=True,
        ),
        "system": acts(_CONTENT, "A text, or text blocks, before the conversation."),
        "tools": acts(array_of(TOOL_FIELDS), "The tools that the model may call."),
        "tool_choice": no_effect(TOOL_CHOICE_FIELDS, "All tools are in the prompt."),
        "thinking": acts(THINKING_FIELDS, "Whether the model reasons; without it: disabled."),
        "output_config": acts(OUTPUT_CONFIG_FIELDS, "Effort and form of the answer."),
        "output_format": no_effect(OUTPUT_FORMAT_FIELDS, "It is not in the prompt."),
        "chat_template_kwargs": CHAT_FIELDS["chat_template_kwargs"],
        "context_management": no_effect(OBJECT, "Nothing is edited: the whole history is used."),
        "speed": no_effect(choice("standard", "fast"), "There is one speed."),
        "billing_policy": no_effect(OBJECT, "Nothing is billed."),
        "user_profile_id": no_effect(STRING, "For the client's own records."),
        "workspace_id": no_effect(STRING, "For the client's own records."),
        "compaction": not_yet(OBJECT, "A summary of the conversation as the answer."),
        "mcp_servers": not_yet(array_of(OBJECT), "Servers of tools.", neutral=([],)),
        "cache_control": _CACHE,
    },
)
"""Fields that both routes have."""

MESSAGES_FIELDS = FieldTable(
    "MessagesRequest",
    {
        **COUNT_TOKENS_FIELDS,
        "tool_choice": acts(TOOL_CHOICE_FIELDS, "Which calls the answer has."),
        "output_format": acts(OUTPUT_FORMAT_FIELDS, "Former name of output_config.format."),
        "max_tokens": acts(
            {"type": "integer", "minimum": 1}, "Most tokens of the answer.", is_required=True
        ),
        "stream": CHAT_FIELDS["stream"],
        "temperature": CHAT_FIELDS["temperature"],
        "top_p": CHAT_FIELDS["top_p"],
        "top_k": CHAT_FIELDS["top_k"],
        "stop_sequences": acts(array_of(STRING), "Texts that end the answer."),
        "metadata": no_effect(METADATA_FIELDS, "For the client's own records."),
        "service_tier": no_effect(choice("auto", "standard_only"), "There is one tier."),
        "inference_geo": no_effect(STRING, "There is one place."),
        "diagnostics": no_effect(OBJECT, "Answers have no diagnostics."),
        "fallbacks": no_effect(ANYTHING, "No model declines a request for reasons of policy."),
        "fallback_credit_token": no_effect(STRING, "Nothing is billed."),
        "thread": not_yet(
            OBJECT,
            "A stored conversation; clients continue without it on this error.",
            then=_refuse_thread,
        ),
        "container": not_yet(ANYTHING, "A container for tools that run on the server."),
    },
)
