"""Pause of an engine: what stands still, and the calls that wait until it does. Pure.

Owner: the scheduler reads it, the engine core changes it. Modes and names are those of vLLM's
`pause_generation`:

- abort: all live requests have ended. New ones are queued.
- wait: running sequences continue to their end; then they are frozen, too. Queued ones stay queued.
- keep: running sequences are frozen with their slots and blocks.

KV that is under way still arrives, and reservations that are not activated in time still lapse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replicas.messages import PauseMode


class Call(NamedTuple):
    """A client's call that is not answered yet."""

    client: bytes
    call_id: int


class Pause:
    """Whether the engine is paused.

    Attributes:
        is_active: Whether queued sequences stay queued.
        is_frozen: Whether running sequences stand still, too.
        calls: Calls that wait until the engine stands still.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.is_frozen = False
        self.calls: list[Call] = []

    def __repr__(self) -> str:
        return f"Pause({'frozen' if self.is_frozen else 'waiting' if self.is_active else 'off'})"

    @property
    def is_still(self) -> bool:
        """Return whether the engine stands still: it is frozen, and all calls are answered."""
        return self.is_frozen and not self.calls

    def begin(self, mode: PauseMode, call: Call) -> None:
        """Begin a pause, or change the mode of the present one."""
        self.is_active = True
        self.is_frozen = self.is_frozen or mode != "wait"
        self.calls.append(call)

    def settle(self, num_running: int) -> list[Call]:
        """Freeze an engine in which nothing runs any more; return the calls to answer."""
        if not self.is_active or (num_running and not self.is_frozen):
            return []
        self.is_frozen = True
        calls, self.calls = self.calls, []
        return calls

    def end(self) -> list[Call]:
        """End the pause; return the calls that were still waiting for it."""
        self.is_active = self.is_frozen = False
        calls, self.calls = self.calls, []
        return calls

    def client_gone(self, client: bytes) -> None:
        """Forget the calls of a client. The pause stays."""
        self.calls = [call for call in self.calls if call.client != client]
