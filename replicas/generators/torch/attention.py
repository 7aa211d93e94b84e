"""Attention over the paged KV cache: a plain reference and a fast back end behind one protocol.

A back end prepares one pass (which blocks to gather, what to mask) and returns a function that
every layer calls. Positions past a sequence's end and the null block may hold anything, NaN
included, and never reach a result.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks of all lanes, S block size,
L longest context of a group in whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from replicas.generators.masks import causal_mask

if TYPE_CHECKING:
    from replicas.generators.torch.inputs import Int64Array, PagedBatch

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries (T, H, D), keys (P, G, S, D), values (P, G, S, D)) -> (T, H, D), for one layer."""

MAX_GATHERED_TOKENS = 32768
"""Bound on rows x L of one group of decodes, so that the gathered copy stays small."""


class AttentionBackend(Protocol):
    """Owner: scratch memory that lives across passes; one instance serves one thread."""

    def prepare(self, batch: PagedBatch, block_size: int, num_kv_heads: int) -> Attend:
        """Return the attention function of one pass, valid until the next ``prepare``."""
        ...


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold ``num_tokens``."""
    return -(-num_tokens // block_size)


class ReferenceAttention:
    """Attends request by request, spelling the formula out."""

    def prepare(self, batch: PagedBatch, block_size: int, num_kv_heads: int) -> Attend:
        """See ``AttentionBackend.prepare``."""

        def attend(q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            for request, length in enumerate(batch.seq_lens.tolist()):
                begin, end = batch.query_start_loc[request : request + 2].tolist()
                table = batch.block_table[request, : num_blocks_for(length, block_size)]
                blocks = torch.from_numpy(table)
                k = k_plane[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
                v = v_plane[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
                out[begin:end] = _attend_one(q[begin:end], k, v)
            return out

        return attend


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with the last tokens of one sequence.

    Args:
        q: (n, H, D), the queries of its last n tokens.
        k: (G, length, D), all of its keys.
        v: (G, length, D), all of its values.

    Returns:
        (n, H, D).
    """
    num_queries, _, head_dim = q.shape
    num_kv_heads, length, _ = k.shape
    # Query heads that share a KV head stand side by side: (G, H / G, n, D).
    grouped = q.transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_dim)
    scores = grouped @ k.unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
    is_visible = torch.from_numpy(causal_mask(np.arange(length - num_queries, length), length))
    weights = _softmax(scores.masked_fill(~is_visible, -torch.inf))
    return (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(scores.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Requests with one token each, attended in one go.

    Attributes:
        tokens: int64 (B,), their tokens in the pass.
        rows: int64 (B * G * L / S,), rows of a plane seen as (P * G, S * D), for each request and
            KV head its blocks in order.
        is_past_end: bool (B, 1, 1, L), positions that the sequence does not have.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    is_past_end: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """One request with several tokens, ``begin`` to ``end`` of the pass.

    Attributes:
        begin: First token.
        end: One past the last.
        length: Tokens of the sequence, these included.
        rows: int64 (G, blocks), rows of a plane seen as (P * G, S * D).
        is_visible: bool (n, length), or None when the chunk is the whole sequence.
    """

    begin: int
    end: int
    length: int
    rows: torch.Tensor
    is_visible: torch.Tensor | None


class FastAttention:
    """Batches decode rows of similar length; prefills run one by one in a fused kernel.

    Owner: two scratch buffers, for gathered keys and values.
    """

    def __init__(self) -> None:
        self._scratch = [torch.empty(0), torch.empty(0)]

    def prepare(self, batch: PagedBatch, block_size: int, num_kv_heads: int) -> Attend:
        """See ``AttentionBackend.prepare``."""
        starts, lengths = batch.query_start_loc, batch.seq_lens
        is_decode = np.diff(starts) == 1
        groups = [
            _decode_group(batch, members, block_size, num_kv_heads)
            for members in split_by_length(np.flatnonzero(is_decode), lengths, block_size)
        ]
        prefills = [
            _prefill(batch, int(request), block_size, num_kv_heads)
            for request in np.flatnonzero(~is_decode)
        ]

        def attend(q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            for group in groups:
                out.index_copy_(0, group.tokens, self._decode(q, k_plane, v_plane, group))
            for part in prefills:
                out[part.begin : part.end] = self._prefill(q, k_plane, v_plane, part)
            return out

        return attend

    def _decode(
        self, q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, group: _DecodeGroup
    ) -> torch.Tensor:
        _, num_kv_heads, _, head_dim = k_plane.shape
        num_rows = len(group.tokens)
        k = self._gather(0, k_plane, group.rows).view(num_rows, num_kv_heads, -1, head_dim)
        v = self._gather(1, v_plane, group.rows).view(num_rows, num_kv_heads, -1, head_dim)
        # Query heads as rows of a matrix: one product per KV head instead of one per query head.
        queries = q.index_select(0, group.tokens).view(num_rows, num_kv_heads, -1, head_dim)
        scores = (queries @ k.transpose(-1, -2)).mul_(head_dim**-0.5)
        weights = _softmax(scores.masked_fill_(group.is_past_end, -torch.inf))
        out = weights @ v
        if out.isnan().any():
            # A weight of 0 does not silence NaN or infinity, which freed blocks may hold. Clearing
            # them always would cost as much as the gather, so only do it when it matters.
            out = weights @ v.masked_fill_(group.is_past_end.transpose(-1, -2), 0)
        return out.view(num_rows, -1, head_dim)

    def _prefill(
        self, q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, part: _Prefill
    ) -> torch.Tensor:
        _, num_kv_heads, _, head_dim = k_plane.shape
        rows = part.rows.view(-1)
        k = self._gather(0, k_plane, rows).view(1, num_kv_heads, -1, head_dim)
        v = self._gather(1, v_plane, rows).view(1, num_kv_heads, -1, head_dim)
        out = functional.scaled_dot_product_attention(
            q[part.begin : part.end].transpose(0, 1).unsqueeze(0),
            k[:, :, : part.length],
            v[:, :, : part.length],
            attn_mask=part.is_visible,
            is_causal=part.is_visible is None,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1)

    def _gather(self, which: int, plane: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Copy blocks of one plane into scratch buffer ``which``; returns (rows, S * D)."""
        num_blocks, num_kv_heads, block_size, head_dim = plane.shape
        size = len(rows) * block_size * head_dim
        scratch = self._scratch[which]
        if scratch.numel() < size or scratch.dtype != plane.dtype:
            scratch = self._scratch[which] = torch.empty(size, dtype=plane.dtype)
        gathered = scratch[:size].view(len(rows), block_size * head_dim)
        flat = plane.view(num_blocks * num_kv_heads, block_size * head_dim)
        return torch.index_select(flat, 0, rows, out=gathered)


def split_by_length(
    requests: Int64Array,
    lengths: Int64Array,
    block_size: int,
    max_tokens: int = MAX_GATHERED_TOKENS,
) -> list[Int64Array]:
    """Group requests so that no gather is mostly padding, nor larger than the bound.

    Args:
        requests: (n,) rows of ``lengths`` to group.
        lengths: (R,) tokens per request, at least 1.
        block_size: Tokens per block; shorter differences do not split a group.
        max_tokens: Bound on group size times longest member, both with up to a block of padding; a
            single request may exceed it.

    Returns:
        Groups, longest first; each request is in one of them.
    """
    order = requests[np.argsort(-lengths[requests], kind="stable")]
    groups: list[Int64Array] = []
    first = 0
    for index, length in enumerate(lengths[order].tolist()):
        longest = int(lengths[order[first]]) + block_size
        is_short = 2 * (length + block_size) < longest
        if is_short or (index > first and (index - first + 1) * longest > max_tokens):
            groups.append(order[first:index])
            first = index
    if len(order):
        groups.append(order[first:])
    return groups


def _plane_rows(blocks: Int64Array, num_kv_heads: int) -> torch.Tensor:
    """Turn block ids (..., K) into rows (..., G, K) of a plane seen as (P * G, S * D)."""
    heads = np.arange(num_kv_heads)[:, None]
    return torch.from_numpy(blocks[..., None, :] * num_kv_heads + heads)


def _decode_group(
    batch: PagedBatch, members: Int64Array, block_size: int, num_kv_heads: int
) -> _DecodeGroup:
    lengths = batch.seq_lens[members]
    num_blocks = num_blocks_for(int(lengths.max()), block_size)
    is_past_end = np.arange(num_blocks * block_size) >= lengths[:, None]
    return _DecodeGroup(
        tokens=torch.from_numpy(batch.query_start_loc[members]),
        rows=_plane_rows(batch.block_table[members, :num_blocks], num_kv_heads).view(-1),
        is_past_end=torch.from_numpy(is_past_end)[:, None, None],
    )


def _prefill(batch: PagedBatch, request: int, block_size: int, num_kv_heads: int) -> _Prefill:
    begin, end = batch.query_start_loc[request : request + 2].tolist()
    length = int(batch.seq_lens[request])
    start = length - (end - begin)
    blocks = batch.block_table[request, : num_blocks_for(length, block_size)]
    is_visible = torch.from_numpy(causal_mask(np.arange(start, length), length))
    return _Prefill(
        begin=begin,
        end=end,
        length=length,
        rows=_plane_rows(blocks, num_kv_heads),
        is_visible=is_visible if start else None,
    )


BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "fast": FastAttention,
    "reference": ReferenceAttention,
}
"""The values of ``CpuDevice.attention``."""
