"""Sampling draws from exactly the distribution that the parameters describe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine.step import NewRow
from replicas.philox import uniform
from replicas.sampling.sampler import (
    NO_ALLOWED_TOKEN,
    NO_DISTRIBUTION,
    SamplingColumns,
    best_tokens,
    block_maxima,
    sample,
)
from replicas.sampling_params import SamplingParams
from tests.replicas.sampling.reference_sampler import weights_of

VOCAB = 12


def draw(logits, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One token per row, all rows with the same parameters."""
    slots = np.zeros(len(logits), dtype=np.intp)
    numbers = np.asarray(uniforms, dtype=np.float64)
    params = columns([temperature], [top_k], [top_p], min_p)
    return sample(logits, params, slots, numbers).tolist()


def columns(temperature, top_k, top_p, min_p=0.0):
    """Columns of one slot for each value."""
    found = SamplingColumns(len(temperature))
    found.temperature[:], found.top_k[:], found.top_p[:] = temperature, top_k, top_p
    found.min_p[:] = min_p
    return found


def distribution(logits, temperature, top_k, top_p, min_p=0.0):
    """The definition in float64."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights, _ = weights_of(np.asarray(logits, dtype=np.float64), params)
    return weights / weights.sum()


def test_a_row_that_comes_brings_its_parameters():
    def row(**sampling):
        return NewRow(2, 0, [5], 1, 0, [[1]], SamplingParams(**sampling))

    found, chosen = (
        SamplingColumns(4),
        {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.5, "seed": -7},
    )
    found.add(row(**chosen))
    assert {name: getattr(found, name)[2].item() for name in chosen} == chosen
    found.add(row(top_k=2**40))
    assert found.top_k[2] == np.iinfo(np.int32).max, "more than any vocabulary"
    assert found.seed[2] == 0, "that of a request without one"


# A share of the examples, as each is two thousand draws.
@settings(max_examples=settings().max_examples // 4)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(-1, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.3, 0.613, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 0.4, 1.0]),
)
def test_shares_of_an_even_grid_are_the_defined_probabilities(
    logits, temperature, top_k, top_p, min_p
):
    grid = (np.arange(2000) + 0.5) / 2000
    rows = torch.tensor([logits]).expand(2000, -1)
    counts = np.bincount(draw(rows, grid, temperature, top_k, top_p, min_p), minlength=VOCAB)
    wanted = distribution(logits, temperature, top_k, top_p, min_p)
    assert np.abs(counts / 2000 - wanted).max() <= 1 / 1000 + 1e-9


def test_tie_goes_to_the_lowest_token_when_greedy():
    logits = torch.zeros(3, 5000)
    logits[1, [17, 40, 4999]] = 1.0
    logits[2, 4999] = 1.0
    assert draw(logits, [0.9] * 3, temperature=0.0) == [0, 17, 4999]


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_tiny_temperature_is_greedy(temperature):
    assert draw(torch.tensor([[0.0, 1.0, 0.999]]), [0.0], temperature) == [1]


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("vocab", [50, 1000])
def test_a_row_that_is_no_distribution_gets_no_token_and_leaves_the_others_theirs(vocab, what):
    logits = torch.randn(10, vocab, generator=torch.Generator().manual_seed(0))
    params = columns(
        [0.0, 1.0, 1.0, 1.0, 0.7] * 2, [0, 0, 5, 0, 40] * 2, [1.0, 1.0, 1.0, 0.9, 0.9] * 2
    )
    settings = params, np.arange(10), np.linspace(0.05, 0.95, 10)
    wanted = sample(logits, *settings)
    broken = logits.clone()
    # One NaN or infinity is enough; minus infinity is a token that is never drawn.
    broken[5:, 7 if what != -float("inf") else slice(None)] = what
    found = sample(broken, *settings)
    assert found[:5].tolist() == wanted[:5].tolist()
    assert found[5:].tolist() == [NO_DISTRIBUTION] * 5


@pytest.mark.parametrize("vocab", [50, 1000, 49_152])
def test_row_is_drawn_alike_in_any_batch(vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    params = columns(
        [0.0, 0.5, 1.0, 1.5, 0.7, 2.0], [0, 5, -1, 0, 100, 1], [1.0, 0.9, 1.0, 0.5, 0.8, 1.0]
    )
    numbers = np.linspace(0.05, 0.95, 6)
    together = sample(logits, params, np.arange(6), numbers).tolist()
    for order in ([5, 4, 3, 2, 1, 0], [2], [1, 3]):
        own = params, np.array(order), numbers[order]
        wanted = [together[row] for row in order]
        assert sample(logits[order], *own).tolist() == wanted
        assert sample(logits, *own, np.array(order)).tolist() == wanted


class Doubled:
    """Changes that double all logits.

    Attributes:
        indices: Those of the rows, in the order of the calls.
        token_ids: The tokens drawn from these rows.
    """

    def __init__(self):
        self.indices, self.token_ids = [], []

    def apply(self, logits, indices):
        logits *= 2
        self.indices += indices.tolist()

    def note(self, token_ids):
        self.token_ids += token_ids.tolist()


@pytest.mark.parametrize("vocab", [50, 256, 257, 1000, 49_152])
def test_changed_rows_are_drawn_as_if_their_logits_had_come_so(vocab):
    logits = torch.randn(14, vocab, generator=torch.Generator().manual_seed(0))
    params = columns(
        [0.0, 0.5, 1.0, 1.5, 0.7, 2.0, 1.0], [0, 5, -1, 0, 100, 1, 0], [1, 0.9, 1, 0.5, 0.8, 1, 1]
    )
    places = np.array([3, 9, 13, 0, 1, 2, 12])
    settings = params, np.arange(7), np.linspace(0.05, 0.95, 7), places
    doubled, before = Doubled(), logits.clone()
    found = sample(logits, *settings, doubled)
    assert found.tolist() == sample(2 * logits, *settings).tolist()
    assert torch.equal(logits, before)
    assert sorted(doubled.indices) == [*range(7)]
    assert found[doubled.indices].tolist() == doubled.token_ids


@pytest.mark.parametrize("sampling", [(0.0, 0), (1.0, 0), (1.0, 5)], ids=["best", "whole", "top-k"])
def test_a_row_without_an_allowed_token_is_told_from_one_that_is_no_distribution(sampling):
    logits = torch.full((3, 1000), -torch.inf)
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    temperature, top_k = sampling
    settings = columns([temperature], [top_k], [1.0]), np.zeros(3, dtype=int), np.full(3, 0.5)
    found = sample(logits, *settings, None, Doubled()).tolist()
    assert found == [NO_ALLOWED_TOKEN, NO_DISTRIBUTION, NO_DISTRIBUTION]


def test_logits_are_left_as_they_are_and_only_the_rows_that_are_asked_for_are_looked_at():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[[0, 2]] = torch.nan
    before = logits.clone()
    params = columns([1.0, 0.0, 0.5], [0, 0, 5], [1.0] * 3)
    tokens = sample(logits, params, np.arange(3), np.full(3, 0.5), np.array([4, 1, 3]))
    assert tokens[1] == logits[1].argmax()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("number", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_numbers_never_draw_what_is_masked_or_impossible(number):
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, 0.5, -torch.inf]])
    [token] = draw(logits, [number])
    assert token in {1, 2, 3}
    assert draw(logits, [number], top_k=2) in ([1], [3])
    assert draw(logits, [number], top_p=1e-6) == [1]


def reference(logits, temperature, top_k, top_p, min_p, number):
    """Return the draw, and how far the number is from another token's, as a share of all."""
    cumulative = distribution(logits, temperature, top_k, top_p, min_p).cumsum()
    target = number * cumulative[-1]
    found = int(cumulative.searchsorted(target, side="right"))
    margin = min(abs(target - c) for c in cumulative[max(0, found - 1) : found + 1])
    return found, margin / cumulative[-1]


