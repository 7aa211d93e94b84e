"""What one ingress believes of the replicas: their last snapshots, less what it has sent since.

Owner: the ingress's event loop. Pure. The replicas are the authority; this view is a hint that
costs a refusal when it is wrong. A hold counts a request against a view from the moment it is sent
until the replica's answer, because from then on the replica's snapshots count it: both come in
order on one socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.placement import GroupView, Placement, PrefillView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.config.schema import Role
    from replicas.messages import EngineDescription, EngineSnapshot


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that discovery has found.

    Attributes:
        role: Its pool's role.
        replica_id: Its pool and incarnation: a replica that comes back has another one.
        description: What its engine is.
    """

    role: Role
    replica_id: str
    description: EngineDescription


@dataclass(frozen=True, slots=True)
class _Hold:
    """A request that was sent and not answered yet; `dp_group` is -1 on a prefill engine."""

    dp_group: int
    num_blocks: int
    num_tokens: int


@dataclass(slots=True)
class _Replica:
    member: Member
    snapshot: EngineSnapshot | None = None
    holds: dict[str, _Hold] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.snapshot is not None and not self.snapshot.draining


class PoolState:
    """Replicas, their snapshots, and the holds of this ingress.

    Attributes:
        num_snapshots: How many snapshots were taken over so far.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        # Which replicas hold a request.
        self._holders: dict[str, tuple[str, ...]] = {}
        # The views of all DP groups that may decode, where each replica's begin, and whose are out
        # of date. Kept, because a thousand replicas change one at a time.
        self._views: list[GroupView] = []
        self._first_view: dict[str, int] = {}
        self._dirty: dict[str, None] = {}
        self._is_listed = False
        # How many replicas that decode have KV blocks of a size.
        self._block_sizes: dict[int, int] = {}
        self.num_snapshots = 0

    def __repr__(self) -> str:
        return f"PoolState({[(r.member.role, i, len(r.holds)) for i, r in self._replicas.items()]})"

    def add(self, member: Member) -> None:
        """Take a replica in; it takes no requests before its first snapshot."""
        incarnation = member.description.incarnation
        if incarnation not in self._replicas:
            self._replicas[incarnation] = _Replica(member)
            self._is_listed = False
            self._count_block_size(member, 1)

    def remove(self, incarnation: str) -> None:
        """Forget a replica and what was sent to it."""
        replica = self._replicas.get(incarnation)
        if replica is not None:
            for request_id in list(replica.holds):
                self.release(request_id, incarnation)
            del self._replicas[incarnation]
            self._is_listed = False
            self._count_block_size(replica.member, -1)

    def take_snapshot(self, incarnation: str, snapshot: EngineSnapshot) -> None:
        """Replace a replica's snapshot, unless this one is older."""
        replica = self._replicas.get(incarnation)
        if replica is not None and (
            replica.snapshot is None or snapshot.seq >= replica.snapshot.seq
        ):
            # One that opens or closes changes the list of views, not just some of them.
            if replica.snapshot is None or replica.snapshot.draining != snapshot.draining:
                self._is_listed = False
            self._dirty[incarnation] = None
            replica.snapshot = snapshot
            self.num_snapshots += 1

    def hold_decode(self, request_id: str, placement: Placement, num_blocks: int) -> None:
        """Count a slot and blocks as taken until the replica answers."""
        self._hold(placement.incarnation, request_id, _Hold(placement.dp_group, num_blocks, 0))

    def hold_prefill(self, request_id: str, incarnation: str, num_tokens: int) -> None:
        """Count a prompt as queued until the replica answers."""
        self._hold(incarnation, request_id, _Hold(-1, 0, num_tokens))

    def release(self, request_id: str, incarnation: str) -> None:
        """Drop a hold: the replica has answered, or will never. Idempotent."""
        replica = self._replicas.get(incarnation)
        if replica is not None and replica.holds.pop(request_id, None) is not None:
            self._dirty[incarnation] = None
            holders = self._holders[request_id]
            holders = tuple(i for i in holders if i != incarnation)
            if holders:
                self._holders[request_id] = holders
            else:
                del self._holders[request_id]

    def release_everywhere(self, request_id: str) -> None:
        """Drop every hold of a request that has ended."""
        for incarnation in self._holders.get(request_id, ()):
            self.release(request_id, incarnation)

    def member(self, incarnation: str) -> Member | None:
        """The replica of this incarnation, if it is known."""
        replica = self._replicas.get(incarnation)
        return replica.member if replica is not None else None

    def snapshot(self, incarnation: str) -> EngineSnapshot | None:
        """What a replica last said of itself, if it has."""
        replica = self._replicas.get(incarnation)
        return replica.snapshot if replica is not None else None

    @property
    def block_size(self) -> int:
        """Smallest KV block of what decodes, in tokens: a request's needs are counted in it."""
        return min(self._block_sizes, default=1)

    def members(self) -> list[Member]:
        """Every known replica."""
        return [replica.member for replica in self._replicas.values()]

    def has_open(self, roles: Iterable[Role]) -> bool:
        """Whether a replica of one of these roles takes requests."""
        wanted = frozenset(roles)
        return any(r.is_open and r.member.role in wanted for r in self._replicas.values())

    def decode_views(self) -> list[GroupView]:
        """Every DP group that may decode; not to be changed, and good until something is."""
        if not self._is_listed:
            self._list_views()
        for incarnation in self._dirty:
            first = self._first_view.get(incarnation)
            if first is not None:
                views = _group_views(incarnation, self._replicas[incarnation])
                self._views[first : first + len(views)] = views
        self._dirty.clear()
        return self._views

    def prefill_views(self) -> list[PrefillView]:
        """Every engine of the prefill pool."""
        return [
            _prefill_view(incarnation, replica)
            for incarnation, replica in self._replicas.items()
            if replica.is_open and replica.member.role == "prefill"
        ]

    def check_invariants(self) -> None:
        """No view is negative, and no hold is on a replica of the wrong kind."""
        holders: dict[str, list[str]] = {}
        for incarnation, replica in self._replicas.items():
            for request_id, hold in replica.holds.items():
                assert (hold.dp_group < 0) == (replica.member.role == "prefill")
                holders.setdefault(request_id, []).append(incarnation)
        assert {r: sorted(h) for r, h in self._holders.items()} == {
            r: sorted(h) for r, h in holders.items()
        }
        views = list(self.decode_views())
        self._list_views()
        assert views == self._views
        for view in views:
            assert view.num_empty_slots >= 0
            assert view.num_free_blocks >= 0

    def _count_block_size(self, member: Member, sign: int) -> None:
        if member.role == "prefill":
            return
        size = member.description.block_size
        self._block_sizes[size] = self._block_sizes.get(size, 0) + sign
        if not self._block_sizes[size]:
            del self._block_sizes[size]

    def _list_views(self) -> None:
        self._views, self._first_view = [], {}
        for incarnation, replica in self._replicas.items():
            if replica.is_open and replica.member.role != "prefill":
                self._first_view[incarnation] = len(self._views)
                self._views.extend(_group_views(incarnation, replica))
        self._dirty.clear()
        self._is_listed = True

    def _hold(self, incarnation: str, request_id: str, hold: _Hold) -> None:
        replica = self._replicas.get(incarnation)
        if replica is not None:
            assert request_id not in replica.holds, f"{request_id} is held twice on {incarnation}"
            replica.holds[request_id] = hold
            self._dirty[incarnation] = None
            self._holders[request_id] = (*self._holders.get(request_id, ()), incarnation)


def _group_views(incarnation: str, replica: _Replica) -> list[GroupView]:
    assert replica.snapshot is not None
    slots = [0] * len(replica.snapshot.groups)
    blocks = [0] * len(replica.snapshot.groups)
    for hold in replica.holds.values():
        slots[hold.dp_group] += 1
        blocks[hold.dp_group] += hold.num_blocks
    return [
        GroupView(
            incarnation,
            index,
            max(group.num_empty_slots - group.num_waiting - slots[index], 0),
            max(group.num_free_blocks - blocks[index], 0),
            group.num_running + group.num_reserved + group.num_waiting + slots[index],
        )
        for index, group in enumerate(replica.snapshot.groups)
    ]


def _prefill_view(incarnation: str, replica: _Replica) -> PrefillView:
    assert replica.snapshot is not None
    held = sum(hold.num_tokens for hold in replica.holds.values())
    running = sum(group.num_running for group in replica.snapshot.groups)
    return PrefillView(
        incarnation,
        replica.snapshot.num_waiting_tokens + held,
        running + replica.snapshot.num_waiting + len(replica.holds),
    )
