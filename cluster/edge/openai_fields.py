"""Every request field that OpenAI or vLLM documents, once, with its support here.

- SUPPORTED fields act.
- NO_EFFECT fields are checked for their type and ignored, because ignoring them alters no answer.
- NOT_YET fields would alter the answer. They are accepted at their neutral value and refused at any
  other.

A field in no table is refused by name. `null` means "not given" everywhere.
Source: OpenAI API reference (openai-python 3.51 request types); vLLM 0.32 protocol classes.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from cluster.errors import BadRequestError
from replicas.errors import InvalidRequestError
from replicas.sampling_params import check_range

Check = Callable[[object, str], Any]
"""Takes a value and its path in the body; returns the value to use or raises BadRequestError."""

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_SALT_CHARS = 256
_MAX_SHOWN_CHARS = 64
_TOKEN_ID = re.compile("-?[0-9]{1,18}")


class Support(enum.Enum):
    """Degree of support of a documented field."""

    SUPPORTED = "acts as documented"
    NO_EFFECT = "accepted, changes nothing"
    NOT_YET = "accepted at its neutral value only"


@dataclass(frozen=True, slots=True)
class Field:
    """One documented field: type check, support, and neutral values of a NOT_YET field."""

    check: Check
    support: Support
    neutral: tuple[object, ...] = ()


def shown(value: object) -> str:
    """Return a scalar as JSON, or the kind of a container, short enough for an error message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        value = value[:_MAX_SHOWN_CHARS] + "…"
    return json.dumps(value, ensure_ascii=False)


def bad_field(path: str, text: str) -> BadRequestError:
    """Return the error "`path` `text`" about the field at `path`."""
    return BadRequestError(f"{path} {text}", param=path)


def _of_type(kind: type | tuple[type, ...], name: str) -> Check:
    def check(value: object, path: str) -> object:
        # JSON's true and false are instances of int in Python, but never numbers.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise bad_field(path, f"must be {name}, got {shown(value)}")
        return value

    return check


boolean = _of_type(bool, "true or false")
integer = _of_type(int, "an integer")
number = _of_type((int, float), "a number")
string = _of_type(str, "a string")
object_ = _of_type(dict, "an object")
array = _of_type(list, "an array")


def int64(value: object, path: str) -> int:
    """Check for an integer of 64 bits."""
    given: int = integer(value, path)
    if not -(2**63) <= given < 2**63:
        raise bad_field(path, f"must be an integer of 64 bits, got {shown(value)}")
    return given


text_or_object = _of_type((str, dict), "a string or an object")


def anything(value: object, path: str) -> object:
    """Accept any value: of fields refused at all values but null, or checked elsewhere."""
    del path
    return value


