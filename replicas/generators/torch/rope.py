"""Rotary position embeddings: frequencies, and the table of cosines and sines.

Every rounding step of the table follows transformers, bit for bit in float32; in float64 the angles
are computed in float64 from the same float32 frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from replicas.generators.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of channels, float32 (head_dim / 2,).

    Source: transformers ``modeling_rope_utils.py``, types "default" and "llama3".
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return inv_freq
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inv_freq
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    # Between the two limits the divisor fades from ``factor`` to 1.
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (original / wavelengths - rope.low_freq_factor) / span
    scaled = torch.where(is_long, inv_freq / rope.factor, inv_freq)
    faded = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~is_long & ~is_short, faded, scaled)


def cos_and_sin(
    rope: RopeConfig, head_dim: int, max_seq_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and the sines of every position, each (max_seq_len, head_dim / 2)."""
    wide = torch.promote_types(dtype, torch.float32)
    positions = torch.arange(max_seq_len, dtype=wide)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim).to(wide)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_table(
    rope: RopeConfig, head_dim: int, max_seq_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position as the two halves of a head need them.

    Returns:
        Two tensors (max_seq_len, head_dim): each cosine twice; each sine negated, then as it is.
    """
    cos, sin = cos_and_sin(rope, head_dim, max_seq_len, dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
