"""Greedy tokens of the demo model on golden chips, against transformers in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import configs
from replicas.tokenizer import Tokenizer
from tests.models import references
from tests.tt.golden.lanes import fill, golden_generator
from tests.tt.golden.library import poisoned
from tests.tt.test_numbers_engine import assert_same

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


@pytest.mark.parametrize(("num_chips", "num_lanes", "chunk"), [(1, 1, None), (4, 2, 100)])
def test_32_greedy_tokens_are_those_of_transformers(num_chips, num_lanes, chunk):
    prompts = [Tokenizer.from_folder(DEMO).encode(text) for text in TEXTS]
    wanted = [each.token_ids for each in references(DEMO, prompts, NUM_NEW, torch.bfloat16)]
    assert len(set(map(tuple, wanted))) == len(prompts)
    settings = {"num_lanes": num_lanes, "slots_per_lane": -(-len(prompts) // num_lanes)}
    chips = golden_generator(DEMO, num_chips, max_seq_len=512, **settings)
    with chips as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        sequences = loop.generate(prompts, NUM_NEW, chunk=chunk)
    outputs = [each.output[: len(other)] for each, other in zip(sequences, wanted, strict=True)]
    name = f"{num_chips} chips, {num_lanes} lanes"
    assert_same(outputs, wanted, name, folder=DEMO, prompts=prompts)
