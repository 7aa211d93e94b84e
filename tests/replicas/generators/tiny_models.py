"""Tiny random-weight models of every family, made and saved by transformers itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa": ("Llama", {"num_key_value_heads": 2}),
    "llama-biases": (
        "Llama",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "mixtral": (
        "Mixtral",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
}
"""Case name -> (transformers class prefix, settings besides the common ones)."""

_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 9}),
    "qwen2-windows": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "qwen3-moe-mixed": ("Qwen3Moe", {
        "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 48, "num_experts": 4,
        "num_experts_per_tok": 2, "mlp_only_layers": [1],
    }),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 20}),
    "phi4-long": ("Phi3", {
        "num_key_value_heads": 2, "rope_parameters": _LONG_ROPE, "tie_word_embeddings": True,
        "original_max_position_embeddings": 64,
    }),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3", {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 9, "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "gemma2": ("Gemma2", {
        "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
    }),
    "gemma3": ("Gemma3", {
        "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 9, "layer_types": _LAYER_TYPES,
        "query_pre_attn_scalar": 32, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "seed-oss": ("SeedOss", {
        "num_key_value_heads": 2, "head_dim": 32, "attention_out_bias": True, "mlp_bias": True,
    }),
    "qwen2-moe": ("Qwen2Moe", {
        "num_key_value_heads": 2, "moe_intermediate_size": 48, "num_experts": 6,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0],
    }),
    "deepseek-v2": ("DeepseekV2", {
        **_LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7,
            "mscale_all_dim": 0.9, "original_max_position_embeddings": 64,
        },
    }),
    "deepseek-v3": ("DeepseekV3", {
        **_LATENT, "norm_topk_prob": True, "attention_bias": True, "rms_norm_eps": 1e-3,
    }),
    "gpt-oss": ("GptOss", {
        "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "sliding_window": 9,
        "num_experts_per_tok": 3, "swiglu_limit": 1.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 64,
        },
    }),
    "qwen3-next": ("Qwen3Next", {
        "num_hidden_layers": 4, "full_attention_interval": 2, "num_key_value_heads": 2,
        "head_dim": 32, "partial_rotary_factor": 0.25, "moe_intermediate_size": 48,
        "num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1], "initializer_range": 0.1, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
        "max_position_embeddings": 4096,
    }),
}  # fmt: skip
"""More families and layers, held to float32 logits and tokens of transformers' classes."""

SCALED_ROPES: Mapping[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-of-a-ratio": {
        "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32,
        "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn-of-mscales": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-of-a-factor": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.3},
}  # fmt: skip
"""Rope settings of "llama-gqa" that few tests need."""
_SCALED_CASES = {
    name: ("Llama", {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e4, **rope}})
    for name, rope in SCALED_ROPES.items()
}


def make_model(case: str) -> Any:
    """Build a model in float32 whose norms and biases are not the usual ones and zeros."""
    prefix, settings = {**CASES, **FAMILIES, **_SCALED_CASES}[case]
    text = getattr(transformers, f"{prefix}TextConfig", None)
    config = (text or getattr(transformers, f"{prefix}Config"))(**{**_COMMON, **settings})
    torch.manual_seed(sum(case.encode()))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    return model


def save_model(case: str, folder: Path, max_shard_size: str = "1GB") -> Any:
    """Build a model, save it in Hugging Face form, and return it."""
    model = make_model(case)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def in_true_float64(model: Any) -> Any:
    """Make a model compute in float64 throughout.

    transformers casts to float32 inside norms, routers and rotary embeddings whatever the model's
    dtype; an oracle must not, so these kinds of module get the same formulas without the casts.
    """
    model = model.double()
    # The other implementations of experts know no float64.
    model.config._experts_implementation = "eager"
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = _norm(module)
        elif name.endswith("TopKRouter"):
            module.forward = _router(module, is_normalised=getattr(module, "norm_topk_prob", True))
        elif name.endswith("RotaryEmbedding"):
            # model.double() rounded nothing: float32 frequencies are exact in float64.
            module.forward = _rotary(module.inv_freq)
    return model


def _norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return module.weight * (x * torch.rsqrt(variance + module.variance_epsilon))

    return forward


def _router(module: Any, *, is_normalised: bool) -> Callable[[torch.Tensor], Any]:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), module.weight)
        shares, experts = logits.softmax(-1).topk(module.top_k, dim=-1)
        if is_normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return logits, shares, experts

    return forward


def _rotary(
    inv_freq: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()

    return forward
