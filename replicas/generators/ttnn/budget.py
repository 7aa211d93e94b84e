"""How many tokens of KV fit a lane of a mesh: arithmetic alone, without a device. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.ttnn.buckets import MAX_ROWS, TILE, check_lane, padded_vocab_size
from replicas.generators.ttnn.profiles import profile
from replicas.meshes import lane_shape

if TYPE_CHECKING:
    from replicas.config import MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.profiles import Dtype, Profile
    from replicas.meshes import MeshSpec

TILE_BYTES: dict[Dtype, int] = {"bfloat8_b": 1088, "bfloat16": 2048}
"""Bytes of 32x32 elements."""

RESERVED_SHARE = 0.1
"""Of each chip's DRAM, for activations, rotary tables, inputs and fragments. Assumed; it leaves
Llama-3.1-8B on one Wormhole about the 32,768 tokens that vllm-tt-plugin gives it."""


def native_token_budget(
    model: ModelConfig, mesh: MeshSpec, settings: MeshConfig, tt_data_parallel: int
) -> int:
    """Tokens of KV that fit each lane's DRAM beside the weights, at most what its rows can fill.

    Every chip of a lane has the same share of weights and KV, so it is one chip's arithmetic. The
    rounding of each slot up to a block, which ``num_blocks`` adds, comes out of the reserve.

    Args:
        model: The model.
        mesh: The mesh.
        settings: Its profile, and the trace region of each chip.
        tt_data_parallel: Lanes, which share the chips.

    Raises:
        ConfigError: The lanes do not divide the chips, the model does not divide among a lane's, or
            weights and a tile of KV need more than a chip's DRAM; says both numbers.
    """
    _, tp = lane_shape(mesh, tt_data_parallel)
    check_lane(model, tp, max_rows=1, block_size=TILE)
    chosen = profile(settings.optimizations)
    dram = mesh.dram_bytes_per_chip
    usable = int(dram * (1 - RESERVED_SHARE)) - settings.trace_region_size
    weights = weight_bytes_per_chip(model, chosen, tp)
    num_rows = (usable - weights) // _row_bytes_per_chip(model, chosen, tp)
    if num_rows < 1:
        raise ConfigError(
            f"{model.name_or_path} does not fit mesh {mesh.name} in {tt_data_parallel} lanes: its "
            f"weights in {chosen.weight_dtype} take {weights / 1e9:.2f} GB of each chip, and of "
            f"its {dram / 1e9:.2f} GB {max(usable, 0) / 1e9:.2f} GB are left for weights and KV; "
            "use fewer lanes (tt_data_parallel), a larger mesh or optimizations: performance"
        )
    return min(num_rows * TILE, MAX_ROWS * model.max_position_embeddings)


def num_blocks(num_tokens: int, block_size: int, num_slots: int) -> int:
    """KV blocks of a lane with room for ``num_tokens``, however its slots share them.

    Source: ``get_num_available_blocks_tt`` of vllm-tt-plugin's worker.

    Args:
        num_tokens: Token budget of the lane.
        block_size: Tokens per block.
        num_slots: Sequences of the lane, each of which may leave most of its last block unused.
    """
    return -(-(num_tokens + block_size * num_slots) // block_size)


def weight_bytes_per_chip(model: ModelConfig, chosen: Profile, tp: int) -> int:
    """Bytes of the weights on each of ``tp`` chips of a lane, as ``weights`` lays them out.

    Args:
        model: The model; its heads and sizes are shared out evenly.
        chosen: Dtypes.
        tp: Chips of the lane.
    """
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    heads = model.num_attention_heads // tp
    qkv = (heads + 2 * (model.num_key_value_heads // tp)) * model.head_dim
    vocab = padded_vocab_size(model.vocab_size, tp) // tp
    attention = hidden * qkv + heads * model.head_dim * hidden
    matrices = _matrix_bytes(attention, chosen.weight_dtype)
    matrices += _matrix_bytes(3 * hidden * inner, chosen.mlp_dtype)
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
    return model.num_hidden_layers * (matrices + vectors) + ends


def _matrix_bytes(num_elements: int, dtype: Dtype) -> int:
    return num_elements * TILE_BYTES[dtype] // TILE**2


def _row_bytes_per_chip(model: ModelConfig, chosen: Profile, tp: int) -> int:
    """Bytes of 32 tokens of KV in all layers on one chip."""
    tiles = -(-model.head_dim // TILE)
    units = 2 * model.num_hidden_layers * (model.num_key_value_heads // tp)
    return units * tiles * TILE_BYTES[chosen.kv_dtype]
