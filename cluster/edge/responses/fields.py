"""Fields of /v1/responses bodies and of the items in them.

Source: OpenAI API reference (openai-python 3.57 types of responses); vLLM 0.32 `ResponsesRequest`;
the Open Responses specification.
"""

from __future__ import annotations

import dataclasses

from cluster.edge.fields import (
    ARRAY,
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    FieldTable,
    acts,
    any_of,
    array_of,
    bad_field,
    choice,
    no_effect,
    not_yet,
)
from cluster.edge.openai_fields import CHAT_FIELDS, REASONING_EFFORTS

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log probabilities."""
_INCLUDES = (
    LOGPROBS,
    # Reasoning comes in clear, so that clients can send it back without this.
    "reasoning.encrypted_content",
    # The others are about tools and inputs that are refused.
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
_OPTIONAL_TOOLS = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
)  # fmt: skip
"""Tools that OpenAI runs, and that a model may do without. Agents offer them unasked."""
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_CHARS = 512

PASSED_FIELDS = (
    "stream", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key",
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output", "priority",
    "cache_salt", "session_id", "structured_outputs", "chat_template_kwargs",
    "thinking_token_budget",
)  # fmt: skip
"""Fields that a chat has, too, with the same meaning."""


def _metadata(given: dict[str, str], path: str) -> dict[str, str]:
    """Check for an object of up to 16 short names."""
    if len(given) > _MAX_METADATA:
        raise bad_field(path, f"has {len(given)} entries, but may have at most {_MAX_METADATA}")
    if max(map(len, given), default=0) > _MAX_METADATA_KEY_CHARS:
        raise bad_field(path, f"has a key of more than {_MAX_METADATA_KEY_CHARS} characters")
    return given


_POSITIVE = {"type": "integer", "minimum": 1}
_METADATA = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": _MAX_METADATA_CHARS},
}
_SUMMARIES = choice("auto", "concise", "detailed")
_DIRECT = {"type": "direct"}

FORMAT_FIELDS = FieldTable(
    "ResponseTextFormat",
    {
        "type": acts(choice("text", "json_object", "json_schema"), "Form of the answer."),
        "name": acts(STRING, "Name of the schema, which the answer repeats."),
        "description": acts(STRING, "What the schema is for, which the answer repeats."),
        "schema": acts(OBJECT, "With type json_schema: the JSON schema that the answer follows."),
        "strict": acts(BOOLEAN, "Every schema is followed strictly; the answer repeats this."),
    },
)

TEXT_FIELDS = FieldTable(
    "ResponseText",
    {
        "format": acts(FORMAT_FIELDS, "Form of the answer."),
        "verbosity": acts(STRING, "A variable of the chat template, if it knows it."),
    },
)

REASONING_FIELDS = FieldTable(
    "ResponseReasoning",
    {
        "effort": acts(choice(*REASONING_EFFORTS), "As reasoning_effort of a chat."),
        # No model here makes a summary of its reasoning: the reasoning itself is in the answer.
        "summary": acts(_SUMMARIES, "The answer repeats it; no model here makes a summary."),
        "generate_summary": no_effect(_SUMMARIES, "The former name of summary."),
        "context": not_yet(STRING, "Which reasoning the model sees.", neutral=("auto",)),
        "mode": not_yet(STRING, "How the model reasons.", neutral=("standard",)),
    },
)

_FUNCTION_FIELDS = FieldTable(
    "ResponseFunction",
    {
        "type": acts(STRING, "function, or namespace, which holds functions."),
        "name": acts(STRING, "Name of the function, or of the namespace."),
        "description": acts(STRING, "What it does, for the model."),
        "parameters": acts(OBJECT, "A JSON schema of its arguments."),
        "strict": acts(BOOLEAN, "A grammar makes arguments follow the schema."),
        "output_schema": no_effect(OBJECT, "A JSON schema of its result."),
        "defer_loading": not_yet(BOOLEAN, "Load the tool later.", neutral=(False,)),
        "async": not_yet(BOOLEAN, "The call does not wait for its result.", neutral=(False,)),
        "allowed_callers": not_yet(ARRAY, "What may call the tool.", neutral=(["direct"],)),
    },
)

TOOL_FIELDS = FieldTable(
    "ResponseTool",
    {
        **_FUNCTION_FIELDS,
        "tools": acts(array_of(_FUNCTION_FIELDS), "With type namespace: its functions."),
    },
    is_optional=lambda tool: tool.get("type") in _OPTIONAL_TOOLS,
)

TOOL_CHOICE_FIELDS = FieldTable(
    "ResponseToolChoice",
    {
        "type": acts(STRING, "function, or allowed_tools."),
        "name": acts(STRING, "With type function: its name."),
        "mode": acts(choice("auto", "required"), "With type allowed_tools: whether to call one."),
        "tools": acts(array_of(OBJECT), "With type allowed_tools: the tools."),
    },
)

PART_FIELDS = FieldTable(
    "ResponsePart",
    {
        "type": acts(STRING, "Kind of the part; only texts are served."),
        "text": acts(STRING, "The text."),
        "refusal": acts(STRING, "The text of a refusal."),
        "annotations": no_effect(ARRAY, "Part of an answer that a client may send back."),
        "logprobs": no_effect(ARRAY, "Part of an answer that a client may send back."),
        "prompt_cache_breakpoint": no_effect(
            OBJECT, "A hint about the prompt cache that is not used here."
        ),
    },
)
"""Fields of the parts of messages, results and reasoning."""

_ITEM = {
    "type": acts(STRING, "Kind of the item."),
    "id": no_effect(STRING, "Part of an answer that a client may send back."),
    "status": no_effect(STRING, "Part of an answer that a client may send back."),
}
_STATUS_OF_CALL = acts(STRING, "A function_call that is incomplete is left out.")
_CONTENT = any_of(STRING, array_of(PART_FIELDS))
_CALLER = not_yet(OBJECT, "What has called the function.", neutral=(_DIRECT,))

MESSAGE_FIELDS = FieldTable(
    "ResponseMessage",
    {
        **_ITEM,
        "role": acts(
            choice("user", "assistant", "system", "developer"), "Who speaks.", is_required=True
        ),
        "content": acts(_CONTENT, "A text, or parts.", is_required=True),
        "phase": no_effect(choice("commentary", "final_answer"), "Phase of an earlier answer."),
    },
)

FUNCTION_CALL_FIELDS = FieldTable(
    "ResponseFunctionCall",
    {
        **_ITEM,
        "status": _STATUS_OF_CALL,
        "call_id": acts(STRING, "Id by which the result names the call.", is_required=True),
        "name": acts(STRING, "Name of the function.", is_required=True),
        "arguments": acts(STRING, "Its arguments, a JSON object as text.", is_required=True),
        "namespace": acts(STRING, "Namespace of the function."),
        "caller": _CALLER,
        "async": not_yet(BOOLEAN, "The call does not wait for its result.", neutral=(False,)),
    },
)

FUNCTION_CALL_OUTPUT_FIELDS = FieldTable(
    "ResponseFunctionCallOutput",
    {
        **_ITEM,
        "call_id": acts(STRING, "The call whose result it is.", is_required=True),
        "output": acts(_CONTENT, "The result: a text, or parts.", is_required=True),
        "name": no_effect(STRING, "Name of the function."),
        "namespace": no_effect(STRING, "Namespace of the function."),
        "caller": _CALLER,
    },
)

REASONING_ITEM_FIELDS = FieldTable(
    "ResponseReasoningItem",
    {
        **_ITEM,
        "summary": acts(array_of(PART_FIELDS), "Summary of earlier reasoning."),
        "content": acts(array_of(PART_FIELDS), "Earlier reasoning."),
        "encrypted_content": not_yet(STRING, "Reasoning in secret.", neutral=("",)),
    },
)

_ITEM_FIELDS = FieldTable(
    "ResponseInputItem",
    {
        name: dataclasses.replace(row, is_required=False)
        for table in (
            FUNCTION_CALL_OUTPUT_FIELDS,
            FUNCTION_CALL_FIELDS,
            REASONING_ITEM_FIELDS,
            MESSAGE_FIELDS,
        )
        for name, row in table.items()
    }
    | {"status": _STATUS_OF_CALL},
)
"""Fields of an item of any kind; each kind has a table of its own."""

RESPONSES_FIELDS = FieldTable(
    "ResponseRequest",
    {
        "model": acts(STRING, "Name of a served model.", is_required=True),
        "input": acts(
            any_of(STRING, array_of(_ITEM_FIELDS, minItems=1)),
            "A text, or items.",
            is_required=True,
        ),
        **{name: CHAT_FIELDS[name] for name in PASSED_FIELDS},
        "instructions": acts(STRING, "A system message before the input."),
        "previous_response_id": acts(STRING, "The stored answer that this request continues."),
        "max_output_tokens": acts(_POSITIVE, "Most tokens of the output."),
        "top_logprobs": acts(INTEGER, "Log probabilities of so many likeliest tokens."),
        "include": acts(array_of(choice(*_INCLUDES)), "What the answer has besides."),
        "text": acts(TEXT_FIELDS, "Form of the answer, such as a JSON schema."),
        "reasoning": acts(REASONING_FIELDS, "How much the model reasons."),
        "tools": acts(array_of(TOOL_FIELDS), "Functions that the model may call."),
        "tool_choice": acts(
            any_of(choice("auto", "none", "required"), TOOL_CHOICE_FIELDS),
            "Whether, or which of, the tools are called.",
        ),
        "truncation": acts(
            choice("auto", "disabled"),
            "auto drops the oldest messages of a prompt that is too long.",
        ),
        "store": acts(BOOLEAN, "False: the answer is not stored."),
        "background": acts(
            BOOLEAN, "True: the request is answered at once, and its client reads the answer later."
        ),
        # The answer repeats these, which change nothing else. Calls of built-in tools, which the
        # first one limits, are none here.
        "max_tool_calls": acts(_POSITIVE, "Most calls of built-in tools; the answer repeats it."),
        "metadata": acts(_METADATA, "The answer repeats it.", then=_metadata),
        "user": acts(STRING, "The answer repeats it."),
        "safety_identifier": acts(STRING, "The answer repeats it."),
        "service_tier": no_effect(STRING, "There is one tier."),
        "prompt_cache_retention": no_effect(STRING, "A hint about cost that is not used here."),
        "prompt_cache_options": no_effect(OBJECT, "A hint about cost that is not used here."),
        "request_id": no_effect(STRING, "The header x-request-id names a request."),
        "stream_options": no_effect(OBJECT, "Events are never padded."),
        "background_options": not_yet(OBJECT, "Options of background."),
        "enable_response_messages": not_yet(
            BOOLEAN, "The answer has the model's own messages.", neutral=(False,)
        ),
        "conversation": not_yet(any_of(STRING, OBJECT), "A conversation that is stored."),
        "prompt": not_yet(OBJECT, "A prompt that is stored."),
        "moderation": not_yet(OBJECT, "Moderation of the conversation."),
        "mm_processor_kwargs": not_yet(OBJECT, "Options of a media processor."),
        "context_management": not_yet(ARRAY, "Compaction of the input.", neutral=([],)),
        "previous_input_messages": not_yet(ARRAY, "Earlier messages.", neutral=([],)),
    },
)
