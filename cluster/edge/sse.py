"""Streams of server-sent events, and work that is cancelled when its client disconnects.

Owner: an `EventStream` runs its request and ends it on every path: completion, error, disconnect,
timeout, and cancellation by the server.

An error before the response has begun is raised, so that it can still become a status. An error
after it ends the stream as its writer says.

A stream without events for some time sends a comment, which clients ignore, so that no load
balancer closes the connection. This happens while a request is queued or prefilled for long, while
it migrates to another engine, and while a resumed request recomputes the client's tokens. The
first comment starts the response.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.responses import Response

from cluster.edge.interrupt import Interrupt
from cluster.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from starlette.types import Receive, Scope, Send

    from cluster.edge.departure import Departure
    from cluster.edge.openai import EventWriter
    from cluster.errors import ServingError

    Headers = Iterable[tuple[bytes, bytes]]

T = TypeVar("T")
Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", contravariant=True)

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the stream
)


_KEEP_ALIVE = b": keep-alive\n\n"


class ClientGoneError(Exception):
    """The client closed the connection, so no answer can be sent."""


class EventStream(Response, Generic[Item, Result]):
    """A response that sends events as they come, and keep-alive comments between them."""

    def __init__(  # noqa: PLR0913 - one caller, all named
        self,
        generate: Callable[[Callable[[Item], Awaitable[None]]], Awaitable[Result]],
        writer: EventWriter[Item, Result],
        to_serving_error: Callable[[Exception, str], ServingError],
        *,
        timeout_s: float | None,
        keep_alive_s: float,
        departure: Departure,
        more_headers: Callable[[], Headers] = tuple,
    ) -> None:
        """Create the response of one request.

        Args:
            generate: Runs the request, once, and passes on what it emits; see
                `cluster.edge.backend.Backend.generate`.
            writer: Converts that into events.
            to_serving_error: Maps an exception and the request's id to the error for the client.
            timeout_s: Longest time for the request, see `run_until_disconnect`.
            keep_alive_s: Seconds without an event after which a comment is sent.
            departure: Ends the request when the ingress ends.
            more_headers: Called for further headers when the response starts.
        """
        super().__init__()
        self._generate = generate
        self._writer = writer
        self._to_serving_error = to_serving_error
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._departure = departure
        self._more_headers = more_headers
        self._is_started = False
        self._loop = asyncio.get_running_loop()
        self._is_sending = False
        self._sent_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream; raises ClientGoneError if the client disconnects first."""

        async def emit(item: Item) -> None:
            chunk = self._writer.add(item)
            if chunk:
                await self._send(send, chunk, more=True)

        async def run() -> None:
            await self._send(send, self._writer.finish(await self._generate(emit)), more=False)

        self._keep_alive(send)
        try:
            await run_until_disconnect(receive, run(), self._timeout_s, self._departure)
        except ClientGoneError:
            raise
        except Exception as error:
            if self._comment is not None:
                # A running comment has started the response, even if no byte was sent yet.
                await asyncio.wait({self._comment})
            if not self._is_started:
                raise
            end = self._writer.fail(self._to_serving_error(error, scope["request_id"]))
            await run_until_disconnect(receive, self._send(send, end, more=False), None)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()

    def _keep_alive(self, send: Send) -> None:
        """Send a comment if one is due, and set the timer for the next check.

        A timer is cheaper than a task per stream, and few streams ever need a comment.
        """
        due_s = self._sent_s + self._keep_alive_s - self._loop.time()
        if due_s <= 0:
            due_s = self._keep_alive_s
            # While an event waits for the client to read, a comment would wait, too.
            if not self._is_sending and self._comment is None:
                self._comment = self._loop.create_task(self._send_comment(send))
        self._timer = self._loop.call_later(due_s, self._keep_alive, send)

    async def _send_comment(self, send: Send) -> None:
        try:
            # The request's own task handles a failed connection.
            with contextlib.suppress(Exception):
                await self._write(send, _KEEP_ALIVE, more=True)
        finally:
            self._comment = None

    async def _send(self, send: Send, chunk: bytes, *, more: bool) -> None:
        if self._comment is not None:
            await asyncio.wait({self._comment})
        self._is_sending = True
        try:
            await self._write(send, chunk, more=more)
        finally:
            self._is_sending = False

    async def _write(self, send: Send, chunk: bytes, *, more: bool) -> None:
        if not self._is_started:
            self._is_started = True
            headers = (*_HEADERS, *self._more_headers())
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._sent_s = self._loop.time()


async def run_until_disconnect(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    timeout_s: float | None,
    departure: Departure | None = None,
) -> T:
    """Run `work`, and cancel it when the client disconnects or the time is over.

    Args:
        receive: The request's ASGI `receive`, after the body has been read.
        work: Must release its resources when it is cancelled.
        timeout_s: Longest time for the work; None: no limit.
        departure: Ends the work when the ingress ends; None: nothing does.

    Raises:
        ClientGoneError: The client disconnected before the work was done.
        DeadlineError: The time was over before the work was done.
        IngressLeavingError: The ingress ended before the work was done.
    """
    with Interrupt() as interrupt:
        watching = asyncio.create_task(_interrupt_on_disconnect(receive, interrupt))
        if departure is not None:
            departure.open_requests.add(interrupt)
        try:
            return await _run_in_time(work, timeout_s, interrupt)
        finally:
            if departure is not None:
                departure.open_requests.discard(interrupt)
            # On every path, including the caller's own cancellation.
            watching.cancel()


async def run_in_time(work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """Run `work`, and cancel it when the time is over; see `run_until_disconnect`.

    Raises:
        DeadlineError: The time was over before the work was done.
    """
    with Interrupt() as interrupt:
        return await _run_in_time(work, timeout_s, interrupt)


async def _run_in_time(
    work: Coroutine[Any, Any, T], timeout_s: float | None, interrupt: Interrupt
) -> T:
    timer = None
    if timeout_s is not None:
        late = DeadlineError(
            f"the request was not done within {timeout_s:g} s; ask for fewer tokens"
        )
        timer = asyncio.get_running_loop().call_later(timeout_s, interrupt.trigger, late)
    try:
        return await work
    finally:
        if timer is not None:
            timer.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects; drop the rest of the body, if there is any."""
    # A failed channel counts as a disconnect.
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _interrupt_on_disconnect(receive: Receive, interrupt: Interrupt) -> None:
    await wait_for_disconnect(receive)
    interrupt.trigger(ClientGoneError())
