"""Sampling parameters that every entrance refuses: the engine, `LLM` and the HTTP edge."""

import math

VOCAB_SIZE = 100

BAD = [
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"temperature": 2.01}, "temperature", "temperature must be in [0, 2], got 2.01"),
    ({"temperature": -0.1}, "temperature", "temperature must be in [0, 2], got -0.1"),
    ({"top_p": 0.0}, "top_p", "top_p must be in (0, 1], got 0.0"),
    ({"top_p": 1.1}, "top_p", "top_p must be in (0, 1], got 1.1"),
    ({"top_p": 1.1, "temperature": 0.0}, "top_p", "top_p must be in (0, 1], got 1.1"),
    ({"top_k": -2}, "top_k", "top_k must be -1, 0 or at least 1, got -2"),
    ({"min_p": -0.1}, "min_p", "min_p must be in [0, 1], got -0.1"),
    ({"min_p": 1.5}, "min_p", "min_p must be in [0, 1], got 1.5"),
    ({"seed": 2**63}, "seed", "seed must fit in 64 bits, got 9223372036854775808"),
    ({"n": 0}, "n", "n must be 1 to 128, got 0"),
    ({"n": 129}, "n", "n must be 1 to 128, got 129"),
    (
        {"n": 2, "temperature": 0.0},
        "n",
        "n must be 1 with temperature 0, where all choices would be equal, got 2",
    ),
    ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty must be in [-2, 2], got 2.1"),
    (
        {"frequency_penalty": -3.0},
        "frequency_penalty",
        "frequency_penalty must be in [-2, 2], got -3.0",
    ),
    (
        {"repetition_penalty": 0.0},
        "repetition_penalty",
        "repetition_penalty must be above 0 and finite, got 0.0",
    ),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0, got -1"),
    (
        {"min_tokens": 9, "max_tokens": 8},
        "min_tokens",
        "min_tokens must be at most max_tokens, which is 8, got 9",
    ),
    ({"stop": ("a", "")}, "stop", "stop must not hold an empty string, got 2 entries"),
    ({"stop": ("a",) * 17}, "stop", "stop must have at most 16 strings, got 17 entries"),
    (
        {"stop": ("a" * 1025,)},
        "stop",
        "stop must have at most 1024 characters in each string, got 1 entries",
    ),
    (
        {"stop_token_ids": frozenset({3, 100})},
        "stop_token_ids",
        "stop_token_ids contains 100, outside the vocabulary of 0 to 99",
    ),
    (
        {"logit_bias": {100: 1.0}},
        "logit_bias",
        "logit_bias contains 100, outside the vocabulary of 0 to 99",
    ),
    (
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        "logit_bias",
        "logit_bias must have at most 1024 entries, got 1025 entries",
    ),
    (
        {"allowed_token_ids": ()},
        "allowed_token_ids",
        "allowed_token_ids must have at least one token id, got 0 entries",
    ),
    (
        {"allowed_token_ids": (5, -1)},
        "allowed_token_ids",
        "allowed_token_ids contains -1, outside the vocabulary of 0 to 99",
    ),
    (
        {"allowed_token_ids": (5, 2**40)},
        "allowed_token_ids",
        "allowed_token_ids contains 1099511627776, outside the vocabulary of 0 to 99",
    ),
    (
        {"allowed_token_ids": (5,) * 101},
        "allowed_token_ids",
        "allowed_token_ids has 101 entries, more than the vocabulary of 100",
    ),
    ({"logprobs": 21}, "logprobs", "logprobs must be 0 to 20, got 21"),
    ({"logprobs": -1}, "logprobs", "logprobs must be 0 to 20, got -1"),
    ({"logprobs": -2}, "logprobs", "logprobs must be -1 or at least 0, got -2"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs must be 0 to 20, got 21"),
    (
        {"logprob_token_ids": (1, 100)},
        "logprob_token_ids",
        "logprob_token_ids contains 100, outside the vocabulary of 0 to 99",
    ),
    (
        {"logprob_token_ids": (1, 2), "logprobs": 3},
        "logprobs",
        "logprobs must be left out or 2, the length of logprob_token_ids, got 3",
    ),
    (
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "truncate_prompt_tokens must be -1 or at least 1, got 0",
    ),
    (
        {"truncate_prompt_tokens": -2},
        "truncate_prompt_tokens",
        "truncate_prompt_tokens must be -1 or at least 1, got -2",
    ),
]
"""Fields, the field that is refused, and the message; fields that every entrance has."""

BAD_NUMBERS = [
    (name, value)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    for value in (math.nan, math.inf, -math.inf)
]
"""Numbers that JSON does not have."""

BAD_TOKENS = [
    ({"bad_words_token_ids": ((1,),) * 129}, "must have at most 128 sequences, got 129 entries"),
    ({"bad_words_token_ids": ((1,), ())}, "must not hold an empty sequence, got 2 entries"),
    (
        {"bad_words_token_ids": ((1,) * 257,)},
        "must have at most 256 tokens in each sequence, got 1 entries",
    ),
    ({"bad_words_token_ids": ((1, 100),)}, "contains 100, outside the vocabulary of 0 to 99"),
]
"""Values of `bad_words_token_ids`, which the HTTP edge makes itself."""
