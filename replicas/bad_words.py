"""Bad words as token sequences. Pure; front ends call it, because engines have no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.errors import InvalidRequestError
from replicas.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.tokenizer import Tokenizer


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell the words at the start of a text and within it.

    A word within a text follows a space. Its other form is left out where the space is a token of
    its own or changes the number of tokens, as the sequence would then forbid more than the word.
    Source: vLLM vllm/sampling_params.py `SamplingParams.update_from_tokenizer`.

    Raises:
        InvalidRequestError: There are too many words, or one is empty, too long or has no tokens.
    """
    check_range("bad_words", words)
    sequences: list[tuple[int, ...]] = []
    for number, word in enumerate(words):
        plain, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            for prefix in ("", " ")
        )
        if not plain:
            raise InvalidRequestError("bad_words", f"bad_words[{number}] has no tokens")
        if len(plain) > MAX_BAD_WORD_TOKENS:
            text = f"has {len(plain)} tokens, but may have at most {MAX_BAD_WORD_TOKENS}"
            raise InvalidRequestError("bad_words", f"bad_words[{number}] {text}")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    if len(sequences) > MAX_BAD_WORDS:
        text = f"{len(words)} words are {len(sequences)} token sequences, with and without a space"
        raise InvalidRequestError("bad_words", f"bad_words: {text}; at most {MAX_BAD_WORDS}")
    return tuple(sequences)
