"""The door of a server: what every request passes before Serve counts it, and each answer after.

Serve wraps it around its HTTP servers, those of ingress replicas and its own proxies', because
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`, or `ingress_middlewares`. It lets a
request in when its body is there, so that a slow body takes no place from anybody; it takes off the
headers that are Serve's own; and a client that does not read what it is sent is gone. Behind it no
task waits for a client's bytes. In an ingress replica it also ends the requests of clients that are
gone: Serve would, by two more tasks for each. An application that waits to hear of it ends by
itself, and says so; what else runs is cancelled.

Owner: a `Door` owns what its process holds of request bodies, an `_Exchange` one request's own.
What a body may say, and its size in one application, is `cluster.edge.routes`' business.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from cluster.config.schema import LARGEST_BODY_BYTES
from cluster.edge.answers import error_response
from cluster.edge.headers import INTERNAL_HEADERS, LEFT_TO_US
from cluster.edge.interrupt import Interrupt
from cluster.edge.sse import ClientGoneError, until_gone
from cluster.errors import BodyTimeoutError, PayloadTooLargeError, SaturatedError, ServingError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_IS_INTERNAL = re.compile(INTERNAL_HEADERS.encode())
_REQUEST_ID = b"x-request-id"


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """What clients may cost a process before and after their requests run.

    At most `max_bodies * free_bytes + shared_bytes` bytes of bodies are held: 512 MiB.

    Attributes:
        body_timeout_s: For a whole body, from its headers on; then 408.
        write_timeout_s: How long a client may leave unread what it is sent; then it is gone.
        max_body_bytes: Larger bodies get 413.
        max_bodies: Bodies under way at a time; more get 429.
        free_bytes: Each body may have so many, so that large bodies never keep small ones out.
        shared_bytes: What is larger shares these; 429 when they are taken.
    """

    body_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    max_body_bytes: int = LARGEST_BODY_BYTES
    max_bodies: int = 4096
    free_bytes: int = 64 * 2**10
    shared_bytes: int = 256 * 2**20


def middlewares() -> list[Middleware]:
    """What Serve puts around its own proxies."""
    return [Middleware(Door)]


def ingress_middlewares() -> list[Middleware]:
    """What Serve puts around the HTTP server of an ingress replica.

    Only where Serve runs the application on the loop of its server
    (`RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0`): what a door tells stays on its loop.
    """
    return [Middleware(Door, ends_requests=True)]


class Door:
    """ASGI middleware, the outermost one.

    Args:
        app: What is behind it.
        limits: What clients may cost.
        ends_requests: Whether it cancels what runs for a client that is gone and does not wait to
            hear of it, and tells Serve that it need not; else the application has to.

    Attributes:
        num_bodies: Bodies under way.
        num_shared_bytes: What they, and those whose requests have no answer yet, have taken of
            `DoorLimits.shared_bytes`.
    """

    def __init__(
        self, app: ASGIApp, limits: DoorLimits | None = None, *, ends_requests: bool = False
    ) -> None:
        self._app = app
        self._limits = limits or DoorLimits()
        self._ends_requests = ends_requests
        self.num_bodies = 0
        self.num_shared_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in once its body is there, and see its answer out."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        scope = {**scope, "headers": [h for h in scope["headers"] if _is_clients(*h)]}
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self, self._limits, receive, send)
        try:
            await exchange.read_body(dict(scope["headers"]))
            await exchange.run(self._app, scope, ends_request=self._ends_requests)
        except _RefusedError as refused:
            response = error_response(refused.error)
            # The rest of the body would be read as the connection's next request.
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        except ClientGoneError:
            return
        finally:
            exchange.close()


class _RefusedError(Exception):
    """The door does not open; an error of the application itself is never one of these."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error)
        self.error = error


