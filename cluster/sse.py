"""Streams of server-sent events, and work that ends when its client is gone.

Owner: an `EventStream` owns the generator it was given and closes it on every path: at the end,
on an error, when the client is gone, when the server cancels the request.

An error before the first event is raised, so that it can still become a status. An error after it
is one `data: {"error": …}` event, then the stream ends without `data: [DONE]`: a client that sees
`[DONE]` may trust the answer to be whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.responses import Response

from cluster.errors import InternalError
from cluster.openai import Finished
from cluster.openai_responses import error_body

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable

    from starlette.types import Message, Receive, Scope, Send

    from cluster.errors import ServingError
    from cluster.openai import GenerationEvent
    from cluster.openai_responses import ChunkWriter

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the stream
)


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


class EventStream(Response):
    """A response that sends events as they come; nothing is sent before the first one."""

    def __init__(
        self,
        events: AsyncGenerator[GenerationEvent, None],
        chunks: ChunkWriter,
        to_serving_error: Callable[[Exception, str], ServingError],
    ) -> None:
        """Take over a generator.

        Args:
            events: Not started yet.
            chunks: Turns its events into the bodies to send.
            to_serving_error: From an exception and the request's id to what a client may see.
        """
        super().__init__()
        self._events = events
        self._chunks = chunks
        self._to_serving_error = to_serving_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream; raises ClientGoneError when there is nobody left to read it."""
        await until_disconnect(receive, self._run(scope["request_id"], send))

    async def _run(self, request_id: str, send: Send) -> None:
        is_started = False
        last = DONE
        async with contextlib.aclosing(until_finished(self._events)) as events:
            while True:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    if not is_started:
                        raise
                    last = encode_events([error_body(self._to_serving_error(error, request_id))])
                    break
                if not is_started:
                    await send(_start_message())
                    is_started = True
                if bodies := self._chunks.add(event):
                    await send(_body_message(encode_events(bodies)))
        await send(_body_message(last, more_body=False))


async def until_finished(
    events: AsyncGenerator[GenerationEvent, None],
) -> AsyncGenerator[GenerationEvent, None]:
    """Pass events on up to `Finished`, and close the generator at once, however this one ends.

    Raises:
        InternalError: The events end without `Finished`.
    """
    async with contextlib.aclosing(events):
        async for event in events:
            yield event
            if isinstance(event, Finished):
                return
    raise InternalError("the generation ended without a last event")


def encode_events(bodies: Iterable[object]) -> bytes:
    """One `data:` line for each body, in order; JSON has no raw newline, so a line is enough."""
    return b"".join(b"data: " + orjson.dumps(body) + b"\n\n" for body in bodies)


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


def _start_message() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": list(HEADERS)}


def _body_message(body: bytes, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
