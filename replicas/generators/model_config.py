"""Parser of Hugging Face model configurations, which refuses models that we cannot compute.

Reads config.json itself (the keys of transformers 5 and the older ones), so transformers is not
needed at run time. What is particular to a model family is in the family's module, which
`FAMILIES` names. Imports no torch, so that any module may inspect a model folder.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from replicas.errors import ConfigError
from replicas.generators.layer_specs import ExpertsConfig
from replicas.generators.quantization import read_quantization
from replicas.generators.rope_config import RopeConfig, RopeDefaults, read_rope
from replicas.kv_groups import KVSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import EngineConfig
    from replicas.generators.layer_specs import (
        Activation,
        DeltaConfig,
        LatentConfig,
        LayerSpec,
        NormKind,
    )
    from replicas.generators.quantization import Quantization

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "SeedOssForCausalLM": "seed_oss",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Qwen3NextForCausalLM": "qwen3_next",
}
"""Architecture name -> family (the configuration's model_type), a module of `_MODELS`."""
_MODELS = "replicas.generators.torch.models"

_SLIDING = "sliding_attention"
RECURRENT = "linear_attention"
"""Layer type of the layers with a state of one size."""
_MOST_LAYERS, _MOST_EXPERTS = 4096, 65536
"""Each is described by itself: more would take all memory before anything is checked."""
_POSITION_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys for the longest sequence. Source: vLLM's `_get_and_verify_max_len`."""


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
        sliding_window: Tokens that a position sees in layers with a window; None if no layer has
            one.
        rope: Rotary embedding settings.
        eos_token_id: Every token that ends a generation, from config.json, then
            generation_config.json.
        dtype: Dtype that the weights were saved in, for example "bfloat16"; "" if not stated.
        experts: Experts that replace MLPs; None if no layer has any.
        states_max_positions: Its longest context is stated, not the default of its family.
        layer_types: Of each layer "full_attention", "sliding_attention" or "linear_attention";
            empty if all are equal.
        norm_kind: Kind of all norms.
        activation: Function of the MLPs' gates.
        local_rope: Rotary embedding of the layers with a window, if they have another.
        attention_scale: Factor of attention scores; None is head_dim ** -0.5.
        attention_soft_cap: See ``AttentionSpec.soft_cap``.
        logits_soft_cap: Logits x become cap * tanh(x / cap); None leaves them.
        embedding_scale: Factor of the embedding's rows, rounded to the model's dtype.
        mlp_layers: Layers with an MLP in a model with experts.
        shared_intermediate_size: Size inside the expert of all tokens, if there is one.
        quantization: How weights may be stored, if not as they are.
        num_nextn_predict_layers: Layers behind the others that only draft tokens; not computed.
        latent: Sizes of latent attention; None if keys and values are cached per head.
        delta: Sizes of the recurrent layers, if there are any.
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
    layer_types: tuple[str, ...] = ()
    norm_kind: NormKind = "rms"
    activation: Activation = "silu"
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    mlp_layers: tuple[int, ...] = ()
    shared_intermediate_size: int = 0
    quantization: Quantization | None = None
    num_nextn_predict_layers: int = 0
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None

    def has_window(self, layer: int) -> bool:
        """Return whether a layer sees a window of its sequence only."""
        if self.sliding_window is None:
            return False
        return not self.layer_types or self.layer_types[layer] == _SLIDING

    def key_width(self) -> int:
        """Return how many numbers of a token attention reads as a key: a head's, or a latent."""
        return self.head_dim if self.latent is None else self.latent.row

    def kv_specs(self, dtype: str) -> tuple[KVSpec, ...]:
        """Return the KV of each layer, with elements of a dtype; states have at least float32."""
        spec = KVSpec(heads=self.num_key_value_heads, width=self.head_dim, dtype=dtype)
        if self.latent is not None:
            spec = KVSpec(heads=1, width=self.latent.row, dtype=dtype, kind="latent", planes=1)
        specs = [spec] * self.num_hidden_layers
        if self.delta is not None:
            wide = "float64" if dtype == "float64" else "float32"
            state = KVSpec(heads=1, width=self.delta.state, dtype=wide, kind="state", planes=1)
            specs = [state if self.layer_types[i] == RECURRENT else spec for i in range(len(specs))]
        return tuple(specs)


class Family(Protocol):
    """Module of a model family."""

    def parse(self, raw: RawConfig) -> ModelConfig:
        """Read a configuration.

        Raises:
            ConfigError: The family needs something that is not supported; names it.
            KeyError: A key is missing.
        """
        ...

    def layer(self, config: ModelConfig, index: int) -> LayerSpec:
        """Describe a layer."""
        ...


def _module_of(family: str) -> Family:
    return cast("Family", importlib.import_module(f"{_MODELS}.{family}"))


@lru_cache(maxsize=16)
def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the description of each layer of a model of one of `FAMILIES`."""
    layer = _module_of(config.family).layer
    return tuple(layer(config, index) for index in range(config.num_hidden_layers))


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a family assumes where config.json states nothing.

    Attributes:
        max_positions: Longest context, in tokens.
        kv_heads: KV heads; None is as many as query heads.
        head_dim: Size of a head; None is hidden_size / num_attention_heads.
        is_tied: The output layer is the embedding.
        rope: Of the rotary embedding.
        eps: Added to the variance in every norm.
        activation: Key of the activation and its only supported value.
        may_be_recurrent: Layers may have type `RECURRENT`.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    is_tied: bool = False
    rope: RopeDefaults = RopeDefaults()  # noqa: RUF009 - frozen
    eps: float = 1e-6
    activation: tuple[str, str] = ("hidden_act", "silu")
    may_be_recurrent: bool = False


@dataclass(frozen=True, slots=True)
class RawConfig:
    """A config.json that is being read.

    Attributes:
        values: The parsed file.
        name_or_path: Model folder, also used in messages.
        architectures: Architecture names.
        family: One of `FAMILIES`.
        generation: The parsed generation_config.json; empty if there is none.
    """

    values: Mapping[str, Any]
    name_or_path: str
    architectures: tuple[str, ...]
    family: str
    generation: Mapping[str, Any]

    def flag(self, key: str) -> bool:
        """Return a truth value; False if it is missing."""
        return bool(self.values.get(key, False))

    def window(self, default: int | None = 4096) -> int | None:
        """Return the window of the layers that have one, or None.

        Args:
            default: The window where the key is missing.
        """
        layer_types = self.values.get("layer_types")
        if layer_types is not None and _SLIDING not in layer_types:
            return None
        window = self.values.get("sliding_window", default)
        return None if window is None else int(window)

    def layer_types(self, full_every: int = 0) -> tuple[str, ...]:
        """Return the type of each layer; empty if none is stated.

        Args:
            full_every: Where none is stated, the last of so many layers sees all tokens, and the
                others a window; 0 for empty.

        Raises:
            ConfigError: There is another number of them than of layers.
        """
        found = tuple(map(str, self.values.get("layer_types") or ()))
        num_layers = int(self.values["num_hidden_layers"])
        if found and len(found) != num_layers:
            raise ConfigError(f"{len(found)} layer_types for num_hidden_layers {num_layers}")
        if full_every and not found:
            kinds = _SLIDING, "full_attention"
            return tuple(kinds[(index + 1) % full_every == 0] for index in range(num_layers))
        return found

    def experts(
        self, count: str, size: str, *, is_normalised: bool, rounds_shares: bool = False
    ) -> ExpertsConfig:
        """Return the settings of experts.

        Args:
            count: Key of the number of experts.
            size: Key of the size inside one.
            is_normalised: See `ExpertsConfig`.
            rounds_shares: See `ExpertsConfig`.

        Raises:
            ConfigError: A token has more experts than there are, or none.
            KeyError: A key is missing.
        """
        num_experts = int(self.values[count])
        num_per_token = int(self.values["num_experts_per_tok"])
        if not 1 <= num_per_token <= num_experts <= _MOST_EXPERTS:
            raise ConfigError(
                f"num_experts_per_tok {num_per_token} is not from 1 to the number of experts, "
                f"{num_experts}, or this is over {_MOST_EXPERTS}"
            )
        inner = int(self.values[size])
        return ExpertsConfig(num_experts, num_per_token, inner, is_normalised, rounds_shares)

    def local_rope(self, config: ModelConfig, defaults: RopeDefaults) -> RopeConfig:
        """Return the rotary embedding of layers with a window, where theirs is another.

        Older configurations scale only that of the others, and state its base elsewhere.
        """
        older = ("rope_theta", "rope_scaling")
        values = {key: value for key, value in self.values.items() if key not in older}
        return read_rope(values, config.head_dim, config.max_position_embeddings, defaults)

    def refuse(self, *keys: str) -> None:
        """Refuse settings of the family that nothing here computes.

        Raises:
            ConfigError: One of them is set.
        """
        for key in keys:
            if self.values.get(key):
                raise ConfigError(f"{self.name_or_path}: {key} {self.values[key]} is not supported")

    def model(self, defaults: Defaults) -> ModelConfig:
        """Return what all families have, read alike: no biases, norms of heads, windows, experts.

        Raises:
            ConfigError: A value is not supported, or two contradict each other; names them.
            KeyError: A key is missing.
        """
        raw = self.values
        _refuse_unsupported(raw, self.name_or_path, defaults)
        num_layers = int(raw["num_hidden_layers"])
        if not 1 <= num_layers <= _MOST_LAYERS:
            raise ConfigError(f"num_hidden_layers {num_layers} is not from 1 to {_MOST_LAYERS}")
        heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        kv_heads = int(raw.get("num_key_value_heads", defaults.kv_heads) or heads)
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of {kv_heads=}")
        head_dim = int(raw.get("head_dim") or defaults.head_dim or hidden_size // heads)
        if head_dim % 2:
            raise ConfigError(f"{head_dim=} is odd; rotary embeddings need pairs")
        stated_positions = [int(raw[key]) for key in _POSITION_KEYS if raw.get(key)]
        # Source: vLLM's `_get_and_verify_max_len`.
        max_positions = min(stated_positions, default=defaults.max_positions)
        rope = read_rope(raw, head_dim, max_positions, defaults.rope)
        return ModelConfig(
            name_or_path=self.name_or_path,
            architectures=self.architectures,
            family=self.family,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=_scaled_positions(rope, max_positions),
            rms_norm_eps=float(raw.get("rms_norm_eps", defaults.eps)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", defaults.is_tied)),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            sliding_window=None,
            rope=rope,
            eos_token_id=_eos_token_ids(raw, self.generation),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
            states_max_positions=bool(stated_positions),
            quantization=read_quantization(raw, self.name_or_path),
            num_nextn_predict_layers=int(raw.get("num_nextn_predict_layers") or 0),
        )


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
        ConfigError: They do not divide; gives the numbers.
    """
    if min(max_batch_size, max_seq_len, num_lanes) < 1 or max_batch_size % num_lanes:
        raise ConfigError(
            f"{max_batch_size=} must be a positive multiple of tt_data_parallel {num_lanes}, and "
            f"{max_seq_len=} positive"
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
    return _module_of(family).parse(RawConfig(raw, name_or_path, architectures, family, generation))


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


def _refuse_unsupported(raw: Mapping[str, Any], name: str, defaults: Defaults) -> None:
    key, supported = defaults.activation
    activation = raw.get(key, supported)
    if activation != supported:
        raise ConfigError(f"{name}: {key} {activation!r} is not supported, only {supported!r}")
    other = RECURRENT if defaults.may_be_recurrent else _SLIDING
    layer_types = set(raw.get("layer_types") or ()) - {"full_attention", other}
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


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in (raw, generation):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)
