"""Choose where a request runs: pure policy over views, no I/O, no clock, no randomness.

A placement is a proposal. Views are what replicas last said, less what this ingress has sent since;
the replica stays the authority and may refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from replicas.config import Role
from replicas.kv_groups import KVGroup

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cluster.config.schema import PolicyName
    from cluster.routing.demand import Demand

ANY_GROUP = -1
"""Stands for an engine as a whole, which picks the DP group itself."""


class Placement(NamedTuple):
    """A DP group, or an engine as a whole; the replica picks the slot."""

    incarnation: str
    dp_group: int


class GroupView(msgspec.Struct, frozen=True, gc=False):
    """One DP group, or one prefill engine as a whole, as this ingress believes it to be.

    Attributes:
        incarnation: The engine that has it.
        dp_group: Its index there, or `ANY_GROUP`.
        role: What the engine takes now.
        kv_groups: KV groups of the model.
        num_empty_slots: Decode positions that are free.
        num_free_blocks: For each KV group the blocks that are free or evictable.
        num_free_tokens: The longest sequence that has room in these, in tokens.
        num_active: Requests that it holds or was sent.
        num_queued_tokens: Prompt tokens that its engine has not started on.
        step_s: Seconds of the engine's latest decode step; 0 before the first.
        index: Its place in the list of views.
    """

    incarnation: str
    dp_group: int
    role: Role
    kv_groups: tuple[KVGroup, ...]
    num_empty_slots: int
    num_free_blocks: list[int]
    num_free_tokens: int
    num_active: int
    num_queued_tokens: int
    step_s: float
    index: int

    @property
    def placement(self) -> Placement:
        """What a request is told that is placed here."""
        return Placement(self.incarnation, self.dp_group)


class PlacementPolicy(Protocol):
    """Says how bad a place is; what it remembers belongs to one ingress."""

    def score(self, demand: Demand, view: GroupView) -> tuple[object, ...]:
        """Compared with the scores of all other views that can take the request: the least wins."""
        ...

    def placed(self, demand: Demand, view: GroupView) -> None:
        """Called with the winner."""
        ...


def place(
    policy: PlacementPolicy,
    demand: Demand,
    views: Iterable[GroupView],
    refused: Collection[Placement] = (),
) -> Placement | None:
    """Pick the best view that can take the request.

    Args:
        policy: What is best.
        demand: The request.
        views: Every candidate, of one side.
        refused: Those that have refused this request just now, or died on it.

    Returns:
        Where it should go, or None when it fits nowhere.
    """
    fitting = (view for view in views if fits(demand, view))
    if refused:
        fitting = (view for view in fitting if view.placement not in refused)
    best = min(fitting, key=lambda view: policy.score(demand, view), default=None)
    if best is None:
        return None
    policy.placed(demand, best)
    return best.placement


def fits(demand: Demand, view: GroupView) -> bool:
    """Whether a request can begin there at once; an engine as a whole has a queue of its own."""
    return view.dp_group == ANY_GROUP or (
        view.num_empty_slots >= demand.num_choices
        and view.num_free_tokens >= demand.num_first_tokens
    )


class MostEmptySlots:
    """The emptiest DP group: most empty slots, then room for the longest sequence.

    Ties go to the lowest (incarnation, dp_group), so that equal views give equal placements.
    """

    def score(self, demand: Demand, view: GroupView) -> tuple[object, ...]:
        """See `PlacementPolicy`."""
        del demand
        return -view.num_empty_slots, -view.num_free_tokens, view.incarnation, view.dp_group

    def placed(self, demand: Demand, view: GroupView) -> None:
        """Remembers nothing."""


class LeastQueued:
    """The prefill engine with the least work before a new prompt; ties as in `MostEmptySlots`."""

    def score(self, demand: Demand, view: GroupView) -> tuple[object, ...]:
        """See `PlacementPolicy`."""
        del demand
        return view.num_queued_tokens, view.num_active, view.incarnation

    def placed(self, demand: Demand, view: GroupView) -> None:
        """Remembers nothing."""


class RoundRobin:
    """The next in the order of the views; one that cannot take the request loses its turn."""

    def __init__(self) -> None:
        self._next = 0

    def score(self, demand: Demand, view: GroupView) -> tuple[object, ...]:
        """See `PlacementPolicy`."""
        del demand
        return view.index < self._next, view.index

    def placed(self, demand: Demand, view: GroupView) -> None:
        """The turn is the next one's."""
        del demand
        self._next = view.index + 1


class Policies(NamedTuple):
    """How one ingress places: decode slots, and prompts on prefill engines."""

    decode: PlacementPolicy
    prefill: PlacementPolicy


def make_policies(name: PolicyName) -> Policies:
    """New policies of this name, with nothing to remember yet."""
    if name == "round_robin":
        return Policies(RoundRobin(), RoundRobin())
    return Policies(MostEmptySlots(), LeastQueued())
