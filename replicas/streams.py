"""Streams of one client: the map from (engine, request) to reader, and frame delivery.

Owner: the client's event loop. Has no sockets and no clock: the asynchronous client and the
simulator deliver frames through it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from replicas.columns import ColumnReader
from replicas.errors import (
    EngineDeadError,
    EngineLateError,
    EngineLeavingError,
    EngineQuietError,
    EngineStalledError,
)
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Hello,
    NotGreeted,
    Refused,
    UtilityResult,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.messages import (
        AbortReason,
        ClientMessage,
        EngineDescription,
        EngineEvent,
        EngineFrame,
        EngineSnapshot,
        KVEventBatch,
        KVLoaded,
        TokenOutput,
    )

    OnKVEvents = Callable[[str, list[KVEventBatch]], bool]

Passing = EngineLateError | EngineLeavingError | EngineQuietError | EngineStalledError
"""Notices about its engine after which a stream continues."""
News = EngineDeadError | Passing
"""Notices about its engine on a stream; `EngineDeadError` is always the last event."""
Inbox = asyncio.Queue["tuple[EngineStream, EngineEvent | News]"]
"""Queue of a request's events, each with the stream that it came from."""


class EngineStream:
    """Events of one request on one engine, in order.

    Owner: the coroutine that opened it; it must `close` it.

    Attributes:
        is_answered: Whether the engine has accepted or refused the request. Earlier events belong
            to a closed stream of the same request id.
    """

    def __init__(self, table: StreamTable, request_id: str, inbox: Inbox | None = None) -> None:
        self._table = table
        self.request_id = request_id
        self.is_answered = False
        self._inbox: Inbox = asyncio.Queue() if inbox is None else inbox

    @property
    def incarnation(self) -> str:
        """The engine's incarnation."""
        return self._table.description.incarnation

    async def get(self) -> EngineEvent:
        """Wait for the next event, skipping notices: callers with a single engine cannot move.

        Raises:
            EngineDeadError: The engine is gone; no further event will come.
        """
        while True:
            _, event = await self._inbox.get()
            if isinstance(event, EngineDeadError):
                self.put(event)
                raise event
            if not isinstance(event, Passing):
                return event

    @property
    def stalled(self) -> EngineStalledError | None:
        """Reason why the engine stalls, while it does."""
        return self._table.stalled

    @property
    def leaving(self) -> EngineLeavingError | None:
        """Notice that the engine hands over its requests, while it does."""
        return self._table.leaving

    @property
    def quiet(self) -> EngineQuietError | None:
        """Notice that the engine is silent, while it is."""
        return self._table.quiet

    @property
    def still(self) -> EngineStalledError | EngineQuietError | None:
        """Reason why the engine makes no progress now (stalled or quiet), or None."""
        return self._table.stalled or self._table.quiet

    @property
    def away(self) -> EngineLeavingError | EngineStalledError | None:
        """Reason to move the request to another engine, if one has room; or None."""
        return self._table.leaving or self._table.stalled

    def close(self, *, abort: bool, reason: AbortReason = "abort") -> None:
        """Stop listening; with `abort`, the engine drops the request: see `Abort`. Idempotent."""
        if self._table.remove(self.request_id) and abort:
            self._table.send(Abort([self.request_id], reason))

    def stop_choice(self, choice: int) -> None:
        """Let the engine drop one choice, which a stop string has ended; the others continue."""
        self._table.stop_choice(self.request_id, choice)

    def put(self, event: EngineEvent | News) -> None:
        """Append an event; called by the table and by the reader's own deadlines."""
        self._inbox.put_nowait((self, event))


