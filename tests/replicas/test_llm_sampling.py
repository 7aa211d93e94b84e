"""Parameters of sampling act through the whole engine."""

from __future__ import annotations

import msgspec
import pytest

from replicas import LLM, SamplingParams
from tests.models import chat_folder

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def llm():
    settings = {"dtype": "float32", "max_model_len": 64, "max_batch_size": 4, "num_blocks": 40}
    with LLM(chat_folder(), multiprocess=False, num_threads=1, **settings) as llm:
        yield llm


def generate(llm, *params):
    """The choice of each request; all run side by side."""
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens(llm, params, **changes):
    [choice] = generate(llm, msgspec.structs.replace(params, **changes))
    return choice.token_ids


def test_a_high_repetition_penalty_leaves_each_token_once(llm):
    found = tokens(llm, GREEDY, repetition_penalty=1000.0)
    assert len({*found, *PROMPT}) == len(found) + len(set(PROMPT))


def test_a_negative_presence_penalty_keeps_the_first_token(llm):
    first = tokens(llm, GREEDY)[0]
    assert tokens(llm, GREEDY, presence_penalty=-2.0, frequency_penalty=-2.0) == [first] * 12


def test_min_p_of_one_leaves_the_likeliest_token(llm):
    assert tokens(llm, SEEDED, min_p=1.0) == tokens(llm, GREEDY)
    assert tokens(llm, SEEDED) != tokens(llm, GREEDY)
