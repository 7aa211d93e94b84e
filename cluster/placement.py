"""Choose where a request runs: pure policy over views, no I/O, no clock, no randomness.

A placement is a proposal. Views are what replicas last said, less what this ingress has sent since;
the replica stays the authority and may refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cluster.config.schema import PolicyName


@dataclass(frozen=True, slots=True)
class GroupView:
    """One DP group, as this ingress believes it to be.

    Attributes:
        incarnation: The engine that has it.
        dp_group: Its index there.
        num_empty_slots: Decode positions that are free.
        num_free_blocks: KV blocks that are free or evictable.
        num_active_slots: Decode positions in use.
    """

    incarnation: str
    dp_group: int
    num_empty_slots: int
    num_free_blocks: int
    num_active_slots: int


@dataclass(frozen=True, slots=True)
class PrefillView:
    """One prefill engine, as this ingress believes it to be.

    Attributes:
        incarnation: The engine.
        num_queued_tokens: Prompt tokens that it has not started on.
        num_active: Requests that it holds.
    """

    incarnation: str
    num_queued_tokens: int
    num_active: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A decode position's DP group; the replica picks the slot."""

    incarnation: str
    dp_group: int


def place_decode(
    num_blocks: int, groups: Sequence[GroupView], refused: Collection[Placement] = ()
) -> Placement | None:
    """Pick the emptiest DP group that can hold the request.

    Args:
        num_blocks: KV blocks for the prompt and the first output token.
        groups: Every group, in any order.
        refused: Groups that have refused this request just now.

    Returns:
        The group with the most empty slots, then the most free blocks; ties go to the lowest
        (incarnation, dp_group), so that equal views give equal placements. None when none fits.
    """
    assert num_blocks > 0, f"{num_blocks=}"
    fitting = [
        g
        for g in groups
        if g.num_empty_slots > 0
        and g.num_free_blocks >= num_blocks
        and Placement(g.incarnation, g.dp_group) not in refused
    ]
    if not fitting:
        return None
    best = min(
        fitting, key=lambda g: (-g.num_empty_slots, -g.num_free_blocks, g.incarnation, g.dp_group)
    )
    return Placement(best.incarnation, best.dp_group)


def place_prefill(engines: Sequence[PrefillView], refused: Collection[str] = ()) -> str | None:
    """Pick the prefill engine with the least work in front of a new prompt.

    Args:
        engines: Every prefill engine, in any order.
        refused: Incarnations that have refused this request, or died on it.

    Returns:
        Its incarnation, or None when none is left.
    """
    best = min(
        (e for e in engines if e.incarnation not in refused),
        key=lambda e: (e.num_queued_tokens, e.num_active, e.incarnation),
        default=None,
    )
    return best.incarnation if best is not None else None


class PlacementPolicy(Protocol):
    """How one ingress places requests; what it remembers belongs to that ingress."""

    def place_decode(
        self, num_blocks: int, groups: Sequence[GroupView], refused: Collection[Placement] = ()
    ) -> Placement | None:
        """Pick a DP group that can hold the request, or None; see `place_decode`."""
        ...

    def place_prefill(
        self, engines: Sequence[PrefillView], refused: Collection[str] = ()
    ) -> str | None:
        """Pick a prefill engine, or None; see `place_prefill`."""
        ...


class MostEmptySlots:
    """Policy `most_empty_slots`; remembers nothing."""

    def place_decode(
        self, num_blocks: int, groups: Sequence[GroupView], refused: Collection[Placement] = ()
    ) -> Placement | None:
        """See `place_decode`."""
        return place_decode(num_blocks, groups, refused)

    def place_prefill(
        self, engines: Sequence[PrefillView], refused: Collection[str] = ()
    ) -> str | None:
        """See `place_prefill`."""
        return place_prefill(engines, refused)


class RoundRobin:
    """Policy `round_robin`: the next in the order of the views that can take the request."""

    def __init__(self) -> None:
        self._next_group = 0
        self._next_engine = 0

    def place_decode(
        self, num_blocks: int, groups: Sequence[GroupView], refused: Collection[Placement] = ()
    ) -> Placement | None:
        """See `PlacementPolicy`; a group that cannot hold the request loses its turn."""
        for offset in range(len(groups)):
            index = (self._next_group + offset) % len(groups)
            group = groups[index]
            placement = Placement(group.incarnation, group.dp_group)
            if (
                group.num_empty_slots > 0
                and group.num_free_blocks >= num_blocks
                and placement not in refused
            ):
                self._next_group = index + 1
                return placement
        return None

    def place_prefill(
        self, engines: Sequence[PrefillView], refused: Collection[str] = ()
    ) -> str | None:
        """See `PlacementPolicy`."""
        for offset in range(len(engines)):
            index = (self._next_engine + offset) % len(engines)
            if engines[index].incarnation not in refused:
                self._next_engine = index + 1
                return engines[index].incarnation
        return None


def make_policy(name: PolicyName) -> PlacementPolicy:
    """A new policy of this name, with nothing to remember yet."""
    return RoundRobin() if name == "round_robin" else MostEmptySlots()
