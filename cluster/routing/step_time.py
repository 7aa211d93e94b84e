"""What steps of a pool's replicas cost, learned from what their snapshots say of them. Pure.

A linear model of a step's seconds, fitted as steps are told by recursive least squares with
forgetting, in information form: the weight of a step shrinks by `FORGETTING` with each that
follows. A weak pull towards 0 never fades, so that inputs that never change leave no coefficient
without hold.

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
"""Towards 0: a step of one of `_UNITS` weighs 1."""
MIN_STEPS = 3
"""A kind of step counts as known after so many."""
MIN_WEIGHT = 8.0
"""Once so many steps of a kind were fitted, what they cost is kept when fewer have not faded: the
fit of what comes no more fades to nothing."""
MIN_PROMPT_STEPS = 32
"""One with prompts, whose costs differ more with their lengths than a few can show: before that
they cost in proportion to what they cost others."""
LONGEST = 4.0
"""A step counts as so many times as long as was to be expected, at the most.

A device that compiles, or was held up once, says little of what steps cost. What has become slower
for good shows all the same, in some steps.
"""
_KNOWN = 0.25
"""And where steps like it have been seen: of ones that are all alike, so many are four."""

MOST_UNITS = 1e5
"""A step that says more of anything is none that was taken, and would leave nothing of the others:
a thousand million KV tokens, or a prompt of four million."""

_KINDS = slice(0, 4), slice(4, 7)
"""What is of decodes, and what of prompts, in the order of `StepCosts`."""

# One of each number that makes a step of some size: rows there are any, rows, KV tokens, the
# longest context, prompts, their tokens, pairs of tokens.
_UNITS = np.array([1.0, 32.0, 1e5, 1e5, 1.0, 1e4, 1e8])


class StepCosts(NamedTuple):
    """What each part of a step costs, in seconds; none is negative.

    Attributes:
        decode_s: A step with rows that decode, however many.
        row_s: Each row of the DP group that has most.
        context_token_s: Each KV token of the DP group that has most.
        longest_token_s: Each token of the longest context.
        prompt_s: Each prompt, or part of one.
        prompt_token_s: Each of its tokens.
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
        """Seconds of computing so much of prompts one after the other."""
        return (
            num_prompts * self.prompt_s
            + num_tokens * self.prompt_token_s
            + num_pairs * self.prompt_pair_s
        )

    def decode_step_s(self, num_rows: float, num_tokens: float, longest: float) -> float:
        """Seconds of a step of decodes: of each number that of the DP group that has most."""
        return (
            self.decode_s
            + num_rows * self.row_s
            + num_tokens * self.context_token_s
            + longest * self.longest_token_s
        )


class StepTimeModel:
    """See the module docstring. Owner: whoever takes the replicas' snapshots.

    Attributes:
        num_steps: How many it was told of.
    """

    def __init__(self) -> None:
        # Of the steps so far, fading: inputs by inputs, inputs by seconds.
        self._information = np.zeros((len(_UNITS), len(_UNITS)))
        self._products = np.zeros(len(_UNITS))
        self._num_decodes = self._num_prompts = self.num_steps = 0
        # Of steps with decodes, and with prompts: what those so far weigh, fading.
        self._weights = [0.0, 0.0]
        self._are_kept = [False, False]
        # Of the steps with prompts, fading.
        self._prompt_inputs = np.zeros(len(_UNITS))
        self._prompts_s = 0.0
        # What is solved for when somebody asks, and how many steps had been told then.
        self._coefficients: npt.NDArray[np.floating[Any]] = np.zeros(len(_UNITS))
        self._num_fitted = 0

    def __repr__(self) -> str:
        return f"StepTimeModel({self.known_costs})"

    def learn(self, work: StepWork) -> None:
        """Take over a step; one that did nothing, or says what cannot be, is passed over."""
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
        """A step as it is to be learned: see `LONGEST`."""
        longest_s = LONGEST * self.seconds(work)
        if not longest_s or work.device_s <= longest_s or not math.isfinite(work.device_s):
            return work
        inputs = _inputs(work)
        held = self._information + PULL * np.eye(len(_UNITS))
        is_known = float(inputs @ np.linalg.solve(held, inputs)) <= _KNOWN
        return msgspec.structs.replace(work, device_s=longest_s) if is_known else work

    @property
    def known_costs(self) -> StepCosts:
        """What parts of steps cost, as far as this replica's steps have shown."""
        return StepCosts(*np.maximum(self._fit() / _UNITS, 0.0).tolist())

    def seconds(self, work: StepWork) -> float:
        """What a step will take; its own `device_s` is not looked at."""
        return max(float(_inputs(work) @ self._fit()), 0.0)

    @property
    def knows_prompts(self) -> bool:
        """Whether any of its steps had prompts."""
        return self._num_prompts > 0

    def costs(self, others: StepTimeModel) -> StepCosts:
        """What parts of steps cost; of a kind of step that is not known, what they cost others."""
        own = self.known_costs
        decodes = own if self._num_decodes >= MIN_STEPS else others.known_costs
        prompts = own if self._num_prompts >= MIN_PROMPT_STEPS else self._in_proportion(others)
        return own if decodes is prompts else StepCosts(*decodes[:4], *prompts[4:])

    def _in_proportion(self, others: StepTimeModel) -> StepCosts:
        """What its steps with prompts cost, if their parts cost as much more as all of it."""
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
    """How often a step has each part that costs something, in the order of `StepCosts`."""
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
