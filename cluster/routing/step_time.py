"""A model of the cost of steps, learned from the steps that snapshots report. Pure.

A linear model of a step's seconds, fitted by recursive least squares with forgetting, in
information form: the weight of a step shrinks by `FORGETTING` with each later one. A weak pull
towards 0 never fades, so that a coefficient is determined even if its input never varies.

Source of the method: Ljung, System Identification, recursive least squares with a forgetting
factor; the pull is that of ridge regression.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from replicas.messages import StepWork

FORGETTING = 0.995
PULL = 1e-4
"""Weight of the pull towards 0; a step of one of `_UNITS` weighs 1."""
MIN_STEPS = 3
"""Number of steps after which the cost of a kind of step is known."""
MIN_WEIGHT = 8.0
"""Weight of fitted steps of a kind from which on their costs are kept.

They do not change when later the weight fades below it. Otherwise the fit of a kind that no longer
occurs would fade to nothing.
"""
MIN_PROMPT_STEPS = 32
"""As `MIN_STEPS` for steps with prompts, whose costs vary more with length.

Before that they cost in proportion to other pools' costs.
"""
LONGEST = 4.0
"""Largest factor of its expected time by which a step counts.

A device that compiles, or was held up once, says little about the cost of steps. A lasting change
still shows, after some steps.
"""
_KNOWN = 0.25
"""Largest leverage of a step to which `LONGEST` applies: similar steps must have been seen.

After four equal steps, the next one has this leverage.
"""

MOST_UNITS = 1e5
"""A step with a larger input is not plausible, and would outweigh all others: 1e9 KV tokens, or a
prompt of four million."""

_KINDS = slice(0, 4), slice(4, 7)
"""Coefficients of decodes and of prompts, in the order of `StepCosts`."""

# Typical size of each input: whether there are rows, rows, KV tokens, the longest context, prompts,
# their tokens, pairs of tokens.
_UNITS = np.array([1.0, 32.0, 1e5, 1e5, 1.0, 1e4, 1e8])


class StepCosts(NamedTuple):
    """Seconds that each part of a step costs; none is negative.

    Attributes:
        decode_s: Fixed cost of a step with decoding rows.
        row_s: Each row of the fullest DP group.
        context_token_s: Each KV token of the DP group that has most.
        longest_token_s: Each token of the longest context.
        prompt_s: Each prompt, or part of one.
        prompt_token_s: Each prompt token.
        prompt_pair_s: Each (token, token that it attends to).
    """

    decode_s: float = 0.0
    row_s: float = 0.0
    context_token_s: float = 0.0
    longest_token_s: float = 0.0
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0

    def prompts_s(self, num_prompts: float, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds of computing prompts of this total size one after the other."""
        return (
            num_prompts * self.prompt_s
            + num_tokens * self.prompt_token_s
            + num_pairs * self.prompt_pair_s
        )

    def decode_step_s(self, num_rows: float, num_tokens: float, longest: float) -> float:
        """Return the seconds of a decode step, from the largest numbers of any DP group."""
        return (
            self.decode_s
            + num_rows * self.row_s
            + num_tokens * self.context_token_s
            + longest * self.longest_token_s
        )


