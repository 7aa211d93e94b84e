"""The responses of all ingresses: this one's store, what runs in its background, and the others'.

A response is at the ingress that made it. A request about it may come to any ingress, which asks
the others if it does not have the response itself. A lost ingress loses its responses.

Serve no longer passes questions to an ingress that ends. So it hands all its responses over at
once: finished ones as they are, and those that run in its background with their output so far,
from which the other ingress continues.

Owner: a `ResponseArchive` owns the store and the background of one ingress.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import orjson

from cluster.edge.fields import shown
from cluster.edge.openai import FollowedResponse
from cluster.edge.peers import NoPeers
from cluster.edge.responses.background import BackgroundResponse
from cluster.edge.responses.events import RUNNING, EndedResponse, Progress, ReplayedEvents
from cluster.edge.responses.moves import HAND_OVERS, HandOver
from cluster.edge.responses.recording import decode_parts, pages, parts_of_items
from cluster.edge.responses.store import ResponseStore
from cluster.errors import NotFoundError, SaturatedError, ServingError, TokensDifferError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.edge.openai import BackgroundWork
    from cluster.edge.peers import Peers
    from cluster.edge.responses.answers import ResponseBuilder
    from cluster.edge.responses.moves import MovedRequest

logger = logging.getLogger(__name__)

Action = Literal["read", "conversation", "delete", "cancel", "follow"]

QUESTION = "responses"
HAND_OVER = "hand_over"
"""Names of this module's questions to the other ingresses."""
_TAKEN = b"taken"
_HAND_OVER_BYTES = 2**20
"""Bytes of responses that are handed over together, about."""
_HAND_OVER_TIMEOUT_S = 10.0
_RESPONSE_ID = re.compile("resp_[0-9a-f]{32}")
_TIMEOUT_S = 2.0
WITHOUT_CONVERSATION = "that is stored without its conversation, which was too large for the store"
_MAX_ASKING = 4
"""Most questions at a time: each takes a thread that other questions need, too."""
_MAX_POLLING = 2
"""Most of these questions that are about responses which streams follow."""
_MAX_WAITING = 64
_POLL_S = 0.25
"""Time between two questions about a response that runs at another ingress."""
_MAX_MISSES = 20
"""Questions in a row without an answer after which such a response counts as lost."""
_PARTS_AT_ONCE = 64
"""Most parts of an output whose events are made before other requests run."""
_LONG_BYTES = 4096
"""Longer recordings are replayed in turns with those of other streams."""


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """A question about one response.

    Attributes:
        action: What to do with the response: "read" it, also with its "conversation", "delete" it,
            "cancel" it if it runs, or "follow" it: read it with the recording of its output.
        tenant: The tenant that asks.
        response_id: The response.
        begin: First byte of the recording to return.
    """

    action: Action
    tenant: str
    response_id: str
    begin: int = 0


class FoundResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response.

    Attributes:
        body: The response as JSON; without its output if it is followed and runs, and only its
            status if `begin` is not 0.
        turns: The conversation up to and with it, see `StoredResponse`; empty if it was not asked
            for.
        recording: What follows in the recording of its output, see `StoredResponse`.
    """

    body: bytes
    turns: tuple[bytes, ...] = ()
    recording: bytes = b""


_LOOKUPS = msgspec.msgpack.Decoder(Lookup)
_FOUND = msgspec.msgpack.Decoder(FoundResponse)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a response comes from.

    Attributes:
        tenant: Its tenant.
        response_id: Its id.
        items: Its own input.
        previous: Encoded items of the conversation before that, one entry per response.
    """

    tenant: str
    response_id: str
    items: list[dict[str, Any]] = field(default_factory=list)
    previous: tuple[bytes, ...] = ()

    def turns(self, response: dict[str, Any]) -> tuple[bytes, ...]:
        """Return the conversation up to and with the response."""
        return (*self.previous, orjson.dumps([*self.items, *response["output"]]))


class _Running(NamedTuple):
    """A response in the background.

    Attributes:
        origin: Where it comes from.
        response: The response.
        moved: See `ResponseArchive.start`.
    """

    origin: Origin
    response: BackgroundResponse
    moved: Callable[[BackgroundResponse], MovedRequest]


