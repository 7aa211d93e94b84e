"""The places of one side as a table of columns, so that 500 are weighed as fast as four. Pure.

Owner: the pool state. A column has one value of every place, in the order of the list; changes are
written in place. A `GroupView` is one place as an object, for callers that look at few.
"""

from __future__ import annotations

from array import array
from enum import IntEnum, auto
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.routing.affinity import place_keys
from cluster.routing.placement import ANY_GROUP, EngineSummary, GroupView, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cluster.routing.demand import Demand


class Column(IntEnum):
    """Columns of the table, in the order of `GroupView`, which documents them."""

    # Values of a place.
    EMPTY_SLOTS = 0
    FREE_TOKENS = auto()
    HELD_TOKENS = auto()
    ACTIVE = auto()
    WAITING = auto()
    SPARE_PROMPT_S = auto()
    SPARE_ROWS = auto()
    SPARE_CONTEXT_TOKENS = auto()
    # Values of its engine, equal in all of that engine's places.
    MAX_CONTEXT_TOKENS = auto()
    ROWS = auto()
    QUEUED_TOKENS = auto()
    OWN_PROMPT_S = auto()
    OWN_PROMPT_TOKEN_S = auto()
    OWN_PROMPT_PAIR_S = auto()
    ROW_S = auto()
    CONTEXT_TOKEN_S = auto()
    LONGEST_TOKEN_S = auto()
    PROMPT_S = auto()
    PROMPT_TOKEN_S = auto()
    PROMPT_PAIR_S = auto()
    TRANSFER_TOKEN_S = auto()
    QUEUE_S = auto()
    STEP_S = auto()


class Rate(IntEnum):
    """Seconds that a place takes for a part of a request; costs are sums of these.

    The first ones are columns as well; the others are computed for each request.
    """

    QUEUE_S = 0
    STEP_S = auto()
    # Computed by `Views.add_prompt`: seconds of the whole prompt; of the KV that is fetched; by
    # which the prompt makes its step longer; and this, times the sequences of the engine that wait
    # meanwhile.
    WHOLE_PROMPT_S = auto()
    TRANSFER_S = auto()
    ADDED_PROMPT_S = auto()
    ROWS_ADDED_PROMPT_S = auto()
    # Computed by `Views.add`: seconds by which each step becomes longer, summed over the sequences
    # of the engine and the new one.
    ADDED_ROWS_S = auto()
    ADDED_CONTEXT_S = auto()
    ADDED_LENGTH_S = auto()


NUM_OF_PLACE = int(Column.MAX_CONTEXT_TOKENS)
"""Number of first columns that are of a place; all others are of its engine."""
_SPARES = slice(Column.SPARE_ROWS, Column.MAX_CONTEXT_TOKENS + 1)
"""Rows, KV tokens and length that a request may add before steps become longer."""
_COLUMNS = slice(len(Column))
_OWN_PROMPTS = slice(Column.OWN_PROMPT_S, Column.ROW_S)
_PROMPTS = slice(Column.PROMPT_S, Column.QUEUE_S)
"""Costs of a prompt, and of its KV."""
_RATES = slice(Column.QUEUE_S, Column.QUEUE_S + len(Rate))
_OF_PROMPT = slice(Rate.WHOLE_PROMPT_S, Rate.ADDED_ROWS_S)
ADDED = slice(Rate.ADDED_ROWS_S, len(Rate))
"""Rates that `Views.add` computes."""
_NUM_ADDED = len(Rate) - Rate.WHOLE_PROMPT_S
_GROWTHS = slice(_RATES.stop, _RATES.stop + 3)
"""Cost of each unit beyond the spares, for all sequences of the engine and the new one together."""
# Indices into the values that all places of an engine share.
_ROWS = Column.ROWS - NUM_OF_PLACE
_OF_STEPS = slice(Column.ROW_S - NUM_OF_PLACE, Column.PROMPT_S - NUM_OF_PLACE)
_LEAST = np.array(0.0)
"""With a few hundred numbers, numpy takes an array of one in half the time of a Python number."""


_NO_SUMMARY = EngineSummary("both", (), 0.0)


