"""FETCHes for transfers that this engine has not heard of yet: the router is on its way. Pure."""

from collections import OrderedDict
from typing import NamedTuple

from kv_transfer.messages import Fetch
from kv_transfer.ticket import Ticket

MAX_PARKED = 4096
"""Of more than so many the oldest give way."""


class Parked(NamedTuple):
    """A fetch that waits.

    Attributes:
        peer: The connection that it came over.
        fetch: It.
        ticket: What it has shown.
        deadline_s: When it is forgotten.
    """

    peer: bytes
    fetch: Fetch
    ticket: Ticket
    deadline_s: float


class ParkedFetches:
    """At most one for each transfer: of whoever came first. Owner: a ``ProducerSessions``."""

    def __init__(self) -> None:
        self._parked: OrderedDict[bytes, Parked] = OrderedDict()

    @property
    def transfer_ids(self) -> set[bytes]:
        """Of which transfers."""
        return set(self._parked)

    def park(self, new: Parked) -> bool:
        """Keep a fetch; False if another peer's is kept already."""
        known = self._parked.get(new.fetch.transfer_id)
        if known is not None:
            return known.peer == new.peer
        if len(self._parked) >= MAX_PARKED:
            self._parked.popitem(last=False)
        self._parked[new.fetch.transfer_id] = new
        return True

    def take(self, transfer_id: bytes) -> Parked | None:
        """Return and forget the fetch for a transfer, if there is one."""
        return self._parked.pop(transfer_id, None)

    def expire(self, now_s: float) -> int:
        """Forget those that have waited for too long; returns how many."""
        num_before = len(self._parked)
        while self._parked and self._next().deadline_s <= now_s:
            self._parked.popitem(last=False)
        return num_before - len(self._parked)

    def next_deadline_s(self) -> float | None:
        """Return when ``expire`` has something to do."""
        return self._next().deadline_s if self._parked else None

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert len(self._parked) <= MAX_PARKED
        deadlines_s = [parked.deadline_s for parked in self._parked.values()]
        assert deadlines_s == sorted(deadlines_s), "the oldest is the first"

    def _next(self) -> Parked:
        return next(iter(self._parked.values()))
