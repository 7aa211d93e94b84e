"""Qwen3: a Llama with norms of queries and keys, and windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import pre_norm_layer
from replicas.generators.torch.models.qwen2 import with_windows

layer = pre_norm_layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    bias = raw.flag("attention_bias")
    config = raw.model(Defaults(max_positions=32768, kv_heads=32, head_dim=128))
    return with_windows(raw, replace(config, qkv_bias=bias, o_bias=bias, qk_norm=True))
