"""Interpolated modified Kneser-Ney n-gram model over small integers: the baseline to beat.

Chen and Goodman's form: three discounts per order estimated from the counts of counts,
continuation counts below the highest order, interpolation at every order down to the uniform
distribution over the alphabet. The counts are sorted numpy arrays of packed n-grams, so two
million bytes take seconds.

Every sequence starts from `order - 1` start marks that are context only. There is no end mark: the
model spends no probability on ending, which favours it against a network that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Symbols = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Level:
    """Counts of one order: sorted packed n-grams, and each context's total and back-off weight."""

    grams: Keys
    discounted: Floats
    contexts: Keys
    totals: Floats
    backoffs: Floats


class KneserNeyModel:
    """n-gram probabilities fitted once to a list of sequences.

    Immutable after construction.

    Args:
        sequences: int64 arrays of symbols in [0, alphabet_size).
        order: n; a symbol is predicted from the n - 1 before it.
        alphabet_size: number of symbols; the start mark is one more.

    Raises:
        ValueError: when n packed symbols do not fit 64 bits.
    """

    def __init__(self, sequences: Sequence[Symbols], order: int, alphabet_size: int) -> None:
        self.order = order
        self.alphabet_size = alphabet_size
        self._bits = int(alphabet_size).bit_length()  # alphabet_size itself is the start mark
        if order * self._bits > 64:
            raise ValueError(f"order {order} over {alphabet_size} symbols does not fit 64 bits")
        grams, counts = np.unique(
            np.concatenate([self._pack(sequence, order) for sequence in sequences]),
            return_counts=True,
        )
        self._levels = [self._fit(grams, counts)]
        for length in range(order - 1, 0, -1):
            # How many different symbols precede each shorter n-gram, not how often it occurs.
            grams, counts = np.unique(grams & self._mask(length), return_counts=True)
            self._levels.insert(0, self._fit(grams, counts))

    def bits(self, sequence: Symbols) -> float:
        """Return the code length of a sequence in bits, -log2 of its probability."""
        if not len(sequence):
            return 0.0
        keys = self._pack(sequence, self.order)
        probability = np.full(len(keys), 1.0 / self.alphabet_size)
        for length, level in enumerate(self._levels, start=1):
            probability = self._interpolate(level, keys & self._mask(length), probability)
        return float(-np.log2(probability).sum())

    def _mask(self, length: int) -> np.uint64:
        return np.uint64((1 << (length * self._bits)) - 1)

    def _pack(self, sequence: Symbols, length: int) -> Keys:
        padded = np.concatenate([np.full(length - 1, self.alphabet_size), sequence])
        keys = np.zeros(len(sequence), dtype=np.uint64)
        for offset in range(length):
            window = padded[offset : offset + len(sequence)].astype(np.uint64)
            keys = (keys << np.uint64(self._bits)) | window
        return keys

    def _fit(self, grams: Keys, counts: npt.NDArray[np.int64]) -> _Level:
        discounts = _discounts(counts)
        class_of_gram = np.minimum(counts, 3)
        # `grams` is sorted, so equal contexts are neighbours.
        contexts, first = np.unique(grams >> np.uint64(self._bits), return_index=True)
        totals = np.add.reduceat(counts, first).astype(np.float64)
        removed = np.add.reduceat(discounts[class_of_gram], first)
        discounted = counts - discounts[class_of_gram]
        return _Level(grams, discounted, contexts, totals, removed / totals)

    def _interpolate(self, level: _Level, keys: Keys, lower: Floats) -> Floats:
        row, known = _find(level.contexts, keys >> np.uint64(self._bits))
        gram, counted = _find(level.grams, keys)
        own = np.where(counted, level.discounted[gram], 0.0) / level.totals[row]
        return np.where(known, own + level.backoffs[row] * lower, lower)


def _find(table: Keys, keys: Keys) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return where each key stands in the sorted table (any row if absent), and if it does."""
    position = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return position, table[position] == keys


def _discounts(counts: npt.NDArray[np.int64]) -> Floats:
    """Return the discounts of n-grams seen 0, 1, 2 and 3 or more times (Chen, Goodman 1998)."""
    ones, twos, threes, fours = (max(int((counts == k).sum()), 1) for k in (1, 2, 3, 4))
    y = ones / (ones + 2 * twos)
    raw = [0.0, 1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes]
    # Few counts can give discounts out of range. A discount of 0 would leave unseen n-grams
    # without any probability.
    limits = [(0.0, 0.0), (0.1, 0.95), (0.1, 1.9), (0.1, 2.85)]
    return np.array(
        [min(max(value, low), high) for value, (low, high) in zip(raw, limits, strict=True)]
    )
