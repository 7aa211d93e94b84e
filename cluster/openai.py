"""The values that cross between the HTTP edge and whatever serves it; no JSON, no HTTP.

The ingress turns a body into a `GenerateRequest`, the service answers with generation events, the
ingress turns those into a body again. `cluster.openai_requests` and `cluster.openai_responses` do
the turning. Nothing here has behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from replicas.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models.

    Attributes:
        id: The name that requests give.
        root: The model that it is, for one its folder's name.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        created: Unix time in s at which this deployment started.
        parent: The base model of an adapter, or None.
    """

    id: str
    root: str
    max_model_len: int
    created: int
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated request: nothing about it can fail any more but capacity and the replicas.

    Attributes:
        model: The served model's id.
        prompt_token_ids: At least one, each inside the vocabulary.
        sampling: `max_tokens` is at least 1 and fits the room that the prompt leaves.
        stream: Whether the client wants server-sent events.
        include_usage: Whether a stream ends with a chunk of token counts.
        continuous_usage_stats: Whether each chunk of a stream has token counts.
        return_token_ids: Whether the answer has the token ids of prompt and output.
        cache_salt: Cached KV is shared with requests of the same salt only.
    """

    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request; `cached_tokens` of the prompt were found computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of output.

    Attributes:
        text: May be "" while characters or a possible stop string are held back.
        token_ids: The tokens generated since the last event.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every generation that did not fail.

    Attributes:
        finish_reason: "stop" (end token or stop string) or "length".
        stop_reason: The stop string or stop token id that ended it; None for the model's own end
            token and for "length".
        usage: Token counts of the whole request.
        text: The last piece of output, as in `TextDelta`.
        token_ids: Its tokens.
    """

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    text: str = ""
    token_ids: tuple[int, ...] = ()


GenerationEvent = TextDelta | Finished
