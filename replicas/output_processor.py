"""Token outputs of one request to text: detokenise, find stop strings, drop duplicates.

Owner: one processor per request, used by one thread or one event loop. Offline `LLM` and the
cluster's ingress use the same one, so text and endings agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from replicas.messages import EngineRequest, FinishReason, TokenOutput
    from replicas.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one token output adds to a request.

    Attributes:
        text: Text that may be shown now.
        token_ids: New output tokens.
        finish_reason: Set on the last delta.
        stop_reason: The stop string or stop token id that ended it, if one did.
        is_stopped_here: The text ended it, not the engine: the engine must be told to abort.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    is_stopped_here: bool = False


class OutputProcessor:
    """Follows one request's outputs.

    Args:
        tokenizer: The model's tokenizer; None makes no text and knows no stop strings.
        request: What was asked.
        eos_token_ids: End tokens, left out of the text.

    Attributes:
        num_output_tokens: Tokens taken so far.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, request: EngineRequest, eos_token_ids: frozenset[int]
    ) -> None:
        sampling = request.sampling
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                stop=sampling.stop,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
            )
            if tokenizer is not None
            else None
        )
        self.num_output_tokens = 0
        self.num_cached_tokens = 0

    def take(self, output: TokenOutput) -> OutputDelta | None:
        """Add an output.

        Returns:
            What is new, or None when every token of it is known already.
        """
        assert output.index <= self.num_output_tokens, (
            f"tokens before index {output.index} are missing"
        )
        token_ids = output.token_ids[self.num_output_tokens - output.index :]
        if not token_ids and output.finish_reason is None:
            return None
        if output.index == 0:
            self.num_cached_tokens = output.num_cached_tokens
        if self._detokenizer is None:
            self.num_output_tokens += len(token_ids)
            return OutputDelta("", token_ids, output.finish_reason, output.stop_reason)
        return self._take_text(self._detokenizer, output, token_ids)

    def _take_text(
        self, detokenizer: IncrementalDetokenizer, output: TokenOutput, token_ids: list[int]
    ) -> OutputDelta:
        shown = token_ids[:-1] if self._ends_hidden(output, token_ids) else token_ids
        pieces = []
        for count, token_id in enumerate(shown, start=1):
            pieces.append(detokenizer.append([token_id]))
            if detokenizer.stop_reason is not None:
                self.num_output_tokens += count
                return OutputDelta(
                    "".join(pieces), token_ids[:count], "stop", detokenizer.stop_reason,
                    is_stopped_here=output.finish_reason is None,
                )  # fmt: skip
        self.num_output_tokens += len(token_ids)
        if output.finish_reason is None:
            return OutputDelta("".join(pieces), token_ids, None, None)
        pieces.append(detokenizer.finish())
        if detokenizer.stop_reason is not None:
            return OutputDelta("".join(pieces), token_ids, "stop", detokenizer.stop_reason)
        return OutputDelta("".join(pieces), token_ids, output.finish_reason, output.stop_reason)

    def _ends_hidden(self, output: TokenOutput, token_ids: list[int]) -> bool:
        """Whether the last token ended the request and is not part of its text."""
        if (
            output.finish_reason != "stop"
            or not token_ids
            or self._sampling.include_stop_str_in_output
        ):
            return False
        return output.stop_reason is not None or token_ids[-1] in self._eos_token_ids
