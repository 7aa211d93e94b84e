"""The torch generator: the generator interface over one paged transformer on the CPU.

Lanes share the weights and one forward pass; each has blocks of its own in the cache. There is no
trace, no device sampling and no state between calls, so rows may move between slots freely.
"""

# The interface is fixed by other projects, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from replicas.errors import ConfigError
from replicas.generators.model_config import check_sizes, layer_specs, to_model_config
from replicas.generators.protocol import DEFAULT_TOKEN_BUDGET, CpuDevice, ModelCapabilities
from replicas.generators.torch.backends import BACKENDS, make_attention
from replicas.generators.torch.inputs import BlockSpace, from_decode, from_flat, from_prefill
from replicas.generators.torch.kv_cache import CacheGroup, TorchKVCache
from replicas.generators.torch.linear import LONG_WEIGHTS
from replicas.generators.torch.loader import load_weights
from replicas.generators.torch.model import PagedTransformer
from replicas.generators.torch.team import HELPERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import (
        DeviceSamplingParams,
        ExpertLoad,
        FlatBatch,
        Generator,
        KVCache,
        KVCacheShape,
        LayerCallback,
        SupportsExpertLoad,
        SupportsGang,
        SupportsHiddenStates,
        SupportsKVGroups,
        SupportsLayerCallbacks,
        SupportsMixedBatch,
        SupportsTokenBudget,
    )
    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.kv_groups import KVGroup

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_LOAD_FORMATS = ("safetensors", "random")
LONG_PRODUCTS = 25_000_000
"""So many products of a token and a weight take a core some 0.25 ms."""
ATTENDED = 10
"""Products with keys and values take so many times as long: each of these is for one token."""