class Places(NamedTuple):
    """Values of all places of one engine, as they are written to the table; never changes.

    Attributes:
        summary: Summary of the engine's snapshot.
        num_free_blocks: Free blocks of each place for each KV group.
        of_places: Values of each place, [the first `NUM_OF_PLACE` columns, places].
        of_engine: Values that all places share, [the other columns and what follows from them, 1].
        num_rows: Sequences of the engine.
    """

    summary: EngineSummary
    num_free_blocks: Sequence[list[int]]
    of_places: npt.NDArray[np.float64]
    of_engine: npt.NDArray[np.float64]
    num_rows: float

    @classmethod
    def of(
        cls,
        summary: EngineSummary,
        num_free_blocks: Sequence[list[int]],
        of_places: Sequence[float],
        of_engine: Sequence[float],
    ) -> Places:
        """Return places made of plain numbers, column by column."""
        num_rows = of_engine[_ROWS]
        growths = [(num_rows + 1.0) * seconds for seconds in of_engine[_OF_STEPS]]
        added = [0.0] * _NUM_ADDED  # computed for each request
        table = array("d", (*of_places, *of_engine, *added, *growths))
        values, num_of_places = np.frombuffer(table), len(of_places)
        return cls(
            summary,
            num_free_blocks,
            values[:num_of_places].reshape(NUM_OF_PLACE, -1),
            values[num_of_places:, np.newaxis],
            num_rows,
        )


