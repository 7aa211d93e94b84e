"""Limits on the number of values in a body, checked before any work for each value. Pure.

A body of a few megabytes can be one text, which is cheap to read, or millions of small values, each
of which needs a check. Counting is cheap, so it comes first: `check_structure` before the body is
decoded, `check_sizes` before its fields are checked. Every list and object of a body has a limit
here; the default is `MAX_FIELD_ENTRIES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.edge.fields import (
    bad_field,
)
from cluster.errors import BadRequestError
from replicas.sampling_params import MAX_SCHEMA_VALUES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.edge.openai import ModelCard
    from replicas.tokenizer import Tokenizer

MAX_CONTAINERS = 2**17
"""Opening brackets and colons in a body, including those in texts; at most 20 ms of decoding. No
text of 128 KiB exceeds it, and longer real texts have far fewer. A larger `max_model_len` raises
it."""
MAX_COMMAS = 2**18
"""Commas in a body: at most 4 ms of decoding for numbers, 21 ms for strings."""
MAX_PROMPTS = 256
"""Prompts of one completion: their requests are placed in one turn of the event loop."""
MAX_MESSAGES = 2048
"""OpenAI's limit; a chat template takes about 12 microseconds per message."""
MAX_MESSAGE_ENTRIES = 8 * MAX_MESSAGES
"""Values in all messages together: fields, content parts, and the fields of these parts."""
MAX_GRAMMAR_ENTRIES = MAX_SCHEMA_VALUES + 64
"""Values in a field with a grammar, at any depth: those of a schema, and some around it."""
MAX_TOOL_ENTRIES = 2 * MAX_SCHEMA_VALUES
"""Values in all tools, at any depth; their checks take about one microsecond each. An agent's 60
tools of ten parameters have 3,000 to 8,000."""
MAX_FIELD_ENTRIES = 1024
"""Values in any other field, at any depth."""
_GRAMMAR_FIELDS = (
    "response_format", "structured_outputs", "text", "output_config", "output_format",
)  # fmt: skip
_MOST_ENTRIES = {"tools": MAX_TOOL_ENTRIES, **dict.fromkeys(_GRAMMAR_FIELDS, MAX_GRAMMAR_ENTRIES)}
_ITEM_TEXTS = ("content", "output", "arguments")
"""Fields of the items of a response that hold text."""
_VOCABULARY_FIELDS = ("stop_token_ids", "allowed_token_ids")
"""Fields that may hold every token id once."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Properties of the served models that set a body's limits.

    Attributes:
        max_model_len: Longest sequence, in tokens.
        vocab_size: Number of token ids.
        max_token_chars: Most characters of text that one token can stand for.
    """

    max_model_len: int
    vocab_size: int
    max_token_chars: int

    @classmethod
    def of_models(cls, cards: Sequence[ModelCard], tokenizer: Tokenizer) -> BodyLimits:
        """Return the limits of the model with the longest sequences; all share a tokenizer."""
        longest = max(card.max_model_len for card in cards)
        return cls(longest, tokenizer.vocab_size, tokenizer.max_token_chars)


def check_structure(raw: bytes, limits: BodyLimits) -> None:
    """Refuse a body that would take long to decode, by counting bytes.

    Raises:
        BadRequestError: The body may hold more values than any request needs.
    """
    num_containers = len(raw) - len(raw.translate(None, b"[{:"))
    most_containers = max(MAX_CONTAINERS, limits.max_model_len)
    if num_containers > most_containers:
        text = f"the body has {num_containers} brackets and colons; at most {most_containers}"
        raise BadRequestError(f"{text} are read: send a long prompt as token ids")
    num_commas, most_commas = raw.count(b","), max(MAX_COMMAS, 2 * limits.max_model_len)
    if num_commas > most_commas:
        raise BadRequestError(f"the body has {num_commas} commas; at most {most_commas} are read")


def check_sizes(body: Mapping[str, Any], limits: BodyLimits) -> None:
    """Refuse a body with a field that holds too many values; types are not checked.

    Raises:
        BadRequestError: A field exceeds its limit; the message has the field and both numbers.
    """
    # A text that will be truncated may be of any length: the tokenizer's threads bound its cost.
    is_truncated = (
        body.get("truncation") == "auto" or body.get("truncate_prompt_tokens") is not None
    )
    longest = None if is_truncated else limits
    for name, value in body.items():
        if name == "prompt" or (name == "input" and _holds_prompts(value)):
            _check_prompt(name, value, longest)
        elif name == "messages":
            _check_messages(value, longest)
        elif name == "system":
            _check_system(value, limits)
        elif name == "input":
            _check_items(value, longest)
        elif name in {"tokens", "token_ids"}:
            _check_length(value, limits.max_model_len, name)
        elif name == "sampling_params" and isinstance(value, dict):
            check_sizes(value, limits)
        elif name in _VOCABULARY_FIELDS:
            _check_length(value, limits.vocab_size, name)
        elif isinstance(value, (dict, list)):
            check_entries(value, _MOST_ENTRIES.get(name, MAX_FIELD_ENTRIES), name)


