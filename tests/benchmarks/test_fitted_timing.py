"""Fitting an engine's timing on its recorded turns: the pure parts."""

import dataclasses

import numpy as np
import pytest

from benchmarks.fitted_timing import (
    NUM_DECODE_TERMS,
    TERMS,
    Copy,
    EngineRecord,
    StepModel,
    Turn,
    fit_link,
    fit_medians,
    fit_steps,
    fit_timing,
    nnls,
    terms,
)
from replicas.engine.step import ModelFacts
from tests.kv_groups import one_kv_group

BLOCK = 32
FACTS = ModelFacts(
    max_position_embeddings=2048,
    vocab_size=4096,
    eos_token_ids=[1],
    kv_groups=one_kv_group(100, BLOCK, 3072),
    supports_mixed_batch=True,
    supports_chunked_prefill=True,
    supports_prefix_caching=True,
)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# --- least squares ------------------------------------------------------------------------------


def test_nnls_finds_positive_coefficients(rng):
    a = rng.random((50, 4))
    wanted = np.array([3.0, 0.0, 0.5, 1e-6])
    assert nnls(a, a @ wanted) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_nnls_meets_the_conditions_of_an_optimum_where_coefficients_would_be_negative(rng):
    for _ in range(200):
        a = rng.normal(size=(20, 5)) @ rng.normal(size=(5, 5)) * np.array([1.0, 1e3, 1e-3, 1, 1e6])
        b = rng.normal(size=20)
        x = nnls(a, b)
        slope = a.T @ (b - a @ x) / np.linalg.norm(a, axis=0)
        assert (x >= 0).all()
        assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-7
        assert (slope[x == 0] < 1e-7).all()


def test_nnls_bears_columns_of_nothing_and_columns_that_are_alike():
    a = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [3.0, 3.0, 0.0]])
    x = nnls(a, np.array([2.0, 4.0, 6.0]))
    assert a @ x == pytest.approx([2.0, 4.0, 6.0])
    assert (x >= 0).all()


def test_fit_of_medians_is_not_moved_by_a_long_tail(rng):
    a = np.column_stack([np.ones(400), rng.uniform(1, 100, 400)])
    exact = a @ np.array([5.0, 0.3])
    took = exact * rng.uniform(0.98, 1.02, 400)
    took[::5] *= 8.0
    x = fit_medians(a, took)
    assert a @ x == pytest.approx(exact, rel=0.03)


def test_fit_of_medians_has_as_much_above_as_below(rng):
    a = np.column_stack([np.ones(1001), rng.uniform(1, 100, 1001)])
    took = (a @ np.array([1.0, 0.1])) * np.exp(rng.exponential(1.0, 1001))
    ratios = took / (a @ fit_medians(a, took))
    assert np.median(ratios) == pytest.approx(1.0, abs=0.03)


# --- terms --------------------------------------------------------------------------------------


def test_rows_cost_their_tokens():
    found = terms([], [(0, 7), (1, 90)])
    assert found[:NUM_DECODE_TERMS] == [1.0, 2, 97]


def test_terms_of_chunks():
    chunks = [(0, 0, 10), (1, 64, 84)]
    found = dict(zip(TERMS, terms(chunks, [(0, 5)]), strict=True))
    assert found == {
        "turn": 1, "row": 1, "context token": 5,
        "chunk": 2, "chunk token": 30, "token pair": 50, "resumed chunk": 1,
        "masked token pair": 20 * 84,
    }  # fmt: skip


# --- an engine ----------------------------------------------------------------------------------


def _turn(seconds, chunks=(), rows=(), *, factor=1.0, copy_s=0.0):
    """A turn that computes `seconds` and takes `factor` times that, and 0.2 ms and copies more."""
    return Turn(
        start_s=1.0,
        end_s=1.0 + seconds * factor + 0.0002 + copy_s,
        chunks=list(chunks),
        rows=list(rows),
        copy_s=copy_s,
        cpu_s=seconds + 0.0002,
        moved_kv=True,
    )


