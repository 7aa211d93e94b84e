"""The ttnn generator: the generator interface over one transformer per lane of a mesh.

Checks each call before the device sees it and turns ttnn's own errors into `DeviceError`.
`lane_batch.py` does the rest.
"""

# The interface is fixed by other projects, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from replicas.config import MeshConfig
from replicas.generators.model_config import load_hf_config, to_model_config
from replicas.generators.ttnn.budget import native_token_budget
from replicas.generators.ttnn.calls import (
    check_decode,
    check_goes_on,
    check_logits_rows,
    check_prefill,
    check_remap,
)
from replicas.generators.ttnn.kv_cache import zeroed_cache
from replicas.generators.ttnn.lane_batch import LaneBatch
from replicas.generators.ttnn.loaded import load_model
from replicas.generators.ttnn.mesh import refusals
from replicas.generators.ttnn.sampling import MAX_TOP_K, parse_sampling
from replicas.tt.meshes import mesh_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import ttnn

    from replicas.generators.protocol import (
        DeviceSamplingParams,
        ForwardOutput,
        Generator,
        KVCache,
        KVCacheShape,
        ModelCapabilities,
        SupportsTokenBudget,
    )
    from replicas.generators.ttnn.kv_cache import TTKVCache
    from replicas.generators.ttnn.lane_batch import DecodeOutput
    from replicas.generators.ttnn.loaded import LoadedModel
    from replicas.generators.ttnn.mesh import TTMesh


