"""The API of /v1/responses: a chat in other words, with answers that are kept."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import orjson

from cluster.edge.api import Api
from cluster.edge.field_names import naming_fields
from cluster.edge.fields import bad_field, read_fields, shown
from cluster.edge.openai import StartedResponse
from cluster.edge.openai_limits import (
    MAX_MESSAGE_ENTRIES,
    MAX_MESSAGES,
    check_entries,
    count_values,
)
from cluster.edge.openai_requests import parse_chat_completion
from cluster.edge.responses.answers import ResponseBuilder, ResponseEvents, ResponseOptions
from cluster.edge.responses.archive import WITHOUT_CONVERSATION, Origin, missing_response
from cluster.edge.responses.fields import RESPONSES_FIELDS
from cluster.edge.responses.moves import MovedRequest
from cluster.edge.responses.translation import translate
from cluster.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.edge.api import Body
    from cluster.edge.fields import FieldTable
    from cluster.edge.openai import BackgroundWork, ResponseSpec, Usage
    from cluster.edge.openai_requests import ParsedRequest
    from cluster.edge.responses.archive import Action, FoundResponse, ResponseArchive
    from cluster.edge.responses.background import BackgroundResponse
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer

_HEAD_BYTES = 1024
"""Bytes of a response's own fields, at most."""
_ITEM_ID = re.compile("(?:msg|rs|fc)_([0-9a-f]{32})_[0-9]{1,6}")


