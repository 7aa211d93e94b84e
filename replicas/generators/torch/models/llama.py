"""Llama."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import pre_norm_layer

layer = pre_norm_layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    bias = raw.flag("attention_bias")
    config = raw.model(Defaults(max_positions=2048))
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=raw.flag("mlp_bias"))
