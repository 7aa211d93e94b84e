"""What prompts, slots and tokens took so far, and so will take: what admission predicts with. Pure.

Owner: one ingress's event loop. It learns from this ingress's own requests; what others ask of the
same engines makes these slower, and is learned as that. Nothing seen is nothing predicted: then
everybody is let in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEMORY = 50
"""Samples that a mean is of, about: the latest."""
_KEPT = 0.9
"""Share of predictions that the margin is to be enough for."""
_LENGTHS = 1000
"""Requests that their mean lengths are of: these change with who asks, not with how busy it is."""
_STEP = 0.02
"""How far one sample moves the margin, of the mean time to a first token."""
_FORGET = 0.98
"""Weight of a point of a line after the next one."""
_FEWEST = 8
"""Points, by weight, from which on a line has a slope."""


@dataclass(slots=True)
class Mean:
    """A mean that forgets. Owner: the forecast that made it."""

    value: float = 0.0
    count: int = 0
    memory: int = _MEMORY

    def add(self, sample: float) -> None:
        """Take a sample over."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self.memory)


class Lengths:
    """How long prompts and answers of late are in the mean, in tokens. Owner: the router.

    Attributes:
        prompts: Of requests that came.
        outputs: Of requests that got any; of all choices.
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
        """Take a point over."""
        point = (1.0, x, y, x * x, x * y, y * y, weight)
        old = zip(self._sums, point, (_FORGET,) * 6 + (_FORGET**2,), strict=True)
        self._sums = [forget * s + weight * p for s, p, forget in old]

    def largest_x(self, y: float) -> float | None:
        """Up to which x the line stays at or below y; None: anywhere, as far as one knows.

        A slope counts where it is more than twice its standard error: for less, nobody is kept
        waiting. One that falls is none: more load makes nothing faster.
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
    """See the module docstring; all times in seconds.

    Attributes:
        margin_s: What a predicted time to a first token has to be lengthened by for most to keep
            it; negative where predictions are too long.
        tokens: Time per output token against the requests of a decode engine.
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
        """What a token of a prompt takes in the mean."""
        return self._per_token.value

    @property
    def slot_s(self) -> float:
        """How long a slot is held in the mean."""
        return self._slots.value

    @property
    def num_output_tokens(self) -> float:
        """Tokens of an answer in the mean."""
        return self._outputs.value

    def prompt_s(self, num_tokens: int) -> float:
        """How long an engine works on a prompt, once it has begun.

        Lengths go by powers of two, as a mesh pads them.
        """
        seen = self._prompts.get(_length_class(num_tokens))
        return self._per_token.value * num_tokens if seen is None else seen.value

    def largest_load(self, tpot_s: float) -> float:
        """How many requests may be let in that further tokens take no longer than this."""
        largest = None if math.isinf(tpot_s) else self.tokens.largest_x(tpot_s)
        return math.inf if largest is None else largest

    def saw_prompts(self, lengths: Sequence[int], seconds: float) -> None:
        """An engine worked for so long on prompts of these lengths that were done together."""
        num_tokens = sum(lengths)
        expected = [self.prompt_s(n) for n in lengths]
        total_s = sum(expected)
        for n, expected_s in zip(lengths, expected, strict=True):
            # Each gets of the time what it was expected to take of it.
            share = expected_s / total_s if total_s > 0.0 else n / num_tokens
            self._prompts.setdefault(_length_class(n), Mean()).add(share * seconds)
        self._per_token.add(seconds / num_tokens)

    def saw_first_token(self, predicted_s: float, actual_s: float) -> None:
        """A first token came after so long, where so long was predicted without the margin."""
        self._first_tokens.add(actual_s)
        step_s = _STEP * self._first_tokens.value
        is_late = actual_s - predicted_s > self.margin_s
        self.margin_s += step_s * (_KEPT if is_late else _KEPT - 1.0)

    def margin_of(self, ttft_s: float) -> float:
        """What of an objective is kept back for what was not foreseen: half of it at most."""
        return min(max(self.margin_s, -ttft_s / 2), ttft_s / 2)

    def saw_slot(self, seconds: float, num_tokens: int) -> None:
        """A slot was held for so long, for an answer of so many tokens."""
        self._slots.add(seconds)
        self._outputs.add(num_tokens)

    def saw_tokens(self, load: float, seconds: float, num_tokens: int) -> None:
        """So many tokens after a first one took so long, beside so many requests in the mean."""
        self.tokens.add(load, seconds / num_tokens, num_tokens)


def _length_class(num_tokens: int) -> int:
    return (num_tokens - 1).bit_length()
