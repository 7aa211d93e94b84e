"""Plain reference of quantised checkpoints: packs models that transformers saved, one number at a
time, and knows the weights that the packed ones stand for. Shares no code with the loader."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Stored tensors by what follows the name of the weight, and the weight that they stand for."""


def pack_folder(
    source: Path,
    target: Path,
    quantization: dict[str, Any],
    is_packed: Callable[[str], bool],
    pack: Callable[[torch.Tensor], Packed],
    ending: str,
) -> None:
    """Write a folder with packed weights, and ``target``/plain with those that they stand for.

    Args:
        source: Folder of a model.
        target: New folder.
        quantization: Its quantization_config.
        is_packed: Whether the weight of a name is packed.
        pack: Packs a weight.
        ending: Of the names of weights, replaced by those of the stored tensors.
    """
    stored, plain = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        plain[name] = stored[name] = weight
        if is_packed(name):
            parts, plain[name] = pack(stored.pop(name))
            stored |= {name.removesuffix(ending) + part: value for part, value in parts.items()}
    raw = json.loads((source / "config.json").read_text())
    for folder, weights, more in (
        (target, stored, {"quantization_config": quantization}),
        (target / "plain", plain, {}),
    ):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(raw | more))


def pack_mxfp4(stack: torch.Tensor) -> Packed:
    """Draw the elements and exponents of a stack (experts, columns, rows)."""
    count, columns, rows = stack.shape
    draw = random.Random(count * columns * rows)
    blocks = torch.zeros(count, rows, columns // 32, 16, dtype=torch.uint8)
    scales = torch.zeros(count, rows, columns // 32, dtype=torch.uint8)
    weight = torch.zeros(stack.shape)
    for expert in range(count):
        for row in range(rows):
            for group in range(columns // 32):
                exponent = draw.choice((-6, -5, -4, -3))
                scales[expert, row, group] = 127 + exponent
                codes = [draw.randrange(16) for _ in range(32)]
                values = [(-1 if code & 8 else 1) * FP4[code & 7] * 2.0**exponent for code in codes]
                first = 32 * group
                weight[expert, first : first + 32, row] = torch.tensor(values)
                pairs = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
                blocks[expert, row, group] = torch.tensor(pairs, dtype=torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, weight


def _words(values: list[int], bits: int) -> list[int]:
    """Signed words of 32 bits, the first value in the lowest bits."""
    found = []
    for first in range(0, len(values), 32 // bits):
        word = sum(v << bits * i for i, v in enumerate(values[first : first + 32 // bits]))
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def _int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def pack_gptq(
    weight: torch.Tensor, *, bits: int, group: int, is_shuffled: bool, is_symmetric: bool, less: int
) -> Packed:
    """Draw the integers, zeros and scales of a weight (rows, columns).

    Args:
        weight: Gives the shape.
        bits: Of an integer.
        group: Input features of a group; -1 for all.
        is_shuffled: Input features of a group lie anywhere, as with desc_act.
        is_symmetric: All zeros are in the middle.
        less: Subtracted from stored zeros, modulo 2 ** bits.
    """
    rows, columns = weight.shape
    draw, top = random.Random(rows * columns + bits), 1 << bits
    size = columns if group == -1 else group
    groups = [column // size for column in range(columns)]
    if is_shuffled:
        draw.shuffle(groups)
    num = max(groups) + 1
    zeros = [[top // 2 if is_symmetric else draw.randrange(top) for _ in range(rows)]
             for _ in range(num)]  # fmt: skip
    scales = torch.tensor([[draw.uniform(0.5, 1.5) for _ in range(rows)] for _ in range(num)])
    scales = (scales / top).half()
    integers = [[draw.randrange(top) for _ in range(columns)] for _ in range(rows)]
    table = scales.tolist()
    plain = [
        [(integers[r][c] - zeros[groups[c]][r]) * table[groups[c]][r] for c in range(columns)]
        for r in range(rows)
    ]
    parts = {
        "qweight": _int32([_words(row, bits) for row in integers]).T.contiguous(),
        "qzeros": _int32([_words([(z - less) % top for z in row], bits) for row in zeros]),
        "scales": scales,
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return parts, torch.tensor(plain)


def pack_compressed(weight: torch.Tensor, *, bits: int, group: int, is_packed: bool) -> Packed:
    """Draw the signed integers and scales of a weight; see `pack_gptq`."""
    rows, columns = weight.shape
    draw, half = random.Random(rows * columns + bits), 1 << bits - 1
    size = columns if group == -1 else group
    scales = [[draw.uniform(0.5, 1.5) / half for _ in range(columns // size)] for _ in range(rows)]
    integers = [[draw.randrange(-half, half) for _ in range(columns)] for _ in range(rows)]
    plain = [
        [number * row_scales[c // size] for c, number in enumerate(row)]
        for row, row_scales in zip(integers, scales, strict=True)
    ]
    parts = {"weight_scale": torch.tensor(scales)}
    if is_packed:
        words = [_words([number + half for number in row], bits) for row in integers]
        parts |= {"weight_packed": _int32(words), "weight_shape": torch.tensor([rows, columns])}
    else:
        parts["weight"] = torch.tensor(integers, dtype=torch.int8)
    return parts, torch.tensor(plain)
