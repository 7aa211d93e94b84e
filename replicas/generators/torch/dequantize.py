"""Weights from the tensors of quantised checkpoints; `generators.quantization` names these."""

from __future__ import annotations

import torch

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MXFP4_BIAS = 127
"""Of the scales' exponents."""


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrix of MXFP4 elements, exact in bfloat16.

    Args:
        blocks: uint8 (rows, groups, 16): two elements in each byte, the lower four bits first.
        scales: uint8 (rows, groups), exponents of two with a bias.

    Returns:
        float32 (columns, rows).
    """
    values = torch.cat((_FP4, -_FP4))
    elements = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1)
    exponents = scales.to(torch.int32) - _MXFP4_BIAS
    return torch.ldexp(elements.flatten(-2), exponents.unsqueeze(-1)).flatten(-2).T
