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
        if columns % MXFP4_GROUP:
            return {}
        scales = (count, rows, columns // MXFP4_GROUP)
        return {
            f"{name}_blocks": StoredSpec((*scales, MXFP4_GROUP // 2), ("U8",)),
            f"{name}_scales": StoredSpec(scales, ("U8",)),
        }


@dataclass(frozen=True, slots=True)
class Gptq:
    """Integers with a scale and a zero for each output feature and group of input features.

    Attributes:
        bits: Of an integer, 4 or 8.
        group_size: Input features of a group; None for one group of all.
        zeros_are_less: The stored zeros are one less than the true ones, modulo 2 ** bits.

    Source: AutoGPTQ's ``qlinear_cuda_old.py``.
    """

    bits: int
    group_size: int | None
    zeros_are_less: bool

    def tensors(self, name: str, shape: Shape) -> dict[str, StoredSpec]:
        """Return what stands for a weight: integers, zeros, scales, and the group of each input."""
        base = name.removesuffix(".weight")
        if len(shape) != 2 or base == name:
            return {}
        (rows, columns), packed = shape, 32 // self.bits
        if rows % packed or columns % packed:
            return {}
        groups = _groups(columns, self.group_size)
        return {
            f"{base}.qweight": StoredSpec((columns // packed, rows), ("I32",)),
            f"{base}.qzeros": StoredSpec((groups, rows // packed), ("I32",)),
            f"{base}.scales": StoredSpec((groups, rows)),
            f"{base}.g_idx": StoredSpec((columns,), ("I32",)),
        }


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Signed integers with a scale for each output feature, and perhaps group of input features.

    Attributes:
        bits: Of an integer, 4 or 8.
        group_size: Input features of a group; None for one group of all.
        is_packed: Integers lie in words of 32 bits with 2 ** (bits - 1) added, else in bytes.

    Source: compressed-tensors ``compressors/pack_quantized``, ``naive_quantized``.
    """

    bits: int
    group_size: int | None
    is_packed: bool

    def tensors(self, name: str, shape: Shape) -> dict[str, StoredSpec]:
        """Return what stands for a weight: scales, then integers, then if packed the shape."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return {}
        rows, columns = shape
        scale = StoredSpec((rows, _groups(columns, self.group_size)))
        if not self.is_packed:
            return {f"{name}_scale": scale, name: StoredSpec(shape, ("I8",))}
        words = StoredSpec((rows, -(-columns * self.bits // 32)), ("I32",))
        return {
            f"{name}_scale": scale,
            f"{name}_packed": words,
            f"{name}_shape": StoredSpec((2,), ("I64", "I32")),
        }


def _groups(columns: int, group_size: int | None) -> int:
    return 1 if group_size is None else -(-columns // group_size)


Quantization: TypeAlias = Mxfp4 | Gptq | CompressedTensors
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
        case "gptq":
            return _gptq(settings, name)
        case "compressed-tensors":
            return _compressed_tensors(settings, name)
        case _:
            raise ConfigError(
                f"{name}: weights quantised by {method!r} are not supported, only by 'gptq', "
                "'compressed-tensors' and 'mxfp4'; use another checkpoint of the model"
            )


def _gptq(settings: Mapping[str, Any], name: str) -> Gptq:
    form = settings.get("checkpoint_format") or "gptq"
    _check(name, "gptq", bits=(settings.get("bits"), (4, 8)), dynamic=(settings.get("dynamic"), ()))
    _check(name, "gptq", checkpoint_format=(form, ("gptq", "gptq_v2")))
    size = _group_size(settings.get("group_size", 128), name)
    return Gptq(int(settings["bits"]), size, zeros_are_less=form == "gptq")


def _compressed_tensors(settings: Mapping[str, Any], name: str) -> CompressedTensors:
    method, form = "compressed-tensors", settings.get("format")
    _check(name, method, format=(form, ("pack-quantized", "int-quantized", "naive-quantized")))
    groups = list((settings.get("config_groups") or {}).values())
    _check(name, method, config_groups=(len(groups), (1,)))
    weights, is_packed = groups[0]["weights"], form == "pack-quantized"
    activations = groups[0].get("input_activations")
    # Activations that are quantised as they come stay in floats, which loses nothing.
    is_dynamic = isinstance(activations, dict) and activations.get("dynamic") is True
    _check(
        name,
        method,
        type=(weights.get("type", "int"), ("int",)),
        num_bits=(weights.get("num_bits"), (4, 8) if is_packed else (8,)),
        symmetric=(weights.get("symmetric", True), (True,)),
        strategy=(weights.get("strategy"), ("channel", "group")),
        actorder=(weights.get("actorder"), (None, False, "weight", "static")),
        input_activations=(None if is_dynamic else activations, (None,)),
    )
    is_grouped = weights["strategy"] == "group"
    size = _group_size(weights["group_size"], name) if is_grouped else None
    return CompressedTensors(int(weights["num_bits"]), size, is_packed)


def _group_size(value: object, name: str) -> int | None:
    size = int(value)  # type: ignore[call-overload]
    if size < 1 and size != -1:
        raise ConfigError(
            f"{name}: quantization_config: group_size {size} is neither -1 nor above 0"
        )
    return None if size == -1 else int(size)


def _check(name: str, method: str, **settings: tuple[object, tuple[object, ...]]) -> None:
    """Refuse a setting that has another value than the supported ones; unset is neutral."""
    for key, (found, supported) in settings.items():
        if found not in supported and (supported or found):
            known = " or ".join(map(repr, supported)) or "none"
            raise ConfigError(
                f"{name}: weights quantised by {method!r} with {key} {found!r} are not supported, "
                f"only {known}; use another checkpoint of the model"
            )


def stored_weights(
    shapes: Mapping[str, Shape], quantization: Quantization | None, names: Mapping[str, object]
) -> dict[str, dict[str, StoredSpec]]:
    """Return the tensors of a checkpoint that stand for each weight: itself, or several others.

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
