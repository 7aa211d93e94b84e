"""Grouping of decode rows: everything once, nothing mostly padding, nothing over the bound."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replicas.generators.torch.attention import split_by_length


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.sampled_from([16, 32]),
    st.integers(1, 2000),
    st.data(),
)
def test_groups_hold_each_request_once_within_the_bounds(values, block_size, max_tokens, data):
    lengths = np.array(values)
    is_member = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    requests = np.flatnonzero(is_member)
    groups = split_by_length(requests, lengths, block_size, max_tokens)
    assert sorted(np.concatenate([requests[:0], *groups])) == list(requests)
    for group in groups:
        longest, shortest = lengths[group].max(), lengths[group].min()
        assert len(group) == 1 or len(group) * longest <= max_tokens
        assert 2 * (shortest + block_size) >= longest


def test_nothing_to_group_gives_no_groups():
    assert split_by_length(np.array([], dtype=np.int64), np.array([3, 4]), 16) == []
