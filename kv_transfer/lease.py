"""Leases: how long a producer keeps blocks for a consumer.

A lease is WAITING until its consumer attaches, SERVING while the consumer renews it, and then DONE,
EXPIRED or CANCELLED for good. The numbers of ready and sent rows are no part of the state; the
session counts them. Pure: time comes in as ``now_s``.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from kv_transfer.config import TransferConfig

MAX_ENDED = 4096
"""Ended leases that are remembered, so that a late message gets a true answer."""


class LeaseState(str, Enum):
    """State of a lease; the value is the wire form."""

    WAITING = "waiting"
    """No consumer has fetched yet; ends at the rendezvous deadline."""
    SERVING = "serving"
    """A consumer is attached; ends when it stops renewing."""
    DONE = "done"
    """The consumer holds a verified copy."""
    EXPIRED = "expired"
    """A deadline passed."""
    CANCELLED = "cancelled"
    """One end cancelled the transfer."""


_LIVE = frozenset({LeaseState.WAITING, LeaseState.SERVING})


@dataclass(slots=True, eq=False)
class _Lease:
    state: LeaseState
    deadline_s: float


class LeaseTable:
    """All leases of one producer.

    Owner: the connector's I/O thread. A transfer id is granted at most once. An ended lease never
    changes its state.
    """

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._live: dict[bytes, _Lease] = {}
        self._ended: OrderedDict[bytes, LeaseState] = OrderedDict()

    def __repr__(self) -> str:
        """Show every state."""
        live = {tid.hex(): f"{x.state.value}<{x.deadline_s:g}" for tid, x in self._live.items()}
        ended = {tid.hex(): state.value for tid, state in self._ended.items()}
        return f"LeaseTable(live={live}, ended={ended})"

    def grant(self, transfer_id: bytes, now_s: float) -> bool:
        """Start a lease in WAITING; return False when this id already had one, or was refused."""
        if transfer_id in self._live or transfer_id in self._ended:
            return False
        self._live[transfer_id] = _Lease(LeaseState.WAITING, now_s + self._config.rendezvous_s)
        return True

    def attach(self, transfer_id: bytes, now_s: float) -> bool:
        """Record that the consumer has attached; return False unless the lease is live."""
        if not self.is_live(transfer_id, now_s):
            return False
        lease = self._live[transfer_id]
        if lease.state is LeaseState.WAITING:
            lease.state = LeaseState.SERVING
            lease.deadline_s = now_s + self._config.lease_s
        return self.renew(transfer_id, now_s)

    def renew(self, transfer_id: bytes, now_s: float) -> bool:
        """Extend an attached lease; return False when no lease of this id is live.

        A lease past its deadline is not revived even if ``expire`` has not run yet.
        """
        if not self.is_live(transfer_id, now_s):
            return False
        lease = self._live[transfer_id]
        if lease.state is LeaseState.SERVING:
            lease.deadline_s = max(lease.deadline_s, now_s + self._config.lease_s)
        return True

    def end_lease(self, transfer_id: bytes, state: LeaseState) -> bool:
        """End a lease, or refuse one that was never granted; return False if it had ended."""
        assert state not in _LIVE, f"{state} ends nothing"
        if transfer_id in self._ended:
            return False
        self._live.pop(transfer_id, None)
        self._ended[transfer_id] = state
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return True

    def expire(self, now_s: float) -> tuple[bytes, ...]:
        """End every lease whose deadline has passed, and return their ids."""
        due = tuple(tid for tid, lease in self._live.items() if lease.deadline_s <= now_s)
        for transfer_id in due:
            self.end_lease(transfer_id, LeaseState.EXPIRED)
        return due

    def state(self, transfer_id: bytes) -> LeaseState | None:
        """Return the state of a lease; None for an id never seen, or ended long ago."""
        lease = self._live.get(transfer_id)
        return lease.state if lease is not None else self._ended.get(transfer_id)

    def is_live(self, transfer_id: bytes, now_s: float) -> bool:
        """Return whether data may be sent under this lease at this moment."""
        lease = self._live.get(transfer_id)
        return lease is not None and now_s < lease.deadline_s

    def left_s(self, transfer_id: bytes, now_s: float) -> float:
        """Return the seconds until a lease ends unless renewed; 0 for an ended one."""
        lease = self._live.get(transfer_id)
        return max(0.0, lease.deadline_s - now_s) if lease is not None else 0.0

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline, or None without live leases."""
        return min((lease.deadline_s for lease in self._live.values()), default=None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert not self._live.keys() & self._ended.keys()
        assert all(lease.state in _LIVE for lease in self._live.values())
        assert all(state not in _LIVE for state in self._ended.values())
        assert len(self._ended) <= MAX_ENDED
