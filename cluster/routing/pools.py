"""One ingress's view of the replicas: their last snapshots, and its own unanswered requests. Pure.

Owner: the ingress's event loop. The replicas are the authority; this view is a hint, and costs a
refusal when it is wrong. A hold counts a request against a view from the moment it is sent until
the replica's answer. From then on the replica's snapshots count it: both come in order on one
socket. A replica's role, and whether it drains, come from its snapshots too.

A stalled or silent replica keeps its last state and gets no new requests until it moves again. A
replica that fails request after request gets one now and then (`breaker`), unless all others are
shut out as well.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.routing.breaker import Breakers
from cluster.routing.learned_costs import LearnedCosts
from cluster.routing.load import engine_load, group_columns, spread
from cluster.routing.placement import ANY_GROUP, EngineSummary, Placement
from cluster.routing.step_time import StepCosts
from cluster.routing.views import Places, Views
from replicas.kv_groups import KVGroup
from replicas.life import LifeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cluster.routing.demand import Demand
    from cluster.routing.load import Columns, Load
    from replicas.config import Role
    from replicas.messages import EngineDescription, EngineSnapshot, StepWork

DECODING: frozenset[Role] = frozenset({"decode", "both"})
PREFILLING: frozenset[Role] = frozenset({"prefill"})
"""Roles whose engines compute prompts that other engines decode."""
TRANSFER_BYTE_S = 8e-11
"""Seconds per byte of KV between two engines: a network of 100 Gbit/s.

