"""Attention of rows of tokens over keys and values that were gathered for them.

Dimensions: R rows, n tokens of a row, L positions they see, H query heads, G KV heads, D key and V
value channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from replicas.generators.layer_specs import AttentionSpec, LatentAttentionSpec


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    spec: AttentionSpec | LatentAttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend.

    Args:
        q: (R, n, H, D).
        k: (R, G, L, D).
        v: (R, G, L, V).
        visible: bool (R, 1, n, L).
        spec: Scale and soft cap.
        sinks: (H,) scores without a value, or None.

    Returns:
        (R, n, H, V).
    """
    num_rows, num_queries, num_heads, size = q.shape
    share = num_heads // k.shape[1]
    # Query heads that share a KV head are further queries of it: (R, G, n * share, D).
    grouped = q.view(num_rows, num_queries, -1, share, size).permute(0, 2, 1, 3, 4)
    grouped = grouped.reshape(num_rows, -1, num_queries * share, size)
    if num_queries > 1 and share > 1:
        visible = visible.repeat_interleave(share, dim=2)
    scale = size**-0.5 if spec.scale is None else spec.scale
    if spec.soft_cap is None and sinks is None:
        found = functional.scaled_dot_product_attention(
            grouped, k, v, attn_mask=visible, scale=scale
        )
    else:
        scores = grouped @ k.transpose(-1, -2) * scale
        if spec.soft_cap is not None:
            scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sunk = sinks.view(1, -1, 1, share).expand(num_rows, -1, num_queries, -1)
            sunk = sunk.reshape(num_rows, -1, num_queries * share, 1)
            scores = torch.cat((scores, sunk.to(scores.dtype)), dim=-1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(dim=-1, dtype=wide).to(v.dtype)
        found = weights[..., : k.shape[2]] @ v
    found = found.view(num_rows, -1, num_queries, share, v.shape[-1]).permute(0, 2, 1, 3, 4)
    return found.reshape(num_rows, num_queries, num_heads, v.shape[-1])
