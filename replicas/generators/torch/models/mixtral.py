"""Mixtral: Mistral's attention, and experts in place of each MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models.common import experts, pre_norm_layer

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec

_EXPERT = "block_sparse_moe.experts.{}."
_NAMES = f"{_EXPERT}w1 {_EXPERT}w3 {_EXPERT}w2"


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    config = raw.model(Defaults(max_positions=131072, kv_heads=8, rope=RopeDefaults(theta=1e6)))
    found = raw.experts("num_local_experts", "intermediate_size", is_normalised=True)
    window = raw.window(default=None)
    return replace(config, experts=found, sliding_window=window, layer_types=raw.layer_types())


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    mlp = experts(config, "block_sparse_moe.gate", _NAMES)
    return replace(pre_norm_layer(config, index), mlp=mlp)
