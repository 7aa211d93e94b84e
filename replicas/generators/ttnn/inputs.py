"""Inputs of one call of a lane: tensors of fixed shapes, built on the host, then on the device.

A lane's inputs have the same shapes for every request of a bucket (prefill) and for every step
(decode), so that programs are compiled once, and a captured trace is replayed after its input
tensors have been refreshed in place.

Dimensions: S tokens of a bucket, B rows of a lane's decode batch, K entries of a page table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import ttnn

from replicas.errors import ConfigError
from replicas.generators.ttnn.buckets import TILE, bucket_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    IntArray = npt.NDArray[np.integer[Any]]

PADDING_POSITION = -1
"""Position of a decode row without a request; the device skips it."""


@dataclass(frozen=True, slots=True, eq=False)
class TTPrefillInputs:
    """Inputs of one chunk of one sequence; tensors are row-major and equal on all chips.

    Attributes:
        tokens: uint32 (1, S); 0 past the chunk.
        rope_indices: uint32 (1, S), their positions; 0 past the chunk.
        page_table: int32 (1, K), the sequence's blocks from its start; 0 past them.
        chunk_page_table: int32 (1, S / block size), the blocks that the chunk is written to; 0,
            the null block, past them.
        chunk_start: int32 (1,), position of the first token, or None where that is 0.
        last_tile_start: uint32 (4,), start of the tiles with the last token's row.
        last_tile_end: uint32 (4,), end of these tiles.
        last_index: uint32 (1, 32), row of the last token within its tile, repeated.
    """

    tokens: ttnn.Tensor
    rope_indices: ttnn.Tensor
    page_table: ttnn.Tensor
    chunk_page_table: ttnn.Tensor
    chunk_start: ttnn.Tensor | None
    last_tile_start: ttnn.Tensor
    last_tile_end: ttnn.Tensor
    last_index: ttnn.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TTDecodeInputs:
    """Inputs of one token of each row; tensors are row-major and equal on all chips.

    Attributes:
        tokens: uint32 (1, B); 0 for padding rows.
        positions: int32 (B,), positions of the tokens; -1 for padding rows.
        rope_indices: uint32 (1, B), the positions again; 0 for padding rows.
        page_table: int32 (B, K); 0 past a row's blocks and for padding rows.
    """

    tokens: ttnn.Tensor
    positions: ttnn.Tensor
    rope_indices: ttnn.Tensor
    page_table: ttnn.Tensor


Inputs = TypeVar("Inputs", TTPrefillInputs, TTDecodeInputs)


def host_prefill_inputs(  # noqa: PLR0913 - what the shapes of a chunk depend on
    token_ids: IntArray,
    start: int,
    block_ids: Sequence[int] | IntArray,
    *,
    max_seq_len: int,
    block_size: int,
    table_width: int,
    hidden_size: int,
) -> TTPrefillInputs:
    """Lay out one chunk on the host.

    Args:
        token_ids: (n,) the tokens of the chunk, n >= 1.
        start: Position of the first of them; a multiple of ``block_size``.
        block_ids: The sequence's blocks from its start, those of the chunk included.
        max_seq_len: Tokens of the longest sequence; decides the bucket.
        block_size: Tokens per KV block.
        table_width: See ``buckets.prefill_table_width``.
        hidden_size: Of the model.

    Raises:
        ConfigError: The chunk does not begin at a block, is longer than the longest bucket, or has
            more tokens than its blocks.
    """
    num_tokens = len(token_ids)
    if start % block_size:
        raise ConfigError(f"a chunk starts at {start}, not at a multiple of {block_size=}")
    first_block, end_block = start // block_size, -(-(start + num_tokens) // block_size)
    if end_block > len(block_ids):
        raise ConfigError(
            f"{start + num_tokens} tokens need {end_block} blocks, but got {len(block_ids)}"
        )
    bucket = bucket_for(num_tokens, max_seq_len)
    owned = np.asarray(block_ids)[:end_block]
    last_tile, last_row = divmod(num_tokens - 1, TILE)
    first_row = last_tile * TILE
    return TTPrefillInputs(
        tokens=_host(_padded(token_ids, bucket)[None], ttnn.uint32),
        rope_indices=_host(
            _padded(np.arange(start, start + num_tokens), bucket)[None], ttnn.uint32
        ),
        page_table=_host(_padded(owned, table_width)[None], ttnn.int32),
        chunk_page_table=_host(
            _padded(owned[first_block:], bucket // block_size)[None], ttnn.int32
        ),
        chunk_start=_host(np.array([start]), ttnn.int32) if start else None,
        last_tile_start=_host(np.array([0, 0, first_row, 0]), ttnn.uint32),
        last_tile_end=_host(np.array([1, 1, first_row + TILE, hidden_size]), ttnn.uint32),
        last_index=_host(np.full((1, TILE), last_row), ttnn.uint32),
    )


def host_decode_inputs(
    token_ids: IntArray, positions: IntArray, page_table: IntArray, *, table_width: int
) -> TTDecodeInputs:
    """Lay out one decode step of a lane on the host.

    Args:
        token_ids: (B,) the last token of each row.
        positions: (B,) its position; -1 for padding rows.
        page_table: (B, at most ``table_width``) each row's blocks, 0 past them.
        table_width: See ``buckets.decode_table_width``.

    Raises:
        ConfigError: The page table is wider than ``table_width``.
    """
    is_live = positions >= 0
    return TTDecodeInputs(
        tokens=_host(np.where(is_live, token_ids, 0)[None], ttnn.uint32),
        positions=_host(np.where(is_live, positions, PADDING_POSITION), ttnn.int32),
        rope_indices=_host(np.where(is_live, positions, 0)[None], ttnn.uint32),
        page_table=host_page_table(is_live, page_table, table_width=table_width),
    )


def host_page_table(
    is_live: npt.NDArray[np.bool_], page_table: IntArray, *, table_width: int
) -> ttnn.Tensor:
    """Lay out ``TTDecodeInputs.page_table`` alone.

    Args:
        is_live: (B,) whether each row is live, not padding.
        page_table: See `host_decode_inputs`.
        table_width: See `host_decode_inputs`.

    Raises:
        ConfigError: The page table is wider than ``table_width``.
    """
    given = page_table.shape[1]
    if given > table_width:
        raise ConfigError(f"a page table has {given} blocks per row, the lane's only {table_width}")
    tables = np.zeros((len(is_live), table_width), dtype=np.int32)
    np.copyto(tables[:, :given], page_table, casting="same_kind", where=is_live[:, None])
    return _host(tables, ttnn.int32)


def to_device(inputs: Inputs, device: ttnn.MeshDevice) -> Inputs:
    """Allocate a host's inputs on every chip of a lane; freed with the returned tensors."""
    moved = {
        field.name: None if tensor is None else ttnn.to_device(tensor, device)
        for field in fields(inputs)
        for tensor in [getattr(inputs, field.name)]
    }
    return type(inputs)(**moved)


def refresh(on_device: Inputs, on_host: Inputs) -> None:
    """Overwrite inputs on the device in place, as captured traces require.

    The device receives them in command order. ``copy_host_to_device_tensor`` does not wait for
    that, but has read the host's bytes when it returns, so they may be freed or overwritten: it
    copies them into the command queue, or waits if the device reads large ones itself.

    Raises:
        ConfigError: Only one of them begins at position 0, and they use different programs.
    """
    for field in fields(on_device):
        target, source = getattr(on_device, field.name), getattr(on_host, field.name)
        if (target is None) != (source is None):
            raise ConfigError(f"{field.name} is set on one side only; these are two programs")
        if target is not None:
            ttnn.copy_host_to_device_tensor(source, target)


def _padded(values: IntArray, length: int) -> IntArray:
    out = np.zeros(length, dtype=np.int64)
    out[: len(values)] = values
    return out


def _host(values: IntArray, dtype: ttnn.DataType) -> ttnn.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
    return ttnn.from_torch(tensor, dtype=dtype, layout=ttnn.ROW_MAJOR_LAYOUT)
