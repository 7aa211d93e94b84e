"""Qwen3-Next: gated delta rules, in every fourth layer gated attention, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.layer_specs import DeltaConfig, DeltaSpec, NormSpec, linear
from replicas.generators.model_config import RECURRENT, Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import RopeDefaults
from replicas.generators.torch.models import qwen2_moe, qwen3_moe
from replicas.generators.torch.models.common import attention, pre_norm_layer

if TYPE_CHECKING:
    from replicas.generators.layer_specs import AttentionSpec, LayerSpec

_DEFAULTS = {
    "partial_rotary_factor": 0.25, "norm_topk_prob": True, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
_NAMES = "linear_attn."


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    raw = replace(raw, values={**_DEFAULTS, **raw.values})
    rope, bias = RopeDefaults(may_be_partial=True), raw.flag("attention_bias")
    config = raw.model(Defaults(32768, kv_heads=2, head_dim=256, rope=rope, may_be_recurrent=True))
    every = int(raw.values["full_attention_interval"])
    types = raw.layer_types() or tuple(
        RECURRENT if (index + 1) % every else "full_attention"
        for index in range(config.num_hidden_layers)
    )
    if "full_attention" not in types:
        raise ConfigError(f"{raw.name_or_path}: a model without full_attention is not supported")
    config = replace(config, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_kind="offset")
    return replace(
        qwen3_moe.with_experts(raw, config),
        layer_types=types,
        shared_intermediate_size=int(raw.values["shared_expert_intermediate_size"]),
        delta=_delta(raw) if RECURRENT in types else None,
    )


def _delta(raw: RawConfig) -> DeltaConfig:
    sizes = DeltaConfig(*(int(raw.values[key]) for key in _SIZES))
    if min(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim) < 1:
        raise ConfigError(f"{raw.name_or_path}: one of {', '.join(_SIZES)} is below 1")
    if sizes.kernel < 2 or sizes.value_heads % sizes.key_heads:
        raise ConfigError(
            f"{raw.name_or_path}: linear_num_value_heads {sizes.value_heads} is not a multiple of "
            f"linear_num_key_heads {sizes.key_heads}, or linear_conv_kernel_dim {sizes.kernel} is "
            "below 2"
        )
    return sizes


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    found = qwen2_moe.with_shared_expert(config, pre_norm_layer(config, index), index)
    if config.delta is not None and config.layer_types[index] == RECURRENT:
        return replace(found, attention=_delta_rule(config, config.delta))
    return replace(found, attention=_gated(attention(config, index)))


def _gated(plain: AttentionSpec) -> AttentionSpec:
    q, *others = plain.qkv.parts
    parts = replace(q, rows=2 * q.rows), *others
    return replace(plain, qkv=replace(plain.qkv, parts=parts), is_gated=True)


def _delta_rule(config: ModelConfig, sizes: DeltaConfig) -> DeltaSpec:
    hidden, values = config.hidden_size, sizes.value_heads * sizes.value_dim
    return DeltaSpec(
        sizes,
        qkvz=linear(f"{_NAMES}in_proj_qkvz", sizes.channels + values, hidden),
        ba=linear(f"{_NAMES}in_proj_ba", 2 * sizes.value_heads, hidden),
        convolution=f"{_NAMES}conv1d.weight",
        decay=f"{_NAMES}A_log",
        decay_bias=f"{_NAMES}dt_bias",
        norm=NormSpec(f"{_NAMES}norm.weight", sizes.value_dim),
        o=linear(f"{_NAMES}out_proj", hidden, values),
    )
