"""Handlers of stored responses: clients read, cancel and delete what /v1/responses has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from cluster.edge.answers import json_response, to_serving_error
from cluster.edge.fields import bad_field, shown
from cluster.edge.queries import flag
from cluster.edge.responses.archive import WITHOUT_CONVERSATION, missing_response
from cluster.edge.responses.input_items import input_items, item_page
from cluster.edge.sse import EventStream
from cluster.edge.tenants import tenant_of
from cluster.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from cluster.edge.departure import Departure
    from cluster.edge.gate import RequestGate
    from cluster.edge.responses.archive import Action, FoundResponse, ResponseArchive
    from cluster.edge.responses.events import EndedResponse, Progress

_MAX_NUMBER_DIGITS = 15


class StoredResponses:
    """Handlers of the paths below /v1/responses; each tenant sees only its own responses.

    Args:
        archive: The responses of all ingresses.
        gate: Counts streams as open requests.
        departure: Ends open streams when the ingress ends.
        keep_alive_s: Seconds without an event after which a stream has a comment.
    """

    def __init__(
        self,
        archive: ResponseArchive,
        gate: RequestGate,
        departure: Departure,
        keep_alive_s: float,
    ) -> None:
        self._archive = archive
        self._gate = gate
        self._departure = departure
        self._keep_alive_s = keep_alive_s

    async def read(self, request: Request) -> Response:
        """Answer with a response as it is now, or with its events from one on."""
        query = request.query_params
        is_streamed = flag(query, "stream", default=False)
        # Events are never padded.
        flag(query, "include_obfuscation", default=False)
        after = _event_number(query.get("starting_after"))
        if after is not None and not is_streamed:
            raise bad_field("starting_after", "needs stream=true")
        # The answer of HEAD has no events.
        if not is_streamed or request.method == "HEAD":
            return _body(await self._find("read", request))
        response_id = request.path_params["response_id"]
        tenant = tenant_of(request.scope).name
        followed = self._archive.events(tenant, response_id, -1 if after is None else after)

        async def run(emit: Callable[[Progress], Awaitable[None]]) -> EndedResponse:
            with self._gate.count_more(1):
                ended: EndedResponse = await followed.run(emit)
                return ended

        return EventStream(
            run,
            followed.writer,
            to_serving_error,
            timeout_s=None,
            keep_alive_s=self._keep_alive_s,
            departure=self._departure,
        )

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that a response has been made from."""
        found = await self._find("conversation", request)
        if not found.turns:
            raise NotFoundError(f"this is a response {WITHOUT_CONVERSATION}", param="response_id")
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


def _event_number(text: str | None) -> int | None:
    """Return the number of an event in a query; None if there is none.

    Raises:
        BadRequestError: It is no such number.
    """
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_NUMBER_DIGITS):
        raise bad_field("starting_after", f"must be the number of an event, got {shown(text)}")
    return int(text)


def _body(found: FoundResponse) -> Response:
    return Response(found.body, media_type="application/json")
