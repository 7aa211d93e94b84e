"""The choice of an attention back end."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.torch.attention import BatchedAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from replicas.generators.torch.attention import AttentionBackend

logger = logging.getLogger(__name__)

_REQUIRED = "TTSERVE_REQUIRE_KERNELS"


def _fast(dtype: torch.dtype, width: int) -> AttentionBackend:
    from replicas.generators.torch.fast_attention import FastAttention
    from replicas.generators.torch.native import ATTENTION_MAX_WIDTH, missing_parts

    if width > ATTENTION_MAX_WIDTH:
        raise RuntimeError(f"keys of {width} numbers are more than their {ATTENTION_MAX_WIDTH}")
    attention = FastAttention(dtype)
    if missing := missing_parts():
        if _are_required():
            raise ConfigError(f"{_REQUIRED} is set, but {'; and '.join(missing)}")
        for part in missing:
            logger.warning("this engine computes slower than it could: %s", part)
    return attention


def _are_required() -> bool:
    # A property of the installation, which sets it for its build, too; not of a deployment.
    return bool(os.environ.get(_REQUIRED))  # noqa: TID251


BACKENDS: Mapping[str, Callable[[torch.dtype, int], AttentionBackend]] = {
    "fast": _fast,
    "batched": lambda _dtype, _width: BatchedAttention(),
}
"""The values of ``CpuDevice.attention``, made for a dtype and a width of keys."""


def make_attention(name: str, dtype: torch.dtype, width: int = 1) -> AttentionBackend:
    """Create one of `BACKENDS`; falls back to the plain one, with a warning, without kernels.

    Args:
        name: A key of them.
        dtype: Of all tensors.
        width: Numbers of the widest layer's keys or latents.

    Raises:
        ConfigError: TTSERVE_REQUIRE_KERNELS is set in the environment, and the kernels or a part
            of them cannot be used; says which.
    """
    try:
        return BACKENDS[name](dtype, width)
    except (ImportError, RuntimeError) as error:
        if _are_required():
            raise ConfigError(f"{_REQUIRED} is set, but {error}") from error
        logger.warning(
            "this engine computes without the C kernels, several times slower: %s. "
            "`attention: batched` selects the plain operations silently",
            error,
        )
        return BatchedAttention()