class Views:
    """The table of all places of one side; values are changed by `write` alone.

    Args:
        placements: The places in order; a whole engine can always take a request.

    Attributes:
        placements: As given.
        num_free_blocks: Free blocks of each place for each KV group.
        summaries: Summary of each place's engine; a neutral one before the first `write`.
        rates: Rates of all places, [rates, places]; those that are computed for a request are valid
            until the next request is weighed.
    """

    def __init__(self, placements: Iterable[Placement] = ()) -> None:
        self.placements = list(placements)
        self.num_free_blocks: list[list[int]] = [[] for _ in self.placements]
        self.summaries: list[EngineSummary] = [_NO_SUMMARY] * len(self.placements)
        self._table = np.zeros((_GROWTHS.stop, len(self.placements)))
        self._columns: list[npt.NDArray[np.float64]] = list(self._table)
        self.rates: npt.NDArray[np.float64] = self._table[_RATES]
        self._prompts, self._of_prompt = self._table[_PROMPTS], self.rates[_OF_PROMPT]
        self._spares, self._added = self._table[_SPARES], self.rates[ADDED]
        self._growths = self._table[_GROWTHS]
        self._sum_rows = 0.0
        self._indices = {placement: i for i, placement in enumerate(self.placements)}
        self._take_all = np.array([p.dp_group == ANY_GROUP for p in self.placements], dtype=bool)
        self._have_queues = bool(self._take_all.any())
        by_name = sorted(range(len(self)), key=self.placements.__getitem__)
        self.ranks = np.empty(len(self))
        self.ranks[by_name] = np.arange(len(self))

    def __len__(self) -> int:
        return len(self.placements)

    def __getitem__(self, index: int) -> GroupView:
        index = range(len(self))[index]
        values = self._table[_COLUMNS, index].tolist()
        role, kv_groups, step_s, _ = self.summaries[index]
        return GroupView(
            *self.placements[index],
            role,
            kv_groups,
            step_s,
            index,
            self.num_free_blocks[index],
            *values,
        )

    def __iter__(self) -> Iterator[GroupView]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"Views({list(self)})"

    def write(self, first: int, places: Places) -> None:
        """Write the values of one engine's places, the first of which is at index `first`."""
        count = len(places.num_free_blocks)
        end = first + count
        if count:
            self._sum_rows += count * (places.num_rows - float(self._columns[Column.ROWS][first]))
        self.num_free_blocks[first:end] = places.num_free_blocks
        self.summaries[first:end] = [places.summary] * count
        self._table[:NUM_OF_PLACE, first:end] = places.of_places
        self._table[NUM_OF_PLACE:, first:end] = places.of_engine

    def equals(self, other: Views) -> bool:
        """Return whether both have the same places with the same values."""
        return (
            self.placements == other.placements
            and self.summaries == other.summaries
            and self.num_free_blocks == other.num_free_blocks
            and np.array_equal(self._table[_COLUMNS], other._table[_COLUMNS])
        )

    def column(self, column: Column) -> npt.NDArray[np.float64]:
        """Return one value of all places; read-only."""
        return self._columns[column]

    def own_prompts_s(
        self, num_tokens: int, missed: npt.NDArray[np.float64] | float
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of a prompt in each place if its own engine computes it."""
        return _prompts_s(self._table[_OWN_PROMPTS], num_tokens, missed, np.empty(len(self)))

    def fetched_s(self, missed: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
        """Return the seconds of fetching a prompt's KV, of which each place misses some tokens."""
        fetched_s: npt.NDArray[np.float64] = self._prompts[3] * missed
        return fetched_s

    def add_prompt(self, num_tokens: int, missed: npt.NDArray[np.float64] | float) -> None:
        """Compute the rates of a prompt with `num_tokens`, of which each place misses some.

        DP groups compute prompts side by side: a step becomes longer only by the part that exceeds
        the spare of its group.
        """
        whole, transfer, added, standing = self._of_prompt
        _prompts_s(self._prompts[:3], num_tokens, missed, whole)
        np.multiply(self._prompts[3], missed, out=transfer)
        np.subtract(whole, self._columns[Column.SPARE_PROMPT_S], out=added)
        np.maximum(added, _LEAST, out=added)
        np.multiply(added, self._columns[Column.ROWS], out=standing)

    def add(self, num_rows: int, num_tokens: int) -> None:
        """Compute the `ADDED` rates for a request of `num_rows` sequences of `num_tokens` each."""
        more = np.array(((num_rows,), (num_rows * num_tokens,), (num_tokens,)), dtype=np.float64)
        added = np.subtract(more, self._spares, out=self._added)
        np.maximum(added, _LEAST, out=added)
        added *= self._growths

    @property
    def mean_rows(self) -> float:
        """Mean number of sequences of a place's engine, over all places."""
        return self._sum_rows / len(self.placements)

    def columns_of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return a copy of all values of some places, [columns, places]."""
        return self._table[_COLUMNS].take(indices, axis=1)

    def copy(self) -> npt.NDArray[np.float64]:
        """Return a copy of all values of all places; `of` makes views of it."""
        return self._table[_COLUMNS].copy()

    @classmethod
    def of(cls, placements: Iterable[Placement], columns: npt.NDArray[np.float64]) -> Views:
        """Return views with these values, [columns, places], and neutral engine summaries."""
        views = cls(placements)
        for index, values in enumerate(columns.T.tolist()):
            of_place, of_engine = values[:NUM_OF_PLACE], values[NUM_OF_PLACE:]
            views.write(index, Places.of(_NO_SUMMARY, [[]], of_place, of_engine))
        return views

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Key of each place for session affinity."""
        return place_keys(self.placements)

    @cached_property
    def engines(self) -> dict[str, int]:
        """Incarnations of the engines, with the index of the first place of each."""
        return {p.incarnation: i for i, p in reversed(list(enumerate(self.placements)))}

    def index_of(self, placement: Placement) -> int | None:
        """Return the index of a place, or None."""
        return self._indices.get(placement)

    def most_of(self, counts: Mapping[Placement, int]) -> npt.NDArray[np.float64]:
        """Return the count of each place, 0 without one; of a whole engine its highest."""
        found: dict[int, int] = {}
        index_of = self._indices.get
        for placement, count in counts.items():
            index = index_of(placement)
            if index is None and self._have_queues:
                index = index_of(Placement(placement.incarnation, ANY_GROUP))
            if index is not None and count > found.get(index, 0):
                found[index] = count
        most = np.zeros(len(self))
        most[list(found)] = list(found.values())
        return most

    def fitting(self, demand: Demand) -> npt.NDArray[np.bool_]:
        """Return where a request can start at once, like `fits`."""
        fitting: npt.NDArray[np.bool_] = self._columns[Column.EMPTY_SLOTS] >= demand.num_choices
        fitting &= self._columns[Column.FREE_TOKENS] >= demand.num_first_tokens
        if self._have_queues:
            fitting |= self._take_all
        return fitting


def _prompts_s(
    of_prompts: npt.NDArray[np.float64],
    num_tokens: int,
    missed: npt.NDArray[np.float64] | float,
    out: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the seconds of a prompt in each place, from its costs per prompt, token and pair.

    Each missing token attends to all tokens before it, cached ones too: on average to the cached
    ones and half of the missing ones.
    """
    prompt_s, token_s, pair_s = of_prompts
    np.multiply(token_s, missed, out=out)
    out += pair_s * ((num_tokens - 0.5 * missed) * missed)
    out += prompt_s
    return out
