"""Ended sequences whose slot or blocks are still in use.

Owner of these sequences, on the engine's core thread. A sequence may be *held*, while another
engine reads or writes its blocks, and *overtaken*, while a step under way still writes to them. Its
slot is free once that step is over, its blocks once neither applies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replicas.engine.groups import DPGroups
    from replicas.engine.sequence import Sequence


class Departed:
    """See the module docstring.

    Args:
        groups: Get slots and blocks back.

    Attributes:
        held: Of each request, the sequence whose blocks another engine uses.
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
        """Whether somebody's slot waits for a step to be over."""
        return bool(self._overtaken)

    def retire(self, seq: Sequence, *, hold: bool, is_under_way: bool) -> None:
        """End a sequence, and take from it what nobody uses any more.

        Args:
            seq: It has no place elsewhere any more.
            hold: Whether another engine uses its blocks.
            is_under_way: Whether a step that is not over has it.
        """
        seq.status = SequenceStatus.FINISHED
        if hold:
            self.held[seq.request_id] = seq
        if is_under_way:
            self._overtaken.append(seq)
        else:
            self._give_back(seq)

    def release(self, request_id: str) -> None:
        """Another engine has what it came for, or will not come any more. Idempotent."""
        seq = self.held.pop(request_id, None)
        if seq is not None and seq not in self._overtaken:
            self._groups.give_back_blocks(seq)

    def step_is_over(self, is_under_way: Callable[[Sequence], bool]) -> None:
        """Take everything from those whom no further step has."""
        overtaken, self._overtaken = self._overtaken, []
        for seq in overtaken:
            if is_under_way(seq):
                self._overtaken.append(seq)
            else:
                self._give_back(seq)

    def check_invariants(self) -> None:
        """Nobody has a slot whom no step uses."""
        assert all(s.slot < 0 or s in self._overtaken for s in self.held.values())

    def _give_back(self, seq: Sequence) -> None:
        self._groups.give_back_slot(seq)
        if self.held.get(seq.request_id) is not seq:
            self._groups.give_back_blocks(seq)
