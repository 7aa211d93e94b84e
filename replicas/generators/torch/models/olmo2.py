"""OLMo 2: norms after the attention and the MLP, and norms of all queries and all keys together."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.layer_specs import LayerSpec, NormSpec
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models.common import attention, mlp, norm


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    return read(raw, RopeDefaults())


def read(raw: RawConfig, rope: RopeDefaults) -> ModelConfig:
    """Return what OLMo 2 and 3 share, for a rotation of all or of all but the windows' layers."""
    bias = raw.flag("attention_bias")
    config = raw.model(Defaults(max_positions=2048, eps=1e-5, rope=rope))
    return replace(config, qkv_bias=bias, o_bias=bias, norm_kind="wide")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    q_norm, k_norm = (
        NormSpec(f"self_attn.{name}_norm.weight", heads * config.head_dim, config.norm_kind)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
    )
    return LayerSpec(
        replace(attention(config, index), q_norm=q_norm, k_norm=k_norm),
        mlp(config),
        attention_norm=norm(config, "post_attention_layernorm"),
        output_norm=norm(config, "post_feedforward_layernorm"),
    )