def prompt_too_long(
    num_tokens: int, max_model_len: int, param: str, *, is_whole: bool = True, num_output: int = 1
) -> BadRequestError:
    """Return the error for a prompt that is too long, or leaves no room for output.

    Args:
        num_tokens: Tokens of the prompt.
        max_model_len: Longest sequence of the model.
        param: The field with the prompt.
        is_whole: Whether `num_tokens` is the whole prompt; else encoding stopped at this count.
        num_output: Tokens of output for which there must be room; 0 for an embedding.
    """
    count = f"{num_tokens}" if is_whole else f"more than {num_tokens - 1}"
    return BadRequestError(
        f"the prompt has {count} tokens and max_model_len is {max_model_len}: "
        f"{'no room is left for output; ' if num_output else ''}"
        f"shorten the prompt by {num_tokens + num_output - max_model_len} tokens or more",
        param=param,
    )


def _holds_prompts(value: object) -> bool:
    """Return whether a value may be prompts; the input of another API can be objects."""
    return not (isinstance(value, list) and value and isinstance(value[0], dict))


def _check_prompt(name: str, value: object, limits: BodyLimits | None) -> None:
    if limits is None:
        return
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        prompts = [(f"{name}[{i}]", one) for i, one in enumerate(value)]
    else:
        prompts = [(name, value)]
    for path, prompt in prompts:
        if isinstance(prompt, str):
            _check_text(len(prompt), limits, path)
        elif isinstance(prompt, list) and len(prompt) > limits.max_model_len:
            # Only embeddings have prompts as their input.
            num_output = 0 if name == "input" else 1
            raise prompt_too_long(len(prompt), limits.max_model_len, path, num_output=num_output)


def _check_messages(value: object, limits: BodyLimits | None) -> None:
    _check_length(value, MAX_MESSAGES, "messages")
    check_entries(value, MAX_MESSAGE_ENTRIES, "messages")
    if limits is not None and isinstance(value, list):
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        _check_text(sum(map(_num_chars, contents)), limits, "messages")


def _check_system(value: object, limits: BodyLimits) -> None:
    check_entries(value, MAX_FIELD_ENTRIES, "system")
    _check_text(_num_chars(value), limits, "system")


def _check_items(value: object, limits: BodyLimits | None) -> None:
    """Check the input of a response: a text or a list of items."""
    _check_length(value, MAX_MESSAGES, "input")
    check_entries(value, MAX_MESSAGE_ENTRIES, "input")
    if limits is None:
        return
    if isinstance(value, str):
        _check_text(len(value), limits, "input")
    elif isinstance(value, list):
        items = [item for item in value if isinstance(item, dict)]
        texts = [item.get(name) for item in items for name in _ITEM_TEXTS]
        _check_text(sum(map(_num_chars, texts)), limits, "input")


def _num_chars(content: object) -> int:
    """Return the characters of a content: a text, or a list of parts that may hold others."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return sum(_num_chars(part.get("text")) + _num_chars(part.get("content")) for part in parts)
    return len(content) if isinstance(content, str) else 0


def _check_text(num_chars: int, limits: BodyLimits, path: str) -> None:
    """Refuse a text that is too long for the model, however it is tokenized.

    It ignores that special tokens may absorb any amount of white space; real prompts are not mostly
    white space.
    """
    most = limits.max_model_len * limits.max_token_chars
    if num_chars > most:
        raise BadRequestError(
            f"{path} has {num_chars} characters, but a prompt can have {most}: max_model_len is "
            f"{limits.max_model_len} and the longest token has {limits.max_token_chars}",
            param=path,
        )


def _check_length(value: object, most: int, path: str) -> None:
    if isinstance(value, list) and len(value) > most:
        raise bad_field(path, f"has {len(value)} entries, but may have at most {most}")


def check_entries(value: object, most: int, path: str) -> None:
    """Refuse a value with too many nested values at any depth."""
    if count_values(value, most) > most:
        raise bad_field(path, f"holds more than the maximum of {most} values")


def count_values(value: object, most: int) -> int:
    """Return the nested values of a value at any depth; stops counting beyond `most`."""
    count, left = 0, [value]
    while left:
        entry = left.pop()
        if isinstance(entry, dict):
            entry = list(entry.values())
        if not isinstance(entry, list):
            continue
        count += len(entry)
        if count > most:
            break
        left += entry
    return count
