"""One start of one replica in the simulator: an engine process with a life, a place and troubles.

Owner of its engine, of the messages that wait for it and of what is wrong with it. It does in
virtual time what `replicas.engine.process` does with threads: take what came, step, send.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from kv_transfer.layout import ROW_TOKENS
from kv_transfer.messages import Data
from kv_transfer.transports.virtual import VirtualTransport
from replicas.virtual_engine import Turn, VirtualEngine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cluster.lab.simulation.network import Network
    from kv_transfer.connector import ConnectorSettings, KVDeviceIO
    from kv_transfer.messages import ToConsumer, ToProducer
    from replicas.config import EngineConfig, Role
    from replicas.engine.server import Frames
    from replicas.faults import ReplicaFaults
    from replicas.messages import ClientMessage, EngineFrame
    from replicas.virtual_engine import VirtualDevice

_NO_TURN = Turn([], None)


class VirtualHost:
    """See the module docstring.

    Args:
        name: Pool and rank, as in a fault plan; the next start of the replica has it again.
        incarnation: Id of this start.
        faults: What goes wrong with the replica, in virtual seconds.

    Attributes:
        links: What sends a client a frame and the times of its steps, by the client's id.
        transport: Of its KV connector, if it has one.
        kv_endpoint: Where its KV is fetched from.
        busy_s: Seconds that its device and its core have worked.
        slot_busy_s: Seconds of taken slots, summed over the slots.
        stopped_s: When it died, or None.
        is_frozen: Whether the process stands still.
        is_touched: Whether anything has happened in it; whoever checks it sets it back.
        idle_since_s: Since when it has had nothing to do; None while it has.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: the parts of one replica
        self,
        *,
        name: str,
        role: Role,
        incarnation: str,
        config: EngineConfig,
        device: VirtualDevice,
        faults: ReplicaFaults,
        network: Network,
    ) -> None:
        self.name = name
        self.role: Role = role
        self.incarnation = incarnation
        self.links: dict[bytes, Callable[[EngineFrame, list[float]], None]] = {}
        self.transport: VirtualTransport | None = None
        self.busy_s = 0.0
        self.slot_busy_s = 0.0
        self.num_turns = 0
        self.stopped_s: float | None = None
        self.is_frozen = False
        self.is_touched = False
        self.idle_since_s: float | None = None
        self._network = network
        self._loop = network.loop
        self.started_s = self._loop.time()
        self._faults = faults
        self._row_bytes = device.timing.bytes_per_token * ROW_TOKENS
        self._inbox: list[tuple[bytes, ClientMessage | None]] = []
        self._turn = _NO_TURN
        self._num_steps = 0
        self._turn_started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        self._is_stepping = False
        self._is_woken = False
        self._held: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._num_busy_slots = 0
        self._slots_since_s = self.started_s
        self.engine = VirtualEngine(config, device, incarnation, self._make_transport, self._wake)
        endpoints = self.engine.description.kv_endpoints
        self.kv_endpoint = endpoints[0] if endpoints else f"none://{incarnation}"

    def __repr__(self) -> str:
        state = "dead" if self.stopped_s is not None else "frozen" if self.is_frozen else "up"
        waiting = len(self._inbox)
        return f"VirtualHost({self.incarnation}, {state}, {waiting} waiting, {self.engine!r})"

    # --- life ----------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether its process exists."""
        return self.stopped_s is None

    @property
    def is_answering(self) -> bool:
        """Whether its process exists, runs, and can be reached now."""
        return self.is_alive and not self.is_frozen and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether nothing gets from or to it now."""
        return self._faults.is_partitioned(self._loop.time())

    def kill(self) -> None:
        """End the process at once; nothing that it had to do happens any more."""
        self._count_slots(0)
        self.stopped_s = self._loop.time()

    def freeze(self) -> None:
        """Stop the process: whatever becomes due waits."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Let the process go on; what waited happens now, in order."""
        self.is_frozen = False
        if self.idle_since_s is not None:
            self.idle_since_s = self._loop.time()
        held, self._held = self._held, []
        for callback, args in held:
            self._loop.call_soon(self.do, callback, *args)

    def corrupts(self) -> bool:
        """Whether KV that leaves it now is damaged on its way."""
        return self._faults.corrupts(self._loop.time())

    def call_at(
        self, when_s: float, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Let something happen in this process; never if it is dead by then, later if frozen."""
        return self._loop.call_at(when_s, self.do, callback, *args)

    def do(self, callback: Callable[..., object], *args: object) -> None:
        """Let something happen in this process now; never if it is dead, later if frozen."""
        if self.stopped_s is not None:
            return
        if self.is_frozen:
            self._held.append((callback, args))
        else:
            self.is_touched = True
            callback(*args)

    # --- clients -------------------------------------------------------------------------------

    def receive(self, client: bytes, message: ClientMessage) -> None:
        """A client's message has arrived."""
        self.do(self._put, client, message)

    def client_gone(self, client: bytes) -> None:
        """The process notices that it cannot reach a client any more."""
        self.links.pop(client, None)
        self.do(self._put, client, None)

    def _put(self, client: bytes, message: ClientMessage | None) -> None:
        self._inbox.append((client, message))
        self._wake()

    def beat(self) -> None:
        """Send every client a heartbeat, as threads of its own do in a process: the core may hang.

        In virtual time only those that say something new are sent.
        """
        frame = self.engine.heartbeat(self._loop.time())
        for send_frame in self.links.values():
            send_frame(frame, [])

    # --- turns of the core ----------------------------------------------------------------------

    def _wake(self) -> None:
        """Something has come: begin a turn soon, or end the present one at its next step."""
        self.idle_since_s = None
        if self._is_stepping:
            self._is_woken = True
        elif self._turn.end_times_s:
            self._cut_turn(bisect.bisect_right(self._turn.end_times_s, self._loop.time()) + 1)
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.do, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        self.idle_since_s = None
        if self._turn.end_times_s:
            return  # Two reasons for one turn; one of them waited while the process was frozen.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._loop.time()
        inbox, self._inbox = self._inbox, []
        for client, message in inbox:
            if message is None:
                self.engine.client_gone(client, now_s)
            else:
                self.engine.take(client, message, now_s)
        self._is_stepping, self._is_woken = True, False
        turn = self.engine.begin(now_s)
        self._is_stepping = False
        if not turn.end_times_s:
            self._send(self.engine.end(turn, 0, now_s), [])
            self._sleep()
            return
        self._turn, self._turn_started_s = turn, now_s
        self._num_steps = len(turn.end_times_s)
        if turn.half is not None:
            self._timer = self.call_at(turn.end_times_s[-1], self._go_on)
            return
        self._timer = self.call_at(turn.end_times_s[-1], self._end)
        deadline_s = self.engine.next_deadline_s() if self._num_steps > 1 else None
        if deadline_s is not None:
            self._cut_turn(bisect.bisect_left(turn.end_times_s, deadline_s) + 1)

    def _go_on(self) -> None:
        """The forward pass is over: its tokens leave, transfers next, then the end."""
        self._is_stepping = True
        self._turn, frames = self.engine.go_on(self._turn, self._loop.time())
        self._is_stepping = False
        self._send(frames, [])
        self._timer = self.call_at(self._turn.end_times_s[-1], self._end)

    def _cut_turn(self, num_steps: int) -> None:
        """Let the present turn end after so many steps, if it has more."""
        if num_steps >= self._num_steps:
            return
        assert self._timer is not None
        self._timer.cancel()
        self._num_steps = num_steps
        self._timer = self.call_at(self._turn.end_times_s[num_steps - 1], self._end)

    def _end(self) -> None:
        turn, num_steps = self._turn, self._num_steps
        self._turn, self._timer = _NO_TURN, None
        now_s = self._loop.time()
        self.busy_s += now_s - self._turn_started_s
        self.num_turns += num_steps
        frames = self.engine.end(turn, num_steps, now_s)
        self._send(frames, turn.end_times_s[:num_steps] if num_steps > 1 else [])
        self._begin()

    def _sleep(self) -> None:
        """Nothing to do: until a message, or a deadline."""
        if self._inbox or self._is_woken:
            self._wake()
            return
        self.idle_since_s = self._loop.time()
        deadline_s = self.engine.next_deadline_s()
        if deadline_s is not None:
            self._timer = self.call_at(max(deadline_s, self._loop.time()), self._begin)

    def _send(self, frames: Frames, step_times_s: list[float]) -> None:
        """Send frames; one whose client is gone tells that instead."""
        for client, frame in frames:
            if frame.snapshot is not None:
                groups = frame.snapshot.groups
                self._count_slots(sum(g.num_running + g.num_reserved for g in groups))
            send_frame = self.links.get(client)
            if send_frame is not None:
                send_frame(frame, step_times_s)

    # --- KV ------------------------------------------------------------------------------------

    def _make_transport(
        self, settings: ConnectorSettings, io: KVDeviceIO, notify: Callable[[], None]
    ) -> VirtualTransport:
        self.transport = VirtualTransport(settings, io, notify, self)
        return self.transport

    def now_s(self) -> float:
        """The present, as its transport sees it."""
        return self.engine.present_s() if self._is_stepping else self._loop.time()

    def send_to_producer(self, endpoint: str, message: ToProducer) -> None:
        """See `VirtualWire`."""
        self._network.to_producer(self, endpoint, message)

    def send_to_consumer(
        self, peer: bytes, message: ToConsumer, payload: NDArray[np.uint8] | None
    ) -> None:
        """See `VirtualWire`."""
        num_bytes = message.num_rows * self._row_bytes if isinstance(message, Data) else 0
        self._network.to_consumer(self, peer, message, payload, num_bytes)

    # --- views ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Engine and transfers are whole."""
        self.engine.check_invariants()
        if self.transport is not None:
            self.transport.check_invariants()

    @property
    def num_open_transfers(self) -> int:
        """KV transfers that have not ended, in either role."""
        return self.transport.num_open if self.transport is not None else 0

    def finish(self) -> None:
        """Count to the end of the run."""
        if self.is_alive:
            self._count_slots(self._num_busy_slots)
            if self._turn.end_times_s:
                # Nobody waits for what is left of it: its last client has gone.
                self.busy_s += self._loop.time() - self._turn_started_s

    def _count_slots(self, num_busy: int) -> None:
        now_s = self._loop.time()
        self.slot_busy_s += self._num_busy_slots * (now_s - self._slots_since_s)
        self._num_busy_slots, self._slots_since_s = num_busy, now_s
