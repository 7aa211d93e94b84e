"""Limits of prompts that a step computes only in part. Pure.

A prompt is *long* in a step if more of its tokens than the threshold are left to compute. A long
prompt that shares a step gets a chunk of that size, so that it leaves room for others; alone it
gets the whole step. Few prompts are computed in part at a time, because each of them holds blocks
for its whole length: other long prompts stay queued, and shorter ones that fit pass them.

Source: vLLM config/scheduler.py (names, ranges, the default of the threshold) and
v1/core/sched/scheduler.py (the threshold, and that a request alone ignores it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replicas.config import EngineConfig

_SHARE_OF_LONGEST = 0.04
"""Default threshold, as a share of the longest sequence, where several partial prompts may run."""


@dataclass(frozen=True, slots=True)
class PartialPrefillLimits:
    """The limits of one engine; without a threshold there are none.

    Attributes:
        threshold: Most tokens of a prompt that is not long.
        max_chunk: Most tokens of a long prompt in a step that it shares.
        max_num: Most prompts of a step that are computed in part.
        max_num_long: Most of them that are long.
    """

    threshold: int
    max_chunk: int
    max_num: int
    max_num_long: int

    @classmethod
    def of(
        cls, config: EngineConfig, max_model_len: int, chunk_alignment: int
    ) -> PartialPrefillLimits | None:
        """Return the limits of an engine, or None if it has none.

        Args:
            config: The engine's configuration.
            max_model_len: Longest sequence in tokens.
            chunk_alignment: Tokens that a chunk has at least, see `Scheduler`.
        """
        threshold = config.long_prefill_token_threshold
        if config.max_num_partial_prefills > 1 and not threshold:
            threshold = max(int(max_model_len * _SHARE_OF_LONGEST), 1)
        if not threshold:
            return None
        return cls(
            threshold,
            max(threshold, chunk_alignment),
            config.max_num_partial_prefills,
            config.max_long_partial_prefills,
        )

    def admit(self, num_new_tokens: int, planned: Iterable[tuple[int, int]]) -> bool:
        """Return whether one more prompt may be computed in part.

        Args:
            num_new_tokens: Tokens that are left of it.
            planned: Of each row of the step so far the tokens that were left, and its share.
        """
        parts = [num_left for num_left, count in planned if count < num_left]
        num_long = sum(num_left > self.threshold for num_left in parts)
        is_long = num_new_tokens > self.threshold
        return len(parts) < self.max_num and not (is_long and num_long >= self.max_num_long)
