"""KV cache requested from a plug-in class: one shape per layer, as stored on one chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicas.errors import ConfigError
from replicas.generators.plugin.arguments import refusals
from replicas.generators.plugin.shim import vllm_config, vllm_stand_in

if TYPE_CHECKING:
    import torch

    from replicas.generators.plugin.signatures import ModelSignature
    from replicas.generators.protocol import KVCache, KVCacheShape


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Layers for `allocate_kv_cache_per_layer`, and their need for page tables.

    Attributes:
        layers: (shape on one chip, dtype, buffer) of each layer; no two share a buffer.
        has_windows: Some layers have an attention window, so each layer gets its own page table.
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
    """Return the model's own specification of each layer's KV.

    Args:
        model: The model.
        signature: Signature of its class.
        hf_config: The model's configuration.
        shape: (num_blocks, KV heads of the whole model, block_size, head_dim).
        dtype: Of the cache, as far as torch is concerned.

    Returns:
        One of vLLM's attention specifications per layer, in order; None if the class provides none.

    Raises:
        ConfigError: The class refuses the configuration, asks for what the stand-in for vLLM lacks,
            or names a layer without exactly one number.
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
    what = f"generator {signature.class_name}: get_kv_cache_spec fails"
    with refusals(what), vllm_stand_in():
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
    """Return each layer's cache shape on one chip, with the heads divided over the chips.

    Every layer gets all blocks, even with a window, as a sequence has one block table.

    Args:
        signature: Signature of the class.
        specs: Result of `kv_cache_spec`.
        shape: (num_blocks, KV heads of the whole model, block_size, head_dim).
        dtype: Of the cache, as far as torch is concerned.
        num_layers: Number of layers, used if `specs` is None.
        num_chips: Chips of one lane.

    Raises:
        ConfigError: The class needs another block size, or differing layers that it cannot
            allocate.
    """
    num_blocks, num_kv_heads, block_size, head_size = shape
    sizes, has_windows = [(num_kv_heads, head_size)] * num_layers, False
    if specs is not None:
        if any(spec.block_size != block_size for spec in specs):
            raise ConfigError(
                f"generator {signature.class_name} needs blocks of "
                f"{sorted({spec.block_size for spec in specs})} tokens, block_size is {block_size}"
            )
        sizes = [(spec.num_kv_heads, spec.head_size) for spec in specs]
        has_windows = any("SlidingWindow" in type(spec).__name__ for spec in specs)
    if len(set(sizes)) > 1 and not signature.allocates_per_layer:
        raise ConfigError(
            f"generator {signature.class_name}: its layers have different KV, (heads, size) "
            f"{sorted(set(sizes))}, and it has no allocate_kv_cache_per_layer"
        )
    layers = [
        ((num_blocks, heads // min(num_chips, heads), block_size, size), dtype, layer)
        for layer, (heads, size) in enumerate(sizes)
    ]
    return LayerCaches(layers, has_windows)


def is_one_lane(cache: KVCache) -> bool:
    """Return whether a cache is ``[layer][k, v]`` and not ``[lane][layer]``.

    tt-transformers uses the former for a single lane. An opaque cache counts as the latter.
    """
    if not (isinstance(cache, (list, tuple)) and cache):
        return False
    layer = cache[0]
    return (
        isinstance(layer, (list, tuple)) and bool(layer) and not isinstance(layer[0], (list, tuple))
    )


def dtype_name(cache: KVCache) -> str | None:
    """Return the element type of a cache such as "bfloat8_b"; None unless it nests tensors."""
    while isinstance(cache, (list, tuple)) and cache:
        cache = cache[0]
    dtype = getattr(cache, "dtype", None)
    return None if dtype is None else str(dtype).rpartition(".")[2].lower()


def _layer_index(layer_name: str) -> int:
    """Return the number in a layer's name: 3 for "model.layers.3.self_attn"."""
    numbers = [part for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"get_kv_cache_spec has layer {layer_name!r}, without exactly one number")
    return int(numbers[0])
