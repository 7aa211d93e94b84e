"""What the choices of one request share, and what ends them."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas.messages import EngineRequest, TokenLogprob, TokenOutput
from replicas.output_processor import OutputProcessor
from replicas.sampling_params import SamplingParams
from replicas.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "configs/demo-model"
PROMPT_LOGPROBS = [[], [TokenLogprob(5, -1.0, 1)]]


def processor_of(num_choices):
    sampling = SamplingParams(n=num_choices, prompt_logprobs=0)
    return OutputProcessor(None, EngineRequest("r", [4, 5], sampling), frozenset())


def test_the_prompt_is_described_by_choice_0_for_all():
    processor = processor_of(2)
    first = TokenOutput("r", 0, [7], num_cached_tokens=1, prompt_logprobs=PROMPT_LOGPROBS)
    assert processor.take(first).prompt_logprobs == PROMPT_LOGPROBS
    other = TokenOutput("r", 0, [8], num_cached_tokens=2, choice=1)
    assert processor.take(other).prompt_logprobs == PROMPT_LOGPROBS
    assert processor.take(TokenOutput("r", 1, [9], choice=1)).prompt_logprobs is None
    assert (processor.num_cached_tokens, processor.num_output_tokens) == (1, 3)


def test_an_end_from_an_engine_that_knows_no_token_leaves_the_cached_tokens():
    processor = processor_of(1)
    processor.take(TokenOutput("r", 0, [7], num_cached_tokens=2))
    assert processor.take(TokenOutput("r", 0, [], "abort")).finish_reason == "abort"
    assert (processor.num_cached_tokens, processor.num_output_tokens) == (2, 1)


def test_a_choice_ends_by_itself_and_an_error_ends_all():
    processor = processor_of(3)
    processor.take(TokenOutput("r", 0, [7], "length", choice=1))
    assert [processor.has_ended(choice) for choice in range(3)] == [False, True, False]
    assert not processor.is_finished
    delta = processor.take(TokenOutput("r", 0, [], "error", error="no", choice=2))
    assert (delta.choice, delta.finish_reason) == (2, "error")
    assert processor.is_finished


@pytest.mark.parametrize(("ends_with", "reason"), [(1, None), (6, 6), (9, 9)])
def test_only_the_tokenizers_own_end_token_is_no_stop_reason(ends_with, reason):
    tokenizer = Tokenizer.from_folder(MODEL)
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, {1, 6})
    request = EngineRequest("r", [4, 5], SamplingParams(stop_token_ids=frozenset({9})))
    processor = OutputProcessor(tokenizer, request, tokenizer.eos_token_ids)
    stop_id = 9 if ends_with == 9 else None
    delta = processor.take(TokenOutput("r", 0, [30, ends_with], "stop", stop_id))
    assert (delta.finish_reason, delta.stop_reason) == ("stop", reason)