class TorchGenerator:
    """Models of `model_config.FAMILIES` behind the generator interface.

    Owner: the model's weights and the layer callbacks. The KV cache belongs to the caller.
    """

    model_capabilities: ClassVar[ModelCapabilities] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": False,
        "supports_sample_on_device": False,
        "supports_device_penalties": False,
        "supports_device_grammar": False,
        "output_tokens_per_step": 1,
        "supports_spec_decode": False,
        "supports_mixed_batch": True,
        "supports_hidden_states": True,
        "supports_layer_callbacks": True,
    }
    decode_input_update_contract: ClassVar[int] = 1

    def __init__(
        self,
        config: ModelConfig,
        model: PagedTransformer,
        dtype: torch.dtype,
        max_batch_size: int,
        num_lanes: int,
        *,
        shares_kv: bool = False,
    ) -> None:
        """Wrap a loaded model; use ``initialize_vllm_model`` to load one."""
        self._config = config
        self._model = model
        self._dtype = dtype
        self._max_batch_size = max_batch_size
        self._num_lanes = num_lanes
        self._shares_kv = shares_kv
        attention = layer_specs(config)[0].attention
        inner = config.intermediate_size
        if config.experts is not None:
            inner = config.experts.num_per_token * config.experts.intermediate_size
        weights = sum(math.prod(shape) for _, shape in attention.tensors())
        self._layer_weights = weights + 3 * config.hidden_size * inner
        widths = [s.width for s in config.kv_specs("float32") if s.kind != "state"]
        self._context_products = 2 * config.num_attention_heads * max(widths, default=0)
        self._before_layer: LayerCallback | None = None
        self._after_layer: LayerCallback | None = None

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,  # noqa: ANN401 - ModelConfig, or a transformers configuration
        mesh_device: CpuDevice,
        max_batch_size: int,
        *,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> TorchGenerator:
        """Load a model; see ``GeneratorBase.initialize_vllm_model``.

        Raises:
            ConfigError: The model, device or sizes cannot work together; says which.
            ModelLoadError: The weights are not those that the configuration implies.
        """
        config = to_model_config(hf_config)
        _check_device(mesh_device)
        check_sizes(config, max_batch_size, max_seq_len, tt_data_parallel)
        weights = load_weights(config, mesh_device, max_seq_len)
        attention = make_attention(mesh_device.attention, mesh_device.dtype, config.key_width())
        model = PagedTransformer(config, weights, max_seq_len, attention)
        return cls(
            config,
            model,
            mesh_device.dtype,
            max_batch_size,
            tt_data_parallel,
            shares_kv=mesh_device.shares_kv,
        )

    @classmethod
    def get_max_tokens_all_users(
        cls,
        *,
        model_name: str,
        num_devices: int,
        tt_data_parallel: int,
        max_model_len: int,
        max_num_seqs: int,
    ) -> int:
        """Return enough for every slot of a lane at full length, within the default budget."""
        return min(DEFAULT_TOKEN_BUDGET, max_model_len * max_num_seqs)

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> TorchKVCache:
        """Allocate a zeroed cache; see ``GeneratorBase.allocate_kv_cache``.

        Raises:
            ConfigError: Heads, head size, layers or dtype are not the model's.
            TransferError: The host gives no memory that can be shared.
        """
        return self._allocate(kv_cache_shape, dtype, num_layers)

    def allocate_kv_groups(self, kv_groups: Sequence[KVGroup], dtype: torch.dtype) -> TorchKVCache:
        """Allocate a zeroed cache of several KV groups; see ``SupportsKVGroups``.

        Raises:
            ConfigError: Heads, head size, layers or dtype are not the model's.
            TransferError: The host gives no memory that can be shared.
        """
        first, num_layers = kv_groups[0], sum(len(group.layers) for group in kv_groups)
        shape = first.num_blocks, first.spec.heads, first.block_size, first.spec.width
        groups = [_cache_group(group) for group in kv_groups]
        return self._allocate(shape, dtype, num_layers, groups)

    def _allocate(
        self,
        shape: KVCacheShape,
        dtype: torch.dtype,
        num_layers: int,
        groups: Sequence[CacheGroup] = (),
    ) -> TorchKVCache:
        specs = self._config.kv_specs(str(self._dtype).removeprefix("torch."))
        spec = specs[groups[0].layers[0]] if groups else specs[0]
        wanted = (spec.heads, spec.width, len(specs))
        given = (shape[1], shape[3], num_layers)
        if given != wanted or dtype != self._dtype:
            raise ConfigError(
                f"KV cache of (kv heads, head size, layers) {given} in {dtype} for a model of "
                f"{wanted} in {self._dtype}"
            )
        return TorchKVCache(
            shape,
            dtype,
            num_layers,
            self._num_lanes,
            num_planes=spec.planes,
            shares=self._shares_kv,
            groups=groups,
        )

    def warmup_model_prefill(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Run one prompt of a block through the null block."""
        cache = _checked(kv_cache)
        zeros = np.zeros((1, cache.block_size), dtype=np.int64)
        ends, first = np.array([cache.block_size]), _null_blocks(cache, 1)
        batch = from_prefill(zeros, first[:, :, None], 0 * ends, ends, first, cache.block_size)
        self._forward(batch, cache, is_warm_up=True)

    def warmup_model_decode(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Decode a full batch in the null block."""
        cache = _checked(kv_cache)
        zeros = np.zeros(max_batch_size, dtype=np.int64)
        first = _null_blocks(cache, max_batch_size)
        batch = from_decode(zeros, first[:, :, None], zeros, first, cache.block_size)
        self._forward(batch, cache, is_warm_up=True)

    def prefill_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: KVCache,
        enable_trace: bool,
        prompt_lens: torch.Tensor,
        start_pos: torch.Tensor,
        empty_slots: Sequence[int],
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Prefill; see ``Generator.prefill_forward``.

        Returns:
            (N, 1, V) in the model's dtype.

        Raises:
            ValueError: A chunk or slot is out of range, or an option is not supported.
        """
        _refuse_options(sampling_params)
        cache = _checked(kv_cache)
        slots = _int64(empty_slots)
        if slots.min() < 0 or slots.max() >= self._max_batch_size:
            raise ValueError(f"empty_slots {slots} for a batch of {self._max_batch_size}")
        batch = from_prefill(
            _int64(tokens),
            _tables(cache, page_table, page_tables_per_layer),
            _int64(start_pos),
            _int64(prompt_lens),
            self._space(cache).first_blocks(slots),
            cache.block_size,
        )
        return self._forward(batch, cache).unsqueeze(1)

    def decode_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: KVCache,
        start_pos: torch.Tensor,
        enable_trace: bool,
        read_from_device: bool = True,
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        reload_inputs: bool = True,
        reload_page_table: bool = False,
        reload_sampling_params: bool = False,
        reset_sampling_state: bool = False,
        slot_remap: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Decode; see ``Generator.decode_forward``.

        Returns:
            (B, 1, V) in the model's dtype; zero where the position is -1.

        Raises:
            TypeError: ``reset_batch`` was passed.
            ValueError: The batch is not ``max_batch_size`` rows, or an option is not supported.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired; decode contract 1 has four reload commands")
        if not reload_inputs:
            raise ValueError("needs reload_inputs: supports_async_decode is False")
        _refuse_options(sampling_params)
        cache = _checked(kv_cache)
        positions = _int64(start_pos)
        if len(positions) != self._max_batch_size:
            raise ValueError(f"{len(positions)} rows for a batch of {self._max_batch_size}")
        live = np.flatnonzero(positions >= 0)
        logits = torch.zeros(len(positions), 1, self._config.vocab_size, dtype=self._dtype)
        if len(live):
            batch = from_decode(
                _int64(tokens)[live, 0],
                _tables(cache, page_table, page_tables_per_layer)[:, live],
                positions[live],
                self._space(cache).first_blocks(live),
                cache.block_size,
            )
            logits[torch.from_numpy(live), 0] = self._forward(batch, cache)
        return logits

    def forward_mixed(self, batch: FlatBatch, kv_cache: KVCache) -> torch.Tensor:
        """Run prefill chunks and decodes in one pass; see ``SupportsMixedBatch.forward_mixed``.

        Returns:
            (len(batch.logits_indices), V) in the model's dtype.
        """
        cache = _checked(kv_cache)
        return self._forward(from_flat(batch, self._space(cache)), cache)

    def forward_hidden(self, batch: FlatBatch, kv_cache: KVCache) -> torch.Tensor:
        """Run a mixed pass without logits; see ``SupportsHiddenStates.forward_hidden``.

        Returns:
            (len(batch.logits_indices), N) in the model's dtype.
        """
        cache = _checked(kv_cache)
        flat = from_flat(batch, self._space(cache))
        return self._forward(flat, cache, self._model.forward_hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states; see ``SupportsHiddenStates.compute_logits``."""
        weights = self._config.vocab_size * self._config.hidden_size
        is_long = weights >= LONG_WEIGHTS or len(hidden) * weights >= LONG_PRODUCTS
        with _all_threads_if(is_long):
            return self._model.compute_logits(hidden)

    def forward_idle(self) -> None:
        """Take part in one forward pass of the other ranks without tokens of its own."""
        with torch.inference_mode():
            self._model.serve_experts()

    def expert_load(self) -> ExpertLoad | None:
        """Return what the experts have computed since warm-up; see ``SupportsExpertLoad``."""
        return self._model.expert_load()

    def set_layer_callbacks(
        self, before: LayerCallback | None, after: LayerCallback | None
    ) -> None:
        """Set callbacks around the attention of every layer in later forward passes, or None."""
        self._before_layer, self._after_layer = before, after

    def read_decode_output(
        self,
        tt_out: torch.Tensor,
        async_read: bool = True,
    ) -> tuple[torch.Tensor, list[object]]:
        """Return the logits and no events."""
        return tt_out, []

    def process_decode_output_host(
        self, tt_out: torch.Tensor, is_tokens: bool = False
    ) -> torch.Tensor:
        """Return the logits as they are.

        Raises:
            ValueError: Tokens were asked for; nothing is sampled here.
        """
        if is_tokens:
            raise ValueError("the torch generator does not sample")
        return tt_out

    def _space(self, cache: TorchKVCache) -> BlockSpace:
        slots_per_lane = self._max_batch_size // self._num_lanes
        return BlockSpace(cache.num_blocks, cache.block_size, slots_per_lane)

    def _forward(
        self,
        batch: PagedBatch,
        cache: TorchKVCache,
        run: Callable[..., torch.Tensor] | None = None,
        *,
        is_warm_up: bool = False,
    ) -> torch.Tensor:
        """Run a pass by `run`, a method of the model; None is its `forward`."""
        before, after = (None, None) if is_warm_up else (self._before_layer, self._after_layer)
        decoding = batch.seq_lens[np.diff(batch.query_start_loc) == 1]
        products = len(batch.input_ids) * self._layer_weights
        products += ATTENDED * self._context_products * int(decoding.sum())
        if self._model.is_one_call:
            products *= self._config.num_hidden_layers
        is_long = self._layer_weights >= LONG_WEIGHTS or products >= LONG_PRODUCTS
        with torch.inference_mode(), _all_threads_if(is_long):
            if (num_threads := torch.get_num_threads()) > 1:
                HELPERS.keep_off(num_threads)
            result = (run or self._model.forward)(batch, cache, before, after)
        if is_warm_up:
            self._model.forget_expert_load()
        return result


@contextlib.contextmanager
def _all_threads_if(is_long: bool) -> Iterator[None]:
    """Compute a pass on one thread where what threads share out is too short.

    Threads that wait for each other at every operation cost more there than they bring, and much
    more where something else wants their cores.
    """
    if is_long or (num_threads := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _check_device(device: CpuDevice) -> None:
    if not isinstance(device, CpuDevice):
        raise ConfigError(f"the torch generator runs on a CpuDevice, not {type(device).__name__}")
    if device.dtype not in _DTYPES:
        raise ConfigError(f"dtype {device.dtype} is not one of {', '.join(map(str, _DTYPES))}")
    if device.attention not in BACKENDS:
        raise ConfigError(f"attention {device.attention!r} is not one of {', '.join(BACKENDS)}")
    if device.load_format not in _LOAD_FORMATS:
        known = ", ".join(_LOAD_FORMATS)
        raise ConfigError(f"load_format {device.load_format!r} is not one of {known}")


def _checked(kv_cache: KVCache) -> TorchKVCache:
    if not isinstance(kv_cache, TorchKVCache):
        raise TypeError(f"kv_cache must come from allocate_kv_cache, got {type(kv_cache).__name__}")
    return kv_cache


def _refuse_options(sampling_params: DeviceSamplingParams | None) -> None:
    if sampling_params is not None:
        raise ValueError("sampling_params given, but supports_sample_on_device is False")


def _tables(
    cache: TorchKVCache, page_table: torch.Tensor, by_layer: Sequence[torch.Tensor] | None
) -> Int64Array:
    """Return the page tables (G, N, K) of the cache's KV groups."""
    num_groups = len(cache.num_blocks)
    if by_layer is None:
        if num_groups > 1:
            raise ValueError(f"one page_table for the layers of {num_groups} KV groups")
        return _int64(page_table)[None]
    if len(by_layer) != len(cache.group_of):
        raise ValueError(f"{len(by_layer)} page_tables_per_layer of {len(cache.group_of)} layers")
    return np.stack([_int64(by_layer[cache.group_of.index(nth)]) for nth in range(num_groups)])


def _cache_group(group: KVGroup) -> CacheGroup:
    spec = group.spec
    size = 1 if spec.kind == "state" else group.block_size
    shape = group.num_blocks, spec.heads, size, spec.width
    return CacheGroup(group.layers, shape, getattr(torch, spec.dtype), spec.planes)


def _null_blocks(cache: TorchKVCache, num_rows: int) -> Int64Array:
    """Return (G, rows) null blocks."""
    return np.zeros((len(cache.num_blocks), num_rows), dtype=np.int64)


def _int64(values: torch.Tensor | Sequence[int]) -> Int64Array:
    return np.asarray(values, dtype=np.int64)


if TYPE_CHECKING:  # fails type checking when the class and the protocols part ways
    _generator: type[Generator] = TorchGenerator
    _mixed: type[SupportsMixedBatch] = TorchGenerator
    _callback: type[SupportsLayerCallbacks] = TorchGenerator
    _gang: type[SupportsGang] = TorchGenerator
    _groups: type[SupportsKVGroups] = TorchGenerator
    _load: type[SupportsExpertLoad] = TorchGenerator
    _hidden: type[SupportsHiddenStates] = TorchGenerator
    _budget: type[SupportsTokenBudget] = TorchGenerator
