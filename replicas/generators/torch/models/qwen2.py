"""Qwen2: a Llama with biases of queries, keys and values, and windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import pre_norm_layer

layer = pre_norm_layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    config = raw.model(Defaults(max_positions=32768, kv_heads=32))
    return with_windows(raw, replace(config, qkv_bias=True))


def with_windows(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the windows of the families of Qwen, which have a switch."""
    window = raw.window() if raw.flag("use_sliding_window") else None
    first = int(raw.values.get("max_window_layers", 28))
    types = raw.layer_types() or tuple(
        "sliding_attention" if index >= first else "full_attention"
        for index in range(config.num_hidden_layers)
    )
    has_window = window is not None and "sliding_attention" in types
    return replace(config, sliding_window=window, layer_types=types) if has_window else config