class StreamTable:
    """Table of one engine's open streams and utility calls, and of its progress.

    The engine is *stalled* while its heartbeats report a step that takes too long, *quiet* while no
    frame arrives, and *moving* while neither holds.

    Args:
        description: The engine.
        send: Sends the engine a message; the message is dropped if the engine is lost.
        on_snapshot: Called with (incarnation, snapshot) in the order in which the engine took them.
        on_moves: Called with (incarnation, whether the engine moves) when that changes.
        on_kv_events: Called with (incarnation, batches); returns whether it needs a full listing.
            None: the client does not follow the engine's prefix caches.

    Attributes:
        stalled: Reason why the engine stalls, while it does.
        leaving: Notice that the engine hands over its requests, while it does.
        quiet: Notice that the engine is quiet, while it is.
    """

    def __init__(
        self,
        description: EngineDescription,
        send: Callable[[ClientMessage], None],
        on_snapshot: Callable[[str, EngineSnapshot], None],
        on_moves: Callable[[str, bool], None],
        on_kv_events: OnKVEvents | None = None,
    ) -> None:
        self.description = description
        self.send = send
        self._on_snapshot = on_snapshot
        self._on_moves = on_moves
        self._on_kv_events = on_kv_events
        self._moves = True
        self.stalled: EngineStalledError | None = None
        self.leaving: EngineLeavingError | None = None
        self.quiet: EngineQuietError | None = None
        self._streams: dict[str, EngineStream] = {}
        # request id -> streams closed before the engine answered. Answers come in order, so the
        # next so many answers for this id belong to those closed streams.
        self._unanswered: dict[str, int] = {}
        self._columns = ColumnReader()
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str, message: ClientMessage, inbox: Inbox | None) -> EngineStream:
        """Send the message that starts a request and return its stream."""
        assert request_id not in self._streams, (
            f"{request_id} is open on {self.description.incarnation}"
        )
        self.send(message)
        stream = self._streams[request_id] = EngineStream(self, request_id, inbox)
        if self.stalled is not None:
            stream.put(self.stalled)
        return stream

    def remove(self, request_id: str) -> bool:
        """Remove the stream of a request; return False if there was none."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self._columns.drop_request(request_id)
        if not stream.is_answered:
            self._unanswered[request_id] = self._unanswered.get(request_id, 0) + 1
        return True

    def stop_choice(self, request_id: str, choice: int) -> None:
        """Let the engine drop one choice of an open stream, and skip its further rows."""
        self._columns.drop_choice(request_id, choice)
        self.send(Abort([request_id], "stop", [choice]))

    def expect(self, call_id: int) -> asyncio.Future[UtilityResult]:
        """Return a future for the result of a utility call; the caller must `drop_call` it."""
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        return future

    def drop_call(self, call_id: int) -> None:
        """Drop a utility call."""
        self._calls.pop(call_id, None)

    def deliver(self, frames: Sequence[EngineFrame]) -> bool:
        """Deliver all events of some frames in order, with tokens of one request merged.

        Returns:
            False if the engine does not know this client, or no longer does.
        """
        return self.hand_out(frames, self.read(frames))

    def read(self, frames: Sequence[EngineFrame]) -> list[EngineEvent]:
        """Return the events of some frames, rows expanded: the first half of `deliver`."""
        return self._columns.read([event for frame in frames for event in frame.events])

    def hand_out(self, frames: Sequence[EngineFrame], events: list[EngineEvent]) -> bool:
        """Do the other half of `deliver`. Snapshots go first, as they include the events."""
        for frame in frames:
            self.quiet = None
            self._note_stall(frame.stalled_s)
            if frame.kv_events:
                self._take_kv_events(frame)
            if frame.snapshot is not None:
                self._on_snapshot(frame.incarnation, frame.snapshot)
                self._note_leaving(frame.snapshot)
        for event in events:
            if isinstance(event, UtilityResult):
                future = self._calls.get(event.call_id)
                if future is not None and not future.done():
                    future.set_result(event)
            elif isinstance(event, NotGreeted):
                return False
            else:
                self._hand_out(event)
        return True

    def _hand_out(self, event: Accepted | Refused | KVLoaded | TokenOutput) -> None:
        """Give an event to its own stream, not to a later one of the same request id.

        A request may return to an engine that has not yet answered its earlier, closed stream.
        """
        request_id = event.request_id
        stream = self._streams.get(request_id)
        if isinstance(event, Accepted | Refused):
            num_unanswered = self._unanswered.pop(request_id, 0)
            if num_unanswered > 1:
                self._unanswered[request_id] = num_unanswered - 1
            if num_unanswered:
                if isinstance(event, Accepted):
                    self._columns.drop_acceptance(event)
                return
            if stream is not None:
                stream.is_answered = True
        if stream is None:
            # The stream was closed: drop the state that its rows would need.
            self._columns.drop_request(request_id)
        elif stream.is_answered:
            stream.put(event)

    def greet(self) -> None:
        """Say hello, for the first time or because something was missed."""
        self.send(Hello(PROTOCOL_VERSION, self._on_kv_events is not None))

    def mark_quiet(self) -> None:
        """Mark the engine as quiet, so that it gets no new requests; notify each stream once."""
        self._set_moves(False)
        if self.quiet is None:
            self.quiet = EngineQuietError(f"engine {self.description.incarnation} is quiet")
            for stream in self._streams.values():
                stream.put(self.quiet)

    def _take_kv_events(self, frame: EngineFrame) -> None:
        """Pass on prefix-cache events; request a listing if the follower needs one."""
        take = self._on_kv_events
        if take is not None and take(frame.incarnation, frame.kv_events):
            self.greet()

    def _note_stall(self, stalled_s: float) -> None:
        """Notify every stream once when the engine begins to stall."""
        if not stalled_s:
            self.stalled = None
        elif self.stalled is None:
            self.stalled = EngineStalledError(
                f"engine {self.description.incarnation} has been in one step for {stalled_s:.1f} s"
            )
            for stream in self._streams.values():
                stream.put(self.stalled)
        self._set_moves(self.stalled is None)

    def _note_leaving(self, snapshot: EngineSnapshot) -> None:
        """Notify every stream once when the engine is about to stop or change its role."""
        if not snapshot.hands_over:
            self.leaving = None
        elif self.leaving is None:
            self.leaving = EngineLeavingError(
                f"engine {self.description.incarnation} is handing over its requests"
            )
            for stream in self._streams.values():
                stream.put(self.leaving)

    def _set_moves(self, moves: bool) -> None:
        if moves != self._moves:
            self._moves = moves
            self._on_moves(self.description.incarnation, moves)

    def fail(self, reason: str) -> None:
        """End every open stream and call with `EngineDeadError`."""
        error = EngineDeadError(f"engine {self.description.incarnation} is gone: {reason}")
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
