"""Interface between the engine and a model: generators, their inputs and capabilities.

The text-only part is Tenstorrent's vLLM generator interface with its keyword names, shapes and
dtypes, so that a class written for their vLLM plug-in fits unchanged. Abilities of only some models
(mixed batches, per-layer callbacks) are separate small protocols, so that a minimal generator stays
minimal. Image and encoder-decoder models are in ``multimodal.py``.

Notation: N rows that prefill in this call; B = ``max_batch_size`` rows of the global decode batch;
K = blocks per sequence in the page table; T tokens and R requests of a flat batch; V vocabulary
size. A slot is a row of the global decode batch. A lane is the share of a generator that serves one
data-parallel group: ``lane = slot // (max_batch_size // tt_data_parallel)``; block ids are
lane-local.

Source: tt-metal ``models/common/readiness_check/contract_vllm.py`` and vllm-tt-plugin
``docs/DECODE_RELOAD_CONTRACT.md``, ``docs/MODEL_CAPABILITIES.md`` (decode contract 1). This module
computes nothing and imports neither torch nor ttnn at run time.
"""

# The interface is fixed by other projects, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from replicas.kv_groups import KVGroup

    Int32Array: TypeAlias = npt.NDArray[np.int32]
    Int64Array: TypeAlias = npt.NDArray[np.int64]

KVCache: TypeAlias = Any
"""Result of ``allocate_kv_cache``; opaque to the engine, often ``list[lane][layer] -> [k, v]``."""

ForwardOutput: TypeAlias = Any
"""Host logits ``torch.Tensor`` float (rows, 1, V); or, with ``sampling_params``, sampled tokens
int (rows,) or (rows, 1), or a pair (tokens, `DeviceLogProbs`) when those were asked for; or device
handles for ``read_decode_output`` when ``read_from_device`` is False. A class with
`output_tokens_per_step` W may yield tokens (rows, n), n <= W, each row padded with -1."""

DeviceLogProbs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""Log probabilities beside sampled tokens: float (rows,), those of the tokens; or float (rows, n)
and int (rows, n), those of the n likeliest tokens, best first, and the tokens. They are of the
model's logits, before temperature."""

LayerCallback: TypeAlias = Callable[[int], None]
"""Called with the index of a layer, 0-based, during a forward pass."""

KVCacheShape: TypeAlias = tuple[int, int, int, int]
"""(num_blocks, num_kv_heads, block_size, head_dim); num_blocks is per lane and counts block 0."""


class ModelCapabilities(TypedDict, total=False):
    """Abilities of a generator class; a missing key means its default, unknown keys are ignored.

    Attributes:
        supports_prefix_caching: ``prefill_forward`` honours ``start_pos`` > 0. Default False.
        supports_chunked_prefill: A prompt may be computed over several calls. Default False.
        supports_async_decode: Decode may run ahead without ``reload_inputs``. Default False.
        supports_sample_on_device: ``sampling_params`` is honoured. Default False.
        supports_device_penalties: Device sampling applies penalties. Default True.
        supports_device_grammar: Device sampling applies grammar masks. Default False.
        max_device_top_k: Largest top-k of device sampling; None for no limit of its own.
        output_tokens_per_step: Most tokens that a decode call yields per row. Default 1.
        supports_spec_decode: Accepts draft tokens for verification. Default False.
        supports_async_spec_decode: Does so while running ahead. Default False.
        spec_requirements: Requirements of the model for a speculative plan.
        spec_hidden_handoff: Hidden states are handed to the drafter on device. Default False.
        fabric_config: Keyword arguments for the device fabric's set-up.
        tt_adaptive_block_output: Decodes several rows, which may get fewer tokens; otherwise the
            class serves one row, whose prefill yields several tokens, too. Default False.
        tt_adaptive_block_max_prompt_tokens: Longest prompt for which it does.
        tt_block_kv_extent_tokens: KV positions from a row's `start_pos` on that a step with several
            tokens may touch; 0 is twice `output_tokens_per_step`.
        required_block_size: The only KV block size that the model supports; missing or None for
        any.
        device_draws_keep_no_state: Device draws depend only on logits, seed and position, so rows
            whose token is not needed may draw along, and a seed may be sent again. Ours; default
            False.
        supports_sample_in_prefill: ``prefill_forward`` also honours ``sampling_params``. Ours;
            default False.
        samples_on_device_if_asked: ``sampling_params`` is accepted by a class that is older than
            `supports_sample_on_device`; passed only if the configuration asks for it. Ours; default
            False.
        reads_decode_later: ``decode_forward(read_from_device=False)`` returns before the output is
            there. `supports_async_decode` implies it. Ours; default False.
        max_device_logprobs: Most likeliest tokens whose log probabilities device sampling returns
            in decode calls, beside that of the drawn token; None if it returns none at all. Not
            with `gives_logits_beside_tokens`. Ours; default None.
        gives_logits_beside_tokens: ``decode_forward`` accepts ``logits_rows`` together with
            ``sampling_params``. Ours; default False.
        supports_mixed_batch: Has ``forward_mixed``. Ours; default False.
        supports_hidden_states: Has ``forward_hidden`` and ``compute_logits``. Ours; default False.
        supports_layer_callbacks: Has ``set_layer_callbacks``. Ours; default False.
    """

    supports_prefix_caching: bool
    supports_chunked_prefill: bool
    supports_async_decode: bool
    supports_sample_on_device: bool
    supports_device_penalties: bool
    supports_device_grammar: bool
    max_device_top_k: int | None
    output_tokens_per_step: int
    supports_spec_decode: bool
    supports_async_spec_decode: bool
    spec_requirements: Mapping[str, object]
    spec_hidden_handoff: bool
    fabric_config: Mapping[str, object]
    tt_adaptive_block_output: bool
    tt_adaptive_block_max_prompt_tokens: int
    tt_block_kv_extent_tokens: int
    required_block_size: int | None
    device_draws_keep_no_state: bool
    supports_sample_in_prefill: bool
    samples_on_device_if_asked: bool
    reads_decode_later: bool
    max_device_logprobs: int | None
    gives_logits_beside_tokens: bool
    supports_mixed_batch: bool
    supports_hidden_states: bool
    supports_layer_callbacks: bool


