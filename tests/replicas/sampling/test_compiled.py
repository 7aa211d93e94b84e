"""Sampling in C gives what PyTorch and NumPy give, with each instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.generators.torch import native
from replicas.generators.torch.native import Feature
from replicas.sampling.compiled import read_entries

WITHOUT = (native.NO_FEATURES, Feature.AVX512 | Feature.AMX, native.ALL_FEATURES)
VOCABS = st.sampled_from([1, 7, 255, 256, 257, 512, 1000])
SPECIAL = [-np.inf, np.nan, 0.0, -0.0, 1e30, -1e30, 88.5, -1e4]


@pytest.fixture(params=WITHOUT, ids=["all", "AVX2", "portable"], scope="module")
def kernels(request):
    return native.kernel_set(request.param)


def draw_logits(data, num_rows, special=SPECIAL):
    """Rows with many equal logits, or of any size, some of whose logits are special ones."""
    vocab, dice = data.draw(VOCABS), np.random.default_rng(data.draw(st.integers(0, 99)))
    values = dice.normal(size=(num_rows, vocab)) * data.draw(st.sampled_from([0.5, 3.0, 300.0]))
    if data.draw(st.booleans()):
        values = values.round()
    if data.draw(st.booleans()):
        values = np.sort(values, axis=1)
    for row in values:
        chosen = data.draw(st.sampled_from(special))
        row[dice.random(vocab) < data.draw(st.sampled_from([0.0, 0.1, 0.99]))] = chosen
    return values.astype(np.float32)


def in_order(row):
    """Tokens, the likeliest first, the lower one first if equal; those without a number last."""
    return np.argsort(-np.where(np.isnan(row), -np.inf, row), kind="stable")


@settings(max_examples=60)
@given(st.data())
def test_entries_are_those_of_a_sort_in_float64(kernels, data):
    logits = draw_logits(data, data.draw(st.integers(1, 3)))
    vocab = logits.shape[1]
    tokens = st.lists(st.integers(0, vocab - 1), max_size=3)
    named = [data.draw(tokens) for _ in logits]
    counts = [min(vocab, data.draw(st.sampled_from([0, 1, 5, 20, 1000]))) for _ in logits]
    tensor = torch.from_numpy(logits)
    if data.draw(st.booleans()):
        tensor = tensor.bfloat16()
        logits = tensor.float().numpy()
    places = np.array(data.draw(st.permutations(range(len(logits)))))
    logits = logits[places]
    found = read_entries(kernels, tensor, places, named, counts)
    log_sums = torch.from_numpy(logits).double().logsumexp(-1)
    # No distribution: all logits are minus infinity.
    log_sums[torch.isneginf(log_sums)] = torch.nan
    np.testing.assert_allclose(found.log_sums, log_sums, rtol=1e-7, atol=1e-6)
    at = 0
    for row, given_tokens, count in zip(logits, named, counts, strict=True):
        best = in_order(row)[:count]
        wanted = np.array([*given_tokens, *best], dtype=np.int64)
        stop = at + len(wanted)
        np.testing.assert_array_equal(found.token_ids[at:stop], wanted)
        values = row[wanted]
        values[len(given_tokens) :][np.isnan(row[best])] = -np.inf
        np.testing.assert_array_equal(found.values[at:stop], values)
        ranks = [(row >= row[token]).sum() for token in given_tokens]
        np.testing.assert_array_equal(found.ranks[at:stop], [*ranks, *range(1, count + 1)])
        at = stop
    assert at == len(found.token_ids)


def test_tokens_outside_of_the_vocabulary_are_errors(kernels):
    row = torch.zeros(8)
    for token_id in (-1, 8):
        with pytest.raises(ValueError, match="index outside"):
            read_entries(kernels, row[None], np.array([0]), [[0, token_id]], [0])
    with pytest.raises(ValueError, match="index outside"):
        read_entries(kernels, row[None], np.array([1]), [[0]], [0])
    with pytest.raises(ValueError, match="sizes that contradict"):
        read_entries(kernels, row[None], np.array([0]), [[]], [9])
