"""Loaded plug-in model: its KV cache, per-slot state and clean-up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from replicas.errors import ConfigError
from replicas.generators.plugin.arguments import refusals, taken
from replicas.generators.plugin.kv_layers import (
    dtype_name,
    is_one_lane,
    kv_cache_spec,
    layer_caches,
)
from replicas.generators.plugin.shim import vllm_stand_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from replicas.generators.plugin.sampling import TTSamplingParams
    from replicas.generators.plugin.signatures import ModelSignature, Parameters
    from replicas.generators.protocol import KVCache, KVCacheShape, ModelCapabilities


class PluginModel:
    """Loaded plug-in model with its cache and slots; `AdaptedModel` adds the forward calls.

    Owns the model and the rotary offsets that prefill returned for each slot.

    Args:
        model: Instance of the class that `signature` describes.
        signature: Methods and parameters of the model.
        hf_config: The model's transformers configuration.
        num_chips: Chips of the mesh.
        num_lanes: DP groups.
        max_batch_size: Rows of the decode batch, all lanes together.

    Attributes:
        signature: Methods and parameters of the model.
        kv_rope: Order of the rotated pairs in cached keys, for KV transfer: tt_transformers
            permutes weights to Meta's order.
    """

    model_capabilities: ClassVar[ModelCapabilities]
    decode_input_update_contract: ClassVar[int] = 1
    kv_rope: ClassVar[str] = "meta"

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - of a class that is not known here
        signature: ModelSignature,
        hf_config: Any,  # noqa: ANN401 - a transformers configuration: no base worth naming
        num_chips: int,
        num_lanes: int,
        max_batch_size: int,
    ) -> None:
        text_config = getattr(hf_config, "text_config", hf_config)
        self.signature = signature
        self._model = model
        self._hf_config = hf_config
        self._vocab_size = int(text_config.vocab_size)
        self._num_chips_per_lane = num_chips // num_lanes
        self._num_lanes = num_lanes
        self._max_batch_size = max_batch_size
        self._decode_width = max_batch_size
        self._block_size = 0
        self._tokens_per_pass = self.model_capabilities.get("output_tokens_per_step", 1)
        self._kv_dtype = "bfloat8_b"
        self._has_bare_lane = False
        self._num_layer_tables = 0
        self._is_closed = False
        # Settings of the last decode that sampled; reused by decodes that do not reload them.
        self._decode_params: TTSamplingParams | None = None
        # For models with several rope axes: the offset of each slot from prefill, and whether the
        # model must be given them with the next decode.
        self._has_rope_deltas = _has_rope_deltas(text_config)
        self._rope_deltas: list[int] = [0] * max_batch_size
        self._rope_deltas_changed = True

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> KVCache:
        """Allocate the KV cache; see `GeneratorBase.allocate_kv_cache`.

        The shape has the heads of the whole model. The class gets the heads of one chip, and
        separate layers if it supports them.

        Returns:
            The cache as ``[lane][layer] -> [k, v]``.

        Raises:
            ConfigError: The class needs another block size, cannot allocate differing layers (gives
                both numbers), or refuses the shape.
        """
        self._block_size = block_size = kv_cache_shape[2]
        required = self.model_capabilities.get("required_block_size") or block_size
        if required != block_size:
            raise ConfigError(
                f"generator {self.signature.class_name} needs block_size {required}, but "
                f"block_size is {block_size}"
            )
        specs = kv_cache_spec(self._model, self.signature, self._hf_config, kv_cache_shape, dtype)
        caches = layer_caches(
            self.signature,
            specs,
            shape=kv_cache_shape,
            dtype=dtype,
            num_layers=num_layers,
            num_chips=self._num_chips_per_lane,
        )
        layers = caches.layers
        self._num_layer_tables = len(layers) if caches.has_windows else 0
        what = f"generator {self.signature.class_name} cannot allocate KV {kv_cache_shape}"
        with refusals(what), vllm_stand_in():
            if self.signature.allocates_per_layer:
                cache = self._model.allocate_kv_cache_per_layer(layers)
            else:
                cache = self._model.allocate_kv_cache(layers[0][0], dtype, len(layers))
        self._kv_dtype = dtype_name(cache) or self._kv_dtype
        self._has_bare_lane = is_one_lane(cache)
        return [cache] if self._has_bare_lane else cache

    @property
    def kv_dtype(self) -> str:
        """Element type of the allocated cache; ``bfloat8_b`` if it cannot be inspected.

        Valid once the cache is allocated.
        """
        return self._kv_dtype

    def release_request(self, slot: int) -> None:
        """Drop the model's state of a slot whose sequence has ended or was preempted."""
        self._rope_deltas[slot] = 0
        if "release_request" in self.signature.hooks:
            self._model.release_request(slot)

    def close(self) -> None:
        """Let the model release its resources; call before the mesh is closed. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as closing:
            if "cleanup" in self.signature.hooks:
                closing.callback(self._model.cleanup)
            if "release_persistent_capture" in self.signature.hooks:
                closing.callback(self._model.release_persistent_capture)

    # --- arguments -------------------------------------------------------------------------------

    def _theirs(self, kv_cache: KVCache) -> KVCache:
        """Return the cache in the class's own form, which some classes compare by identity."""
        return kv_cache[0] if self._has_bare_lane else kv_cache

    def _tables(
        self, page_table: torch.Tensor, given: Sequence[torch.Tensor] | None
    ) -> Sequence[torch.Tensor] | None:
        if given is None and self._num_layer_tables:
            return [page_table] * self._num_layer_tables
        return given

    def _rope_delta_arguments(self, parameters: Parameters, num_rows: int) -> dict[str, Any]:
        if not self._has_rope_deltas:
            return {}
        deltas = self._rope_deltas[:num_rows] if self._rope_deltas_changed else None
        self._rope_deltas_changed = False
        return taken(parameters, {"rope_deltas_all_users": deltas})


def _has_rope_deltas(text_config: object) -> bool:
    """Return whether rope has several axes, so that prefill also returns offsets."""
    for name in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in (getattr(text_config, name, None) or {}):
            return True
    return False
