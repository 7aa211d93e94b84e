"""The outermost middleware of a server: protects it from slow, greedy and lying clients.

Serve wraps it around its HTTP servers, because `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names
`proxy_middlewares` (Serve's own proxies) or `ingress_middlewares` (ingress replicas).

- A request reaches the application only when its body is complete. Serve counts it only then.
- Headers of Serve and of ttserve that a client sends are removed. Behind HAProxy ttserve's headers
  are kept, because HAProxy has already removed the client's and set its own.
- `scope["client"]` becomes the request's source as HAProxy saw it. It is the key for fair shares
  between clients.
- With API keys, a request with a body needs a valid key before its body is read. The application
  checks requests without a body.
- A client that does not read its answer in time counts as disconnected. The application never waits
  for a slow client's bytes.
- In an ingress replica the guard also ends the requests of disconnected clients; Serve would need
  two more tasks per request. An application that awaits `http.disconnect` must end by itself; any
  other is cancelled.

Owner: a `ClientGuard` owns the counts of body bytes in its process, an `_Exchange` those of one
request. `cluster.edge.json_bodies` reads the content of bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.middleware import Middleware

from cluster.config.environment import process_environment
from cluster.config.front import HAPROXY_VARIABLE, is_loopback
from cluster.config.ray_auth import front_proof
from cluster.config.schema import LARGEST_BODY_BYTES, IngressConfig
from cluster.edge.answers import error_response
from cluster.edge.api_keys import shared_keys
from cluster.edge.boundary import with_boundary, without_root
from cluster.edge.headers import (
    BOUND_HEADER,
    DISABLE_SERVE_WATCH,
    INTERNAL_HEADERS,
    LISTENER_HEADER,
    LOOPBACK,
    OPERATIONS,
    PROOF_HEADER,
    SOURCE_HEADER,
)
from cluster.edge.interrupt import Interrupt
from cluster.edge.route_table import is_open
from cluster.edge.sse import ClientGoneError, wait_for_disconnect
from cluster.edge.tenants import set_tenant
from cluster.errors import (
    AuthenticationError,
    BodyTimeoutError,
    PayloadTooLargeError,
    SaturatedError,
    ServingError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cluster.edge.api_keys import ApiKeys
    from cluster.edge.tenants import Tenant

_IS_INTERNAL = re.compile(INTERNAL_HEADERS.encode())
_REQUEST_ID = b"x-request-id"
_OURS = b"x-ttserve-"
_SOURCE = SOURCE_HEADER.encode()
_PROOF = PROOF_HEADER.encode()
_FORWARDED = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"})
_SOURCE_BITS = 64
_PIECE_BYTES = 64 * 2**10
_OF_BODY = frozenset({b"content-length", b"content-type"})
_DISCONNECT_TURNS = 3
"""Turns of the event loop that each request waits before it reaches the application. When the loop
is late, many clients have already disconnected. The first turn reads the end of such a connection,
the second reports it to the server, the third wakes the task that watches the client."""

_REFUSAL_KEY = "ttserve.refusal"

INGRESS_VARIABLE = "TTSERVE_INGRESS"
"""Environment variable with `args.ingress` as JSON: the guard of an ingress replica is created
before its application."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on the memory and time that clients may use in a process.

    At most `max_bodies * free_bytes + shared_bytes` bytes of bodies are held: 512 MiB. An answer
    with a declared length also takes from `shared_bytes`, until its client has read it. One that is
    larger than the part of its source takes all of that part.

    In an ingress replica a body is held until the application has received it. The application
    parses it in the same turn of its event loop. So beyond the 512 MiB there is at most one body of
    `max_body_bytes`, a copy of it, and its parsed form. `cluster.edge.heavy_work` bounds the texts
    that wait to be encoded. In a proxy of Serve, whose application is in another process, a body is
    held until its answer begins.

    Attributes:
        body_timeout_s: Longest time for a whole body, from its headers on; then 408.
        write_timeout_s: Longest time that a client may leave sent bytes unread; then it counts as
            disconnected.
        max_body_bytes: Larger bodies get 413; if they declare their length, before they are read.
        max_bodies: Most bodies being received at a time; more get 429.
        free_bytes: Bytes that each body gets for itself, so that large bodies never block small
            ones.
        shared_bytes: Bytes that all larger bodies share; 429 when they are used up.
        num_sources: One source gets at most `1 / num_sources` of `max_bodies` and `shared_bytes`.
    """

    body_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    max_body_bytes: int = LARGEST_BODY_BYTES
    max_bodies: int = 4096
    free_bytes: int = 64 * 2**10
    shared_bytes: int = 256 * 2**20
    num_sources: int = 4

    @property
    def source_bytes(self) -> int:
        """Most of `shared_bytes` that one source gets."""
        return self.shared_bytes // self.num_sources


def proxy_middlewares() -> list[Middleware]:
    """Return the middlewares of Serve's own proxies."""
    environment = process_environment()
    has_haproxy = environment.get(HAPROXY_VARIABLE) == "1"
    proof = front_proof(environment)
    return [Middleware(ClientGuard, is_behind_haproxy=has_haproxy, proof=proof)]


