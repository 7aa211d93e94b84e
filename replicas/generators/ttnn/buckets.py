"""Shapes of a lane: prompt lengths, widths of page tables, and the models that do not fit.

Pure: importable without ttnn, so that a configuration is refused before any device is opened.
Every shape that a compiled program depends on comes from here and from the model, never from a
request: programs are compiled while warming up, and no more after that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.layer_specs import AttentionSpec
from replicas.generators.model_config import layer_specs
from replicas.generators.torch.models.common import pre_norm_layer

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig

TILE = 32
"""Rows and columns of a ttnn tile."""

SMALLEST_BUCKETS = (128, 1024)
"""Chunks of a prompt are padded to one of these, or above them to a power of two.
Source: `get_padded_prefill_len` of tt-metal's models/tt_transformers/tt/common.py."""

MAX_CHUNK = 8192
"""Tokens of the longest chunk that one call computes; longer prompts take several calls."""

MAX_ROWS = 32
"""Rows of a decode batch of one lane; limit of the paged decode operations."""

_TABLE_ALIGNMENT = 8
"""Entries of 32 bytes: a row of a page table starts at a multiple of them in DRAM."""


def prefill_buckets(max_seq_len: int) -> tuple[int, ...]:
    """Return the lengths that a chunk is padded to, rising; the last is the longest chunk.

    Args:
        max_seq_len: Tokens of the longest sequence, output included.
    """
    smallest, middle = SMALLEST_BUCKETS
    longest = min(-(-max_seq_len // smallest) * smallest, MAX_CHUNK)
    lengths = [smallest]
    length = middle
    while length < longest:
        lengths.append(length)
        length *= 2
    if longest > smallest:
        lengths.append(longest)
    return tuple(lengths)


def traced_buckets(max_seq_len: int) -> tuple[int, ...]:
    """Return the buckets whose chunks are traced: the short ones, where sending commands shows.

    A trace of each of the others would only take memory. Source: the lengths that tt_transformers'
    model_config.py traces on an n150.
    """
    return tuple(n for n in prefill_buckets(max_seq_len) if n <= SMALLEST_BUCKETS[-1])


def bucket_for(num_tokens: int, max_seq_len: int) -> int:
    """Return the length that a chunk of ``num_tokens`` is padded to.

    Raises:
        ConfigError: No bucket is that long: the prompt must be cut into chunks.
    """
    buckets = prefill_buckets(max_seq_len)
    for bucket in buckets:
        if num_tokens <= bucket:
            return bucket
    raise ConfigError(f"{num_tokens} tokens do not fit one chunk, the longest is {buckets[-1]}")


def split_chunks(start: int, end: int, max_seq_len: int, block_size: int) -> list[tuple[int, int]]:
    """Cut positions start..end-1 into chunks; each begins at a block, the first before ``start``.

    A chunk's keys and values are written in whole blocks. So the first chunk begins at the block
    that holds ``start``, and recomputes what that block holds before it.

    Args:
        start: First position whose KV is not in the cache.
        end: One past the last position.
        max_seq_len: Tokens of the longest sequence.
        block_size: Tokens per KV block; divides every bucket.

    Returns:
        (first position, one past the last position) of each chunk.
    """
    longest = prefill_buckets(max_seq_len)[-1]
    first = start // block_size * block_size
    return [(begin, min(begin + longest, end)) for begin in range(first, end, longest)]


def decode_table_width(max_seq_len: int, block_size: int) -> int:
    """Return the entries of a decode row's page table: the sequence's blocks, padded."""
    return _aligned(-(-max_seq_len // block_size))


def prefill_table_width(max_seq_len: int, block_size: int) -> int:
    """Return the entries of a chunk's page table; a padded chunk may end past the sequence."""
    longest = prefill_buckets(max_seq_len)[-1]
    return _aligned(-(-(max_seq_len + longest) // block_size))


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the rows of the embedding over all chips of a lane: whole tiles on each chip."""
    return -(-vocab_size // (TILE * tp)) * TILE * tp


def check_lane(config: ModelConfig, tp: int, *, max_rows: int, block_size: int) -> None:
    """Refuse a model, or sizes, that a lane of ``tp`` chips cannot compute.

    Args:
        config: The model.
        tp: Chips of the lane.
        max_rows: Rows of a decode batch of the lane.
        block_size: Tokens per KV block.

    Raises:
        ConfigError: Says which two numbers do not go together.
    """
    _check_layers(config)
    _check_division(config, tp)
    _check_tiles(config)
    heads = config.num_attention_heads // tp
    if heads > TILE:
        raise ConfigError(
            f"{config.num_attention_heads} query heads on {tp} chips are {heads} per chip, the "
            f"paged decode operations take {TILE}; use a mesh with more chips per lane"
        )
    if not 1 <= max_rows <= MAX_ROWS:
        raise ConfigError(
            f"{max_rows} sequences per lane, a lane decodes 1 to {MAX_ROWS}; "
            "lower max_num_seqs or use more lanes"
        )
    if block_size < TILE or SMALLEST_BUCKETS[0] % block_size:
        raise ConfigError(
            f"block_size {block_size} does not divide the smallest bucket, {SMALLEST_BUCKETS[0]} "
            f"tokens, or is no multiple of a tile, {TILE}; use 32, 64 or 128"
        )


def check_cache(num_blocks: int, table_width: int) -> None:
    """Refuse a KV cache that is too small for the page tables of a decode step.

    Args:
        num_blocks: Blocks of the lane's cache, the null block included.
        table_width: See ``decode_table_width``.

    Raises:
        ConfigError: Names both.
    """
    if num_blocks < table_width:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks, a row's page table has {table_width}, and the "
            "device wants no more entries than blocks; lower max_model_len or allow more KV tokens"
        )


def check_window(config: ModelConfig, max_seq_len: int) -> None:
    """Refuse sequences that are longer than a window of attention.

    Raises:
        ConfigError: Gives both numbers.
    """
    window = config.sliding_window
    if window is not None and window < max_seq_len:
        raise ConfigError(
            f"{config.name_or_path}: sliding window {window} is shorter than {max_seq_len=}, and "
            f"meshes compute no windows; set max_seq_len to {window} or less"
        )


def _check_layers(config: ModelConfig) -> None:
    """Refuse layers other than Llama's with biases and norms of heads."""
    where = "which this package computes on the CPU alone; serve it without a mesh, or with a class"
    if config.experts is not None:
        raise ConfigError(f"{config.name_or_path} has experts, {where} of others (generator)")
    if config.latent is not None:
        raise ConfigError(
            f"{config.name_or_path} has latent attention, {where} of others (generator)"
        )
    same = replace(
        config, norm_kind="rms", activation="silu", attention_scale=None, attention_soft_cap=None,
        sliding_window=None, layer_types=(), local_rope=None,
    )  # fmt: skip
    plain = pre_norm_layer(same, 0)
    found = (
        replace(layer, attention=replace(layer.attention, window=None))
        for layer in layer_specs(config)
        if isinstance(layer.attention, AttentionSpec)
    )
    is_partial = config.rope.share != 1.0
    changes = is_partial, config.logits_soft_cap is not None, config.embedding_scale != 1.0
    if any(changes) or any(layer != plain for layer in found):
        raise ConfigError(
            f"{config.name_or_path} has layers of family {config.family!r}, {where} of others "
            "(generator)"
        )


def _check_division(config: ModelConfig, tp: int) -> None:
    if config.num_attention_heads % tp or config.num_key_value_heads % tp:
        raise ConfigError(
            f"{config.num_attention_heads} query heads and {config.num_key_value_heads} KV heads "
            f"do not divide by the {tp} chips of a lane; use more lanes (tt_data_parallel)"
        )
    if config.intermediate_size % (TILE * tp):
        raise ConfigError(
            f"intermediate_size {config.intermediate_size} is not a multiple of {TILE * tp}: "
            f"a tile of {TILE} on each of {tp} chips"
        )
    if config.hidden_size % (TILE * tp):
        raise ConfigError(
            f"hidden_size {config.hidden_size} is not a multiple of {TILE * tp}: what {tp} chips "
            f"have is summed in tiles of {TILE} on each of them; use more lanes (tt_data_parallel)"
        )


def _check_tiles(config: ModelConfig) -> None:
    if config.head_dim != TILE and config.head_dim % (2 * TILE):
        raise ConfigError(
            f"head_dim {config.head_dim} is neither {TILE} nor a multiple of {2 * TILE}; the "
            "device cannot rotate such heads"
        )


def _aligned(num_blocks: int) -> int:
    return -(-num_blocks // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
