"""Terms of a cost that are sums of what places take, each times something of the request. Pure.

A level of such terms is one product for all places, however many terms it has: their weights are
added up for each `Rate` first. What a term alone says is worked out for a few places, if at all.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from cluster.routing.views import Rate

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]

_Number = TypeVar("_Number", "Numbers", float, "Numbers | float")


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
        rates: What a place takes; of each token of the prompt that is missing there, or each pair
            of tokens, where the rate is one of these.
    """

    name: str
    times: Times
    rates: tuple[Rate, ...]


_PER_TOKEN = frozenset({Rate.PROMPT_TOKEN_S, Rate.TRANSFER_TOKEN_S, Rate.ROWS_PROMPT_TOKEN_S})
_PER_PAIR = frozenset({Rate.PROMPT_PAIR_S, Rate.ROWS_PROMPT_PAIR_S})
_ADDED = frozenset({Rate.ADDED_ROWS_S, Rate.ADDED_CONTEXT_S, Rate.ADDED_LENGTH_S})


class Linear:
    """A level of such terms; never changes.

    Args:
        terms: They, each with its weight.

    Attributes:
        terms: As given.
        asks_what_is_added: Whether they look at what a request adds to steps.
        weights: Of all terms together, [times, (of the whole prompt, of its missing tokens, of
            their pairs) by rates].
    """

    def __init__(self, *terms: tuple[float, Sum]) -> None:
        self.terms = terms
        self.asks_what_is_added = any(not _ADDED.isdisjoint(term.rates) for _, term in terms)
        weights = np.zeros((len(Times), 3, len(Rate)))
        for weight, term in terms:
            for rate in term.rates:
                of = 1 if rate in _PER_TOKEN else 2 if rate in _PER_PAIR else 0
                weights[term.times, of, rate] += weight
        self.weights = weights.reshape(len(Times), -1)

    def __repr__(self) -> str:
        return f"Linear{self.terms}"


class Product(NamedTuple):
    """A level, and what it is weighed by.

    Attributes:
        level: It.
        times: Of each `Times` how often.
        num_prompt_tokens: Of the request.
        missed: Prompt tokens that each place has to compute; one number where that is the same.
        rates: Of each `Rate` what the places have, [rates, places].
    """

    level: Linear
    times: tuple[float, float, float]
    num_prompt_tokens: int
    missed: Numbers | float
    rates: Numbers

    def total(self) -> Numbers:
        """What the terms say together of each place."""
        # [of the whole prompt, of its missing tokens, of their pairs; rates]
        weights: Numbers = np.dot(self.times, self.level.weights).reshape(3, len(Rate))
        length, missed = self.num_prompt_tokens, self.missed
        # No product of BLAS over places: it would wake threads, and equal ones not stay equal.
        if isinstance(missed, float):
            per = np.array((1.0, missed, num_missed_pairs(length, missed)))
            same: Numbers = np.einsum("r,rp->p", per.dot(weights), self.rates)
            return same
        seconds, token_s, pair_s = np.einsum("mr,rp->mp", weights, self.rates)
        total: Numbers = seconds + token_s * missed + pair_s * num_missed_pairs(length, missed)
        return total

    def at(self, places: npt.NDArray[np.int64]) -> Product:
        """See `choice.Weighed`."""
        missed = self.missed if isinstance(self.missed, float) else self.missed[places]
        rates = self.rates.take(places, axis=1)
        return Product(self.level, self.times, self.num_prompt_tokens, missed, rates)

    def parts(self, rank: int) -> dict[str, float]:
        """See `choice.Weighed`."""
        return {
            term.name: float(self._replace(level=Linear((weight, term))).total()[rank])
            for weight, term in self.level.terms
        }


def num_missed_pairs(length: int, missed: _Number) -> _Number:
    """Each missing token attends to those before it, cached ones too, and half of the others."""
    return (length - 0.5 * missed) * missed
