"""When a prefix is so much asked for that it has to be in more places than it is. Pure.

Owner: one ingress's event loop, by `Prefixes`. A prefix is hot where the requests with it that are
under way would take more than `HOT_SHARE` of the slots of those who hold it: then what they hold
of it counts for nothing, the next request goes where the load says, and that is where it is from
then on. That is before its holders are full, and before a queue in front of them tells.

Requests are counted at depths of 1, 2, 4, ... blocks, so that a prompt of n blocks costs log2(n)
counters however it branches; a prefix in between is as hot as the next shorter one that is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

PlaceT = TypeVar("PlaceT", bound="Hashable")

HOT_SHARE = 0.125
"""Of a holder's slots, how many one prefix may take before another place is to hold it, too. A
request is less in the way of others there than a prefix that is computed once more: of a half to a
sixteenth, the share at which prefixes of 4,096 tokens on n150 gave the best TTFT, hot or not."""


def copies_wanted(num_requests: int, slots: int) -> int:
    """In how many places a prefix should be.

    Args:
        num_requests: Under way with it.
        slots: Decode slots of one place, at least 1.
    """
    room = max(int(slots * HOT_SHARE), 1)
    return max(-(-num_requests // room), 1)


class HotPrefixes:
    """See the module docstring."""

    def __init__(self) -> None:
        self._num_requests: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._num_requests)

    def enter(self, names: Sequence[int]) -> None:
        """A request with these blocks is under way."""
        for _, name in _marks(names):
            self._num_requests[name] = self._num_requests.get(name, 0) + 1

    def leave(self, names: Sequence[int]) -> None:
        """A request that was entered with these blocks has ended."""
        for _, name in _marks(names):
            self._num_requests[name] -= 1
            if not self._num_requests[name]:
                del self._num_requests[name]

    def cool(
        self, names: Sequence[int], held: Mapping[PlaceT, int], slots: int, num_places: int
    ) -> Mapping[PlaceT, int]:
        """Leading blocks that count for a request: less than are held where that is too hot.

        Args:
            names: Of its blocks.
            held: How many of them each place holds that holds any.
            slots: Decode slots of one place.
            num_places: How many places there are: all of them are enough.
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
    """Depths at which requests are counted, with the names of the last blocks there."""
    depth = 1
    while depth <= len(names):
        yield depth, names[depth - 1]
        depth *= 2
