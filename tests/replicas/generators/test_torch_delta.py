"""Gated delta rules: the chunked form, and which states a pass reads and writes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.generators.torch.delta import chunked_delta_rule
from replicas.generators.torch.states import StateRun, state_places

HEADS, KEYS, VALUES = 3, 5, 7


def token_by_token(q, k, v, rates, decays, state):
    """The rule as it is defined."""
    out = []
    for token in range(q.shape[1]):
        state = state * decays[:, token, None, None].exp()
        missing = v[:, token] - torch.einsum("hd,hde->he", k[:, token], state)
        rated = missing * rates[:, token, None]
        state = state + torch.einsum("hd,he->hde", k[:, token], rated)
        out.append(torch.einsum("hd,hde->he", q[:, token], state))
    return torch.stack(out, dim=1), state


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 200), seed=st.integers(0, 2**31), strength=st.sampled_from([1, 30]))
def test_chunks_give_what_single_tokens_do(length, seed, strength):
    stream = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(HEADS, *shape, generator=stream, dtype=torch.float64)

    q, k, v = draw(length, KEYS), draw(length, KEYS), draw(length, VALUES)
    k = torch.nn.functional.normalize(k, dim=-1)
    rates, decays = draw(length).sigmoid(), -strength * draw(length).exp()
    state = draw(KEYS, VALUES)
    wanted = token_by_token(q, k, v, rates, decays, state)
    found = chunked_delta_rule(q, k, v, rates, decays, state)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def places(table, starts, ends, block_size=4):
    counts = np.array(ends) - np.array(starts)
    batch = SimpleNamespace(
        query_start_loc=np.concatenate(([0], np.cumsum(counts))), seq_lens=np.array(ends)
    )
    return state_places(batch, np.array(table), block_size)


@pytest.mark.parametrize(
    ("table", "start", "end", "runs"),
    [
        ([7, 7, 7], 0, 10, [StateRun(0, 10, None, 7)]),
        # The state after 8 tokens stays in block 5.
        ([5, 5, 6], 0, 10, [StateRun(0, 8, None, 5), StateRun(8, 10, 5, 6)]),
        ([5, 5, 6], 3, 8, [StateRun(0, 5, 5, 5)]),
        ([5, 5, 6], 8, 12, [StateRun(0, 4, 5, 6)]),
        ([3, 5, 6], 2, 9, [StateRun(0, 2, 3, 3), StateRun(2, 6, 3, 5), StateRun(6, 7, 5, 6)]),
    ],
    ids=["one block", "checkpoint", "up to a checkpoint", "from a checkpoint", "two checkpoints"],
)
def test_a_prompt_leaves_a_state_where_the_next_entry_is_another_block(table, start, end, runs):
    assert places([table], [start], [end]).runs == runs


def test_single_tokens_go_together():
    found = places([[1, 2], [3, 3], [4, 5], [6, 6]], [4, 0, 1, 6], [5, 1, 7, 7])
    assert found.singles.tolist() == [0, 1, 8]
    assert found.read.tolist() == [1, 3, 6]
    assert found.written.tolist() == [2, 3, 6]
    assert found.is_first.tolist() == [False, True, False]
    assert found.runs == [StateRun(2, 5, 4, 4), StateRun(5, 8, 4, 5)]
