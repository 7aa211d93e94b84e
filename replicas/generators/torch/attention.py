"""Attention over the paged KV cache: a plain reference and a fast back end behind one protocol.

A back end prepares one pass (which tokens go together) and returns a function that every layer
calls. Positions past a sequence's end and the null block may hold
anything, NaN included, and never reach a result.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks of all lanes, S block size.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from replicas.generators.masks import causal_mask
from replicas.generators.torch.plain import Attend, PlainKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replicas.generators.torch.inputs import PagedBatch
    from replicas.generators.torch.kernels import Kernels
    from replicas.generators.torch.kv_cache import TorchKVCache

logger = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Holds nothing that changes.

    Attributes:
        kernels: What a pass does besides, in the same spirit.
        is_compiled: Whether whole layers may be run by compiled code.
    """

    kernels: Kernels | PlainKernels
    is_compiled: bool

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """Return the attention function of one pass, which every layer calls once."""
        ...


class ReferenceAttention:
    """Attends request by request, spelling the formula out.

    Attributes:
        kernels: See ``AttentionBackend``.
        is_compiled: See ``AttentionBackend``.
    """

    kernels: Kernels | PlainKernels
    is_compiled = False

    def __init__(self) -> None:
        self.kernels = PlainKernels()

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """Return the attention function of one pass, which every layer calls once."""

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            k_plane, v_plane = cache.planes[layer]
            out = torch.empty_like(q)
            for request, length in enumerate(batch.seq_lens.tolist()):
                begin, end = batch.query_start_loc[request : request + 2].tolist()
                table = batch.block_table[request, : blocks_for(length, cache.block_size)]
                blocks = torch.from_numpy(table)
                k = k_plane[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
                v = v_plane[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
                out[begin:end] = _attend_one(q[begin:end], k, v)
            return out

        return attend


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with the last tokens of one sequence.

    Args:
        q: (n, H, D), the queries of its last n tokens.
        k: (G, length, D), all of its keys.
        v: (G, length, D), all of its values.

    Returns:
        (n, H, D).
    """
    num_queries, _, head_dim = q.shape
    num_kv_heads, length, _ = k.shape
    # Query heads that share a KV head stand side by side: (G, H / G, n, D).
    grouped = q.transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_dim)
    scores = grouped @ k.unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
    is_visible = torch.from_numpy(causal_mask(np.arange(length - num_queries, length), length))
    weights = _softmax(scores.masked_fill(~is_visible, -torch.inf))
    return (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(scores.dtype)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold ``num_tokens``."""
    return -(-num_tokens // block_size)


def _fast(dtype: torch.dtype, head_dim: int, share: int) -> AttentionBackend:
    from replicas.generators.torch.fast_attention import FastAttention

    return FastAttention(dtype, head_dim, share)


BACKENDS: Mapping[str, Callable[[torch.dtype, int, int], AttentionBackend]] = {
    "fast": _fast,
    "reference": lambda _dtype, _head_dim, _share: ReferenceAttention(),
}
"""The values of ``CpuDevice.attention``, made for a dtype, D and H / G."""


def make_attention(name: str, dtype: torch.dtype, head_dim: int, share: int) -> AttentionBackend:
    """Create one of `BACKENDS`; falls back to the plain one, with a warning, without kernels."""
    try:
        return BACKENDS[name](dtype, head_dim, share)
    except (ImportError, RuntimeError) as error:
        logger.warning(
            "this engine computes attention, norms and rotations without compiled kernels, many "
            "times slower: %s. Install the numba and llvmlite of constraints.txt, built for "
            "this processor; `attention: reference` selects the plain operations silently",
            error,
        )
        return ReferenceAttention()
