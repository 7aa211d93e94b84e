"""Beam search over one-token requests: engines know nothing of it. Pure.

Owner: a `BeamSearch` belongs to one prompt and one caller, which runs its requests.
Source: vLLM vllm/beam_search.py and `LLM.beam_search`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from replicas.detokenizer import IncrementalDetokenizer
from replicas.errors import InvalidRequestError
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Literal

    from replicas.config import LogprobsMode
    from replicas.messages import TokenLogprob
    from replicas.tokenizer import Tokenizer

MAX_LENGTH_PENALTY = 10.0
"""A length to a much larger power is no finite number."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search.

    Attributes:
        beam_width: Number of sequences to keep, and to return.
        max_tokens: Most tokens to generate.
        ignore_eos: Extend sequences beyond the model's end tokens.
        length_penalty: A sequence's log probability is divided by its length to this power.
        include_stop_str_in_output: Keep the end token of a sequence that has one; its text never
            has it.
        skip_special_tokens: Leave special tokens out of the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def validate(self, max_logprobs: int, logprobs_mode: LogprobsMode) -> None:
        """Check every range.

        Args:
            max_logprobs: Most log probabilities that the engine reports for a token; -1 is no
                limit. A sequence is extended by twice as many tokens as the width.
            logprobs_mode: Values that it reports. Logits of different positions cannot be added.

        Raises:
            InvalidRequestError: A value is outside its range; `param` names it.
        """
        if not logprobs_mode.endswith("logprobs"):
            text = f"beam_search needs log probabilities, but logprobs_mode is {logprobs_mode!r}"
            text = f"{text}; set the engine's to 'raw_logprobs' or 'processed_logprobs'"
            raise InvalidRequestError("beam_search", text)
        if self.beam_width < 1:
            text = f"beam_width must be at least 1, got {self.beam_width}"
            raise InvalidRequestError("beam_width", text)
        if -1 < max_logprobs < self.num_likeliest:
            text = f"beam_width must be at most {max_logprobs // 2}, got {self.beam_width}"
            raise InvalidRequestError("beam_width", f"{text}; see the engine's max_logprobs")
        if self.max_tokens < 1:
            text = f"max_tokens must be at least 1, got {self.max_tokens}"
            raise InvalidRequestError("max_tokens", text)
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:  # also of NaN
            limits = f"-{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
            text = f"length_penalty must be {limits}, got {self.length_penalty}"
            raise InvalidRequestError("length_penalty", text)

    @property
    def num_likeliest(self) -> int:
        """Return the number of tokens by which each sequence is extended."""
        return 2 * self.beam_width

    def one_token(self, num_logprobs: int = 0) -> SamplingParams:
        """Return the parameters of the requests that extend each sequence.

        Args:
            num_logprobs: Least number of likeliest tokens to report; -1 is the whole vocabulary.
        """
        most = -1 if num_logprobs == -1 else max(self.num_likeliest, num_logprobs)
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=most, ignore_eos=True)


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search.

    Attributes:
        tokens: Its tokens, the prompt's first.
        cum_logprob: Log probability of the tokens after the prompt, an end token included.
        logprobs: For each token after the prompt its log probability first, then those of the
            likeliest tokens at its position.
        finish_reason: "stop" with an end token, "length" without; None while it may be extended.
        text: The tokens after the prompt as text, once the search is over.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
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
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._num_left = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        # The best of those that have ended, best first.
        self._ended: list[BeamSearchSequence] = []
        self.live = [BeamSearchSequence(prompt_token_ids)]

    def extend(self, likeliest: Sequence[Sequence[TokenLogprob]]) -> None:
        """Extend the live sequences by one token each, and keep the best.

        Args:
            likeliest: For each of `live` the likeliest next tokens, `params.num_likeliest` or more.
        """
        extensions = []
        for beam, entries in zip(self.live, likeliest, strict=True):
            for entry in entries[: self._params.num_likeliest]:
                if entry.token_id in self._eos_token_ids:
                    self._end(beam, entry, entries)
                else:
                    extensions.append((beam, entry, entries))
        # Sequences of equal length compare by probability alone.
        extensions.sort(key=lambda parts: -(parts[0].cum_logprob + parts[1].logprob))
        self.live = [_extended(*parts) for parts in extensions[: self._params.beam_width]]
        self._num_left -= 1
        if self._num_left == 0:
            for beam in self.live:
                beam.finish_reason = "length"
            self._ended += self.live
            self.live = []
        self._ended.sort(key=self.score, reverse=True)
        del self._ended[self._params.beam_width :]

    def best(self, tokenizer: Tokenizer | None) -> list[BeamSearchSequence]:
        """Return the best sequences of a search that is over, best first.

        Args:
            tokenizer: Makes their text; None leaves it empty.
        """
        assert not self.live, "the search is not over"
        if tokenizer is not None:
            for beam in self._ended:
                beam.text = self._text(beam, tokenizer)
        return self._ended

    def score(self, beam: BeamSearchSequence) -> float:
        """Return what sequences of different lengths are compared by.

        As in vLLM the length counts the prompt, and no end token.
        """
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos_token_ids)
        return float(beam.cum_logprob / max(length, 1) ** self._params.length_penalty)

    def _end(
        self, beam: BeamSearchSequence, entry: TokenLogprob, likeliest: Sequence[TokenLogprob]
    ) -> None:
        """Keep a sequence that an end token ends, with or without that token."""
        whole = _extended(beam, entry, likeliest)
        whole.finish_reason = "stop"
        if not self._params.include_stop_str_in_output:
            whole.tokens.pop()
            whole.logprobs.pop()
        self._ended.append(whole)

    def _text(self, beam: BeamSearchSequence, tokenizer: Tokenizer) -> str:
        prompt = self._prompt_token_ids
        tokens = beam.tokens[len(prompt) :]
        if tokens and tokens[-1] in self._eos_token_ids:
            tokens.pop()
        detokenizer = IncrementalDetokenizer(
            tokenizer, prompt, skip_special_tokens=self._params.skip_special_tokens
        )
        return detokenizer.append(tokens) + detokenizer.finish()


def _extended(
    beam: BeamSearchSequence, entry: TokenLogprob, likeliest: Sequence[TokenLogprob]
) -> BeamSearchSequence:
    """Return a sequence with one more token."""
    return BeamSearchSequence(
        [*beam.tokens, entry.token_id],
        beam.cum_logprob + entry.logprob,
        [*beam.logprobs, [entry, *likeliest]],
    )
