"""Step times of another simulator, for a comparison in which only the scheduling differs.

Source: the default timing model of NVIDIA Dynamo's mocker (ai-dynamo 1.6.1, crate aisimulate-core
0.13.0, functions `polynomial_prefill_time`, `polynomial_decode_time`); the coefficients and the
rounding of means were checked against its replay of 2,000 requests, to the nanosecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replicas.generators.simulated.timing import LinkTiming

if TYPE_CHECKING:
    from collections.abc import Sequence


class PolynomialTiming:
    """A `StepTiming`: prefill by the new tokens of a pass, decode by how full the KV cache is.

    One pass may mix both, and then takes the sum. A chunk costs the same at any depth of context.
    Nothing is charged for lanes, host or warm-up.

    Args:
        num_kv_tokens: Capacity of the KV cache.
    """

    host_s = 0.0
    host_row_s = 0.0
    bytes_per_token = 131_072
    link = LinkTiming(0.0, 1e15)

    def __init__(self, num_kv_tokens: int) -> None:
        self._num_kv_tokens = num_kv_tokens

    def prefill_s(self, chunks: Sequence[tuple[int, int, int]]) -> float:
        """See `StepTiming.prefill_s`; starts and ends are averaged apart, as the source does."""
        if not chunks:
            return 0.0
        count = len(chunks)
        starts, ends = sum(start for _, start, _ in chunks), sum(end for _, _, end in chunks)
        tokens = count * (ends // count - starts // count)
        if tokens <= 0:
            return 0.0
        return (4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142) / 1e3

    def decode_s(self, rows: Sequence[tuple[int, int]]) -> float:
        """See `StepTiming.decode_s`."""
        return self._decode_s(sum(context for _, context in rows)) if rows else 0.0

    def decode_run_s(self, rows: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
        """See `StepTiming.decode_run_s`."""
        # The same operations in the same order as in `_decode_s`, so the same bits.
        tokens = sum(context for _, context in rows) + len(rows) * np.arange(num_steps)
        share = np.minimum(1.0, tokens / self._num_kv_tokens)
        times_ms = np.maximum(1.0, -25.74 * share * share + 54.01 * share + 5.74)
        seconds: list[float] = (times_ms / 1e3).tolist()
        return seconds

    def mixed_s(
        self, chunks: Sequence[tuple[int, int, int]], rows: Sequence[tuple[int, int]]
    ) -> float:
        """See `StepTiming.mixed_s`."""
        return self.prefill_s(chunks) + self.decode_s(rows)

    def warm_up_s(self) -> float:
        """See `StepTiming.warm_up_s`."""
        return 0.0

    def _decode_s(self, num_tokens: int) -> float:
        share = min(1.0, num_tokens / self._num_kv_tokens)
        return max(1.0, -25.74 * share * share + 54.01 * share + 5.74) / 1e3
