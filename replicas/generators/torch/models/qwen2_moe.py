"""Qwen2-MoE: Qwen2's attention, and experts beside a shared one with a gate of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.generators.layer_specs import linear
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import experts, mlp, pre_norm_layer
from replicas.generators.torch.models.qwen2 import with_windows
from replicas.generators.torch.models.qwen3_moe import with_experts

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec

_SHARED = "mlp.shared_expert."
_NAMES = f"{_SHARED}gate_proj {_SHARED}up_proj {_SHARED}down_proj"


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    config = raw.model(Defaults(max_positions=32768, kv_heads=16))
    config = replace(config, qkv_bias=bool(raw.values.get("qkv_bias", True)))
    inner = int(raw.values["shared_expert_intermediate_size"])
    config = with_windows(raw, with_experts(raw, config))
    return replace(config, shared_intermediate_size=inner)


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    return with_shared_expert(config, pre_norm_layer(config, index), index)


def with_shared_expert(config: ModelConfig, found: LayerSpec, index: int) -> LayerSpec:
    """Return a layer with its experts, and the one that all tokens share, if it has any."""
    if index in config.mlp_layers:
        return found
    shared = mlp(config, config.shared_intermediate_size, _NAMES)
    gate = linear("mlp.shared_expert_gate", 1, config.hidden_size)
    return replace(found, mlp=replace(experts(config, "mlp.gate"), shared=shared, shared_gate=gate))
