"""Drafts of the next tokens, and how many of them are accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.speculation import NgramDrafter, accepted_runs


@pytest.mark.parametrize(
    ("drawn", "drafts", "counts", "runs"),
    [
        ([5], [0], [1], [1]),
        ([5], [5], [1], [1]),
        ([5, 6, 7], [5, 6, 0], [3], [3]),
        ([5, 6, 7], [5, 6, 7], [3], [3]),
        ([5, 6, 7], [9, 6, 0], [3], [1]),
        ([5, 6, 7], [5, 9, 7], [3], [2]),
        ([5, 6, 7, 8, 9], [5, 1, 7, 8, 1], [2, 1, 2], [2, 1, 2]),
        ([5, 6, 7], [5, 6, 7], [0, 2, 0, 1, 0], [0, 2, 0, 1, 0]),
        ([], [], [0, 0], [0, 0]),
        ([-2, 6], [-1, 6], [2], [1]),
    ],
)
def test_a_run_ends_with_the_first_draw_that_is_no_draft(drawn, drafts, counts, runs):
    arrays = (np.array(values, dtype=np.int64) for values in (drawn, drafts, counts))
    assert accepted_runs(*arrays).tolist() == runs


def reference(tokens, shortest, longest, limit):
    """The tokens after the first occurrence of the longest n-gram at the end."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(size, len(tokens)):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return tokens[end : end + limit]
    return []


@given(st.data(), st.integers(1, 4), st.integers(0, 3))
def test_drafts_follow_the_longest_then_earliest_ngram(data, shortest, more):
    """For rows that grow by runs, sit out steps, and whose slots others take over."""
    longest = shortest + more
    drafter = NgramDrafter(shortest, longest)
    table = np.full((2, 60), 3, dtype=np.int32)
    rows = {}
    for _ in range(data.draw(st.integers(1, 12))):
        for slot in data.draw(st.sampled_from([[0], [1], [0, 1], [1, 0]])):
            run = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
            if slot not in rows or data.draw(st.integers(0, 5)) == 0:
                rows[slot] = []
                drafter.take_slot(slot)
            rows[slot].extend(run)
            table[slot, : len(rows[slot])] = rows[slot]
        slots = data.draw(st.permutations(sorted(rows)))
        limits = data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2))[: len(slots)]
        lengths = [len(rows[slot]) for slot in slots]
        found = drafter.propose(table, np.array(slots), np.array(lengths), np.array(limits))
        assert found == [
            reference(rows[slot], shortest, longest, limit)
            for slot, limit in zip(slots, limits, strict=True)
        ]