def _record(rng, noise=0.0):
    """Turns of 1 ms + 0.1 ms per row, and of 2 ms + 0.05 ms per chunk token.

    With noise they are the slower the more rows they have, as in a crowd.
    """
    turns = [_turn(0.0, copy_s=0.003) for _ in range(5)]
    for _ in range(400):
        rows = [(0, int(n)) for n in rng.integers(1, 1000, rng.integers(1, 9))]
        length = int(rng.integers(2, 500))
        factor = np.exp(rng.exponential(noise * len(rows))) if noise else 1.0
        turns.append(_turn(0.001 + 0.0001 * len(rows), rows=rows, factor=factor))
        chunk_s = 0.002 + 0.00005 * length
        turns.append(_turn(chunk_s, [(0, 0, length)], rows, factor=factor, copy_s=0.01))
    return EngineRecord(facts=FACTS, turns=turns, copies=[])


def test_a_timing_gives_back_the_turns_that_it_was_fitted_on(rng):
    timing = fit_timing(_record(rng), BLOCK)
    assert timing.host_s == pytest.approx(0.0002)
    assert timing.bytes_per_token == 3072
    assert timing.decode_s([(0, 700)] * 4) == pytest.approx(0.0014, rel=0.02)
    assert timing.mixed_s([(0, 0, 300)], [(0, 50)]) == pytest.approx(0.017, rel=0.02)
    assert timing.prefill_s([(0, 0, 300)]) == timing.mixed_s([(0, 0, 300)], ())
    assert timing.mixed_s((), ()) == timing.prefill_s(()) == timing.decode_s(()) == 0.0


def test_slow_turns_with_many_rows_do_not_make_rows_dear(rng):
    quiet, noisy = (fit_timing(_record(rng, noise), BLOCK).decode for noise in (0.0, 0.2))
    assert noisy.coefficients == pytest.approx(quiet.coefficients, rel=1e-6, abs=1e-12)
    assert np.mean(noisy.factors) > 1.5


def test_a_run_of_steps_is_the_same_steps_one_by_one(rng):
    timing = fit_timing(_record(rng, noise=0.3), BLOCK)
    rows = [(0, 40), (1, 170), (0, 31)]
    steps = [timing.mixed_s((), [(lane, n + i) for lane, n in rows]) for i in range(70)]
    assert timing.decode_run_s(rows, 70) == steps
    assert len(set(steps)) > 40


def test_another_salt_gives_steps_other_luck_of_the_same_kind(rng):
    timing = fit_timing(_record(rng, noise=0.1), BLOCK)
    salted = dataclasses.replace(timing, salt=1)
    steps, others = (t.decode_run_s([(0, 40), (1, 170)], 500) for t in (timing, salted))
    assert steps != others
    assert np.median(steps) == pytest.approx(np.median(others), rel=0.1)


def test_steps_have_the_mean_and_the_median_of_the_turns(rng):
    record = _record(rng, noise=0.1)
    timing = fit_timing(record, BLOCK)
    turns = [t for t in record.turns if t.rows and not t.chunks]
    real = np.array([t.end_s - t.start_s - 0.0002 for t in turns])
    fitted = np.array([timing.decode_s([(0, n + 1) for _, n in t.rows]) for t in turns])
    assert fitted.mean() == pytest.approx(real.mean(), rel=0.1)
    assert np.median(fitted) == pytest.approx(np.median(real), rel=0.1)


def test_a_model_takes_every_factor_about_equally_often():
    model = StepModel((1.0,), (1.0, 2.0, 4.0))
    found = [model.seconds([1.0], key) for key in range(3000)]
    assert [found.count(factor) for factor in model.factors] == pytest.approx([1000] * 3, abs=120)


def test_an_engine_that_never_decoded_alone_has_a_model_all_the_same():
    model = fit_steps([_turn(0.1, [(0, 0, 9)])], 0.0, chunks=False)
    assert model.seconds([1.0, 2.0], 3) == 0.0


def test_link_of_copies_in_both_directions():
    copies = [
        Copy(direction, 5.0, 5.0 + 0.0003 + size / 2e9, size)
        for direction in ("read", "write")
        for size in (3072, 98304, 500_000, 1_000_000)
    ]
    link = fit_link(copies)
    assert link.setup_s == pytest.approx(0.0003, rel=1e-3)
    assert link.bytes_per_s == pytest.approx(2e9, rel=1e-3)
    assert fit_link([]).transfer_s(10**6) < 1e-5
