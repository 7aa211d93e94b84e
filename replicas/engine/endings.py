"""Conditions under which a sequence ends by itself, and the reasons. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replicas.engine.sequence import Sequence
    from replicas.messages import FinishReason


class End(NamedTuple):
    """The end of a sequence.

    Attributes:
        reason: Why it ended.
        stop_reason: The stop token id that ended it, if one did.
    """

    reason: FinishReason
    stop_reason: int | None


class EndRules(NamedTuple):
    """Conditions that end a model's sequences.

    Attributes:
        max_model_len: Longest sequence in tokens.
        eos_token_ids: The model's end tokens.
        tokens_per_pass: The most tokens that a pass gives a sequence; all of them must fit.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]
    tokens_per_pass: int = 1

    def longest(self, seq: Sequence) -> int:
        """Return the number of tokens at which a sequence ends by its length."""
        wanted = seq.num_prompt_tokens + seq.sampling.max_tokens
        return min(wanted, self.max_model_len)

    def stop_ids(self, seq: Sequence) -> frozenset[int]:
        """Return every token id that ends a sequence."""
        sampling = seq.sampling
        if sampling.ignore_eos:
            return sampling.stop_token_ids
        return sampling.stop_token_ids | self.eos_token_ids

    def reason(self, seq: Sequence, token_id: int, num_tokens: int) -> End | None:
        """Return why a sequence ends with a token; None if it continues.

        Args:
            seq: The sequence.
            token_id: The token.
            num_tokens: Length of the sequence with it.
        """
        sampling = seq.sampling
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return End("stop", None)
        if token_id in sampling.stop_token_ids:
            return End("stop", token_id)
        return End("length", None) if num_tokens >= self.longest(seq) else None

    def cut(self, seq: Sequence, run: list[int]) -> tuple[list[int], End | None]:
        """Return the next tokens of a sequence up to the first that ends it, and that end."""
        for count, token_id in enumerate(run, 1):
            end = self.reason(seq, token_id, seq.num_tokens + count)
            if end is not None:
                return run[:count], end
        if seq.num_tokens + len(run) + self.tokens_per_pass > self.max_model_len:
            return run, End("length", None)
        return run, None
