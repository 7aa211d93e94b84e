"""The values that cross between the HTTP edge and whatever serves it; no JSON, no HTTP.

The edge turns a body into an `EngineRequest`, the ingress emits `OutputDelta`s and returns the
`Usage`, the edge turns those into a body again. `cluster.edge.openai_requests` and
`cluster.edge.openai_responses` do the turning. Nothing here has behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from replicas.sampling_params import SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from replicas.output_processor import OutputDelta

Emit: TypeAlias = "Callable[[OutputDelta], Awaitable[None]]"
"""Takes the deltas of a request; whoever awaits it has back-pressure."""


class Usage(NamedTuple):
    """Token counts of a request; `cached_tokens` of the prompt were found computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models.

    Attributes:
        id: The name that requests give.
        root: The model that it is, for one its folder's name.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        created: Unix time in s at which this deployment started.
        parent: The base model of an adapter, or None.
        defaults: Sampling values of requests that leave them out; not shown.
    """

    id: str
    root: str
    max_model_len: int
    created: int
    parent: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """What a response needs beside its request and the deltas; nothing behind the edge sees it.

    Attributes:
        request_id: The client's own name for the request, or one made for it.
        created: Unix time in s at which the request came.
        model: The served model's id.
        stream: Whether the client wants server-sent events.
        include_usage: Whether a stream ends with a chunk of token counts.
        continuous_usage_stats: Whether each chunk of a stream has token counts.
        return_token_ids: Whether the answer has the token ids of prompt and output.
        prompt_tokens_details: Whether token counts say how much of the prompt was cached.
    """

    request_id: str
    created: int
    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    prompt_tokens_details: bool = False
