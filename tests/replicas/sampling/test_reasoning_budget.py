"""Budgets of reasoning: what counts as reasoning, and how its end is forced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.reasoning import ReasoningReader
from replicas.sampling.order import row_processors
from replicas.sampling_params import ReasoningBudget, ReasoningMarks
from tests.replicas.sampling.row_runner import Rows

START, END = (4, 5), (7, 8, 9)
OPEN = ReasoningMarks(end_token_ids=END, is_open=True)
CLOSED = ReasoningMarks(start_token_ids=START, end_token_ids=END)


@pytest.mark.parametrize(
    ("marks", "output", "num_tokens", "is_open"),
    [
        (OPEN, [1, 2], 2, True),
        (OPEN, [1, 2, 7, 8], 4, True),
        (OPEN, [1, 2, 7, 8, 9, 1, *START, 1], 2, False),
        (OPEN, [7, 8, 7, 8, 9], 2, False),
        (OPEN, [*END], 0, False),
        (CLOSED, [1, 2], 0, False),
        (CLOSED, [1, *START, 1, 2], 2, True),
        (CLOSED, [4, *START, 1, *END, 1, *START, 1], 1, False),
        (CLOSED, [1] * 9 + [*START, 1], 0, False),
    ],
)
def test_tokens_of_the_reasoning_are_counted(marks, output, num_tokens, is_open):
    reader = ReasoningReader(marks)
    reader.read(output)
    assert (reader.num_tokens, reader.is_open) == (num_tokens, is_open)


def drawn(marks, max_tokens, num_drawn=12, **sampling):
    rows = Rows(row_processors([3]))
    budget = ReasoningBudget(max_tokens=max_tokens, marks=marks)
    rows.add(0, [3, 4, 3], reasoning_budget=budget, **sampling)
    for _ in range(num_drawn):
        rows.step()
    return rows.token_ids[0][3:]


@settings(max_examples=30, deadline=None)
@given(
    max_tokens=st.integers(0, 6),
    seed=st.integers(0, 99),
    end=st.lists(st.integers(5, 9), min_size=1, max_size=3).map(tuple),
)
def test_the_reasoning_ends_when_its_budget_is_used_up(max_tokens, seed, end):
    marks = ReasoningMarks(end_token_ids=end, is_open=True)
    output = drawn(marks, max_tokens, seed=seed, temperature=1.0)
    free = drawn(marks, 100, seed=seed, temperature=1.0)
    ends = [i for i in range(12) if tuple(output[max(0, i + 1 - len(end)) : i + 1]) == end]
    assert ends[0] + 1 <= max_tokens + len(end)
    # Up to the budget, the tokens are those of a row without one.
    assert output[:max_tokens] == free[:max_tokens]


def test_an_output_that_has_no_reasoning_is_left_alone():
    marks = ReasoningMarks(start_token_ids=(1, 2, 1, 2), end_token_ids=END)
    assert drawn(marks, 0, temperature=0.0) == drawn(marks, 100, temperature=0.0)


def test_a_parameter_that_forbids_the_end_goes_first():
    allowed = {"allowed_token_ids": (5, 6), "temperature": 1.0}
    assert {*drawn(OPEN, 0, **allowed)} <= {5, 6}
