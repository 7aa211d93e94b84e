"""The ASGI app of the admin routes.

Owner: the event loop that runs it; it keeps no state between requests. Each request passes the
same checks: the `Host` header on a loopback address, the key of an admin, the size of its body, and
for a POST the content type of JSON, which no web page can send without asking first.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.edge import audit
from cluster.edge.admin.cluster import MAX_PROFILE_S, Target
from cluster.edge.admin.metrics import AdminMetrics, name_route
from cluster.edge.admin.routes import ROUTES, Done, Paused, Replicas, RoleChange, openapi_document
from cluster.edge.answers import METRICS_TYPE, json_response
from cluster.edge.boundary import with_boundary
from cluster.edge.fields import bad_field, shown
from cluster.edge.gate import has_loopback_name
from cluster.edge.headers import require_json
from cluster.edge.queries import flag
from cluster.edge.tenants import set_tenant
from cluster.errors import (
    BadRequestError,
    BodyTimeoutError,
    MisdirectedError,
    NotFoundError,
    PayloadTooLargeError,
)
from replicas.messages import PAUSE_MODES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from cluster.edge.admin.cluster import Cluster
    from cluster.edge.admin.routes import AdminRoute
    from cluster.edge.api_keys import ApiKeys
    from replicas.messages import PauseMode

    Handler = Callable[[Request, bytes], Awaitable[Response]]

MAX_BODY_BYTES = 64 * 2**10
BODY_S = 10.0
"""Longest time for a body to arrive."""
_ACCEPTED = 202


def create_admin_app(
    cluster: Cluster, *, api_keys: ApiKeys | None, is_loopback: bool, version: str
) -> ASGIApp:
    """Build the app.

    Args:
        cluster: The cluster that calls are about.
        api_keys: Keys that requests need, of admins; None: no request needs one.
        is_loopback: Whether only this host can reach the app.
        version: ttserve's version.
    """
    metrics = AdminMetrics()
    document = openapi_document(version, has_keys=api_keys is not None)
    handlers = _Handlers(cluster, metrics, document)
    app = _AdminApplication(
        routes=[
            Route(
                route.path,
                _CheckedHandler(getattr(handlers, route.name), route, api_keys, is_loopback),
                methods=[route.method],
            )
            for route in ROUTES
        ]
    )
    app.router.redirect_slashes = False
    return metrics.counting(app)


class _AdminApplication(Starlette):
    """Starlette with the boundary of the edge in place of its middlewares."""

    def build_middleware_stack(self) -> ASGIApp:
        return with_boundary(self.router, cors_origins=(), root_path="")


class _CheckedHandler:
    """A handler as an ASGI app behind the checks of its route."""

    def __init__(
        self, handle: Handler, route: AdminRoute, api_keys: ApiKeys | None, is_loopback: bool
    ) -> None:
        self._handle = handle
        self._route = route
        self._api_keys = api_keys
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        name_route(scope, self._route.name)
        if self._route.method == "POST":
            audit.mark(scope)
        if self._is_loopback and not has_loopback_name(request.headers):
            # A web page whose name resolves to a loopback address (DNS rebinding).
            raise MisdirectedError(
                "the admin server listens on a loopback address: send the Host header localhost"
            )
        if self._api_keys is not None and not self._route.is_open:
            tenant = self._api_keys.authenticate(scope["headers"])
            set_tenant(scope, tenant)
            if not self._route.is_for_all_keys:
                tenant.check_admin(self._route.path)
        body = b""
        if self._route.method == "POST":
            require_json(request.headers)
            body = await _read(request)
        response = await self._handle(request, body)
        await response(scope, receive, send)


class _Handlers:
    """Handlers of the routes, each named after its route."""

    def __init__(
        self, cluster: Cluster, metrics: AdminMetrics, document: dict[str, object]
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._document = document

    async def replicas(self, request: Request, body: bytes) -> Response:
        del request, body
        return _answer(Replicas(await self._cluster.replicas()))

    async def replica(self, request: Request, body: bytes) -> Response:
        del body
        name = request.path_params["replica"]
        for view in await self._cluster.replicas():
            if view.replica == name:
                return _answer(view)
        raise NotFoundError(f"no replica {name!r} runs; see GET /replicas")

    async def drain(self, request: Request, body: bytes) -> Response:
        del body
        view = await self._cluster.drain(request.path_params["replica"])
        return _answer(view, 200 if view.state == "drained" else _ACCEPTED)

    async def undrain(self, request: Request, body: bytes) -> Response:
        del body
        return _answer(await self._cluster.undrain(request.path_params["replica"]))

    async def role(self, request: Request, body: bytes) -> Response:
        try:
            change = msgspec.json.decode(body, type=RoleChange)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise BadRequestError(
                f'the body must be {{"role": "prefill"}} or {{"role": "decode"}}: {error}'
            ) from error
        audit.add_detail(request.scope, "role", change.role)
        view = await self._cluster.change_role(request.path_params["replica"], change.role)
        return _answer(view, 200 if view.next_role is None else _ACCEPTED)

    async def profile(self, request: Request, body: bytes) -> Response:
        del body
        given = request.query_params.get("seconds", "5")
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0.0 < seconds <= MAX_PROFILE_S:
            text = f"must be a number above 0, of at most {MAX_PROFILE_S:g}; got {shown(given)}"
            raise bad_field("seconds", text)
        name = request.path_params["replica"]
        profile = await self._cluster.profile(name, seconds)
        headers = {"content-disposition": 'attachment; filename="profile.folded"'}
        return Response(profile, headers=headers, media_type="text/plain")

    async def pause(self, request: Request, body: bytes) -> Response:
        del body
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise bad_field("mode", f"must be one of {', '.join(PAUSE_MODES)}; got {shown(mode)}")
        clear_cache = flag(request.query_params, "clear_cache", default=True)
        target = _target(request)
        await self._cluster.pause(target, cast("PauseMode", mode), clear_cache=clear_cache)
        return _answer(Done("paused"))

    async def resume(self, request: Request, body: bytes) -> Response:
        del body
        await self._cluster.resume(_target(request))
        return _answer(Done("resumed"))

    async def is_paused(self, request: Request, body: bytes) -> Response:
        del body
        paused = dict(await self._cluster.is_paused(_target(request)))
        return _answer(Paused(all(paused.values()), paused))

    async def reset_prefix_cache(self, request: Request, body: bytes) -> Response:
        del body
        running = flag(request.query_params, "reset_running_requests", default=False)
        await self._cluster.reset_prefix_cache(_target(request), reset_running_requests=running)
        return _answer(Done("reset"))

    async def live(self, request: Request, body: bytes) -> Response:
        del request, body
        return Response()  # An answer proves that the event loop runs.

    async def metrics(self, request: Request, body: bytes) -> Response:
        del request, body
        return Response(self._metrics.render(), media_type=METRICS_TYPE)

    async def openapi(self, request: Request, body: bytes) -> Response:
        del request, body
        return json_response(self._document)


def _answer(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _target(request: Request) -> Target:
    """Return the replicas that a query names.

    Raises:
        BadRequestError: It names a replica and a pool.
    """
    query = request.query_params
    target = Target(replica=query.get("replica"), pool=query.get("pool"))
    if target.replica is not None and target.pool is not None:
        raise bad_field("pool", "and replica exclude each other: name one of them")
    return target


async def _read(request: Request) -> bytes:
    """Return a request's body.

    Raises:
        PayloadTooLargeError: It is larger than `MAX_BODY_BYTES`.
        BodyTimeoutError: It did not arrive within `BODY_S`.
    """

    async def read() -> bytes:
        chunks = bytearray()
        async for chunk in request.stream():
            chunks += chunk
            if len(chunks) > MAX_BODY_BYTES:
                raise PayloadTooLargeError(MAX_BODY_BYTES)
        return bytes(chunks)

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except asyncio.TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_S:g} s") from None
