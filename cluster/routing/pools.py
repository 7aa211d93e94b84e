"""What one ingress believes of the replicas: their last snapshots, less what it has sent since.

Owner: the ingress's event loop. Pure. The replicas are the authority; this view is a hint that
costs a refusal when it is wrong. A hold counts a request against a view from the moment it is sent
until the replica's answer, because from then on the replica's snapshots count it: both come in
order on one socket. What a replica does, and whether it drains, its snapshots say as well. One that
stalls, or has fallen quiet, is as it was and gets nothing new before it moves again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.routing.placement import ANY_GROUP, GroupView
from replicas.kv_groups import KVGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from replicas.config import Role
    from replicas.messages import EngineDescription, EngineSnapshot

DECODING: frozenset[Role] = frozenset({"decode", "both"})
PREFILLING: frozenset[Role] = frozenset({"prefill"})
"""Roles whose engines take prompts for others to go on from."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that discovery has found.

    Attributes:
        pool: Its deployment, named after the role that it began with.
        replica_id: Its pool and incarnation: a replica that comes back has another one.
        description: What its engine is.
    """

    pool: str
    replica_id: str
    description: EngineDescription


@dataclass(slots=True)
class _Replica:
    """A member, its last snapshot, and the requests that were sent to it and not answered yet."""

    member: Member
    snapshot: EngineSnapshot | None = None
    holds: dict[str, tuple[int, Demand]] = field(default_factory=dict)
    moves: bool = True

    @property
    def is_open(self) -> bool:
        """Whether it takes requests, or will once it moves again: `moves` is another question."""
        return self.snapshot is not None and not self.snapshot.draining

    def is_one_of(self, roles: frozenset[Role]) -> bool:
        return self.snapshot is not None and self.is_open and self.snapshot.role in roles


class PoolState:
    """Replicas, their snapshots, and the holds of this ingress.

    Attributes:
        num_snapshots: How many snapshots were taken over so far.
        num_changes: How often there may have been more room since the start.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._decode = _Views(DECODING, _group_views)
        self._prefill = _Views(PREFILLING, _engine_view)
        self.num_snapshots = 0
        self.num_changes = 0

    def __repr__(self) -> str:
        return f"PoolState({[(r.member.pool, i, len(r.holds)) for i, r in self._replicas.items()]})"

    def add(self, member: Member) -> None:
        """Take a replica in; it takes no requests before its first snapshot."""
        self._replicas.setdefault(member.description.incarnation, _Replica(member))

    def remove(self, incarnation: str) -> None:
        """Forget a replica and what was sent to it."""
        if self._replicas.pop(incarnation, None) is not None:
            self._relist()

    def take_snapshot(self, incarnation: str, snapshot: EngineSnapshot) -> None:
        """Replace a replica's snapshot, unless this one is older."""
        replica = self._replicas.get(incarnation)
        if replica is None:
            return
        old = replica.snapshot
        if old is not None and snapshot.seq < old.seq:
            return
        replica.snapshot = snapshot
        self.num_snapshots += 1
        if old is None or (old.draining, old.role) != (snapshot.draining, snapshot.role):
            self._relist()
        else:
            self._change(incarnation)

    def set_moves(self, incarnation: str, moves: bool) -> None:
        """A replica stalls or is quiet and gets no requests, or it moves again."""
        replica = self._replicas.get(incarnation)
        if replica is not None and replica.moves != moves:
            replica.moves = moves
            self._relist()

    def hold(self, demand: Demand, placement: Placement) -> None:
        """Count a request as taken there until the replica answers."""
        replica = self._replicas.get(placement.incarnation)
        if replica is not None:
            assert demand.request_id not in replica.holds, (
                f"{demand.request_id} is held twice on {placement.incarnation}"
            )
            replica.holds[demand.request_id] = placement.dp_group, demand
            self._change(placement.incarnation)

    def release(self, request_id: str, incarnation: str) -> None:
        """Drop a hold: the replica has answered, or will never. Idempotent."""
        replica = self._replicas.get(incarnation)
        if replica is not None and replica.holds.pop(request_id, None) is not None:
            self._change(incarnation)

    def member(self, incarnation: str) -> Member | None:
        """The replica of this incarnation, if it is known."""
        replica = self._replicas.get(incarnation)
        return replica.member if replica is not None else None

    def snapshot(self, incarnation: str) -> EngineSnapshot | None:
        """What a replica last said of itself, if it has."""
        replica = self._replicas.get(incarnation)
        return replica.snapshot if replica is not None else None

    def members(self) -> list[Member]:
        """Every known replica."""
        return [replica.member for replica in self._replicas.values()]

    def has_open(self, pool: str) -> bool:
        """Whether a replica of this pool takes requests, or will once it moves again."""
        return any(r.is_open and r.member.pool == pool for r in self._replicas.values())

    @property
    def num_open(self) -> int:
        """How many replicas take requests, or will once they move again."""
        return sum(replica.is_open for replica in self._replicas.values())

    @property
    def num_stalled(self) -> int:
        """How many replicas get no requests because they do not move."""
        return sum(not replica.moves for replica in self._replicas.values())

    @property
    def may_decode(self) -> bool:
        """Whether a replica is open and decodes, though it may have to move again first."""
        return any(replica.is_one_of(DECODING) for replica in self._replicas.values())

    @property
    def can_prefill(self) -> bool:
        """Whether a replica takes prompts for others to go on from."""
        return bool(self.prefill_views())

    def decode_views(self) -> list[GroupView]:
        """Every DP group that may decode; not to be changed, and good until something is."""
        return self._decode.get(self._replicas)

    def prefill_views(self) -> list[GroupView]:
        """Every engine that prefills for others, as a whole; as `decode_views`."""
        return self._prefill.get(self._replicas)

    def holds(self) -> list[tuple[str, str]]:
        """(incarnation, request id) of everything that is held."""
        return [(i, r) for i, replica in self._replicas.items() for r in replica.holds]

    def check_invariants(self) -> None:
        """Kept views are as new ones would be, and none is negative."""
        for views in (self._decode, self._prefill):
            kept = list(views.get(self._replicas))
            views.relist()
            assert kept == views.get(self._replicas)
            for view in kept:
                assert view.num_empty_slots >= 0
                assert min(view.num_free_blocks) >= 0

    def _change(self, incarnation: str) -> None:
        self.num_changes += 1
        self._decode.change(incarnation)
        self._prefill.change(incarnation)

    def _relist(self) -> None:
        self.num_changes += 1
        self._decode.relist()
        self._prefill.relist()


