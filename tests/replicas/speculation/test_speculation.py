"""Drafts of the next tokens, and how many of them are accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.messages import DraftCounters
from replicas.speculation.controller import DraftController
from replicas.speculation.drafts import NgramDrafter, accepted_runs


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


class Steps:
    """Steps with a controller, whose drafts are right with the given shares, by position."""

    def __init__(self, max_drafts=3):
        self.controller = DraftController(max_drafts)
        self.seconds = self.num_tokens = 0.0
        self._sums = [0.0] * max_drafts

    def run(self, num_steps, num_rows, *, plain_s=1.0, draft_s, right):
        """Return the limits of so many steps; a draft of a row costs `draft_s`."""
        limits = []
        for _ in range(num_steps):
            limit = self.controller.limit(num_rows, has_drafts=True)
            counts = [1 + self._num_right(limit, right) for _ in range(num_rows)]
            seconds = plain_s + draft_s * limit * num_rows
            planned = [1 + limit] * num_rows * (limit > 0)
            self.controller.learn(num_rows, limit, planned, counts, seconds)
            self.seconds += seconds
            self.num_tokens += sum(counts)
            limits.append(limit)
        return limits

    def _num_right(self, limit, right):
        """Errors of rounding are carried on, so that the shares hold over all rows."""
        count = 0
        for position in range(limit):
            self._sums[position] += right[position]
            if self._sums[position] >= 1.0:
                self._sums[position] -= 1.0
                count = position + 1
        return count


@pytest.mark.parametrize(
    ("num_rows", "draft_s", "right", "limit"),
    [
        (1, 0.3, [1.0, 1.0, 1.0], 3),
        (1, 0.2, [0.5, 0.5, 0.0], 2),
        (1, 0.3, [0.2, 0.2, 0.2], 0),
        (1, 0.0, [0.5, 0.5, 0.3], 3),
        # A token of a full batch costs little, so a draft must cost less.
        (32, 0.02, [1.0, 1.0, 0.0], 2),
        (32, 0.04, [1.0, 1.0, 1.0], 0),
        # After a trial a draft must bring a tenth more than it costs.
        (1, 0.95, [1.0, 1.0, 1.0], 0),
    ],
)
def test_the_drafts_that_pay_are_used(num_rows, draft_s, right, limit):
    limits = Steps().run(60, num_rows, draft_s=draft_s, right=right)
    assert limits[:4] == [0] * 4, "what a plain step costs is learned first"
    assert limits[4] == 3
    assert set(limits[-20:]) == {limit}


@pytest.mark.parametrize("num_rows", [1, 2, 8, 32])
def test_drafts_that_are_never_right_cost_three_percent_at_most(num_rows):
    steps = Steps()
    steps.run(3000, num_rows, draft_s=0.5 / num_rows, right=[0.0] * 3)
    assert steps.num_tokens / steps.seconds > 0.97 * num_rows


def test_drafts_that_stay_wrong_are_tried_ever_less_often():
    steps, wrong = Steps(), [0.0] * 3
    limits = steps.run(12_000, 1, draft_s=0.5, right=wrong)
    assert limits.count(3) <= 4 * 9, "4 steps each, after 256, 512, 1024, and every 2048 steps"
    assert steps.num_tokens / steps.seconds > 0.99
    found = steps.run(2100, 1, draft_s=0.1, right=[1.0] * 3)
    assert found[-1] == 3
    # Drafts have paid meanwhile, so the next trials are soon again.
    limits = steps.run(1000, 1, draft_s=0.5, right=wrong)
    assert limits[300:].count(3) >= 4


def test_every_fourth_step_looks_for_drafts_until_there_are_any():
    controller, limits = DraftController(3), []
    for _ in range(24):
        limits.append(controller.limit(2, has_drafts=False))
        controller.learn(2, limits[-1], [], [], 1.0)
    assert limits == [0] * 4 + [3, 0, 0, 0] * 5
    assert [controller.limit(2, has_drafts=drafts) for drafts in (True, True)] == [3, 3]
    controller.learn(2, 3, [4, 1], [4, 1], 1.2)
    assert controller.limit(2, has_drafts=False) == 3, "a trial looks in every step"


@pytest.mark.parametrize(("search_s", "limit"), [(0.02, 0), (0.0, 0), (-0.05, 3)])
def test_right_drafts_that_bring_less_than_their_search_costs_are_not_used(search_s, limit):
    """One row of eight has a right draft in each eighth step, which is 1.6 % more tokens."""
    controller = DraftController(3)
    for step in range(400):
        allowed = controller.limit(8, has_drafts=step % 8 == 0)
        has_draft = allowed > 0 and step % 8 == 0
        planned, counts = ([2, *[1] * 7], [2, *[1] * 7]) if has_draft else ([], [])
        controller.learn(8, allowed, planned, counts, 1.0 + search_s * (allowed > 0))
    assert controller.limit(8, has_drafts=True) == limit


def test_the_limit_follows_the_load_and_the_text():
    steps = Steps()
    good, bad = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]
    assert steps.run(40, 1, draft_s=0.1, right=good)[-1] == 3
    assert steps.run(90, 1, draft_s=0.1, right=bad)[-1] == 0
    again = steps.run(300, 1, draft_s=0.1, right=good)
    assert (again[0], again[-1]) == (0, 3)
    assert steps.run(40, 16, draft_s=0.1, right=good)[-1] == 0, "of its own"
    assert steps.run(1, 1, draft_s=0.1, right=good) == [3]
    limits = steps.run(600, 1, draft_s=0.1, right=good)
    assert 4 <= limits.count(0) <= 12, "plain steps are measured now and then"
    # Without drafts a token has become quicker than a draft.
    assert steps.run(600, 1, plain_s=0.1, draft_s=0.15, right=good)[-1] == 0


def test_verified_drafts_are_counted():
    controller = DraftController(3)
    controller.learn(2, 0, [], [], 1.0)
    controller.learn(2, 3, [], [], 1.0)
    controller.learn(2, 3, [3, 1], [2, 1], 1.0)
    controller.learn(2, 3, [4, 2], [], 1.0)
    controller.learn(2, 3, [4, 2], [4, 2], 1.0)
    assert controller.counters == DraftCounters(5, 10, 5, [3, 1, 1])
