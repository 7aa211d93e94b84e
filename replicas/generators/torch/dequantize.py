"""Weights from the tensors of quantised checkpoints; `generators.quantization` names these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from replicas.errors import ModelLoadError
from replicas.generators.quantization import CompressedTensors, Gptq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.layer_specs import Shape
    from replicas.generators.quantization import Quantization

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MXFP4_BIAS = 127
"""Of the scales' exponents."""


def dequantize(
    quantization: Quantization, parts: Sequence[torch.Tensor], name: str, wanted: Shape
) -> torch.Tensor:
    """Return a weight, or an entry of a stack, in float32.

    Args:
        quantization: How it is stored.
        parts: The tensors that stand for it, in the order of ``quantization.tensors``.
        name: Of the weight, for errors.
        wanted: Its shape.

    Raises:
        ModelLoadError: The values of the parts contradict their shapes.
    """
    match quantization:
        case Gptq():
            return _gptq(quantization, *parts, name=name)
        case CompressedTensors(is_packed=True):
            scales, words, shape = parts
            if tuple(shape.tolist()) != wanted:
                raise ModelLoadError(
                    f"{name}_shape is {shape.tolist()}, and config.json implies {list(wanted)}: "
                    "use the one that was saved with these weights"
                )
            signed = _unpacked(words, quantization.bits)[:, : wanted[1]]
            signed = signed - (1 << quantization.bits - 1)
            return _scaled(signed, scales, quantization.group_size)
        case CompressedTensors():
            scales, integers = parts
            return _scaled(integers, scales, quantization.group_size)
        case _:
            return mxfp4(*parts)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in rows of int32 words, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _scaled(signed: torch.Tensor, scales: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """Return integers (rows, columns) times the scales (rows, groups) of their groups."""
    size = signed.shape[1] if group_size is None else group_size
    each = scales.float().repeat_interleave(size, dim=1)[:, : signed.shape[1]]
    return signed.float() * each


def _gptq(
    quantization: Gptq,
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    *,
    name: str,
) -> torch.Tensor:
    bits = quantization.bits
    if groups.min() < 0 or groups.max() >= len(scales):
        raise ModelLoadError(
            f"{name} has input features of groups {groups.min()} to {groups.max()} in its g_idx, "
            f"and scales of {len(scales)} groups; copy the model's files again"
        )
    integers = _unpacked(words.T, bits)
    less = _unpacked(zeros, bits)
    wanted = (less + int(quantization.zeros_are_less)) & ((1 << bits) - 1)
    of_column = groups.long()
    return (integers - wanted[of_column].T) * scales.float()[of_column].T


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