class StepTimeModel:
    """A linear fit of step times. Owner: the holder of the replicas' snapshots.

    Attributes:
        num_steps: Number of steps that were learned.
    """

    def __init__(self) -> None:
        # Fading sums over the steps: inputs times inputs, inputs times seconds.
        self._information = np.zeros((len(_UNITS), len(_UNITS)))
        self._products = np.zeros(len(_UNITS))
        self._num_decodes = self._num_prompts = self.num_steps = 0
        # Fading weights of steps with decodes, and with prompts.
        self._weights = [0.0, 0.0]
        self._are_kept = [False, False]
        # Fading sums over the steps with prompts.
        self._prompt_inputs = np.zeros(len(_UNITS))
        self._prompts_s = 0.0
        # The last solution, and the number of steps that it includes.
        self._coefficients: npt.NDArray[np.floating[Any]] = np.zeros(len(_UNITS))
        self._num_fitted = 0

    def __repr__(self) -> str:
        return f"StepTimeModel({self.known_costs})"

    def learn(self, work: StepWork) -> None:
        """Learn a step; an empty or impossible one is ignored."""
        if not math.isfinite(work.device_s) or work.device_s < 0.0:
            return
        inputs = _inputs(work)
        if not 0.0 < inputs.max() <= MOST_UNITS:
            return
        self._information *= FORGETTING
        self._information += np.outer(inputs, inputs)
        self._products = FORGETTING * self._products + work.device_s * inputs
        self._weights = [
            FORGETTING * weight + is_one
            for weight, is_one in zip(
                self._weights, (work.num_rows > 0, work.num_prompts > 0), strict=True
            )
        ]
        self._num_decodes += work.num_rows > 0
        if work.num_prompts:
            self._num_prompts += 1
            self._prompt_inputs = FORGETTING * self._prompt_inputs + inputs
            self._prompts_s = FORGETTING * self._prompts_s + work.device_s
        self.num_steps += 1

    def plausible(self, work: StepWork) -> StepWork:
        """Return a step with its time limited to a plausible one; see `LONGEST`."""
        longest_s = LONGEST * self.seconds(work)
        if not longest_s or work.device_s <= longest_s or not math.isfinite(work.device_s):
            return work
        inputs = _inputs(work)
        held = self._information + PULL * np.eye(len(_UNITS))
        is_known = float(inputs @ np.linalg.solve(held, inputs)) <= _KNOWN
        return msgspec.structs.replace(work, device_s=longest_s) if is_known else work

    @property
    def known_costs(self) -> StepCosts:
        """Costs of the parts of steps, as far as the learned steps have shown."""
        return StepCosts(*np.maximum(self._fit() / _UNITS, 0.0).tolist())

    def seconds(self, work: StepWork) -> float:
        """Return the expected seconds of a step; its own `device_s` is ignored."""
        return max(float(_inputs(work) @ self._fit()), 0.0)

    @property
    def knows_prompts(self) -> bool:
        """Whether any learned step had prompts."""
        return self._num_prompts > 0

    def costs(self, others: StepTimeModel) -> StepCosts:
        """Return the costs of the parts of steps; of an unknown kind of step those of `others`."""
        own = self.known_costs
        decodes = own if self._num_decodes >= MIN_STEPS else others.known_costs
        prompts = own if self._num_prompts >= MIN_PROMPT_STEPS else self._in_proportion(others)
        return own if decodes is prompts else StepCosts(*decodes[:4], *prompts[4:])

    def _in_proportion(self, others: StepTimeModel) -> StepCosts:
        """Return the costs of `others`, scaled to the time of this model's prompt steps."""
        usual_s = float(self._prompt_inputs @ np.maximum(others._fit(), 0.0))
        factor = self._prompts_s / usual_s if usual_s > 0.0 else 1.0
        return StepCosts(*(factor * seconds for seconds in others.known_costs))

    def _fit(self) -> npt.NDArray[np.floating[Any]]:
        if self._num_fitted != self.num_steps:
            held = self._information + PULL * np.eye(len(_UNITS))
            fitted = np.linalg.solve(held, self._products)
            for kind, weight in enumerate(self._weights):
                self._are_kept[kind] |= weight >= MIN_WEIGHT
                if weight >= MIN_WEIGHT or not self._are_kept[kind]:
                    self._coefficients[_KINDS[kind]] = fitted[_KINDS[kind]]
            self._num_fitted = self.num_steps
        return self._coefficients


def parts_of(work: StepWork) -> tuple[float, ...]:
    """Return the amount of each part of a step that costs time, in the order of `StepCosts`."""
    return (
        float(work.num_rows > 0),
        work.num_rows,
        work.num_context_tokens,
        work.max_context_tokens,
        work.num_prompts,
        work.num_prompt_tokens,
        work.num_prompt_pairs,
    )


def _inputs(work: StepWork) -> npt.NDArray[np.float64]:
    scaled: npt.NDArray[np.float64] = np.array(parts_of(work)) / _UNITS
    return scaled
