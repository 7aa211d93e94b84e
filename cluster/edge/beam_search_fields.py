"""Fields of beam searches in request bodies. Pure.

Source: vLLM 0.32 `CompletionRequest.to_beam_search_params`.
"""

from __future__ import annotations

from typing import Any

from cluster.edge.fields import (
    bad_field,
)

MAX_EXTENSIONS = 2**13
"""Most requests of one search, its width times its tokens."""
_DRAWS = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Fields that say how a token is drawn. A search draws none, so they change nothing."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stop": ((),),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "thinking_token_budget": (),
}
"""Fields that a search does not obey, with the values at which they change nothing."""


def read_length_penalty(values: dict[str, Any]) -> float | None:
    """Return the length penalty of the beam search that checked fields ask for; None without one.

    Fields that only concern drawing are removed, because a model's own defaults may not fit.

    Raises:
        BadRequestError: A field cannot be used with a beam search; `param` is its path.
    """
    if not values.get("use_beam_search", False):
        return None
    for name, neutral in _NEUTRAL.items():
        if name in values and values[name] not in neutral:
            raise bad_field(name, "cannot be used with use_beam_search; leave it out")
    if values.get("echo", False) and "logprobs" in values:
        raise bad_field("echo", "cannot be used with use_beam_search and logprobs together")
    for name in _DRAWS:
        values.pop(name, None)
    return float(values.get("length_penalty", 1.0))
