"""Parser of Hugging Face model configurations, which refuses models that we cannot compute.

Defines the supported families, activations, rope types and attention windows. Reads config.json
itself (the keys of transformers 5 and the older ones), so transformers is not needed at run time.
Imports no torch, so that any module may inspect a model folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas.errors import ConfigError
from replicas.kv_groups import KVSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import EngineConfig

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architecture name -> family (the configuration's model_type)."""

_DEFAULT_MAX_POSITIONS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "mixtral": 131072,
    "qwen3_moe": 32768,
}  # fmt: skip
_POSITION_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys for the longest sequence. Source: vLLM's `_get_and_verify_max_len`."""
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "mixtral": 8, "qwen3_moe": 4}
_DEFAULT_THETA = {"mixtral": 1e6}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding settings.

    Attributes:
        rope_type: "default", "linear", "dynamic", "yarn" or "llama3".
        theta: Base of the frequencies.
        factor: Divisor of the frequencies: of all for "linear", of the low ones for "llama3" and
            "yarn". For "dynamic" how much longer the context is than the original one.
        low_freq_factor: For "llama3": wavelengths over original length / this are divided.
        high_freq_factor: For "llama3": wavelengths under original length / this are unchanged.
        original_max_position_embeddings: Context length before scaling, in tokens.
        attention_factor: Factor of all cosines and sines; 1 except for "yarn".
        beta_fast: For "yarn": pairs that turn more often in the original length are unchanged.
        beta_slow: For "yarn": pairs that turn less often in the original length are divided.
        is_truncated: For "yarn": the range between these two is widened to whole pairs.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Settings of the experts that replace each layer's MLP.

    Attributes:
        num_experts: Experts of a layer.
        num_per_token: Experts that compute each token.
        intermediate_size: Size inside one expert.
        is_normalised: The weights of a token's experts are scaled to sum to 1.
        rounds_shares: These weights are rounded to the model's dtype.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    is_normalised: bool
    rounds_shares: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Properties of a model that the engine and the torch generator need.

    Attributes:
        name_or_path: Model folder.
        architectures: Architecture names, the first one counts.
        family: One of `FAMILIES`; "" if only third-party classes compute it.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads.
        head_dim: Size of one head; need not be hidden_size / num_attention_heads.
        hidden_size: Size of a token's hidden state.
        intermediate_size: Size inside the MLP.
        vocab_size: Rows of the embedding and of the logits.
        max_position_embeddings: Longest context of the model, in tokens.
        rms_norm_eps: Added to the variance in every norm.
        tie_word_embeddings: The output layer is the embedding.
        qkv_bias: Query, key and value projections have biases.
        o_bias: The attention's output projection has a bias.
        mlp_bias: The three MLP projections have biases.
        qk_norm: Queries and keys are normalised per head.
        sliding_window: Tokens that a position sees, or None for all.
        rope: Rotary embedding settings.
        eos_token_id: Every token that ends a generation, from config.json, then
            generation_config.json.
        dtype: Dtype that the weights were saved in, for example "bfloat16"; "" if not stated.
        experts: Experts that replace each layer's MLP; None for an MLP.
        states_max_positions: Its longest context is stated, not the default of its family.
    """

    name_or_path: str
    architectures: tuple[str, ...]
    family: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    rope: RopeConfig
    eos_token_id: tuple[int, ...]
    dtype: str
    experts: ExpertsConfig | None = None
    states_max_positions: bool = True

    def kv_specs(self, dtype: str) -> tuple[KVSpec, ...]:
        """Return the KV of each layer, with elements of a dtype."""
        spec = KVSpec(heads=self.num_key_value_heads, width=self.head_dim, dtype=dtype)
        return (spec,) * self.num_hidden_layers


def load_hf_config(folder: str | Path) -> ModelConfig:
    """Parse ``folder``/config.json (and generation_config.json for end tokens, if there).

    Raises:
        ConfigError: There is no config.json, it is not JSON, a key is missing or of the wrong type,
            or the model needs something that is not supported; the message names it.
    """
    path = Path(folder)
    raw = _read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return parse_hf_config(raw, str(path), generation)


def load_engine_model(config: EngineConfig) -> ModelConfig:
    """Return the configuration of an engine's model, computed by this package or a third party.

    A named generator may extend one of this package's, which needs the full configuration, or
    compute an architecture that this package does not know.

    Raises:
        ConfigError: The folder cannot be read, or this package would have to compute an
            architecture that it does not know.
    """
    try:
        return load_hf_config(config.model)
    except ConfigError as ours:
        if config.generator is None or config.uses_native_generator:
            raise
        try:
            return load_foreign_config(config.model)
        except ConfigError as theirs:
            raise theirs from ours


def read_architecture(folder: str | Path) -> str | None:
    """Return the first architecture in ``folder``/config.json, or None.

    Raises:
        ConfigError: There is no config.json, it is not JSON, or its architectures are not a list of
            names.
    """
    path = Path(folder)
    return next(iter(_architectures(_read_json(path / "config.json"), str(path))), None)


def load_foreign_config(folder: str | Path) -> ModelConfig:
    """Read the configuration of a model that a third-party class computes.

    Accepts any architecture that transformers knows. Only sizes, positions and end tokens are read,
    not how to compute, so that this package's generators refuse the result. For an image-text model
    the text part counts, and where layers differ the one with the most KV.

    Raises:
        ConfigError: The folder cannot be read or lacks values; names the missing ones.
    """
    path = Path(folder)
    # Read the file first: transformers would look up a missing folder as a name on Hugging Face.
    architectures = _architectures(_read_json(path / "config.json"), str(path))

    from transformers import AutoConfig  # takes seconds; only these models need it

    try:
        whole = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # each of its many classes checks its values in ways of its own
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"transformers cannot read the configuration of {path}: {reason}") from (
            error
        )
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    try:
        text = _layer_with_most_kv(whole.get_text_config())
        heads = int(text.num_attention_heads)
        return ModelConfig(
            name_or_path=str(path),
            architectures=architectures,
            family="",
            num_hidden_layers=int(text.num_hidden_layers),
            num_attention_heads=heads,
            num_key_value_heads=_kv_heads(text),
            head_dim=_head_dim(text),
            hidden_size=int(text.hidden_size),
            intermediate_size=int(text.intermediate_size),
            vocab_size=int(text.vocab_size),
            max_position_embeddings=int(text.max_position_embeddings),
            rms_norm_eps=float(getattr(text, "rms_norm_eps", 0.0)),
            tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            sliding_window=None,
            rope=RopeConfig("default", 0.0),
            eos_token_id=_eos_token_ids(whole.to_dict(), {**text.to_dict(), **generation}),
            dtype=str(text.dtype or whole.dtype or "").removeprefix("torch."),
        )
    except (AttributeError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}/config.json: {error}") from error


def _layer_with_most_kv(text: Any) -> Any:  # noqa: ANN401 - of one of transformers' many classes
    """Return the text configuration, or where layers differ that of the one with the most KV."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    return max(text.per_layer_config, key=lambda layer: _kv_heads(layer) * _head_dim(layer))