class ResponseArchive:
    """Finds and keeps responses.

    Args:
        store: This ingress's finished responses.
        peers: All ingresses.
    """

    def __init__(self, store: ResponseStore, peers: Peers | None = None) -> None:
        self._store = store
        self._peers = peers or NoPeers()
        self._running: dict[tuple[str, str], _Running] = {}
        self._asking = asyncio.Semaphore(_MAX_ASKING)
        self._polling = asyncio.Semaphore(_MAX_POLLING)
        self._replaying = asyncio.Lock()
        self._num_waiting = 0
        self._taking_over = asyncio.Lock()
        self._is_leaving = False
        self._continue: Callable[[MovedRequest], Awaitable[None]] | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether no response is here."""
        return not self._running and not len(self._store)

    @property
    def is_on(self) -> bool:
        """Return whether responses are kept at all."""
        return self._store.is_on

    @property
    def max_text_bytes(self) -> int:
        """Return the most bytes of a response and its conversation that are kept."""
        return self._store.max_text_bytes

    def keep(self, origin: Origin, response: dict[str, Any], recording: bytes = b"") -> bool:
        """Store a finished response; return whether it fits into the store.

        Args:
            origin: Where it comes from.
            response: The response.
            recording: Recording of its output, see `StoredResponse`.
        """
        turns, body = origin.turns(response), orjson.dumps(response)
        return self._store.put(origin.tenant, origin.response_id, body, turns, recording)

    def start(
        self,
        origin: Origin,
        builder: ResponseBuilder,
        work: BackgroundWork,
        moved: Callable[[BackgroundResponse], MovedRequest],
    ) -> dict[str, Any]:
        """Start a response in the background, which is stored when it ends; return its body.

        Args:
            origin: Where it comes from.
            builder: Builds it.
            work: Runs its request.
            moved: Returns what another ingress continues it with.
        """
        response = BackgroundResponse(builder, work, partial(self._end, origin, builder))
        self._running[origin.tenant, origin.response_id] = _Running(origin, response, moved)
        return response.body()

    def continue_with(self, start: Callable[[MovedRequest], Awaitable[None]]) -> None:
        """Set what continues the response of another ingress; it raises ServingError if it cannot.

        Until then this ingress takes over only finished responses.
        """
        self._continue = start

    async def hand_over(self) -> bool:
        """Hand responses over to another ingress, and take over none from now on.

        Returns:
            Whether all went that were here.
        """
        self._is_leaving = True
        while len(self._store):
            responses = self._store.oldest(_HAND_OVER_BYTES)
            if not await self._offer(HandOver(responses)):
                return False
            for response in responses:
                self._store.delete(response.tenant, response.response_id)
        for key, running in list(self._running.items()):
            if key not in self._running:
                continue  # It ended during the offer of another one; the next call moves it.
            request = running.moved(running.response)
            # The other ingress continues from here, and records the rest in pieces of its own.
            running.response.show_up_to(len(request.recording))
            if not await self._offer(HandOver(requests=[request])):
                running.response.show_up_to(None)
                return False
            if key in self._running:
                # First, so that streams of it look for it at the other ingress from now on.
                del self._running[key]
                await running.response.abandon()
        return self.is_empty

    async def take_over(self, payload: bytes) -> bytes:
        """Take over responses of an ingress that ends; return what tells it so, else nothing."""
        if self._is_leaving or not self.is_on:
            return b""
        offered = HAND_OVERS.decode(payload)
        async with self._taking_over:
            for request in offered.requests:
                if not await self._take_over_running(request):
                    return b""
            for response in offered.responses:
                # One that ended during its own offer runs here as well: the finished one is right.
                running = self._running.pop((response.tenant, response.response_id), None)
                if running is not None:
                    await running.response.abandon()
            self._store.adopt(offered.responses)
        return _TAKEN

    async def _take_over_running(self, request: MovedRequest) -> bool:
        """Continue a response of another ingress; return whether it is here."""
        key = (request.tenant.name, request.response_id)
        if key in self._running or self._store.get(*key) is not None:
            return True  # Offered again, because the answer to the first offer came too late.
        if self._continue is None:
            return False
        try:
            await self._continue(request)
        except ServingError as error:
            logger.warning("cannot continue %s here: %s", request.response_id, error)
            return False
        return True

    async def _offer(self, offered: HandOver) -> bool:
        payload = msgspec.msgpack.encode(offered)
        return await self._peers.ask_one(HAND_OVER, payload, _HAND_OVER_TIMEOUT_S) == _TAKEN

    def events(self, tenant: str, response_id: str, after: int = -1) -> FollowedResponse:
        """Return the events of a tenant's response, which is replayed, and followed if it runs.

        Args:
            tenant: The tenant.
            response_id: The response.
            after: Number of the last event that the client has; -1 for none.
        """
        run = partial(self._follow, tenant, response_id)
        return FollowedResponse(run, ReplayedEvents(response_id, after))

    async def _follow(
        self,
        tenant: str,
        response_id: str,
        emit: Callable[[Progress], Awaitable[None]],
    ) -> EndedResponse:
        """Emit the progress of a response, wherever it runs; return it when it has ended.

        Raises:
            NotFoundError: No ingress has it, or no longer.
        """
        begin, num_misses = 0, 0
        response: dict[str, Any] = {}
        while True:
            found = await self._look_again(tenant, response_id, begin)
            if found is None:
                num_misses += 1
                if not response or num_misses > _MAX_MISSES:
                    raise NotFoundError(missing_response(response_id), param="response_id")
                await asyncio.sleep(_POLL_S)
                continue
            num_misses = 0
            fields = {k: memoryview(raw) for k, raw in _FIELDS.decode(found.body).items()}
            output = fields.get("output")
            response |= {k: [] if k == "output" else orjson.loads(v) for k, v in fields.items()}
            for page in pages(found.recording, _PARTS_AT_ONCE):
                if len(found.recording) > _LONG_BYTES:
                    # One page of all streams in a turn of the event loop. Not held while a client
                    # is sent to, which may be slow.
                    async with self._replaying:
                        await asyncio.sleep(0)
                try:
                    parts = decode_parts(page)
                except msgspec.DecodeError as error:
                    raise TokensDifferError(
                        "another ingress has begun this response again: read its events from the "
                        "first one"
                    ) from error
                await emit(Progress(response, parts))
            has_ended = response["status"] not in RUNNING
            is_recorded = begin > 0 or bool(found.recording)
            parts = []
            if has_ended and not is_recorded and output is not None:
                parts = parts_of_items(orjson.loads(output))
            await emit(Progress(response, parts))
            if has_ended:
                return EndedResponse(response, found.body)
            begin += len(found.recording)
            running = self._running.get((tenant, response_id))
            if running is None:
                await asyncio.sleep(_POLL_S)
            else:
                await running.response.wait_for_more(begin)

    async def _look_again(self, tenant: str, response_id: str, begin: int) -> FoundResponse | None:
        """Look for more of a response; streams leave room for other questions."""
        found = await self._find_here(Lookup("follow", tenant, response_id, begin))
        if found is not None:
            return found
        async with self._polling:
            return await self.find("follow", tenant, response_id, begin)

    async def find(
        self, action: Action, tenant: str, response_id: str, begin: int = 0
    ) -> FoundResponse | None:
        """Act on a tenant's response at the ingress that has it.

        Args:
            action: What to do, see `Lookup`.
            tenant: The tenant that asks.
            response_id: The response.
            begin: First byte of a recording to return.

        Returns:
            The response as it was before a deletion, or after a cancellation; None if no ingress
            that answers has it.

        Raises:
            SaturatedError: Too many questions wait for the other ingresses.
        """
        lookup = Lookup(action, tenant, response_id, begin)
        found = await self._find_here(lookup)
        if found is not None or not _RESPONSE_ID.fullmatch(response_id):
            return found
        if self._num_waiting >= _MAX_WAITING:
            raise SaturatedError("too many responses are being looked up; try again in a moment")
        self._num_waiting += 1
        try:
            async with self._asking:
                payload = msgspec.msgpack.encode(lookup)
                answers = await self._peers.ask_all(QUESTION, payload, _TIMEOUT_S)
        finally:
            self._num_waiting -= 1
        return next((_FOUND.decode(answer) for answer in answers if answer), None)

    async def answer(self, payload: bytes) -> bytes:
        """Answer another ingress's question, or this one's own; empty if it is not here."""
        found = await self._find_here(_LOOKUPS.decode(payload))
        return b"" if found is None else msgspec.msgpack.encode(found)

    async def close(self) -> None:
        """Cancel all responses in the background."""
        await asyncio.gather(*(running.response.cancel() for running in self._running.values()))

    async def _find_here(self, lookup: Lookup) -> FoundResponse | None:
        key = (lookup.tenant, lookup.response_id)
        if key in self._running:
            origin, response, _ = self._running[key]
            if lookup.action == "follow":
                # A stream that has some of the recording has the rest of the body.
                head = response.head() if lookup.begin == 0 else {"status": response.status}
                recording = response.recording(lookup.begin)
                return FoundResponse(orjson.dumps(head), (), recording)
            if lookup.action in {"read", "conversation"}:
                body = response.body()
                turns = origin.turns(body) if lookup.action == "conversation" else ()
                return FoundResponse(orjson.dumps(body), turns)
            await response.cancel()
        stored = self._store.get(*key)
        if stored is None:
            return None
        if lookup.action == "delete":
            self._store.delete(*key)
        if lookup.action == "follow":
            return FoundResponse(stored.body, (), stored.recording[lookup.begin :])
        turns = stored.turns if lookup.action == "conversation" else ()
        return FoundResponse(stored.body, turns)

    def _end(self, origin: Origin, builder: ResponseBuilder, response: dict[str, Any]) -> None:
        del self._running[origin.tenant, origin.response_id]
        recording = bytes(builder.recording)
        if self.keep(origin, response, recording):
            return
        # Without its conversation it can be read, and its stream followed.
        key, body = (origin.tenant, origin.response_id), orjson.dumps(response)
        if not self._store.put(*key, body, (), recording):
            text = "the answer is larger than this server's store of responses"
            error = {"code": "response_too_large", "message": f"{text}; leave background out"}
            failed = {**response, "status": "failed", "output": [], "error": error}
            failed |= {"incomplete_details": None, "completed_at": None}
            self.keep(replace(origin, previous=(), items=[]), failed)


def response_archive(
    max_bytes: int, max_age_s: float, peers: Peers | None = None
) -> ResponseArchive:
    """Return the archive of an ingress; see `args.ingress.response_store_bytes`."""
    return ResponseArchive(ResponseStore(max_bytes, max_age_s, time.monotonic), peers)


def missing_response(response_id: str) -> str:
    """Return the message about a response that is not stored."""
    return f"no response {shown(response_id)} is stored: it never was, or its time is over"
