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
