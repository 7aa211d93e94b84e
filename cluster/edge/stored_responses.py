"""Handlers of stored responses: clients read and delete what /v1/responses has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from cluster.edge.answers import json_response
from cluster.edge.fields import bad_field
from cluster.edge.responses.api import missing_response
from cluster.edge.tenants import tenant_of
from cluster.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from starlette.requests import Request

    from cluster.edge.responses.store import ResponseStore, StoredResponse


class StoredResponses:
    """Handlers of the paths below /v1/responses; each tenant sees only its own responses.

    Args:
        store: The ingress's store.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def read(self, request: Request) -> Response:
        """Answer with a stored response."""
        if request.query_params.get("stream", "false").lower() not in {"false", "0"}:
            raise bad_field("stream", "is not possible: a stored response is finished")
        return Response(self._find(request).body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Forget a stored response."""
        self._find(request)
        response_id = request.path_params["response_id"]
        self._store.delete(tenant_of(request.scope).name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Refuse: only responses in the background run without a connection."""
        self._find(request)
        raise BadRequestError(
            "the response is finished; to cancel one that runs, close its connection"
        )

    async def compact(self, request: Request) -> Response:
        """Refuse: no model here makes a shorter conversation of a long one."""
        raise NotFoundError(
            f"{request.url.path} is not offered: send a shorter input, or set truncation to auto"
        )

    def _find(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        stored = self._store.get(tenant_of(request.scope).name, response_id)
        if stored is None:
            raise NotFoundError(missing_response(response_id), param="response_id")
        return stored