Shared memory is as fast. On a slower network, caches count for too little where decode slots are
chosen.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that discovery has found.

    Attributes:
        pool: Its deployment, named after the role that it began with.
        replica_id: Its pool and incarnation; a replica that restarts gets another one.
        description: The description of its engine.
    """

    pool: str
    replica_id: str
    description: EngineDescription


@dataclass(slots=True)
class _KnownReplica:
    """A member, its last snapshot, and the requests that were sent to it and not answered yet.

    Attributes:
        refuses: Whether it has refused a request because it drains, and its snapshots do not say so
            yet.
    """

    member: Member
    snapshot: EngineSnapshot | None = None
    holds: dict[str, tuple[int, Demand]] = field(default_factory=dict)
    moves: bool = True
    refuses: bool = False
    costs: StepCosts = field(default_factory=StepCosts)

    @property
    def state(self) -> LifeState:
        """Its life state, as far as this ingress knows; a dead replica is not known."""
        if self.snapshot is None:
            return LifeState.STARTING
        is_draining = self.refuses or self.snapshot.draining
        return LifeState.DRAINING if is_draining else LifeState.READY

    @property
    def epoch(self) -> int:
        """How often it has started to take requests again; see `EngineSnapshot`."""
        return 0 if self.snapshot is None else self.snapshot.epoch

    @property
    def is_open(self) -> bool:
        """Whether it takes requests, or will once it moves again; see `moves` for that."""
        return self.state is LifeState.READY

    def is_one_of(self, roles: frozenset[Role]) -> bool:
        return self.snapshot is not None and self.is_open and self.snapshot.role in roles


def _standing(snapshot: EngineSnapshot) -> tuple[bool, Role, int]:
    """Return the parts of a snapshot that decide on which side its engine is listed."""
    return snapshot.draining, snapshot.role, snapshot.epoch


def _new_steps(old: EngineSnapshot | None, new: EngineSnapshot) -> list[StepWork]:
    """Return the last step of each kind, unless the snapshot before reported the same one."""
    reported = (None, None) if old is None else (old.decode_step, old.prompt_step)
    steps = zip((new.decode_step, new.prompt_step), reported, strict=True)
    return [step for step, before in steps if step is not None and step != before]


class PoolState:
    """Replicas, their snapshots, and the holds of this ingress.

    Attributes:
        num_snapshots: Number of snapshots taken over so far.
        num_changes: Number of changes so far after which there may be more room.
        is_looked_for: Whether the replicas are not known yet: at the start, and after a loss.
        breakers: Circuit breakers of replicas that fail requests.
        on_shut: Called with (incarnation, end of the open period) when a breaker opens; the callee
            arranges for `expire` to be called then.
        on_admit: Called when a token, or a failure, has changed which replicas admit requests: no
            other event may wake waiting requests.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _KnownReplica] = {}
        self.breakers = Breakers()
        self.on_shut: Callable[[str, float], None] = lambda _incarnation, _until_s: None
        self.on_admit: Callable[[], None] = lambda: None
        self._decode = _Side(DECODING, self.breakers, is_whole=False)
        self._prefill = _Side(PREFILLING, self.breakers, is_whole=True)
        self._costs = LearnedCosts()
        # Snapshots, each with the one before, whose steps have not been learned yet.
        self._unlearned: deque[tuple[_KnownReplica, EngineSnapshot | None, EngineSnapshot]] = (
            deque()
        )
        self.num_snapshots = 0
        self.num_changes = 0
        self.is_looked_for = False

    def __repr__(self) -> str:
        return f"PoolState({[(r.member.pool, i, len(r.holds)) for i, r in self._replicas.items()]})"

    def add(self, member: Member) -> None:
        """Add a replica; it gets no requests before its first snapshot."""
        self._replicas.setdefault(member.description.incarnation, _KnownReplica(member))

    def remove(self, incarnation: str) -> None:
        """Forget a replica and its holds."""
        try:
            self.settle()
        finally:
            replica = self._replicas.pop(incarnation, None)
            if replica is not None:
                self._costs.forget(replica.member.pool, incarnation)
                self._relist()

    def take_snapshot(self, incarnation: str, snapshot: EngineSnapshot) -> None:
        """Replace a replica's snapshot, unless this one is older.

        Its steps are learned when costs are next needed, and by `settle` at the latest.
        """
        replica = self._replicas.get(incarnation)
        if replica is None:
            return
        old = replica.snapshot
        if old is not None and snapshot.seq < old.seq:
            return
        self._unlearned.append((replica, old, snapshot))
        was_open = replica.is_open
        if old is None or snapshot.seq > old.seq:
            # The snapshot is newer than the refusal, which may be of an earlier epoch.
            replica.refuses = False
        replica.snapshot = snapshot
        self.num_snapshots += 1
        if old is None or _standing(old) != _standing(snapshot) or was_open != replica.is_open:
            self._relist()
        else:
            self._change(incarnation)

    def settle(self) -> None:
        """Learn from new snapshots; this may change the costs of a whole pool."""
        if self._unlearned:
            while self._unlearned:
                # Remove it first: a snapshot that cannot be learned should raise only once.
                self._learn(*self._unlearned.popleft())
            self._decode.write(self._replicas)
            self._prefill.write(self._replicas)

    def set_moves(self, incarnation: str, moves: bool) -> None:
        """Record that a replica stalls or is silent and gets no requests, or moves again."""
        replica = self._replicas.get(incarnation)
        if replica is not None and replica.moves != moves:
            replica.moves = moves
            self._relist()

    def drains(self, incarnation: str, epoch: int) -> None:
        """Record that a replica refused a request because it drains, so that it gets no other.

        Ignored if it has changed its role since `epoch`, in which it was asked.
        """
        replica = self._replicas.get(incarnation)
        if replica is not None and not replica.refuses and replica.epoch == epoch:
            replica.refuses = True
            self._relist()

    def hold(self, demand: Demand, placement: Placement) -> None:
        """Count a request as taken at a place until the replica answers."""
        replica = self._replicas.get(placement.incarnation)
        if replica is not None:
            assert demand.request_id not in replica.holds, (
                f"{demand.request_id} is held twice on {placement.incarnation}"
            )
            replica.holds[demand.request_id] = placement.dp_group, demand
            self._change(placement.incarnation)
            if self.breakers.sent(placement.incarnation, demand.request_id):
                self._relist()

    def succeeded(self, incarnation: str) -> None:
        """Record that a replica gave a request its first token."""
        if self.breakers.succeeded(incarnation):
            self._relist()
            self.on_admit()

    def failed(self, incarnation: str, now_s: float) -> None:
        """Record that a replica failed a request (an error or no answer) or lost its connection."""
        was_until_s = self.breakers.until_s(incarnation)
        is_changed = self.breakers.failed(incarnation, now_s)
        until_s = self.breakers.until_s(incarnation)
        if until_s is not None and until_s != was_until_s:
            self.on_shut(incarnation, until_s)
        if is_changed:
            self._relist()
            self.on_admit()

    def end(self, request_id: str, incarnation: str) -> None:
        """Record that a request has left a replica. Idempotent."""
        self.release(request_id, incarnation)
        if self.breakers.ended(incarnation, request_id):
            self._relist()

    def expire(self, now_s: float) -> bool:
        """Half open breakers whose time is over; return whether any replica changed."""
        is_changed = self.breakers.expire(now_s)
        if is_changed:
            self._relist()
        return is_changed

    def release(self, request_id: str, incarnation: str) -> None:
        """Drop a hold: the replica has answered, or never will. Idempotent."""
        replica = self._replicas.get(incarnation)
        if replica is not None and replica.holds.pop(request_id, None) is not None:
            self._change(incarnation)

    def member(self, incarnation: str) -> Member | None:
        """Return the replica of this incarnation; None if unknown."""
        replica = self._replicas.get(incarnation)
        return replica.member if replica is not None else None

    def snapshot(self, incarnation: str) -> EngineSnapshot | None:
        """Return a replica's last snapshot, if there is one."""
        replica = self._replicas.get(incarnation)
        return replica.snapshot if replica is not None else None

    @property
    def num_pools_that_know_prompts(self) -> int:
        """Number of pools for which `knows_prompts` is true."""
        return self._learned.num_pools_that_know_prompts

    def knows_prompts(self, incarnation: str) -> bool:
        """Return whether the cost of prompts has been learned for the pool of a replica."""
        member = self.member(incarnation)
        return member is not None and self._learned.knows_prompts(member.pool)

    def state(self, incarnation: str) -> LifeState:
        """Return a replica's life state; dead if it is not known."""
        replica = self._replicas.get(incarnation)
        return LifeState.DEAD if replica is None else replica.state

    def epoch(self, incarnation: str) -> int:
        """Return how often a replica has started to take requests again, as far as known."""
        replica = self._replicas.get(incarnation)
        return 0 if replica is None else replica.epoch

    def moves(self, incarnation: str) -> bool:
        """Return whether a replica is known and neither stalled nor silent."""
        replica = self._replicas.get(incarnation)
        return replica is not None and replica.moves

    def members(self) -> list[Member]:
        """Return all known replicas."""
        return [replica.member for replica in self._replicas.values()]

    def has_open(self, pool: str) -> bool:
        """Return whether a replica of this pool takes requests, or will once it moves again."""
        return any(r.is_open and r.member.pool == pool for r in self._replicas.values())

    @property
    def pool_costs(self) -> StepCosts:
        """Learned costs: of decodes on the decode pool, and of prompts on the prefill pool.

        The prompts that a decode engine computes now and then say little about prefill engines.
        """
        decodes, prompts = self._learned.of_pool("decode"), self._learned.of_pool("prefill")
        return StepCosts(*decodes[:4], *prompts[4:])

    @property
    def num_steps_learned(self) -> int:
        """Number of steps that `pool_costs` was learned from."""
        return self._learned.num_steps

    @property
    def num_open(self) -> int:
        """Number of replicas that take requests, or will once they move again."""
        return sum(replica.is_open for replica in self._replicas.values())

    @property
    def num_draining(self) -> int:
        """Number of replicas that take no more requests and still have some."""
        return sum(r.state is LifeState.DRAINING for r in self._replicas.values())

    @property
    def num_shut(self) -> int:
        """Number of replicas without new requests, probes aside, because they failed requests."""
        return sum(self.breakers.state(i) != "closed" for i in self._replicas)

    @property
    def stalled(self) -> set[str]:
        """Incarnations of replicas that get no requests because they are stalled or silent."""
        return {name for name, replica in self._replicas.items() if not replica.moves}

    @property
    def may_decode(self) -> bool:
        """Whether an open replica decodes, possibly only once it moves again."""
        return any(replica.is_one_of(DECODING) for replica in self._replicas.values())

    @property
    def is_stranded(self) -> bool:
        """Whether waiting is pointless: no open or paused replica decodes, none is looked for."""
        return not (self.may_decode or self.is_looked_for or self._is_paused)

    @property
    def _is_paused(self) -> bool:
        """Whether a replica will decode once it is resumed."""
        snapshots = (replica.snapshot for replica in self._replicas.values())
        return any(s is not None and s.paused and s.role in DECODING for s in snapshots)

    @property
    def can_prefill(self) -> bool:
        """Whether a replica computes prompts that other engines decode."""
        return bool(self.prefill_views())

    def decode_views(self) -> Views:
        """Return all DP groups that may decode; read-only, and valid until the next change."""
        self.settle()
        return self._decode.get(self._replicas)

    def prefill_views(self) -> Views:
        """Return all prefill engines, each as a whole; like `decode_views`."""
        self.settle()
        return self._prefill.get(self._replicas)

    def holds(self) -> list[tuple[str, str]]:
        """Return (incarnation, request id) of every hold."""
        return [(i, r) for i, replica in self._replicas.items() for r in replica.holds]

    def is_held(self, request_id: str, placement: Placement) -> bool:
        """Return whether an engine has been asked something of a request and not answered."""
        replica = self._replicas.get(placement.incarnation)
        return replica is not None and request_id in replica.holds

    def check_invariants(self) -> None:
        """Assert that kept views equal new ones, and that no count is negative."""
        self.settle()
        for views in (self._decode, self._prefill):
            kept = views.get(self._replicas)
            views.relist()
            assert kept.equals(views.get(self._replicas))
            for view in kept:
                assert view.num_empty_slots >= 0
                assert min(view.num_free_blocks) >= 0

    @property
    def _learned(self) -> LearnedCosts:
        self.settle()
        return self._costs

    def _learn(
        self, replica: _KnownReplica, old: EngineSnapshot | None, new: EngineSnapshot
    ) -> None:
        """Learn from the steps that a snapshot reports for the first time."""
        member = replica.member
        if self._replicas.get(member.description.incarnation) is not replica:
            return  # The replica was removed after an earlier snapshot of it could not be learned.
        steps = _new_steps(old, new)
        if not steps and old is not None:
            return
        changed = self._costs.learn(member.pool, member.description.incarnation, steps)
        for incarnation, costs in changed.items():
            other = self._replicas[incarnation]
            if other.costs is not costs:
                other.costs = costs
                self._decode.change(incarnation)
                self._prefill.change(incarnation)

    def _change(self, incarnation: str) -> None:
        self.num_changes += 1
        self._decode.change(incarnation)
        self._prefill.change(incarnation)

    def _relist(self) -> None:
        self.num_changes += 1
        self._decode.relist()
        self._prefill.relist()


