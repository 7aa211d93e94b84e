"""Host sampling: logits to token ids, by counter-based random numbers.

The random number of a token depends on (seed, output index) alone, so that the same request draws
the same numbers whether it was chunked, preempted, moved to another engine, or batched with others.
The draw inverts the cumulative distribution in vocabulary order: a change of the last bits of the
logits moves no boundary by more than that, whereas sorted order could swap whole intervals. Order
of operations: temperature, top-k, top-p, as in vLLM v1/sample/sampler.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    import numpy.typing as npt


def sample(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
    uniforms: npt.NDArray[np.float64],
) -> list[int]:
    """One token per row.

    Args:
        logits: float (R, V).
        temperature: (R,); below 1e-5 takes the most likely token.
        top_k: (R,); 0 or less, or V and more, is off.
        top_p: (R,); 1 is off.
        uniforms: (R,) in [0, 1), one per row.

    Returns:
        R token ids.
    """
    token_ids = logits.argmax(dim=-1)
    random_rows = np.flatnonzero(temperature >= GREEDY_EPS)
    if len(random_rows):
        rows = torch.from_numpy(random_rows)
        scaled = (
            logits[rows].double()
            / torch.from_numpy(temperature[random_rows].astype(np.float64))[:, None]
        )
        masked = _mask_top_k_top_p(scaled, top_k[random_rows], top_p[random_rows])
        token_ids[rows] = _invert_cdf(masked, torch.from_numpy(uniforms[random_rows]))
    result: list[int] = token_ids.tolist()
    return result


def _mask_top_k_top_p(
    logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: npt.NDArray[np.float32]
) -> torch.Tensor:
    """Set what is outside the top k, then outside the nucleus, to -inf; one token stays."""
    vocab = logits.shape[-1]
    limits = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k).astype(np.int64)
    if (limits == vocab).all() and (top_p >= 1.0).all():
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab)[None, :]
    ordered = ordered.masked_fill(ranks >= torch.from_numpy(limits)[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    # Mass before a token reaches top_p: the token is outside. Rank 0 has no mass before it.
    before = probs.cumsum(dim=-1) - probs
    outside = (before >= torch.from_numpy(top_p.astype(np.float64))[:, None]) & (ranks > 0)
    ordered = ordered.masked_fill(outside & torch.from_numpy(top_p < 1.0)[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _invert_cdf(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    target = (uniforms * cumulative[:, -1])[:, None]
    # right=True skips tokens of probability zero; the clamp guards the last bit of the total.
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = logits.shape[-1] - 1 - logits.isfinite().flip(-1).int().argmax(dim=-1)
    return torch.minimum(found, last)
