"""Calls of operators to a cluster: which replicas there are, and orders to them.

Owner: the event loop of the admin server. It imports neither Ray nor HTTP. Orders to engines, such
as pauses and resets, go over the same connections as requests of an ingress. Orders that only the
parent of an engine can give, such as roles and drains, go through `cluster.scaling.flip.Replicas`.

Every call ends within a bounded time, also if a replica is frozen. A replica is listed as long as
either its actor or its engine answers. `SEEN_S` after it was last heard of, its name is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cluster.edge.admin.cluster import (
    ConflictError,
    OrderFailedError,
    ReplicaUnresponsiveError,
    ReplicaView,
    Target,
)
from cluster.errors import NotFoundError, NotReadyError
from cluster.routing.fleet import Fleet
from cluster.scaling.flip import (
    FlipError,
    UnknownReplicaError,
    check_drain,
    check_flip,
    find_replica,
)
from replicas.async_client import AsyncMPClient
from replicas.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

    from cluster.edge.admin.cluster import ReplicaState
    from cluster.routing.fleet import Discovery
    from cluster.scaling.flip import Replicas, RoleStatus
    from kv_transfer.keys import KeyRing
    from replicas.config import Role
    from replicas.messages import EngineSnapshot, PauseMode

ORDER_S = 10.0
"""Longest time for an answer of an engine."""
PAUSE_S = 60.0
"""The same for a pause, which may wait for the end of running requests."""
SEEN_S = 60.0
"""Seconds for which a replica that answers no more is unresponsive and not unknown."""
_REMEDY = (
    "it hangs or has just ended, and may still carry the order out: list the replicas, and try "
    "again; a process that stays frozen must be killed, and Serve starts another one"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """State of one replica, as its actor and its engine report it.

    Attributes:
        name: Its name.
        status: Its role status; None if its actor does not answer.
        snapshot: Its engine's last snapshot; None if the engine is not connected.
        moves: Whether the engine answers and does not stall.
        slots: Its decode slots.
    """

    name: str
    status: RoleStatus | None
    snapshot: EngineSnapshot | None
    moves: bool
    slots: int

    @property
    def pool(self) -> str:
        """Name of its pool."""
        return self.name.rpartition("-")[0]

    @property
    def incarnation(self) -> str:
        """Incarnation of its engine."""
        return self.name.rpartition("-")[2]


class ClusterAdmin:
    """Implements `cluster.edge.admin.cluster.Cluster`; make it inside the running event loop.

    Args:
        keys: Secrets, shared with the engines, that authenticate connections.
        replicas: Reaches the actors of the replicas; its calls run in threads.
    """

    def __init__(self, keys: KeyRing, replicas: Replicas) -> None:
        self._fleet = Fleet(partial(AsyncMPClient, keys), keys, follows_prefixes=False)
        self._replicas = replicas
        self._changing = ""
        # Time at which each replica was last heard of.
        self._seen_s: dict[str, float] = {}

    async def follow(self, discovery: Discovery) -> None:
        """Connect to the engines that discovery finds, for ever."""
        await self._fleet.follow(discovery)

    async def close(self) -> None:
        """Close every connection."""
        self._fleet.close()
        await self._fleet.client.close()

    async def replicas(self) -> list[ReplicaView]:
        """Implement `Cluster.replicas`."""
        return [_view(known) for known in await self._known()]

    async def pause(self, target: Target, mode: PauseMode, *, clear_cache: bool) -> None:
        """Implement `Cluster.pause`."""
        client = self._fleet.client

        async def pause(incarnation: str) -> bool:
            await client.pause(incarnation, mode)
            return not clear_cache or await client.reset_prefix_cache(incarnation)

        await self._order(target, pause, PAUSE_S)

    async def resume(self, target: Target) -> None:
        """Implement `Cluster.resume`."""
        await self._order(target, self._fleet.client.resume, ORDER_S)

    async def is_paused(self, target: Target) -> Mapping[str, bool]:
        """Implement `Cluster.is_paused`."""
        found: dict[str, bool] = {}

        async def ask(incarnation: str) -> bool:
            found[incarnation] = await self._fleet.client.is_paused(incarnation)
            return True

        asked = await self._order(target, ask, ORDER_S)
        return {known.name: found[known.incarnation] for known in asked}

    async def reset_prefix_cache(self, target: Target, *, reset_running_requests: bool) -> None:
        """Implement `Cluster.reset_prefix_cache`."""
        reset = partial(
            self._fleet.client.reset_prefix_cache, reset_running_requests=reset_running_requests
        )
        await self._order(target, reset, ORDER_S)

    async def profile(self, replica: str, seconds: float) -> str:
        """Implement `Cluster.profile`."""
        profiles: list[str] = []

        async def profile(incarnation: str) -> bool:
            profiles.append(await self._fleet.client.profile(incarnation, seconds))
            return True

        await self._order(Target(replica=replica), profile, seconds + ORDER_S)
        return profiles[0]

    async def change_role(self, replica: str, role: Role) -> ReplicaView:
        """Implement `Cluster.change_role`."""
        return await self._change(
            replica,
            lambda statuses: check_flip(statuses, replica, role),
            partial(self._replicas.change_role, replica, role),
            lambda status: status.next_role == role,
        )

    async def drain(self, replica: str) -> ReplicaView:
        """Implement `Cluster.drain`."""
        return await self._change(
            replica,
            lambda statuses: check_drain(statuses, replica),
            partial(self._replicas.set_draining, replica, True),
            lambda status: status.is_draining,
        )

    async def undrain(self, replica: str) -> ReplicaView:
        """Implement `Cluster.undrain`."""
        return await self._change(
            replica,
            lambda statuses: find_replica(statuses, replica),
            partial(self._replicas.set_draining, replica, False),
            lambda status: not status.is_draining,
        )

    async def _change(
        self,
        replica: str,
        check: Callable[[list[RoleStatus]], object],
        order: Callable[[], None],
        is_made: Callable[[RoleStatus], bool],
    ) -> ReplicaView:
        """Check a change against all replicas, order it, and return the replica after it.

        One change at a time, because a check counts what the others keep.
        """
        async with self._alone(replica):
            try:
                check(await self._statuses())
            except UnknownReplicaError as error:
                self._refuse_unknown(replica)
                raise NotFoundError(str(error)) from error
            except FlipError as error:
                raise ConflictError(str(error)) from error
            await asyncio.to_thread(order)
            known = {known.name: known for known in await self._known()}.get(replica)
        if known is None or known.status is None or not is_made(known.status):
            raise _unresponsive(replica)
        return _view(known)

    @contextlib.asynccontextmanager
    async def _alone(self, replica: str) -> AsyncIterator[None]:
        """Refuse a change while another one is being checked and ordered."""
        if self._changing:
            raise ConflictError(
                f"a change of {self._changing} is being made: try again in a moment",
                retry_after_s=1,
            )
        self._changing = replica
        try:
            yield
        finally:
            self._changing = ""

    async def _order(
        self, target: Target, order: Callable[[str], Awaitable[bool]], timeout_s: float
    ) -> list[_Known]:
        """Give an order to the engines of a target; return its replicas.

        Raises:
            NotFoundError: The target names no replica.
            NotReadyError: There is no replica at all.
            OrderFailedError: Some engines did not carry it out.
        """
        asked = self._in_target(await self._known(), target)

        async def give(known: _Known) -> str:
            try:
                is_done = await asyncio.wait_for(order(known.incarnation), timeout_s)
            except asyncio.TimeoutError:
                return f"no answer within {timeout_s:g} s"
            except (EngineError, msgspec.ValidationError) as error:
                return str(error)
            return "" if is_done else "requests keep KV from before"

        answers = await asyncio.gather(*map(give, asked))
        failed = [f"{known.name} ({why})" for known, why in zip(asked, answers, strict=True) if why]
        if failed:
            raise OrderFailedError(
                f"{len(failed)} of {len(asked)} replicas did not carry this out: "
                f"{', '.join(failed)}; the others did. Send it again once GET /replicas shows that "
                "they answer"
            )
        return asked

    def _in_target(self, replicas: list[_Known], target: Target) -> list[_Known]:
        if target.replica is not None:
            found = [known for known in replicas if known.name == target.replica]
            if not found:
                self._refuse_unknown(target.replica)
                raise NotFoundError(f"no replica {target.replica!r} runs; see GET /replicas")
            return found
        if target.pool is not None:
            found = [known for known in replicas if known.pool == target.pool]
            if not found:
                raise NotFoundError(f"no replica of a pool {target.pool!r} runs; see GET /replicas")
            return found
        if not replicas:
            raise NotReadyError("no replica is known yet; try again in a few seconds")
        return replicas

    def _refuse_unknown(self, replica: str) -> None:
        """Tell apart a replica that answered a moment ago from one that never ran.

        Raises:
            ReplicaUnresponsiveError: It answered a moment ago.
        """
        if replica in self._seen_s:
            raise _unresponsive(replica)

    async def _statuses(self) -> list[RoleStatus]:
        statuses = await asyncio.to_thread(self._replicas.role_statuses)
        self._note_seen(status.replica for status in statuses)
        return statuses

    async def _known(self) -> list[_Known]:
        """Return the replicas whose actor or engine answers, by name."""
        statuses = {status.replica: status for status in await self._statuses()}
        pools = self._fleet.pools
        members = {member.replica_id: member for member in pools.members()}
        self._note_seen(members)
        found = []
        for name in sorted(statuses.keys() | members.keys()):
            member = members.get(name)
            snapshot, moves, slots = None, False, 0
            if member is not None:
                description = member.description
                snapshot = pools.snapshot(description.incarnation)
                moves = pools.moves(description.incarnation)
                slots = description.dp_groups * description.slots_per_group
            found.append(_Known(name, statuses.get(name), snapshot, moves, slots))
        return found

    def _note_seen(self, names: Iterable[str]) -> None:
        now_s = asyncio.get_running_loop().time()
        seen_s = {name: at_s for name, at_s in self._seen_s.items() if now_s - at_s < SEEN_S}
        self._seen_s = {**seen_s, **dict.fromkeys(names, now_s)}


def _unresponsive(replica: str) -> ReplicaUnresponsiveError:
    return ReplicaUnresponsiveError(f"replica {replica} does not answer: {_REMEDY}")


def _view(known: _Known) -> ReplicaView:
    status, snapshot = known.status, known.snapshot
    groups = [] if snapshot is None else snapshot.groups
    role: Role = "both"
    if snapshot is not None:
        role = snapshot.role
    elif status is not None:
        role = status.role
    return ReplicaView(
        replica=known.name,
        pool=known.pool,
        role=role,
        next_role=None if status is None or status.next_role == role else status.next_role,
        state=_state(known),
        is_paused=snapshot is not None and snapshot.paused,
        slots=known.slots,
        empty_slots=sum(group.num_empty_slots for group in groups),
        running=sum(group.num_running for group in groups),
        reserved=sum(group.num_reserved for group in groups),
        waiting=0 if snapshot is None else snapshot.num_waiting,
    )


def _state(known: _Known) -> ReplicaState:
    status, snapshot = known.status, known.snapshot
    if status is None or snapshot is None or not known.moves:
        return "unresponsive"
    if status.is_draining:
        return "drained" if status.is_drained else "draining"
    if status.role != status.next_role:
        return "changing_role"
    if snapshot.paused:
        return "paused"
    return "stopping" if snapshot.draining else "ready"
