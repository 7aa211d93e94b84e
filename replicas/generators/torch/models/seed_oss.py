"""Seed-OSS: a Llama whose output projection has a bias of its own."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models.common import pre_norm_layer

layer = pre_norm_layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    config = raw.model(Defaults(max_positions=524288, kv_heads=8, head_dim=128))
    return replace(
        config,
        qkv_bias=bool(raw.values.get("attention_bias", True)),
        o_bias=raw.flag("attention_out_bias"),
        mlp_bias=raw.flag("mlp_bias"),
    )
