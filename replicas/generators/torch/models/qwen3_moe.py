"""Qwen3-MoE: Qwen3's attention, and experts in place of the MLPs of most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import experts, pre_norm_layer
from replicas.generators.torch.models.qwen2 import with_windows

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    bias = raw.flag("attention_bias")
    config = raw.model(Defaults(max_positions=32768, kv_heads=4))
    config = replace(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return with_windows(raw, with_experts(raw, config))


def with_experts(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the experts of the families of Qwen."""
    count = "num_experts" if "num_experts" in raw.values else "num_local_experts"
    found = raw.experts(
        count,
        "moe_intermediate_size",
        is_normalised=raw.flag("norm_topk_prob"),
        rounds_shares=True,
    )
    every = int(raw.values.get("decoder_sparse_step", 1))
    without = raw.values.get("mlp_only_layers") or ()
    dense = (i for i in range(config.num_hidden_layers) if i in without or (i + 1) % every)
    return replace(config, experts=found, mlp_layers=tuple(dense))


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    found = pre_norm_layer(config, index)
    return found if index in config.mlp_layers else replace(found, mlp=experts(config, "mlp.gate"))