class ResponsesApi(Api):
    """The API of /v1/responses.

    Args:
        tokenizer: Tokenizer of the served models.
        archive: Keeps the answers.
        max_conversation_bytes: Most bytes that one request continues.
    """

    route: ClassVar[str] = "responses"
    summary: ClassVar[str] = "Answer items, and keep the answer if it may be kept"
    fields: ClassVar[FieldTable] = RESPONSES_FIELDS
    answer_schema: ClassVar[str] = "Response"

    def __init__(
        self, tokenizer: Tokenizer, archive: ResponseArchive, max_conversation_bytes: int
    ) -> None:
        super().__init__(tokenizer)
        self._archive = archive
        self._max_conversation_bytes = max_conversation_bytes

    async def parse(self, body: Mapping[str, Any], tenant: str) -> ParsedRequest:
        """See `cluster.edge.api.Api.parse`."""
        values = read_fields(body, RESPONSES_FIELDS)
        is_background = values.get("background", False)
        if is_background:
            self._check_background(values)
        history = _History(self._archive, tenant, self._max_conversation_bytes)
        turns: tuple[bytes, ...] = ()
        if "previous_response_id" in values:
            turns = await history.turns_of(values["previous_response_id"])
        items = values["input"]
        if isinstance(items, list):
            items = [await history.resolved(item, f"input[{i}]") for i, item in enumerate(items)]
            # References share an item in memory, but nothing that is made of them does.
            check_entries(items, MAX_MESSAGE_ENTRIES, "input")
        response_id = f"resp_{uuid.uuid4().hex}"
        return self._parsed(body, {**values, "input": items}, turns, response_id)

    def parse_moved(self, moved: MovedRequest) -> ParsedRequest:
        """Parse the request of another ingress's response in the background.

        Raises:
            BadRequestError: This ingress, of another version, does not know one of its fields.
        """
        body = orjson.loads(moved.body)
        values = read_fields(body, RESPONSES_FIELDS)
        return self._parsed(body, values, moved.turns, moved.response_id, moved.recording)

    def _parsed(
        self,
        body: Mapping[str, Any],
        values: Mapping[str, Any],
        turns: tuple[bytes, ...],
        response_id: str,
        recording: bytes = b"",
    ) -> ParsedRequest:
        is_background = values.get("background", False)
        previous = _decoded(turns, values["input"])
        found = translate(body, values, previous)
        with naming_fields(found.field_names):
            parsed = parse_chat_completion(found.chat)
        own = ResponseOptions(
            response_id=response_id,
            repeated=found.repeated,
            has_logprobs=found.has_logprobs,
            namespaces=found.namespaces,
            is_stored=self._archive.is_on and values.get("store", True),
            is_background=is_background,
            items=found.items,
            previous=turns,
            body={**body, "input": values["input"]} if is_background else {},
            recording=recording,
        )
        if is_background:
            self._check_room(own)
        return replace(
            parsed,
            response_options={
                **parsed.response_options,
                "own": own,
                "start_background": self._start if is_background else None,
            },
            drops_messages=values.get("truncation") == "auto",
            field_names=found.field_names,
        )

    def whole(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        deltas: list[OutputDelta],
        usage: Usage,
    ) -> Body:
        """See `cluster.edge.api.Api.whole`."""
        builder = ResponseBuilder(self._tokenizer, request, spec)
        for delta in deltas:
            builder.add(delta)
        _, response = builder.finish(usage)
        self._keep(request, spec, response)
        return response

    def stream(self, request: EngineRequest, spec: ResponseSpec) -> ResponseEvents:
        """See `cluster.edge.api.Api.stream`."""
        builder = ResponseBuilder(self._tokenizer, request, spec)

        def keep(response: Body) -> None:
            self._keep(request, spec, response, bytes(builder.recording))

        return ResponseEvents(builder, keep)

    def _keep(
        self,
        request: EngineRequest,
        spec: ResponseSpec,
        response: Body,
        recording: bytes = b"",
    ) -> None:
        origin = _origin(request, spec)
        if spec.own.is_stored and not self._archive.keep(origin, response, recording):
            # Only the finished answer shows that it is larger than the store.
            response["store"] = False

    def _start(
        self, request: EngineRequest, spec: ResponseSpec, work: BackgroundWork
    ) -> StartedResponse:
        builder = ResponseBuilder(self._tokenizer, request, spec)
        origin, own = _origin(request, spec), spec.own

        # The answer needs the log probabilities of all tokens.
        begins_again = own.has_logprobs or not work.can_continue

        def moved(running: BackgroundResponse) -> MovedRequest:
            return MovedRequest(
                tenant=work.tenant,
                source=work.source,
                request_id=spec.request_id,
                response_id=own.response_id,
                created=spec.created,
                body=orjson.dumps(own.body),
                turns=own.previous,
                request=request,
                token_ids=[] if begins_again else running.token_ids,
                left_s=work.left_s(),
                recording=b"" if begins_again else running.recording(),
            )

        body = self._archive.start(origin, builder, work, moved)
        return StartedResponse(
            body, partial(self._archive.events, origin.tenant, origin.response_id)
        )

    def _check_background(self, values: Mapping[str, Any]) -> None:
        if not self._archive.is_on:
            raise bad_field("background", "needs stored responses, but this server stores none")
        if not values.get("store", True):
            raise bad_field("background", "needs store: clients read the response later")

    def _check_room(self, own: ResponseOptions) -> None:
        """Refuse a response in the background if not even a failed one could be read later."""
        known = [orjson.dumps(each) for each in (own.items, own.repeated)]
        num_bytes = sum(map(len, (*known, *own.previous))) + _HEAD_BYTES
        most = self._archive.max_text_bytes
        if num_bytes > most:
            text = f"needs {num_bytes} bytes of this server's store of responses, which has {most}"
            raise bad_field("background", f"{text}; leave it out, or send less input")


def _origin(request: EngineRequest, spec: ResponseSpec) -> Origin:
    own: ResponseOptions = spec.own
    return Origin(request.tenant, own.response_id, own.items, own.previous)


class _StoredItem(NamedTuple):
    """An item of an answer, and its size as JSON."""

    item: dict[str, Any]
    num_bytes: int