class _Exchange:
    """One request's body and answer."""

    def __init__(self, door: Door, limits: DoorLimits, receive: Receive, send: Send) -> None:
        self._door = door
        self._limits = limits
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._body: bytes | None = None
        self._num_shared_bytes = 0
        self._gone = asyncio.Event()
        self._num_waiting = 0
        self._interrupt: Interrupt | None = None
        self._is_answered = False
        self._sending_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def read_body(self, headers: dict[bytes, bytes]) -> None:
        """Read the whole body, if there is one.

        Raises:
            _RefusedError: It is too large, too slow, or one too many.
            ClientGoneError: The client left before its end.
        """
        declared = headers.get(b"content-length", b"")
        if b"transfer-encoding" not in headers and declared in {b"", b"0"}:
            self._body = b""
            return
        if declared.isdigit() and int(declared) > self._limits.max_body_bytes:
            raise _RefusedError(PayloadTooLargeError(self._limits.max_body_bytes))
        if self._door.num_bodies >= self._limits.max_bodies:
            raise _RefusedError(_saturated(f"{self._limits.max_bodies} requests are being read"))
        self._door.num_bodies += 1
        late = BodyTimeoutError(
            f"the body was not complete within {self._limits.body_timeout_s:g} s; "
            "send it without pauses, or a smaller one"
        )
        with Interrupt() as interrupt:
            timer = self._loop.call_later(
                self._limits.body_timeout_s, interrupt.end, _RefusedError(late)
            )
            try:
                self._body = await self._read()
            finally:
                self._door.num_bodies -= 1
                timer.cancel()

    async def run(self, app: ASGIApp, scope: Scope, *, ends_request: bool) -> None:
        """Let the application answer, until it has or the client is gone.

        Raises:
            ClientGoneError: The client was gone first, and what ran for it has been cancelled, as
                far as that was not somebody who keeps cancellations to himself, as Serve does.
        """
        watching = asyncio.create_task(self._watch())
        try:
            if not ends_request:
                await app(scope, self.receive, self.send)
                return
            scope["headers"] += LEFT_TO_US
            with Interrupt() as self._interrupt:
                await app(scope, self.receive, self.send)
        finally:
            watching.cancel()

    async def receive(self) -> Message:
        """ASGI's channel to the application: the body at once, then the client's end."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        self._num_waiting += 1
        try:
            await self._gone.wait()
        finally:
            self._num_waiting -= 1
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI's channel to the client; when it does not read, `receive` says that it is gone."""
        if self._timer is None:
            self._give_back()  # whoever answers has read
            self._timer = self._loop.call_later(self._limits.write_timeout_s / 2, self._look)
        self._sending_since_s = self._loop.time()
        try:
            await self._send(message)
        finally:
            self._sending_since_s = None
        self._is_answered = message["type"] == "http.response.body" and not message.get("more_body")

    def close(self) -> None:
        """Nothing is held for this request any more."""
        self._give_back()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        since_s, now_s = self._sending_since_s, self._loop.time()
        if since_s is not None and now_s - since_s > self._limits.write_timeout_s:
            self._leave()
        self._timer = self._loop.call_later(self._limits.write_timeout_s / 2, self._look)

    async def _watch(self) -> None:
        await until_gone(self._receive)
        self._leave()

    def _leave(self) -> None:
        is_told = self._num_waiting > 0
        self._gone.set()
        # Once it has its answer it may leave; there may be something yet to be written down.
        if self._interrupt is not None and not (is_told or self._is_answered):
            self._interrupt.end(ClientGoneError())

    async def _read(self) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > self._limits.max_body_bytes:
                raise _RefusedError(PayloadTooLargeError(self._limits.max_body_bytes))
            self._take_share(num_bytes - self._limits.free_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _take_share(self, num_bytes: int) -> None:
        more = max(0, num_bytes) - self._num_shared_bytes
        if more > 0 and self._door.num_shared_bytes + more > self._limits.shared_bytes:
            raise _RefusedError(_saturated("too many large bodies are being read"))
        self._num_shared_bytes += more
        self._door.num_shared_bytes += more

    def _give_back(self) -> None:
        self._door.num_shared_bytes -= self._num_shared_bytes
        self._num_shared_bytes = 0


def _is_clients(name: bytes, value: bytes) -> bool:
    """Whether a header is the client's to send; Serve reads a request's id as UTF-8."""
    return not _IS_INTERNAL.match(name) and (name != _REQUEST_ID or value.isascii())


def _saturated(what: str) -> SaturatedError:
    return SaturatedError(f"{what}; try again later")
