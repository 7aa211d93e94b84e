"""Decode slots of one engine: which rows of the global decode batch are in use.

Owner: the scheduler, on the engine's core thread. A slot is a row of the padded decode batch;
`dp_group = slot // slots_per_group`.
"""

from __future__ import annotations

import heapq


class SlotTable:
    """Free and taken slots, lowest free slot first.

    Args:
        dp_groups: Number of DP groups.
        slots_per_group: Slots of each.
    """

    def __init__(self, dp_groups: int, slots_per_group: int) -> None:
        assert dp_groups > 0, f"{dp_groups=}"
        assert slots_per_group > 0, f"{slots_per_group=}"
        self._slots_per_group = slots_per_group
        self._empty = [
            list(range(g * slots_per_group, (g + 1) * slots_per_group)) for g in range(dp_groups)
        ]
        self._taken: set[int] = set()

    def __repr__(self) -> str:
        return f"SlotTable(empty={[len(e) for e in self._empty]})"

    def num_empty(self, dp_group: int) -> int:
        """Return the number of free slots of a DP group."""
        return len(self._empty[dp_group])

    def take(self, dp_group: int) -> int:
        """Take the lowest free slot of a group; the caller checks `num_empty` first."""
        slot = heapq.heappop(self._empty[dp_group])
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Return a taken slot."""
        assert slot in self._taken, f"slot {slot} is not taken"
        self._taken.remove(slot)
        heapq.heappush(self._empty[slot // self._slots_per_group], slot)

    def check_invariants(self) -> None:
        """Assert that every slot is either taken, or free once, in its own group."""
        for group, empty in enumerate(self._empty):
            assert len(set(empty)) == len(empty)
            assert all(s // self._slots_per_group == group for s in empty)
        free = {s for empty in self._empty for s in empty}
        assert not free & self._taken
        assert len(free) + len(self._taken) == len(self._empty) * self._slots_per_group
