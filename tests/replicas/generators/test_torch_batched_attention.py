"""Batched attention gives what the formula gives, request by request."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.generators.layer_specs import AttentionSpec, linear
from replicas.generators.rope_config import RopeConfig
from replicas.generators.torch import attention
from replicas.generators.torch.attention import BatchedAttention
from replicas.generators.torch.row_attention import attend_rows
from tests.replicas.generators.reference_attention import reference_attention

BLOCK, WIDTH, HEADS, SIZE = 4, 12, 2, 8


def spec_of(num_heads=HEADS, **changes):
    projections = linear("qkv", 1, 1), linear("o", 1, 1)
    return AttentionSpec(
        num_heads, HEADS, SIZE, *projections, RopeConfig("default", 1e4), **changes
    )


def passes():
    part = st.tuples(st.integers(0, 20), st.one_of(st.just(1), st.integers(1, 25)))
    return st.lists(part, min_size=1, max_size=6)


def make_pass(parts, share, seed):
    """A batch, a cache with NaN wherever nothing may be read, and queries."""
    random = np.random.default_rng(seed)
    counts = np.array([now for _, now in parts])
    lengths = np.array([sum(part) for part in parts])
    table = 1 + random.permutation(len(parts) * WIDTH).reshape(-1, WIDTH)
    used = np.arange(WIDTH) * BLOCK < lengths[:, None]
    planes = torch.full((2, 1 + len(parts) * WIDTH, HEADS, BLOCK, SIZE), math.nan)
    for blocks, length in zip(table, lengths, strict=True):
        for position in range(length):
            filled = torch.from_numpy(random.standard_normal((2, HEADS, SIZE)))
            planes[:, blocks[position // BLOCK], :, position % BLOCK] = filled.float()
    batch = SimpleNamespace(
        query_start_loc=np.concatenate(([0], np.cumsum(counts))),
        seq_lens=lengths,
        block_table=np.where(used, table, 0)[None],
    )
    q = torch.from_numpy(random.standard_normal((counts.sum(), share * HEADS, SIZE))).float()
    cache = SimpleNamespace(planes=[planes.unbind(0)], block_size=BLOCK, group_of=[0])
    return batch, cache, q


@settings(max_examples=60, deadline=None)
@given(passes(), st.sampled_from([1, 3]), st.sampled_from([None, 1, 5, 100]), st.integers(0, 999))
def test_rows_of_any_sizes_attend_as_each_request_does_alone(parts, share, window, seed):
    batch, cache, q = make_pass(parts, share, seed)
    spec = spec_of(share * HEADS, window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MOST_QUERIES", 8)
        patch.setattr(attention, "MOST_KEYS", 100)
        found = BatchedAttention().prepare(batch, cache)(0, q, spec)
    wanted = reference_attention(batch, cache)(0, q, spec)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_blocks_behind_a_window_are_not_read():
    batch, cache, q = make_pass([(30, 1), (8, 9)], 1, 0)
    spec = spec_of(window=5)
    wanted = BatchedAttention().prepare(batch, cache)(0, q, spec)
    for plane in cache.planes[0]:
        plane[batch.block_table[0, 0, :6]] = math.nan
        plane[batch.block_table[0, 1, :1]] = math.nan
    assert torch.equal(BatchedAttention().prepare(batch, cache)(0, q, spec), wanted)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_scores_are_capped_and_sinks_take_weight(num_queries):
    stream = torch.Generator().manual_seed(0)
    q = torch.randn(2, num_queries, 4, SIZE, generator=stream)
    k, v = torch.randn(2, 2, HEADS, 6, SIZE, generator=stream)
    sinks = torch.randn(4, generator=stream)
    visible = torch.ones(2, 1, num_queries, 6, dtype=torch.bool).tril(6 - num_queries)
    spec = spec_of(4, scale=0.7, soft_cap=1.5)
    found = attend_rows(q, k, v, visible, spec, sinks)
    for head in range(4):
        scores = q[:, :, head] @ k[:, head // 2].transpose(1, 2) * 0.7
        scores = (torch.tanh(scores / 1.5) * 1.5).masked_fill(~visible[:, 0], -torch.inf)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks[head].exp())
        torch.testing.assert_close(found[:, :, head], weights @ v[:, head // 2])