class _History:
    """What one request reads from the store.

    Args:
        archive: The responses.
        tenant: The request's tenant.
        max_bytes: Most bytes to read, and most bytes of the conversation that is read: of what the
            request continues, and of an item for each reference to it.
    """

    def __init__(self, archive: ResponseArchive, tenant: str, max_bytes: int) -> None:
        self._archive = archive
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_bytes_read = 0
        self._responses: set[str] = set()
        self._items: dict[str, _StoredItem] = {}

    async def turns_of(self, response_id: str) -> tuple[bytes, ...]:
        """Return the conversation up to and with a response.

        Raises:
            BadRequestError: Nothing is stored here, the response has not ended well, or the
                conversation is too long, or was too large to be stored.
            NotFoundError: The tenant has no such response.
        """
        stored, _ = await self._stored("conversation", response_id, "previous_response_id")
        if not stored.turns:
            text = f"names a response {WITHOUT_CONVERSATION}: send the whole conversation as input"
            raise bad_field("previous_response_id", text)
        self._count(sum(map(len, stored.turns)), "previous_response_id")
        return stored.turns

    async def resolved(self, item: object, path: str) -> object:
        """Return an item, or the item of an earlier answer that it refers to.

        Raises:
            BadRequestError: Nothing is stored here, or the items are too long.
            NotFoundError: The tenant has no such item.
        """
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        path = f"{path}.id"
        item_id = item.get("id")
        match = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
        if match is None:
            raise bad_field(path, f"must be the id of an item of an answer, got {shown(item_id)}")
        response_id = f"resp_{match[1]}"
        if response_id not in self._responses:
            stored, response = await self._stored("read", response_id, path)
            self._num_bytes_read += len(stored.body)
            self._check(self._num_bytes_read, path)
            self._responses.add(response_id)
            for each in response["output"]:
                self._items[each["id"]] = _StoredItem(each, len(orjson.dumps(each)))
        if item_id not in self._items:
            raise NotFoundError(f"{path} is {shown(item_id)}, which no answer has", param=path)
        found = self._items[item_id]
        self._count(found.num_bytes, path)
        return found.item

    async def _stored(
        self, action: Action, response_id: str, param: str
    ) -> tuple[FoundResponse, Body]:
        """Return a response that can be continued, and its decoded body."""
        if not self._archive.is_on:
            text = (
                "needs stored responses, but this server stores none: send all of the conversation"
            )
            raise bad_field(param, f"{text} as input")
        stored = await self._archive.find(action, self._tenant, response_id)
        if stored is None:
            raise NotFoundError(
                f"{param}: {missing_response(response_id)}; send the whole conversation as input",
                param=param,
            )
        response = orjson.loads(stored.body)
        status = response["status"]
        if status not in {"completed", "incomplete"}:
            raise bad_field(param, f"names a response that is {status}: it cannot be continued")
        return stored, response

    def _count(self, num_bytes: int, param: str) -> None:
        self._num_bytes += num_bytes
        self._check(self._num_bytes, param)

    def _check(self, num_bytes: int, param: str) -> None:
        if num_bytes > self._max_bytes:
            text = f"stands for more than the {self._max_bytes} bytes that a request may have"
            raise bad_field(param, text)


def _decoded(turns: Sequence[bytes], items: str | list[Any]) -> list[dict[str, Any]]:
    """Return the items of earlier turns, which have the same limits as those of a body.

    They hold together with the request's own. No more is decoded than one turn beyond the limits.

    Raises:
        BadRequestError: There are too many items, or values in them.
    """
    own = items if isinstance(items, list) else []
    num_values = count_values(own, MAX_MESSAGE_ENTRIES)
    previous: list[dict[str, Any]] = []
    for turn in turns:
        more = orjson.loads(turn)
        num_values += count_values(more, MAX_MESSAGE_ENTRIES)
        previous += more
        if len(own) + len(previous) > MAX_MESSAGES or num_values > MAX_MESSAGE_ENTRIES:
            text = f"and input hold more than {MAX_MESSAGES} items or {MAX_MESSAGE_ENTRIES} values"
            raise bad_field("previous_response_id", f"{text}; send a shorter conversation as input")
    return previous
