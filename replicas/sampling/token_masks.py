"""Processors that forbid or favour tokens: allowed tokens, bad words, least lengths, biases.

A forbidden token gets minus infinity. Source: vLLM v1/sample/sampler.py, v1/sample/ops/bad_words.py
and v1/sample/logits_processor/builtin.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from replicas.sampling.processor import SlotProcessor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy.typing as npt
    import torch

    from replicas.sampling.processor import LogitRows
    from replicas.sampling.row import SampledRow

    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]

_FORBIDDEN = np.float32(-np.inf)


class AllowedTokens(SlotProcessor["Int64Array"]):
    """Processor of `allowed_token_ids`: forbids all other tokens."""

    def state_of(self, row: SampledRow) -> Int64Array | None:
        """Return (n,) the allowed tokens of a row, in order; None if all are allowed."""
        allowed = row.sampling.allowed_token_ids
        return None if allowed is None else _token_ids(allowed)

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Forbid all tokens but the allowed ones, in float32 (n, V)."""
        for place, _, allowed in self._touched(rows, indices):
            values = logits[place].numpy()
            kept = values[allowed]
            values.fill(_FORBIDDEN)
            values[allowed] = kept


class BadWords(SlotProcessor["_BadWords"]):
    """Processor of `bad_words_token_ids`: forbids the last token of a sequence after the others."""

    def state_of(self, row: SampledRow) -> _BadWords | None:
        """Return the sequences of a row; None if it has none."""
        sequences = row.sampling.bad_words_token_ids
        if not sequences:
            return None
        return _BadWords(sequences, row.token_ids[row.num_prompt_tokens :])

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Forbid tokens that would complete a sequence, in float32 (n, V)."""
        for place, index, words in self._touched(rows, indices):
            forbidden = words.forbidden(rows.drafts[index] if rows.drafts else ())
            logits[place].numpy()[forbidden] = _FORBIDDEN

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note the tokens that a row has got."""
        self._states[slot].extend(token_ids)


class _BadWords:
    """Sequences of tokens that a row must not contain, and the end of its output.

    Args:
        sequences: The sequences.
        output: The output so far.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]], output: Sequence[int]) -> None:
        single: list[int] = []
        # By the last token but one: the tokens before the last, and the last.
        self._by_token: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in sequences:
            if before:
                self._by_token[before[-1]].append((before, last))
            else:
                single.append(last)
        self._single = _token_ids(single)
        words = [before for found in self._by_token.values() for before, _ in found]
        self._longest = max(map(len, words), default=0)
        self._tail: list[int] = []
        self.extend(output)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output."""
        self._tail = self._with(token_ids)

    def forbidden(self, drafts: Sequence[int]) -> Int64Array:
        """Return (n,) the tokens that must not follow the output and these drafts."""
        tail = self._with(drafts) if drafts else self._tail
        found = self._by_token.get(tail[-1]) if tail else None
        if not found:
            return self._single
        last = [last for before, last in found if tail[-len(before) :] == before]
        return np.concatenate([self._single, _token_ids(last)])

    def _with(self, token_ids: Sequence[int]) -> list[int]:
        tail = [*self._tail, *token_ids]
        return tail[max(0, len(tail) - self._longest) :]


class _LeastLength(NamedTuple):
    """The tokens (n,) that would end a row, and how many others must come first."""

    min_tokens: int
    end_token_ids: Int64Array


class MinTokens(SlotProcessor[_LeastLength]):
    """Processor of `min_tokens`: forbids end tokens until an output is long enough.

    Where no other token is possible, as at the end of a grammar, they stay possible.

    Args:
        eos_token_ids: The model's end tokens.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        super().__init__()
        self._eos_token_ids = frozenset(eos_token_ids)

    def state_of(self, row: SampledRow) -> _LeastLength | None:
        """Return the least length of a row, even of one that has it; None if it has none."""
        sampling = row.sampling
        # With ignore_eos, too, as in vLLM.
        ends = sampling.stop_token_ids | self._eos_token_ids
        if not sampling.min_tokens or not ends:
            return None
        return _LeastLength(sampling.min_tokens, _token_ids(ends))

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Forbid end tokens of rows that are too short, in float32 (n, V)."""
        for place, index, (min_tokens, ends) in self._touched(rows, indices):
            if rows.steps[index] < min_tokens:
                values = logits[place].numpy()
                before = values[ends]
                values[ends] = _FORBIDDEN
                if values.max() == _FORBIDDEN:
                    values[ends] = before


class LogitBias(SlotProcessor["tuple[Int64Array, Float32Array]"]):
    """Processor of `logit_bias`: adds to the logits of tokens."""

    def state_of(self, row: SampledRow) -> tuple[Int64Array, Float32Array] | None:
        """Return (n,) the tokens of a row with a bias and what each gets; None if it has none."""
        biases = row.sampling.logit_bias
        if not biases:
            return None
        return (
            np.fromiter(biases.keys(), np.int64, len(biases)),
            np.fromiter(biases.values(), np.float32, len(biases)),
        )

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Add the biases, in float32 (n, V)."""
        for place, _, (token_ids, biases) in self._touched(rows, indices):
            logits[place].numpy()[token_ids] += biases


def _token_ids(token_ids: Iterable[int]) -> Int64Array:
    """Return (n,) token ids in order, each once."""
    return np.array(sorted(set(token_ids)), dtype=np.int64)
