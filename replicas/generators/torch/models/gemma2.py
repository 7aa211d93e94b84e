"""Gemma 2: four norms, soft caps of scores and logits, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.layer_specs import LayerSpec
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import attention, mlp, norm

_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    scores, logits = (raw.values.get(key, default) for key, default in _CAPS.items())
    config = read(raw, Defaults(max_positions=8192, kv_heads=4), every=2)
    return replace(config, attention_soft_cap=scores, logits_soft_cap=logits)


def read(raw: RawConfig, defaults: Defaults, every: int) -> ModelConfig:
    """Return what Gemma 2 and 3 share; of `every` so many layers the last has no window."""
    raw.refuse("use_bidirectional_attention")
    defaults = replace(
        defaults, head_dim=256, is_tied=True, activation=("hidden_activation", "gelu_pytorch_tanh")
    )
    config, bias = raw.model(defaults), raw.flag("attention_bias")
    scale = float(raw.values.get("query_pre_attn_scalar", 256))
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        norm_kind="offset",
        activation="gelu_tanh",
        sliding_window=raw.window(),
        layer_types=raw.layer_types(every),
        attention_scale=None if scale == config.head_dim else scale**-0.5,
        embedding_scale=config.hidden_size**0.5,
    )


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    return LayerSpec(
        attention(config, index),
        mlp(config),
        input_norm=norm(config, "input_layernorm"),
        attention_norm=norm(config, "post_attention_layernorm"),
        mlp_norm=norm(config, "pre_feedforward_layernorm"),
        output_norm=norm(config, "post_feedforward_layernorm"),
    )
