"""Attention request by request, with the formula spelled out: what fast back ends are held to."""

from __future__ import annotations

import torch


def reference_attention(batch, cache):
    """Return an attention function as ``AttentionBackend.prepare`` does, of layers without more."""

    def attend(layer, q, spec=None, _sinks=None):
        k_plane, v_plane = cache.planes[layer]
        out = torch.empty_like(q)
        for request, length in enumerate(batch.seq_lens.tolist()):
            begin, end = batch.query_start_loc[request : request + 2].tolist()
            table = batch.block_table[cache.group_of[layer], request]
            blocks = torch.from_numpy(table[: -(-length // cache.block_size)])
            k = k_plane[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            v = v_plane[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            out[begin:end] = attend_one(q[begin:end], k, v, spec and spec.window)
        return out

    return attend


def attend_one(q, k, v, window=None):
    """Attend with the last n tokens of one sequence: (n, H, D), (G, length, D) -> (n, H, D)."""
    num_queries, _, head_dim = q.shape
    num_kv_heads, length, _ = k.shape
    # Query heads that share a KV head stand side by side: (G, H / G, n, D).
    grouped = q.transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_dim)
    scores = grouped @ k.unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
    is_visible = torch.arange(length) <= torch.arange(length - num_queries, length)[:, None]
    if window is not None:
        is_visible &= (
            torch.arange(length) > torch.arange(length - num_queries, length)[:, None] - window
        )
    scores = scores.masked_fill(~is_visible, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(scores.dtype)
    return (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1)
