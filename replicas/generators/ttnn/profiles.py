"""Optimisation profiles: precision of weights, KV and arithmetic of the native ttnn models.

Dtypes and fidelities are stored as names of ttnn members, ``getattr(ttnn, name)`` and
``getattr(ttnn.MathFidelity, name)``, so that sizes can be computed, and configurations refused,
without ttnn. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig

Dtype: TypeAlias = Literal["bfloat4_b", "bfloat8_b", "bfloat16"]
Fidelity: TypeAlias = Literal["LoFi", "HiFi2", "HiFi3", "HiFi4"]

ProductName: TypeAlias = Literal["qkv", "o", "gate", "up", "down"]
PRODUCTS: tuple[ProductName, ...] = ("qkv", "o", "gate", "up", "down")
"""Matrix products of a layer, named by their weights in `weights.TTLayerWeights`."""

TILE_BYTES: dict[Dtype, int] = {"bfloat4_b": 576, "bfloat8_b": 1088, "bfloat16": 2048}
"""Bytes of a tile of 32x32 elements."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of one kind of operation.

    Attributes:
        fidelity: Member of ``ttnn.MathFidelity``: how many bits of the mantissas are multiplied.
        fp32_accumulation: Whether sums are kept in float32 instead of bfloat16.
    """

    fidelity: Fidelity
    fp32_accumulation: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Trade-off between speed and accuracy.

    Attributes:
        name: Name in the engine's configuration.
        weight_dtype: Matrices of the output layer, and of the MLP on its way down.
        attention_dtype: Those of the attention.
        gate_up_dtype: Matrices of the MLP on its way up.
        last_gate_up_dtype: Those of the last layer.
        vector_dtype: Embedding, norm weights and biases.
        kv_dtype: KV cache.
        activation_dtype: Tensors between operations.
        linear: Matrix products of the output layer.
        attention_linear: Those of the attention.
        gate_up: Those of the MLP on its way up.
        last_gate_up: Those of the last layer.
        down: Those of the MLP on its way down.
        attention: Scaled dot product attention of a chunk.
        attention_of_rows: That of a decode step.
        norm: RMSNorm.
        rope: Rotary embedding.
    """

    name: str
    weight_dtype: Dtype
    attention_dtype: Dtype
    gate_up_dtype: Dtype
    last_gate_up_dtype: Dtype
    kv_dtype: Dtype
    linear: Precision
    attention_linear: Precision
    gate_up: Precision
    last_gate_up: Precision
    down: Precision
    attention: Precision
    attention_of_rows: Precision
    norm: Precision
    rope: Precision
    vector_dtype: Dtype = "bfloat16"
    activation_dtype: Dtype = "bfloat16"

    def weight(self, name: ProductName, *, is_last: bool) -> Dtype:
        """Return the dtype of a product's weights, in the last layer or in another."""
        if name in ("gate", "up"):
            return self.last_gate_up_dtype if is_last else self.gate_up_dtype
        return self.weight_dtype if name == "down" else self.attention_dtype

    def product(self, name: ProductName, *, is_last: bool = False) -> Precision:
        """Return the precision of a product, in the last layer or in another."""
        if name in ("gate", "up"):
            return self.last_gate_up if is_last else self.gate_up
        return self.down if name == "down" else self.attention_linear


_HIFI4 = Precision("HiFi4", fp32_accumulation=True)
_HIFI2 = Precision("HiFi2", fp32_accumulation=True)
_HIFI2_BF16 = Precision("HiFi2", fp32_accumulation=False)

PERFORMANCE = Profile(
    name="performance",
    weight_dtype="bfloat8_b",
    attention_dtype="bfloat8_b",
    gate_up_dtype="bfloat4_b",
    last_gate_up_dtype="bfloat8_b",
    kv_dtype="bfloat8_b",
    linear=_HIFI2,
    attention_linear=_HIFI2,
    gate_up=Precision("LoFi", fp32_accumulation=False),
    last_gate_up=_HIFI2_BF16,
    down=_HIFI2_BF16,
    attention=_HIFI4,
    attention_of_rows=_HIFI2,
    norm=_HIFI4,
    rope=_HIFI4,
)
"""What Tenstorrent's published rates are made with. LoFi multiplies every bit of a bfloat4_b
weight, HiFi2 every bit of a bfloat8_b one.
Source: `ModelOptimizations.performance` of tt-metal's models/tt_transformers/tt/model_config.py."""

_PERFORMANCE_OF_QWEN_7B = replace(
    PERFORMANCE,
    attention_dtype="bfloat16",
    gate_up_dtype="bfloat8_b",
    kv_dtype="bfloat16",
    attention_linear=_HIFI4,
    gate_up=_HIFI2_BF16,
    attention_of_rows=_HIFI4,
)
"""Profile of Qwen2.5-7B, which lower precision degrades, according to Tenstorrent.
Source: `ModelOptimizations.performance` again, which identifies it by name."""
_QWEN_7B = ("qwen2", 3584, 18944, 4)
"""Family, hidden size, inner size and KV heads that identify it and its fine-tuned models, whatever
the folder's name."""

BALANCED = Profile(
    name="balanced",
    weight_dtype="bfloat8_b",
    attention_dtype="bfloat8_b",
    gate_up_dtype="bfloat8_b",
    last_gate_up_dtype="bfloat8_b",
    kv_dtype="bfloat8_b",
    linear=_HIFI2,
    attention_linear=_HIFI2,
    gate_up=_HIFI2,
    last_gate_up=_HIFI2,
    down=_HIFI2,
    attention=_HIFI4,
    attention_of_rows=_HIFI4,
    norm=_HIFI4,
    rope=_HIFI4,
)

ACCURACY = Profile(
    name="accuracy",
    weight_dtype="bfloat16",
    attention_dtype="bfloat16",
    gate_up_dtype="bfloat16",
    last_gate_up_dtype="bfloat16",
    kv_dtype="bfloat16",
    linear=_HIFI4,
    attention_linear=_HIFI4,
    gate_up=_HIFI4,
    last_gate_up=_HIFI4,
    down=_HIFI4,
    attention=_HIFI4,
    attention_of_rows=_HIFI4,
    norm=_HIFI4,
    rope=_HIFI4,
)

PROFILES = {profile.name: profile for profile in (PERFORMANCE, BALANCED, ACCURACY)}
"""Profiles by name."""


def profile(optimizations: str | None, model: ModelConfig | None = None) -> Profile:
    """Return a profile by name, with exceptions for particular models.

    Args:
        optimizations: The name; None is "performance".
        model: The model; None is any without an exception.

    Raises:
        ConfigError: There is no such profile; lists the known ones.
    """
    name = PERFORMANCE.name if optimizations is None else optimizations
    if name not in PROFILES:
        raise ConfigError(f"optimizations {name!r} is not one of {', '.join(PROFILES)}")
    chosen = PROFILES[name]
    return _PERFORMANCE_OF_QWEN_7B if chosen is PERFORMANCE and _is_qwen_7b(model) else chosen


def _is_qwen_7b(model: ModelConfig | None) -> bool:
    if model is None:
        return False
    sizes = model.hidden_size, model.intermediate_size, model.num_key_value_heads
    return (model.family, *sizes) == _QWEN_7B
