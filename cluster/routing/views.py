"""The places of one side as a table, so that a policy weighs five hundred as fast as four. Pure.

Owner: the pool state. A column of the table is what all places have of one thing, in the order of
the list; what changes is written in place. A `GroupView` is one place, for whoever looks at few.
"""

from __future__ import annotations

from array import array
from enum import IntEnum, auto
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.routing.affinity import place_keys
from cluster.routing.placement import ANY_GROUP, GroupView, Told

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement


class Column(IntEnum):
    """What places are weighed by; `GroupView` says what each is, in the same order."""

    # Of a place.
    EMPTY_SLOTS = 0
    FREE_TOKENS = auto()
    HELD_TOKENS = auto()
    ACTIVE = auto()
    WAITING = auto()
    SPARE_ROWS = auto()
    SPARE_CONTEXT_TOKENS = auto()
    # Of its engine, the same in all of that engine's places.
    MAX_CONTEXT_TOKENS = auto()
    ROW_S = auto()
    CONTEXT_TOKEN_S = auto()
    LONGEST_TOKEN_S = auto()
    PROMPT_S = auto()
    PROMPT_TOKEN_S = auto()
    PROMPT_PAIR_S = auto()
    TRANSFER_TOKEN_S = auto()
    ROWS = auto()
    QUEUED_TOKENS = auto()
    QUEUE_S = auto()
    STEP_S = auto()


SPARES = slice(Column.SPARE_ROWS, Column.MAX_CONTEXT_TOKENS + 1)
"""What a request may have of rows, KV tokens and length before steps become longer."""
STEP_COSTS = slice(Column.ROW_S, Column.LONGEST_TOKEN_S + 1)
"""What more than these costs."""
NUM_OF_PLACE = int(Column.MAX_CONTEXT_TOKENS)
"""The first columns: those of a place; all others are of its engine."""


_NOTHING = Told("both", (), 0.0)


class Places(NamedTuple):
    """What all places of one engine have, as it is written; never changes.

    Attributes:
        told: What the engine says.
        num_free_blocks: Of each place, for each KV group.
        of_places: What each place has, [the first `NUM_OF_PLACE` columns, places].
        of_engine: What all of them have, [the other columns, 1].
    """

    told: Told
    num_free_blocks: Sequence[list[int]]
    of_places: npt.NDArray[np.float64]
    of_engine: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        told: Told,
        num_free_blocks: Sequence[list[int]],
        of_places: Sequence[float],
        of_engine: Sequence[float],
    ) -> Places:
        """Of the same as plain numbers, column by column."""
        values = np.frombuffer(array("d", (*of_places, *of_engine)))
        num_of_places = NUM_OF_PLACE * len(num_free_blocks)
        return cls(
            told,
            num_free_blocks,
            values[:num_of_places].reshape(NUM_OF_PLACE, -1),
            values[num_of_places:, np.newaxis],
        )


class Views:
    """See the module docstring; changed by `write` alone.

    Args:
        placements: The places, in order; an engine as a whole takes everybody.

    Attributes:
        placements: As given.
        num_free_blocks: Of each place, for each KV group.
        told: Of each place, what its engine says; none before the first `write`.
    """

    def __init__(self, placements: Iterable[Placement] = ()) -> None:
        self.placements = list(placements)
        self.num_free_blocks: list[list[int]] = [[] for _ in self.placements]
        self.told: list[Told] = [_NOTHING] * len(self.placements)
        self._table = np.zeros((len(Column), len(self.placements)))
        self._columns: list[npt.NDArray[np.float64]] = list(self._table)
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
        values = self._table[:, index].tolist()
        role, kv_groups, step_s, _ = self.told[index]
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
        """Take over what is new of the places of one engine, the first of which is at an index."""
        end = first + len(places.num_free_blocks)
        self.num_free_blocks[first:end] = places.num_free_blocks
        self.told[first:end] = [places.told] * (end - first)
        self._table[:NUM_OF_PLACE, first:end] = places.of_places
        self._table[NUM_OF_PLACE:, first:end] = places.of_engine

    def equals(self, other: Views) -> bool:
        """Whether both have the same places with the same in them."""
        return (
            self.placements == other.placements
            and self.told == other.told
            and self.num_free_blocks == other.num_free_blocks
            and np.array_equal(self._table, other._table)
        )

    def column(self, column: Column) -> npt.NDArray[np.float64]:
        """What all places have of one thing; not to be changed."""
        return self._columns[column]

    def columns(self, columns: slice) -> npt.NDArray[np.float64]:
        """What all places have of several things, [things, places]; not to be changed."""
        return self._table[columns]

    def columns_of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What some places have of all things, [things, places]: a copy."""
        return self._table.take(indices, axis=1)

    def copy(self) -> npt.NDArray[np.float64]:
        """What all places have of all things; `of` makes views of it."""
        return self._table.copy()

    @classmethod
    def of(cls, placements: Iterable[Placement], columns: npt.NDArray[np.float64]) -> Views:
        """Views of what places have, [things, places]; of nothing that engines say besides."""
        views = cls(placements)
        views._table[:] = columns
        return views

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        """What sessions find their homes by, of each place."""
        return place_keys(self.placements)

    @cached_property
    def engines(self) -> dict[str, int]:
        """The engines by their incarnations, with the index of the first place of each."""
        return {p.incarnation: i for i, p in reversed(list(enumerate(self.placements)))}

    def index_of(self, placement: Placement) -> int | None:
        """Where a place is in the list, if it is there."""
        return self._indices.get(placement)

    def fitting(self, demand: Demand) -> npt.NDArray[np.bool_]:
        """Where a request can begin at once, as `fits` says."""
        fitting: npt.NDArray[np.bool_] = self._columns[Column.EMPTY_SLOTS] >= demand.num_choices
        fitting &= self._columns[Column.FREE_TOKENS] >= demand.num_first_tokens
        if self._have_queues:
            fitting |= self._take_all
        return fitting
