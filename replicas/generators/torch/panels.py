"""Products with a weight matrix by a kernel of our own, compiled; see `linear.py` beside this file.

Dimensions: T tokens, K features in, N features out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.generators.torch import pairs, products
from replicas.generators.torch.kernels import kernels_for

if TYPE_CHECKING:
    import torch


class PanelLinear:
    """The weight as panels for a kernel of our own.

    Args:
        weight: (N, K) bfloat16; not kept.
        bias: (N,) bfloat16 or None.

    Attributes:
        panels: The packed weight and the bias.

    Raises:
        RuntimeError: This processor has no instruction for it, or K is odd.
    """

    __slots__ = ("_kernels", "panels")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if not pairs.are_supported() or weight.shape[1] % 2:
            raise RuntimeError(f"no products of pairs for {weight.shape[1]} features here")
        self.panels = products.pack(weight, bias)
        self._kernels = kernels_for(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; see ``linear.LinearLayer``."""
        return self._kernels.multiply(x, self.panels)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product plus another tensor; see ``linear.LinearLayer.plus``."""
        return self._kernels.multiply(x, self.panels, products.PLUS, other)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product times another tensor; see ``linear.LinearLayer.times``."""
        return self._kernels.multiply(x, self.panels, products.TIMES, other)

    def swish(self, x: torch.Tensor) -> torch.Tensor:
        """Return the SiLU of the product; see ``linear.LinearLayer.swish``."""
        return self._kernels.multiply(x, self.panels, products.SWISH)
