"""The gated MLP of a decoder layer: column-parallel up, row-parallel down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ttnn

if TYPE_CHECKING:
    from replicas.generators.ttnn.products import Products
    from replicas.generators.ttnn.weights import TTLayerWeights


def mlp(x: ttnn.Tensor, layer: TTLayerWeights, products: Products) -> ttnn.Tensor:
    """Return ``down(silu(gate(x)) * up(x))``, summed over the chips.

    Args:
        x: (1, 1, rows, hidden), the same on every chip; freed.
        layer: Its weights.
        products: How it computes, and where.
    """
    gate = products.times("gate", x, layer.gate, layer.gate_bias)
    up = products.times("up", x, layer.up, layer.up_bias)
    ttnn.deallocate(x)
    inner = ttnn.mul(
        gate,
        up,
        input_tensor_a_activations=[ttnn.UnaryOpType.SILU],
        memory_config=gate.memory_config(),
    )
    ttnn.deallocate(gate)
    ttnn.deallocate(up)
    partial = products.times("down", inner, layer.down)
    ttnn.deallocate(inner)
    return products.summed(partial, layer.down_bias)
