"""One start of one replica in the simulator: an engine process and its faults.

Owns the engine, its incoming messages and the state of its faults. `VirtualCore` stands for the
process's core thread; this module stands for its other threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.lab.simulation.core import VirtualCore
from cluster.lab.simulation.inbox import VirtualInbox
from cluster.lab.simulation.loop import UNIX_S
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.messages import Data
from kv_transfer.transports.virtual import VirtualTransport
from replicas.simulation.virtual_engine import VirtualEngine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cluster.lab.simulation.network import Network
    from kv_transfer.connector import ConnectorSettings, KVMemory
    from kv_transfer.messages import ToConsumer, ToProducer
    from replicas.config import EngineConfig, Role
    from replicas.engine_process.server import Frames
    from replicas.faults import ReplicaFaults
    from replicas.messages import ClientMessage, EngineFrame
    from replicas.simulation.virtual_engine import VirtualDevice


class VirtualHost:
    """The engine process of one start of a replica.

    Args:
        name: Pool and rank, as in a fault plan; a restarted replica has the same name.
        incarnation: Id of this start.
        faults: The replica's faults, in virtual seconds.

    Attributes:
        inbox: Messages that wait for the core.
        links: By client id, the function that sends a frame and its step times to the client.
        transport: The transport of its KV connector, if it has one.
        kv_endpoint: The endpoint from which its KV is fetched.
        core: Its core thread.
        slot_busy_s: Seconds of occupied slots, summed over the slots.
        stopped_s: Time of its death, or None.
        is_frozen: Whether the process is frozen.
        num_done: Number of callbacks that have run in it.
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
        self.config = config
        self.inbox = VirtualInbox()
        self.links: dict[bytes, Callable[[EngineFrame, list[float]], None]] = {}
        self.transport: VirtualTransport | None = None
        self.slot_busy_s = 0.0
        self.stopped_s: float | None = None
        self.is_frozen = False
        self.num_done = 0
        self._network = network
        self._loop = network.loop
        self.started_s = self._loop.time()
        self._faults = faults
        self._row_bytes = device.timing.bytes_per_token * ROW_TOKENS
        self._held: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._num_busy_slots = 0
        self._slots_since_s = self.started_s
        self.engine = VirtualEngine(
            config, device, incarnation, self._make_transport, self._wake, self._unix_now_s
        )
        self.core = VirtualCore(self, self.engine, self.inbox, self._loop)
        endpoints = self.engine.description.kv_endpoints
        self.kv_endpoint = endpoints[0] if endpoints else f"none://{incarnation}"

    def __repr__(self) -> str:
        state = "dead" if self.stopped_s is not None else "frozen" if self.is_frozen else "up"
        return (
            f"VirtualHost({self.incarnation}, {state}, {len(self.inbox)} waiting, {self.engine!r})"
        )

    # --- life ----------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether its process exists."""
        return self.stopped_s is None

    @property
    def is_answering(self) -> bool:
        """Whether its process exists, runs, and hears and is heard by clients now."""
        return self.is_alive and not self.is_frozen and not self.is_deaf and not self.is_mute

    @property
    def is_cut(self) -> bool:
        """Whether a partition drops all of its messages now."""
        return self._faults.is_partitioned(self._loop.time())

    @property
    def is_deaf(self) -> bool:
        """Whether clients' messages do not reach it now."""
        return self._faults.is_deaf(self._loop.time())

    @property
    def is_mute(self) -> bool:
        """Whether its messages do not reach clients now."""
        return self._faults.is_mute(self._loop.time())

    @property
    def ignores_sigterm(self) -> bool:
        """Whether a request to end has no effect now."""
        return self.is_frozen or self._faults.ignores_sigterm(self._loop.time())

    def _unix_now_s(self) -> float:
        """Return the wall clock's time, with the error that the fault plan sets."""
        return UNIX_S + self._loop.time() + self._faults.clock_shift_s(self._loop.time())

    def drain(self) -> None:
        """Stop taking requests; called by its parent."""
        self.engine.drain()
        self.core.wake()

    def change_role(self, role: Role) -> None:
        """Change the role once the old one has ended; called by its parent."""
        self.engine.change_role(role)
        self.core.wake()

    def hand_over(self) -> None:
        """Ask clients to migrate their streams; called by its parent."""
        self.engine.hand_over()
        self.core.wake()

    def kill(self) -> None:
        """End the process at once; its pending callbacks never run."""
        self._count_slots(0)
        self.stopped_s = self._loop.time()

    def freeze(self) -> None:
        """Freeze the process: its callbacks wait until it thaws."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Thaw the process and run the callbacks that waited, in order."""
        self.is_frozen = False
        self.core.thaw()
        held, self._held = self._held, []
        for callback, args in held:
            self._loop.call_soon(self.do, callback, *args)

    def corrupts(self) -> bool:
        """Return whether KV that it sends now is corrupted on the way."""
        return self._faults.corrupts(self._loop.time())

    def call_at(
        self, when_s: float, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Run a callback in this process at a time: never if dead by then, later if frozen."""
        return self._loop.call_at(when_s, self.do, callback, *args)

    def do(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in this process now: never if it is dead, later if it is frozen."""
        if self.stopped_s is not None:
            return
        if self.is_frozen:
            self._held.append((callback, args))
        else:
            self.num_done += 1
            callback(*args)

    # --- clients -------------------------------------------------------------------------------

    def receive(self, client: bytes, message: ClientMessage) -> None:
        """Receive a client's message."""
        self.do(self._put, client, message)

    def release_backpressure(self) -> None:
        """Let the messages that a full inbox held back come in."""
        self.inbox.release_backpressure()
        self.core.wake()

    def client_gone(self, client: bytes) -> None:
        """Record that the connection to a client is gone."""
        self.do(self._note_gone, client)

    def _put(self, client: bytes, message: ClientMessage) -> None:
        is_backpressured = self._faults.is_backpressured(self._loop.time())
        self.inbox.receive(client, message, is_backpressured=is_backpressured)
        self.core.wake(self.engine.gather_s(message))

    def _note_gone(self, client: bytes) -> None:
        self.links.pop(client, None)
        self.inbox.note_gone(client)
        self.core.wake()

    def send_heartbeat(self) -> None:
        """Send every client a heartbeat. Real engines use a separate thread: the core may hang."""
        frame = self.engine.heartbeat(self._loop.time())
        for send_frame in self.links.values():
            send_frame(frame, [])

    # --- frames --------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.core.wake()

    def send(self, frames: Frames, step_times_s: list[float]) -> None:
        """Send frames; record the clients of undeliverable ones as gone."""
        for client, frame in frames:
            if frame.snapshot is not None:
                groups = frame.snapshot.groups
                self._count_slots(sum(g.num_running + g.num_reserved for g in groups))
            send_frame = self.links.get(client)
            if send_frame is None:
                # The engine's sender finds this too, for example after a late greeting.
                self.inbox.note_gone(client)
            else:
                send_frame(frame, step_times_s)

    # --- KV ------------------------------------------------------------------------------------

    def _make_transport(
        self, settings: ConnectorSettings, memory: KVMemory, notify: Callable[[], None]
    ) -> VirtualTransport:
        self.transport = VirtualTransport(settings, memory, notify, self)
        return self.transport

    def now_s(self) -> float:
        """Return the time as its transport sees it: within a step, the engine's."""
        return self.engine.present_s() if self.core.is_stepping else self._loop.time()

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
        """Check the engine and its transfers; no client may be left that is gone."""
        self.engine.check_invariants()
        # A client that left before its first message was read is found by the next frame to it,
        # at the end of a turn.
        if not len(self.inbox) and not self.core.is_working:
            strangers = [c for c in self.engine.clients if c not in self.links]
            assert not strangers, f"{self!r} still works for clients that are gone: {strangers}"
        if self.transport is not None:
            self.transport.check_invariants()

    @property
    def num_open_transfers(self) -> int:
        """Open KV transfers, as producer or consumer."""
        return self.transport.num_open if self.transport is not None else 0

    def finish(self) -> None:
        """Add the time up to the end of the run to the counters."""
        if self.is_alive:
            self._count_slots(self._num_busy_slots)
            self.core.finish()

    def _count_slots(self, num_busy: int) -> None:
        now_s = self._loop.time()
        self.slot_busy_s += self._num_busy_slots * (now_s - self._slots_since_s)
        self._num_busy_slots, self._slots_since_s = num_busy, now_s
