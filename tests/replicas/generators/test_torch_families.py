"""Every model family gives the float32 logits and greedy tokens of transformers' own class."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models import model_folder, reference_model
from tests.replicas.generators.conftest import PROMPTS, TinyModel, make_generator
from tests.replicas.generators.paged_loop import PagedLoop
from tests.replicas.generators.tiny_models import FAMILIES

TOLERANCE = 1e-4


def paged_loop(config, max_seq_len=64):
    generator = make_generator(config, max_seq_len=max_seq_len)
    loop = PagedLoop(generator, config, slots_per_lane=8, block_size=16, max_seq_len=max_seq_len)
    # A sequence must not read entries that were not written for it: all of them are NaN.
    loop.fill(math.nan)
    return loop


@torch.no_grad()
def reference_logits(case, token_ids):
    """Return (n, V) after each token; attention of the class that computes caps and sinks."""
    model = reference_model(model_folder(case), torch.float32)
    model.set_attn_implementation("eager")
    return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed, chunked"])
def test_logits_and_tokens_are_those_of_transformers(case, mixed):
    loop = paged_loop(TinyModel(case).config)
    sequences = loop.generate(PROMPTS, 8, chunk=7 if mixed else None, mixed=mixed)
    for sequence in sequences:
        wanted = reference_logits(case, sequence.token_ids[:-1])[-8:]
        found = torch.stack(sequence.logits)
        assert (found - wanted).abs().max() < TOLERANCE
        assert sequence.output == wanted.argmax(-1).tolist()


def test_an_engine_with_long_sequences_takes_the_long_factors_of_longrope():
    """Transformers takes the short ones until a sequence is over the original length."""
    loop = paged_loop(TinyModel("phi4-long").config, max_seq_len=80)
    [sequence] = loop.generate([range(1, 70)], 4)
    wanted = reference_logits("phi4-long", sequence.token_ids[:-1])[-4:]
    assert (torch.stack(sequence.logits) - wanted).abs().max() < TOLERANCE
