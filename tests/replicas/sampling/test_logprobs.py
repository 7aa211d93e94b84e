"""Log probabilities of drawn tokens: values, ranks, the order of entries, runs that are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from replicas.generators.torch import native
from replicas.sampling.compiled import find_kernels
from replicas.sampling.logprobs import Logprobs
from replicas.sampling.order import row_processors
from replicas.sampling_params import SamplingParams
from tests.replicas.sampling import reference_sampler
from tests.replicas.sampling.row_runner import VOCAB, Rows

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@pytest.fixture(autouse=True, scope="module", params=["kernels", "PyTorch"])
def computed_by(request):
    """Compute with the kernels of this host, or as on one that has none."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "PyTorch":

            def refuse():
                raise native.NativeError("there is no library")

            patch.setattr(native, "kernel_set", refuse)
        yield request.param


def test_the_kernels_are_used_where_the_host_has_them(computed_by):
    assert (find_kernels() is None) == (computed_by == "PyTorch")


def make_rows(mode, **options):
    logprobs = Logprobs(mode)
    return Rows(row_processors([], logprobs=logprobs), logprobs=logprobs, **options)


def values_of(mode, logits, params, prompt, output):
    """The reference's values of all tokens at a position, and the margin of their limits."""
    margin = 1.0
    if mode.startswith("processed"):
        logits = reference_sampler.processed(logits, params, prompt, output)
        if params.temperature >= 1e-5:
            weights, margin = reference_sampler.weights_of(logits, params)
            logits = np.where(weights > 0, logits / np.float32(params.temperature), -np.inf)
    if mode.endswith("logits"):
        return logits, margin
    return logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum())), margin


@given(
    mode=st.sampled_from(MODES),
    sampling=st.fixed_dictionaries(
        {"logprobs": st.sampled_from([0, 1, 3, -1])},
        optional={
            "temperature": st.sampled_from([0.0, 0.7]),
            "repetition_penalty": st.just(1.5),
            "logit_bias": st.just({4: 3.0}),
            "top_k": st.just(5),
            "top_p": st.just(0.8),
            "min_p": st.just(0.1),
        },
    ),
    seed=st.integers(0, 9),
)
def test_values_and_ranks_are_those_of_the_reference(mode, sampling, seed):
    rows, prompt = make_rows(mode, seed=seed), [3, 5]
    params = SamplingParams(seed=1, **sampling)
    rows.add(0, prompt)
    rows.add(1, prompt, params=params)
    for step in range(3):
        output = rows.token_ids[1][2:]
        logits = rows.generator.logits(rows.token_ids[1]).double().numpy()
        wanted, margin = values_of(mode, logits, params, prompt, output)
        assume(margin > 1e-4)
        [found] = rows.step().logprobs
        [entries] = found.positions
        assert found.row == 1
        drawn, *likeliest = entries
        assert drawn.token_id == rows.token_ids[1][-1]
        assert len(likeliest) == (VOCAB if params.logprobs == -1 else params.logprobs)
        assert [entry.rank for entry in likeliest] == [*range(1, len(likeliest) + 1)]
        assert [entry.logprob for entry in likeliest] == sorted(
            (entry.logprob for entry in likeliest), reverse=True
        )
        for entry in entries:
            assert entry.logprob == pytest.approx(wanted[entry.token_id], abs=1e-5)
        assert drawn.rank == np.sum(wanted >= wanted[drawn.token_id] - 1e-9)
        assert step == len(output)


def test_tokens_that_are_named_come_in_their_order_with_their_own_ranks():
    rows = make_rows("raw_logits")
    rows.generator.table[:] = torch.arange(VOCAB, dtype=torch.float32) // 2
    rows.add(0, [0], temperature=0.0, logprob_token_ids=(3, 21, 0))
    [[entries]] = [found.positions for found in rows.step().logprobs]
    # Two tokens have each value: a tie counts both.
    assert [(e.token_id, e.logprob, e.rank) for e in entries] == [
        (22, 11.0, 2), (3, 1.0, 22), (21, 10.0, 4), (0, 0.0, 24)
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [0.0, 1e-3, 7.0, 30.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_any_size_have_log_probabilities(factor, sign):
    rows = make_rows("raw_logprobs")
    rows.generator.table[:] = sign * (6.0 + rows.generator.table.abs()) * factor
    for slot in range(4):
        rows.add(slot, [slot], temperature=0.0, logprobs=-1)
    logits = [rows.generator.logits([slot]).double().numpy() for slot in range(4)]
    for found, values in zip(rows.step().logprobs, logits, strict=True):
        wanted = values - values.max() - np.log(np.exp(values - values.max()).sum())
        for entry in found.positions[0]:
            assert entry.logprob == pytest.approx(wanted[entry.token_id], rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
@pytest.mark.parametrize("vocab", [VOCAB, 1000])
def test_a_row_draws_the_same_tokens_with_and_without_log_probabilities(sampling, vocab):
    without, with_them = (make_rows("raw_logprobs", vocab=vocab) for _ in range(2))
    for slot in range(3):
        without.add(slot, [slot], **sampling)
        with_them.add(slot, [slot], logprobs=2 if slot else None, **sampling)
    for _ in range(6):
        without.step()
        with_them.step()
    assert with_them.token_ids == without.token_ids
