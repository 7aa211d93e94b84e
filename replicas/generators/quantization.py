"""Quantised checkpoints: which tensors stand for a weight. Pure.

Weights are dequantised when they are loaded, and computed like those of any other checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.generators.layer_specs import Shape

FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes of weights that are converted to the dtype of the computation."""

MXFP4_GROUP = 32
"""Elements with one scale in MXFP4, two in a byte."""


class StoredSpec(NamedTuple):
    """Tensor that a checkpoint must have.

    Attributes:
        shape: Its shape.
        dtypes: Those it may have, as safetensors writes them.
    """

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Stacks of experts in MXFP4, GPT-OSS's form.

    Source: transformers ``integrations/mxfp4.py``; OCP Microscaling Formats (MX) 1.0.
    """

    def tensors(self, name: str, shape: Shape) -> dict[str, StoredSpec]:
        """Return what stands for a stack (experts, columns, rows): elements, then scales."""
        if len(shape) != 3:
            return {}
        count, columns, rows = shape
        scales = (count, rows, columns // MXFP4_GROUP)
        return {
            f"{name}_blocks": StoredSpec((*scales, MXFP4_GROUP // 2), ("U8",)),
            f"{name}_scales": StoredSpec(scales, ("U8",)),
        }


Quantization: TypeAlias = Mxfp4
"""How weights are stored. ``tensors(name, shape)`` gives the tensors that stand for a weight where
the first of them is in the checkpoint; it is empty for weights that are never quantised."""


def read_quantization(raw: Mapping[str, Any], name: str) -> Quantization | None:
    """Read ``quantization_config``.

    Raises:
        ConfigError: Nothing here reads such weights; names the method.
    """
    settings = raw.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else "?"
    match method:
        case "mxfp4":
            return Mxfp4()
        case _:
            raise ConfigError(f"{name}: weights quantised by {method!r} are not supported")


def stored_weights(
    shapes: Mapping[str, Shape], quantization: Quantization | None, names: Mapping[str, object]
) -> dict[str, dict[str, StoredSpec]]:
    """Return the tensors of a checkpoint that stand for each weight.

    Args:
        shapes: Name and shape of every weight.
        quantization: How some of them may be stored.
        names: Of the tensors in the checkpoint.
    """
    found: dict[str, dict[str, StoredSpec]] = {}
    for name, shape in shapes.items():
        packed = {} if quantization is None else quantization.tensors(name, shape)
        is_packed = next(iter(packed), None) in names
        found[name] = packed if is_packed else {name: StoredSpec(shape)}
    return found
