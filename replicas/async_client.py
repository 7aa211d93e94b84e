"""Asynchronous client of any number of engine processes, for ingresses and `AsyncLLM`.

Owns the connections and the map from (engine, request) to stream, all on one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kv_transfer.errors import ServerKeyError
from kv_transfer.io_threads import new_context
from replicas.codec import decode_engine_frame, encode
from replicas.dealer import (
    CONNECT_S,
    HELLO_S,
    NO_ROOM,
    NOT_GREETED,
    QUIET_S,
    SILENCE_S,
    connect_dealers,
    too_large,
)
from replicas.errors import EngineDeadError, EngineError, UnreadableMessageError
from replicas.messages import (
    AddRequest,
    EngineFrame,
    EngineMetrics,
    KVTransfers,
    Utility,
    WorkerDescription,
)
from replicas.streams import StreamTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.keys import KeyRing
    from replicas.messages import (
        ClientMessage,
        EngineDescription,
        EngineSnapshot,
        PauseMode,
        UtilityResult,
    )
    from replicas.streams import EngineStream, Inbox, OnKVEvents


_MAX_FRAMES = 64
"""Frames read in one go before other callbacks of the event loop get a turn."""
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class AsyncMPClient:
    """Client of any number of engine processes on one event loop.

    Owner of the connections and of the map from request to stream; all on one loop.

    Args:
        keys: The secrets of the client's deployment; engines of other deployments are refused.
        on_snapshot: Called with (incarnation, snapshot) in the order in which the engine took them.
        on_dead: Called once with (incarnation, reason) when an engine is lost, after its streams
            got `EngineDeadError`.
        on_moves: Called with (incarnation, whether it makes progress) when an engine stalls or
            falls quiet, and when it recovers.
        on_kv_events: See `StreamTable`.
    """

    def __init__(
        self,
        keys: KeyRing,
        on_snapshot: Callable[[str, EngineSnapshot], None] = lambda _incarnation, _snapshot: None,
        on_dead: Callable[[str, str], None] = lambda _incarnation, _reason: None,
        on_moves: Callable[[str, bool], None] = lambda _incarnation, _moves: None,
        on_kv_events: OnKVEvents | None = None,
    ) -> None:
        self._keys = keys
        self._context = new_context()
        self._links: dict[str, _EngineLink] = {}
        self._on_snapshot = on_snapshot
        self._on_dead = on_dead
        self._on_moves = on_moves
        self._on_kv_events = on_kv_events
        self._call_ids = itertools.count(1)

    async def connect(self, description: EngineDescription) -> None:
        """Connect to an engine and wait for its first snapshot; do nothing if connected.

        Raises:
            EngineDeadError: The engine did not answer within `CONNECT_S`, or shares no secret with
                this client.
        """
        if description.incarnation in self._links:
            return
        # A new identity each time: an engine that was lost and found again must see that its old
        # client is gone, or it would keep computing requests whose output no client reads.
        try:
            sockets = connect_dealers(
                self._context, secrets.token_bytes(8), description, self._keys
            )
        except ServerKeyError as error:
            raise EngineDeadError(str(error)) from error
        table = functools.partial(
            StreamTable,
            description,
            on_snapshot=self._on_snapshot,
            on_moves=self._on_moves,
            on_kv_events=self._on_kv_events,
        )
        link = _EngineLink(sockets, description, table, self._lost)
        self._links[description.incarnation] = link
        try:
            await asyncio.wait_for(link.start(), CONNECT_S)
        except BaseException as error:
            self._links.pop(description.incarnation, None)
            link.close()
            if isinstance(error, asyncio.TimeoutError | EngineDeadError):
                raise EngineDeadError(
                    f"engine {description.incarnation} at {description.input_endpoint} did "
                    f"not answer within {CONNECT_S:g} s{link.hint}"
                ) from error
            raise

    @property
    def incarnations(self) -> frozenset[str]:
        """Engines that are connected."""
        return frozenset(self._links)

    def open_stream(
        self,
        incarnation: str,
        request_id: str,
        message: ClientMessage,
        inbox: Inbox | None = None,
    ) -> EngineStream:
        """Send the message that starts a request on an engine and return its event stream.

        Args:
            incarnation: The engine.
            request_id: The request that `message` is about.
            message: What to send.
            inbox: Queue that receives (stream, event), for a request that runs on two engines; None
                creates one that `EngineStream.get` reads.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        return self._link(incarnation).table.open(request_id, message, inbox)

    def send(self, incarnation: str, message: ClientMessage) -> None:
        """Send a message about a request that is open already.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        self._link(incarnation).send(message)

    async def metrics(self, incarnation: str) -> EngineMetrics:
        """Return every counter of an engine.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "metrics"), EngineMetrics)

    async def probe(self, incarnation: str) -> bool:
        """Return once the engine has completed a step; an idle engine runs an empty one.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "probe"), bool)

    async def kv_transfers(self, incarnation: str) -> KVTransfers:
        """Return the KV transfers of an engine that are under way.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "kv_transfers"), KVTransfers)

    async def reset_prefix_cache(
        self, incarnation: str, *, reset_running_requests: bool = False
    ) -> bool:
        """Drop all cached blocks of an engine; see `Scheduler.reset_prefix_cache`.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        answer = await self._call(incarnation, "reset_prefix_cache", reset_running_requests)
        return msgspec.convert(answer, bool)

    async def pause(self, incarnation: str, mode: PauseMode) -> bool:
        """Pause an engine; return True once nothing runs there. See `replicas.engine.pause`.

        Raises:
            EngineError: The engine drains, or the pause was ended meanwhile.
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "pause", mode), bool)

    async def resume(self, incarnation: str) -> bool:
        """End the pause of an engine, if there is one; return True.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "resume"), bool)

    async def is_paused(self, incarnation: str) -> bool:
        """Return whether an engine is paused.

        Raises:
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "is_paused"), bool)

    async def profile(self, incarnation: str, seconds: float) -> str:
        """Profile an engine's core thread; see `replicas.engine_process.profiler`.

        Raises:
            EngineError: It makes another profile, or the time is too long.
            EngineDeadError: The engine is not connected.
        """
        return msgspec.convert(await self._call(incarnation, "profile", seconds), str)

    async def collective_rpc(self, incarnation: str, method: str) -> list[WorkerDescription]:
        """Call a method of every worker; see `replicas.engine.core.WORKER_METHODS`.

        Raises:
            EngineError: It is not one of those that may be called.
            EngineDeadError: The engine is not connected.
        """
        answer = await self._call(incarnation, "collective_rpc", method)
        return msgspec.convert(answer, list[WorkerDescription])

    async def disconnect(self, incarnation: str) -> None:
        """Close the connection to an engine; open streams end with `EngineDeadError`."""
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.table.fail("disconnected")
            link.close()

    async def close(self) -> None:
        """Close every connection."""
        for incarnation in list(self._links):
            await self.disconnect(incarnation)
        # Not `term`: it would block forever on a socket that a failed connect left open.
        self._context.destroy(linger=0)

    def _link(self, incarnation: str) -> _EngineLink:
        link = self._links.get(incarnation)
        if link is None:
            raise EngineDeadError(f"engine {incarnation} is not connected")
        return link

    async def _call(self, incarnation: str, method: str, *args: object) -> object:
        message = Utility(next(self._call_ids), method, [*args])
        result = await self._link(incarnation).call(message)
        if result.error is not None:
            raise EngineError(result.error)
        return result.result

    def _lost(self, link: _EngineLink, reason: str) -> None:
        if self._links.pop(link.description.incarnation, None) is not None:
            link.table.fail(reason)
            self._on_dead(link.description.incarnation, reason)
            link.close()


