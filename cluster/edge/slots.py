"""The slots of all replicas, with the requests that use them: the body of GET /debug/slots. Pure.

An ingress knows its own requests and the last snapshot of every engine; `merged_views` adds the
requests of the other ingresses.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.routing.pools import PoolState
    from cluster.routing.router import Part

_LABEL_BYTES = 6


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's part in one request.

    Attributes:
        request: Label of the request: a hash that engines do not accept as an id.
        mode: prefill, decode (a reservation until it is activated) or local.
        state: asked (counted by its ingress until the engine answers), open, activated.
        age_s: Seconds since the request was sent to the engine.
        num_blocks: KV blocks that the request needs to start.
    """

    request: str
    mode: str
    state: str
    age_s: float
    num_blocks: int


class GroupSlots(msgspec.Struct, frozen=True, kw_only=True):
    """A DP group in its engine's last snapshot; see `replicas.messages.GroupSnapshot`."""

    empty_slots: int
    running: int
    reserved: int
    waiting: int
    free_blocks: list[int]


class ReplicaSlots(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        role: Current role; empty before the first snapshot.
        state: State in the replica's life cycle, see `replicas.life`.
        is_responsive: Whether it gets requests; false while it is stalled or unreachable.
        breaker: closed, open, half_open or probing; see `cluster.routing.breaker`.
        attempts: Its parts in requests, the oldest first.
    """

    replica: str
    pool: str
    role: str
    is_responsive: bool
    state: str
    breaker: str
    groups: list[GroupSlots]
    attempts: list[AttemptView]


class SlotsView(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /debug/slots.

    Attributes:
        num_queued: Requests queued for a slot.
        num_awaiting_admission: Requests queued for admission; 0 without `router.admission`.
        replicas: All replicas, sorted by id.
        num_ingresses: Ingresses that answered, whose requests these are.
    """

    num_queued: int
    num_awaiting_admission: int
    replicas: list[ReplicaSlots]
    num_ingresses: int = 1


def merged_views(own: SlotsView, others: Sequence[SlotsView]) -> SlotsView:
    """Return the view of one ingress with the requests of others.

    Args:
        own: The view whose replicas' states count.
        others: Views of other ingresses at about the same time.
    """
    replicas = {replica.replica: replica for replica in own.replicas}
    for view in others:
        for replica in view.replicas:
            known = replicas.setdefault(replica.replica, replica)
            if known is not replica:
                attempts = sorted(known.attempts + replica.attempts, key=lambda a: -a.age_s)
                replicas[replica.replica] = msgspec.structs.replace(known, attempts=attempts)
    views = (own, *others)
    return SlotsView(
        num_queued=sum(view.num_queued for view in views),
        num_awaiting_admission=sum(view.num_awaiting_admission for view in views),
        replicas=sorted(replicas.values(), key=lambda replica: replica.replica),
        num_ingresses=len(views),
    )


def slots_view(
    pools: PoolState,
    parts: Iterable[Part],
    *,
    num_queued: int,
    num_awaiting_admission: int,
    now_s: float,
) -> SlotsView:
    """Return the view at `now_s`, on the clock of the parts."""
    of_engine: dict[str, list[AttemptView]] = {}
    for part in sorted(parts, key=lambda part: part.asked_s):
        member = pools.member(part.incarnation)
        kv_groups = () if member is None else member.description.kv_groups
        view = AttemptView(
            request=hashlib.blake2b(
                part.demand.request_id.encode(), digest_size=_LABEL_BYTES
            ).hexdigest(),
            mode=part.mode,
            state=part.state,
            age_s=now_s - part.asked_s,
            num_blocks=sum(part.demand.num_blocks(kv_group) for kv_group in kv_groups),
        )
        of_engine.setdefault(part.incarnation, []).append(view)
    replicas = []
    for member in pools.members():
        incarnation = member.description.incarnation
        snapshot = pools.snapshot(incarnation)
        replicas.append(
            ReplicaSlots(
                replica=member.replica_id,
                pool=member.pool,
                role="" if snapshot is None else snapshot.role,
                is_responsive=pools.moves(incarnation),
                state=pools.state(incarnation).value,
                breaker=pools.breakers.state(incarnation),
                groups=[
                    GroupSlots(
                        empty_slots=group.num_empty_slots,
                        running=group.num_running,
                        reserved=group.num_reserved,
                        waiting=group.num_waiting,
                        free_blocks=group.num_free_blocks,
                    )
                    for group in (() if snapshot is None else snapshot.groups)
                ],
                attempts=of_engine.get(incarnation, []),
            )
        )
    return SlotsView(
        num_queued=num_queued,
        num_awaiting_admission=num_awaiting_admission,
        replicas=sorted(replicas, key=lambda replica: replica.replica),
    )
