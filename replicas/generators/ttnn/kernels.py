"""Compute kernel configurations and dtypes of ttnn for a profile's precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ttnn

from replicas.generators.ttnn.profiles import PRODUCTS

if TYPE_CHECKING:
    from replicas.generators.ttnn.profiles import Precision, ProductName, Profile


@dataclass(frozen=True, slots=True, eq=False)
class LaneKernels:
    """Precision settings of a lane's operations.

    Attributes:
        linear: Configuration of the output layer.
        products: Name and dtype of a layer's weights -> configuration.
        attention: Configuration of scaled dot product attention of a chunk.
        attention_of_rows: Configuration of attention of a decode step.
        norm: Configuration of RMSNorm.
        rope: Configuration of the rotation.
        activation_dtype: Dtype of tensors between operations.
    """

    linear: ttnn.DeviceComputeKernelConfig
    products: dict[tuple[ProductName, ttnn.DataType], ttnn.DeviceComputeKernelConfig]
    attention: ttnn.DeviceComputeKernelConfig
    attention_of_rows: ttnn.DeviceComputeKernelConfig
    norm: ttnn.DeviceComputeKernelConfig
    rope: ttnn.DeviceComputeKernelConfig
    activation_dtype: ttnn.DataType

    def product(self, name: ProductName, weight: ttnn.Tensor) -> ttnn.DeviceComputeKernelConfig:
        """Return the configuration of a product with ``weight``."""
        return self.products[name, weight.dtype]


def kernels_of(profile: Profile) -> LaneKernels:
    """Return the configurations of a profile."""
    return LaneKernels(
        linear=_compute_kernel(profile.linear),
        products={
            (name, getattr(ttnn, profile.weight(name, is_last=is_last))): _compute_kernel(
                profile.product(name, is_last=is_last)
            )
            for name in PRODUCTS
            for is_last in (True, False)
        },
        attention=_compute_kernel(profile.attention),
        attention_of_rows=_compute_kernel(profile.attention_of_rows),
        norm=_compute_kernel(profile.norm),
        rope=_compute_kernel(profile.rope),
        activation_dtype=getattr(ttnn, profile.activation_dtype),
    )


def _compute_kernel(precision: Precision) -> ttnn.DeviceComputeKernelConfig:
    # The Wormhole type is also valid for Blackhole.
    return ttnn.WormholeComputeKernelConfig(
        math_fidelity=getattr(ttnn.MathFidelity, precision.fidelity),
        math_approx_mode=False,
        fp32_dest_acc_en=precision.fp32_accumulation,
        packer_l1_acc=True,
    )
