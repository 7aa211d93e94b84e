"""The heads of each shard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.sharding import head_shards


@pytest.mark.parametrize(
    ("num_kv_heads", "num_shards", "wanted"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (2, 3, [(0, 1), (0, 1), (1, 2)]),
        (3, 4, [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_are_split_in_order_with_the_rest_in_front(num_kv_heads, num_shards, wanted):
    assert head_shards(num_kv_heads, num_shards) == tuple(range(*bounds) for bounds in wanted)


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_head_is_somewhere_and_shards_are_as_equal_as_can_be(num_kv_heads, num_shards):
    shards = head_shards(num_kv_heads, num_shards)
    held = [head for shard in shards for head in shard]
    counts = [held.count(head) for head in range(num_kv_heads)]
    assert len(shards) == num_shards
    assert held == sorted(held)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, -1)])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(InvalidLayoutError, match="must be positive"):
        head_shards(*counts)