def ingress_middlewares() -> list[Middleware]:
    """Return the middlewares of an ingress replica's HTTP server.

    Serve must run the application on the event loop of that server
    (`RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0`), because the guard's asyncio objects
    belong to one loop. Ingress replicas have such a server only behind HAProxy.
    """
    environment = process_environment()
    given = environment.get(INGRESS_VARIABLE, "{}")
    ingress = msgspec.json.decode(given, type=IngressConfig)
    return [
        Middleware(
            ClientGuard,
            ClientLimits(max_body_bytes=ingress.max_body_bytes),
            is_ingress=True,
            is_behind_haproxy=True,
            proof=front_proof(environment),
            api_keys=shared_keys(ingress.api_keys) if ingress.api_keys else None,
            cors_origins=ingress.cors_origins,
            root_path=ingress.root_path,
        )
    ]


class ClientGuard:
    """The outermost ASGI middleware; see the list in the module docstring.

    Args:
        app: The wrapped application.
        limits: Limits on memory and time.
        is_ingress: Whether the application runs on this event loop. The guard then cancels an
            application whose client disconnected, unless it awaits `http.disconnect`, and tells
            Serve not to watch for that itself.
        is_behind_haproxy: Whether requests come through HAProxy, which reports their source.
        proof: Value that HAProxy sends with each request. A request without it bypassed HAProxy,
            and its ttserve headers are ignored. Empty if Ray has no token to derive it from.
        api_keys: Keys of clients; None: the guard asks for none.
        cors_origins: Origins of web pages that may read the guard's refusals.
        root_path: Path under which a proxy shows the application; "" for none.

    Attributes:
        num_bodies: Bodies being received.
        num_shared_bytes: Bytes of `ClientLimits.shared_bytes` in use: by bodies that are being
            received or not yet delivered, and by unread answers.
    """

    def __init__(  # noqa: PLR0913 - Serve builds it from the arguments of its `Middleware`
        self,
        app: ASGIApp,
        limits: ClientLimits | None = None,
        *,
        is_ingress: bool = False,
        is_behind_haproxy: bool = False,
        proof: str = "",
        api_keys: ApiKeys | None = None,
        cors_origins: Sequence[str] = (),
        root_path: str = "",
    ) -> None:
        self._app = app
        self._refuse = with_boundary(_raise_refusal, cors_origins, root_path)
        self._root_path = root_path
        self._limits = limits or ClientLimits()
        self._is_ingress = is_ingress
        self._is_behind_haproxy = is_behind_haproxy
        self._proof = proof.encode()
        self._api_keys = api_keys
        self._bodies_of: Counter[str] = Counter()
        self._shared_bytes_of: Counter[str] = Counter()
        self.num_bodies = 0
        self.num_shared_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application once the body is complete, and send its answer."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        scope = self._with_trusted_source(scope)
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        source: str = scope["client"][0]
        path = without_root(scope["path"], self._root_path)
        exchange = _Exchange(self, self._limits, source, path, receive, send)
        headers = dict(scope["headers"])
        try:
            api_keys = self._api_keys
            if (
                api_keys is not None
                and _has_body(headers)
                and not is_open(scope["method"], scope["path"])
            ):
                set_tenant(scope, _authenticated(api_keys, scope))
            await exchange.read_body(headers)
            await exchange.run(self._app, scope, is_ingress=self._is_ingress)
            return
        except _RefusedError as refused:
            # Not the exception itself, because its traceback refers to the bytes of the body.
            error = refused.error
        except ClientGoneError:
            return
        finally:
            exchange.close()
        scope[_REFUSAL_KEY] = error
        await self._refuse(scope, receive, exchange.draining_send(error))

    def add_body(self, source: str) -> None:
        """Count a body that is being received.

        Raises:
            _RefusedError: The limit of bodies is reached, in all or for this source.
        """
        most = self._limits.max_bodies
        if self.num_bodies >= most:
            raise _RefusedError(_saturated(f"{most} request bodies are being received"))
        most = max(1, most // self._limits.num_sources)
        if self._bodies_of[source] >= most:
            raise _RefusedError(_saturated(f"{most} request bodies of {source} are being received"))
        self.num_bodies += 1
        self._bodies_of[source] += 1

    def remove_body(self, source: str) -> None:
        """Undo `add_body`."""
        self.num_bodies -= 1
        _subtract(self._bodies_of, source, 1)

    def add_shared_bytes(self, source: str, num_bytes: int) -> None:
        """Reserve shared bytes for a source.

        Raises:
            _RefusedError: Too few are left, in all or for this source.
        """
        most = self._limits.shared_bytes
        if self.num_shared_bytes + num_bytes > most:
            raise _RefusedError(_saturated("too many large bodies are being received or sent"))
        if self._shared_bytes_of[source] + num_bytes > self._limits.source_bytes:
            raise _RefusedError(
                _saturated(f"too many large bodies of {source} are being received or sent")
            )
        self.num_shared_bytes += num_bytes
        self._shared_bytes_of[source] += num_bytes

    def remove_shared_bytes(self, source: str, num_bytes: int) -> None:
        """Undo `add_shared_bytes`."""
        self.num_shared_bytes -= num_bytes
        _subtract(self._shared_bytes_of, source, num_bytes)

    def _with_trusted_source(self, scope: Scope) -> Scope:
        """Return the scope without headers that clients may not send, and with its source.

        If the request did not come through HAProxy, its source is the connection's peer. A peer on
        this host may use the operations routes, unless it forwards another client's request.
        """
        headers = [header for header in scope["headers"] if _may_come_from_client(*header)]
        peer, port = scope.get("client") or ("", 0)
        ours = [(name, value) for name, value in scope["headers"] if name.startswith(_OURS)]
        shown = dict(ours).get(_PROOF, b"")
        if self._is_behind_haproxy and hmac.compare_digest(shown, self._proof):
            ours = [(name, value) for name, value in ours if name != _PROOF]
            peer = dict(ours).get(_SOURCE, peer.encode()).decode("latin-1")
        else:
            ours = []
            is_forwarded = any(name in _FORWARDED for name, _ in headers)
            if is_loopback(peer) and not is_forwarded:
                ours.append((LISTENER_HEADER.encode(), OPERATIONS.encode()))
            if is_loopback((scope.get("server") or ("", 0))[0]):
                ours.append((BOUND_HEADER.encode(), LOOPBACK.encode()))
        return {**scope, "headers": headers + ours, "client": (source_of(peer), port)}


async def _raise_refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise the error in a scope: the application of a request that the guard refuses."""
    del receive, send
    error: ServingError = scope[_REFUSAL_KEY]
    raise error


class _RefusedError(Exception):
    """A request that the guard refuses; wraps the error for the client."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error)
        self.error = error


class _Exchange:
    """One request: reading its body, running the application, sending its answer."""

    def __init__(
        self,
        guard: ClientGuard,
        limits: ClientLimits,
        source: str,
        path: str,
        receive: Receive,
        send: Send,
    ) -> None:
        self._guard = guard
        self._limits = limits
        self._source = source
        self._path = path
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._body: bytes | None = None
        self._has_all = False
        self._num_shared_bytes = 0
        self._gone = asyncio.Event()
        self._num_disconnect_waiters = 0
        self._interrupt: Interrupt | None = None
        self._is_ingress = False
        self._is_answered = False
        self._is_refused = False
        self._sending_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def read_body(self, headers: dict[bytes, bytes]) -> None:
        """Read the whole body, if there is one.

        Raises:
            _RefusedError: The body is too large or too slow, or too many are being received.
            ClientGoneError: The client disconnected before the end of the body.
        """
        if not _has_body(headers):
            self._body = b""
            return
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._limits.max_body_bytes:
            raise _RefusedError(PayloadTooLargeError(self._limits.max_body_bytes))
        self._guard.add_body(self._source)
        late = BodyTimeoutError(
            f"the body was not complete within {self._limits.body_timeout_s:g} s; "
            "send it without pauses, or a smaller one"
        )
        with Interrupt() as interrupt:
            timer = self._loop.call_later(
                self._limits.body_timeout_s, interrupt.trigger, _RefusedError(late)
            )
            try:
                self._body = await self._read_chunks()
            finally:
                self._guard.remove_body(self._source)
                timer.cancel()

    async def run(self, app: ASGIApp, scope: Scope, *, is_ingress: bool) -> None:
        """Run the application until it has answered or the client has disconnected.

        Raises:
            ClientGoneError: The client disconnected first, and the application was cancelled. Not
                raised if the application swallows the cancellation, as Serve does.
        """
        watching = asyncio.create_task(self._watch_for_disconnect())
        try:
            if not is_ingress:
                await app(scope, self.receive, self.send)
                return
            self._is_ingress = True
            scope["headers"] += DISABLE_SERVE_WATCH
            with Interrupt() as self._interrupt:
                for _ in range(_DISCONNECT_TURNS):
                    await asyncio.sleep(0)
                await app(scope, self.receive, self.send)
        finally:
            watching.cancel()

    async def receive(self) -> Message:
        """ASGI `receive` for the application: the whole body, then the disconnect."""
        if self._body is not None:
            body, self._body = self._body, None
            if self._is_ingress:
                self._release_shared_bytes()
            return {"type": "http.request", "body": body, "more_body": False}
        self._num_disconnect_waiters += 1
        try:
            await self._gone.wait()
        finally:
            self._num_disconnect_waiters -= 1
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI `send` for the application; a client that does not read counts as disconnected."""
        if self._timer is None:
            self._release_shared_bytes()  # an application that answers has read the body
            self._timer = self._loop.call_later(
                self._limits.write_timeout_s / 2, self._check_write_timeout
            )
        if message["type"] == "http.response.start":
            await self._send_head(message)
        elif not self._is_refused:
            body: bytes = message.get("body", b"")
            # The server buffers each message whole and applies back-pressure only between two.
            last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
            for begin in range(0, last, _PIECE_BYTES):
                piece = body[begin : begin + _PIECE_BYTES]
                await self._send_in_time({**message, "body": piece, "more_body": True})
            if last:
                message = {**message, "body": body[last:]}
            await self._send_in_time(message)
        self._is_answered = message["type"] == "http.response.body" and not message.get("more_body")

    async def _send_head(self, start: Message) -> None:
        """Send the answer's head, or a 429 if too many bytes of unread answers are held."""
        headers: list[tuple[bytes, bytes]] = [*start.get("headers", ())]
        by_name = dict(headers)
        declared = by_name.get(b"content-length", b"0")
        # An answer that is larger than its source's part can arrive, too: alone, and counted as all
        # of that part. Its memory is already used, and the next attempt would be as large.
        num_bytes = min(int(declared) - self._limits.free_bytes, self._limits.source_bytes)
        try:
            self._reserve_shared_bytes(num_bytes)
        except _RefusedError as refused:
            self._is_refused = True
            request_id = by_name.get(_REQUEST_ID, b"").decode("latin-1") or None
            response = error_response(refused.error, self._path, request_id)
            # The others are those of the boundary.
            response.raw_headers += [each for each in headers if each[0] not in _OF_BODY]
            await response({"type": "http"}, self._receive, self._send)
        else:
            await self._send_in_time(start)

    async def _send_in_time(self, message: Message) -> None:
        self._sending_since_s = self._loop.time()
        try:
            await self._send(message)
        finally:
            self._sending_since_s = None

    def draining_send(self, error: ServingError) -> Send:
        """Return a `send` for a refusal that also reads and drops the rest of the body.

        Many clients read no answer before they have sent their whole body. Otherwise they would be
        stuck in their upload, and lose the answer when HAProxy closes the connection. The rest of
        a body that was too slow is not read.
        """

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Otherwise the rest of the body would be parsed as the connection's next request.
                headers = [*message["headers"], (b"connection", b"close")]
                await self._send({**message, "headers": headers})
                return
            if isinstance(error, BodyTimeoutError):
                await self._send(message)
                return
            await self._send({**message, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._discard_rest(), self._limits.body_timeout_s)
            await self._send({"type": "http.response.body"})

        return send

    async def _discard_rest(self) -> None:
        num_bytes = 0
        while not self._has_all and num_bytes <= LARGEST_BODY_BYTES:
            message = await self._receive()
            num_bytes += len(message.get("body", b""))
            self._has_all = not message.get("more_body", False)

    def close(self) -> None:
        """Release this request's shared bytes and its timer."""
        self._release_shared_bytes()
        if self._timer is not None:
            self._timer.cancel()

    def _check_write_timeout(self) -> None:
        since_s, now_s = self._sending_since_s, self._loop.time()
        if since_s is not None and now_s - since_s > self._limits.write_timeout_s:
            self._client_left()
        self._timer = self._loop.call_later(
            self._limits.write_timeout_s / 2, self._check_write_timeout
        )

    async def _watch_for_disconnect(self) -> None:
        await wait_for_disconnect(self._receive)
        self._client_left()

    def _client_left(self) -> None:
        ends_by_itself = self._num_disconnect_waiters > 0
        self._gone.set()
        # After a complete answer the application may still have to log or clean up.
        if self._interrupt is not None and not (ends_by_itself or self._is_answered):
            self._interrupt.trigger(ClientGoneError())

    async def _read_chunks(self) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            self._has_all = not message.get("more_body", False)
            num_bytes += len(chunk)
            if num_bytes > self._limits.max_body_bytes:
                raise _RefusedError(PayloadTooLargeError(self._limits.max_body_bytes))
            self._reserve_shared_bytes(num_bytes - self._limits.free_bytes)
            chunks.append(chunk)
            if self._has_all:
                return b"".join(chunks)

    def _reserve_shared_bytes(self, num_bytes: int) -> None:
        more = max(0, num_bytes) - self._num_shared_bytes
        if more > 0:
            self._guard.add_shared_bytes(self._source, more)
            self._num_shared_bytes += more

    def _release_shared_bytes(self) -> None:
        if self._num_shared_bytes:
            self._guard.remove_shared_bytes(self._source, self._num_shared_bytes)
            self._num_shared_bytes = 0


def _authenticated(api_keys: ApiKeys, scope: Scope) -> Tenant:
    try:
        return api_keys.authenticate(scope["headers"])
    except AuthenticationError as error:
        raise _RefusedError(error) from None


def _has_body(headers: dict[bytes, bytes]) -> bool:
    """Return whether a request declares a body."""
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"") not in {b"", b"0"}


def _subtract(counts: Counter[str], source: str, num: int) -> None:
    """Subtract from a source's count, and drop the source when it reaches 0."""
    counts[source] -= num
    if not counts[source]:
        del counts[source]


@functools.lru_cache(maxsize=4096)
def source_of(address: str) -> str:
    """Return the source of an address: IPv4 itself, IPv6 its network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), _SOURCE_BITS), strict=False).network_address)


def _may_come_from_client(name: bytes, value: bytes) -> bool:
    """Return whether a client may send a header; Serve decodes a request's id as UTF-8."""
    return not _IS_INTERNAL.match(name) and (name != _REQUEST_ID or value.isascii())


def _saturated(reason: str) -> SaturatedError:
    return SaturatedError(f"{reason}; try again later")
