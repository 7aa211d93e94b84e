"""Truncation of prompts, which front ends apply: engines get the tokens that are left. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.errors import InvalidRequestError
from replicas.sampling_params import check_range

if TYPE_CHECKING:
    from typing import Literal


def most_prompt_tokens(asked: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens of a prompt to keep.

    Args:
        asked: `truncate_prompt_tokens`; -1 keeps what leaves room for the output.
        max_tokens: Most tokens of output; 0 for an embedding; None is all the room left, at least
            one token.
        max_model_len: Longest sequence of the model.

    Raises:
        InvalidRequestError: So many tokens leave no room for output.
    """
    check_range("truncate_prompt_tokens", asked)
    if asked == -1:
        return max(max_model_len - (1 if max_tokens is None else max_tokens), 1)
    if asked > max_model_len - (max_tokens != 0):
        raise InvalidRequestError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {asked} and max_model_len is {max_model_len}: there is no "
            "room for output",
        )
    return asked


def truncated(token_ids: list[int], most: int, side: Literal["left", "right"]) -> list[int]:
    """Return the last `most` tokens of a prompt, or the first ones if its right side is cut off."""
    return token_ids[:most] if side == "right" else token_ids[-most:]