@dataclass(slots=True)
class _Heard:
    """A snapshot in columns, kept because holds change more often than snapshots.

    Attributes:
        snapshot: The snapshot.
        columns: Its DP groups' fields as columns.
        costs: The costs of steps with which `unheld` was made.
        unheld: Its places without any hold; None before they were needed.
    """

    snapshot: EngineSnapshot
    columns: Columns
    costs: StepCosts | None = None
    unheld: Places | None = None


class _Side:
    """The views of one side, kept because of a thousand replicas only one changes at a time.

    Args:
        roles: Roles of the engines on this side.
        breakers: Exclude replicas that fail, unless that would be all.
        is_whole: Whether a place is a whole engine instead of a DP group.
    """

    def __init__(self, roles: frozenset[Role], breakers: Breakers, *, is_whole: bool) -> None:
        self._roles = roles
        self._breakers = breakers
        self._is_whole = is_whole
        self._views = Views()
        self._first: dict[str, int] = {}
        self._stale: dict[str, None] = {}
        self._heard: dict[str, _Heard] = {}
        self._is_listed = False
        # Assumes that there is no prefill engine until the first listing.
        self._computes_prompts = True

    def change(self, incarnation: str) -> None:
        """Mark an engine's places for update."""
        self._stale[incarnation] = None

    def relist(self) -> None:
        """Mark the list for update: engines came, went, changed sides, stalled or recovered."""
        self._is_listed = False

    def get(self, replicas: Mapping[str, _KnownReplica]) -> Views:
        """Return the current views."""
        if not self._is_listed:
            self._list(replicas)
        if self._stale:
            self.write(replicas)
        return self._views

    def write(self, replicas: Mapping[str, _KnownReplica]) -> None:
        """Update the marked places, unless the whole list is to be made again anyway."""
        if self._is_listed:
            for incarnation in self._stale:
                first = self._first.get(incarnation)
                if first is not None:
                    self._views.write(first, self._places(incarnation, replicas[incarnation]))
            self._stale.clear()

    def _places(self, incarnation: str, replica: _KnownReplica) -> Places:
        snapshot, heard = replica.snapshot, self._heard.get(incarnation)
        assert snapshot is not None
        if heard is None or heard.snapshot is not snapshot:
            heard = self._heard[incarnation] = _Heard(snapshot, group_columns(snapshot.groups))
        make = _whole if self._is_whole else _groups
        if replica.holds:
            return make(replica, heard, computes_prompts=self._computes_prompts)
        if heard.unheld is None or heard.costs is not replica.costs:
            heard.unheld = make(replica, heard, computes_prompts=self._computes_prompts)
            heard.costs = replica.costs
        return heard.unheld

    def _list(self, replicas: Mapping[str, _KnownReplica]) -> None:
        placements: list[Placement] = []
        self._first, self._heard = {}, {}
        self._computes_prompts = self._is_whole or not any(
            replica.moves and replica.is_one_of(PREFILLING) for replica in replicas.values()
        )
        moving = {i: r for i, r in replicas.items() if r.moves and r.is_one_of(self._roles)}
        admitted = {i: r for i, r in moving.items() if self._breakers.admits(i)}
        for incarnation, replica in (admitted or moving).items():
            assert replica.snapshot is not None
            self._first[incarnation] = len(placements)
            groups = [ANY_GROUP] if self._is_whole else range(len(replica.snapshot.groups))
            placements += [Placement(incarnation, group) for group in groups]
        self._views = Views(placements)
        self._stale = dict.fromkeys(self._first)
        self._is_listed = True


