"""Read or draw a model's weights and fuse them for the forward pass.

Decides which weight names a configuration implies; a folder that holds other names or shapes is
refused. Knows Hugging Face names and safetensors files; computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from replicas.errors import ModelLoadError
from replicas.generators.torch.experts import Expert, Experts, own_experts
from replicas.generators.torch.linear import make_linear

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import CpuDevice, Exchange
    from replicas.generators.torch.linear import LinearLayer

Shape: TypeAlias = tuple[int, ...]
Fetch: TypeAlias = Callable[[str], torch.Tensor]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_NAMES_IN_MESSAGE = 8


class _ExpertNames(NamedTuple):
    """Names under a layer of its router and, of each expert by its number, its three matrices."""

    router: str
    gate: str
    up: str
    down: str


_EXPERT_NAMES = {
    "mixtral": _ExpertNames(
        "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2",
    ),
    "qwen3_moe": _ExpertNames(
        "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of a decoder layer up to and including its attention.

    Attributes:
        input_norm: (hidden,).
        qkv: hidden -> (heads + 2 * kv_heads) * head_dim: queries, keys, values.
        qk_norm: (heads + kv_heads, head_dim) norm weight per head, or None.
        o: heads * head_dim -> hidden.
        post_norm: (hidden,), before the MLP or the experts.
    """

    input_norm: torch.Tensor
    qkv: LinearLayer
    qk_norm: torch.Tensor | None
    o: LinearLayer
    post_norm: torch.Tensor

    def mlp_plus(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus the MLP or experts of normalised hidden states (T, hidden)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayerWeights(LayerWeights):
    """A layer with an MLP.

    Attributes:
        gate: hidden -> intermediate.
        up: hidden -> intermediate.
        down: intermediate -> hidden.
    """

    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer

    def mlp_plus(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus the MLP or experts of normalised hidden states (T, hidden)."""
        return self.down.plus(self.up.times(normed, self.gate.swish(normed)), x)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayerWeights(LayerWeights):
    """A layer with experts, of which other ranks may have some.

    Attributes:
        experts: hidden -> hidden.
    """

    experts: Experts

    def mlp_plus(self, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus the MLP or experts of normalised hidden states (T, hidden)."""
        return x + self.experts(normed)


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model.

    Attributes:
        embedding: (vocabulary, hidden).
        layers: In order.
        final_norm: (hidden,).
        lm_head: hidden -> vocabulary; of the embedding's weight when tied.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: LinearLayer


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Return the Hugging Face name and shape of every weight, in a fixed order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}

    def linear(name: str, rows: int, columns: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)

    linear("self_attn.q_proj", q_size, hidden, config.qkv_bias)
    linear("self_attn.k_proj", kv_size, hidden, config.qkv_bias)
    linear("self_attn.v_proj", kv_size, hidden, config.qkv_bias)
    linear("self_attn.o_proj", hidden, q_size, config.o_bias)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.experts is not None:
        names, inner = _EXPERT_NAMES[config.family], config.experts.intermediate_size
        linear(names.router, config.experts.num_experts, hidden, False)
        for i in range(config.experts.num_experts):
            linear(names.gate.format(i), inner, hidden, False)
            linear(names.up.format(i), inner, hidden, False)
            linear(names.down.format(i), hidden, inner, False)
        return shapes
    linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    return shapes


def load_weights(config: ModelConfig, device: CpuDevice) -> ModelWeights:
    """Load, or draw, and fuse every weight in the device's dtype.

    Args:
        config: The model; its ``name_or_path`` is the folder.
        device: Dtype, load format, seed and progress callback ("weights", fraction).

    Raises:
        ModelLoadError: The folder has no safetensors file, a file cannot be read, or names or
            shapes differ from what the configuration implies; the message names them.
    """
    shapes = expected_weights(config)
    if device.load_format == "random":
        return _assemble(config, device, random_source(shapes, device.seed))
    with open_safetensors(Path(config.name_or_path), shapes) as fetch:
        return _assemble(config, device, fetch)


def random_source(shapes: Mapping[str, Shape], seed: int) -> Fetch:
    """Return what draws a weight by its name, float32; the order of asking does not matter.

    Args:
        shapes: As of ``expected_weights``.
        seed: Equal seeds give equal weights.
    """
    order = {name: index for index, name in enumerate(shapes)}

    def fetch(name: str) -> torch.Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        stream = torch.Generator().manual_seed(seed * len(order) + order[name])
        return torch.randn(shape, generator=stream) * 0.02

    return fetch


@contextmanager
def open_safetensors(folder: Path, shapes: Mapping[str, Shape]) -> Iterator[Fetch]:
    """Open every file of the folder, check names and shapes, and yield a reader by name.

    Args:
        folder: Of the model.
        shapes: As of ``expected_weights``.

    Raises:
        ModelLoadError: There is no safetensors file, one cannot be read, or names or shapes differ.
    """
    with ExitStack() as stack:
        try:
            files = [
                stack.enter_context(safe_open(path, framework="pt")) for path in _files(folder)
            ]
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read the weights in {folder}: {error}") from error
        holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        _check_names(folder, shapes, holder)
        wrong = [
            f"{name} {found} instead of {shape}"
            for name, shape in shapes.items()
            if (found := tuple(holder[name].get_slice(name).get_shape())) != shape
        ]
        if wrong:
            raise ModelLoadError(
                f"weights in {folder} do not have the shapes of config.json: {_listed(wrong)}"
            )
        yield lambda name: holder[name].get_tensor(name)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{index} has no usable weight_map: {error!r}") from error
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ModelLoadError(f"{folder} contains neither {_SINGLE} nor {_INDEX}")


def _check_names(folder: Path, shapes: Mapping[str, Shape], found: Mapping[str, object]) -> None:
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelLoadError(f"weights missing in {folder}: {_listed(missing)}")
    unexpected = [name for name in found if name not in shapes and not _is_redundant(name)]
    if unexpected:
        raise ModelLoadError(f"unexpected weights in {folder}: {_listed(unexpected)}")


def _is_redundant(name: str) -> bool:
    """Tell names that some checkpoints carry although the configuration implies their values.

    ``lm_head.weight`` gets here only when the embeddings are tied.
    """
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_MESSAGE])
    more = len(names) - _MAX_NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown


