"""How much a body may hold, before anything is done for each part of it.

A body of a few megabytes can be one text, which costs next to nothing to read, or millions of
small values, each of which costs a check. Counting them costs little, so it comes first:
`check_structure` before the body is decoded, `check_sizes` before any of its fields is looked at.
Every list and object of a body has a bound here; a field without a bound of its own has
`MAX_FIELD_ENTRIES`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.edge.openai_fields import bad_field
from cluster.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.edge.openai import ModelCard
    from replicas.tokenizer import Tokenizer

MAX_CONTAINERS = 2**17
"""Opening brackets and colons in a body, its texts included: 20 ms of decoding at the worst. No
text of 128 KiB can have more, and longer ones have far fewer; a model's length raises it."""
MAX_COMMAS = 2**18
"""Commas, likewise: 4 ms for numbers, 21 ms for strings."""
MAX_MESSAGES = 2048
"""As OpenAI's API has it; a chat template takes some 12 microseconds for each."""
MAX_MESSAGE_ENTRIES = 8 * MAX_MESSAGES
"""Values in all messages together: their fields, the parts of their contents and theirs."""
MAX_FIELD_ENTRIES = 1024
"""Values in any other field, at any depth."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model makes of a body's limits.

    Attributes:
        max_model_len: Longest sequence, in tokens.
        vocab_size: Of the model.
        max_token_chars: Most characters of a text that one token can stand for.
    """

    max_model_len: int
    vocab_size: int
    max_token_chars: int

    @classmethod
    def of(cls, cards: Sequence[ModelCard], tokenizer: Tokenizer) -> Limits:
        """Those of the longest of the served models, which share a tokenizer."""
        longest = max(card.max_model_len for card in cards)
        return cls(longest, tokenizer.vocab_size, tokenizer.max_token_chars)

    @property
    def max_stop_token_ids(self) -> int:
        """No more than there are, and no more than a longest prompt would cost to send."""
        return min(self.vocab_size, self.max_model_len)


def check_structure(raw: bytes, limits: Limits) -> None:
    """Refuse a body that would take long to decode, by what its bytes are.

    Raises:
        BadRequestError: It may hold more values than any request needs.
    """
    num_containers = len(raw) - len(raw.translate(None, b"[{:"))
    most_containers = max(MAX_CONTAINERS, limits.max_model_len)
    if num_containers > most_containers:
        text = f"the body has {num_containers} brackets and colons; at most {most_containers}"
        raise BadRequestError(f"{text} are read: send a long prompt as token ids")
    num_commas, most_commas = raw.count(b","), max(MAX_COMMAS, 2 * limits.max_model_len)
    if num_commas > most_commas:
        raise BadRequestError(f"the body has {num_commas} commas; at most {most_commas} are read")


def check_sizes(body: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a body of which some field holds too much; what the fields are is not checked.

    Raises:
        BadRequestError: Names the field, what it has, and what it may have.
    """
    for name, value in body.items():
        if name == "prompt":
            _check_prompt(value, limits)
        elif name == "messages":
            _check_messages(value, limits)
        elif name == "tokens":
            _check_length(value, limits.max_model_len, name)
        elif name == "stop_token_ids":
            _check_length(value, limits.max_stop_token_ids, name)
        else:
            _check_entries(value, MAX_FIELD_ENTRIES, name)


def prompt_too_long(
    num_tokens: int, max_model_len: int, param: str, *, is_whole: bool = True
) -> BadRequestError:
    """Return the error of a prompt that leaves no room for output.

    Args:
        num_tokens: Tokens of the prompt.
        max_model_len: The model's.
        param: The field that the prompt came from.
        is_whole: Whether that is all; else encoding it was ended at this count.
    """
    count = f"{num_tokens}" if is_whole else f"more than {num_tokens - 1}"
    return BadRequestError(
        f"the prompt has {count} tokens and max_model_len is {max_model_len}: no room is left "
        f"for output; shorten the prompt by {num_tokens + 1 - max_model_len} tokens or more",
        param=param,
    )


def _check_prompt(value: object, limits: Limits) -> None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        _check_text(len(value), limits, "prompt")
    elif isinstance(value, list) and len(value) >= limits.max_model_len:
        raise prompt_too_long(len(value), limits.max_model_len, "prompt")


def _check_messages(value: object, limits: Limits) -> None:
    _check_length(value, MAX_MESSAGES, "messages")
    _check_entries(value, MAX_MESSAGE_ENTRIES, "messages")
    if isinstance(value, list):
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        _check_text(sum(map(_num_chars, contents)), limits, "messages")


def _num_chars(content: object) -> int:
    """Characters of a message's content, be it a text or parts."""
    if isinstance(content, list):
        return sum(_num_chars(part.get("text")) for part in content if isinstance(part, dict))
    return len(content) if isinstance(content, str) else 0


def _check_text(num_chars: int, limits: Limits, path: str) -> None:
    """Refuse a text that is too long for the model whatever it says.

    White space that a special token swallows is not thought of: a prompt is never mostly that.
    """
    most = limits.max_model_len * limits.max_token_chars
    if num_chars > most:
        raise BadRequestError(
            f"{path} has {num_chars} characters, and a prompt can have {most}: max_model_len is "
            f"{limits.max_model_len} and the longest token has {limits.max_token_chars}",
            param=path,
        )


def _check_length(value: object, most: int, path: str) -> None:
    if isinstance(value, list) and len(value) > most:
        raise bad_field(path, f"has {len(value)} entries, and may have {most}")


def _check_entries(value: object, most: int, path: str) -> None:
    """Count the values in a value, at any depth, and stop at the first too many."""
    count, left = 0, [value]
    while left:
        entry = left.pop()
        if isinstance(entry, dict):
            entry = list(entry.values())
        if not isinstance(entry, list):
            continue
        count += len(entry)
        if count > most:
            raise bad_field(path, f"holds more than {most} values, which is the most")
        left += entry