@pytest.mark.parametrize("vocab", [255, 256, 257, 1000, 128_256])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0), (50, 1.0, 0.0), (900, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.9999, 0.0),
        (40, 0.5, 0.0), (0, 1.0, 0.1), (0, 1.0, 1e-6), (0, 0.9, 0.02), (20, 0.9, 0.02),
    ],
)  # fmt: skip
def test_tokens_are_those_of_a_sort_in_float64(vocab, spread, top_k, top_p, min_p):
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    numbers = uniform(np.full(8, 3), np.arange(8))
    tokens = draw(logits, numbers, 0.7, top_k, top_p, min_p)
    for row, token, number in zip(logits, tokens, numbers, strict=True):
        wanted, margin = reference(row, 0.7, top_k, top_p, min_p, number)
        assert token == wanted or margin < 1e-5


def test_equal_logits_are_ranked_by_token_over_blocks():
    logits = torch.zeros(1, 2000)
    logits[0, [1999, 700, 3]] = 5.0
    # Three best and, of all that are equal after them, the lowest two.
    grid = (np.arange(4000) + 0.5) / 4000
    assert set(draw(logits.expand(4000, -1), grid, top_k=5)) == {0, 1, 3, 700, 1999}


@given(allowed=st.lists(st.integers(0, 9999), max_size=12), count=st.integers(1, 30))
def test_the_best_of_few_allowed_tokens_are_searched_in_few_blocks(allowed, count):
    logits = torch.full((1, 10_000), -torch.inf)
    # Some are equal.
    logits[0, allowed] = torch.tensor([float(token_id % 3) for token_id in allowed])
    found = best_tokens(logits[0].numpy(), block_maxima(logits).numpy()[0], count)
    assert len(found) <= count * 256
    assert (found[:count] == (-logits[0]).argsort(stable=True)[:count].numpy()).all()


def test_tokens_with_no_probability_are_never_drawn_from_other_blocks():
    logits = torch.full((2, 1500), -torch.inf)
    logits[0, 700] = 0.0
    logits[1, [300, 1400]] = 0.0
    for number in (0.0, 0.3, np.nextafter(1.0, 0.0)):
        first, second = draw(logits, [number] * 2)
        assert (first, second) == (700, 300 if number < 0.5 else 1400)
        assert draw(logits, [number] * 2, top_p=0.9)[0] == 700


def test_bfloat16_logits_are_sampled():
    assert draw(torch.tensor([[0.0, 9.0, 0.0]], dtype=torch.bfloat16), [0.5], 0.1) == [1]
