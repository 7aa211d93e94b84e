"""Every request field that OpenAI or vLLM documents, once, and what happens to it here.

SUPPORTED fields act. NO_EFFECT fields are checked for their type and change nothing: what they ask
for does not exist here, and leaving it out alters no answer. NOT_YET fields would alter the answer,
so they are taken at the value that asks for nothing and refused otherwise. A field in no table is
refused by name. `null` stands for "not given" everywhere.
Source: OpenAI API reference (openai-python 3.51 request types); vLLM 0.32 protocol classes.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.errors import BadRequestError

Check = Callable[[object, str], Any]
"""Gets a value and its path in the body; returns the value to use or raises BadRequestError."""

MAX_STOP_STRINGS = 16
MAX_SALT_CHARS = 256
_MAX_SHOWN_CHARS = 64


class Support(enum.Enum):
    """What a documented field does here."""

    SUPPORTED = "acts as documented"
    NO_EFFECT = "accepted, changes nothing"
    NOT_YET = "accepted at its neutral value only"


@dataclass(frozen=True, slots=True)
class Field:
    """One documented field: its type, its support, the values that ask for nothing (NOT_YET)."""

    check: Check
    support: Support
    neutral: tuple[object, ...] = ()


def shown(value: object) -> str:
    """A scalar as JSON, or what kind of container it is: short enough for an error message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        value = value[:_MAX_SHOWN_CHARS] + "…"
    return json.dumps(value, ensure_ascii=False)


def bad_field(path: str, text: str) -> BadRequestError:
    """The error that names the field at `path` and says `text` of it."""
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


def anything(value: object, path: str) -> object:
    """No check: the field is refused at every value but null, or has no meaning here."""
    del path
    return value


