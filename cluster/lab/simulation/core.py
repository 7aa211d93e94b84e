"""The core thread of an engine process in the simulator: reads messages, steps, sends frames.

Does in virtual time what `replicas.engine_process.process.EngineProcess` does in a thread. A turn
is one or several steps of the engine between two readings of the inbox. Owns the present turn.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Protocol

from replicas.messages import Abort
from replicas.simulation.virtual_engine import VirtualTurn

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from cluster.lab.simulation.inbox import VirtualInbox
    from cluster.lab.simulation.loop import VirtualLoop
    from replicas.engine_process.server import Frames
    from replicas.simulation.virtual_engine import VirtualEngine

HEARTBEAT_S = 0.25
"""`replicas.engine_process.sockets.HEARTBEAT_S`. The simulator sends only heartbeats with news."""
_FIRST_S = 8.0
"""Length of a first turn that counts as a stall; see `replicas.watchdog`. It has at most
2,048 tokens here."""
_FACTOR = 4.0
"""Any other turn is a stall at this multiple of the longest one before; `watchdog.FACTOR`."""
_NO_TURN = VirtualTurn(0.0, [])


class ProcessHooks(Protocol):
    """The functions that a core thread uses of its process."""

    def call_at(
        self, when_s: float, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Run a callback in the process at a virtual time; never if it is dead by then."""

    def do(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in the process now; later if it is frozen."""

    def send(self, frames: Frames, step_times_s: list[float]) -> None:
        """Send frames, with the end times of their steps if there are several."""

    def send_heartbeat(self) -> None:
        """Send every client a heartbeat."""


class VirtualCore:
    """The core thread of an engine process, in virtual time.

    Attributes:
        busy_s: Seconds in turns.
        num_turns: Number of steps that have ended.
        idle_since_s: Time since it has been idle; None while it has work.
        is_stepping: Whether the engine is scheduling a turn at this moment.
    """

    def __init__(
        self, process: ProcessHooks, engine: VirtualEngine, inbox: VirtualInbox, loop: VirtualLoop
    ) -> None:
        self.busy_s = 0.0
        self.num_turns = 0
        self.idle_since_s: float | None = None
        self.is_stepping = False
        self._process = process
        self._engine = engine
        self._inbox = inbox
        self._loop = loop
        self._turn = _NO_TURN
        self._num_steps = 0
        self._turn_started_s = 0.0
        self._longest_turn_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        self._is_woken = False
        self._has_stalled = False

    # --- views ---------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """Whether a turn is under way."""
        return bool(self._turn.end_times_s)

    @property
    def pulse(self) -> int:
        """The progress counter for its parent; see `replicas.watchdog.Watchdog.count`."""
        return 2 * self.num_turns + self.is_working

    @property
    def stuck_s(self) -> float:
        """Seconds by which the present turn exceeds the stall limit; 0 if it does not.

        The limit depends on the turns before, as in a real engine.
        """
        if not self.is_working:
            return 0.0
        allowed_s = max(_FIRST_S, _FACTOR * self._longest_turn_s)
        return max(self._loop.time() - self._turn_started_s - allowed_s, 0.0)

    def thaw(self) -> None:
        """Restart the idle time of an idle core, after a freeze of the process."""
        if self.idle_since_s is not None:
            self.idle_since_s = self._loop.time()

    def finish(self) -> None:
        """Add the present turn's time so far to `busy_s`, at the end of the run."""
        if self.is_working:
            self.busy_s += self._loop.time() - self._turn_started_s

    # --- turns ---------------------------------------------------------------------------------

    def wake(self, gather_s: float = 0.0) -> None:
        """Begin a turn soon, or end the present one after its current step, as messages wait.

        Args:
            gather_s: How long to wait for further messages before the turn begins.
        """
        self.idle_since_s = None
        if self.is_stepping:
            self._is_woken = True
        elif self._turn.end_times_s:
            self._shorten_turn(bisect.bisect_right(self._turn.end_times_s, self._loop.time()) + 1)
        elif not self._is_due:
            self._is_due = True
            if gather_s:
                self._process.call_at(self._loop.time() + gather_s, self._begin)
            else:
                self._loop.call_soon(self._process.do, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        self.idle_since_s = None
        if self.is_working:
            return  # Two reasons for one turn; one of them waited while the process was frozen.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._loop.time()
        for client, message in self._inbox.take():
            if message is None:
                self._engine.client_gone(client)
            else:
                self._engine.handle_message(client, message, now_s)
            if isinstance(message, Abort):
                self._check_dropped(client, message)
        self.is_stepping, self._is_woken = True, False
        turn = self._engine.begin_turn(now_s)
        self.is_stepping = False
        if not turn.end_times_s:
            self._process.send(self._engine.end_turn(turn, 0, now_s), [])
            self._sleep()
            return
        self._turn, self._turn_started_s = turn, now_s
        self._num_steps = len(turn.end_times_s)
        if turn.is_half:
            self._timer = self._process.call_at(turn.end_times_s[-1], self._continue_turn)
            self._schedule_stall_report()
            return
        self._timer = self._process.call_at(turn.end_times_s[-1], self._end)
        self._schedule_stall_report()
        deadline_s = self._engine.next_deadline_s() if self._num_steps > 1 else None
        if deadline_s is not None:
            self._shorten_turn(bisect.bisect_left(turn.end_times_s, deadline_s) + 1)

    def _check_dropped(self, client: bytes, message: Abort) -> None:
        """Check that the engine has dropped what a client has given up."""
        for request_id in message.request_ids:
            left = self._engine.choices(client, request_id)
            kept = [choice for choice in left if choice in (message.choices or left)]
            assert not kept, f"{self._engine!r} continues choices {kept} of {request_id}"

    def _continue_turn(self) -> None:
        """Send the tokens of the forward pass, then start the transfers of the step."""
        self.is_stepping = True
        self._turn, frames = self._engine.continue_turn(self._turn, self._loop.time())
        self.is_stepping = False
        self._process.send(frames, [])
        self._timer = self._process.call_at(self._turn.end_times_s[-1], self._end)
        self._schedule_stall_report()

    def _schedule_stall_report(self) -> None:
        """Schedule the report of a stall if the present turn lasts long enough for one."""
        stalls_s, end_s = self._engine.stalls_at_s(), self._turn.end_times_s[-1]
        if stalls_s is None or self._num_steps > 1 or self._has_stalled:
            return
        if stalls_s + HEARTBEAT_S < end_s:
            self._process.call_at(stalls_s + HEARTBEAT_S, self._report_stall, self.num_turns)

    def _report_stall(self, turn: int) -> None:
        """Report the stall with every heartbeat until the turn ends."""
        if turn == self.num_turns and self._turn.end_times_s:
            self._has_stalled = True
            self._process.send_heartbeat()
            self._process.call_at(self._loop.time() + HEARTBEAT_S, self._report_stall, turn)

    def _shorten_turn(self, num_steps: int) -> None:
        """End the present turn after `num_steps` steps, if it has more."""
        if num_steps >= self._num_steps:
            return
        assert self._timer is not None
        self._timer.cancel()
        self._num_steps = num_steps
        self._timer = self._process.call_at(self._turn.end_times_s[num_steps - 1], self._end)

    def _end(self) -> None:
        turn, num_steps = self._turn, self._num_steps
        self._turn, self._timer = _NO_TURN, None
        now_s = self._loop.time()
        self.busy_s += now_s - self._turn_started_s
        self._longest_turn_s = max(self._longest_turn_s, now_s - self._turn_started_s)
        self.num_turns += num_steps
        frames = self._engine.end_turn(turn, num_steps, now_s)
        self._process.send(frames, turn.end_times_s[:num_steps] if num_steps > 1 else [])
        if self._has_stalled:
            self._has_stalled = False
            self._process.send_heartbeat()
        self._begin()

    def _sleep(self) -> None:
        """Wait for a message or the engine's next deadline."""
        if len(self._inbox) or self._is_woken:
            self.wake()
            return
        self.idle_since_s = self._loop.time()
        deadline_s = self._engine.next_deadline_s()
        if deadline_s is not None:
            self._timer = self._process.call_at(max(deadline_s, self._loop.time()), self._begin)
