"""Products with a weight matrix by the C kernel of `csrc/products.c`; see `linear.py`.

Dimensions: T tokens, K features in, N features out.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import TYPE_CHECKING

import torch

from replicas.generators.torch import native
from replicas.generators.torch.memory import Pieces
from replicas.generators.torch.native import Feature, PackedMatrix, ProductCall, address

if TYPE_CHECKING:
    from replicas.generators.torch.native import KernelSet

PANEL = 64
"""Columns of a panel."""
ONLY, PLUS, TIMES, SWISH = range(4)
"""What becomes of a product; `product_then` of the header."""

_TILE_FEATURES = 32
"""AMX multiplies so many features of a row at once."""
_CHUNK_BYTES, _CHUNK_BYTES_WITH_TILES = 1 << 19, 1 << 20
"""Rows that stay in the second-level cache while panel after panel is multiplied by them.
Processors with AMX have 2 MB of it; fewer rows would read all weights more often."""

_memory = Pieces()


def num_panels(num_outputs: int) -> int:
    """Return the number of panels of a matrix with so many columns."""
    return -(-num_outputs // PANEL)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight matrix as panels; columns that the last one lacks are zeros.

    Args:
        weight: (N, K) bfloat16, K even.

    Returns:
        (panels, K / 2, 64, 2), aligned to vectors.
    """
    num_outputs, size = weight.shape
    shape = (num_panels(num_outputs), size // 2, PANEL, 2)
    memory = _memory.take(math.prod(shape) * weight.itemsize)
    packed = torch.from_numpy(memory).view(weight.dtype).view(shape)
    in_pairs = weight.reshape(num_outputs, size // 2, 2)
    for panel, columns in enumerate(torch.split(in_pairs, PANEL)):
        packed[panel, :, : len(columns)] = columns.transpose(0, 1)
    return packed


class PanelLinear:
    """The weight as panels of pairs.

    Args:
        weight: (N, K) bfloat16; not kept.
        bias: (N,) bfloat16 or None.
        kernels: The kernels that compute it; None for the best of this processor.

    Attributes:
        matrix: The packed weight and the bias, as kernels read them.

    Raises:
        NativeError: There is no kernel library.
        RuntimeError: The weight is not of bfloat16, or K is odd.
    """

    __slots__ = ("_bias", "_kernels", "_rows_of_task", "_weight", "matrix")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: KernelSet | None = None
    ) -> None:
        num_outputs, size = weight.shape
        if weight.dtype != torch.bfloat16 or size % 2:
            raise RuntimeError(f"no panels of {size} features of {weight.dtype}")
        self._kernels = native.kernel_set() if kernels is None else kernels
        self._weight, self._bias = pack(weight), bias
        uses_tiles = Feature.AMX in self._kernels.features and size % _TILE_FEATURES == 0
        self.matrix = PackedMatrix(
            self._weight.data_ptr(), address(bias, weight.dtype), size, num_outputs, uses_tiles
        )
        chunk_bytes = _CHUNK_BYTES_WITH_TILES if uses_tiles else _CHUNK_BYTES
        self._rows_of_task = max(chunk_bytes // (64 * size), 1) * 32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; see ``linear.LinearLayer``."""
        return self._multiply(x, ONLY)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product plus another tensor; see ``linear.LinearLayer.plus``."""
        return self._multiply(x, PLUS, other)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product times another tensor; see ``linear.LinearLayer.times``."""
        return self._multiply(x, TIMES, other)

    def swish(self, x: torch.Tensor) -> torch.Tensor:
        """Return the SiLU of the product; see ``linear.LinearLayer.swish``."""
        return self._multiply(x, SWISH)

    def _multiply(
        self, x: torch.Tensor, then: int, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        matrix, most, num_rows = self.matrix, self._rows_of_task, len(x)
        num_outputs = matrix.num_outputs
        shape = (num_rows, num_outputs)
        if x.shape != (num_rows, matrix.num_inputs) or (other is not None and other.shape != shape):
            raise ValueError(
                f"product of {tuple(x.shape)} with {matrix.num_inputs} -> {num_outputs}"
                + ("" if other is None else f", and {tuple(other.shape)}")
            )
        out = x.new_empty(shape)
        call = ProductCall(
            (0, -(-num_rows // most) * num_panels(num_outputs)),
            matrix,
            address(x, torch.bfloat16),
            num_rows,
            most,
            then,
            address(other, torch.bfloat16),
            out.data_ptr(),
        )
        native.require(self._kernels.library.check_product(byref(call)), "a product")
        self._kernels.product(call)
        return out
