"""Attention over the paged KV cache: a plain reference and a fast back end behind one protocol.

A back end prepares one pass (which rows to keep, what to gather, what to mask) and returns a
function that every layer calls. Positions past a sequence's end and the null block may hold
anything, NaN included, and never reach a result.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks of all lanes, S block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from replicas.generators.masks import causal_mask
from replicas.generators.torch.kernels import (
    DecodeRows,
    PlainKernels,
    decode_attention_for,
    kernels_for,
)

if TYPE_CHECKING:
    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.generators.torch.kernels import Kernels
    from replicas.generators.torch.kv_cache import TorchKVCache

Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries (T, H, D), keys, then values (T, 2 * G, D)) -> (T, H, D).

Both are parts of one tensor; the keys and values are those of the pass, and already in the cache.
"""

_MAX_PLAIN_PROMPT = 256
"""Up to this length two batched products beat the fused kernel, which tiles by longer pieces."""

_MAX_SCORES_BYTES = 4 << 20
"""Scores of prompts that are treated together: what a core's share of the cache holds."""


class AttentionBackend(Protocol):
    """Holds nothing that changes.

    Attributes:
        kernels: What a pass does besides, in the same spirit.
    """

    kernels: Kernels | PlainKernels

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """Return the attention function of one pass, which every layer calls once."""
        ...


