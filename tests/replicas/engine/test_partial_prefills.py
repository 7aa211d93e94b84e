"""Long prompts beside others: sizes of chunks, and how many prompts are computed in part."""

from __future__ import annotations

import pytest

from replicas.engine.partial_prefills import PartialPrefillLimits
from replicas.errors import ConfigError
from tests.replicas.engine.fakes import make_config, make_sequence, make_siblings, scheduler_of
from tests.replicas.engine.test_scheduler import step


def limited(**changes):
    """A scheduler of 16 tokens a step in which prompts of more than 4 tokens are long."""
    settings = {"long_prefill_token_threshold": 4, "enable_prefix_caching": False, **changes}
    return scheduler_of(60, max_model_len=100, max_batch_size=8, **settings)


def add(scheduler, **lengths):
    for name, length in lengths.items():
        scheduler.add(make_sequence(name, [1] * length, max_tokens=50), 0.0)


def two(most, most_long):
    return {"max_num_partial_prefills": most, "max_long_partial_prefills": most_long}


@pytest.mark.parametrize(
    ("changes", "lengths", "expected"),
    [
        # Alone it gets the whole step.
        ({}, {"a": 40}, [{"a": 16}, {"a": 16}, {"a": 8}]),
        # Beside others it gets a chunk. They pass it if they fit whole, and wait if they are long.
        ({}, {"a": 14, "b": 3, "c": 4}, [{"a": 4, "b": 3, "c": 4}, {"a": 4, "b": 1, "c": 1}]),
        ({}, {"a": 14, "b": 9, "c": 4}, [{"a": 4, "c": 4}, {"a": 4, "c": 1}]),
        # Once no more than a chunk is left, it is not long any more.
        ({}, {"a": 6, "b": 9}, [{"a": 4}, {"a": 2, "b": 4}, {"a": 1, "b": 4}]),
        (two(2, 1), {"a": 14, "b": 9, "c": 4}, [{"a": 4, "c": 4}]),
        (two(2, 2), {"a": 14, "b": 9, "c": 9}, [{"a": 4, "b": 4}]),
        (two(3, 3), {"a": 14, "b": 9, "c": 9}, [{"a": 4, "b": 4, "c": 4}]),
        # A short prompt that the budget cuts counts among the partial ones, not among the long.
        (
            {**two(2, 1), "max_num_batched_tokens": 8},
            {"a": 14, "b": 3, "c": 4, "d": 2},
            [{"a": 4, "b": 3, "c": 1}, {"a": 4, "b": 1, "c": 3}],
        ),
        ({"max_num_batched_tokens": 8}, {"a": 14, "b": 3, "c": 4}, [{"a": 4, "b": 3}]),
        # Rows that decode share a mixed step, but not a step of prompts.
        ({}, {"b": 3, "a": 40}, [{"b": 3, "a": 4}, {"b": 1, "a": 4}]),
        (
            {"mixed_batches": False},
            {"b": 3, "a": 40},
            [{"b": 3, "a": 4}, {"b": 1}, {"a": 16}, {"b": 1}, {"a": 16}],
        ),
    ],
)
def test_budgets(changes, lengths, expected):
    scheduler = limited(**changes)
    add(scheduler, **lengths)
    assert [step(scheduler) for _ in expected] == expected


def test_chunk_of_a_long_prompt_ends_on_the_alignment():
    scheduler = limited(chunk_alignment=8)
    add(scheduler, a=30, b=2)
    assert step(scheduler) == {"a": 8, "b": 2}
    scheduler = limited(chunk_alignment=4, long_prefill_token_threshold=6)
    add(scheduler, a=30, b=2)
    assert step(scheduler) == {"a": 4, "b": 2}


def test_limits_are_those_of_all_lanes_together():
    scheduler = limited(tt_data_parallel=2)
    for group, (name, length) in enumerate({"a": 14, "b": 9}.items()):
        scheduler.add(make_sequence(name, [1] * length, dp_group=group), 0.0)
    assert step(scheduler) == {"a": 4}


def test_queue_behind_a_long_prompt_moves_on_and_the_prompt_is_next():
    scheduler = limited()
    add(scheduler, a=9, b=9)
    step(scheduler)
    add(scheduler, c=2, d=2)
    assert step(scheduler) == {"a": 4, "c": 2, "d": 2}
    add(scheduler, e=2)
    assert step(scheduler) == {"a": 1, "b": 4, "c": 1, "d": 1, "e": 2}


@pytest.mark.parametrize(("caching", "expected"), [(True, {"b": 4, "a": 2}), (False, {"b": 4})])
def test_a_long_prompt_that_is_cached_passes_another_long_one(caching, expected):
    scheduler = limited(enable_prefix_caching=caching)
    seq = make_sequence("r", [1] * 18, max_tokens=1)
    scheduler.add(seq, 0.0)
    while scheduler.table.num_live:
        step(scheduler)
    scheduler.add(make_sequence("b", [2] * 40, max_tokens=9), 0.0)
    scheduler.add(make_sequence("a", [1] * 18, max_tokens=9), 0.0)
    assert step(scheduler) == expected


def test_a_long_prompt_without_room_lets_short_ones_pass():
    scheduler = scheduler_of(9, max_model_len=32, max_batch_size=8, long_prefill_token_threshold=4)
    add(scheduler, a=20, b=20, c=3)
    assert step(scheduler) == {"a": 4, "c": 3}


def test_a_choice_that_shares_a_long_prompt_is_not_long():
    scheduler = limited()
    seq = make_sequence("a", [1] * 9, n=2, max_tokens=50)
    scheduler.add(seq, 0.0, make_siblings(seq))
    add(scheduler, b=14)
    assert [step(scheduler) for _ in range(3)] == [{"a": 4}, {"a": 4}, {"a": 1, "b": 4}]
    step(scheduler)
    assert scheduler.table.get("a", 1).is_running


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"long_prefill_token_threshold": 5}, (5, 5, 1, 1)),
        ({"long_prefill_token_threshold": 3}, (3, 4, 1, 1)),
        # 4 % of the longest sequence, as in vLLM.
        ({"max_num_partial_prefills": 3}, (40, 40, 3, 1)),
        ({"max_num_partial_prefills": 3, "max_long_partial_prefills": 2}, (40, 40, 3, 2)),
    ],
)
def test_limits_of_a_configuration(changes, expected):
    limits = PartialPrefillLimits.of(make_config(**changes), 1000, chunk_alignment=4)
    assert limits == (None if expected is None else PartialPrefillLimits(*expected))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills must be at least 1"),
        ({"max_long_partial_prefills": 0}, "max_long_partial_prefills must be at least 1"),
        ({"max_long_partial_prefills": 2}, "max_long_partial_prefills 2 is more than"),
        ({"long_prefill_token_threshold": 65, "max_model_len": 64}, "more than max_model_len 64"),
        (
            {"long_prefill_token_threshold": 4, "enable_chunked_prefill": False},
            "long_prefill_token_threshold 4 needs chunked prefill",
        ),
        (
            {"max_num_partial_prefills": 2, "enable_chunked_prefill": False},
            "max_num_partial_prefills 2 needs chunked prefill",
        ),
    ],
)
def test_impossible_settings_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        make_config(**changes)
