"""GPT-OSS: experts with a clamped gate in one tensor, attention sinks, windows in other layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.generators.layer_specs import ClampedSwiglu, LinearSpec, MlpSpec, Part, linear
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models.common import attention, experts, pre_norm_layer

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Where a configuration states none."""


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    raw = replace(raw, values={"rope_scaling": _ROPE, **raw.values})
    rope = RopeDefaults(theta=150000.0)
    config = raw.model(Defaults(131072, kv_heads=8, head_dim=64, rope=rope, eps=1e-5))
    bias = bool(raw.values.get("attention_bias", True))
    alpha, limit = (
        float(raw.values.get(f"swiglu_{key}", default))
        for key, default in (("alpha", 1.702), ("limit", 7.0))
    )
    count = "num_local_experts" if "num_local_experts" in raw.values else "num_experts"
    types = raw.layer_types() or tuple(
        "full_attention" if index % 2 else "sliding_attention"
        for index in range(config.num_hidden_layers)
    )
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        norm_kind="wide",
        activation=ClampedSwiglu(alpha, limit),
        sliding_window=raw.window(default=128),
        layer_types=types,
        # A softmax over the chosen ones is one over all, scaled to sum to 1.
        experts=raw.experts(count, "intermediate_size", is_normalised=True, rounds_shares=True),
    )


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    found, hidden = pre_norm_layer(config, index), config.hidden_size
    routed = experts(config, "mlp.router")
    count, inner = routed.config.num_experts, routed.config.intermediate_size
    gate, up = (
        Part("mlp.experts.gate_up_proj", inner, first, 2 * inner, step=2, stack=count)
        for first in (0, 1)
    )
    down = Part("mlp.experts.down_proj", hidden, stack=count)
    expert = MlpSpec(
        LinearSpec((gate,), hidden, has_bias=True),
        LinearSpec((up,), hidden, has_bias=True),
        LinearSpec((down,), inner, has_bias=True),
        config.activation,
    )
    return replace(
        found,
        attention=replace(attention(config, index), sinks="self_attn.sinks"),
        mlp=replace(
            routed,
            router=linear("mlp.router", count, hidden, has_bias=True),
            expert=expert,
        ),
    )
