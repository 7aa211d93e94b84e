"""Optimisation profiles: the precision of weights, KV and arithmetic of the native ttnn models.

Dtypes and fidelities are kept by the names of their ttnn members, ``getattr(ttnn, name)`` and
``getattr(ttnn.MathFidelity, name)``, so that sizes are computed, and configurations refused, where
ttnn is not installed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from replicas.errors import ConfigError

Dtype: TypeAlias = Literal["bfloat8_b", "bfloat16"]
Fidelity: TypeAlias = Literal["LoFi", "HiFi2", "HiFi3", "HiFi4"]


@dataclass(frozen=True, slots=True)
class Precision:
    """How one kind of op computes.

    Attributes:
        fidelity: How many of the mantissas' bits are multiplied: member of ``ttnn.MathFidelity``.
        fp32_accumulation: Sums are kept in float32, not in bfloat16.
    """

    fidelity: Fidelity
    fp32_accumulation: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """One choice of speed against accuracy.

    Attributes:
        name: As in the engine's configuration.
        weight_dtype: Matrices of the attention, and the output layer.
        mlp_dtype: Matrices of the MLP.
        vector_dtype: Embedding, norm weights and biases.
        kv_dtype: KV cache.
        activation_dtype: What flows between ops.
        linear: Matrix products.
        attention: Scaled dot product attention.
        norm: RMSNorm.
        rope: Rotary embedding.
    """

    name: str
    weight_dtype: Dtype
    mlp_dtype: Dtype
    kv_dtype: Dtype
    linear: Precision
    attention: Precision
    norm: Precision
    rope: Precision
    vector_dtype: Dtype = "bfloat16"
    activation_dtype: Dtype = "bfloat16"


PERFORMANCE = Profile(
    name="performance",
    weight_dtype="bfloat8_b",
    mlp_dtype="bfloat8_b",
    kv_dtype="bfloat8_b",
    linear=Precision("HiFi2", fp32_accumulation=True),
    attention=Precision("HiFi4", fp32_accumulation=True),
    norm=Precision("HiFi4", fp32_accumulation=True),
    rope=Precision("HiFi4", fp32_accumulation=True),
)
"""HiFi2 multiplies every bit of a bfloat8_b weight."""

ACCURACY = Profile(
    name="accuracy",
    weight_dtype="bfloat16",
    mlp_dtype="bfloat16",
    kv_dtype="bfloat16",
    linear=Precision("HiFi4", fp32_accumulation=True),
    attention=Precision("HiFi4", fp32_accumulation=True),
    norm=Precision("HiFi4", fp32_accumulation=True),
    rope=Precision("HiFi4", fp32_accumulation=True),
)

PROFILES = {profile.name: profile for profile in (PERFORMANCE, ACCURACY)}
"""Every profile by its name."""


def profile(optimizations: str | None) -> Profile:
    """The profile of a name; None is "performance".

    Raises:
        ConfigError: There is no profile of that name; names those there are.
    """
    name = PERFORMANCE.name if optimizations is None else optimizations
    if name not in PROFILES:
        raise ConfigError(f"optimizations {name!r} is not one of {', '.join(PROFILES)}")
    return PROFILES[name]
