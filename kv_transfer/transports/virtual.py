"""Transport without sockets and threads, for a simulator that owns time and the network.

Sessions and messages are the real ones. The wire decides what happens to a message on its way
(delay, loss, repetition, reordering, flipped bytes). Everything runs on the simulator's thread.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings, KVMemory
from kv_transfer.messages import ToConsumer, ToProducer
from kv_transfer.sessions import TransferSessions
from kv_transfer.transport import Command, Event, WireCounters


class Cancellable(Protocol):
    """Pending call that can be cancelled."""

    def cancel(self) -> None:
        """Drop the call."""


class VirtualWire(Protocol):
    """Clock and network of one engine, as its transport uses them."""

    def now_s(self) -> float:
        """Return the current time; during an engine's step that is some way into the step."""

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        """Schedule a call, not before ``now_s``; equal times run in the order of scheduling."""

    def send_to_producer(self, endpoint: str, message: ToProducer) -> None:
        """Carry a message to the producer at an endpoint."""

    def send_to_consumer(
        self, peer: bytes, message: ToConsumer, payload: NDArray[np.uint8] | None
    ) -> None:
        """Carry a message back to the consumer on a connection."""


class VirtualTransport:
    """``Transport`` over a ``VirtualWire``.

    Owner: the simulator's thread.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        memory: KVMemory,
        notify: Callable[[], None],
        wire: VirtualWire,
    ) -> None:
        self._counters = WireCounters()
        self._sessions = TransferSessions(settings, memory.layout, self._counters)
        self._notify = notify
        self._wire = wire
        self._endpoints = (f"ipc://virtual/{settings.incarnation}",)
        self._events: list[Event] = []
        self._timer: Cancellable | None = None
        self._timer_s: float | None = None

    # ---- core

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of this producer."""
        return self._endpoints

    @property
    def counters(self) -> WireCounters:
        """Totals of messages."""
        return self._counters

    def submit(self, commands: Sequence[Command]) -> None:
        """Schedule commands for the current time, which may be later than the step's start."""
        waiting = list(commands)
        self._wire.call_at(self._wire.now_s(), lambda: self._apply(waiting))

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def lease_left_s(self, transfer_id: bytes, now_s: float) -> float:
        """Return the seconds until a producer's lease ends unless renewed."""
        return self._sessions.producer.left_s(transfer_id, now_s)

    def close(self, deadline_s: float) -> None:
        """Stop the clock of this transport; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- wire

    def receive_from_consumer(self, peer: bytes, message: ToProducer) -> None:
        """Handle a message that a consumer sent."""
        self._sessions.producer.on_message(peer, message, self._wire.now_s())
        self._flush()

    def receive_from_producer(
        self, endpoint: str, message: ToConsumer, payload: NDArray[np.uint8] | None
    ) -> None:
        """Handle a message that a producer sent."""
        self._sessions.consumer.on_message(endpoint, message, payload, self._wire.now_s())
        self._flush()

    def lose_producer(self, endpoint: str) -> None:
        """Handle the break of the connection to a producer."""
        self._sessions.consumer.on_peer_lost(endpoint)
        self._flush()

    def lose_consumer(self, peer: bytes) -> None:
        """Handle that a consumer cannot be reached."""
        self._sessions.producer.on_peer_lost(peer)
        self._flush()

    @property
    def num_open(self) -> int:
        """Transfers in either role that have not ended, or whose end is not acknowledged."""
        return self._sessions.num_open

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        self._sessions.check_invariants()

    # ---- helpers

    def _apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._sessions.apply(command, self._wire.now_s())
        self._flush()

    def _tick(self) -> None:
        if self._timer is not None:
            # A tick that waited while its process was frozen may find a newer timer.
            self._timer.cancel()
        self._timer = None
        self._sessions.tick(self._wire.now_s())
        self._flush()

    def _flush(self) -> None:
        """Send messages, pass events to the core, and set the timer."""
        for to_consumer in self._sessions.producer.take_sends():
            self._wire.send_to_consumer(*to_consumer)
        for to_producer in self._sessions.consumer.take_sends():
            self._wire.send_to_producer(*to_producer)
        events = self._sessions.take_events()
        if events:
            self._events.extend(events)
            self._notify()
        self._wind()

    def _wind(self) -> None:
        due_s = self._sessions.next_deadline_s()
        if self._timer is not None:
            if due_s == self._timer_s:
                return
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer_s = due_s
            self._timer = self._wire.call_at(max(due_s, self._wire.now_s()), self._tick)
