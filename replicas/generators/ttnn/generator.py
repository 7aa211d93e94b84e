"""The ttnn generator: the generator interface over one transformer per lane of a mesh.

Lanes run side by side: every call gives work to all of them before it reads from any. Rows of one
lane prefill one after another, and decode together. A call is checked before the device sees it;
what ttnn itself refuses is a `DeviceError`.

State on the device is that of the last decode: tokens, positions, page table and sampling settings
of every slot. The first three are written anew by ``reload_inputs``, which every change of slots
needs, so ``slot_remap`` has only the settings to move; the host keeps them, and writes them again.
"""

# The interface is fixed by other projects, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import ttnn

from replicas.config import MeshConfig
from replicas.errors import ConfigError, DeviceError
from replicas.generators.model_config import load_hf_config, to_model_config
from replicas.generators.ttnn.buckets import (
    TILE,
    check_cache,
    check_lane,
    decode_table_width,
)
from replicas.generators.ttnn.budget import native_token_budget
from replicas.generators.ttnn.calls import (
    CallLimits,
    check_commands,
    check_decode,
    check_logits_rows,
    check_prefill,
    check_remap,
)
from replicas.generators.ttnn.lanes import Lane, LaneSizes
from replicas.generators.ttnn.mesh import TTMesh, ttnn_message
from replicas.generators.ttnn.model import TTTransformer
from replicas.generators.ttnn.profiles import profile
from replicas.generators.ttnn.sampling import MAX_TOP_K, parse_sampling
from replicas.generators.ttnn.trace import NoTrace, TtnnTracer
from replicas.generators.ttnn.weights import load_lane_weights
from replicas.meshes import mesh_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import (
        DeviceSamplingParams,
        ForwardOutput,
        Generator,
        KVCache,
        KVCacheShape,
        ModelCapabilities,
        SupportsTokenBudget,
    )
    from replicas.generators.ttnn.calls import DecodeCall
    from replicas.generators.ttnn.model import LaneCache
    from replicas.generators.ttnn.profiles import Profile
    from replicas.generators.ttnn.sampling import SamplingRows
    from replicas.generators.ttnn.trace import Tracer
    from replicas.generators.ttnn.weights import DeviceWeights

    Int64Array = npt.NDArray[np.int64]


class TTKVCache(list[list[list[ttnn.Tensor]]]):
    """``cache[lane][layer] -> [k, v]``, each (num_blocks, H / tp, block_size, head_dim) per chip.

    Attributes:
        num_blocks: Blocks per lane, with the null block.
        block_size: Tokens per block.
    """

    def __init__(
        self, planes: list[list[list[ttnn.Tensor]]], num_blocks: int, block_size: int
    ) -> None:
        super().__init__(planes)
        self.num_blocks = num_blocks
        self.block_size = block_size


@dataclass(frozen=True, slots=True, eq=False)
class DecodeOutput:
    """What a decode gave, on the device or, once read, on the host.

    Attributes:
        tokens: Of each lane; None for a lane without live rows, or where only logits are wanted.
        logits: Of each lane; None for a lane of which none are wanted.
        is_live: bool (B,).
        is_tokens: Tokens were sampled on the device.
        logits_rows: (H,) rows whose logits are wanted beside them.
    """

    tokens: tuple[ttnn.Tensor | None, ...]
    logits: tuple[ttnn.Tensor | None, ...]
    is_live: npt.NDArray[np.bool_]
    is_tokens: bool
    logits_rows: Int64Array | None


