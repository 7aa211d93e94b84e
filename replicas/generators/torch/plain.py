"""Norms and rotations of a pass in plain PyTorch.

Needs no compiler; `kernels.py` beside this file has the compiled versions.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks, S block size, N hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn import functional

Attend: TypeAlias = Callable[..., torch.Tensor]
"""(layer, queries (T, H, D), ``AttentionSpec``, sinks or None) -> (T, H, D); keys and values of the
pass are in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Positions of the tokens of a pass.

    Attributes:
        cos: (positions, C), the cosines of each position twice; C is D, or less if the first
            channels of a head are rotated.
        sin: (positions, C), the sines with a minus, then without.
        positions: int64 (T,), in their sequences.
        kv_positions: int64 (T,), of their keys and values: block * S + offset.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    kv_positions: torch.Tensor


class PlainKernels:
    """Norm and rotation as PyTorch spells them out: what the compiled ones are held to."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise rows; see `kernels.Kernels.rms_norm`."""
        return functional.rms_norm(x, x.shape[-1:], eps=eps) * weight

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        places: TokenPlaces,
        planes: tuple[torch.Tensor, torch.Tensor],
        norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Rotate queries and keys and store KV; see `kernels.Kernels.rotate_and_store`."""
        _, num_kv_heads, block_size, _ = planes[0].shape
        turning, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        plain = turning.clone() if norm is None else self.rms_norm(turning, norm, eps)
        num_rotated = places.cos.shape[-1]
        turning.copy_(plain)
        turning[..., :num_rotated] = rotated(plain[..., :num_rotated], places)
        blocks, offsets = places.kv_positions // block_size, places.kv_positions % block_size
        planes[0][blocks, :, offsets] = turning[:, -num_kv_heads:]
        planes[1][blocks, :, offsets] = values


def rotated(x: torch.Tensor, places: TokenPlaces) -> torch.Tensor:
    """Return all channels of heads (T, H, C) rotated; channel i is paired with i + C / 2."""
    cos, sin = (t.index_select(0, places.positions)[:, None] for t in (places.cos, places.sin))
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