def one_of(*choices: str) -> Check:
    """A string out of `choices`."""

    def check(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise bad_field(path, f"must be one of {', '.join(choices)}; got {shown(value)}")
        return value

    return check


def array_of(item: Check) -> Check:
    """A list whose items all pass `item`."""

    def check(value: object, path: str) -> list[Any]:
        return [item(entry, f"{path}[{i}]") for i, entry in enumerate(array(value, path))]

    return check


def stop_strings(value: object, path: str) -> tuple[str, ...]:
    """The stop strings: one or up to 16; an empty one would end every text at once."""
    if not isinstance(value, (str, list)):
        raise bad_field(path, f"must be a string or an array of strings, got {shown(value)}")
    stops = (value,) if isinstance(value, str) else tuple(array_of(string)(value, path))
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_field(path, f"takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    if "" in stops:
        raise bad_field(path, "must not hold an empty string")
    return stops


def salt(value: object, path: str) -> str:
    """The salt of cached KV: whoever does not know it finds nothing that was computed under it."""
    given: str = string(value, path)
    if not 1 <= len(given) <= MAX_SALT_CHARS:
        # The value itself is a secret of the client's.
        raise bad_field(path, f"must have 1 to {MAX_SALT_CHARS} characters, got {len(given)}")
    return given


def token_ids(value: object, path: str) -> list[int]:
    """A list of integers; whether they are in the vocabulary is checked with the tokenizer."""
    ids: list[int] = array(value, path)
    return ids if set(map(type, ids)) <= {int} else array_of(integer)(ids, path)


def read_fields(
    body: Mapping[str, Any], table: Mapping[str, Field], path: str = ""
) -> dict[str, Any]:
    """Check an object against its table and keep what acts.

    Args:
        body: The decoded JSON object.
        table: Its documented fields.
        path: Where the object stands in the request, with a final dot: "stream_options.".

    Returns:
        Field name to checked value, for the supported fields that are given and not null.

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


_supported = partial(Field, support=Support.SUPPORTED)
_no_effect = partial(Field, support=Support.NO_EFFECT)


def _not_yet(check: Check, *neutral: object) -> Field:
    return Field(check, Support.NOT_YET, neutral)


GENERATION_FIELDS: dict[str, Field] = {
    "model": _supported(string),
    "stream": _supported(boolean),
    "stream_options": _supported(object_),
    "max_tokens": _supported(integer),
    "temperature": _supported(number),
    "top_p": _supported(number),
    "top_k": _supported(integer),
    "seed": _supported(integer),
    "stop": _supported(stop_strings),
    "stop_token_ids": _supported(token_ids),
    "include_stop_str_in_output": _supported(boolean),
    "ignore_eos": _supported(boolean),
    "skip_special_tokens": _supported(boolean),
    "add_special_tokens": _supported(boolean),
    "return_token_ids": _supported(boolean),
    "cache_salt": _supported(salt),
    # Names for the client's own records, and hints about cost that nothing here reads.
    "user": _no_effect(string),
    "request_id": _no_effect(string),  # the x-request-id header names a request
    "session_id": _no_effect(string),
    # They only say how to do a thing that is refused below.
    "length_penalty": _no_effect(number),
    "truncation_side": _no_effect(one_of("left", "right")),
    "spaces_between_special_tokens": _no_effect(boolean),  # concerns slow tokenizers only
    "n": _not_yet(integer, 1),
    "echo": _not_yet(boolean, False),
    "presence_penalty": _not_yet(number, 0),
    "frequency_penalty": _not_yet(number, 0),
    "repetition_penalty": _not_yet(number, 1),
    "min_p": _not_yet(number, 0),
    "min_tokens": _not_yet(integer, 0),
    "logit_bias": _not_yet(object_, {}),
    "use_beam_search": _not_yet(boolean, False),
    "truncate_prompt_tokens": _not_yet(integer),
    "allowed_token_ids": _not_yet(array),
    "bad_words": _not_yet(array, []),
    "prompt_logprobs": _not_yet(integer),
    "logprob_token_ids": _not_yet(array, []),
    "response_format": _not_yet(object_, {"type": "text"}),
    "structured_outputs": _not_yet(object_),
    "priority": _not_yet(integer, 0),
    "return_tokens_as_token_ids": _not_yet(boolean, False),
    "return_token_offsets": _not_yet(boolean, False),
    "kv_transfer_params": _not_yet(object_),
    "ec_transfer_params": _not_yet(object_),
    "vllm_xargs": _not_yet(object_, {}),
    "repetition_detection": _not_yet(object_),
    "thinking_token_budget": _not_yet(integer),
    "stream_interval": _not_yet(integer, 1),
    "watermarking": _not_yet(anything, False),
    "routed_experts_prompt_start": _not_yet(integer, 0),
    "mm_payload": _not_yet(anything),
}
"""Fields that /v1/completions and /v1/chat/completions share."""

COMPLETION_FIELDS: dict[str, Field] = {
    **GENERATION_FIELDS,
    "prompt": _supported(anything),
    "best_of": _not_yet(integer, 1),
    "logprobs": _not_yet(integer),
    "suffix": _not_yet(string),
    "prompt_embeds": _not_yet(anything),
}

CHAT_FIELDS: dict[str, Field] = {
    **GENERATION_FIELDS,
    "messages": _supported(array_of(object_)),
    "max_completion_tokens": _supported(integer),
    "add_generation_prompt": _supported(boolean),
    "chat_template_kwargs": _supported(object_),
    "metadata": _no_effect(object_),
    "store": _no_effect(boolean),
    "service_tier": _no_effect(string),
    "safety_identifier": _no_effect(string),
    "prediction": _no_effect(object_),  # a guess at the answer, for speed alone
    "prompt_cache_key": _no_effect(string),
    "prompt_cache_options": _no_effect(object_),
    "prompt_cache_retention": _no_effect(string),
    "parallel_tool_calls": _no_effect(boolean),  # without tools there are no calls
    "include_reasoning": _no_effect(boolean),  # reasoning is not told apart from content
    "logprobs": _not_yet(boolean, False),
    "top_logprobs": _not_yet(integer, 0),
    "tools": _not_yet(array, []),
    "tool_choice": _not_yet(anything, "none", "auto"),
    "functions": _not_yet(array, []),
    "function_call": _not_yet(anything, "none", "auto"),
    "audio": _not_yet(object_),
    "modalities": _not_yet(array, ["text"]),
    "moderation": _not_yet(object_),
    "reasoning_effort": _not_yet(string, "none"),
    "verbosity": _not_yet(string, "medium"),
    "web_search_options": _not_yet(object_),
    "continue_final_message": _not_yet(boolean, False),
    "documents": _not_yet(array, []),
    "chat_template": _not_yet(string),
    "media_io_kwargs": _not_yet(object_, {}),
    "mm_processor_kwargs": _not_yet(object_, {}),
    "return_prompt_text": _not_yet(boolean, False),
}

STREAM_OPTIONS_FIELDS: dict[str, Field] = {
    "include_usage": _supported(boolean),
    "continuous_usage_stats": _supported(boolean),
    "include_obfuscation": _no_effect(boolean),
}

MESSAGE_FIELDS: dict[str, Field] = {
    "role": _supported(string),
    "content": _supported(anything),
    "name": _supported(string),
    "reasoning": _supported(string),
    "reasoning_content": _supported(string),
    # Parts of an answer that a client may send back as it got it.
    "refusal": _no_effect(string),
    "annotations": _no_effect(array),
    "audio": _not_yet(object_),
    "tool_calls": _not_yet(array, []),
    "tool_call_id": _not_yet(string),
    "function_call": _not_yet(object_),
}

CONTENT_PART_FIELDS: dict[str, Field] = {"type": _supported(string), "text": _supported(string)}

_TOKENIZE_AS_CHAT = (
    "messages", "add_generation_prompt", "chat_template_kwargs", "continue_final_message",
    "chat_template", "tools", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip
TOKENIZE_FIELDS: dict[str, Field] = {
    "model": _supported(string),
    "prompt": _supported(string),
    "add_special_tokens": _supported(boolean),
    "return_token_strs": _supported(boolean),
    **{name: CHAT_FIELDS[name] for name in _TOKENIZE_AS_CHAT},
}

DETOKENIZE_FIELDS: dict[str, Field] = {
    "model": _supported(string),
    "tokens": _supported(token_ids),
}
