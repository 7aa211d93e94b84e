"""Decides when a prefix is requested so often that more places should cache it. Pure.

Owner: one ingress's event loop, by `Prefixes`. A prefix is hot if the requests under way with it
would take more than `HOT_SHARE` of the slots of its holders. Then their cached blocks of it do not
count, so the next request is placed by load, and its place holds the prefix from then on. This
happens before the holders are full or have queues.

Requests are counted at depths of 1, 2, 4, ... blocks, so that a prompt of n blocks needs log2(n)
counters however it branches. A prefix in between is as hot as the next shorter counted one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

PlaceT = TypeVar("PlaceT", bound="Hashable")

HOT_SHARE = 0.125
"""Share of a holder's slots that one prefix may take before another place should hold it, too.

Other requests are disturbed less by its requests than by computing the prefix once more. Of shares
from a half to a sixteenth this one gave the best TTFT, hot or not, with prefixes of 4,096 tokens on
n150.
"""


def copies_wanted(num_requests: int, slots: int) -> int:
    """Return in how many places a prefix should be cached.

    Args:
        num_requests: Requests under way with it.
        slots: Decode slots of one place, at least 1.
    """
    room = max(int(slots * HOT_SHARE), 1)
    return max(-(-num_requests // room), 1)


class HotPrefixes:
    """Counts of requests under way by prefix."""

    def __init__(self) -> None:
        self._num_requests: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._num_requests)

    def enter(self, names: Sequence[int]) -> None:
        """Count a request with these blocks as under way."""
        for _, name in _marks(names):
            self._num_requests[name] = self._num_requests.get(name, 0) + 1

    def leave(self, names: Sequence[int]) -> None:
        """Count a request that was entered with these blocks as ended."""
        for _, name in _marks(names):
            self._num_requests[name] -= 1
            if not self._num_requests[name]:
                del self._num_requests[name]

    def cool(
        self, names: Sequence[int], held: Mapping[PlaceT, int], slots: int, num_places: int
    ) -> Mapping[PlaceT, int]:
        """Return the leading blocks that count in each place: fewer than held if a prefix is hot.

        Args:
            names: Names of the request's blocks.
            held: Number of them that each holder has.
            slots: Decode slots of one place.
            num_places: Number of places: copies in all of them are enough.
        """
        for depth, name in _marks(names):
            num_holders = sum(num_held >= depth for num_held in held.values())
            if not num_holders:
                break
            wanted = copies_wanted(self._num_requests.get(name, 0), slots)
            if num_holders < min(wanted, num_places):
                return {p: min(num, depth - 1) for p, num in held.items() if depth > 1}
        return held


def _marks(names: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the depths at which requests are counted, with the name of the last block there."""
    depth = 1
    while depth <= len(names):
        yield depth, names[depth - 1]
        depth *= 2
