"""Bad words become the token sequences that spell them at the start of a text and within it."""

from __future__ import annotations

import pytest

from replicas.bad_words import encode_bad_words
from replicas.errors import InvalidRequestError


class Spelling:
    """A tokenizer that knows these texts; all others are one token for each character."""

    def __init__(self, **known: list[int]) -> None:
        self._known = known

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self._known.get(text, [100 + ord(char) for char in text])


@pytest.mark.parametrize(
    ("known", "words", "sequences"),
    [
        ({"cat": [1], " cat": [2]}, ["cat"], ((1,), (2,))),
        ({"cat": [1], " cat": [2]}, ["  cat"], ((1,), (2,))),
        ({"cat": [1], " cat": [1]}, ["cat"], ((1,),)),
        ({"cat": [1], " cat": [9, 1]}, ["cat"], ((1,),)),
        ({"ca t": [1, 2], " ca t": [3, 2]}, ["ca t"], ((1, 2), (3, 2))),
        ({"a": [1], " a": [2], "b": [3], " b": []}, ["a", "b"], ((1,), (2,), (3,))),
        ({}, [], ()),
    ],
)
def test_a_word_has_a_form_with_a_space_where_that_is_as_many_other_tokens(known, words, sequences):
    assert encode_bad_words(words, Spelling(**known)) == sequences


@pytest.mark.parametrize(
    ("known", "words", "text"),
    [
        ({}, ["a", ""], "bad_words must not hold an empty string, got 2 entries"),
        ({}, ["a"] * 129, "bad_words must have at most 128 words, got 129 entries"),
        ({}, ["a" * 1025], "bad_words must have at most 1024 characters in each word"),
        ({"ab": []}, ["a", "ab"], "bad_words[1] has no tokens"),
        ({}, ["a", "  "], "bad_words[1] has no tokens"),
        ({}, ["a" * 257], "bad_words[0] has 257 tokens, but may have at most 256"),
        (
            {"a": [1], " a": [2]},
            ["a"] * 65,
            "bad_words: 65 words are 130 token sequences, with and without a space; at most 128",
        ),
    ],
)
def test_words_that_cannot_be_forbidden_are_refused_by_number(known, words, text):
    with pytest.raises(InvalidRequestError) as caught:
        encode_bad_words(words, Spelling(**known))
    assert caught.value.param == "bad_words"
    assert str(caught.value).startswith(text)