class TTGenerator:
    """Llama, Mistral, Qwen2 and Qwen3 on a Tenstorrent mesh.

    Owner: the weights and constants on the mesh, the lanes' inputs and their traces. The mesh is
    the caller's, who calls ``close`` before closing it; so is the KV cache.
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

    def __init__(
        self,
        config: ModelConfig,
        mesh: TTMesh,
        lanes: Sequence[tuple[ttnn.MeshDevice, DeviceWeights]],
        precision: Profile,
        max_batch_size: int,
        max_seq_len: int,
    ) -> None:
        """Wrap loaded weights; use ``initialize_vllm_model`` to load them."""
        self._config = config
        self._lane_weights = list(lanes)
        self._precision = precision
        self._max_batch_size = max_batch_size
        self._rows_per_lane = max_batch_size // len(self._lane_weights)
        self._max_seq_len = max_seq_len
        traces = mesh.settings.trace
        self._prefill_tracer: Tracer = TtnnTracer() if traces == "all" else NoTrace()
        self._decode_tracer: Tracer = NoTrace() if traces == "none" else TtnnTracer()
        self._cache: TTKVCache | None = None
        self._call_limits: CallLimits | None = None
        self._lanes: list[Lane] = []
        # Whether the compiled prefill and decode draw on the device; missing if not compiled.
        self._compiled: dict[str, bool] = {}
        self._sampling: SamplingRows | None = None

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
        config = to_model_config(hf_config)
        if not isinstance(mesh_device, TTMesh):
            raise ConfigError(
                f"the ttnn generator runs on a TTMesh, not {type(mesh_device).__name__}; set mesh"
            )
        precision = profile(optimizations or mesh_device.settings.optimizations, config)
        _check_sizes(config, max_batch_size, max_seq_len, tt_data_parallel)
        devices = mesh_device.lanes(tt_data_parallel)
        # Before minutes of loading. The block size is not known yet: any that a lane takes will do.
        num_rows = max_batch_size // tt_data_parallel
        check_lane(config, devices[0].get_num_devices(), max_rows=num_rows, block_size=TILE)
        with _refusals("loading the weights"):
            weights = load_lane_weights(config, mesh_device, devices, precision)
        lanes = list(zip(devices, weights, strict=True))
        return cls(config, mesh_device, lanes, precision, max_batch_size, max_seq_len)

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
        """Return what fits so many Wormhole chips, the smallest there are, at the usual precision.

        Where the mesh and its settings are known, ``budget.native_token_budget`` is exact.

        Args:
            model_name: Model folder.
            num_devices: Chips of the mesh.
            tt_data_parallel: Lanes.
            max_model_len: Longest sequence in tokens.
            max_num_seqs: Slots of one lane.

        Raises:
            ConfigError: The folder holds no model that we know, or it does not fit.
        """
        name = f"(1,{num_devices})"
        settings = MeshConfig(name=name)
        fits = native_token_budget(
            load_hf_config(model_name),
            mesh_spec(name),
            settings,
            tt_data_parallel,
            num_slots=max_num_seqs,
            max_seq_len=max_model_len,
        )
        return min(fits, max_model_len * max_num_seqs)

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> TTKVCache:
        """Allocate a zeroed cache in DRAM, and each lane's inputs; an earlier cache is let go.

        Args:
            kv_cache_shape: (num_blocks, num_kv_heads, block_size, head_dim) of one lane, the heads
                of all of its chips together.
            dtype: bfloat16, what the model computes with; the profile says what is stored.
            num_layers: Layers.

        Raises:
            ConfigError: Heads, head size, layers or dtype are not the model's, the block size is
                none that a lane takes, or the longest sequence has more blocks than there are.
            DeviceError: The device has no room.
        """
        config = self._config
        num_blocks, num_heads, block_size, head_dim = kv_cache_shape
        wanted = (config.num_key_value_heads, config.head_dim, config.num_hidden_layers)
        given = (num_heads, head_dim, num_layers)
        if given != wanted or dtype != torch.bfloat16:
            raise ConfigError(
                f"KV cache of (kv heads, head size, layers) {given} in {dtype} for a model of "
                f"{wanted} in {torch.bfloat16}"
            )
        tp = self._lane_weights[0][0].get_num_devices()
        check_lane(config, tp, max_rows=self._rows_per_lane, block_size=block_size)
        check_cache(num_blocks, decode_table_width(self._max_seq_len, block_size))
        self.close()
        with _refusals("allocating the KV cache"):
            # Packed once: every plane of every chip is the same zeros.
            zeros = ttnn.from_torch(
                torch.zeros(num_blocks, num_heads // tp, block_size, head_dim, dtype=dtype),
                dtype=getattr(ttnn, self._precision.kv_dtype),
                layout=ttnn.TILE_LAYOUT,
            )
            cache = TTKVCache(
                [
                    [[_in_dram(zeros, device) for _ in ("k", "v")] for _ in range(num_layers)]
                    for device, _ in self._lane_weights
                ],
                num_blocks,
                block_size,
            )
            self._lanes = [
                self._lane(device, weights, planes, block_size)
                for (device, weights), planes in zip(self._lane_weights, cache, strict=True)
            ]
        self._cache = cache
        self._call_limits = CallLimits(
            max_batch_size=self._max_batch_size,
            max_seq_len=self._max_seq_len,
            vocab_size=config.vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            table_width=decode_table_width(self._max_seq_len, block_size),
        )
        return cache

    def close(self) -> None:
        """Release the traces and the lanes; call it before the mesh is closed. Safe twice."""
        for tracer in (self._prefill_tracer, self._decode_tracer):
            tracer.release()
        for lane in self._lanes:
            lane.close()
        self._lanes = []
        self._cache = self._call_limits = None
        self._compiled.clear()
        self._sampling = None

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
            DeviceError: ttnn refused a call.
        """
        self._limits(kv_cache)
        if enable_trace:
            self._check_compiled("prefill", samples=can_sample_on_device)
        with _refusals("warming up prefill"):
            for lane in self._lanes:
                if enable_trace:
                    lane.capture_prefill()
                else:
                    lane.compile_prefill(sample=can_sample_on_device)
        self._compiled["prefill"] = can_sample_on_device

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
            ValueError: A capture before both warm-ups have compiled, or sizes other than those
                that the generator was made for.
            DeviceError: ttnn refused a call.
        """
        limits = self._limits(kv_cache)
        if max_batch_size != self._max_batch_size:
            raise ValueError(f"{max_batch_size} rows for a batch of {self._max_batch_size}")
        limits.check_width(num_blocks)
        if enable_trace:
            self._check_compiled("decode", samples=can_sample_on_device)
        with _refusals("warming up decode"):
            for lane in self._lanes:
                if enable_trace:
                    lane.capture_decode(sample=can_sample_on_device)
                else:
                    lane.compile_decode(sample=can_sample_on_device)
        self._compiled["decode"] = can_sample_on_device

    def _check_compiled(self, kind: str, *, samples: bool) -> None:
        """Refuse a capture with something left to compile, which may spoil the traces' memory."""
        if len(self._compiled) < len(("prefill", "decode")) or samples > self._compiled[kind]:
            raise ValueError(
                "first warm up prefill and decode with enable_trace False, and with the same "
                "can_sample_on_device"
            )

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

        Raises:
            TypeError: The cache is not the one that was allocated last.
            ValueError: A shape, dtype, token, block, slot or length is out of range, or an option
                is not supported; nothing was computed.
            DeviceError: ttnn refused a call.
        """
        limits = self._limits(kv_cache)
        _refuse_layers(page_tables_per_layer)
        call = check_prefill(
            limits,
            tokens=tokens,
            page_table=page_table,
            prompt_lens=prompt_lens,
            start_pos=start_pos,
            empty_slots=empty_slots,
        )
        num_rows = len(call.slots)
        sampling = None
        if sampling_params is not None:
            sampling = parse_sampling(sampling_params, num_rows, self._config.vocab_size)
        with _refusals("prefill"):
            hosts = {
                row: self._lane_of(call.slots[row]).prefill(
                    call.tokens[row, : call.ends[row]],
                    int(call.starts[row]),
                    call.page_table[row],
                    None if sampling is None else sampling.take(np.array([row])),
                    traced=enable_trace,
                )
                for row in self._interleaved(call.slots)
            }
            for lane in {slot // self._rows_per_lane for slot in call.slots.tolist()}:
                ttnn.event_synchronize(self._lanes[lane].event())
            if sampling is not None:
                sampled = torch.empty(num_rows, 1, dtype=torch.int32)
                for row, host in hosts.items():
                    sampled[row, 0] = int(self._lane_of(call.slots[row]).token_ids(host)[0])
                return sampled
            rows = {n: self._lane_of(call.slots[n]).logits(host)[0] for n, host in hosts.items()}
            logits = torch.stack([rows[n] for n in range(num_rows)])
            return logits[:, None, : self._config.vocab_size]

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
            TypeError: ``reset_batch`` was passed, or the cache is not the one allocated last.
            ValueError: The commands contradict each other, the device has nothing to go on from, a
                shape, dtype, token, block or position is out of range, or an option is not
                supported; nothing was computed.
            DeviceError: ttnn refused a call.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired; decode contract 1 has four reload commands")
        limits = self._limits(kv_cache)
        _refuse_layers(page_tables_per_layer)
        samples = sampling_params is not None
        check_commands(
            reload_inputs=reload_inputs,
            reload_page_table=reload_page_table,
            reset_sampling_state=reset_sampling_state,
            remaps=slot_remap is not None,
            samples=samples,
        )
        call = check_decode(
            limits,
            tokens=tokens,
            page_table=page_table,
            start_pos=start_pos,
            reload_inputs=reload_inputs,
            reload_page_table=reload_page_table,
        )
        beside = None
        if kwargs.get("logits_rows") is not None:
            beside = check_logits_rows(limits, kwargs["logits_rows"], start_pos, samples=samples)
        if not reload_inputs:
            for lane in self._lanes:
                lane.check_continues()
        remap = None if slot_remap is None else check_remap(limits, slot_remap)
        settings = self._next_sampling(sampling_params, remap, reload=reload_sampling_params)
        with _refusals("decode"):
            self._load(call)
            if settings is not None:
                self._load_sampling(settings)
            is_live = np.concatenate([lane.is_live for lane in self._lanes])
            wants = np.full(len(self._lanes), not samples)
            if beside is not None:
                wants[beside // self._rows_per_lane] = True
            outputs = [
                lane.decode(sample=samples, logits=wanted, traced=enable_trace)
                if lane.is_live.any()
                else (None, None)
                for lane, wanted in zip(self._lanes, wants.tolist(), strict=True)
            ]
        drawn, rows = zip(*outputs, strict=True)
        output = DecodeOutput(drawn, rows, is_live, samples, beside)
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

        Raises:
            DeviceError: ttnn refused a call.
        """
        with _refusals("reading the output"):
            # Begun on all lanes before any is waited for.
            tokens, logits = (
                tuple(
                    None if tensor is None else lane.read(tensor, wait=False)
                    for lane, tensor in zip(self._lanes, tensors, strict=True)
                )
                for tensors in (tt_out.tokens, tt_out.logits)
            )
            events = [
                lane.event()
                for lane, *read in zip(self._lanes, tokens, logits, strict=True)
                if any(tensor is not None for tensor in read)
            ]
            if not async_read:
                while events:
                    ttnn.event_synchronize(events.pop())
        return replace(tt_out, tokens=tokens, logits=logits), events

    def process_decode_output_host(
        self, tt_out: DecodeOutput, is_tokens: bool = False
    ) -> ForwardOutput:
        """Shape an output on the host; see ``GeneratorBase.process_decode_output_host``.

        Returns:
            As ``decode_forward``.

        Raises:
            ValueError: ``is_tokens`` is not what the decode gave.
        """
        if is_tokens != tt_out.is_tokens:
            kind = "tokens" if tt_out.is_tokens else "logits"
            raise ValueError(f"{is_tokens=}, but the decode gave {kind}")
        if not is_tokens:
            return self._whole_logits(tt_out)[:, None]
        tokens = np.zeros((self._max_batch_size, 1), dtype=np.int32)
        for index, (lane, host) in enumerate(zip(self._lanes, tt_out.tokens, strict=True)):
            if host is not None:
                tokens[self._rows_of(index), 0] = lane.token_ids(host)
        tokens[~tt_out.is_live] = 0
        if tt_out.logits_rows is None:
            return torch.from_numpy(tokens)
        return torch.from_numpy(tokens), self._some_logits(tt_out, tt_out.logits_rows)

    # --- parts ---------------------------------------------------------------------------------

    def _lane(
        self,
        device: ttnn.MeshDevice,
        weights: DeviceWeights,
        planes: LaneCache,
        block_size: int,
    ) -> Lane:
        model = TTTransformer(
            self._config,
            device,
            weights,
            self._precision,
            max_seq_len=self._max_seq_len,
            max_rows=self._rows_per_lane,
            block_size=block_size,
        )
        sizes = LaneSizes(
            num_rows=self._rows_per_lane,
            max_seq_len=self._max_seq_len,
            block_size=block_size,
            local_vocab=weights.num_vocab_padded // device.get_num_devices(),
            hidden_size=self._config.hidden_size,
        )
        return Lane(device, model, planes, sizes, self._prefill_tracer, self._decode_tracer)

    def _whole_logits(self, output: DecodeOutput) -> torch.Tensor:
        """(B, V), of one lane without another copy of them."""
        empty = torch.zeros(self._rows_per_lane, self._config.vocab_size, dtype=torch.bfloat16)
        parts = [
            empty if host is None else lane.logits(host)[:, : self._config.vocab_size]
            for lane, host in zip(self._lanes, output.logits, strict=True)
        ]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        padding = np.flatnonzero(~output.is_live)
        if len(padding):
            logits[torch.from_numpy(padding)] = 0.0
        return logits

    def _some_logits(self, output: DecodeOutput, rows: Int64Array) -> torch.Tensor:
        """(H, V)."""
        of_lanes = {
            index: lane.logits(host)
            for index, (lane, host) in enumerate(zip(self._lanes, output.logits, strict=True))
            if host is not None
        }
        found = [of_lanes[row // self._rows_per_lane] for row in rows.tolist()]
        places = (rows % self._rows_per_lane).tolist()
        picked = [logits[place] for logits, place in zip(found, places, strict=True)]
        return torch.stack(picked)[:, : self._config.vocab_size]

    def _lane_of(self, slot: int) -> Lane:
        return self._lanes[int(slot) // self._rows_per_lane]

    def _rows_of(self, lane: int) -> slice:
        return slice(lane * self._rows_per_lane, (lane + 1) * self._rows_per_lane)

    def _interleaved(self, slots: Int64Array) -> list[int]:
        """Rows of a prefill, the first of every lane first, so that all lanes have work early."""
        lanes = slots // self._rows_per_lane
        turns = [int((lanes[:row] == lane).sum()) for row, lane in enumerate(lanes)]
        return sorted(range(len(slots)), key=lambda row: turns[row])

    def _limits(self, kv_cache: KVCache) -> CallLimits:
        """What calls must keep to; checks the cache.

        Raises:
            TypeError: It is not the one that was allocated last.
        """
        if self._call_limits is None or kv_cache is not self._cache:
            raise TypeError("kv_cache must be what allocate_kv_cache returned last")
        return self._call_limits

    def _next_sampling(
        self, params: DeviceSamplingParams | None, remap: Int64Array | None, *, reload: bool
    ) -> SamplingRows | None:
        """Settings of all slots for the device to take over; None if it has them."""
        if params is not None and reload:
            return parse_sampling(params, self._max_batch_size, self._config.vocab_size)
        if params is not None and self._sampling is None:
            raise ValueError("needs reload_sampling_params: the device has no settings yet")
        if remap is None or self._sampling is None:
            return None
        return self._sampling.take(remap)

    def _load(self, call: DecodeCall) -> None:
        if call.page_table is None:
            return
        for index, lane in enumerate(self._lanes):
            rows = self._rows_of(index)
            if call.tokens is None or call.positions is None:
                lane.load_page_table(call.page_table[rows])
            else:
                lane.load(call.tokens[rows], call.positions[rows], call.page_table[rows])

    def _load_sampling(self, settings: SamplingRows) -> None:
        self._sampling = settings
        for index, lane in enumerate(self._lanes):
            lane.load_sampling(settings.take(self._rows_of(index)))


def _check_sizes(
    config: ModelConfig, max_batch_size: int, max_seq_len: int, num_lanes: int
) -> None:
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


def _refuse_layers(page_tables_per_layer: Sequence[torch.Tensor] | None) -> None:
    if page_tables_per_layer is not None:
        raise ValueError("page_tables_per_layer given, but every layer uses page_table")


def _in_dram(host: ttnn.Tensor, device: ttnn.MeshDevice) -> ttnn.Tensor:
    return ttnn.to_device(host, device, memory_config=ttnn.DRAM_MEMORY_CONFIG)


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn ttnn's own errors into one that says what was done and what ttnn said."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{what}: ttnn refused a call: {ttnn_message(error)}") from error


if TYPE_CHECKING:  # fails type checking when the class and the protocols part ways
    _generator: type[Generator] = TTGenerator
    _budget: type[SupportsTokenBudget] = TTGenerator