class TTGenerator:
    """Generator of Llama, Mistral, Qwen2 and Qwen3 on a Tenstorrent mesh.

    Owns the weights on the mesh, and the batch of lanes over the KV cache that was allocated last.
    The mesh and the KV cache belong to the caller, who must call ``close`` before closing the mesh.
    last. The mesh is the caller's, who calls ``close`` before closing it; so is the KV cache.

    A call raises TypeError for any other cache; ValueError for arguments that are out of range,
    contradictory or not supported, before anything is computed; and DeviceError for ttnn's errors.
    """

    model_capabilities: ClassVar[ModelCapabilities] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "supports_device_penalties": False,
        "supports_device_grammar": False,
        "max_device_top_k": MAX_TOP_K,
        "device_draws_keep_no_state": True,
        "supports_sample_in_prefill": True,
        "gives_logits_beside_tokens": True,
        "output_tokens_per_step": 1,
        "supports_spec_decode": False,
        "supports_mixed_batch": False,
        "supports_layer_callbacks": False,
    }
    """Decode may run ahead whether traced or not: inputs stay on the device in both."""
    decode_input_update_contract: ClassVar[int] = 1

    def __init__(self, model: LoadedModel) -> None:
        """Wrap a loaded model; use ``initialize_vllm_model`` to load it."""
        self._model = model
        self._batch: LaneBatch | None = None

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,  # noqa: ANN401 - ModelConfig, or a transformers configuration
        mesh_device: TTMesh,
        max_batch_size: int,
        *,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> TTGenerator:
        """Load a model onto every lane; see ``GeneratorBase.initialize_vllm_model``.

        Raises:
            ConfigError: The model, mesh or sizes cannot work together; says which numbers.
            ModelLoadError: The weights are not those that the configuration implies.
            DeviceError: The device refused the weights.
        """
        config, sizes = to_model_config(hf_config), (max_batch_size, max_seq_len, tt_data_parallel)
        return cls(load_model(config, mesh_device, optimizations, *sizes))

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
        """Return the token budget on Wormhole chips, the smallest ones, at the default precision.

        Where the mesh and its settings are known, ``budget.native_token_budget`` is exact.

        Args:
            model_name: Model folder.
            num_devices: Chips of the mesh.
            tt_data_parallel: Lanes.
            max_model_len: Longest sequence in tokens.
            max_num_seqs: Slots of one lane.

        Raises:
            ConfigError: The folder contains no known model, or it does not fit.
        """
        model, name = load_hf_config(model_name), f"(1,{num_devices})"
        sizes = {"num_slots": max_num_seqs, "max_seq_len": max_model_len}
        spec, settings = mesh_spec(name), MeshConfig(name=name)
        fits = native_token_budget(model, spec, settings, tt_data_parallel, **sizes)
        return min(fits, max_model_len * max_num_seqs)

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> TTKVCache:
        """Allocate a zeroed cache in DRAM and each lane's inputs; an earlier cache is dropped.

        Args:
            kv_cache_shape: (num_blocks, num_kv_heads, block_size, head_dim) of one lane, the heads
                of all of its chips together.
            dtype: bfloat16, the model's compute dtype; the profile decides the stored dtype.
            num_layers: Layers.

        Raises:
            ConfigError: Heads, head size, layers or dtype are not the model's, a lane does not
                support the block size, or the longest sequence has more blocks than there are.
            DeviceError: The device has no room.
        """
        model = self._model
        limits = model.limits(kv_cache_shape, dtype, num_layers)
        self.close()
        devices = [device for device, _ in model.lanes]
        with refusals("allocating the KV cache"):
            cache = zeroed_cache(devices, kv_cache_shape, num_layers, model.precision.kv_dtype)
            self._batch = LaneBatch(model, cache, limits)
        return cache

    def close(self) -> None:
        """Release the traces and the lanes; call before the mesh is closed. Idempotent."""
        if self._batch is not None:
            self._batch.close()
        self._batch = None

    # --- warm-up -------------------------------------------------------------------------------

    def warmup_model_prefill(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Compile every bucket in the null block; then, with ``enable_trace``, capture them.

        Raises:
            ValueError: A capture before both warm-ups have compiled.
        """
        batch = self._batch_over(kv_cache)
        with refusals("warming up prefill"):
            batch.warm_up_prefill(capture=enable_trace, samples=can_sample_on_device)

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
        """Compile decode in the null block; then, with ``enable_trace``, capture it.

        Raises:
            ValueError: See ``warmup_model_prefill``; or other sizes than the generator's.
        """
        batch = self._batch_over(kv_cache)
        if max_batch_size != batch.limits.max_batch_size:
            raise ValueError(f"{max_batch_size} rows for a batch of {batch.limits.max_batch_size}")
        batch.limits.check_width(num_blocks)
        with refusals("warming up decode"):
            batch.warm_up_decode(capture=enable_trace, samples=can_sample_on_device)

    # --- forward -------------------------------------------------------------------------------

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

        A chunk that starts within a block is computed from the start of that block.

        Returns:
            (N, 1, V) bfloat16, or with ``sampling_params`` int32 (N, 1).
        """
        batch = self._batch_over(kv_cache)
        _refuse_layers(page_tables_per_layer)
        call = check_prefill(
            batch.limits,
            tokens=tokens,
            page_table=page_table,
            prompt_lens=prompt_lens,
            start_pos=start_pos,
            empty_slots=empty_slots,
        )
        sampling = None
        if sampling_params is not None:
            sampling = parse_sampling(sampling_params, len(call.slots), batch.limits.vocab_size)
        with refusals("prefill"):
            return batch.prefill(call, sampling, traced=enable_trace)

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
    ) -> ForwardOutput:
        """Decode; see ``Generator.decode_forward``.

        Draws depend on seed and position alone, so ``reset_sampling_state`` has nothing to reset.

        Returns:
            (B, 1, V) bfloat16, or with ``sampling_params`` int32 (B, 1); zero where the position is
            -1. With ``logits_rows`` a pair of such tokens and bfloat16 (H, V). With
            ``read_from_device`` False a ``DecodeOutput``, to be given to ``read_decode_output``
            before the next call of this generator.

        Raises:
            TypeError: ``reset_batch`` was passed.
            ValueError: The device has no previous step to continue from.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired; decode contract 1 has four reload commands")
        batch = self._batch_over(kv_cache)
        _refuse_layers(page_tables_per_layer)
        samples = sampling_params is not None
        if not reload_inputs:
            check_goes_on(reset=reset_sampling_state, remap=slot_remap, samples=samples)
            batch.check_continues()
        call = check_decode(
            batch.limits,
            tokens=tokens,
            page_table=page_table,
            start_pos=start_pos,
            reload_inputs=reload_inputs,
            reload_page_table=reload_page_table,
        )
        wanted = kwargs.get("logits_rows")
        if wanted is not None:
            wanted = check_logits_rows(batch.limits, wanted, start_pos, samples=samples)
        remap = None if slot_remap is None else check_remap(batch.limits, slot_remap)
        settings = batch.next_sampling(sampling_params, remap, reload=reload_sampling_params)
        with refusals("decode"):
            output = batch.decode(
                call, settings, samples=samples, logits_rows=wanted, traced=enable_trace
            )
        if not read_from_device:
            return output
        host, _ = self.read_decode_output(output, async_read=False)
        return self.process_decode_output_host(host, is_tokens=samples)

    def read_decode_output(
        self, tt_out: DecodeOutput, async_read: bool = True
    ) -> tuple[DecodeOutput, list[ttnn.MeshEvent]]:
        """Start copying to the host; see ``GeneratorBase.read_decode_output``.

        Returns:
            The output on the host, and one event per lane for ``ttnn.event_synchronize``; without
            ``async_read`` the copy is complete and there is no event.
        """
        with refusals("reading the output"):
            return self._in_use().read(tt_out, wait=not async_read)

    def process_decode_output_host(
        self, tt_out: DecodeOutput, is_tokens: bool = False
    ) -> ForwardOutput:
        """Convert an output on the host; see ``GeneratorBase.process_decode_output_host``.

        Raises ValueError if ``is_tokens`` does not match the decode.
        """
        if is_tokens != tt_out.is_tokens:
            kind = "tokens" if tt_out.is_tokens else "logits"
            raise ValueError(f"{is_tokens=}, but the decode gave {kind}")
        return self._in_use().gathered(tt_out)

    # --- parts ---------------------------------------------------------------------------------

    def _in_use(self) -> LaneBatch:
        if self._batch is None:
            raise TypeError("there is no KV cache: call allocate_kv_cache first")
        return self._batch

    def _batch_over(self, kv_cache: KVCache) -> LaneBatch:
        """Return the lanes over this cache; raise TypeError unless it was allocated last."""
        if self._batch is None or kv_cache is not self._batch.cache:
            raise TypeError("kv_cache must be the latest result of allocate_kv_cache")
        return self._batch


def _refuse_layers(page_tables_per_layer: Sequence[torch.Tensor] | None) -> None:
    if page_tables_per_layer is not None:
        raise ValueError("page_tables_per_layer given, but every layer uses page_table")


if TYPE_CHECKING:  # fails type checking when the class and the protocols part ways
    _generator: type[Generator] = TTGenerator
    _budget: type[SupportsTokenBudget] = TTGenerator
