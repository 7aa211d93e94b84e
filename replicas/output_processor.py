"""Token outputs of one request to text: detokenise, find stop strings, drop duplicates.

Owner: one processor per request, used by one thread or one event loop. Offline `LLM` and the
cluster's ingress use the same one, so text and endings agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replicas.detokenizer import IncrementalDetokenizer
from replicas.messages import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from replicas.messages import EngineRequest, TokenOutput
    from replicas.tokenizer import Tokenizer


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """Text and tokens that one engine output adds to one choice of a request.

    Attributes:
        choice: Index of the choice, from 0.
        text: Text that may be shown now; "" while a character or a stop string may be unfinished.
        token_ids: New output tokens.
        finish_reason: Set on the last delta of the choice.
        stop_reason: The stop string or stop token id that ended it, or an end token of the model
            that is not the tokenizer's; None for that and for every other reason.
        logprobs: If requested: for each token the drawn one first, then the likeliest.
        prompt_logprobs: If requested, on the first delta: as in `TokenOutput`.
        embedding: If requested, on the first delta: as in `TokenOutput`.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    embedding: bytes | None = None


class OutputProcessor:
    """Text and end of one request's choices, from its engine outputs.

    Outputs of a choice that a stop string has ended are ignored. The caller aborts the request at
    its engine when all choices have ended.

    Args:
        tokenizer: The model's tokenizer; None makes no text and finds no stop strings.
        request: The request.
        eos_token_ids: End tokens, left out of the text.
        is_streamed: Whether deltas carry the text. Otherwise `text` returns it, and decodes it only
            then if the request has no stop strings.

    Attributes:
        num_cached_tokens: Prompt tokens that came from the prefix cache.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        request: EngineRequest,
        eos_token_ids: frozenset[int],
        *,
        is_streamed: bool = True,
    ) -> None:
        self._choices = [
            _ChoiceText(tokenizer, request, eos_token_ids, is_streamed=is_streamed)
            for _ in range(request.sampling.n)
        ]
        self.num_cached_tokens = 0
        # Engines send them with choice 0; every choice has the same prompt.
        self._prompt_logprobs: list[list[TokenLogprob]] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens so far, over all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def is_finished(self) -> bool:
        """Return whether every choice has ended."""
        return all(choice.is_finished for choice in self._choices)

    def has_ended(self, choice: int) -> bool:
        """Return whether a choice has ended, by its engine or by a stop string."""
        return self._choices[choice].is_finished

    def text(self, choice: int) -> str:
        """Return a choice's whole text so far, if it is not streamed."""
        return self._choices[choice].text()

    def take(self, output: TokenOutput) -> OutputDelta | None:
        """Add an output.

        Returns:
            The new part, or None if all its tokens are known already or its choice has ended.
        """
        choice = self._choices[output.choice]
        if choice.is_finished:
            return None
        if output.index == 0 and not output.choice:
            # Other choices find in the cache what choice 0 has computed.
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason == "error":
            for other in self._choices:
                other.is_finished = True
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        return choice.take(output, self._prompt_logprobs)


class _ChoiceText:
    """One choice's tokens and text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        request: EngineRequest,
        eos_token_ids: frozenset[int],
        *,
        is_streamed: bool,
    ) -> None:
        sampling = request.sampling
        self._is_streamed = is_streamed
        self._has_stops = bool(sampling.stop)
        # Used only without streaming: the decoded text, and tokens that are not decoded yet.
        self._made = ""
        self._unread: list[int] = []
        self._shows_stop = sampling.include_stop_str_in_output
        self._eos_token_ids = eos_token_ids
        # End tokens of the model that are stop reasons: all but the tokenizer's own, as in vLLM.
        self._named_ends = (
            frozenset() if tokenizer is None else eos_token_ids - {tokenizer.eos_token_id}
        )
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                stop=sampling.stop,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
            )
            if tokenizer is not None
            else None
        )
        self.num_tokens = 0
        self.is_finished = False

    def take(
        self, output: TokenOutput, prompt_logprobs: list[list[TokenLogprob]] | None
    ) -> OutputDelta | None:
        assert output.index <= self.num_tokens, f"tokens before index {output.index} are missing"
        num_known = self.num_tokens - output.index
        token_ids = output.token_ids[num_known:] if num_known else output.token_ids
        if not token_ids and output.finish_reason is None:
            return None
        text, stop_string, num_taken = self._text(output, token_ids)
        logprobs = output.logprobs
        if logprobs is not None:
            logprobs = logprobs[num_known : num_known + num_taken]
        prompt_logprobs = prompt_logprobs if self.num_tokens == 0 else None
        self.num_tokens += num_taken
        reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = output.stop_reason
        if stop_string is not None:
            token_ids, reason, stop_reason = token_ids[:num_taken], "stop", stop_string
        elif reason == "stop" and token_ids and token_ids[-1] in self._named_ends:
            stop_reason = token_ids[-1]
        self.is_finished = reason is not None
        return OutputDelta(
            output.choice,
            text,
            token_ids,
            reason,
            stop_reason,
            logprobs,
            prompt_logprobs,
            output.embedding,
        )

    def _text(self, output: TokenOutput, token_ids: list[int]) -> tuple[str, str | None, int]:
        """Return the text of new tokens, the stop string in it, and the tokens up to that."""
        if self._detokenizer is None:
            return "", None, len(token_ids)
        shown = token_ids[:-1] if self._ends_hidden(output, token_ids) else token_ids
        if not self._is_streamed and not self._has_stops:
            self._unread += shown
            return "", None, len(token_ids)
        text, num_taken = self._append(self._detokenizer, shown, len(token_ids))
        stop_string = self._detokenizer.stop_reason
        if stop_string is None and output.finish_reason is not None:
            text += self._detokenizer.finish()
            stop_string = self._detokenizer.stop_reason
        if not self._is_streamed:
            self._made, text = self._made + text, ""
        return text, stop_string, num_taken

    def _append(
        self, detokenizer: IncrementalDetokenizer, shown: list[int], num_tokens: int
    ) -> tuple[str, int]:
        """Return the text of tokens up to the first stop string, and the number of tokens used."""
        if not self._has_stops:
            return detokenizer.append(shown), num_tokens
        text = ""
        for count, token_id in enumerate(shown, start=1):
            text += detokenizer.append([token_id])
            if detokenizer.stop_reason is not None:
                return text, count
        return text, num_tokens

    def text(self) -> str:
        detokenizer = self._detokenizer
        if detokenizer is not None and not self._has_stops:
            if self._unread:
                self._made += detokenizer.append(self._unread)
                self._unread = []
            if self.is_finished:
                self._made += detokenizer.finish()
        return self._made

    def _ends_hidden(self, output: TokenOutput, token_ids: list[int]) -> bool:
        """Return whether the last token ended the choice and is not part of its text."""
        if output.finish_reason != "stop" or not token_ids or self._shows_stop:
            return False
        return output.stop_reason is not None or token_ids[-1] in self._eos_token_ids
