"""Parts of layers that families share, under the names of weights that most of them use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.generators.layer_specs import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    Part,
    linear,
)

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig


def norm(config: ModelConfig, name: str) -> NormSpec:
    """Return a norm of hidden states."""
    return NormSpec(f"{name}.weight", config.hidden_size, config.norm_kind)


def attention(config: ModelConfig, index: int) -> AttentionSpec:
    """Return attention with three projections, biases, norms, rotation and window as configured."""
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    q, k, v = (f"self_attn.{each}_proj" for each in "qkv")
    parts = Part(q, q_size), Part(k, kv_size), Part(v, kv_size)
    q_norm, k_norm = (
        NormSpec(f"self_attn.{each}_norm.weight", config.head_dim, config.norm_kind)
        for each in "qk"
    )
    has_window = config.has_window(index)
    return AttentionSpec(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        qkv=LinearSpec(parts, config.hidden_size, config.qkv_bias),
        o=linear("self_attn.o_proj", config.hidden_size, q_size, config.o_bias),
        rope=(has_window and config.local_rope) or config.rope,
        q_norm=q_norm if config.qk_norm else None,
        k_norm=k_norm if config.qk_norm else None,
        window=config.sliding_window if has_window else None,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
    )


def mlp(
    config: ModelConfig,
    inner: int | None = None,
    names: str = "mlp.gate_proj mlp.up_proj mlp.down_proj",
) -> MlpSpec:
    """Return an MLP.

    Args:
        config: The model.
        inner: Its size; None is the configuration's.
        names: Of gate, up and down, with a space between.
    """
    inner, hidden = inner or config.intermediate_size, config.hidden_size
    gate, up, down = names.split()
    return MlpSpec(
        linear(gate, inner, hidden, config.mlp_bias),
        linear(up, inner, hidden, config.mlp_bias),
        linear(down, hidden, inner, config.mlp_bias),
        config.activation,
    )


def experts(
    config: ModelConfig,
    router: str,
    names: str = "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj",
) -> ExpertsSpec:
    """Return experts.

    Args:
        config: A model with experts.
        router: Name of the router.
        names: Of an expert's gate, up and down, with a space between and "{}" for its number.
    """
    found = config.experts
    assert found is not None
    return ExpertsSpec(
        found,
        linear(router, found.num_experts, config.hidden_size),
        mlp(config, found.intermediate_size, names),
    )


def pre_norm_layer(config: ModelConfig, index: int) -> LayerSpec:
    """Return Llama's layer: a norm before the attention and one before the MLP."""
    return LayerSpec(
        attention(config, index),
        mlp(config),
        input_norm=norm(config, "input_layernorm"),
        mlp_norm=norm(config, "post_attention_layernorm"),
    )
