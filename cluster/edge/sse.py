"""Streams of server-sent events, and work that ends when its client is gone.

Owner: an `EventStream` runs its request in a task of its own and ends it on every path: at the
end, on an error, when the client is gone, when the server cancels the request.

An error before the first chunk is raised, so that it can still become a status. An error after it
is one `data: {"error": …}` event, then the stream ends without `data: [DONE]`: a client that sees
`[DONE]` may trust the answer to be whole.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from cluster.edge.openai_responses import error_event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from starlette.types import Message, Receive, Scope, Send

    from cluster.edge.openai import Emit, Usage
    from cluster.edge.openai_responses import ChunkWriter
    from cluster.errors import ServingError
    from replicas.output_processor import OutputDelta

T = TypeVar("T")

_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy must not collect the stream
    ),
}


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


class EventStream(Response):
    """A response that sends events as they come; nothing is sent before the first one."""

    def __init__(
        self,
        generate: Callable[[Emit], Awaitable[Usage]],
        chunks: ChunkWriter,
        to_serving_error: Callable[[Exception, str], ServingError],
    ) -> None:
        """Take over a request.

        Args:
            generate: Runs it, once; see `cluster.edge.routes.Backend.generate`.
            chunks: Turns what it emits into the events to send.
            to_serving_error: From an exception and the request's id to what a client may see.
        """
        super().__init__()
        self._generate = generate
        self._chunks = chunks
        self._to_serving_error = to_serving_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream; raises ClientGoneError when there is nobody left to read it."""
        await until_disconnect(receive, self._run(scope["request_id"], send))

    async def _run(self, request_id: str, send: Send) -> None:
        is_started = False

        async def emit(delta: OutputDelta) -> None:
            nonlocal is_started
            chunk = self._chunks.add(delta)
            if not chunk:
                return
            if not is_started:
                is_started = True
                await send(_START)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        try:
            end = self._chunks.finish(await self._generate(emit))
        except Exception as error:
            if not is_started:
                raise
            end = error_event(self._to_serving_error(error, request_id))
        if not is_started:
            await send(_START)
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it as soon as the client is gone, wherever it waits.

    Args:
        receive: The request's ASGI channel, its body read to the end.
        work: Closes what it holds when it is cancelled.

    Raises:
        ClientGoneError: The client was gone before the work was done.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        # Not left behind on any path, the caller's own cancellation included.
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