def _groups(replica: _KnownReplica, heard: _Heard, *, computes_prompts: bool) -> Places:
    """Return the places of an engine, one for each DP group."""
    snapshot, columns = heard.snapshot, heard.columns
    description, costs = replica.member.description, replica.costs
    load = engine_load(
        columns,
        replica.holds.values(),
        costs,
        description.max_num_batched_tokens,
        computes_prompts=computes_prompts,
    )
    free_blocks: list[list[int]] = list(columns["num_free_blocks"])
    waiting = list(columns["num_waiting"])
    for dp_group, demand in replica.holds.values():
        if dp_group != ANY_GROUP:
            waiting[dp_group] += demand.num_choices
            free = zip(free_blocks[dp_group], description.kv_groups, strict=True)
            free_blocks[dp_group] = [
                max(n - demand.num_blocks(kv_group), 0) for n, kv_group in free
            ]
    of_places = [
        *[max(empty - n, 0) for empty, n in zip(columns["num_empty_slots"], waiting, strict=True)],
        *_room(description.kv_groups, free_blocks, 1),
        *load.rows,
        *waiting,
        *load.spare_prompt_s,
        *load.spare_rows,
        *load.spare_context_tokens,
    ]
    prompt_costs = (
        (*costs[4:], 0.0)
        if computes_prompts
        else (0.0, 0.0, 0.0, _bytes_per_token(description.kv_groups) * TRANSFER_BYTE_S)
    )
    of_engine = _of_engine(load, costs, prompt_costs, snapshot.num_waiting_tokens)
    said = EngineSummary(snapshot.role, description.kv_groups, snapshot.step_s, snapshot.seq)
    return Places.of(said, free_blocks, of_places, of_engine)


