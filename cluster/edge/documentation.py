"""Handlers of /openapi.json and /docs. Both are made once; operators see their own routes, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from cluster.edge.docs_page import DOCS_HEADERS, docs_page
from cluster.edge.headers import LISTENER_HEADER, OPERATIONS
from cluster.edge.openapi import openapi_document

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from cluster.edge.route_table import Listener


def documented(
    version: str, *, has_keys: bool, is_closed: bool, root_path: str = ""
) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return the handlers of both routes by name; for the arguments see `openapi_document`.

    The documents name the root path, if there is one.
    """
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    listeners: tuple[Listener, ...] = ("both", "operations")
    made = {
        listener: {
            **openapi_document(version, listener, has_keys=has_keys, is_closed=is_closed),
            **servers,
        }
        for listener in listeners
    }
    documents = {listener: orjson.dumps(document) for listener, document in made.items()}
    pages = {listener: docs_page(document) for listener, document in made.items()}

    async def openapi(request: Request) -> Response:
        return Response(documents[_listener(request)], media_type="application/json")

    async def docs(request: Request) -> Response:
        return Response(pages[_listener(request)], headers=DOCS_HEADERS, media_type="text/html")

    return {"openapi": openapi, "docs": docs}


def _listener(request: Request) -> Listener:
    is_operators = request.headers.get(LISTENER_HEADER) == OPERATIONS
    return "operations" if is_operators else "both"