def _assemble(config: ModelConfig, device: CpuDevice, fetch: Fetch) -> ModelWeights:
    def get(name: str) -> torch.Tensor:
        return fetch(name).to(device.dtype).contiguous()

    embedding = get("model.embed_tokens.weight")
    layers = []
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        layers.append(_fuse_layer(config, partial(_get_under, get, prefix), device.exchange))
        if device.progress is not None:
            device.progress("weights", (index + 1) / config.num_hidden_layers)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=get("model.norm.weight"),
        lm_head=make_linear(
            embedding if config.tie_word_embeddings else get("lm_head.weight"), None
        ),
    )


def _get_under(get: Fetch, prefix: str, name: str) -> torch.Tensor:
    return get(prefix + name)


def _fuse_layer(config: ModelConfig, get: Fetch, exchange: Exchange | None) -> LayerWeights:
    def linear(has_bias: bool, *names: str) -> LinearLayer:
        weight = torch.cat([get(f"{name}.weight") for name in names])
        bias = torch.cat([get(f"{name}.bias") for name in names]) if has_bias else None
        return make_linear(weight, bias)

    attention: dict[str, Any] = {
        "input_norm": get("input_layernorm.weight"),
        "qkv": linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "qk_norm": _fuse_qk_norm(config, get) if config.qk_norm else None,
        "o": linear(config.o_bias, "self_attn.o_proj"),
        "post_norm": get("post_attention_layernorm.weight"),
    }
    if config.experts is not None:
        names, linear_of = _EXPERT_NAMES[config.family], partial(linear, False)
        own = [
            Expert(*(linear_of(name.format(i)) for name in (names.gate, names.up, names.down)))
            for i in own_experts(config.experts.num_experts, exchange)
        ]
        experts = Experts(config.experts, linear_of(names.router), own, exchange)
        return ExpertLayerWeights(**attention, experts=experts)
    return DenseLayerWeights(
        **attention,
        gate=linear(config.mlp_bias, "mlp.gate_proj"),
        up=linear(config.mlp_bias, "mlp.up_proj"),
        down=linear(config.mlp_bias, "mlp.down_proj"),
    )


def _fuse_qk_norm(config: ModelConfig, get: Fetch) -> torch.Tensor:
    q_norm = get("self_attn.q_norm.weight").expand(config.num_attention_heads, -1)
    k_norm = get("self_attn.k_norm.weight").expand(config.num_key_value_heads, -1)
    return torch.cat((q_norm, k_norm))
