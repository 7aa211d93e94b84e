"""Running KV transfers of all replicas: the body of GET /kv, and the tables of `ttserve kv`. Pure.

It joins the engines' reports (`replicas.messages.KVTransfers`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.store import StoreCounters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.routing.pools import Member
    from replicas.messages import KVTransfers


_LABEL_BYTES = 6
_REPLICA_COLUMNS = ("REPLICA", "TRANSFERS", "LEASED", "RESERVED", "QUARANTINED")
_STORE_COLUMNS = ("REPLICA", "HITS", "MISSES", "PUTS", "DROPS", "ERRORS")
_TRANSFER_COLUMNS = (
    "REQUEST", "REPLICA", "ROLE", "PEER", "PATH", "STATE", "READY/DONE/ROWS", "BLOCKS", "AGE",
    "LEASE",
)  # fmt: skip


class TransferView(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer as one of its ends reports it.

    Attributes:
        request: Label of the request, equal at both ends: a hash that engines do not accept as an
            id.
        role: This end's role: producer or consumer.
        peer: Replica at the other end; empty while there is none.
        path: Path of the payload.
        state: The event that the transfer waits for.
        ready_rows: Rows of 32 tokens that are computed, as far as this end knows.
        done_rows: Rows already sent (producer) or written (consumer).
        total_rows: Rows that the transfer moves.
        num_blocks: Blocks of this replica that it holds.
        age_s: Seconds since it started at this end.
        lease_left_s: Seconds until the producer's lease ends, or None.
    """

    request: str
    role: str
    peer: str
    path: str
    state: str
    ready_rows: int
    done_rows: int
    total_rows: int
    num_blocks: int
    age_s: float
    lease_left_s: float | None = None


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        replica: Id of the replica.
        pool: Name of its pool.
        is_silent: Whether it did not answer in time; the other values are unknown then.
        leased_blocks: Blocks held for outgoing transfers.
        reserved_blocks: Blocks reserved for incoming KV.
        quarantined_blocks: Blocks that cannot be reused yet, because a late write may still arrive.
        transfers: Running transfers, the oldest first.
        store: This replica's totals of the store since its start; None without a store.
    """

    replica: str
    pool: str
    is_silent: bool = False
    leased_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    transfers: list[TransferView] = []
    store: StoreCounters | None = None


class TransfersView(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /kv: every replica, ordered by its id."""

    replicas: list[ReplicaView]


def transfers_view(answers: Sequence[tuple[Member, KVTransfers | None]]) -> TransfersView:
    """Join the replicas' answers; None stands for a replica that did not answer."""
    names = {member.description.incarnation: member.replica_id for member, _ in answers}
    views = [_replica_view(member, answer, names) for member, answer in answers]
    return TransfersView(replicas=sorted(views, key=lambda view: view.replica))


def _replica_view(
    member: Member, answer: KVTransfers | None, names: Mapping[str, str]
) -> ReplicaView:
    if answer is None:
        return ReplicaView(replica=member.replica_id, pool=member.pool, is_silent=True)
    transfers = []
    for info in answer.transfers:
        fields = msgspec.structs.asdict(info)
        # The name of a removed peer is unknown; show its incarnation.
        fields |= {
            "request": _label(fields.pop("request_id")),
            "peer": names.get(info.peer, info.peer),
        }
        transfers.append(TransferView(**fields))
    return ReplicaView(
        replica=member.replica_id,
        pool=member.pool,
        leased_blocks=answer.num_leased_blocks,
        reserved_blocks=answer.num_reserved_blocks,
        quarantined_blocks=answer.num_quarantined_blocks,
        transfers=sorted(transfers, key=lambda view: (-view.age_s, view.request)),
        store=answer.store,
    )


def _label(request_id: str) -> str:
    """Return a label for a request, equal at both ends, that engines do not accept as an id."""
    return hashlib.blake2b(request_id.encode(), digest_size=_LABEL_BYTES).hexdigest()


def transfers_text(view: TransfersView) -> str:
    """Render up to three tables: replicas, store totals, running transfers."""
    replicas: list[Sequence[object]] = [_REPLICA_COLUMNS]
    stores: list[Sequence[object]] = [_STORE_COLUMNS]
    transfers: list[Sequence[object]] = [_TRANSFER_COLUMNS]
    for replica in view.replicas:
        if replica.is_silent:
            replicas.append((replica.replica, "silent", "?", "?", "?"))
            continue
        blocks = (replica.leased_blocks, replica.reserved_blocks, replica.quarantined_blocks)
        replicas.append((replica.replica, len(replica.transfers), *blocks))
        transfers.extend(_transfer_row(replica.replica, transfer) for transfer in replica.transfers)
        if replica.store is not None:
            stores.append((replica.replica, *msgspec.structs.astuple(replica.store)))
    further = [_table(rows) for rows in (stores, transfers) if len(rows) > 1]
    return "\n".join([_table(replicas), *further])


def _transfer_row(replica: str, transfer: TransferView) -> Sequence[object]:
    rows = f"{transfer.ready_rows}/{transfer.done_rows}/{transfer.total_rows}"
    lease = "-" if transfer.lease_left_s is None else f"{transfer.lease_left_s:.1f} s"
    return (
        transfer.request, replica, transfer.role, transfer.peer or "-", transfer.path or "-",
        transfer.state, rows, transfer.num_blocks, f"{transfer.age_s:.1f} s", lease,
    )  # fmt: skip


def _table(rows: Sequence[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    return "\n".join(lines) + "\n"
