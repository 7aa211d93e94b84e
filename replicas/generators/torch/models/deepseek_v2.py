"""DeepSeek-V2: latent attention, and experts of which a token's are in its best groups."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.layer_specs import (
    LatentAttentionSpec,
    LatentConfig,
    LayerSpec,
    NormSpec,
    linear,
)
from replicas.generators.model_config import Defaults, ModelConfig, RawConfig
from replicas.generators.rope_config import yarn_mscale
from replicas.generators.torch.models.common import experts, mlp, pre_norm_layer

if TYPE_CHECKING:
    from typing import Literal

_SHARED = "mlp.shared_experts."
_NAMES = f"{_SHARED}gate_proj {_SHARED}up_proj {_SHARED}down_proj"
_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is, as in transformers."""
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "moe_intermediate_size": 1407, "topk_method": "greedy",
}  # fmt: skip


def parse(raw: RawConfig) -> ModelConfig:
    """Read a configuration; see `Family.parse`."""
    raw = replace(raw, values={**_DEFAULTS, **raw.values})
    raw.refuse("norm_topk_prob")
    method = raw.values["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"{raw.name_or_path}: topk_method {method!r} is not supported")
    return read(raw, Defaults(2048), has_groups=method != "greedy")


def read(
    raw: RawConfig,
    defaults: Defaults,
    *,
    has_groups: bool,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
) -> ModelConfig:
    """Return what DeepSeek-V2 and V3 share."""
    raw.refuse("mlp_bias")
    values = raw.values
    if values.get("scoring_func", scoring) != scoring or int(values.get("moe_layer_freq", 1)) != 1:
        raise ConfigError(
            f"{raw.name_or_path}: scoring_func {values.get('scoring_func', scoring)!r} with "
            f"moe_layer_freq {values.get('moe_layer_freq', 1)} is not supported"
        )
    latent = _latent(raw)
    # The rotated channels are what the rotation's settings are for.
    raw = replace(raw, values={**values, "head_dim": latent.rotated, "num_key_value_heads": None})
    config = raw.model(defaults)
    routed = raw.experts(
        "n_routed_experts", "moe_intermediate_size", is_normalised=raw.flag("norm_topk_prob")
    )
    groups, best = 1, 1
    if has_groups:
        groups, best = int(values["n_group"]), int(values["topk_group"])
    size, rest = divmod(routed.num_experts, max(groups, 1))
    has_two = size > 1 or groups == 1 or scoring == "softmax"
    if rest or not 1 <= best <= groups or best * size < routed.num_per_token or not has_two:
        raise ConfigError(
            f"{raw.name_or_path}: {routed.num_per_token} experts of a token from topk_group {best} "
            f"of n_group {groups}, of {routed.num_experts} experts, is impossible"
        )
    bias, dense = raw.flag("attention_bias"), int(values.get("first_k_dense_replace") or 0)
    shared = routed.intermediate_size * int(values.get("n_shared_experts") or 0)
    settings = values.get("rope_parameters") or values.get("rope_scaling") or {}
    mscale = float(settings.get("mscale_all_dim") or 0.0)
    is_scaled = config.rope.rope_type != "default" and mscale != 0.0
    factor = yarn_mscale(config.rope.factor, mscale) if is_scaled else 1.0
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        latent=latent,
        attention_scale=(latent.plain + latent.rotated) ** -0.5 * factor * factor,
        experts=replace(
            routed,
            scoring=scoring,
            routes_wide=True,
            scale=float(values.get("routed_scaling_factor", 1.0)),
            num_groups=groups,
            groups_per_token=best,
        ),
        mlp_layers=tuple(range(min(dense, config.num_hidden_layers))),
        shared_intermediate_size=shared,
    )


def _latent(raw: RawConfig) -> LatentConfig:
    rank, rotated, plain, value = (int(raw.values[key]) for key in _SIZES)
    query = raw.values["q_lora_rank"]
    query_rank = None if query is None else int(query)
    if min(rank, rotated, plain, value, 1 if query_rank is None else query_rank) < 1:
        raise ConfigError(
            f"{raw.name_or_path}: q_lora_rank or one of {', '.join(_SIZES)} is below 1"
        )
    is_interleaved = bool(raw.values.get("rope_interleave", True))
    return LatentConfig(rank, query_rank, rotated, plain, value, is_interleaved)


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a layer."""
    found = replace(pre_norm_layer(config, index), attention=attention(config))
    if index in config.mlp_layers:
        return found
    routed, inner = experts(config, "mlp.gate"), config.shared_intermediate_size
    return replace(found, mlp=replace(routed, shared=mlp(config, inner, _NAMES) if inner else None))


def attention(config: ModelConfig) -> LatentAttentionSpec:
    """Return latent attention."""
    sizes, heads, hidden = config.latent, config.num_attention_heads, config.hidden_size
    assert sizes is not None
    assert config.attention_scale is not None
    width, query_rank, names = sizes.plain + sizes.rotated, sizes.query_rank, "self_attn."
    q_name = "q_proj" if query_rank is None else "q_b_proj"
    spec = LatentAttentionSpec(
        heads,
        sizes,
        q=linear(names + q_name, heads * width, query_rank or hidden),
        kv_a=linear(names + "kv_a_proj_with_mqa", sizes.row, hidden, config.qkv_bias),
        kv_norm=NormSpec(names + "kv_a_layernorm.weight", sizes.rank, eps=_LATENT_EPS),
        kv_b=linear(names + "kv_b_proj", heads * (sizes.plain + sizes.value), sizes.rank),
        o=linear(names + "o_proj", hidden, heads * sizes.value, config.o_bias),
        rope=config.rope,
        scale=config.attention_scale,
    )
    if query_rank is None:
        return spec
    return replace(
        spec,
        q_a=linear(names + "q_a_proj", query_rank, hidden, config.qkv_bias),
        q_norm=NormSpec(names + "q_a_layernorm.weight", query_rank, eps=_LATENT_EPS),
    )
