"""Sampling parameters have one form, one table of ranges, and fit into a message."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from replicas.codec import (
    MAX_GRAMMAR_BYTES,
    decode_client_message,
    encode,
    max_client_message_bytes,
)
from replicas.engine.requests import RequestChecks
from replicas.errors import InvalidRequestError
from replicas.messages import MAX_REQUEST_ID_CHARS, AddRequest, EngineRequest
from replicas.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    ReasoningBudget,
    ReasoningMarks,
    SamplingParams,
    StructuredOutputs,
    check_range,
)
from tests.bad_sampling import BAD, BAD_NUMBERS, BAD_TOKENS, VOCAB_SIZE

ROUND = SamplingParams(
    max_tokens=9, temperature=0.5, top_p=0.5, top_k=3, seed=7, stop=("a",), n=3, logprobs=2,
    stop_token_ids=frozenset({4}), ignore_eos=True, skip_special_tokens=False,
    include_stop_str_in_output=True, presence_penalty=1.0, frequency_penalty=-1.0,
    repetition_penalty=1.5, min_p=0.1, min_tokens=2, logit_bias={5: -1.0}, prompt_logprobs=1,
    allowed_token_ids=(1, 2), bad_words=("x",), bad_words_token_ids=((1, 2), (3,)),
    logprob_token_ids=(6, 7), truncate_prompt_tokens=4, truncation_side="right",
    skip_reading_prefix_cache=True, structured_outputs=StructuredOutputs(json={"type": "object"}),
    reasoning_budget=ReasoningBudget(max_tokens=3, marks=ReasoningMarks(end_token_ids=(4,))),
    pooling="mean",
)  # fmt: skip


def checks():
    return RequestChecks(num_groups=1, max_model_len=64, vocab_size=VOCAB_SIZE, has_connector=False)


def problem(**fields):
    return checks().problem(AddRequest(EngineRequest("r", [1], SamplingParams(**fields))))


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [*BAD, *((f, "bad_words_token_ids", f"bad_words_token_ids {text}") for f, text in BAD_TOKENS)],
    ids=str,
)
def test_a_bad_value_is_refused_in_the_same_words_at_the_engine_and_before(fields, param, text):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields).checked(VOCAB_SIZE)
    assert (caught.value.param, str(caught.value)) == (param, text)
    assert problem(**fields) == text


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_a_number_that_is_none_is_refused(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}).checked(VOCAB_SIZE)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"), ("top_k", 1.5), ("n", True), ("min_p", "x"), ("stop", 5),
        ("stop", ("a", 1)), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: "x"}),
        ("logit_bias", [5]), ("allowed_token_ids", [1.5]), ("bad_words", "word"),
        ("truncation_side", "middle"), ("skip_reading_prefix_cache", 1),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_named(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name} has a wrong type") as caught:
        SamplingParams(**{name: value}).checked(VOCAB_SIZE)
    assert caught.value.param == name


def test_values_of_numpy_lists_and_none_have_the_form_of_plain_ones():
    given = SamplingParams(
        max_tokens=np.int64(4), temperature=np.float32(0.5), stop=["a"], stop_token_ids=[3, 3],
        logit_bias={np.int32(5): np.float64(2.0)}, allowed_token_ids=[np.int64(1)],
    )  # fmt: skip
    assert given.checked(VOCAB_SIZE) == SamplingParams(
        max_tokens=4, temperature=0.5, stop=("a",), stop_token_ids=frozenset({3}),
        logit_bias={5: 2.0}, allowed_token_ids=(1,),
    )  # fmt: skip
    nothing = SamplingParams(
        stop=None, stop_token_ids=None, logit_bias=None, bad_words=None, logprob_token_ids=None
    )
    assert nothing.checked(VOCAB_SIZE) == SamplingParams()
    assert SamplingParams(stop="word").stop == ("word",)


@pytest.mark.parametrize(
    ("given", "used"),
    [(0.0, 0.0), (9e-6, 9e-6), (1e-5, 0.01), (0.005, 0.01), (0.01, 0.01), (0.02, 0.02), (0, 0)],
)
def test_low_temperatures_that_are_not_greedy_are_raised(given, used):
    assert SamplingParams(temperature=given).temperature == used


def test_greedy_restricts_no_tokens():
    greedy = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)


def test_a_seed_of_minus_one_is_no_seed():
    assert SamplingParams(seed=-1).seed is None


def test_a_logit_bias_is_clamped_as_vllm_does():
    params = SamplingParams(logit_bias={1: 250.0, 2: -250.0, 3: 5.0})
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 5.0}


def test_prompt_logprobs_need_the_prompt_computed():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False).checked(VOCAB_SIZE)
    assert caught.value.param == "skip_reading_prefix_cache"


@pytest.mark.parametrize(
    ("skips", "prompt_logprobs", "reads"),
    [(None, None, True), (None, 0, False), (True, None, False), (False, None, True)],
)
def test_log_probabilities_of_a_prompt_imply_that_no_cache_is_read(skips, prompt_logprobs, reads):
    params = SamplingParams(skip_reading_prefix_cache=skips, prompt_logprobs=prompt_logprobs)
    assert params.reads_prefix_cache == reads


@pytest.mark.parametrize(
    ("most", "count", "is_taken"),
    [(20, 20, True), (20, 21, False), (20, -1, False), (VOCAB_SIZE, -1, True), (-1, -1, True),
     (-1, 1000, True), (-1, -2, False), (0, 0, True), (0, 1, False)],
)  # fmt: skip
def test_an_engine_limits_the_number_of_log_probabilities(most, count, is_taken):
    for name in ("logprobs", "prompt_logprobs"):
        params = SamplingParams(**{name: count})
        if is_taken:
            params.validate(VOCAB_SIZE, most)
        else:
            with pytest.raises(InvalidRequestError, match=f"^{name} must be"):
                params.validate(VOCAB_SIZE, most)


def test_defaults_are_in_range_because_no_request_checks_them_again():
    for name in SamplingParams.__struct_fields__:
        check_range(name, getattr(SamplingParams(), name))


def test_every_field_survives_the_wire():
    for name in SamplingParams.__struct_fields__:
        assert getattr(ROUND, name) != getattr(SamplingParams(), name), f"{name} is not tried"
    message = AddRequest(EngineRequest("r", [1], ROUND))
    assert decode_client_message(encode(message)) == message


def test_an_older_peers_parameters_have_the_defaults_of_new_fields():
    older = msgspec.to_builtins(SamplingParams(seed=5))[:12]
    assert msgspec.convert(older, SamplingParams) == SamplingParams(seed=5)


@pytest.mark.parametrize(("max_model_len", "vocab_size"), [(64, 400), (2**17, 2**17)])
def test_the_largest_legal_message_is_read(max_model_len, vocab_size):
    slots = 4
    largest = 2**31 - 1  # of every token id, so that each takes as many bytes as it can
    sampling = SamplingParams(
        stop=tuple("\U0001f600" * MAX_STOP_CHARS for _ in range(MAX_STOP_STRINGS)),
        stop_token_ids=frozenset(range(largest - vocab_size, largest)),
        allowed_token_ids=(largest,) * vocab_size,
        bad_words_token_ids=((largest,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS,
        logit_bias={largest - i: random.random() for i in range(MAX_LOGIT_BIASES)},
    )
    request = EngineRequest("i" * MAX_REQUEST_ID_CHARS, [largest] * max_model_len, sampling)
    outputs = [[largest] * max_model_len] * slots
    message = AddRequest(request, "decode", token_ids=outputs, ticket=bytes(1 << 14))
    most = max_client_message_bytes(max_model_len, vocab_size, slots)
    assert len(encode(message)) + MAX_GRAMMAR_BYTES < most


@pytest.mark.parametrize(
    ("max_tokens", "end", "text"),
    [
        (-1, (1,), "must be at least 0, got -1"),
        (0, (), "must have tokens that end the reasoning"),
        (0, (1,) * 33, "must have at most 32 tokens around the reasoning, got 33"),
        (0, (VOCAB_SIZE,), "contains 100, outside the vocabulary of 0 to 99"),
    ],
)
def test_a_bad_budget_of_reasoning_is_refused(max_tokens, end, text):
    budget = ReasoningBudget(max_tokens=max_tokens, marks=ReasoningMarks(end_token_ids=end))
    with pytest.raises(InvalidRequestError, match=f"^reasoning_budget {text}"):
        SamplingParams(reasoning_budget=budget).checked(VOCAB_SIZE)
