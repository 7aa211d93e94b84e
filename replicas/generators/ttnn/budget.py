"""KV capacity of a lane of a mesh in tokens: arithmetic, without a device. Pure.

Every chip of a lane has an equal share of everything, so one chip's arithmetic suffices. Beside
weights and KV its DRAM has the activations of the longest chunk, the outputs of traces, rotary
tables and the trace region. Inputs, staging tensors, ttnn's own buffers and fragmentation are
covered by ``RESERVED_SHARE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.ttnn.buckets import (
    MAX_ROWS,
    TILE,
    check_lane,
    padded_vocab_size,
    prefill_buckets,
    traced_buckets,
)
from replicas.generators.ttnn.profiles import TILE_BYTES, profile
from replicas.generators.ttnn.programs import bank_columns, product_sizes
from replicas.tt.meshes import lane_shape
from replicas.tt.trace_regions import trace_region_bytes

if TYPE_CHECKING:
    from replicas.config import MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.profiles import Dtype, Profile
    from replicas.tt.meshes import MeshSpec

RESERVED_SHARE = 0.03
"""Share of each chip's DRAM for uses that `LaneMemory` does not list. Assumed; ttnn's allocator
offers 0.1 % less than the memory of a Wormhole chip."""

_ACTIVATION_BYTES = 2
"""Bytes of a bfloat16 element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMemory:
    """Use of the DRAM of one chip of a lane, in bytes.

    Attributes:
        dram: Total DRAM.
        weights: See `weight_bytes_per_chip`.
        activations: See `activation_bytes_per_chip`.
        outputs: Persistent logits: of each traced call, and of calls whose output is being copied.
        rope: Rotary tables.
        trace_region: Reserved for traces.
        reserved: See `RESERVED_SHARE`.
        block: One KV block, keys and values of all layers.
    """

    dram: int
    weights: int
    activations: int
    outputs: int
    rope: int
    trace_region: int
    reserved: int
    block: int

    @property
    def usable(self) -> int:
        """Bytes for weights and KV."""
        others = self.activations + self.outputs + self.rope + self.trace_region + self.reserved
        return self.dram - others

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that fit; negative if the weights do not fit."""
        return (self.usable - self.weights) // self.block


def lane_memory(
    model: ModelConfig,
    mesh: MeshSpec,
    settings: MeshConfig,
    tt_data_parallel: int,
    *,
    block_size: int = TILE,
    max_seq_len: int | None = None,
) -> LaneMemory:
    """Compute the memory use of each chip of a lane.

    Args:
        model: The model.
        mesh: The mesh.
        settings: The mesh's profile, traces and trace region.
        tt_data_parallel: Lanes, which share the chips.
        block_size: Tokens per KV block.
        max_seq_len: Tokens of the longest sequence; None is all positions of the model.

    Raises:
        ConfigError: The lanes do not divide the chips, or the model does not divide among a lane's
            chips; gives both numbers.
    """
    _, tp = lane_shape(mesh, tt_data_parallel)
    check_lane(model, tp, max_rows=1, block_size=block_size)
    chosen = profile(settings.optimizations, model)
    length = max_seq_len or model.max_position_embeddings
    dram = mesh.dram_bytes_per_chip
    return LaneMemory(
        dram=dram,
        weights=weight_bytes_per_chip(model, chosen, tp, mesh.chip.dram_banks),
        activations=activation_bytes_per_chip(model, tp, length),
        outputs=_output_bytes_per_chip(model, settings, tp, length),
        rope=2 * length * model.head_dim * _ACTIVATION_BYTES,
        trace_region=trace_region_bytes(settings, model.num_hidden_layers, tt_data_parallel),
        reserved=int(dram * RESERVED_SHARE),
        block=block_size // TILE * _row_bytes_per_chip(model, chosen, tp),
    )


def native_token_budget(  # noqa: PLR0913 - what the memory of a lane depends on
    model: ModelConfig,
    mesh: MeshSpec,
    settings: MeshConfig,
    tt_data_parallel: int,
    *,
    block_size: int = TILE,
    num_slots: int = MAX_ROWS,
    max_seq_len: int | None = None,
) -> int:
    """Return the tokens of KV that fit each lane's DRAM, at most as many as 32 rows can fill.

    Memory suffices for `num_blocks` of the result, which rounds each slot up to whole blocks.

    Args:
        model: See `lane_memory`.
        mesh: See `lane_memory`.
        settings: See `lane_memory`.
        tt_data_parallel: See `lane_memory`.
        block_size: See `lane_memory`.
        num_slots: Sequences of the lane.
        max_seq_len: See `lane_memory`.

    Raises:
        ConfigError: As in `lane_memory`; or the weights and one block more than there are slots do
            not fit a chip's DRAM; gives both numbers.
    """
    memory = lane_memory(
        model, mesh, settings, tt_data_parallel, block_size=block_size, max_seq_len=max_seq_len
    )
    free_blocks = memory.num_blocks - num_slots
    if free_blocks < 1:
        usable = max(memory.usable, 0)
        ways = _ways_to_fit(mesh, settings, tt_data_parallel, memory)
        raise ConfigError(
            f"{model.name_or_path} does not fit mesh {mesh.name} in {tt_data_parallel} lanes: its "
            f"weights in {profile(settings.optimizations, model).weight_dtype} take "
            f"{memory.weights / 1e9:.2f} GB of each chip. Of its {memory.dram / 1e9:.2f} GB, "
            f"{usable / 1e9:.2f} GB are left for weights and KV, of which {num_slots} slots need "
            f"at least {(num_slots + 1) * memory.block / 1e9:.2f} GB; {', or '.join(ways)}"
        )
    return min(free_blocks * block_size, MAX_ROWS * model.max_position_embeddings)


def _ways_to_fit(
    mesh: MeshSpec, settings: MeshConfig, tt_data_parallel: int, memory: LaneMemory
) -> list[str]:
    """Return advice for a configuration whose model does not fit."""
    ways = [f"use a larger mesh than {mesh.name}"]
    if tt_data_parallel > 1:
        ways.append(f"fewer lanes than tt_data_parallel {tt_data_parallel}")
    if profile(settings.optimizations) is not profile("performance"):
        ways.append("mesh.optimizations: performance")
    if settings.trace_region_size:
        ways.append(f"a smaller mesh.trace_region_size than {settings.trace_region_size}")
    if memory.num_blocks > 1:
        ways.append("fewer slots (max_batch_size)")
    return ways


def num_blocks(num_tokens: int, block_size: int, num_slots: int) -> int:
    """Return the KV blocks of a lane with room for ``num_tokens``, however slots share them.

    Source: ``get_num_available_blocks_tt`` of vllm-tt-plugin's worker.

    Args:
        num_tokens: Token budget of the lane.
        block_size: Tokens per block.
        num_slots: Sequences of the lane, each of which may leave most of its last block unused.
    """
    return -(-(num_tokens + block_size * num_slots) // block_size)


def weight_bytes_per_chip(model: ModelConfig, chosen: Profile, tp: int, dram_banks: int = 1) -> int:
    """Return the bytes of weights on each of ``tp`` chips of a lane, in the layout of ``weights``.

    Args:
        model: The model; its heads and sizes are shared out evenly.
        chosen: Dtypes.
        tp: Chips of the lane.
        dram_banks: Banks of a chip, which get equal stripes of a layer's matrices, in whole tiles;
            1 for the size on disk.
    """
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    heads = model.num_attention_heads // tp
    qkv = (heads + 2 * (model.num_key_value_heads // tp)) * model.head_dim
    vocab = padded_vocab_size(model.vocab_size, tp) // tp
    matrices = 0
    for name, (rows, columns) in product_sizes(model, tp).items():
        tiles = rows // TILE * bank_columns(columns // TILE, dram_banks) * dram_banks
        last, others = (TILE_BYTES[chosen.weight(name, is_last=last)] for last in (True, False))
        matrices += tiles * (last + (model.num_hidden_layers - 1) * others)
    # A vector fills a row of tiles.
    vector = 2 * hidden
    vector += 2 * model.head_dim if model.qk_norm else 0
    vector += qkv if model.qkv_bias else 0
    vector += hidden if model.o_bias else 0
    vector += 2 * inner + hidden if model.mlp_bias else 0
    vectors = _matrix_bytes(vector * TILE, chosen.vector_dtype)
    ends = _matrix_bytes((vocab + 1) * hidden, chosen.vector_dtype)
    ends += _matrix_bytes(vocab * hidden, chosen.weight_dtype)
    ends += _matrix_bytes(hidden * TILE, chosen.vector_dtype)
    return matrices + model.num_hidden_layers * vectors + ends


def activation_bytes_per_chip(model: ModelConfig, tp: int, max_seq_len: int) -> int:
    """Return the peak DRAM use of a chunk of the longest bucket in bytes, without its inputs.

    Equal to measurements on ttnn's mock device. Activations of a decode step are in L1.

    Args:
        model: The model.
        tp: Chips of the lane.
        max_seq_len: Tokens of the longest sequence; decides the longest bucket.
    """
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) // tp
    qkv = heads * model.head_dim
    # Largest number of activation columns at any point, without cos and sin, which stay throughout.
    widest = max(
        # The residual, the MLP's input, gate and up; then its product instead of the input.
        2 * hidden + 2 * inner,
        hidden + 3 * inner,
        # The residual, the attention's input, its projection; then that one split into heads.
        2 * hidden + qkv,
        hidden + 2 * qkv,
        # The residual, a branch's output and their sum; or a branch's summands, the reduction's
        # intermediate result, and their sum.
        3 * hidden if tp == 1 else 4 * hidden + hidden // tp,
    )
    longest = prefill_buckets(max_seq_len)[-1]
    return longest * (widest + 2 * model.head_dim) * _ACTIVATION_BYTES


def _output_bytes_per_chip(
    model: ModelConfig, settings: MeshConfig, tp: int, max_seq_len: int
) -> int:
    """Return bytes of persistent logits and of the vocabulary's padding bias."""
    num_kept = 2  # the bias, and logits of an earlier prompt that are being copied
    if settings.trace != "none":
        # Logits of the decode that returns them, and of the decode that draws from them.
        num_kept += 1 if settings.sample_on_device == "none" else 2
    if settings.trace == "all":
        # For each traced bucket: a first chunk, and later chunks with small and with large pieces.
        num_kept += 3 * len(traced_buckets(max_seq_len))
    vocab = padded_vocab_size(model.vocab_size, tp) // tp
    return num_kept * TILE * vocab * _ACTIVATION_BYTES


def _matrix_bytes(num_elements: int, dtype: Dtype) -> int:
    return num_elements * TILE_BYTES[dtype] // TILE**2


def _row_bytes_per_chip(model: ModelConfig, chosen: Profile, tp: int) -> int:
    """Return bytes of 32 tokens of KV in all layers on one chip."""
    # A chip holds its share of the heads, and whole tiles of each.
    return sum(
        spec.planes * (spec.heads // tp) * -(-spec.width // TILE) * TILE_BYTES[chosen.kv_dtype]
        for spec in model.kv_specs(chosen.kv_dtype)
    )