class _Views:
    """The views of one side, kept because a thousand replicas change one at a time.

    Args:
        roles: Of the engines on this side.
        make: Makes an engine's views, the first of which has the given index.
    """

    def __init__(
        self,
        roles: frozenset[Role],
        make: Callable[[str, _Replica, EngineSnapshot, int], list[GroupView]],
    ) -> None:
        self._roles = roles
        self._make = make
        self._views: list[GroupView] = []
        self._first: dict[str, int] = {}
        self._stale: dict[str, None] = {}
        self._is_listed = False

    def change(self, incarnation: str) -> None:
        """An engine's load has changed."""
        self._stale[incarnation] = None

    def relist(self) -> None:
        """Engines came, went, changed sides, or began or ceased to move."""
        self._is_listed = False

    def get(self, replicas: Mapping[str, _Replica]) -> list[GroupView]:
        """The views as of now."""
        if not self._is_listed:
            self._list(replicas.items())
        for incarnation in self._stale:
            first = self._first.get(incarnation)
            if first is not None:
                replica = replicas[incarnation]
                assert replica.snapshot is not None
                views = self._make(incarnation, replica, replica.snapshot, first)
                self._views[first : first + len(views)] = views
        self._stale.clear()
        return self._views

    def _list(self, replicas: Iterable[tuple[str, _Replica]]) -> None:
        self._views, self._first = [], {}
        for incarnation, replica in replicas:
            if replica.moves and replica.is_one_of(self._roles):
                assert replica.snapshot is not None
                first = self._first[incarnation] = len(self._views)
                self._views += self._make(incarnation, replica, replica.snapshot, first)
        self._stale.clear()
        self._is_listed = True


def _group_views(
    incarnation: str, replica: _Replica, snapshot: EngineSnapshot, first: int
) -> list[GroupView]:
    """One view for each DP group."""
    kv_groups = replica.member.description.kv_groups
    slots = [0] * len(snapshot.groups)
    free_blocks = [group.num_free_blocks for group in snapshot.groups]
    for dp_group, demand in replica.holds.values():
        if dp_group != ANY_GROUP:
            slots[dp_group] += demand.num_choices
            free = zip(free_blocks[dp_group], kv_groups, strict=True)
            free_blocks[dp_group] = [n - demand.num_blocks(kv_group) for n, kv_group in free]
    return [
        GroupView(
            incarnation,
            index,
            snapshot.role,
            kv_groups,
            max(group.num_empty_slots - group.num_waiting - slots[index], 0),
            *_room(kv_groups, free_blocks[index]),
            group.num_running + group.num_reserved + group.num_waiting + slots[index],
            snapshot.num_waiting_tokens,
            snapshot.step_s,
            first + index,
        )
        for index, group in enumerate(snapshot.groups)
    ]


def _room(kv_groups: Iterable[KVGroup], free_blocks: Iterable[int]) -> tuple[list[int], int]:
    """A view's free blocks of each KV group, and the longest sequence that has room in them."""
    free = [max(num_free, 0) for num_free in free_blocks]
    return free, min(map(KVGroup.num_tokens_in, kv_groups, free))


def _engine_view(
    incarnation: str, replica: _Replica, snapshot: EngineSnapshot, first: int
) -> list[GroupView]:
    """One view of the engine as a whole."""
    groups, kv_groups = snapshot.groups, replica.member.description.kv_groups
    held = sum(demand.num_prompt_tokens for _, demand in replica.holds.values())
    return [
        GroupView(
            incarnation,
            ANY_GROUP,
            snapshot.role,
            kv_groups,
            sum(group.num_empty_slots for group in groups),
            *_room(kv_groups, map(sum, zip(*(g.num_free_blocks for g in groups), strict=True))),
            sum(group.num_running for group in groups) + snapshot.num_waiting + len(replica.holds),
            snapshot.num_waiting_tokens + held,
            snapshot.step_s,
            first,
        )
    ]