def _kv_heads(text: Any) -> int:  # noqa: ANN401 - of one of transformers' many classes
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _head_dim(text: Any) -> int:  # noqa: ANN401 - of one of transformers' many classes
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def to_model_config(hf_config: Any) -> ModelConfig:  # noqa: ANN401 - duck-typed transformers object
    """Return our own configuration unchanged, or convert a transformers one by ``to_dict()``.

    Raises:
        ConfigError: The object is neither, or describes an unsupported model.
    """
    if isinstance(hf_config, ModelConfig):
        if hf_config.family not in FAMILIES.values():
            # Parsing again raises an error that names the unsupported part.
            return load_hf_config(hf_config.name_or_path)
        return hf_config
    if not hasattr(hf_config, "to_dict"):
        raise ConfigError(
            f"hf_config must be a ModelConfig or have to_dict(), got {type(hf_config).__name__}"
        )
    return parse_hf_config(hf_config.to_dict(), str(getattr(hf_config, "name_or_path", "")))


def check_sizes(config: ModelConfig, max_batch_size: int, max_seq_len: int, num_lanes: int) -> None:
    """Refuse sizes that a generator does not support.

    Raises:
        ConfigError: They do not divide, or exceed the attention window; gives the numbers.
    """
    if min(max_batch_size, max_seq_len, num_lanes) < 1 or max_batch_size % num_lanes:
        raise ConfigError(
            f"{max_batch_size=} must be a positive multiple of tt_data_parallel {num_lanes}, and "
            f"{max_seq_len=} positive"
        )
    window = config.sliding_window
    if window is not None and window < max_seq_len:
        raise ConfigError(
            f"{config.name_or_path}: sliding window {window} is shorter than {max_seq_len=}; "
            f"set max_seq_len to {window} or less"
        )


