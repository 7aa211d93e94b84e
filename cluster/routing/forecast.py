"""Running estimates of prompt, token and slot times, which admission predicts with. Pure.

Owner: one ingress's event loop. It learns from this ingress's requests only; the load that other
ingresses cause shows as slower engines. Before the first sample every estimate is 0, so that all
requests are admitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEMORY = 50
"""Approximate number of latest samples in a mean."""
_KEPT = 0.9
"""Share of predictions that the margin should cover."""
_LENGTHS = 1000
"""Requests in the mean lengths: these depend on the clients, not on the load."""
_STEP = 0.02
"""Change of the margin per sample, as a share of the mean time to first token."""
_FORGET = 0.98
"""Factor on the weight of a line's point with each later point."""
_FEWEST = 8
"""Effective number of points from which on a line has a slope."""


@dataclass(slots=True)
class Mean:
    """An exponentially forgetting mean. Owner: the forecast that made it."""

    value: float = 0.0
    count: int = 0
    memory: int = _MEMORY

    def add(self, sample: float) -> None:
        """Add a sample."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self.memory)


class Lengths:
    """Recent mean lengths of prompts and answers in tokens. Owner: the router.

    Attributes:
        prompts: Of requests that arrived.
        outputs: Of requests that got any output; summed over choices.
    """

    def __init__(self) -> None:
        self.prompts, self.outputs = Mean(memory=_LENGTHS), Mean(memory=_LENGTHS)

    def __repr__(self) -> str:
        return f"Lengths({self.prompts.value:.0f} in, {self.outputs.value:.0f} out)"


class Line:
    """A straight line through points, by least squares that forget. Owner: the forecast."""

    def __init__(self) -> None:
        # Sums of 1, x, y, x², xy, y², and of squared weights.
        self._sums = [0.0] * 7

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Add a point."""
        point = (1.0, x, y, x * x, x * y, y * y, weight)
        old = zip(self._sums, point, (_FORGET,) * 6 + (_FORGET**2,), strict=True)
        self._sums = [forget * s + weight * p for s, p, forget in old]

    def largest_x(self, y: float) -> float | None:
        """Return the largest x at which the line is at or below y; None if there is no known limit.

        A slope counts only if it exceeds twice its standard error: weaker evidence must not make
        requests wait. A falling line counts as flat, because more load makes nothing faster.
        """
        n, sx, sy, sxx, sxy, syy, squares = self._sums
        if n <= 0.0:
            return None
        mean_x, mean_y = sx / n, sy / n
        var_x, var_y = sxx / n - mean_x * mean_x, syy / n - mean_y * mean_y
        slope = 0.0
        num_points = n * n / squares
        if var_x > 1e-9 and num_points > _FEWEST:
            slope = (sxy / n - mean_x * mean_y) / var_x
            error = max(var_y - slope * slope * var_x, 0.0) / var_x / (num_points - 2)
            if slope < 2 * error**0.5:
                slope = 0.0
        if slope <= 0.0:
            return None if mean_y <= y else 0.0
        return max(mean_x + (y - mean_y) / slope, 0.0)


class Forecast:
    """Estimates of one ingress; all times in seconds.

    Attributes:
        margin_s: Time to add to a predicted time to first token so that most predictions hold;
            negative where predictions are too long.
        tokens: Time per output token against the number of admitted requests.
    """

    def __init__(self) -> None:
        self.margin_s = 0.0
        self.tokens = Line()
        self._prompts: dict[int, Mean] = {}
        self._per_token = Mean()
        self._first_tokens = Mean()
        self._slots = Mean()
        self._outputs = Mean()

    @property
    def token_s(self) -> float:
        """Mean time of one prompt token."""
        return self._per_token.value

    @property
    def slot_s(self) -> float:
        """Mean time that a slot is held."""
        return self._slots.value

    @property
    def num_output_tokens(self) -> float:
        """Mean number of tokens of an answer."""
        return self._outputs.value

    def prompt_s(self, num_tokens: int) -> float:
        """Return how long an engine computes a prompt once it has begun.

        Lengths are grouped by powers of two, as a mesh pads them.
        """
        seen = self._prompts.get(_length_class(num_tokens))
        return self._per_token.value * num_tokens if seen is None else seen.value

    def largest_load(self, tpot_s: float) -> float:
        """Return how many requests may be admitted so that output tokens keep `tpot_s`."""
        largest = None if math.isinf(tpot_s) else self.tokens.largest_x(tpot_s)
        return math.inf if largest is None else largest

    def saw_prompts(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn that an engine took `seconds` for prompts of these lengths together."""
        num_tokens = sum(lengths)
        expected = [self.prompt_s(n) for n in lengths]
        total_s = sum(expected)
        for n, expected_s in zip(lengths, expected, strict=True):
            # Share the time in proportion to the expected times.
            share = expected_s / total_s if total_s > 0.0 else n / num_tokens
            self._prompts.setdefault(_length_class(n), Mean()).add(share * seconds)
        self._per_token.add(seconds / num_tokens)

    def saw_first_token(self, predicted_s: float, actual_s: float) -> None:
        """Learn from an actual time to first token and the one predicted without the margin."""
        self._first_tokens.add(actual_s)
        step_s = _STEP * self._first_tokens.value
        is_late = actual_s - predicted_s > self.margin_s
        self.margin_s += step_s * (_KEPT if is_late else _KEPT - 1.0)

    def margin_of(self, ttft_s: float) -> float:
        """Return the part of an objective to keep in reserve, between minus and plus half of it."""
        return min(max(self.margin_s, -ttft_s / 2), ttft_s / 2)

    def saw_slot(self, seconds: float, num_tokens: int) -> None:
        """Learn how long a slot was held for an answer of this many tokens."""
        self._slots.add(seconds)
        self._outputs.add(num_tokens)

    def saw_tokens(self, load: float, seconds: float, num_tokens: int) -> None:
        """Learn how long the tokens after the first took beside `load` requests."""
        self.tokens.add(load, seconds / num_tokens, num_tokens)


def _length_class(num_tokens: int) -> int:
    return (num_tokens - 1).bit_length()
