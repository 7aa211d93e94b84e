"""Mistral: a Llama whose layers may all have a window."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import pre_norm_layer

layer = pre_norm_layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    config = raw.model(Defaults(max_positions=131072, kv_heads=8))
    return replace(config, sliding_window=raw.window(), layer_types=raw.layer_types())
