"""Products with a weight matrix: as the file has it, or packed for a kernel of ours or of oneDNN's.

In bfloat16 a processor that multiplies pairs, or tiles of them, runs our own kernel, whose rows do
not depend on one another. For others there is oneDNN, which reorders a weight matrix at every call
unless it was given it reordered. Both also add, multiply or gate the product before it is rounded.
Whether packing is possible, and right, is tried on every matrix when it is loaded; float32 and
float64 stay plain, since their tokens are held to those of transformers.

Dimensions: T tokens, K features in, N features out.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

_PROBE_ROWS = 4
_ROUNDING = 2.0**-7
"""Two roundings to bfloat16 of equal sums differ by no more than this share of them."""

LONG_WEIGHTS = 1 << 20
"""A layer of so many weights takes a core 0.1 ms to read, however few the tokens are."""

_Results: TypeAlias = tuple[torch.Tensor, ...]


def _kernel(name: str, overload: str = "default") -> Callable[..., torch.Tensor]:
    """Return one overload: finding it by the arguments takes as long as a small product."""
    found: Callable[..., torch.Tensor] = getattr(
        getattr(torch.ops.mkldnn, name, None), overload, _is_missing
    )
    return found


def _is_missing(*_arguments: object) -> torch.Tensor:
    raise RuntimeError("this build of PyTorch has no products with packed weights")


_pack = _kernel("_reorder_linear_weight")
_product = _kernel("_linear_pointwise")
_product_with = _kernel("_linear_pointwise", "binary")


class LinearLayer(Protocol):
    """x @ weight.T + bias, and what a layer does with it; all tensors of one dtype.

    Owner: the weight and the bias; nothing changes them.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) -> (T, N)."""
        ...

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product and ``other`` (T, N) added up."""
        ...

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product times ``other`` (T, N), element by element."""
        ...

    def swish(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """The weight as it is.

    Attributes:
        weight: (N, K).
        bias: (N,) or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) -> (T, N)."""
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product and ``other`` (T, N) added up."""
        return other + functional.linear(x, self.weight, self.bias)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product times ``other`` (T, N), element by element."""
        return other * functional.linear(x, self.weight, self.bias)

    def swish(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""
        return functional.silu(functional.linear(x, self.weight, self.bias))


class PackedLinear:
    """The weight in the order that oneDNN's kernels read.

    Args:
        weight: (N, K) bfloat16; not kept.
        bias: (N,) bfloat16 or None.

    Raises:
        RuntimeError: This processor or build of PyTorch cannot.
    """

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = _pack(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) -> (T, N)."""
        return _product(x, self._packed, self._bias, "none", [], "")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product and ``other`` (T, N) added up."""
        return _product_with(x, other, self._packed, self._bias, "add")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product times ``other`` (T, N), element by element."""
        return _product_with(x, other, self._packed, self._bias, "mul")

    def swish(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""
        return _product(x, self._packed, self._bias, "swish", [], "")


def _as_panels(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearLayer:
    """Return the weight for a kernel of our own; NativeError: there is no library."""
    from replicas.generators.torch.panels import PanelLinear

    return PanelLinear(weight, bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearLayer:
    """Pack a weight if that is possible here and gives what the plain product gives.

    Args:
        weight: (N, K).
        bias: (N,) of the same dtype, or None.
    """
    plain = PlainLinear(weight, bias)
    if weight.dtype != torch.bfloat16:
        return plain
    for pack in (_as_panels, PackedLinear):
        # They are raised where this processor or build does not have the kernels.
        with torch.inference_mode(), contextlib.suppress(ImportError, RuntimeError):
            packed = pack(weight, bias)
            if gives_the_same(packed, plain):
                return packed
    return plain


def gives_the_same(found: LinearLayer, plain: PlainLinear) -> bool:
    """Return whether ``found`` agrees with the plain operations within bfloat16's rounding.

    Tried on a few random rows. A sum of K products may be rounded in another order, hence also a
    share of the greatest result.
    """
    num_out, num_in = plain.weight.shape
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBE_ROWS, num_in, generator=stream).to(plain.weight.dtype)
    other = torch.randn(_PROBE_ROWS, num_out, generator=stream).to(plain.weight.dtype)
    results = zip(_results(found, x, other), _results(plain, x, other), strict=True)
    return all(_is_near(a.float(), b.float()) for a, b in results)


def _results(linear: LinearLayer, x: torch.Tensor, other: torch.Tensor) -> _Results:
    return linear(x), linear.plus(x, other), linear.times(x, other), linear.swish(x)


def _is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    limit = 2 * _ROUNDING * (wanted.abs() + 0.1 * wanted.abs().max())
    return bool(((found - wanted).abs() <= limit).all())
