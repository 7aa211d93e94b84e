"""Latent attention (MLA): what becomes of cached latents.

A head's keys are the plain part, a product of the latent, and the rotated key of all heads; its
values are another product. Tokens that are few attend to the latents themselves: the first product
is taken of the queries instead, the second of the result (absorbed). For many tokens keys and
values are made of the latents, as attention is then over fewer channels.

Dimensions: R rows, n tokens of a row, K positions they see, H heads, L latent, P plain, C rotated
and V value channels.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from replicas.generators.torch.row_attention import attend_rows

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LatentAttentionSpec

_MOST_ABSORBED = 32
"""Tokens of a row that attend to latents; a power of two, so that rows of a group agree."""
_MOST_EXPANDED = 1 << 25
"""Numbers of the keys and values made of latents at a time, unless one head needs more."""


class LatentProducts:
    """Products of one layer's latents.

    Owner: the weight; nothing changes it.

    Args:
        spec: The layer's attention.
        weight: (H * (P + V), L), of ``spec.kv_b``.

    Attributes:
        value: V.
        rank: L.
    """

    def __init__(self, spec: LatentAttentionSpec, weight: torch.Tensor) -> None:
        sizes = spec.sizes
        self._spec = spec
        self._plain = sizes.plain
        self.rank, self.value = sizes.rank, sizes.value
        by_head = weight.view(spec.num_heads, sizes.plain + sizes.value, sizes.rank)
        keys, values = torch.split(by_head, [sizes.plain, sizes.value], dim=1)
        self._keys = keys.contiguous()
        """(H, P, L)."""
        self._values = values.contiguous()
        """(H, V, L)."""

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Turn queries of keys (T, H, P + C) into those of cached rows (T, H, L + C)."""
        plain, rotated = q[..., : self._plain], q[..., self._plain :]
        absorbed = torch.bmm(plain.transpose(0, 1), self._keys).transpose(0, 1)
        return torch.cat((absorbed, rotated), dim=-1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Return values (T, H, V) of attended latents (T, H, L)."""
        return torch.bmm(attended.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)

    def attend(self, q: torch.Tensor, rows: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            q: (R, n, H, P + C).
            rows: (R, 1, K, L + C), latents and rotated keys.
            visible: bool (R, 1, n, K).

        Returns:
            (R, n, H, V).
        """
        latents = rows[..., : self.rank]
        if q.shape[1] <= _MOST_ABSORBED:
            absorbed = self.absorb(q.flatten(0, 1)).view(*q.shape[:3], -1)
            found = attend_rows(absorbed, rows, latents, visible, self._spec)
            return self.values(found.flatten(0, 1)).reshape(*q.shape[:3], -1)
        width = q.shape[3] + self.value
        num_heads = max(1, _MOST_EXPANDED // (rows[..., 0].numel() * width))
        by_part = []
        for first in range(0, q.shape[2], num_heads):
            heads = slice(first, first + num_heads)
            plain = _expand(latents, self._keys[heads])
            shared = rows[..., self.rank :].expand(-1, plain.shape[1], -1, -1)
            keys, values = torch.cat((plain, shared), dim=-1), _expand(latents, self._values[heads])
            by_part.append(attend_rows(q[:, :, heads], keys, values, visible, self._spec))
        return torch.cat(by_part, dim=2)


def _expand(latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the products (R, h, K, X) of latents (R, 1, K, L) and heads' weights (h, X, L)."""
    products = functional.linear(latents[:, 0], weight.flatten(0, 1))
    return products.view(*products.shape[:2], *weight.shape[:2]).transpose(1, 2)