class Exchange(Protocol):
    """Collective communication of ranks that share out experts; all make the same calls.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    def counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Send each rank its part of some numbers; return the parts sent to this rank.

        Args:
            counts: int64 (size * n,), n for each rank in order.

        Raises:
            GangLostError: A rank is no more.
        """
        ...

    def rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send each rank some rows.

        Args:
            rows: (sum(sent), D), in the order of ranks.
            sent: Rows for each rank.
            received: Rows from each rank.

        Returns:
            (sum(received), D), in the order of ranks.

        Raises:
            GangLostError: A rank is no more.
        """
        ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """``mesh_device`` of the torch generator: settings of the computation on the CPU.

    Attributes:
        dtype: Dtype of weights, activations and KV cache: float32, bfloat16 or float64 (oracle).
        load_format: "safetensors" reads the model folder's weights; "random" needs only its
            config.json and draws normal(0, 0.02) weights.
        seed: Seed of the random weights; equal seeds give equal weights in every dtype.
        attention: "fast" uses compiled kernels; "batched" PyTorch's operations.
        progress: Called while loading with (stage, fraction done in 0..1); must be quick.
        shares_kv: Whether other processes of this host may map the KV cache's memory.
        exchange: Communication with the other ranks of a gang, which have the other experts.
        expert_placement: For each expert the ranks that hold it; None gives each an equal run.
    """

    dtype: torch.dtype
    load_format: Literal["safetensors", "random"] = "safetensors"
    seed: int = 0
    attention: Literal["fast", "batched"] = "fast"
    progress: Callable[[str, float], None] | None = None
    shares_kv: bool = False
    exchange: Exchange | None = None
    expert_placement: Sequence[Sequence[int]] | None = None


NO_LOG_PROBS = -2
"""``num_logprobs`` of a row without log-probabilities; 0 means that of the sampled token."""


@dataclass(frozen=True, slots=True)
class DeviceSamplingParams:
    """Settings for sampling on device, one entry per row of the call.

    Padding rows hold ``PADDING_ROW``.
    Source: ``TTSamplingParams`` of vllm-tt-plugin.

    Attributes:
        temperature: 0.0 is greedy.
        top_k: Number of candidates kept.
        top_p: Cumulative probability kept, in (0, 1].
        presence_penalty: Added once per token already produced.
        frequency_penalty: Added per occurrence of a token already produced.
        repetition_penalty: Divides or multiplies the logits of tokens seen; 1.0 is off.
        seed: Per-request seed, or None to draw one.
        num_logprobs: Log-probabilities wanted; 0 for the sampled token only, -2 for none.
        enable_log_probs: Whether any log-probability is wanted for the row.
    """

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    presence_penalty: Sequence[float]
    frequency_penalty: Sequence[float]
    repetition_penalty: Sequence[float]
    seed: Sequence[int | None]
    num_logprobs: Sequence[int]
    enable_log_probs: Sequence[bool]


PADDING_ROW: Mapping[str, float | int | bool | None] = {
    "temperature": 0.0,
    "top_k": 1,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "num_logprobs": NO_LOG_PROBS,
    "enable_log_probs": False,
}
"""Values of ``DeviceSamplingParams`` for a padding row: greedy."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Concatenated tokens of one step: prefill chunks and decodes of R requests.

    R is at least 1. G is the number of KV groups, whose tables are in their order. Arrays have
    exactly the stated lengths; a generator may read them only during the call.

    Attributes:
        request_indices: int32 (T,), row 0..R-1 of each token's request in scheduled order.
        input_ids: int32 (T,), token ids.
        positions: int64 (T,), position of each token in its sequence, 0-based.
        slot_mapping: int64 (G, T), lane-local KV position, block * block_size + offset.
        query_start_loc: int32 (R + 1,), request r owns tokens query_start_loc[r]..[r + 1].
        seq_lens: int32 (R,), computed plus scheduled tokens.
        block_table: int32 (G, R, blocks of the longest), lane-local block ids; unused entries and
            those of blocks behind a window are 0, the null block, or of any block.
        dp_groups: int32 (R,), lane of each request.
        logits_indices: int64 (S,), flat token indices whose logits are wanted, in output order.
    """

    request_indices: Int32Array
    input_ids: Int32Array
    positions: Int64Array
    slot_mapping: Int64Array
    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_table: Int32Array
    dp_groups: Int32Array
    logits_indices: Int64Array

    @property
    def num_reqs(self) -> int:
        """Number of requests, R."""
        return len(self.seq_lens)

    @property
    def query_lens(self) -> Int32Array:
        """int32 (R,), tokens of each request in this batch."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def max_query_len(self) -> int:
        """Most tokens of a request in this batch."""
        return int(self.query_lens.max())

    @property
    def num_computed_tokens(self) -> Int32Array:
        """int32 (R,), tokens of each request before this batch."""
        return self.seq_lens - self.query_lens


