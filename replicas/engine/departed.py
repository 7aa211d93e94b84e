"""Ended sequences whose slot or blocks are still in use.

Owner of these sequences, on the engine's core thread. A sequence may be *held*, while another
engine reads or writes its blocks, and *overtaken*, while a step under way still writes to them. Its
slot is free once that step is over, its blocks once neither applies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.sequence import Phase, transition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replicas.engine.groups import DPGroups
    from replicas.engine.sequence import Sequence


class Departed:
    """Ended sequences that still have a slot or blocks.

    Args:
        groups: Gets slots and blocks back.

    Attributes:
        held: For each request id, the sequence whose blocks another engine uses.
    """

    def __init__(self, groups: DPGroups) -> None:
        self._groups = groups
        self.held: dict[str, Sequence] = {}
        self._overtaken: list[Sequence] = []

    def __repr__(self) -> str:
        return f"Departed(held={len(self.held)}, overtaken={len(self._overtaken)})"

    def __len__(self) -> int:
        return len(self.held) + len(self._overtaken)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.held.values()
        for seq in self._overtaken:
            if self.held.get(seq.request_id) is not seq:
                yield seq

    @property
    def has_overtaken(self) -> bool:
        """Return whether a slot cannot be freed before a step under way ends."""
        return bool(self._overtaken)

    def retire(self, seq: Sequence, *, hold: bool, is_under_way: bool) -> None:
        """End a sequence, and free its slot and blocks as far as they are not in use.

        Args:
            seq: A sequence that is in no other place.
            hold: Whether another engine uses its blocks.
            is_under_way: Whether a step under way computes it.
        """
        if hold:
            self.held[seq.request_id] = seq
        if hold or is_under_way:
            transition(seq, Phase.LEAVING)
        if is_under_way:
            self._overtaken.append(seq)
        else:
            self._give_back(seq)

    def release(self, request_id: str) -> None:
        """Free blocks that another engine has fetched, or will not fetch. Idempotent."""
        seq = self.held.pop(request_id, None)
        if seq is not None and seq not in self._overtaken:
            self._free_blocks(seq)

    def step_is_over(self, is_under_way: Callable[[Sequence], bool]) -> None:
        """Free slots and blocks of the sequences that no step under way computes any more."""
        overtaken, self._overtaken = self._overtaken, []
        for seq in overtaken:
            if is_under_way(seq):
                self._overtaken.append(seq)
            else:
                self._give_back(seq)

    def check_invariants(self) -> None:
        """Assert that only sequences of a step under way have a slot."""
        assert all(s.slot < 0 or s in self._overtaken for s in self.held.values())
        assert all(s.phase is Phase.LEAVING for s in self)

    def _give_back(self, seq: Sequence) -> None:
        self._groups.give_back_slot(seq)
        if self.held.get(seq.request_id) is not seq:
            self._free_blocks(seq)

    def _free_blocks(self, seq: Sequence) -> None:
        self._groups.give_back_blocks(seq)
        transition(seq, Phase.ENDED)
