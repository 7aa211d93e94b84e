"""Greedy tokens of the demo model on golden chips, against transformers in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import configs
from replicas.tokenizer import Tokenizer
from tests.models import oracle_logits, reference_logits, references
from tests.tt.golden.lanes import fill, golden_generator
from tests.tt.golden.library import poisoned

DEMO = str(Path(configs.__file__).parent / "demo-model")
TEXTS = [
    "Return the",
    "Convert a string to",
    "Return True if the object is",
    "Open a file and return a",
    "This class represents a queue of",
    "Raise an exception if the argument",
    "The following functions are defined in this module:",
    "Create a new socket and connect it to the",
    "A lock object has two methods. " * 20 + "The first",
    "Parse the command line and return a list of options. If no argument is given, " * 8,
    "Iterate over the items of a dictionary",
    "Write bytes to the file; the number of",
]
NUM_NEW = 32
NEAR_TIE = 2.0
"""A near tie: exact arithmetic puts the two candidates no further apart than twice the error that
transformers makes in bfloat16 at this place, which either of them may have suffered."""


def first_difference(output, wanted):
    return next((i for i, (a, b) in enumerate(zip(output, wanted, strict=True)) if a != b), None)


def margin_and_error(text, token_id, other):
    """Gap of two candidates in exact arithmetic, and transformers' error in bfloat16 there."""
    exact = oracle_logits(DEMO, torch.bfloat16, text)
    error = (reference_logits(DEMO, torch.bfloat16, text) - exact).abs().max()
    return (exact[token_id] - exact[other]).abs().item(), error.item()


@pytest.mark.parametrize(("num_chips", "num_lanes", "chunk"), [(1, 1, None), (4, 2, 100)])
def test_32_greedy_tokens_are_those_of_transformers(num_chips, num_lanes, chunk, record_property):
    prompts = [Tokenizer.from_folder(DEMO).encode(text) for text in TEXTS]
    wanted = references(DEMO, prompts, NUM_NEW, torch.bfloat16)
    settings = {"num_lanes": num_lanes, "slots_per_lane": -(-len(prompts) // num_lanes)}
    chips = golden_generator(DEMO, num_chips, max_seq_len=512, **settings)
    with chips as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        sequences = loop.generate(prompts, NUM_NEW, chunk=chunk)
    num_equal = 0
    for index, (sequence, reference) in enumerate(zip(sequences, wanted, strict=True)):
        output = sequence.output[: len(reference.token_ids)]
        place = first_difference(output, reference.token_ids)
        if place is None:
            num_equal += 1
            continue
        text = [*prompts[index], *output[:place]]
        margin, error = margin_and_error(text, output[place], reference.token_ids[place])
        note = f"prompt {index}, token {place}: {margin=:.4f}, error of transformers {error:.4f}"
        record_property("near tie", note)
        print(note)
        assert margin <= NEAR_TIE * error
    record_property("equal", num_equal)
    print(f"{num_chips} chips, {num_lanes} lanes: {num_equal} of {len(prompts)} outputs are equal")
    # Sequences of words that a model was trained on do not nearly tie everywhere.
    assert num_equal >= len(prompts) // 2


def test_the_prompts_are_told_apart():
    prompts = [Tokenizer.from_folder(DEMO).encode(text) for text in TEXTS]
    wanted = references(DEMO, prompts, NUM_NEW, torch.bfloat16)
    assert len({tuple(reference.token_ids) for reference in wanted}) == len(prompts)
    assert min(len(reference.token_ids) for reference in wanted) > 16