GeneratorT = TypeVar("GeneratorT", bound="GeneratorBase")


class GeneratorBase(Protocol):
    """Life cycle of a model on a device: loading, cache, warm-up, output read-back."""

    model_capabilities: ClassVar[ModelCapabilities]

    @classmethod
    def initialize_vllm_model(
        cls: type[GeneratorT],
        hf_config: Any,  # noqa: ANN401 - a transformers configuration, or ours: no common base
        mesh_device: Any,  # noqa: ANN401 - CpuDevice, or a ttnn mesh that may not be imported here
        max_batch_size: int,
        *,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> GeneratorT:
        """Load the model onto the device.

        Args:
            hf_config: Model configuration with ``name_or_path`` (the model folder).
            mesh_device: The device, a ttnn mesh or ``CpuDevice``.
            max_batch_size: Rows of the global decode batch, all lanes together.
            max_seq_len: Longest sequence in tokens, prompt and output.
            tt_data_parallel: Number of lanes; divides ``max_batch_size``.
            optimizations: None, "performance", "balanced" or "accuracy"; a generator may
                ignore it.

        Returns:
            A generator ready for ``allocate_kv_cache``.

        Raises:
            ConfigError: The folder, configuration or weights do not fit this generator.
        """
        ...

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> KVCache:
        """Allocate the paged KV cache of every lane, zeroed.

        Args:
            kv_cache_shape: (num_blocks, num_kv_heads, block_size, head_dim) per lane and layer;
                num_blocks counts the null block 0.
            dtype: Dtype of the cached keys and values.
            num_layers: Layers to cache.

        Returns:
            The cache that the engine passes to every later call.
        """
        ...

    def warmup_model_prefill(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Compile (and with ``enable_trace`` capture) prefill for every padded length.

        Called twice, first with ``enable_trace`` False for both warm-ups, then True: compiling
        after a capture may corrupt trace memory. Touches no block but the null block.
        """
        ...

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
        """Compile (and capture) decode for (max_batch_size, 1) tokens and ``num_blocks`` columns.

        ``num_blocks`` is the page table's width K. Touches no block but the null block.
        """
        ...

    def read_decode_output(
        self, tt_out: ForwardOutput, async_read: bool = True
    ) -> tuple[ForwardOutput, Sequence[object]]:
        """Start copying a decode's device output to the host.

        Args:
            tt_out: Result of ``decode_forward(read_from_device=False)``.
            async_read: Do not wait for the copy.

        Returns:
            (host output, events to wait for before it may be read).
        """
        ...

    def process_decode_output_host(
        self, tt_out: ForwardOutput, is_tokens: bool = False
    ) -> ForwardOutput:
        """Shape a host output into torch tensors; formatting only.

        Args:
            tt_out: First element of ``read_decode_output``, after its events.
            is_tokens: It holds tokens sampled on device, not logits.

        Returns:
            Logits (B, 1, V) or tokens (B, 1).
        """
        ...


class TextDecoder(Protocol):
    """Model that decodes text; shared by text-only and image models."""

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
        """Compute one token of every live row of the whole padded batch; row == slot.

        The four commands are decode contract 1, which a class declares with the class attribute
        ``decode_input_update_contract = 1``. Never both reload flags; a reset implies
        ``reload_inputs``. Without ``supports_async_decode`` every call has ``reload_inputs``.

        Args:
            tokens: int32 (B, 1) last token of each row; 0 in padding rows.
            page_table: int32 (B, K) lane-local block ids, zero padded.
            kv_cache: From ``allocate_kv_cache``.
            start_pos: int32 (B,) position of that token; -1 marks a padding row, which is skipped:
                no KV write, and its output is zero.
            enable_trace: Replay the captured trace.
            read_from_device: False returns device handles for ``read_decode_output``.
            sampling_params: Sample on device, B entries; None returns logits.
            page_tables_per_layer: See ``prefill_forward``.
            reload_inputs: ``tokens``, ``start_pos`` and ``page_table`` are authoritative; otherwise
                the device continues from what it sampled and only its own positions count.
            reload_page_table: Only the page table changed. A row with only null blocks has ended;
                the device may keep computing it, without effect, until inputs are reloaded.
            reload_sampling_params: ``sampling_params`` changed.
            reset_sampling_state: Reset penalties and seeds of the rows.
            slot_remap: int32 (B,), row i takes over the device state of slot ``slot_remap[i]``,
                applied once; None when no row moved.
            **kwargs: Inputs of other model kinds. With a reset, if rows have penalties, their
                histories ``prompt_tokens`` and ``output_tokens``, int32 (B, longest) padded with
                -1; the device counts what it draws afterwards. With the capability
                ``gives_logits_beside_tokens`` also ``logits_rows``, H rows for which
                the host draws: the answer is then a pair of tokens, which of these rows mean
                nothing, and their logits float (H, V).

        Returns:
            Logits float (B, 1, V), rows of position -1 zero.

        Raises:
            TypeError: The retired ``reset_batch`` was passed.
        """
        ...


class Generator(GeneratorBase, TextDecoder, Protocol):
    """Text-only decoder model."""

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
    ) -> ForwardOutput:
        """Compute ``tokens[n, start_pos[n]:prompt_lens[n]]`` of every row and write their KV.

        Args:
            tokens: int32 (N, max(prompt_lens)), each prompt from position 0, right zero padded.
            page_table: int32 (N, K) lane-local block ids, right zero padded.
            kv_cache: From ``allocate_kv_cache``.
            enable_trace: Replay a captured trace where the model has one.
            prompt_lens: int (N,), END position of this chunk: computed plus scheduled tokens.
            start_pos: int32 (N,), tokens whose KV is already in the cache (earlier chunks or a
                prefix hit); the chunk starts there. 0 <= start_pos < prompt_lens.
            empty_slots: N global slots that the rows will decode in. They name each row's lane (and
                device state slot); they are not row numbers of this call.
            sampling_params: Sample on device, one entry per row; None returns logits.
            page_tables_per_layer: One page table per layer, for models whose layers cache
                differently; None when ``page_table`` serves them all.
            **kwargs: Inputs of other model kinds; a text-only model ignores them.

        Returns:
            Logits float (N, 1, V) of the last token of each chunk.
        """
        ...


DEFAULT_TOKEN_BUDGET = 131_072
"""KV tokens of a lane for a class that does not declare its own limit.
Source: vllm-tt-plugin's worker."""


class SupportsTokenBudget(Protocol):
    """Generator class that knows how much KV fits beside its weights."""

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
        """Return the KV tokens of one lane, all of its sequences together.

        Args:
            model_name: Model folder or hub name.
            num_devices: Chips of the mesh.
            tt_data_parallel: Lanes.
            max_model_len: Longest sequence in tokens.
            max_num_seqs: Slots of one lane.

        Returns:
            Token budget per lane. A class without this method gets `DEFAULT_TOKEN_BUDGET`.
        """
        ...


class DescribesKVCache(Protocol):
    """Generator that declares the contents of its cache where they may differ from the default.

    Attributes:
        kv_rope: Order of K's elements, as in `kv_transfer.layout.KVLayout.rope`; the default is
        "hf".
        kv_dtype: Element type, as in `KVLayout.dtype`, once the cache is allocated; the default is
            that of the engine's configuration.
    """

    kv_rope: ClassVar[str]

    @property
    def kv_dtype(self) -> str:
        """Element type of the allocated cache, as in `KVLayout.dtype`."""
        ...


class KeepsSlotState(Protocol):
    """Generator that keeps state for each slot besides its KV."""

    def release_request(self, slot: int) -> None:
        """Drop a slot's state: another sequence, or the same one from its start, will use it."""
        ...


class Closes(Protocol):
    """Generator with resources on the device, to be closed before the device."""

    def close(self) -> None:
        """Release the resources; idempotent."""
        ...


class SupportsPerLayerKVCache(Protocol):
    """Generator whose layers cache differently (sliding windows, shared layers)."""

    def allocate_kv_cache_per_layer(
        self, layers: Sequence[tuple[KVCacheShape, torch.dtype, int]]
    ) -> KVCache:
        """Allocate one cache per layer; used instead of ``allocate_kv_cache`` where present.

        Args:
            layers: (shape, dtype, tensor_idx) per layer; equal tensor_idx share a buffer.

        Returns:
            The cache, nested as by ``allocate_kv_cache``.
        """
        ...


class SupportsKVGroups(Protocol):
    """Generator with a block table for each KV group of a model."""

    def allocate_kv_groups(self, kv_groups: Sequence[KVGroup], dtype: torch.dtype) -> KVCache:
        """Allocate the cache of a model with several KV groups, instead of ``allocate_kv_cache``.

        Later calls give the tables of all groups, in this order: a ``FlatBatch`` in its arrays, the
        padded forms one for each layer in ``page_tables_per_layer``.

        Args:
            kv_groups: The model's KV groups; each layer is in one.
            dtype: Of the elements.
        """
        ...


class SupportsMixedBatch(Protocol):
    """Capability ``supports_mixed_batch``: prefill chunks and decodes in one pass."""

    def forward_mixed(self, batch: FlatBatch, kv_cache: KVCache) -> torch.Tensor:
        """Compute every token of the batch, write its KV, attend causally within each request.

        Args:
            batch: The step's tokens, every lane's together.
            kv_cache: From ``allocate_kv_cache``.

        Returns:
            Logits float (len(batch.logits_indices), V), in that order.
        """
        ...


class SupportsHiddenStates(Protocol):
    """Capability ``supports_hidden_states``: a mixed pass whose logits are computed afterwards.

    The logits of a long prompt need not exist at once: 2,048 tokens with a vocabulary of 128k take
    1 GiB in float32. Source: vLLM v1/worker/gpu_model_runner.py (``compute_logits``).
    """

    def forward_hidden(self, batch: FlatBatch, kv_cache: KVCache) -> torch.Tensor:
        """Do the same as ``SupportsMixedBatch.forward_mixed`` up to the final norm, included.

        Returns:
            (len(batch.logits_indices), N) in the model's dtype, N the hidden size. Read-only.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of some rows of ``forward_hidden``.

        Args:
            hidden: (S, N), rows of one or several passes.

        Returns:
            (S, V) in the model's dtype. Of all rows of a pass the same as ``forward_mixed``'s.
        """
        ...


class SupportsGang(Protocol):
    """Generator whose experts may be distributed over ranks that compute each layer together."""

    def forward_idle(self) -> None:
        """Take part in one forward pass of the other ranks without tokens of its own.

        Raises:
            GangLostError: A rank is no more.
        """
        ...


class ExpertLoad(NamedTuple):
    """What the experts of a model have computed.

    Attributes:
        num_tokens: int64 (layers with experts, experts): this rank's tokens that each expert has
            had, wherever it is.
        num_rows: Rows that this rank's experts have computed, its own and those of other ranks.
    """

    num_tokens: Int64Array
    num_rows: int


class SupportsExpertLoad(Protocol):
    """Generator that counts the load of its experts."""

    def expert_load(self) -> ExpertLoad | None:
        """Return the counts since warm-up; None for a model without experts."""
        ...


class SupportsLayerCallbacks(Protocol):
    """Capability ``supports_layer_callbacks``: reports when a layer reads and has written KV."""

    def set_layer_callbacks(
        self, before: LayerCallback | None, after: LayerCallback | None
    ) -> None:
        """Set callbacks around the attention of every layer in later forward passes, or None.

        They run on the calling thread, but not during warm-up.

        Args:
            before: Called when the KV of earlier tokens must be in the cache, as attention reads it
            next.
            after: Called when the layer's KV of this pass's tokens is in the cache.
        """
        ...
