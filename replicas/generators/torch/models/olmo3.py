"""OLMo 3: OLMo 2's layer with a window in most layers, whose rotation is never scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models import olmo2

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig, RawConfig

layer = olmo2.layer


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    theta = float(raw.values.get("rope_theta") or 5e5)
    config = olmo2.read(raw, RopeDefaults(theta, layer_type="full_attention"))
    return replace(
        config,
        sliding_window=raw.window(),
        layer_types=raw.layer_types(full_every=4),
        local_rope=raw.local_rope(config, RopeDefaults(theta, layer_type="sliding_attention")),
    )
