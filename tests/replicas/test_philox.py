"""Counter-based random numbers are the published ones, whatever they are drawn together with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.philox import mint_seed, philox4x32, uniform

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
INT64 = st.integers(-(2**63), 2**63 - 1)


# Known answers of the Random123 distribution: philox4x32, 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_words_are_the_published_ones(counter, key, answer):
    def arrays(words):
        return tuple(np.array([word] * 2, dtype=np.uint64) for word in words)

    found = philox4x32(arrays(counter), arrays(key))
    assert [word.tolist() for word in found] == [[word] * 2 for word in answer]


@given(st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=1, max_size=8))
def test_number_depends_on_seed_and_index_alone(pairs):
    seeds, indices = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    together = uniform(seeds, indices)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(len(pairs))]
    assert together.tolist() == alone
    assert all(0.0 <= number < 1.0 for number in together)


def test_numbers_are_spread_evenly_over_indices_and_over_seeds():
    many, one = np.arange(20_000), np.full(20_000, 7)
    for numbers in (uniform(one, many), uniform(many, one)):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        # Chi-square with 19 degrees of freedom: 43.8 is the 0.1 % point.
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8


def test_high_half_of_a_seed_counts():
    seeds = np.array([1, 1 + 2**32, 1 - 2**63])
    assert len(set(uniform(seeds, np.zeros(3, dtype=np.int64)).tolist())) == 3


def test_minted_seeds_are_distinct_repeatable_and_fit():
    seeds = [mint_seed(base, count) for base in (0, 1, -5) for count in range(100)]
    assert seeds == [mint_seed(base, count) for base in (0, 1, -5) for count in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
