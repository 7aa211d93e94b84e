"""Sampled tokens are those of a plain float64 reference, for every combination of parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from replicas.philox import uniform
from replicas.sampling.order import row_processors
from replicas.sampling_params import SamplingParams
from tests.replicas.sampling import reference_sampler
from tests.replicas.sampling.row_runner import Rows

LEAST_VOCAB = 12
TOKENS = st.integers(0, LEAST_VOCAB - 1)
EOS = 3
MARGIN = 1e-4
"""float32 and float64 may differ where less than this separates two results."""

FIELDS = {
    "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    "top_k": st.integers(-1, 14),
    "top_p": st.sampled_from([1.0, 0.95, 0.7, 0.2]),
    "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    "presence_penalty": st.sampled_from([0.0, 1.5, -0.7]),
    "frequency_penalty": st.sampled_from([0.0, 0.9, -0.4]),
    "repetition_penalty": st.sampled_from([1.0, 1.8, 0.6]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -3.5, 0.25, 4.0, 100.0])),
    "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=1, unique=True).map(tuple),
    "bad_words_token_ids": st.lists(
        st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=6
    ).map(tuple),
    "min_tokens": st.integers(0, 6),
    "stop_token_ids": st.frozensets(TOKENS, max_size=3),
    "ignore_eos": st.booleans(),
    "seed": st.sampled_from([1, -(2**40)]),
}
SAMPLING = st.fixed_dictionaries({}, optional=FIELDS)


def wanted(rows, slot, num_prompt, sampling):
    """The reference's draw of a row's next token."""
    tokens = rows.token_ids[slot]
    prompt, output = tokens[:num_prompt], tokens[num_prompt:]
    logits = rows.generator.logits(tokens).double().numpy()
    logits = reference_sampler.processed(logits, sampling, prompt, output, [EOS])
    number = uniform(np.array([sampling.seed or 0]), np.array([len(output)]))[0]
    return reference_sampler.draw(logits, sampling, number)


@given(
    samplings=st.lists(SAMPLING, min_size=1, max_size=3),
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=st.lists(TOKENS, max_size=4),
    vocab=st.integers(LEAST_VOCAB, 40),
    seed=st.integers(0, 5),
)
def test_tokens_are_those_of_the_reference(samplings, prompt, output, vocab, seed):
    rows = Rows(row_processors([EOS]), seed, vocab)
    params = [SamplingParams(**{"seed": 7, **sampling}) for sampling in samplings]
    for slot, sampling in enumerate(params):
        rows.add(slot, prompt, output, sampling)
    for _ in range(5):
        draws = {slot: wanted(rows, slot, len(prompt), params[slot]) for slot in rows.token_ids}
        rows.step()
        for slot, draw in draws.items():
            if draw.margin < MARGIN:
                event("another result is within rounding")
            elif draw.token_id is None:
                assert rows.failed[slot] == "no_allowed_token"
            else:
                assert rows.token_ids[slot][-1] == draw.token_id


@pytest.mark.parametrize(
    ("sampling", "logits", "wanted"),
    [
        # A bias makes a logit negative before it is multiplied: 1 - 3 = -2 becomes -4, not -2.5.
        ({"logit_bias": {0: -3.0}, "repetition_penalty": 2.0, "min_p": 0.99}, [1, -3], {1}),
        # An end token stays possible where nothing else is allowed, not where it was forbidden.
        ({"allowed_token_ids": (EOS,), "min_tokens": 9}, [1, 2, 3, 0], {EOS}),
        # Nor may an output that ignores its end be of end tokens too early.
        ({"ignore_eos": True, "min_tokens": 9}, [1, 2, 3, 9], {0, 1, 2}),
        # A temperature of 2 raises the smaller share from 0.37 to 0.61.
        ({"temperature": 2.0, "min_p": 0.5}, [0, -1], {0, 1}),
        # Of the two best the first has 0.53, and of all three only 0.4.
        ({"top_k": 2, "top_p": 0.5}, np.log([0.4, 0.35, 0.25]), {0}),
        # Of the two that reach a half of the best, the first has 0.53.
        ({"min_p": 0.7, "top_p": 0.5}, np.log([0.4, 0.35, 0.25]), {0}),
    ],
)
def test_the_order_of_two_restrictions_is_vllms(sampling, logits, wanted):
    rows, seen = Rows(row_processors([EOS]), vocab=len(logits)), set()
    rows.generator.table[:] = torch.tensor(np.asarray(logits, dtype=np.float32))
    for seed in range(24):
        rows.add(0, [0], seed=seed, **sampling)
        rows.step()
        seen.add(rows.token_ids[0][-1])
    assert seen == wanted
