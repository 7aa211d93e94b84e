"""Pages of the items that a response has been made from. Pure.

Source: OpenAI API reference, GET /v1/responses/{response_id}/input_items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from cluster.edge.fields import bad_field, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Item = dict[str, Any]

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
_ORDERS = ("asc", "desc")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_OTHER_PREFIX = "item"


def input_items(turns: Sequence[bytes], num_outputs: int, response_id: str) -> list[Item]:
    """Return the items that a response has been made from, each with an id.

    Args:
        turns: The conversation up to and with the response, see `StoredResponse`.
        num_outputs: Items of the response's own output, the last ones of the conversation.
        response_id: The response, whose id makes those of items without one.
    """
    items: list[Item] = [item for turn in turns for item in orjson.loads(turn)]
    items = items[: len(items) - num_outputs]
    key = response_id.removeprefix("resp_")
    return [_shown_item(item, f"{key}_in_{i}") for i, item in enumerate(items)]


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that a query asks for, by `limit`, `order` and `after`.

    Raises:
        BadRequestError: A parameter is wrong.
    """
    text = query.get("limit", str(DEFAULT_LIMIT))
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_LIMIT))
    if not is_number or not 1 <= int(text) <= MAX_LIMIT:
        raise bad_field("limit", f"must be a number from 1 to {MAX_LIMIT}, got {shown(text)}")
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise bad_field("order", f"must be one of {', '.join(_ORDERS)}; got {shown(order)}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = 0
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise bad_field("after", f"is {shown(query['after'])}, which no input item has")
        begin = ids.index(query["after"]) + 1
    end = begin + int(text)
    page = ordered[begin:end]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": end < len(ordered),
    }


def _shown_item(item: Item, key: str) -> Item:
    """Return an item in the form of an answer's items: with an id, and a text as a part."""
    kind = item.get("type", "message")
    prefix = _PREFIXES.get(kind, _OTHER_PREFIX)
    whole = {**item, "type": kind, "id": item.get("id") or f"{prefix}_{key}"}
    if kind == "reasoning":
        return whole
    whole["status"] = item.get("status") or "completed"
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        more: Item = {"annotations": []} if part == "output_text" else {}
        whole["content"] = [{"type": part, "text": item["content"], **more}]
    return whole
