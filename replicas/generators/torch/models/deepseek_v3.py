"""DeepSeek-V3: DeepSeek-V2 whose experts are chosen by sigmoids with a correction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.layer_specs import ExpertsSpec
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.torch.models import deepseek_v2

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec

_DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    raw = replace(raw, values={**_DEFAULTS, **raw.values})
    method = raw.values.get("topk_method", "noaux_tc")
    if method != "noaux_tc":
        raise ConfigError(f"{raw.name_or_path}: topk_method {method!r} is not supported")
    return deepseek_v2.read(raw, Defaults(4096), has_groups=True, scoring="sigmoid")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    found = deepseek_v2.layer(config, index)
    if not isinstance(found.mlp, ExpertsSpec):
        return found
    return replace(found, mlp=replace(found.mlp, correction="mlp.gate.e_score_correction_bias"))
