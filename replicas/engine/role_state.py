"""The role of an engine, and changes of it."""

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


class RoleState:
    """An engine's role, and the state of a change to another one. Pure.

    During a change the engine refuses new requests, asks clients to move its decoding requests
    elsewhere, finishes or hands over the rest, and enters the new role once no request of the old
    one is left. Weights, KV and connections are kept. Each reopening starts another *epoch*, which
    invalidates what clients know of earlier ones. An operator may also drain an engine until it is
    reopened: then it keeps its role, or a change under way ends without a reopening.

    Args:
        role: The first role.

    Attributes:
        role: The role, or while the engine drains the one that it still has.
        next_role: The role to enter once no request of the present one is left; None if unchanged.
        epoch: Number of reopenings.
        hands_over: Whether clients should move decoding requests elsewhere, where there is room.
        is_evacuated: Whether an operator drains the engine.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.epoch = 0
        self.hands_over = False
        self.next_role: Role | None = None
        self.is_evacuated = False
        self._ends = False

    def __repr__(self) -> str:
        state = "ending" if self._ends else f"to be {self.next_role}" if self.next_role else "open"
        drained = ", evacuated" if self.is_evacuated else ""
        return f"RoleState({self.role}, epoch {self.epoch}, {state}{drained})"

    @property
    def is_draining(self) -> bool:
        """Return whether the engine refuses new requests, for now or for good."""
        return self._ends or self.is_evacuated or self.next_role is not None

    def accepts(self, mode: RequestMode) -> bool:
        """Return whether the engine accepts a request of this mode.

        A client may still assume an earlier role.
        """
        return not self.is_draining and mode in _MODES[self.role]

    def end(self) -> None:
        """Refuse new requests for good, and cancel a change of role that is under way."""
        self._ends, self.next_role = True, None

    def hand_over(self) -> None:
        """Ask clients to move decoding requests elsewhere; they continue until they are moved."""
        self.hands_over = True

    def evacuate(self) -> None:
        """Refuse new requests, and ask clients to move decoding ones, until `reopen`."""
        if not self._ends:
            self.is_evacuated = self.hands_over = True

    def reopen(self) -> None:
        """Accept requests again after `evacuate`; has no effect after `end`."""
        if self.is_evacuated and not self._ends:
            self.is_evacuated = False
            if self.next_role is None:
                self._open()

    def change(self, role: Role) -> None:
        """Start a change to another role, or cancel it if `role` is the present one.

        Has no effect after `end`.
        """
        if self._ends:
            return
        if role != self.role:
            self.next_role, self.hands_over = role, True
        elif self.next_role is not None:
            self._open()

    def settle(self, num_live: int) -> None:
        """Enter the new role if no request of the old one is left."""
        if self.next_role is not None and not num_live:
            self.role = self.next_role
            self._open()

    def _open(self) -> None:
        self.next_role, self.hands_over = None, self.is_evacuated
        self.epoch += 1
