"""Handlers of stored responses: clients read, cancel and delete what /v1/responses has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from cluster.edge.answers import json_response
from cluster.edge.fields import bad_field
from cluster.edge.responses.api import missing_response
from cluster.edge.responses.input_items import input_items, item_page
from cluster.edge.tenants import tenant_of
from cluster.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from starlette.requests import Request

    from cluster.edge.responses.archive import Action, FoundResponse, ResponseArchive


class StoredResponses:
    """Handlers of the paths below /v1/responses; each tenant sees only its own responses.

    Args:
        archive: The responses of all ingresses.
    """

    def __init__(self, archive: ResponseArchive) -> None:
        self._archive = archive

    async def read(self, request: Request) -> Response:
        """Answer with a response as it is now."""
        if request.query_params.get("stream", "false").lower() not in {"false", "0"}:
            raise bad_field("stream", "is not possible: ask again until the response has ended")
        return _body(await self._find("read", request))

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that a response has been made from."""
        found = await self._find("conversation", request)
        num_outputs = len(orjson.loads(found.body)["output"])
        items = input_items(found.turns, num_outputs, request.path_params["response_id"])
        return json_response(item_page(items, request.query_params))

    async def delete(self, request: Request) -> Response:
        """Forget a response; one that runs is cancelled."""
        await self._find("delete", request)
        response_id = request.path_params["response_id"]
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background; one that has ended stays as it is."""
        found = await self._find("cancel", request)
        if not orjson.loads(found.body)["background"]:
            raise BadRequestError(
                "the response is not in the background; to cancel such a one, close its connection"
            )
        return _body(found)

    async def compact(self, request: Request) -> Response:
        """Refuse: no model here makes a shorter conversation of a long one."""
        raise NotFoundError(
            f"{request.url.path} is not offered: send a shorter input, or set truncation to auto"
        )

    async def _find(self, action: Action, request: Request) -> FoundResponse:
        response_id = request.path_params["response_id"]
        found = await self._archive.find(action, tenant_of(request.scope).name, response_id)
        if found is None:
            raise NotFoundError(missing_response(response_id), param="response_id")
        return found


def _body(found: FoundResponse) -> Response:
    return Response(found.body, media_type="application/json")
