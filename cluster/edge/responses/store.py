"""Bounded store of finished responses, which clients read again or continue.

Owner: a `ResponseStore` belongs to one ingress, and only its event loop uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RESPONSES = 2**16
"""Most responses in a store."""
_ENTRY_BYTES = 1024
"""Memory of an entry besides its texts, at most."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response.

    Attributes:
        body: The response as JSON.
        turns: The conversation up to and with it, one entry of encoded items for each response.
            Neighbours share the entries.
        stored_s: Time at which it was stored, in seconds.
    """

    body: bytes
    turns: tuple[bytes, ...]
    stored_s: float

    @property
    def num_bytes(self) -> int:
        """Memory that it may take, if no other response shares its turns."""
        return _ENTRY_BYTES + len(self.body) + sum(map(len, self.turns))


@dataclass(slots=True)
class _Shelf:
    """The responses of one tenant, the least recently used first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """Responses by tenant and id.

    When the store is full, the tenant that takes the most memory loses the response that it has not
    used for the longest time.

    Args:
        max_bytes: Most memory; 0 stores nothing.
        max_age_s: Seconds after which a response is forgotten.
        now_s: Returns the time, in seconds.
        max_responses: Most responses.
    """

    def __init__(
        self,
        max_bytes: int,
        max_age_s: float,
        now_s: Callable[[], float],
        max_responses: int = MAX_RESPONSES,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now_s = now_s
        self._max_responses = max_responses
        self._shelves: dict[str, _Shelf] = {}
        # In the order of their age.
        self._ages: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Return whether responses are stored at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._ages)

    @property
    def max_text_bytes(self) -> int:
        """Return the most bytes of a response and its conversation; negative if none is stored."""
        return self._max_bytes - _ENTRY_BYTES

    def put(self, tenant: str, response_id: str, body: bytes, turns: tuple[bytes, ...]) -> bool:
        """Store a response with a new id; return whether it fits into the store."""
        now_s = self._now_s()
        stored = StoredResponse(body, turns, now_s)
        if stored.num_bytes > self._max_bytes:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[response_id] = stored
        shelf.num_bytes += stored.num_bytes
        self.num_bytes += stored.num_bytes
        self._ages[tenant, response_id] = now_s
        self._forget_old()
        while self.num_bytes > self._max_bytes or len(self) > self._max_responses:
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self.delete(largest, next(iter(self._shelves[largest].responses)))
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response, which counts as a use; None if it is not there."""
        self._forget_old()
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.responses:
            return None
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a tenant's response; return whether it was there."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.responses:
            return False
        num_bytes = shelf.responses.pop(response_id).num_bytes
        shelf.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        del self._ages[tenant, response_id]
        if not shelf.responses:
            del self._shelves[tenant]
        return True

    def _forget_old(self) -> None:
        oldest_s = self._now_s() - self._max_age_s
        while self._ages:
            key = next(iter(self._ages))
            if self._ages[key] > oldest_s:
                return
            self.delete(*key)
