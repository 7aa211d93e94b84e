"""Conditions under which a sequence ends by itself, and the reasons. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replicas.engine.sequence import Sequence
    from replicas.messages import FinishReason


class Ending(NamedTuple):
    """The end of a sequence.

    Attributes:
        row: Its index in the step's outputs.
        reason: Why it ended.
        stop_reason: The stop token id that ended it, if one did.
    """

    row: int
    reason: FinishReason
    stop_reason: int | None


class EndRules(NamedTuple):
    """Conditions that end a model's sequences.

    Attributes:
        max_model_len: Longest sequence in tokens.
        eos_token_ids: The model's end tokens.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]

    def longest(self, seq: Sequence) -> int:
        """Return the number of tokens at which a sequence ends by its length."""
        wanted = seq.num_prompt_tokens + seq.request.sampling.max_tokens
        return min(wanted, self.max_model_len)

    def stop_ids(self, seq: Sequence) -> frozenset[int]:
        """Return every token id that ends a sequence."""
        sampling = seq.request.sampling
        if sampling.ignore_eos:
            return sampling.stop_token_ids
        return sampling.stop_token_ids | self.eos_token_ids

    def reason(self, seq: Sequence, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Return why a sequence ends with its last token, and the stop id if one ended it.

        Args:
            seq: The sequence, the token included.
            token_id: Its last token.

        Returns:
            None if the sequence continues.
        """
        sampling = seq.request.sampling
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return "stop", None
        if token_id in sampling.stop_token_ids:
            return "stop", token_id
        return ("length", None) if seq.num_tokens >= self.longest(seq) else None
