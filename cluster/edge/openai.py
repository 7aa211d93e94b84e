"""Values passed between the HTTP edge and its backend; no JSON, no HTTP, no behaviour.

`cluster.edge.openai_requests` turns a body into an `EngineRequest`. The backend emits deltas and
returns the `Usage`, which `cluster.edge.openai_responses` turns into a body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from replicas.sampling_params import MAX_LOGPROBS, SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from cluster.config.schema import ReasoningParserName, ToolParserName
    from cluster.edge.families.parser import OutputParser
    from cluster.edge.tenants import Tenant
    from cluster.errors import ServingError
    from replicas.config import LogprobsMode, SchedulingPolicy
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta
    from replicas.sampling_params import ReasoningMarks

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", contravariant=True)

Emit: TypeAlias = "Callable[[OutputDelta], Awaitable[None]]"
"""Sends a delta to the client; awaiting it applies the client's back-pressure."""


StartBackground: TypeAlias = (
    "Callable[[EngineRequest, ResponseSpec, BackgroundWork], StartedResponse]"
)
"""Starts a request that runs without its connection."""


class EventWriter(Protocol[Item, Result]):
    """Converter of what a request emits into the events of its stream; does no I/O."""

    def add(self, item: Item, /) -> bytes:
        """Add an item; return the events to send now, or b""."""

    def finish(self, result: Result, /) -> bytes:
        """Return the end of the stream."""

    def fail(self, error: ServingError, /) -> bytes:
        """Return the end of a stream that fails after its first byte."""


class FollowedResponse(NamedTuple):
    """The stream of a response that another request has made, or makes.

    Attributes:
        run: Passes its progress on until it has ended, and returns the ended response.
        writer: Writes the events.
    """

    run: Callable[[Callable[[Any], Awaitable[None]]], Awaitable[Any]]
    writer: EventWriter[Any, Any]


class StartedResponse(NamedTuple):
    """A request that runs without its connection.

    Attributes:
        body: The body that answers it at once.
        events: Returns the stream that answers it instead, if its client wants that.
    """

    body: dict[str, Any]
    events: Callable[[], FollowedResponse]


class BackgroundWork(NamedTuple):
    """A request that is ready to run without its connection.

    Attributes:
        run: Runs it, once; see `cluster.edge.backend.Backend.generate`.
        to_serving_error: Maps an exception of `run` to the error for the client.
        release: Must be called once when the work has ended, so that it no longer counts as open.
        tenant: The request's tenant.
        source: Address of its client.
        can_continue: Whether another ingress can continue the request after its output so far.
        left_s: Returns the seconds left of the request's longest time; None without a limit.
    """

    run: Callable[[Emit], Coroutine[Any, Any, Usage]]
    to_serving_error: Callable[[Exception], ServingError]
    release: Callable[[], None]
    tenant: Tenant
    source: str
    can_continue: bool
    left_s: Callable[[], float | None]


class Usage(NamedTuple):
    """Token counts of a request.

    Attributes:
        prompt_tokens: Those of the prompt.
        completion_tokens: Those of all choices.
        cached_tokens: The cached part of the prompt.
        reasoning_tokens: Those of the reasoning; None: it is not separated.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models.

    Attributes:
        id: Model name in requests.
        root: Name of the model itself, such as its folder's name.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        created: Unix time in s at which this deployment started.
        parent: The base model of an adapter, or None.
        defaults: Sampling values of requests that leave them out; not shown.
        max_logprobs: Most log probabilities for a token; -1 is no limit. Not shown.
        tool_call_parser: Name of the format of its tool calls, if it has any. Not shown.
        reasoning_parser: Name of the format of its reasoning, if it is separated. Not shown.
        scheduling_policy: Whether requests run in order of arrival or of priority. Not shown.
        logprobs_mode: Whether engines report log probabilities or logits. Not shown.
    """

    id: str
    root: str
    max_model_len: int
    created: int
    parent: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_logprobs: int = MAX_LOGPROBS
    tool_call_parser: ToolParserName | None = None
    reasoning_parser: ReasoningParserName | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    logprobs_mode: LogprobsMode = "raw_logprobs"


class AnsweredPrompt(NamedTuple):
    """One prompt of a request that has several: its token ids, and its text if that is echoed."""

    token_ids: list[int]
    echo: str


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """Options of a response that only the edge uses.

    Attributes:
        request_id: The client's id for the request, or a generated one.
        created: Unix time in s at which the request arrived.
        model: The served model's id.
        stream: Whether the client wants server-sent events.
        include_usage: Whether a stream ends with a chunk of token counts.
        continuous_usage_stats: Whether each chunk of a stream has token counts.
        return_token_ids: Whether the answer has the token ids of prompt and output.
        prompt_tokens_details: Whether token counts say how much of the prompt was cached.
        prompt_logprobs: Whether the answer has the log probabilities of the prompt.
        echo: Text that precedes each choice's own: the prompt, or the turn that a chat continues.
        echoes_logprobs: Whether the log probabilities of the prompt precede each choice's own.
        drops_output: Whether the answer is the echo alone.
        new_parser: Makes the parser of a choice's text; None if all text is content.
        reasoning_marks: The tokens around the reasoning; None if only the parser can find it.
        include_reasoning: Whether the answer has the reasoning that the parser finds.
        return_prompt_text: Whether the answer has `prompt_text`.
        prompt_text: The text of the prompt's tokens, if the answer has it.
        service_tier: The tier that the client asked for; the answer names the only one.
        stream_interval: Least tokens in an event, but for the first and last of a choice.
        return_tokens_as_token_ids: Whether log probabilities name tokens by their ids.
        prompts: Every prompt of a request that has several, each with n choices; else empty.
        own: What the request's API repeats in the answer, or needs to make it.
        start_background: Starts a request that runs without its connection; None: its client waits.
    """

    request_id: str
    created: int
    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    prompt_tokens_details: bool = False
    prompt_logprobs: bool = False
    echo: str = ""
    echoes_logprobs: bool = False
    drops_output: bool = False
    new_parser: Callable[[], OutputParser] | None = None
    reasoning_marks: ReasoningMarks | None = None
    include_reasoning: bool = True
    return_prompt_text: bool = False
    prompt_text: str = ""
    service_tier: str | None = None
    stream_interval: int = 1
    return_tokens_as_token_ids: bool = False
    prompts: tuple[AnsweredPrompt, ...] = ()
    own: Any = None
    start_background: StartBackground | None = None