def _whole(replica: _KnownReplica, heard: _Heard, *, computes_prompts: bool) -> Places:
    """Return the single place of an engine as a whole."""
    assert computes_prompts, "a prefill engine computes its prompts"
    snapshot, description = heard.snapshot, replica.member.description
    groups = snapshot.groups
    sent = [demand for _, demand in replica.holds.values()]
    load = engine_load(
        heard.columns,
        spread(len(groups), sent),
        replica.costs,
        description.max_num_batched_tokens,
        computes_prompts=True,
    )
    free_blocks = [[sum(n) for n in zip(*(g.num_free_blocks for g in groups), strict=True)]]
    num_waiting = snapshot.num_waiting + len(sent)
    of_places = [
        sum(group.num_empty_slots for group in groups),
        *_room(description.kv_groups, free_blocks, len(groups)),
        sum(group.num_running for group in groups) + num_waiting,
        num_waiting,
        0.0,  # Which prompts it will be computed beside is the engine's decision.
        max(load.spare_rows),
        max(load.spare_context_tokens),
    ]
    num_queued_tokens = snapshot.num_waiting_tokens + sum(d.num_prompt_tokens for d in sent)
    of_engine = _of_engine(load, replica.costs, (*replica.costs[4:], 0.0), num_queued_tokens)
    said = EngineSummary(snapshot.role, description.kv_groups, snapshot.step_s, snapshot.seq)
    return Places.of(said, free_blocks, of_places, of_engine)


