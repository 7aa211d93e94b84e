"""Terms of a cost that are sums of what places take, each times something of the request. Pure.

A level of such terms is one product for all places, however many terms it has: their weights are
added up for each `Rate` first. What a term alone says is worked out for a few places, if at all.
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
    """What of a request, or of all places, a term counts its rates for."""

    ONCE = 0
    MEAN_ROWS = 1
    OUTPUT_TOKENS = 2


class Sum(NamedTuple):
    """A term.

    Attributes:
        name: What it is called.
        times: How often all of its rates count.
        rates: What a place takes.
    """

    name: str
    times: Times
    rates: tuple[Rate, ...]


_RATES_OF_PROMPTS = frozenset(range(Rate.WHOLE_PROMPT_S, Rate.ADDED_ROWS_S))
_RATES_OF_STEPS = frozenset(range(Rate.ADDED_ROWS_S, len(Rate)))


class Linear:
    """A level of such terms; never changes.

    Args:
        terms: They, each with its weight.

    Attributes:
        terms: As given.
        asks_for_prompts: Whether they look at what a prompt takes.
        asks_what_is_added: Whether they look at what a request adds to steps of decodes.
        weights: Of all terms together, [times, rates].
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
    """A level, and what it is weighed by.

    Attributes:
        level: It.
        times: Of each `Times` how often.
        rates: Of each `Rate` what the places have, [rates, places]: those of the views, which the
            next request that they are weighed for writes anew. Whoever keeps it keeps `at`.
    """

    level: Linear
    times: tuple[float, float, float]
    rates: Numbers

    def total(self) -> Numbers:
        """What the terms say together of each place."""
        weights = np.dot(self.times, self.level.weights)
        # No product of BLAS over places: it would wake threads, and equal ones not stay equal.
        total: Numbers = np.einsum("r,rp->p", weights, self.rates)
        return total

    def at(self, places: npt.NDArray[np.int64]) -> Product:
        """See `choice.Weighed`."""
        return self._replace(rates=self.rates.take(places, axis=1))

    def parts(self, rank: int) -> dict[str, float]:
        """See `choice.Weighed`."""
        return {
            term.name: float(self._replace(level=Linear((weight, term))).total()[rank])
            for weight, term in self.level.terms
        }
