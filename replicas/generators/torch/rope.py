"""Rotary position embeddings: frequencies, and the table of cosines and sines.

Every rounding step of the table follows transformers, bit for bit in float32; in float64 the angles
are computed in float64 from the same float32 frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from replicas.generators.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_seq_len: int = 0) -> torch.Tensor:
    """Return the angle per position of each pair of channels, float32 (rotated channels / 2,).

    Frequencies do not depend on the sequence, so that its KV can be kept and shared. Those of type
    "dynamic" are what transformers uses at the model's longest sequence, as in vLLM. Those of type
    "longrope" are the long ones if an engine takes sequences over the original length, for short
    sequences, too.

    Args:
        rope: Settings.
        head_dim: Channels of a head.
        max_seq_len: Longest sequence in tokens.

    Source: transformers ``modeling_rope_utils.py``; vLLM's `Phi3LongRoPEScaledRotaryEmbedding`.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    match rope.rope_type:
        case "linear":
            return _default_frequencies(rope.theta, rotary_dim) / rope.factor
        case "dynamic":
            return _default_frequencies(_dynamic_theta(rope, rotary_dim), rotary_dim)
        case "yarn":
            return _yarn_frequencies(rope, rotary_dim)
        case "llama3":
            return _llama3_frequencies(rope, _default_frequencies(rope.theta, rotary_dim))
        case "longrope":
            is_long = max_seq_len > rope.original_max_position_embeddings
            factors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
            return 1.0 / (factors * _powers(rope.theta, rotary_dim))
        case _:
            return _default_frequencies(rope.theta, rotary_dim)


def _powers(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return theta**exponents


def _default_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / _powers(theta, head_dim)


def _dynamic_theta(rope: RopeConfig, head_dim: int) -> float:
    """Return the base for the longest sequence, `factor` times the original one."""
    original = rope.original_max_position_embeddings
    longest = int(original * rope.factor)
    grown: float = (rope.factor * longest / original) - (rope.factor - 1)
    scale: float = grown ** (head_dim / (head_dim - 2))
    return rope.theta * scale


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return frequencies that fade from the unchanged to the divided ones, from fast to slow."""
    low = _pair_that_turns(rope.beta_fast, rope, head_dim)
    high = _pair_that_turns(rope.beta_slow, rope, head_dim)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope.theta, head_dim)
    # As in the source, so that every rounding is the same: `share` is one minus a difference.
    share = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - share) + 1.0 / powers * share


def _pair_that_turns(num_turns: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the index of the pair, with fraction, that turns so often in the original length."""
    original = rope.original_max_position_embeddings
    return (head_dim * math.log(original / (num_turns * 2 * math.pi))) / (2 * math.log(rope.theta))


def _llama3_frequencies(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
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
    """Return cosines and sines of every position, each (max_seq_len, rotated channels / 2)."""
    wide = torch.promote_types(dtype, torch.float32)
    positions = torch.arange(max_seq_len, dtype=wide)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim, max_seq_len).to(wide)
    scale = rope.attention_factor
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rope_table(
    rope: RopeConfig, head_dim: int, max_seq_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position as the halves of a head's channels need them.

    Returns:
        Two tensors (max_seq_len, rotated channels): each cosine twice; each sine negated, then as
        it is.
    """
    cos, sin = cos_and_sin(rope, head_dim, max_seq_len, dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