def _of_engine(
    load: Load, costs: StepCosts, prompt_costs: Iterable[float], num_queued_tokens: int
) -> list[float]:
    """Return the values that all places of an engine share, in the order of the columns."""
    return [
        load.max_context_tokens,
        sum(load.rows),
        num_queued_tokens,
        *costs[4:],
        *costs[1:4],
        *prompt_costs,
        load.queue_s,
        load.step_s,
    ]


def _bytes_per_token(kv_groups: tuple[KVGroup, ...]) -> float:
    of_tokens = (group for group in kv_groups if group.spec.kind != "state")
    return sum(group.bytes_per_block / group.block_size for group in of_tokens)


def _room(
    kv_groups: tuple[KVGroup, ...], free_blocks: list[list[int]], num_pools: int
) -> list[int]:
    """Return the longest sequence with room in each place, then the tokens held in each place.

    Args:
        kv_groups: KV groups of the model.
        free_blocks: Free blocks of each place and KV group.
        num_pools: Number of DP groups whose blocks a place has.
    """
    first, size = kv_groups[0], kv_groups[0].block_size
    most = num_pools * first.num_usable_blocks
    held = [(most - free[0]) * size for free in free_blocks]
    if len(kv_groups) == 1:
        return [*[free[0] * size for free in free_blocks], *held]
    return [*[min(map(KVGroup.num_tokens_in, kv_groups, free)) for free in free_blocks], *held]
