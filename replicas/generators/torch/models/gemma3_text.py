"""Gemma 3, text only: Gemma 2's layer with norms of heads, and another rotation in windows."""

from __future__ import annotations

from dataclasses import replace

from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models import gemma2

layer = gemma2.layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    rope = RopeDefaults(theta=1e6, layer_type="full_attention")
    every = int(raw.values.get("sliding_window_pattern", 6))
    config = gemma2.read(raw, Defaults(max_positions=131072, kv_heads=4, rope=rope), every)
    theta = float(raw.values.get("rope_local_base_freq", 1e4))
    local = raw.local_rope(config, RopeDefaults(theta=theta, layer_type="sliding_attention"))
    cap = raw.values.get("final_logit_softcapping")
    return replace(config, qk_norm=True, local_rope=local, logits_soft_cap=cap)
