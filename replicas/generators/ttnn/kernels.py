"""How a profile's precision is said to ttnn: compute kernel configurations and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ttnn

if TYPE_CHECKING:
    from replicas.generators.ttnn.profiles import Precision, Profile


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """What the operations of a lane are told of precision.

    Attributes:
        linear: Of matrix products.
        attention: Of scaled dot product attention.
        norm: Of RMSNorm.
        rope: Of the rotation.
        activation_dtype: Of everything that flows between operations.
    """

    linear: ttnn.DeviceComputeKernelConfig
    attention: ttnn.DeviceComputeKernelConfig
    norm: ttnn.DeviceComputeKernelConfig
    rope: ttnn.DeviceComputeKernelConfig
    activation_dtype: ttnn.DataType


def kernels_of(profile: Profile) -> Kernels:
    """Return the configurations that a profile asks for."""
    return Kernels(
        linear=_compute_kernel(profile.linear),
        attention=_compute_kernel(profile.attention),
        norm=_compute_kernel(profile.norm),
        rope=_compute_kernel(profile.rope),
        activation_dtype=getattr(ttnn, profile.activation_dtype),
    )


def _compute_kernel(precision: Precision) -> ttnn.DeviceComputeKernelConfig:
    # The Wormhole type serves Blackhole too.
    return ttnn.WormholeComputeKernelConfig(
        math_fidelity=getattr(ttnn.MathFidelity, precision.fidelity),
        math_approx_mode=False,
        fp32_dest_acc_en=precision.fp32_accumulation,
        packer_l1_acc=True,
    )
