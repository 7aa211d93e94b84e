"""Cost terms that are linear in the places' rates. Pure.

All terms of a level are computed for all places in one product: their weights are summed by `Rate`
first. The value of a single term is computed for a few places, if at all.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.routing.views import Rate

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]


class Times(IntEnum):
    """The factor of a term's rates."""

    ONCE = 0
    MEAN_ROWS = 1
    OUTPUT_TOKENS = 2


class Sum(NamedTuple):
    """A term: a sum of rates times a factor.

    Attributes:
        name: Name of the term.
        times: Factor of all its rates.
        rates: The rates that it sums.
    """

    name: str
    times: Times
    rates: tuple[Rate, ...]


_RATES_OF_PROMPTS = frozenset(range(Rate.WHOLE_PROMPT_S, Rate.ADDED_ROWS_S))
_RATES_OF_STEPS = frozenset(range(Rate.ADDED_ROWS_S, len(Rate)))


class Linear:
    """A level of linear terms; never changes.

    Args:
        terms: The terms, each with its weight.

    Attributes:
        terms: As given.
        asks_for_prompts: Whether they use rates of prompts.
        asks_what_is_added: Whether they use rates that a request adds to decode steps.
        weights: Weights of all terms together, [times, rates].
    """

    def __init__(self, *terms: tuple[float, Sum]) -> None:
        self.terms = terms
        rates = frozenset(rate for _, term in terms for rate in term.rates)
        self.asks_for_prompts = not _RATES_OF_PROMPTS.isdisjoint(rates)
        self.asks_what_is_added = not _RATES_OF_STEPS.isdisjoint(rates)
        self.weights = np.zeros((len(Times), len(Rate)))
        for weight, term in terms:
            for rate in term.rates:
                self.weights[term.times, rate] += weight

    def __repr__(self) -> str:
        return f"Linear{self.terms}"


class Product(NamedTuple):
    """A level and the values that it is multiplied with.

    Attributes:
        level: The level.
        times: The value of each `Times`.
        rates: Rates of the places, [rates, places]. These are the views' own, which the next
            request overwrites; a caller that keeps a product keeps `at`.
    """

    level: Linear
    times: tuple[float, float, float]
    rates: Numbers

    def total(self) -> Numbers:
        """Return the sum of all terms for each place."""
        weights = np.dot(self.times, self.level.weights)
        # No BLAS product over places: it would wake threads, and equal places might get unequal
        # sums.
        total: Numbers = np.einsum("r,rp->p", weights, self.rates)
        return total

    def at(self, places: npt.NDArray[np.int64]) -> Product:
        """Return the product for some places only, as a copy."""
        return self._replace(rates=self.rates.take(places, axis=1))

    def parts(self, rank: int) -> dict[str, float]:
        """Return the value of each term for one place."""
        return {
            term.name: float(self._replace(level=Linear((weight, term))).total()[rank])
            for weight, term in self.level.terms
        }