def parse_hf_config(
    raw: Mapping[str, Any], name_or_path: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Turn the dictionary of a config.json into a ``ModelConfig``.

    Args:
        raw: The parsed config.json.
        name_or_path: Model folder, also used in messages.
        generation: The parsed generation_config.json, if any.

    Raises:
        ConfigError: A key is missing or of the wrong type, or the model is not supported.
    """
    try:
        return _parse(raw, name_or_path, generation or {})
    except KeyError as error:
        raise ConfigError(f"{name_or_path}/config.json has no {error}") from error
    except (AttributeError, ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"{name_or_path}/config.json: {error}") from error


def _parse(raw: Mapping[str, Any], name_or_path: str, generation: Mapping[str, Any]) -> ModelConfig:
    architectures = _architectures(raw, name_or_path)
    family = _family(raw, architectures, name_or_path)
    _refuse_unsupported(raw, name_or_path)
    heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    kv_heads = int(raw.get("num_key_value_heads", _DEFAULT_KV_HEADS.get(family)) or heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of {kv_heads=}")
    head_dim = int(raw.get("head_dim") or (128 if family == "qwen3" else hidden_size // heads))
    if head_dim % 2:
        raise ConfigError(f"{head_dim=} is odd; rotary embeddings need pairs")
    stated_positions = [int(raw[key]) for key in _POSITION_KEYS if raw.get(key)]
    # Source: vLLM's `_get_and_verify_max_len`.
    max_positions = min(stated_positions, default=_DEFAULT_MAX_POSITIONS[family])
    rope = _rope(raw, max_positions, _DEFAULT_THETA.get(family, 10000.0))
    if rope.rope_type == "dynamic" and head_dim == 2:
        raise ConfigError(f"{head_dim=} is too small for dynamic rope scaling")
    attention_bias = family in ("llama", "qwen3", "qwen3_moe") and bool(
        raw.get("attention_bias", False)
    )
    return ModelConfig(
        name_or_path=name_or_path,
        architectures=architectures,
        family=family,
        num_hidden_layers=int(raw["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=_scaled_positions(rope, max_positions),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=_sliding_window(raw, family),
        rope=rope,
        eos_token_id=_eos_token_ids(raw, generation),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
        experts=_experts(raw, family),
        states_max_positions=bool(stated_positions),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} does not contain a JSON object")
    return raw


def _architectures(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = raw.get("architectures") or []
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{name}: architectures must be a list of names, got {found!r}")
    return tuple(found)


def _family(raw: Mapping[str, Any], architectures: tuple[str, ...], name: str) -> str:
    if not architectures:  # a bare configuration object knows only its type
        family = str(raw.get("model_type", ""))
        if family in FAMILIES.values():
            return family
    elif architectures[0] in FAMILIES:
        return FAMILIES[architectures[0]]
    found = architectures[0] if architectures else raw.get("model_type")
    raise ConfigError(f"{name}: architecture {found!r} is not one of {', '.join(FAMILIES)}")


def _refuse_unsupported(raw: Mapping[str, Any], name: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{name}: hidden_act {activation!r} is not supported, only 'silu'")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else "?"
        raise ConfigError(f"{name}: weights quantised by {method!r} are not supported")
    layer_types = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if layer_types:
        raise ConfigError(f"{name}: layer_types {sorted(layer_types)} are not supported")


def _scaled_positions(rope: RopeConfig, max_positions: int) -> int:
    """Return the longest sequence with rope scaling.

    A "llama3" model states its scaled length. Source: vLLM's `_get_and_verify_max_len`.
    """
    match rope.rope_type:
        case "linear" | "dynamic":
            return int(max_positions * rope.factor)
        case "yarn":
            return int(rope.original_max_position_embeddings * rope.factor)
        case _:
            return max_positions


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    """Return the attention window of any layer that has one, or None."""
    layer_types = raw.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    # Llama has no window, Mistral's is always on, Qwen's has a switch that defaults to off.
    is_used = family in ("mistral", "mixtral") or (
        family != "llama" and bool(raw.get("use_sliding_window"))
    )
    # transformers' default where the key is missing
    window = raw.get("sliding_window", None if family == "mixtral" else 4096)
    return int(window) if is_used and window is not None else None


def _experts(raw: Mapping[str, Any], family: str) -> ExpertsConfig | None:
    """Return the expert settings of the families that have experts, or None."""
    if family not in ("mixtral", "qwen3_moe"):
        return None
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("models that mix MLP layers and expert layers are not supported")
    is_mixtral = family == "mixtral"
    found = ExpertsConfig(
        num_experts=int(raw["num_local_experts"] if is_mixtral else _num_qwen_experts(raw)),
        num_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["intermediate_size" if is_mixtral else "moe_intermediate_size"]),
        is_normalised=is_mixtral or bool(raw.get("norm_topk_prob", False)),
        rounds_shares=not is_mixtral,
    )
    if not 1 <= found.num_per_token <= found.num_experts:
        raise ConfigError(
            f"num_experts_per_tok {found.num_per_token} is not from 1 to the number of experts, "
            f"{found.num_experts}"
        )
    return found


def _num_qwen_experts(raw: Mapping[str, Any]) -> int:
    return int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"])


def _rope(raw: Mapping[str, Any], max_positions: int, default_theta: float) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), else ``rope_theta`` and ``rope_scaling``."""
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(settings.get("rope_theta") or raw.get("rope_theta") or default_theta)
    if any(isinstance(value, dict) for value in settings.values()):
        raise ConfigError(f"rope settings per layer type ({', '.join(settings)}) are not supported")
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    partial = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported, only 1")
    # transformers prefers the key outside of the settings, too.
    original = int(
        raw.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or max_positions
    )
    match rope_type:
        case "default":
            return RopeConfig("default", theta)
        case "linear" | "dynamic":
            factor = _rope_factor(settings["factor"])
            return RopeConfig(
                rope_type, theta, factor, original_max_position_embeddings=max_positions
            )
        case "yarn":
            return _yarn(settings, theta, original, max_positions)
        case "llama3":
            return RopeConfig(
                "llama3",
                theta,
                factor=float(settings["factor"]),
                low_freq_factor=float(settings["low_freq_factor"]),
                high_freq_factor=float(settings["high_freq_factor"]),
                original_max_position_embeddings=original,
            )
        case _:
            known = "'default', 'linear', 'dynamic', 'yarn' and 'llama3'"
            raise ConfigError(f"rope type {rope_type!r} is not supported, only {known}")


def _yarn(
    settings: Mapping[str, Any], theta: float, original: int, max_positions: int
) -> RopeConfig:
    """Read the settings of type "yarn".

    Source: transformers ``modeling_rope_utils.py``, `_compute_yarn_parameters`.
    """
    stated = settings["factor"]
    factor = _rope_factor(max_positions / original if stated is None else stated)
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        attention_factor = _yarn_mscale(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        is_truncated=bool(settings.get("truncate", True)),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _rope_factor(value: object) -> float:
    factor = float(value)  # type: ignore[arg-type]
    if not 1.0 <= factor < math.inf:
        raise ConfigError(f"rope factor {factor} is not a finite number of at least 1")
    return factor


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in (raw, generation):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)
