"""A step's reported work is that of its largest DP group; equal steps are reported once."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.step import ScheduledBatch, StepResult
from replicas.engine.step_plan import step_work
from replicas.engine.step_timer import ROWS_PER_BLOCK, StepTimer
from replicas.messages import HostSeconds, StepWork, num_pairs
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


def end(timer, batch, device_s):
    timer.end(batch, StepResult([], [device_s]))


def step(timer, batch, work, device_s):
    """One step from its begin to its end."""
    timer.begin(batch, lambda _: work)
    end(timer, batch, device_s)


def test_the_latest_of_each_kind_is_kept_and_steps_that_are_alike_are_recorded_once():
    timer = StepTimer()
    assert (timer.last_decode, timer.last_prompt) == (None, None)
    step(timer, ScheduledBatch("prefill", [0], [9], [], []), PROMPT, 2.0)
    decode = ScheduledBatch("decode", [0], [1], [], [])
    step(timer, decode, ROWS, 0.5)
    step(timer, decode, ROWS, 0.7)
    step(timer, ScheduledBatch("decode", [0], [1], [], []), ROWS, 0.8)
    assert timer.last_prompt == msgspec.structs.replace(PROMPT, device_s=2.0)
    assert timer.last_decode == msgspec.structs.replace(ROWS, device_s=0.5)
    for unlike in (
        ScheduledBatch("decode", [0], [1], [], [(0, [[3]])]),
        ScheduledBatch("decode", [0, 1], [1, 1], [], []),
    ):
        step(timer, unlike, ROWS, 0.9)
        assert timer.last_decode.device_s == 0.9
        step(timer, decode, ROWS, 0.4)


def test_a_look_at_every_row_is_spread_over_as_many_new_blocks():
    timer, slots, asked = StepTimer(), [*range(64)], []
    for row in range(1 + 10 * 64 // ROWS_PER_BLOCK):
        batch = ScheduledBatch("decode", slots, [1] * 64, [], [(row % 64, [[row]])])
        timer.begin(batch, asked.append)
    assert len(asked) == 1 + 10
    timer.begin(ScheduledBatch("decode", slots[:-1], [1] * 63, [], []), asked.append)
    assert len(asked) == 1 + 10 + 1


def test_chunks_of_one_size_are_each_a_step():
    timer = StepTimer()
    for device_s in (1.0, 2.0):
        step(timer, ScheduledBatch("prefill", [0], [9], [], []), PROMPT, device_s)
    assert timer.last_prompt.device_s == 2.0


def test_a_step_that_begins_ahead_is_recorded_with_its_own_time():
    timer = StepTimer()
    first = ScheduledBatch("decode", [0], [1], [], [])
    second = ScheduledBatch("decode", [0, 1], [1, 1], [], [])
    for batch in (first, second):
        timer.begin(batch, lambda _: ROWS)
    end(timer, first, 0.1)
    assert timer.last_decode.device_s == 0.1
    end(timer, second, 0.2)
    assert timer.last_decode.device_s == 0.2


def test_passes_count_as_steps_and_only_those_with_decodes_give_the_time_of_a_step():
    timer = StepTimer()
    timer.end(ScheduledBatch("decode", [0, 1], [1, 1], [], []), StepResult([], [0.5, 0.25]))
    timer.end(
        ScheduledBatch("prefill", [0], [9], [], []),
        StepResult([], [2.0], sample_s=0.125, prepare_s=0.5),
    )
    assert (timer.num_steps, timer.num_tokens, timer.device_s) == (3, 2 * 2 + 9, 2.75)
    assert timer.step_s == 0.25
    assert timer.host_seconds() == HostSeconds(prepare=0.5, sample=0.125)
