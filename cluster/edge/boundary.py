"""What surrounds every answer: the request's id, the form of errors, CORS, and the root path.

The application's answers and the refusals of `cluster.edge.client_guard` have the same boundary, so
clients and web pages can read both in the same way.

Owner: this module keeps no state between requests.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, compile_path

from cluster.edge import audit
from cluster.edge.answers import error_response, to_serving_error
from cluster.edge.apis import api_of
from cluster.edge.json_bodies import IGNORED_FIELDS, IGNORED_FIELDS_HEADER
from cluster.edge.quota_service import lease_of
from cluster.edge.route_table import ROUTES
from cluster.edge.sse import ClientGoneError
from cluster.errors import MethodNotAllowedError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_MAX_REQUEST_ID_CHARS = 128
_NOT_VISIBLE = re.compile(r"[^\x21-\x7e]")
_CLIENT_CLOSED_REQUEST = 499
_EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    IGNORED_FIELDS_HEADER,
    *(
        f"x-ratelimit-{figure}-{unit}"
        for figure in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Headers that a page of `cors_origins` may read."""


def with_boundary(app: ASGIApp, cors_origins: Sequence[str], root_path: str) -> ASGIApp:
    """Return an application whose answers and errors have the boundary.

    Args:
        app: The application; its errors may be `ServingError`s.
        cors_origins: Origins of web pages that may read answers.
        root_path: Path under which a proxy shows the application; "" for none.
    """
    app = _RequestBoundary(app)
    if cors_origins:
        app = _CorsOfApi(
            app,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    return _RootPath(app, root_path) if root_path else app


def without_root(path: str, root_path: str) -> str:
    """Return a path below the root path without it; any other path as it is."""
    return path[len(root_path) :] if path.startswith(f"{root_path}/") else path


class _CorsOfApi(CORSMiddleware):
    """CORS for every path but those of operators, which no web page may use, on any listener."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_for_operators(scope["path"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _RootPath:
    """Serves a path below the root path as the same path without it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(self._root_path + "/"):
            scope = {**scope, "path": without_root(path, self._root_path)}
        await self._app(scope, receive, send)


class _RequestBoundary:
    """Outermost layer: gives each request an id, names ignored fields, and answers every error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = _request_id(scope)
        is_started = False

        def send_named(message: Message) -> Awaitable[None]:
            nonlocal is_started
            if not is_started:  # the first message has the headers
                is_started = True
                names = api_of(scope["path"]).request_id_headers
                own = [(name, request_id.encode()) for name in names]
                headers = [*message.get("headers", ()), *own]
                if IGNORED_FIELDS in scope:
                    headers.append((IGNORED_FIELDS_HEADER.encode(), scope[IGNORED_FIELDS]))
                audit.record(scope, message["status"])
                if (lease := lease_of(scope)) is not None:
                    headers += lease.headers()
                message = {**message, "headers": headers}
            return send(message)

        try:
            await self._app(scope, receive, send_named)
        except (ClientGoneError, ClientDisconnect):
            logger.info("request %s: the client disconnected; aborted", request_id)
            if not is_started:  # for proxies and access logs
                await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send_named)
        except Exception as error:
            if is_started:
                raise
            await _error_response_of(error, scope)(scope, receive, send_named)


_OPERATIONS_PATHS = tuple(
    compile_path(spec.path)[0] for spec in ROUTES if spec.listener == "operations"
)


def _is_for_operators(path: str) -> bool:
    return any(pattern.match(path) for pattern in _OPERATIONS_PATHS)


def _request_id(scope: Scope) -> str:
    """Return the client's x-request-id, made safe for headers and logs, or a new id."""
    given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"").decode("latin-1")
    return _NOT_VISIBLE.sub("", given)[:_MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex


def _error_response_of(error: Exception, scope: Scope) -> Response:
    """Return the response of an error; Starlette's own 404 and 405 get the same form as others."""
    path, request_id = scope["path"], scope["request_id"]
    if not isinstance(error, HTTPException):
        return error_response(to_serving_error(error, request_id), path, request_id)
    kind = NotFoundError if error.status_code == 404 else MethodNotAllowedError
    message = f"{scope['method']} {Request(scope).url.path}: {error.detail}"
    response = error_response(kind(message), path, request_id)
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(sorted(_methods_of(scope)))
    return response


def _methods_of(scope: Scope) -> set[str]:
    """Return the methods of a request's path; Starlette names those of its first route alone."""
    found: set[str] = set()
    for route in scope["router"].routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= route.methods
    return found