class _EngineLink:
    """Both sockets of one engine, read by the event loop in batches of frames.

    Attributes:
        hint: Likely reason why the engine does not answer; empty if none is known.
    """

    def __init__(
        self,
        sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
        description: EngineDescription,
        make_table: Callable[[Callable[[ClientMessage], None]], StreamTable],
        on_lost: Callable[[_EngineLink, str], None],
    ) -> None:
        self.description = description
        self.table = make_table(self.send)
        self._on_lost = on_lost
        self.hint = ""
        self._loop = asyncio.get_running_loop()
        self._input, self._output = sockets
        self._monitor = self._input.get_monitor_socket(_LOST_EVENTS)
        self._readers = {
            self._output.fileno(): self._read,
            self._monitor.fileno(): self._watch,
        }
        self._first_frame = asyncio.Event()
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Say hello until the engine answers."""
        for descriptor, reader in self._readers.items():
            self._loop.add_reader(descriptor, reader)
            # ZMQ descriptors are edge-triggered: read once for messages that are already there.
            self._loop.call_soon(reader)
        self._timer = self._loop.call_later(QUIET_S, self._listen)
        while not self._first_frame.is_set():
            self.table.greet()
            try:
                await asyncio.wait_for(self._first_frame.wait(), HELLO_S)
            except asyncio.TimeoutError:
                if self._is_closed:
                    raise EngineDeadError("connection lost") from None

    def send(self, message: ClientMessage) -> None:
        """Queue a message. A full queue counts as a lost engine, whose messages are dropped."""
        if self._is_closed:
            return
        raw = encode(message)
        if isinstance(message, AddRequest):
            refusal = too_large(self.description, message.request.request_id, len(raw))
            if refusal is not None:
                # Deferred like a real answer: the caller has no stream to read it from yet.
                frame = EngineFrame(self.description.incarnation, [refusal])
                self._loop.call_soon(self._take, [frame])
                return
        try:
            self._input.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            # Before the first frame, `start` repeats the hello until the engine answers.
            if self._first_frame.is_set():
                # Deferred, so that the stream that this message starts also gets the error.
                self._loop.call_soon(self._on_lost, self, NO_ROOM)

    async def call(self, message: Utility) -> UtilityResult:
        """Send a utility call and wait for its result.

        Raises:
            EngineDeadError: The engine was lost before it answered.
        """
        future = self.table.expect(message.call_id)
        self.send(message)
        try:
            return await future
        finally:
            self.table.drop_call(message.call_id)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._input.disable_monitor()
        for socket in (self._monitor, self._input, self._output):
            socket.close(linger=0)

    def _read(self) -> None:
        """Read all frames that have arrived, so that a late loop handles them in one round."""
        if self._is_closed:
            return
        frames: list[EngineFrame] = []
        problem = None
        try:
            while len(frames) < _MAX_FRAMES:
                frames.append(decode_engine_frame(self._output.recv(zmq.NOBLOCK)))
            # Edge-triggered: no further wake-up comes for frames that are already queued.
            self._loop.call_soon(self._read)
        except zmq.Again:
            pass
        except UnreadableMessageError as error:
            problem = f"it sent a frame that this version cannot read: {error}"
        try:
            self._take(frames)
        except Exception as error:
            # No caller sees an exception of this callback: drop the link, so that a bug is visible.
            self._on_lost(self, f"handling its frames failed: {error!r}")
            raise
        if problem is not None:
            self._on_lost(self, problem)

    def _listen(self) -> None:
        """Check how long the engine has been silent."""
        # If this loop was held up, frames may be waiting: read them before judging.
        self._read()
        if self._is_closed:
            return
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= SILENCE_S:
            self._on_lost(self, f"it sent nothing for {SILENCE_S:g} s")
            return
        is_quiet = silent_s >= QUIET_S
        if is_quiet:
            self.table.mark_quiet()
        # It may recover before the deadline and fall quiet again.
        quiet_s = (self._loop.time() if is_quiet else self._heard_s) + QUIET_S
        self._timer = self._loop.call_at(min(quiet_s, self._heard_s + SILENCE_S), self._listen)

    def _watch(self) -> None:
        """Drop the link if the socket monitor reports a broken connection."""
        if self._is_closed:
            return
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.hint = (
                ": it rejects this process's first secret; give both the same key_file, and to "
                "rotate keys append the new secret to every key_file before it becomes the first"
            )
        self._on_lost(self, "its connection broke")

    def _take(self, frames: list[EngineFrame]) -> None:
        """Deliver all frames of a batch together: a stream gets one merged output, not many."""
        if not frames or self._is_closed:
            return
        self._heard_s = self._loop.time()
        if any(frame.incarnation != self.description.incarnation for frame in frames):
            self._on_lost(self, "another engine answers at its address")
        elif self.table.deliver(frames):
            self._first_frame.set()
        else:
            self._on_lost(self, NOT_GREETED)
