"""A step's reported work is that of its largest DP group; equal steps are reported once."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.step import ScheduledBatch
from replicas.engine.step_plan import step_work
from replicas.engine.step_timer import ROWS_PER_BLOCK, StepNotes
from replicas.messages import StepWork, num_pairs
from tests.replicas.engine.fakes import make_sequence


def running(dp_group, num_computed):
    seq = make_sequence("r", [1] * max(num_computed, 1))
    seq.place.dp_group, seq.num_computed_tokens = dp_group, num_computed
    return seq


@given(st.integers(0, 40), st.integers(0, 40))
def test_pairs_are_those_that_each_token_attends_to(start, count):
    """Itself counts by half."""
    attended = sum(position + 0.5 for position in range(start, start + count))
    assert num_pairs(start, start + count) == int(attended)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 99)), max_size=9))
def test_of_decodes_the_group_counts_that_has_most(rows):
    work = step_work([running(*row) for row in rows], [], 3)
    by_group = [[tokens for group, tokens in rows if group == g] for g in range(3)]
    assert work.num_rows == max(map(len, by_group))
    assert work.num_context_tokens == max(map(sum, by_group))
    assert work.max_context_tokens == max((tokens for _, tokens in rows), default=0)
    assert (work.num_prompts, work.num_prompt_tokens, work.num_prompt_pairs) == (0, 0, 0)


def test_of_prompts_the_group_counts_that_has_most():
    prompts = [(running(0, 10), 10), (running(0, 30), 20), (running(1, 40), 40)]
    assert step_work([], prompts, 2) == StepWork(0, 0, 0, 2, 40, 800, 0.0)


ROWS = StepWork(1, 5, 5, 0, 0, 0, 0.0)
PROMPT = StepWork(0, 0, 0, 1, 9, 40, 0.0)


def step(notes, batch, work, device_s):
    """One step from its begin to its end."""
    if notes.is_new(batch):
        notes.begin(batch, work)
    notes.end(batch, device_s)


def test_the_latest_of_each_kind_is_kept_and_steps_that_are_alike_are_noted_once():
    notes = StepNotes()
    assert (notes.decode, notes.prompt) == (None, None)
    step(notes, ScheduledBatch("prefill", [0], [9], [], []), PROMPT, 2.0)
    decode = ScheduledBatch("decode", [0], [1], [], [])
    step(notes, decode, ROWS, 0.5)
    step(notes, decode, ROWS, 0.7)
    step(notes, ScheduledBatch("decode", [0], [1], [], []), ROWS, 0.8)
    assert notes.prompt == msgspec.structs.replace(PROMPT, device_s=2.0)
    assert notes.decode == msgspec.structs.replace(ROWS, device_s=0.5)
    for unlike in (
        ScheduledBatch("decode", [0], [1], [], [(0, [[3]])]),
        ScheduledBatch("decode", [0, 1], [1, 1], [], []),
    ):
        step(notes, unlike, ROWS, 0.9)
        assert notes.decode.device_s == 0.9
        step(notes, decode, ROWS, 0.4)


def test_a_look_at_every_row_is_spread_over_as_many_new_blocks():
    notes, slots = StepNotes(), [*range(64)]
    num_new = sum(
        notes.is_new(ScheduledBatch("decode", slots, [1] * 64, [], [(step % 64, [[step]])]))
        for step in range(1 + 10 * 64 // ROWS_PER_BLOCK)
    )
    assert num_new == 1 + 10
    assert notes.is_new(ScheduledBatch("decode", slots[:-1], [1] * 63, [], []))


def test_chunks_of_one_size_are_each_a_step():
    notes = StepNotes()
    for device_s in (1.0, 2.0):
        step(notes, ScheduledBatch("prefill", [0], [9], [], []), PROMPT, device_s)
    assert notes.prompt.device_s == 2.0


def test_a_step_that_begins_ahead_is_noted_with_its_own_time():
    notes = StepNotes()
    first = ScheduledBatch("decode", [0], [1], [], [])
    second = ScheduledBatch("decode", [0, 1], [1, 1], [], [])
    for batch in (first, second):
        assert notes.is_new(batch)
        notes.begin(batch, ROWS)
    notes.end(first, 0.1)
    assert notes.decode.device_s == 0.1
    notes.end(second, 0.2)
    assert notes.decode.device_s == 0.2
