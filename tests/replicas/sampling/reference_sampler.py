"""Sampling by its definition: float64, whole rows, one row at a time.

The order of application is vLLM's: grammar mask, snapshot of the raw logits, allowed_token_ids,
bad_words, min_tokens, logit_bias, repetition, frequency and presence penalty, temperature, min_p,
top-k, top-p, draw.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from replicas.sampling_params import SamplingParams

    Float64Array = npt.NDArray[np.float64]


class Draw(NamedTuple):
    """A drawn token.

    Attributes:
        token_id: The token; None if no token is possible.
        margin: How far another result is, as a share of all or in logits: results of float32 may
            differ where it is tiny.
    """

    token_id: int | None
    margin: float


def masked(logits: Float64Array, allowed: Collection[int] | None) -> Float64Array:
    """Return (V,) logits with minus infinity for all tokens but the allowed ones."""
    if allowed is None:
        return logits.copy()
    found = np.full_like(logits, -np.inf)
    found[list(allowed)] = logits[list(allowed)]
    return found


def processed(
    logits: Float64Array,
    sampling: SamplingParams,
    prompt: list[int],
    output: list[int],
    eos_token_ids: Collection[int] = (),
) -> Float64Array:
    """Return (V,) logits after everything that comes before the temperature.

    Args:
        logits: (V,), after the grammar's mask.
        sampling: The row's parameters.
        prompt: Its prompt.
        output: Its output so far, drafts before this position included.
        eos_token_ids: The model's end tokens.
    """
    found = masked(logits, sampling.allowed_token_ids)
    for *before, last in sampling.bad_words_token_ids:
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            found[last] = -np.inf
    if len(output) < sampling.min_tokens:
        without = found.copy()
        without[list(sampling.stop_token_ids.union(eos_token_ids))] = -np.inf
        # End tokens stay possible where no other token is.
        found = without if without.max() > -np.inf else found
    for token_id, bias in sampling.logit_bias.items():
        found[token_id] += bias
    counts = Counter(output)
    for token_id in counts.keys() | set(prompt):
        value, penalty = found[token_id], sampling.repetition_penalty
        found[token_id] = value / penalty if value > 0 else value * penalty
        found[token_id] -= sampling.frequency_penalty * counts[token_id]
        found[token_id] -= sampling.presence_penalty * (counts[token_id] > 0)
    return found


def weights_of(logits: Float64Array, sampling: SamplingParams) -> tuple[Float64Array, float]:
    """Return (V,) weights of processed logits, and how close a token is to a limit."""
    order = np.argsort(-logits, kind="stable")
    scaled = (logits - logits.max()) / np.float64(np.float32(sampling.temperature))
    weights = np.exp(scaled)
    margins = [1.0]
    if sampling.min_p > 0:
        limit = np.float64(np.float32(sampling.min_p))
        margins += (np.abs(weights - limit) / limit).tolist()
        weights[weights < limit] = 0.0
    if 0 < sampling.top_k < len(weights):
        last, first_out = scaled[order[sampling.top_k - 1 : sampling.top_k + 1]]
        # Two tokens that are impossible are equal: no rounding can tell them apart.
        margins.append(last - first_out if last > -np.inf else 1.0)
        weights[order[sampling.top_k :]] = 0.0
    if sampling.top_p < 1.0:
        limit = np.float64(np.float32(sampling.top_p)) * weights.sum()
        before = weights[order].cumsum() - weights[order]
        margins += (np.abs(before[1:] - limit) / weights.sum()).tolist()
        outside = before >= limit
        outside[0] = False
        weights[order[outside]] = 0.0
    return weights, float(min(margins))


def draw(logits: Float64Array, sampling: SamplingParams, number: float) -> Draw:
    """Draw a token from processed logits.

    Args:
        logits: (V,).
        sampling: The row's parameters.
        number: In [0, 1).
    """
    if not np.isfinite(logits.max()):
        return Draw(None, 1.0)
    if sampling.temperature < 1e-5:
        first, second = np.argsort(-logits, kind="stable")[:2]
        return Draw(int(first), float(logits[first] - logits[second]))
    weights, margin = weights_of(logits, sampling)
    cumulative = weights.cumsum() / weights.sum()
    token_id = int(cumulative.searchsorted(number, side="right"))
    near = cumulative[max(0, token_id - 1) : token_id + 1]
    return Draw(token_id, min(margin, float(np.abs(near - number).min())))
