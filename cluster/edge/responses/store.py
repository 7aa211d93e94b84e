"""Bounded store of finished responses, which clients read again or continue.

Owner: a `ResponseStore` belongs to one ingress, and only its event loop uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.edge.responses.moves import MovedResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
            Neighbours share the entries. Empty if the store had no room for it.
        stored_s: Time at which it was stored, in seconds.
        recording: Recording of its output, see `cluster.edge.responses.recording`; empty if its
            items tell which events it has.
    """

    body: bytes
    turns: tuple[bytes, ...]
    stored_s: float
    recording: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Memory that it may take, if no other response shares its turns."""
        turns = sum(map(len, self.turns))
        return _ENTRY_BYTES + len(self.body) + len(self.recording) + turns


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

    def put(
        self,
        tenant: str,
        response_id: str,
        body: bytes,
        turns: tuple[bytes, ...],
        recording: bytes = b"",
    ) -> bool:
        """Store a response in place of one of its id; return whether it fits into the store."""
        stored = StoredResponse(body, turns, self._now_s(), recording)
        fits = self._insert(tenant, response_id, stored)
        self._trim()
        return fits

    def adopt(self, moved: Iterable[MovedResponse]) -> None:
        """Store responses that another store has had for some time, as `put` does."""
        now_s = self._now_s()
        for each in moved:
            stored = StoredResponse(each.body, each.turns, now_s - each.age_s, each.recording)
            self._insert(each.tenant, each.response_id, stored)
        self._ages = OrderedDict(sorted(self._ages.items(), key=lambda entry: entry[1]))
        self._trim()

    def _insert(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        self.delete(tenant, response_id)
        if stored.num_bytes > self._max_bytes:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[response_id] = stored
        shelf.num_bytes += stored.num_bytes
        self.num_bytes += stored.num_bytes
        self._ages[tenant, response_id] = stored.stored_s
        return True

    def _trim(self) -> None:
        self._forget_old()
        while self.num_bytes > self._max_bytes or len(self) > self._max_responses:
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self.delete(largest, next(iter(self._shelves[largest].responses)))

    def oldest(self, max_bytes: int) -> list[MovedResponse]:
        """Return the oldest responses, for another store.

        Args:
            max_bytes: Most bytes of all but the last.
        """
        self._forget_old()
        found: list[MovedResponse] = []
        now_s, num_bytes = self._now_s(), 0
        for tenant, response_id in self._ages:
            if num_bytes > max_bytes:
                break
            stored = self._shelves[tenant].responses[response_id]
            num_bytes += stored.num_bytes
            age_s = now_s - stored.stored_s
            found.append(
                MovedResponse(
                    tenant, response_id, stored.body, stored.turns, age_s, stored.recording
                )
            )
        return found

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
