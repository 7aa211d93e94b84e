"""Read or draw a model's weights and make its layers.

A folder that holds other names, shapes or dtypes than the configuration implies is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from replicas.errors import ConfigError, ModelLoadError
from replicas.generators.checkpoint import (
    check_checkpoint,
    expected_weights,
    final_norm,
    unused_layers,
)
from replicas.generators.expert_placement import place_experts
from replicas.generators.model_config import layer_specs
from replicas.generators.quantization import stored_weights
from replicas.generators.torch.dequantize import dequantize
from replicas.generators.torch.experts import ExpertDispatch
from replicas.generators.torch.layers import LayerMaker
from replicas.generators.torch.linear import make_linear

if TYPE_CHECKING:
    from replicas.generators.layer_specs import LayerSpec, Shape
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import CpuDevice
    from replicas.generators.quantization import Quantization
    from replicas.generators.torch.forward_pass import Norm
    from replicas.generators.torch.layers import DecoderLayer
    from replicas.generators.torch.linear import LinearLayer

Fetch: TypeAlias = Callable[..., torch.Tensor]
"""(name, index or None) -> a weight, or an entry of its first dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model.

    Attributes:
        embedding: (vocabulary, hidden).
        layers: In order.
        final_norm: Before the output layer.
        lm_head: hidden -> vocabulary; of the embedding's weight when tied.
    """

    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    lm_head: LinearLayer


def load_weights(
    config: ModelConfig, device: CpuDevice, max_seq_len: int | None = None
) -> ModelWeights:
    """Load, or draw, every weight in the device's dtype.

    Args:
        config: The model; its ``name_or_path`` is the folder.
        device: Dtype, load format, seed and progress callback ("weights", fraction).
        max_seq_len: Longest sequence in tokens, if it is known: windows of as many are none.

    Raises:
        ModelLoadError: The folder has no safetensors file, a file cannot be read, or names, shapes
            or dtypes differ from what the configuration implies; the message names them.
        ConfigError: The experts cannot be placed on the ranks of the device's gang.
    """
    shapes = expected_weights(config)
    if device.load_format == "random":
        return _assemble(config, device, random_source(shapes, device.seed), max_seq_len)
    folder = Path(config.name_or_path)
    unused = unused_layers(config)
    with open_safetensors(folder, shapes, config.quantization, unused) as fetch:
        return _assemble(config, device, fetch, max_seq_len)


def random_source(shapes: Mapping[str, Shape], seed: int) -> Fetch:
    """Return what draws a weight, or an entry of it, in float32; order does not matter.

    Args:
        shapes: As of ``expected_weights``.
        seed: Equal seeds give equal weights.
    """
    order = {name: index for index, name in enumerate(shapes)}

    def fetch(name: str, index: int | None = None) -> torch.Tensor:
        shape = shapes[name] if index is None else shapes[name][1:]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        key = seed * len(order) + order[name]
        # No name has a key below zero, so that no entry has the numbers of a whole tensor.
        entry = key if index is None else -1 - key * shapes[name][0] - index
        stream = torch.Generator().manual_seed(entry)
        return torch.randn(shape, generator=stream) * 0.02

    return fetch


@contextmanager
def open_safetensors(
    folder: Path,
    shapes: Mapping[str, Shape],
    quantization: Quantization | None = None,
    unused: tuple[str, ...] = (),
) -> Iterator[Fetch]:
    """Check the folder's files against the shapes, open them, and yield a reader by name.

    Args:
        folder: Of the model.
        shapes: As of ``expected_weights``.
        quantization: How some weights may be stored; they are read as float32.
        unused: As of ``unused_layers``.

    Raises:
        ModelLoadError: See `check_checkpoint`; or a file cannot be opened, or a layer without a
            bias has one that is not zero.
    """
    stored = check_checkpoint(folder, shapes, quantization, unused)
    weights = stored_weights(shapes, quantization, stored)
    with ExitStack() as stack:
        try:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in {tensor.file for tensor in stored.values()}
            }
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read the weights in {folder}: {error}") from error

        def read(name: str, index: int | None) -> torch.Tensor:
            file = files[stored[name].file]
            found: torch.Tensor = (
                file.get_tensor(name) if index is None else file.get_slice(name)[index]
            )
            return found

        def fetch(name: str, index: int | None = None) -> torch.Tensor:
            parts = [read(part, index) for part in weights[name]]
            if quantization is None or len(parts) == 1:
                return parts[0]
            return dequantize(quantization, parts, name, shapes[name])

        wanted = {part for parts in weights.values() for part in parts}
        for name in stored.keys() - wanted:
            if name.endswith(".bias") and read(name, None).any():
                raise ModelLoadError(
                    f"{name} in {stored[name].file} is not zero, and by config.json the layer has "
                    "no bias; use the config.json that was saved with these weights"
                )
        yield fetch


def _assemble(
    config: ModelConfig, device: CpuDevice, fetch: Fetch, max_seq_len: int | None
) -> ModelWeights:
    def get(name: str, index: int | None = None, dtype: torch.dtype = device.dtype) -> torch.Tensor:
        return fetch(name, index).to(dtype)

    dispatch = _dispatch(config, device)
    embedding = get("model.embed_tokens.weight")
    layers = []
    for index, spec in enumerate(layer_specs(config)):
        get_under = partial(_get_under, get, f"model.layers.{index}.")
        maker = LayerMaker(get_under, config.rms_norm_eps, dispatch)
        layers.append(maker.layer(_without_long_window(spec, max_seq_len)))
        if device.progress is not None:
            device.progress("weights", (index + 1) / config.num_hidden_layers)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=LayerMaker(get, config.rms_norm_eps).norm(final_norm(config)),
        lm_head=make_linear(
            embedding if config.tie_word_embeddings else get("lm_head.weight"), None
        ),
    )


def _get_under(get: Fetch, prefix: str, name: str, *rest: object, **named: object) -> torch.Tensor:
    return get(prefix + name, *rest, **named)


def _dispatch(config: ModelConfig, device: CpuDevice) -> ExpertDispatch | None:
    """Return the way to other ranks' experts, None without other ranks."""
    if device.exchange is None:
        return None
    if config.experts is None:
        raise ConfigError(
            f"{config.name_or_path} has no experts to share out, and its engines need not step "
            "together; remove gang_size"
        )
    size, table = device.exchange.size, device.expert_placement
    return ExpertDispatch(place_experts(config.experts.num_experts, size, table), device.exchange)


def _without_long_window(spec: LayerSpec, max_seq_len: int | None) -> LayerSpec:
    """Return a layer without a window that no sequence is longer than."""
    attention = spec.attention
    if attention.window is None or max_seq_len is None or attention.window < max_seq_len:
        return spec
    return replace(spec, attention=replace(attention, window=None))
