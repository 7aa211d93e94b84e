"""Role of an engine and the change to another role. Pure.

Owner: the engine core. During a change the engine refuses new requests, asks clients to move its
decoding requests elsewhere, finishes or hands over the rest, and enters the new role once no
request of the old one is left. Weights, KV and connections are kept. Each reopening starts another
*epoch*, which invalidates what clients know of earlier ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.config import Role
    from replicas.messages import RequestMode

_MODES: dict[Role, frozenset[RequestMode]] = {
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"decode", "local"}),
    "both": frozenset({"local", "prefill", "decode"}),
}


class Duty:
    """See the module docstring.

    Args:
        role: What it begins with.

    Attributes:
        role: What it takes, or took before it drained.
        epoch: How often it has opened again.
        hands_over: Whether what decodes here should go on elsewhere, where there is room.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.epoch = 0
        self.hands_over = False
        self._next: Role | None = None
        self._ends = False

    def __repr__(self) -> str:
        state = "ending" if self._ends else f"to be {self._next}" if self._next else "open"
        return f"Duty({self.role}, epoch {self.epoch}, {state})"

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new, for now or for ever."""
        return self._ends or self._next is not None

    def takes(self, mode: RequestMode) -> bool:
        """Whether it takes a request of this mode: whoever asks may believe what it was before."""
        return not self.is_draining and mode in _MODES[self.role]

    def end(self) -> None:
        """Take nothing any more, ever; a change that is under way comes to nothing."""
        self._ends, self._next = True, None

    def hand_over(self) -> None:
        """Say that what decodes here should go on elsewhere; until then it goes on."""
        self.hands_over = True

    def change(self, role: Role) -> None:
        """Begin to take another role, or go back to the one that it is about to leave.

        Nothing comes of it once it is to end.
        """
        if self._ends:
            return
        if role != self.role:
            self._next, self.hands_over = role, True
        elif self._next is not None:
            self._open()

    def settle(self, num_live: int) -> None:
        """Take the new role, if nothing is left of the old one."""
        if self._next is not None and not num_live:
            self.role = self._next
            self._open()

    def _open(self) -> None:
        self._next, self.hands_over = None, False
        self.epoch += 1