def one_of(*choices: str) -> Check:
    """Return the check for one of several strings."""

    def check(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise bad_field(path, f"must be one of {', '.join(choices)}; got {shown(value)}")
        return value

    return check


def array_of(item: Check) -> Check:
    """Return the check for a list whose items all pass `item`."""

    def check(value: object, path: str) -> list[Any]:
        return [item(entry, f"{path}[{i}]") for i, entry in enumerate(array(value, path))]

    return check


def stop_strings(value: object, path: str) -> tuple[str, ...]:
    """Check for one string or several; `SamplingParams` checks their number and lengths."""
    if not isinstance(value, (str, list)):
        raise bad_field(path, f"must be a string or an array of strings, got {shown(value)}")
    return (value,) if isinstance(value, str) else tuple(array_of(string)(value, path))


def salt(value: object, path: str) -> str:
    """Check the salt of cached KV, a secret: requests without it cannot hit that KV."""
    given: str = string(value, path)
    if not 1 <= len(given) <= MAX_SALT_CHARS:
        # The message must not contain the value, which is a secret.
        raise bad_field(path, f"must have 1 to {MAX_SALT_CHARS} characters, got {len(given)}")
    return given


def session_name(value: object, path: str) -> str:
    """Return a hash of the client's name, which may be as large as the body; "" for no name.

    Requests that wait for their prompt to be encoded keep their fields in memory.
    """
    given: str = string(value, path)
    return blake2b(given.encode(), digest_size=16).hexdigest() if given else ""


def token_ids(value: object, path: str) -> list[int]:
    """Check for a list of integers; `check_vocabulary` checks their range."""
    ids: list[int] = array(value, path)
    return ids if set(map(type, ids)) <= {int} else array_of(integer)(ids, path)


def logit_biases(value: object, path: str) -> dict[int, float]:
    """Check for an object of numbers whose keys are token ids, which JSON spells as strings."""
    biases: dict[int, float] = {}
    for key, bias in object_(value, path).items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise bad_field(path, f"has the key {shown(key)}, which is no token id")
        biases[int(key)] = number(bias, f"{path}.{key}")
    return biases


def read_fields(
    body: Mapping[str, Any], table: Mapping[str, Field], path: str = ""
) -> dict[str, Any]:
    """Check an object against its table and return its supported fields.

    Args:
        body: The decoded JSON object.
        table: Its documented fields.
        path: The object's path in the request, with a final dot: "stream_options.".

    Returns:
        Checked values by field name, of the supported fields that are given and not null.

    Raises:
        BadRequestError: A field is not documented, has the wrong type, or asks for something
            that is not supported yet; `param` is its path.
    """
    values: dict[str, Any] = {}
    for name, value in body.items():
        where = path + name[:_MAX_SHOWN_CHARS]
        field = table.get(name)
        if field is None:
            raise bad_field(where, "is not a field that OpenAI or vLLM documents here; remove it")
        if value is None:
            continue
        checked = field.check(value, where)
        if field.support is Support.SUPPORTED:
            values[name] = checked
        elif field.support is Support.NOT_YET and value not in field.neutral:
            neutral = " or ".join(json.dumps(v) for v in (*field.neutral, None))
            raise bad_field(where, f"is not supported yet: leave it out, or set it to {neutral}")
    return values


def _in_range(name: str, check: Check) -> Check:
    """Return a check of the type, and then of the range that a field of `SamplingParams` has."""

    def check_both(value: object, path: str) -> object:
        checked = check(value, path)
        try:
            check_range(name, checked)
        except InvalidRequestError as error:
            raise BadRequestError(str(error), param=path) from error
        return checked

    return check_both


def _sampled(check: Check, *names: str) -> dict[str, Field]:
    """Return rows of fields that are fields of `SamplingParams`, too."""
    return {name: Field(_in_range(name, check), Support.SUPPORTED) for name in names}


def _supported(check: Check, *names: str) -> dict[str, Field]:
    return {name: Field(check, Support.SUPPORTED) for name in names}


def _no_effect(check: Check, *names: str) -> dict[str, Field]:
    return {name: Field(check, Support.NO_EFFECT) for name in names}


def _not_yet(check: Check, *names: str, neutral: tuple[object, ...] = ()) -> dict[str, Field]:
    return {name: Field(check, Support.NOT_YET, neutral) for name in names}


GENERATION_FIELDS: dict[str, Field] = {
    **_supported(string, "model"),
    **_supported(boolean, "stream", "include_stop_str_in_output", "ignore_eos", "echo"),
    **_supported(boolean, "skip_special_tokens", "add_special_tokens", "return_token_ids"),
    **_supported(boolean, "use_beam_search"),
    **_supported(object_, "stream_options"),
    **_supported(integer, "max_tokens"),
    # Refused unless the model's engines schedule by priority, see `build_request`.
    **_supported(int64, "priority"),
    **_sampled(integer, "min_tokens", "n", "top_k", "seed", "prompt_logprobs"),
    **_sampled(integer, "truncate_prompt_tokens"),
    **_supported(number, "length_penalty"),
    **_sampled(number, "temperature", "top_p", "min_p"),
    **_sampled(number, "presence_penalty", "frequency_penalty", "repetition_penalty"),
    **_sampled(stop_strings, "stop"),
    **_sampled(token_ids, "stop_token_ids", "allowed_token_ids", "logprob_token_ids"),
    **_sampled(array_of(string), "bad_words"),
    **_sampled(logit_biases, "logit_bias"),
    **_supported(one_of("left", "right"), "truncation_side"),
    **_supported(salt, "cache_salt"),
    **_supported(session_name, "session_id"),
    # For the client's own records; requests are named by the x-request-id header.
    **_no_effect(string, "user", "request_id"),
    # An option of slow tokenizers only.
    **_no_effect(boolean, "spaces_between_special_tokens"),
    **_not_yet(integer, "stream_interval", neutral=(1,)),
    **_not_yet(integer, "routed_experts_prompt_start", neutral=(0,)),
    **_not_yet(integer, "thinking_token_budget"),
    **_not_yet(boolean, "return_tokens_as_token_ids", "return_token_offsets", neutral=(False,)),
    **_not_yet(object_, "vllm_xargs", neutral=({},)),
    **_supported(object_, "response_format", "structured_outputs"),
    **_not_yet(object_, "kv_transfer_params", "ec_transfer_params"),
    **_not_yet(object_, "repetition_detection"),
    **_not_yet(anything, "watermarking", neutral=(False,)),
    **_not_yet(anything, "mm_payload"),
}
"""Fields that /v1/completions and /v1/chat/completions share."""

COMPLETION_FIELDS: dict[str, Field] = {
    **GENERATION_FIELDS,
    **_supported(anything, "prompt"),
    **_supported(integer, "logprobs"),
    **_not_yet(integer, "best_of", neutral=(1,)),
    **_not_yet(string, "suffix"),
    **_not_yet(anything, "prompt_embeds"),
}

CHAT_FIELDS: dict[str, Field] = {
    **GENERATION_FIELDS,
    **_supported(array_of(object_), "messages"),
    **_supported(integer, "max_completion_tokens", "top_logprobs"),
    **_supported(boolean, "add_generation_prompt", "logprobs"),
    **_supported(object_, "chat_template_kwargs"),
    **_no_effect(string, "service_tier", "safety_identifier"),
    **_supported(session_name, "prompt_cache_key"),
    # A hint about cost that is not used here.
    **_no_effect(string, "prompt_cache_retention"),
    # A prediction is a guess at the answer that only affects speed.
    **_no_effect(object_, "metadata", "prediction", "prompt_cache_options"),
    **_no_effect(boolean, "store"),
    **_supported(array_of(object_), "tools"),
    **_supported(text_or_object, "tool_choice"),
    **_supported(boolean, "parallel_tool_calls", "include_reasoning"),
    **_supported(one_of(*REASONING_EFFORTS), "reasoning_effort"),
    **_not_yet(boolean, "continue_final_message", "return_prompt_text", neutral=(False,)),
    **_not_yet(array, "functions", "documents", neutral=([],)),
    **_not_yet(array, "modalities", neutral=(["text"],)),
    **_not_yet(anything, "function_call", neutral=("none", "auto")),
    **_not_yet(string, "verbosity", neutral=("medium",)),
    **_not_yet(string, "chat_template"),
    **_not_yet(object_, "audio", "moderation", "web_search_options"),
    **_not_yet(object_, "media_io_kwargs", "mm_processor_kwargs", neutral=({},)),
}

RESPONSE_FORMAT_FIELDS: dict[str, Field] = {
    **_supported(one_of("text", "json_object", "json_schema", "structural_tag"), "type"),
    **_supported(object_, "json_schema"),
    **_supported(array_of(string), "triggers"),
    **_supported(array_of(object_), "structures"),
    # Structural tags in xgrammar's form.
    **_not_yet(anything, "format"),
}

JSON_SCHEMA_FIELDS: dict[str, Field] = {
    **_supported(object_, "schema"),
    # Every schema is followed strictly.
    **_no_effect(string, "name", "description"),
    **_no_effect(boolean, "strict"),
}

STRUCTURED_OUTPUTS_FIELDS: dict[str, Field] = {
    **_supported(text_or_object, "json", "structural_tag"),
    **_supported(string, "regex", "grammar", "whitespace_pattern"),
    **_supported(array_of(string), "choice"),
    **_supported(boolean, "json_object", "disable_any_whitespace"),
    **_supported(boolean, "disable_additional_properties"),
}

STREAM_OPTIONS_FIELDS: dict[str, Field] = {
    **_supported(boolean, "include_usage", "continuous_usage_stats"),
    **_no_effect(boolean, "include_obfuscation"),
}

MESSAGE_FIELDS: dict[str, Field] = {
    **_supported(string, "role", "name", "reasoning", "reasoning_content"),
    **_supported(anything, "content"),
    # Parts of an answer that a client may send back unchanged.
    **_no_effect(string, "refusal"),
    **_no_effect(array, "annotations"),
    **_not_yet(object_, "audio", "function_call"),
    **_supported(array_of(object_), "tool_calls"),
    **_supported(string, "tool_call_id"),
}

CONTENT_PART_FIELDS: dict[str, Field] = _supported(string, "type", "text")

TOOL_FIELDS: dict[str, Field] = {
    **_supported(one_of("function"), "type"),
    **_supported(object_, "function"),
}
"""Fields of a tool, and of `tool_choice` where it names one."""

FUNCTION_FIELDS: dict[str, Field] = {
    **_supported(string, "name", "description"),
    **_supported(object_, "parameters"),
    **_supported(boolean, "strict"),
}

TOOL_CALL_FIELDS: dict[str, Field] = {
    **_supported(string, "id"),
    **_supported(one_of("function"), "type"),
    **_supported(object_, "function"),
    # Streamed calls have it, and some clients send it back.
    **_no_effect(integer, "index"),
}
"""Fields of a call in an earlier message of the assistant."""

CALLED_FUNCTION_FIELDS: dict[str, Field] = _supported(string, "name", "arguments")

_TOKENIZE_AS_CHAT = (
    "messages", "add_generation_prompt", "chat_template_kwargs", "continue_final_message",
    "chat_template", "tools", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip
TOKENIZE_FIELDS: dict[str, Field] = {
    **_supported(string, "model", "prompt"),
    **_supported(boolean, "add_special_tokens", "return_token_strs"),
    **{name: CHAT_FIELDS[name] for name in _TOKENIZE_AS_CHAT},
}

DETOKENIZE_FIELDS: dict[str, Field] = {
    **_supported(string, "model"),
    **_supported(token_ids, "tokens"),
}
