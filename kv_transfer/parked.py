"""FETCHes for transfers that the router has not announced to this engine yet. Pure."""

from collections import OrderedDict
from typing import NamedTuple

from kv_transfer.messages import Fetch
from kv_transfer.ticket import Ticket

MAX_PARKED = 4096
"""Most parked fetches; above it the oldest is dropped."""


class Parked(NamedTuple):
    """A parked fetch.

    Attributes:
        peer: The connection that it came over.
        fetch: The message.
        ticket: The ticket that it showed.
        deadline_s: Time at which it is dropped.
    """

    peer: bytes
    fetch: Fetch
    ticket: Ticket
    deadline_s: float


class ParkedFetches:
    """Parked fetches, at most one per transfer: the first. Owner: a ``ProducerSessions``."""

    def __init__(self) -> None:
        self._parked: OrderedDict[bytes, Parked] = OrderedDict()

    @property
    def transfer_ids(self) -> set[bytes]:
        """Ids of the transfers with a parked fetch."""
        return set(self._parked)

    def park(self, new: Parked) -> bool:
        """Keep a fetch; return False if a fetch of another peer is parked for this transfer."""
        known = self._parked.get(new.fetch.transfer_id)
        if known is not None:
            return known.peer == new.peer
        if len(self._parked) >= MAX_PARKED:
            self._parked.popitem(last=False)
        self._parked[new.fetch.transfer_id] = new
        return True

    def pop_fetch(self, transfer_id: bytes) -> Parked | None:
        """Remove and return the fetch for a transfer; None without one."""
        return self._parked.pop(transfer_id, None)

    def expire(self, now_s: float) -> int:
        """Drop the fetches past their deadline, and return how many."""
        num_before = len(self._parked)
        while self._parked and self._next().deadline_s <= now_s:
            self._parked.popitem(last=False)
        return num_before - len(self._parked)

    def next_deadline_s(self) -> float | None:
        """Return the time of the next ``expire``, or None."""
        return self._next().deadline_s if self._parked else None

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert len(self._parked) <= MAX_PARKED
        deadlines_s = [parked.deadline_s for parked in self._parked.values()]
        assert deadlines_s == sorted(deadlines_s), "the oldest is the first"

    def _next(self) -> Parked:
        return next(iter(self._parked.values()))
