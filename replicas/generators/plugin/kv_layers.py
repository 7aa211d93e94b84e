"""The KV cache that a plugin class is asked for: one shape per layer, as one chip holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicas.errors import ConfigError
from replicas.generators.plugin.shim import vllm_config, vllm_stand_in

if TYPE_CHECKING:
    import torch

    from replicas.generators.plugin.signatures import ModelSignature
    from replicas.generators.protocol import KVCache, KVCacheShape


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """What `allocate_kv_cache_per_layer` takes, and what it means for the page tables.

    Attributes:
        layers: (shape on one chip, dtype, buffer) of each layer; no two share a buffer.
        has_windows: Some layers attend to a window: each is given a page table of its own.
    """

    layers: list[tuple[KVCacheShape, torch.dtype, int]]
    has_windows: bool


def kv_cache_spec(
    model: Any,  # noqa: ANN401 - of a class that is not known here
    signature: ModelSignature,
    hf_config: Any,  # noqa: ANN401 - a transformers configuration: no base worth naming
    shape: KVCacheShape,
    dtype: torch.dtype,
) -> list[Any] | None:
    """The model's own records of its layers' KV.

    Args:
        model: The model, whose class has the method.
        signature: Of that class.
        hf_config: The model's configuration.
        shape: (num_blocks, KV heads of the whole model, block_size, head_dim).
        dtype: Of the cache, as far as torch is concerned.

    Returns:
        One of vLLM's attention specifications per layer, in layer order; None where the class
        leaves it to its caller.

    Raises:
        ConfigError: A layer's name has no number.
    """
    if not signature.has_kv_cache_spec:
        return None
    _, num_kv_heads, block_size, head_size = shape
    config = vllm_config(
        hf_config,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    with vllm_stand_in():
        specs = model.get_kv_cache_spec(config)
    if specs is None:
        return None
    by_layer = {_layer_index(name): spec for name, spec in specs.items()}
    return [by_layer[layer] for layer in sorted(by_layer)]


def layer_caches(
    signature: ModelSignature,
    specs: list[Any] | None,
    *,
    shape: KVCacheShape,
    dtype: torch.dtype,
    num_layers: int,
    num_chips: int,
) -> LayerCaches:
    """Divide the heads over the chips, of the layers as the class itself describes them.

    Every layer gets all the blocks, whatever its window: a sequence has one block table.

    Args:
        signature: Of the class.
        specs: From `kv_cache_spec`.
        shape: (num_blocks, KV heads of the whole model, block_size, head_dim).
        dtype: Of the cache, as far as torch is concerned.
        num_layers: Layers of a class that does not describe them.
        num_chips: Chips of one lane.

    Raises:
        ConfigError: The class wants other blocks, or layers that it cannot allocate.
    """
    num_blocks, num_kv_heads, block_size, head_size = shape
    sizes, has_windows = [(num_kv_heads, head_size)] * num_layers, False
    if specs is not None:
        if any(spec.block_size != block_size for spec in specs):
            raise ConfigError(
                f"generator {signature.class_name} wants blocks of "
                f"{sorted({spec.block_size for spec in specs})} tokens, block_size is {block_size}"
            )
        sizes = [(spec.num_kv_heads, spec.head_size) for spec in specs]
        has_windows = any("SlidingWindow" in type(spec).__name__ for spec in specs)
    if len(set(sizes)) > 1 and not signature.allocates_per_layer:
        raise ConfigError(
            f"generator {signature.class_name}: its layers' KV differs, (heads, size) "
            f"{sorted(set(sizes))}, and it has no allocate_kv_cache_per_layer"
        )
    layers = [
        ((num_blocks, heads // min(num_chips, heads), block_size, size), dtype, layer)
        for layer, (heads, size) in enumerate(sizes)
    ]
    return LayerCaches(layers, has_windows)


def is_one_lane(cache: KVCache) -> bool:
    """Whether a cache is ``[layer][k, v]``, as tt-transformers' of one lane, not ``[lane][layer]``.

    A cache that cannot be looked into is taken for the usual one.
    """
    if not (isinstance(cache, (list, tuple)) and cache):
        return False
    layer = cache[0]
    return (
        isinstance(layer, (list, tuple)) and bool(layer) and not isinstance(layer[0], (list, tuple))
    )


def dtype_name(cache: KVCache) -> str | None:
    """Name of the element type of a cache, if it is a nested list of tensors: "bfloat8_b"."""
    while isinstance(cache, (list, tuple)) and cache:
        cache = cache[0]
    dtype = getattr(cache, "dtype", None)
    return None if dtype is None else str(dtype).rpartition(".")[2].lower()


def _layer_index(layer_name: str) -> int:
    """3 of "model.layers.3.self_attn"."""
    numbers = [part for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"get_kv_cache_spec names a layer {layer_name!r}: no single number in it")
    return int(numbers[0])
