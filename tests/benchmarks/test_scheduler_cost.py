"""The benchmark of the scheduler alone: its steps are full, and of the kind that it names."""

import pytest

from benchmarks.scheduler_cost import (
    CASES,
    MAX_MODEL_LEN,
    NUM_PASSES,
    add_rows,
    make_scheduler,
    plain_result,
    step_times_us,
    varied_result,
)


def test_rows_of_a_varied_step_get_runs_of_different_lengths():
    scheduler = make_scheduler(8, MAX_MODEL_LEN)
    add_rows(scheduler, 8, has_stops=False)
    prompts = scheduler.schedule()
    scheduler.update(prompts, plain_result(prompts))
    batch = scheduler.extend(scheduler.schedule(), NUM_PASSES)
    outputs = scheduler.update(batch, varied_result(batch))
    assert len(outputs.sequences) == 8
    assert set(outputs.counts) == {1, 2, 3, 4}
    scheduler.check_invariants()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_step_is_timed(case):
    assert len(step_times_us(case, 4, 3)) == 3
