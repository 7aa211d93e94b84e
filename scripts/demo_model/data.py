"""The endless, deterministic stream of training tokens.

Decides what one epoch looks like: every train document once, in a seeded order, plain or as a
conversation, alone or within the page of its source file. Some tokens are split into the two that
the tokenizer merged them from. Split tokens teach the model the spelling of its tokens, which
matters for the identifiers of modules that it has never seen.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scripts.demo_model.corpus import Document, pages
from scripts.demo_model.text import MAX_ANSWER_CHARACTERS, chat_text, is_askable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

Tokens = npt.NDArray[np.int64]

# How often a public document is asked for in an epoch. Modules and what stands directly in them,
# which users ask for first, are asked for more often than methods.
_CHAT_SHARE_NEAR_THE_TOP = 0.7
_CHAT_SHARE_OF_OTHERS = 0.2
_PAGE_SHARE = 0.75


class TokenStream:
    """Cuts epochs into consecutive pieces; the same seed gives the same pieces.

    Owner: the training loop. `epoch` and `offset` are the whole position and may be set to resume.

    Args:
        documents: the train part.
        tokenizer: the demo tokenizer.
        seed: decides order, chat formats and splits.
    """

    def __init__(
        self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.epoch = 0
        self.offset = 0
        self._documents = documents
        self._tokenizer = tokenizer
        self._seed = seed
        self._parts = _merge_parts(tokenizer)
        self._cached: tuple[tuple[int, float, bool], Tokens] | None = None

    def take(self, count: int, split_share: float, *, as_pages: bool = False) -> Tokens:
        """Return the next `count + 1` int64 tokens and advance by `count`.

        Args:
            count: number of tokens to learn to predict.
            split_share: share of the tokens that are replaced by their parts.
            as_pages: whether most documents stand in the page of their source file.
        """
        pieces: list[Tokens] = []
        needed = count + 1
        while needed:
            tokens = self._epoch_tokens(split_share, as_pages)
            piece = tokens[self.offset : self.offset + needed]
            pieces.append(piece)
            needed -= len(piece)
            self.offset += len(piece)
            if self.offset >= len(tokens):
                self.epoch, self.offset = self.epoch + 1, 0
        if self.offset:  # at offset 0 the target that both pieces share is the epoch's last token
            self.offset -= 1
        return np.concatenate(pieces)

    def _epoch_tokens(self, split_share: float, as_pages: bool) -> Tokens:
        key = (self.epoch, split_share, as_pages)
        if self._cached is None or self._cached[0] != key:
            rng = random.Random(f"{self._seed}/{self.epoch}")
            texts = self._page_texts(rng) if as_pages else self._single_texts(rng)
            self._cached = (key, self._encode(texts, split_share, rng))
        return self._cached[1]

    def _page_texts(self, rng: random.Random) -> list[str]:
        texts = [
            chat_text(document, rng)
            for document in self._documents
            if rng.random() < _chat_share(document)
        ]
        for page in pages(self._documents):
            if rng.random() < _PAGE_SHARE:
                texts.append(page.text)
            else:
                texts.extend(d.text for d in self._documents if d.source == page.source)
        return texts

    def _single_texts(self, rng: random.Random) -> list[str]:
        texts: list[str] = []
        for document in self._documents:
            as_chat = rng.random() < _chat_share(document)
            if as_chat:
                texts.append(chat_text(document, rng))
            if not as_chat or len(document.text) > MAX_ANSWER_CHARACTERS:
                texts.append(document.text)
        return texts

    def _encode(self, texts: list[str], split_share: float, rng: random.Random) -> Tokens:
        rng.shuffle(texts)
        end = self._tokenizer.eos_token_id
        encoded = self._tokenizer(texts)["input_ids"]
        tokens = np.array([t for ids in encoded for t in (*ids, end)], dtype=np.int64)
        return _split(tokens, self._parts, split_share, np.random.default_rng(rng.getrandbits(64)))


def _chat_share(document: Document) -> float:
    if not is_askable(document):
        return 0.0
    is_near_the_top = document.kind == "module" or document.name.count(".") <= 1
    return _CHAT_SHARE_NEAR_THE_TOP if is_near_the_top else _CHAT_SHARE_OF_OTHERS


def _merge_parts(tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """Return int64 (vocab, 2): the two tokens that each was merged from, -1 if it was not."""
    parts = np.full((len(tokenizer), 2), -1, dtype=np.int64)
    vocabulary = tokenizer.get_vocab()
    for left, right in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]:
        parts[vocabulary[left + right]] = (vocabulary[left], vocabulary[right])
    return parts


def _split(tokens: Tokens, parts: Tokens, share: float, rng: np.random.Generator) -> Tokens:
    """Replace a random share of the tokens by their parts, then of the result once more."""
    for _ in range(2 if share else 0):
        chosen = (rng.random(len(tokens)) < share) & (parts[tokens, 0] >= 0)
        starts = np.arange(len(tokens)) + np.cumsum(chosen) - chosen
        result = np.empty(len(tokens) + int(chosen.sum()), dtype=np.int64)
        result[starts] = np.where(chosen, parts[tokens, 0], tokens)
        result[starts[chosen] + 1] = parts[tokens[chosen], 1]
        tokens = result
    return tokens
