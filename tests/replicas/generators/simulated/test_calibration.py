"""The fit: its measured rows, its errors on rows left out, and its assumptions."""

import pytest

from replicas.generators.simulated import calibration
from replicas.generators.simulated.calibration import FITTED, held_out
from replicas.generators.simulated.meshes import (
    BOARDS,
    MODELS,
    OLDER_ROWS,
    ROWS,
    SLOTS_PER_LANE,
    MeasuredRow,
)
from replicas.generators.simulated.profiles import mesh_profile
from replicas.generators.simulated.timing import LinkTiming

ALONE = {
    ("T3K", "Qwen3-32B", 1), ("T3K", "Mixtral-8x7B", 1), ("Galaxy", "Llama-3.1-70B", 1),
    ("n150", "Falcon-7B", 1),
}  # fmt: skip
"""The only rows of their code, which the others cannot predict."""
BEYOND_15_PERCENT = {("p150x4", "Llama-3.1-70B", 1)}
"""Per parameter and chip its prompt takes 1.4 times as long as on one p150; no other row is of more
than one Blackhole."""


def key(row):
    return row.board, row.model, row.num_lanes


def timing_of(row, block_size=32):
    profile = mesh_profile(row.board, row.model, row.num_lanes)
    return profile.timing(block_size=block_size, link=LinkTiming(0.0, 1e9))


def test_no_row_is_a_copy_of_another():
    figures = [(row.ttft_ms, row.tokens_per_s_per_user) for row in ROWS]
    assert len(set(figures)) == len(figures)


@pytest.mark.parametrize("row", ROWS, ids=key)
@pytest.mark.parametrize("block_size", [32, 64])
def test_steps_of_a_measured_pair_are_the_measured_ones(row, block_size):
    timing = timing_of(row, block_size)
    host_s = timing.host_s + timing.host_row_s
    assert timing.prefill_s([(0, 0, 128)]) + host_s == pytest.approx(row.ttft_s, rel=1e-9)
    rows = [(lane, 129) for lane in range(row.num_lanes) for _ in range(SLOTS_PER_LANE)]
    step_s = timing.decode_s(rows) + timing.host_s + timing.host_row_s * len(rows)
    # Contexts are rounded up to blocks, and the demos' have 32 tokens.
    assert step_s == pytest.approx(row.step_s, rel=1e-9 if block_size == 32 else 0.02)


@pytest.mark.parametrize("row", ROWS, ids=key)
def test_held_out_rows_are_predicted_within_15_percent(row):
    found = held_out(row)
    assert (found is None) == (key(row) in ALONE)
    if found is not None and key(row) not in BEYOND_15_PERCENT:
        assert max(map(abs, found)) <= 0.15


@pytest.mark.parametrize("row", [r for r in ROWS if key(r) not in ALONE], ids=key)
def test_the_fit_itself_is_within_5_percent_of_what_it_was_fitted_on(row):
    board, model = BOARDS[row.board], MODELS[row.model]
    assert FITTED.step_s(board, model, row.num_lanes) == pytest.approx(row.step_s, rel=0.05)
    if key(row) not in BEYOND_15_PERCENT:
        assert FITTED.ttft_s(board, model, row.num_lanes) == pytest.approx(row.ttft_s, rel=0.05)


def test_a_held_out_prediction_never_saw_its_row(monkeypatch):
    row = ROWS[2]
    twice = MeasuredRow(row.board, row.model, 1, 2 * row.ttft_ms, 13.0, row.release)
    before = held_out(row)
    assert before is not None
    monkeypatch.setattr(calibration, "ROWS", [twice if other == row else other for other in ROWS])
    after = held_out(twice)
    assert after is not None
    # The same prediction of figures twice as large.
    assert [2 * (1 + error) for error in after] == pytest.approx([1 + error for error in before])


def test_the_row_of_an_older_release_is_outside():
    """The row is not used, as its second lane would have to cost as much as the whole first."""
    (row,) = OLDER_ROWS
    ttft, step = held_out(row)
    assert abs(ttft) < 0.1
    assert step < -0.3


def test_coefficients_are_physical():
    """Reading at 86 and 68 % of peak bandwidth; everything costs something."""
    assert 1.0 < FITTED.read["wormhole"] < FITTED.read["blackhole"] < 1.6
    for value in (
        FITTED.sample_s, FITTED.hop_s, FITTED.compute_s, FITTED.layer_s,
        FITTED.all_reduce_prefill_s, FITTED.decode_lanes_s, FITTED.prefill_lanes_s,
    ):  # fmt: skip
        assert value > 0.0


def test_prompts_grow_linearly_with_their_length():
    """16 times the tokens take 16 times as long, and a little more for attention."""
    timing = timing_of(next(row for row in ROWS if row.board == "Galaxy"))
    ratio = timing.prefill_s([(0, 0, 2048)]) / timing.prefill_s([(0, 0, 128)])
    assert 16.0 <= ratio <= 17.0
