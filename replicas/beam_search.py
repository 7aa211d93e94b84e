"""Beam search over one-token requests: engines know nothing of it. Pure.

Owner: a `BeamSearch` belongs to one prompt and one caller, which runs its requests.
Source: vLLM vllm/beam_search.py and `LLM.beam_search`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from replicas.errors import InvalidRequestError
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Literal

    from replicas.messages import TokenLogprob


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search.

    Attributes:
        beam_width: Number of sequences to keep, and to return.
        max_tokens: Most tokens to generate.
        ignore_eos: Extend sequences beyond the model's end tokens.
        length_penalty: A sequence's log probability is divided by its length to this power.
        include_stop_str_in_output: Keep the end token of a sequence that has one.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def validate(self, max_logprobs: int) -> None:
        """Check every range.

        Args:
            max_logprobs: Most log probabilities that the engine reports for a token; -1 is no
                limit. A sequence is extended by twice as many tokens as the width.

        Raises:
            InvalidRequestError: A value is outside its range; `param` names it.
        """
        if self.beam_width < 1:
            text = f"beam_width must be at least 1, got {self.beam_width}"
            raise InvalidRequestError("beam_width", text)
        if -1 < max_logprobs < 2 * self.beam_width:
            text = f"beam_width must be at most {max_logprobs // 2}, got {self.beam_width}"
            raise InvalidRequestError("beam_width", f"{text}; see the engine's max_logprobs")
        if self.max_tokens < 1:
            text = f"max_tokens must be at least 1, got {self.max_tokens}"
            raise InvalidRequestError("max_tokens", text)
        if not math.isfinite(self.length_penalty):
            text = f"length_penalty must be finite, got {self.length_penalty}"
            raise InvalidRequestError("length_penalty", text)

    def one_token(self) -> SamplingParams:
        """Return the parameters of the requests that extend each sequence."""
        return SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=2 * self.beam_width, ignore_eos=True
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search.

    Attributes:
        tokens: Its tokens, the prompt's first.
        cum_logprob: Log probability of the tokens after the prompt, an end token included.
        finish_reason: "stop" with an end token, "length" without; None while it may be extended.
        text: The tokens after the prompt as text, once the search is over.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    finish_reason: Literal["stop", "length"] | None = None
    text: str = ""


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of a beam search, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt's continuations.

    Args:
        prompt_token_ids: The prompt.
        params: Validated parameters.
        eos_token_ids: The model's end tokens.
        max_model_len: Longest sequence of the model.

    Attributes:
        live: Sequences to extend next, best first; empty when the search is over.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_model_len: int,
    ) -> None:
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._num_left = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        self._ended: list[BeamSearchSequence] = []
        self.live = [BeamSearchSequence(prompt_token_ids)]

    def take(self, likeliest: Sequence[Sequence[TokenLogprob]]) -> None:
        """Extend the live sequences by one token each, and keep the best.

        Args:
            likeliest: For each of `live` the likeliest next tokens, twice the width of them.
        """
        extended = []
        for beam, entries in zip(self.live, likeliest, strict=True):
            for entry in entries:
                logprob = beam.cum_logprob + entry.logprob
                if entry.token_id not in self._eos_token_ids:
                    extended.append(BeamSearchSequence([*beam.tokens, entry.token_id], logprob))
                    continue
                tail = [entry.token_id] if self._params.include_stop_str_in_output else []
                self._ended.append(BeamSearchSequence([*beam.tokens, *tail], logprob, "stop"))
        # Sequences of equal length compare by probability alone.
        extended.sort(key=lambda beam: -beam.cum_logprob)
        self.live = extended[: self._params.beam_width]
        self._num_left -= 1
        if self._num_left == 0:
            for beam in self.live:
                beam.finish_reason = "length"
            self._ended += self.live
            self.live = []

    def best(self) -> list[BeamSearchSequence]:
        """Return the best sequences of a search that is over, best first."""
        assert not self.live, "the search is not over"
        self._ended.sort(key=self.score, reverse=True)
        return self._ended[: self._params.beam_width]

    def score(self, beam: BeamSearchSequence) -> float:
        """Return what sequences of different lengths are compared by.

        As in vLLM the length counts the prompt, and no end token.
        """
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos_token_ids)
        return float(beam.cum_logprob / max(length, 1) ** self._params.length_penalty)
