"""Streams of server-sent events, and work that ends when its client is gone.

Owner: an `EventStream` runs its request and ends it on every path: at the end, on an error, when
the client is gone or its time is over, when the server cancels the request.

An error before the response has begun is raised, so that it can still become a status. An error
after it is one `data: {"error": …}` event, then the stream ends without `data: [DONE]`: a client
that sees `[DONE]` may trust the answer to be whole.

A stream that has nothing to send sends a comment, which clients ignore, so that no load balancer
takes its connection for dead: while a request is queued or prefilled for long, while it moves to
another engine, and while tokens that the client has are computed again. The first comment begins
the response.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from cluster.edge.interrupt import Interrupt
from cluster.edge.openai_responses import error_event
from cluster.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from starlette.types import Receive, Scope, Send

    from cluster.edge.openai import Emit, Usage
    from cluster.edge.openai_responses import ChunkWriter
    from cluster.edge.resume import ResumableChunks
    from cluster.errors import ServingError
    from replicas.output_processor import OutputDelta

    Headers = Iterable[tuple[bytes, bytes]]

T = TypeVar("T")

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the stream
)


_KEEP_ALIVE = b": keep-alive\n\n"


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


class EventStream(Response):
    """A response that sends events as they come, and comments while none does."""

    def __init__(
        self,
        generate: Callable[[Emit], Awaitable[Usage]],
        chunks: ChunkWriter | ResumableChunks,
        to_serving_error: Callable[[Exception, str], ServingError],
        *,
        timeout_s: float | None,
        keep_alive_s: float,
        more_headers: Callable[[], Headers] = tuple,
    ) -> None:
        """Take over a request.

        Args:
            generate: Runs it, once; see `cluster.edge.routes.Backend.generate`.
            chunks: Turns what it emits into the events to send.
            to_serving_error: From an exception and the request's id to what a client may see.
            timeout_s: For all of it, see `run_until_disconnect`.
            keep_alive_s: After so many seconds without an event a comment is sent.
            more_headers: Asked when the response begins.
        """
        super().__init__()
        self._generate = generate
        self._chunks = chunks
        self._to_serving_error = to_serving_error
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._more_headers = more_headers
        self._is_started = False
        self._loop = asyncio.get_running_loop()
        self._is_sending = False
        self._sent_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream; raises ClientGoneError when there is nobody left to read it."""

        async def emit(delta: OutputDelta) -> None:
            chunk = self._chunks.add(delta)
            if chunk:
                await self._send(send, chunk, more=True)

        async def run() -> None:
            await self._send(send, self._chunks.finish(await self._generate(emit)), more=False)

        self._keep_alive(send)
        try:
            await run_until_disconnect(receive, run(), self._timeout_s)
        except ClientGoneError:
            raise
        except Exception as error:
            if self._comment is not None:
                # Then it has begun the response, even if not one byte is sent yet.
                await asyncio.wait({self._comment})
            if not self._is_started:
                raise
            end = error_event(self._to_serving_error(error, scope["request_id"]))
            await run_until_disconnect(receive, self._send(send, end, more=False), None)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()

    def _keep_alive(self, send: Send) -> None:
        """Send a comment if one is due, and look again when the next one may be.

        Why a timer: a task of its own would cost every stream, and hardly any stream is silent.
        """
        due_s = self._sent_s + self._keep_alive_s - self._loop.time()
        if due_s <= 0:
            due_s = self._keep_alive_s
            # What is being sent already waits for its client to read: a comment would wait, too.
            if not self._is_sending and self._comment is None:
                self._comment = self._loop.create_task(self._send_comment(send))
        self._timer = self._loop.call_later(due_s, self._keep_alive, send)

    async def _send_comment(self, send: Send) -> None:
        try:
            # A connection that fails is for the request's own task to notice.
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
    receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float | None
) -> T:
    """Run `work`, but cancel it as soon as the client is gone, wherever it waits.

    Args:
        receive: The request's ASGI channel, its body read to the end.
        work: Closes what it holds when it is cancelled.
        timeout_s: It is cancelled after so many seconds too; None: it may take for ever.

    Raises:
        ClientGoneError: The client was gone before the work was done.
        DeadlineError: The time was over before the work was done.
    """
    with Interrupt() as interrupt:
        watching = asyncio.create_task(_interrupt_on_disconnect(receive, interrupt))
        timer = None
        if timeout_s is not None:
            late = DeadlineError(f"not done within {timeout_s:g} s; ask for fewer tokens")
            timer = asyncio.get_running_loop().call_later(timeout_s, interrupt.trigger, late)
        try:
            return await work
        finally:
            # Not left behind on any path, the caller's own cancellation included.
            watching.cancel()
            if timer is not None:
                timer.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client is gone; the request's body, if there is any left, is passed over."""
    # A channel that fails has no client at its other end either.
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _interrupt_on_disconnect(receive: Receive, interrupt: Interrupt) -> None:
    await wait_for_disconnect(receive)
    interrupt.trigger(ClientGoneError())
