"""Fields of /v1/responses bodies and of the items in them.

Source: OpenAI API reference (openai-python 3.57 types of responses); vLLM 0.32 `ResponsesRequest`;
the Open Responses specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.edge.openai_fields import (
    CHAT_FIELDS,
    REASONING_EFFORTS,
    Field,
    Support,
    anything,
    array,
    array_of,
    bad_field,
    boolean,
    integer,
    object_,
    one_of,
    shown,
    string,
    text_or_object,
)

if TYPE_CHECKING:
    from cluster.edge.openai_fields import Check

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
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_CHARS = 512

PASSED_FIELDS = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key",
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output", "priority",
    "cache_salt", "session_id", "structured_outputs", "chat_template_kwargs",
)  # fmt: skip
"""Fields that a chat has, too, with the same meaning."""


def _metadata(value: object, path: str) -> dict[str, Any]:
    """Check for an object of up to 16 short strings."""
    given: dict[str, Any] = object_(value, path)
    if len(given) > _MAX_METADATA:
        raise bad_field(path, f"has {len(given)} entries, but may have at most {_MAX_METADATA}")
    for key, text in given.items():
        if len(key) > _MAX_METADATA_KEY_CHARS:
            raise bad_field(path, f"has a key of more than {_MAX_METADATA_KEY_CHARS} characters")
        if len(string(text, f"{path}.{key}")) > _MAX_METADATA_CHARS:
            raise bad_field(f"{path}.{key}", f"has more than {_MAX_METADATA_CHARS} characters")
    return given


def _positive(value: object, path: str) -> int:
    given: int = integer(value, path)
    if given < 1:
        raise bad_field(path, f"must be at least 1, got {shown(value)}")
    return given


def _supported(check: Check, *names: str) -> dict[str, Field]:
    return {name: Field(check, Support.SUPPORTED) for name in names}


def _no_effect(check: Check, *names: str) -> dict[str, Field]:
    return {name: Field(check, Support.NO_EFFECT) for name in names}


def _not_yet(check: Check, *names: str, neutral: tuple[object, ...] = ()) -> dict[str, Field]:
    return {name: Field(check, Support.NOT_YET, neutral) for name in names}


RESPONSES_FIELDS: dict[str, Field] = {
    **{name: CHAT_FIELDS[name] for name in PASSED_FIELDS},
    **_supported(anything, "input"),
    **_supported(string, "instructions", "previous_response_id"),
    **_supported(_positive, "max_output_tokens"),
    **_supported(integer, "top_logprobs"),
    **_supported(array_of(one_of(*_INCLUDES)), "include"),
    **_supported(object_, "text", "reasoning"),
    **_supported(array_of(object_), "tools"),
    **_supported(text_or_object, "tool_choice"),
    **_supported(one_of("auto", "disabled"), "truncation"),
    **_supported(boolean, "store"),
    # The answer repeats these, which change nothing else. Calls of built-in tools, which the first
    # one limits, are none here.
    **_supported(_positive, "max_tool_calls"),
    **_supported(_metadata, "metadata"),
    **_supported(string, "user", "safety_identifier"),
    **_no_effect(string, "service_tier", "prompt_cache_retention", "request_id"),
    **_no_effect(object_, "prompt_cache_options", "stream_options"),
    **_not_yet(boolean, "background", "enable_response_messages", neutral=(False,)),
    **_not_yet(text_or_object, "conversation"),
    **_not_yet(object_, "prompt", "moderation", "background_options", "mm_processor_kwargs"),
    **_not_yet(array, "context_management", "previous_input_messages", neutral=([],)),
}

TEXT_FIELDS: dict[str, Field] = {
    **_supported(object_, "format"),
    **_supported(string, "verbosity"),
}

FORMAT_FIELDS: dict[str, Field] = {
    **_supported(one_of("text", "json_object", "json_schema"), "type"),
    **_supported(string, "name", "description"),
    **_supported(object_, "schema"),
    **_supported(boolean, "strict"),
}

REASONING_FIELDS: dict[str, Field] = {
    **_supported(one_of(*REASONING_EFFORTS), "effort"),
    # No model here makes a summary of its reasoning: the reasoning itself is in the answer.
    **_supported(one_of("auto", "concise", "detailed"), "summary"),
    **_no_effect(one_of("auto", "concise", "detailed"), "generate_summary"),
    **_not_yet(string, "context", neutral=("auto",)),
    **_not_yet(string, "mode", neutral=("standard",)),
}

TOOL_FIELDS: dict[str, Field] = {
    **_supported(string, "type", "name", "description"),
    **_supported(object_, "parameters"),
    **_supported(boolean, "strict"),
    **_no_effect(object_, "output_schema"),
    **_not_yet(boolean, "defer_loading", "async", neutral=(False,)),
    **_not_yet(array, "allowed_callers", neutral=(["direct"],)),
}

TOOL_CHOICE_FIELDS: dict[str, Field] = {
    **_supported(string, "type", "name"),
    **_supported(one_of("auto", "required"), "mode"),
    **_supported(array_of(object_), "tools"),
}

_ITEM_FIELDS: dict[str, Field] = {
    **_supported(string, "type"),
    # Parts of an answer that a client may send back unchanged.
    **_no_effect(string, "id", "status"),
}

MESSAGE_FIELDS: dict[str, Field] = {
    **_ITEM_FIELDS,
    **_supported(one_of("user", "assistant", "system", "developer"), "role"),
    **_supported(anything, "content"),
    **_no_effect(one_of("commentary", "final_answer"), "phase"),
}

FUNCTION_CALL_FIELDS: dict[str, Field] = {
    **_ITEM_FIELDS,
    **_supported(string, "call_id", "name", "arguments"),
    **_not_yet(string, "namespace"),
    **_not_yet(boolean, "async", neutral=(False,)),
    **_not_yet(object_, "caller", neutral=({"type": "direct"},)),
}

FUNCTION_CALL_OUTPUT_FIELDS: dict[str, Field] = {
    **_ITEM_FIELDS,
    **_supported(string, "call_id"),
    **_supported(anything, "output"),
    **_no_effect(string, "name"),
    **_not_yet(string, "namespace"),
    **_not_yet(object_, "caller", neutral=({"type": "direct"},)),
}

REASONING_ITEM_FIELDS: dict[str, Field] = {
    **_ITEM_FIELDS,
    **_supported(array_of(object_), "summary", "content"),
    **_not_yet(string, "encrypted_content", neutral=("",)),
}

PART_FIELDS: dict[str, Field] = {
    **_supported(string, "type", "text", "refusal"),
    **_no_effect(array, "annotations", "logprobs"),
    # A hint about the prompt cache that is not used here.
    **_no_effect(object_, "prompt_cache_breakpoint"),
}
"""Fields of the parts of messages, results and reasoning."""
