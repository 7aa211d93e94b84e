"""The gated MLP of a decoder layer: column-parallel up, row-parallel down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ttnn

from replicas.generators.ttnn.collectives import sum_over_chips

if TYPE_CHECKING:
    from replicas.generators.ttnn.kernels import Kernels
    from replicas.generators.ttnn.weights import LayerWeights


def mlp(
    x: ttnn.Tensor,
    layer: LayerWeights,
    kernels: Kernels,
    tp: int,
    memory_config: ttnn.MemoryConfig,
) -> ttnn.Tensor:
    """Return ``down(silu(gate(x)) * up(x))``, summed over the chips.

    Args:
        x: (1, 1, rows, hidden), the same on every chip; freed.
        layer: Its weights.
        kernels: Precision.
        tp: Chips of the lane.
        memory_config: Of everything computed here.
    """
    gate, up = (
        ttnn.linear(
            x,
            weight,
            bias=bias,
            dtype=kernels.activation_dtype,
            memory_config=memory_config,
            compute_kernel_config=kernels.linear,
        )
        for weight, bias in ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias))
    )
    ttnn.deallocate(x)
    inner = ttnn.mul(
        gate,
        up,
        input_tensor_a_activations=[ttnn.UnaryOpType.SILU],
        memory_config=memory_config,
    )
    ttnn.deallocate(gate)
    ttnn.deallocate(up)
    partial = ttnn.linear(
        inner,
        layer.down,
        dtype=kernels.activation_dtype,
        memory_config=memory_config,
        compute_kernel_config=kernels.linear,
    )
    ttnn.deallocate(inner)
    out = sum_over_chips(partial, tp, memory_config)
    if layer.down_bias is None:
        return out
    # Added once, not by each chip.
    return ttnn.add(out, layer.down_bias, memory_config=memory_config)