class ReferenceAttention:
    """Attends request by request, spelling the formula out.

    Attributes:
        kernels: See ``AttentionBackend``.
    """

    kernels: Kernels | PlainKernels

    def __init__(self) -> None:
        self.kernels = PlainKernels()

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """See ``AttentionBackend.prepare``."""

        def attend(layer: int, q: torch.Tensor, _kv: torch.Tensor) -> torch.Tensor:
            k_plane, v_plane = cache.planes[layer]
            out = torch.empty_like(q)
            for request, length in enumerate(batch.seq_lens.tolist()):
                begin, end = batch.query_start_loc[request : request + 2].tolist()
                table = batch.block_table[request, : blocks_for(length, cache.block_size)]
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
class _Prompts:
    """Requests of equal length that begin here, side by side in the pass.

    Attributes:
        begin: Their first token.
        num_requests: How many.
        length: Tokens of each.
    """

    begin: int
    num_requests: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Several tokens of a request whose beginning is in the cache.

    Attributes:
        begin: Its first token in the pass.
        end: One past its last.
        length: Tokens of the sequence, these included.
        blocks: int64 (K,), its blocks.
        is_visible: bool (n, length).
    """

    begin: int
    end: int
    length: int
    blocks: torch.Tensor
    is_visible: torch.Tensor


class FastAttention:
    """Decodes by a kernel that reads the blocks; prompts over their fresh keys.

    Args:
        dtype: Of all tensors.
        head_dim: D.
        share: H / G.

    Attributes:
        kernels: See ``AttentionBackend``.
    """

    kernels: Kernels | PlainKernels

    def __init__(self, dtype: torch.dtype, head_dim: int, share: int) -> None:
        self.kernels = kernels_for(dtype)
        self._attend_decodes = decode_attention_for(dtype, head_dim, share)

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """See ``AttentionBackend.prepare``."""
        is_decode = np.diff(batch.query_start_loc) == 1
        decodes = _decodes(batch, np.flatnonzero(is_decode))
        others = list(_others(batch, np.flatnonzero(~is_decode), cache.block_size))

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            if decodes is not None:
                self._attend_decodes(q, decodes, cache.planes[layer], out)
            for part in others:
                if isinstance(part, _Prompts):
                    _attend_prompts(part, q, kv, out)
                else:
                    _attend_chunk(part, q, cache.planes[layer], out)
            return out

        return attend


def _decodes(batch: PagedBatch, requests: Int64Array) -> DecodeRows | None:
    if not len(requests):
        return None
    # Longest first: threads take them in order, and the last ones should be short.
    requests = requests[np.argsort(-batch.seq_lens[requests], kind="stable")]
    return DecodeRows(
        batch.query_start_loc[requests],
        np.ascontiguousarray(batch.block_table[requests]),
        batch.seq_lens[requests],
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens``."""
    return -(-num_tokens // block_size)


def _attend_prompts(part: _Prompts, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
    count, length = part.num_requests, part.length
    here = slice(part.begin, part.begin + count * length)
    shape = (count, length, -1, q.shape[-1])
    queries, (k, v) = q[here].view(shape), kv[here].view(shape).chunk(2, dim=2)
    target = out[here].view(shape)
    if length > _MAX_PLAIN_PROMPT:
        found = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        target.copy_(found.transpose(1, 2))
        return
    hidden = _hidden(length, queries.shape[2] // k.shape[2], q.dtype)
    size = max(1, _MAX_SCORES_BYTES // (queries.shape[2] * length**2 * q.element_size()))
    for first in range(0, count, size):
        some = slice(first, first + size)
        _attend_short(queries[some], k[some], v[some], target[some], hidden)


@lru_cache(maxsize=8)
def _hidden(length: int, share: int, dtype: torch.dtype) -> torch.Tensor:
    """(share * length, length): for each of the heads of a KV head 0, or -inf for later tokens."""
    is_later = torch.from_numpy(~causal_mask(np.arange(length), length))
    return (
        torch.zeros(length, length, dtype=dtype).masked_fill_(is_later, -torch.inf).repeat(share, 1)
    )


def _attend_short(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, hidden: torch.Tensor
) -> None:
    """Whole prompts: q and out (R, n, H, D), k and v (R, n, G, D), hidden (H / G * n, n)."""
    count, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    share = num_heads // num_kv_heads
    # (R * G, H / G * n, D): one product per KV head.
    queries = q.view(count, length, num_kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(count * num_kv_heads, share * length, head_dim)
    k, v = (t.transpose(1, 2).reshape(-1, length, head_dim) for t in (k, v))
    mask = hidden.expand(len(queries), -1, -1)
    scores = torch.baddbmm(mask, queries, k.transpose(1, 2), alpha=head_dim**-0.5)
    found = torch.bmm(scores.softmax(dim=-1), v)
    found = found.view(count, num_kv_heads, share, length, head_dim).permute(0, 3, 1, 2, 4)
    out.copy_(found.flatten(2, 3))


def _attend_chunk(
    part: _Chunk, q: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    k, v = (
        plane.index_select(0, part.blocks).transpose(0, 1).flatten(1, 2)[None, :, : part.length]
        for plane in planes
    )
    found = functional.scaled_dot_product_attention(
        q[part.begin : part.end].transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=part.is_visible,
        enable_gqa=True,
    )
    out[part.begin : part.end] = found.squeeze(0).transpose(0, 1)


def _others(
    batch: PagedBatch, requests: Int64Array, block_size: int
) -> Iterator[_Prompts | _Chunk]:
    """Requests of several tokens; prompts of equal length that are neighbours go together."""
    counts = np.diff(batch.query_start_loc)
    prompts: list[int] = []
    for request in requests.tolist():
        count, length = int(counts[request]), int(batch.seq_lens[request])
        is_like = prompts and prompts[-1] == request - 1 and counts[prompts[-1]] == count == length
        if prompts and not is_like:
            yield _prompts(batch, prompts)
            prompts = []
        if count == length:
            prompts.append(request)
            continue
        begin = int(batch.query_start_loc[request])
        yield _Chunk(
            begin=begin,
            end=begin + count,
            length=length,
            blocks=torch.from_numpy(batch.block_table[request, : blocks_for(length, block_size)]),
            is_visible=torch.from_numpy(causal_mask(np.arange(length - count, length), length)),
        )
    if prompts:
        yield _prompts(batch, prompts)


def _prompts(batch: PagedBatch, requests: list[int]) -> _Prompts:
    first = requests[0]
    return _Prompts(
        begin=int(batch.query_start_loc[first]),
        num_requests=len(requests),
        length=int(batch.seq_lens[first]),
    )


BACKENDS: Mapping[str, Callable[[torch.dtype, int, int], AttentionBackend]] = {
    "fast": FastAttention,
    "reference": lambda _dtype, _head_dim, _share: ReferenceAttention(),
}
"""The values of ``CpuDevice.attention``, made for a dtype, D and H / G."""
