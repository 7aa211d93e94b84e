"""How many KV blocks fit: arithmetic alone, so that what cannot work is refused at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.simulated.profiles import engine_profile
from replicas.generators.simulated.tokens import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from replicas.config import EngineConfig
    from replicas.generators.model_config import ModelConfig

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Element sizes of the dtypes that an engine computes in."""


def resolve_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """The engine's dtype; "auto" is the checkpoint's, half precision or none is bfloat16.

    On a simulated mesh it is that of the bytes that travel, whatever the checkpoint says.
    """
    if config.simulated_mesh is not None:
        return "float32"
    if config.dtype != "auto":
        return config.dtype
    return model.dtype if model.dtype in DTYPE_BYTES else "bfloat16"


def bytes_per_block(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of one KV block over all layers, K and V; of a simulated mesh's, those held here."""
    if config.simulated_mesh is not None:
        return BYTES_PER_TOKEN * config.block_size
    elements = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    return elements * config.block_size * DTYPE_BYTES[resolve_dtype(config, model)]


def num_blocks_per_lane(config: EngineConfig, model: ModelConfig) -> int:
    """KV blocks of each lane, null block included: the configured count, or what memory holds.

    Memory is the configured bytes, or the DRAM of a simulated mesh.

    Raises:
        ConfigError: It holds no usable block, or the simulated mesh cannot be; says the numbers.
    """
    if config.simulated_mesh is not None:
        profile = engine_profile(config, config.simulated_mesh)
        return config.num_blocks or 1 + profile.max_tokens_per_lane // config.block_size
    if config.num_blocks is not None:
        return config.num_blocks
    size = bytes_per_block(config, model)
    count = config.kv_cache_memory_bytes // config.tt_data_parallel // size
    if count < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} holds no KV block for each of "
            f"{config.tt_data_parallel} lanes: a block takes {size} bytes"
        )
    return count


def position_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Positions that the served model was made for, or the one that a simulated mesh stands for.

    Raises:
        ConfigError: The simulated mesh cannot be; says the numbers.
    """
    if config.simulated_mesh is not None:
        return engine_profile(config, config.simulated_mesh).model.max_context
    return model.max_position_embeddings


def longest_sequence(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence of an engine, from its configuration and its model's alone.

    Raises:
        ConfigError: As `derive_max_model_len` and `num_blocks_per_lane`.
    """
    return derive_max_model_len(
        config, position_limit(config, model), num_blocks_per_lane(config, model)
    )


def derive_max_model_len(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """Longest sequence that the model and one lane's KV cache allow.

    Args:
        config: The engine's configuration.
        model_limit: Positions that the model was made for.
        num_blocks: KV blocks of a lane, null block included.

    Raises:
        ConfigError: The asked length exceeds what the model or the KV cache holds; both numbers.
    """
    asked = config.max_model_len if config.max_model_len is not None else model_limit
    if asked > model_limit:
        raise ConfigError(
            f"max_model_len {asked} exceeds the model's limit of {model_limit} positions; "
            "lower max_model_len"
        )
    room = (num_blocks - 1) * config.block_size
    if asked > room:
        memory = "raise kv_cache_memory_bytes"
        if config.simulated_mesh is not None:
            memory = f"give a lane more of {config.simulated_mesh.board}'s chips"
        raise ConfigError(
            f"max_model_len {asked} does not fit the KV cache, which holds {room} tokens per lane "
            f"({num_blocks - 1} blocks of {config.block_size}); {memory} or lower max_model_len"
        )
    if config.enable_chunked_prefill is False and config.max_num_batched_tokens < asked:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len "
            f"{asked} and chunked prefill is off: the longest prompt could never run"
        )
    return asked
