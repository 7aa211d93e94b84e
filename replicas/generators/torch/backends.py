"""The choice of an attention back end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from replicas.generators.torch.attention import BatchedAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from replicas.generators.torch.attention import AttentionBackend

logger = logging.getLogger(__name__)


def _fast(dtype: torch.dtype) -> AttentionBackend:
    from replicas.generators.torch.fast_attention import FastAttention

    return FastAttention(dtype)


BACKENDS: Mapping[str, Callable[[torch.dtype], AttentionBackend]] = {
    "fast": _fast,
    "batched": lambda _dtype: BatchedAttention(),
}
"""The values of ``CpuDevice.attention``, made for a dtype."""


def make_attention(name: str, dtype: torch.dtype) -> AttentionBackend:
    """Create one of `BACKENDS`; falls back to the plain one, with a warning, without kernels."""
    try:
        return BACKENDS[name](dtype)
    except (ImportError, RuntimeError) as error:
        logger.warning(
            "this engine computes without the C kernels, several times slower: %s. "
            "`attention: batched` selects the plain operations silently",
            error,
        )
        return BatchedAttention()
