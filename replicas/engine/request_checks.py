"""Checks that a request must pass at the engine, independent of its client. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.sequence import Phase
from replicas.errors import InvalidRequestError
from replicas.messages import MAX_REQUEST_ID_CHARS
from replicas.sampling_params import MAX_LOGPROBS, SamplingParams, are_below

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from replicas.engine.sequence import Sequence
    from replicas.messages import Activate, AddRequest, EngineRequest

_INACTIVE = (Phase.RESERVED, Phase.WAITING)
"""Phases of a reserved request's choices before it is activated."""


_DEFAULTS = SamplingParams()
_WITHOUT_LOGITS = {
    "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "n", "truncate_prompt_tokens",
    "truncation_side", "skip_reading_prefix_cache",
}  # fmt: skip
_FIELDS_WITH_LOGITS = [
    name for name in SamplingParams.__struct_fields__ if name not in _WITHOUT_LOGITS
]
"""Parameters for which the host changes or reports the logits of each token."""


class RequestChecks:
    """Checks that find requests which one engine can never run.

    Args:
        num_groups: DP groups of the engine.
        max_model_len: Longest sequence in tokens.
        vocab_size: Token ids are below this.
        has_connector: Whether the engine can send and receive KV; kept as an attribute.
        tokens_per_pass: The most tokens that a pass gives a request; all of them must fit.
        max_logprobs: See `EngineConfig`.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        max_model_len: int,
        vocab_size: int,
        has_connector: bool,
        tokens_per_pass: int = 1,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        self._num_groups = num_groups
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self.has_connector = has_connector
        self._tokens_per_pass = tokens_per_pass

    def problem(self, message: AddRequest) -> str | None:
        """Return why a request can never run here, or None."""
        request = message.request
        problem = self._prompt_problem(request)
        if problem is not None:
            return problem
        if not -1 <= message.dp_group < self._num_groups:
            return f"no dp_group {message.dp_group}: there are {self._num_groups}"
        try:
            request.sampling.validate(self._vocab_size, self._max_logprobs)
            request.check_supported()
        except InvalidRequestError as error:
            return str(error)
        problem = self._block_problem(request.sampling) or self._mode_problem(message)
        if problem is not None:
            return problem
        return self._outputs_problem(request, message.token_ids, range(request.sampling.n))

    def _block_problem(self, sampling: SamplingParams) -> str | None:
        """Return which parameter a model cannot obey that gives several tokens at once, if any."""
        if self._tokens_per_pass > 1:
            for name in _FIELDS_WITH_LOGITS:
                if getattr(sampling, name) != getattr(_DEFAULTS, name):
                    return (
                        f"{name} needs the logits of every token, but this model gives up to "
                        f"{self._tokens_per_pass} tokens at once, and no logits"
                    )
        return None

    def _prompt_problem(self, request: EngineRequest) -> str | None:
        num_prompt = len(request.prompt_token_ids)
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            return f"its id has more than {MAX_REQUEST_ID_CHARS} characters"
        if num_prompt == 0:
            return "the prompt is empty"
        if num_prompt + self._tokens_per_pass > self._max_model_len:
            return (
                f"the prompt has {num_prompt} tokens and max_model_len is {self._max_model_len}: "
                "there is no room for output"
            )
        if not are_below(request.prompt_token_ids, self._vocab_size):
            return f"a prompt token id is outside the vocabulary of {self._vocab_size}"
        return None

    def _mode_problem(self, message: AddRequest) -> str | None:
        if (message.mode == "prefill") != (message.ticket is not None):
            return "mode prefill needs a ticket, and only that mode takes one"
        if message.mode != "decode" and message.token_ids:
            return "only mode decode continues after output tokens"
        # Mode decode needs no connector: it can compute the prompt here.
        if message.mode == "prefill" and not self.has_connector:
            return "this engine has no KV connector; set kv_connector"
        return None

    def activation_problem(self, choices: SequenceOf[Sequence], message: Activate) -> str | None:
        """Return why no engine of this model can have drawn an activation's tokens, or None.

        Args:
            choices: The live choices of the request; tokens of others are not looked at.
            message: The activation.
        """
        if not choices:
            return None
        live = [seq.choice for seq in choices]
        problem = self._outputs_problem(choices[0].request, message.token_ids, live)
        if problem is not None:
            return problem
        for seq in choices:
            known = seq.token_ids[seq.num_prompt_tokens :]
            given = message.token_ids[seq.choice] if message.token_ids else []
            if seq.phase in _INACTIVE and known != given[: len(known)]:
                return "it was reserved with other tokens than it was activated with"
        return None

    def _outputs_problem(
        self, request: EngineRequest, tokens: list[list[int]], choices: Iterable[int]
    ) -> str | None:
        """Return why no engine of this model can have drawn a client's output tokens, or None."""
        if not tokens:
            return None
        if len(tokens) != request.sampling.n:
            return f"it has {request.sampling.n} choices, and was given tokens of {len(tokens)}"
        num_prompt = len(request.prompt_token_ids)
        for token_ids in (tokens[choice] for choice in choices):
            if num_prompt + len(token_ids) + self._tokens_per_pass > self._max_model_len:
                return (
                    f"a prompt of {num_prompt} tokens with {len(token_ids)} of output "
                    f"leaves no room below max_model_len {self._max_model_len}"
                )
            if not are_below(token_ids, self._vocab_size):
                return f"a token id is outside the vocabulary of {self._vocab_size}"
        return None
