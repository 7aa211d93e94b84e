"""Phi-3 and Phi-4: Llama's layer with fused projections, and rotation of some channels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.generators.layer_specs import LinearSpec, Part
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models.common import attention, mlp, pre_norm_layer

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    rope = RopeDefaults(may_be_partial=True)
    config = raw.model(Defaults(max_positions=4096, eps=1e-5, rope=rope))
    return replace(config, sliding_window=raw.window(default=None))


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    found = pre_norm_layer(config, index)
    inner, hidden = config.intermediate_size, config.hidden_size
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    qkv = LinearSpec((Part("self_attn.qkv_proj", heads * config.head_dim),), hidden)
    gate, up = (
        LinearSpec((Part("mlp.gate_up_proj", inner, first, 2 * inner),), hidden)
        for first in (0, inner)
    )
    fused = replace(attention(config, index), qkv=qkv)
    return replace(found, attention=fused, mlp=replace(mlp(config), gate=gate, up=up))
