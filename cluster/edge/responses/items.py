"""Output items of a response, and the events of a stream that builds them. Pure.

Every item is opened, filled and closed by events, so a whole answer and a stream have the same
items. An item ends when output of another kind begins.

Source: OpenAI API reference (openai-python 3.57 types of responses); reasoning as vLLM 0.32 has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cluster.edge.responses.recording import Part

Event = dict[str, Any]
Item = dict[str, Any]

Status = Literal["completed", "incomplete"]
_Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: dict[_Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The items of one response, in the order of the model's output.

    Args:
        key: Part of all ids, that of the response.

    Attributes:
        items: All items that have begun; the last one may be open.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._kind: _Kind | None = None
        self.items: list[Item] = []

    def add(self, part: Part) -> list[Event]:
        """Add a part of the output; return its events."""
        events: list[Event] = []
        match part.kind:
            case "call":
                fields: Item = {"call_id": part.call_id, "name": part.text}
                if part.namespace is not None:
                    fields["namespace"] = part.namespace
                fields["arguments"] = ""
                events = [*self.close("completed"), *self._open("function_call", fields)]
            case "arguments":
                events = [self._delta("response.function_call_arguments", part.text)]
            case "end":
                events = self.close("completed")
            case "cut":
                events = self.close("incomplete")
            case "content":
                events = self._begin_text("message", {"role": "assistant"})
                self._logprobs += part.logprobs
                delta = self._delta("response.output_text", part.text)
                events.append({**delta, "logprobs": part.logprobs})
            case "reasoning":
                events = self._begin_text("reasoning", {"summary": []})
                events.append(self._delta("response.reasoning_text", part.text))
            case "begin":
                pass  # not of an item
        return events

    def whole_items(self) -> list[Item]:
        """Return the items of the same answer without a stream; all must have ended.

        Incomplete calls, of which only a stream has the beginning, are left out. The text around
        one is a single item.
        """
        items: list[Item] = []
        for item in self.items:
            if _is_incomplete_call(item):
                continue
            if items and item["type"] == items[-1]["type"] != "function_call":
                items[-1] = _joined(items[-1], item)
            else:
                items.append(item)
        return items

    def finish(self, status: Status) -> list[Event]:
        """End the response; an answer without any whole output has one empty message.

        Args:
            status: Whether the model has ended its output itself.
        """
        events = []
        if all(map(_is_incomplete_call, self.items)):
            events = self._begin_text("message", {"role": "assistant"})
        return events + self.close(status)

    def close(self, status: Status) -> list[Event]:
        """End the open item, if there is one; return its events."""
        if self._kind is None:
            return []
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        events: list[Event]
        if self._kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events = [{"type": "response.function_call_arguments.done", **self._place(), **done}]
        else:
            content = self._content(text, self._logprobs)
            item["content"] = [content]
            done = {name: content[name] for name in ("text", "logprobs") if name in content}
            events = [
                {"type": f"response.{content['type']}.done", **self._place(), **done},
                {"type": "response.content_part.done", **self._place(), "part": content},
            ]
        events.append(self._item_event("done"))
        self._kind, self._pieces, self._logprobs = None, [], []
        return events

    def _begin_text(
        self, kind: Literal["message", "reasoning"], fields: dict[str, Any]
    ) -> list[Event]:
        """Open an item of this kind, unless one is open."""
        if self._kind == kind:
            return []
        events = [*self.close("completed"), *self._open(kind, {**fields, "content": []})]
        part = self._content("", [])
        return [*events, {"type": "response.content_part.added", **self._place(), "part": part}]

    def _open(self, kind: _Kind, fields: dict[str, Any]) -> list[Event]:
        item_id = f"{_PREFIXES[kind]}_{self._key}_{len(self.items)}"
        self.items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._kind = kind
        return [self._item_event("added")]

    def _delta(self, name: str, text: str) -> Event:
        self._pieces.append(text)
        return {"type": f"{name}.delta", **self._place(), "delta": text}

    def _content(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _place(self) -> Event:
        index = len(self.items) - 1
        place = {"item_id": self.items[index]["id"], "output_index": index}
        return place if self._kind == "function_call" else {**place, "content_index": 0}

    def _item_event(self, what: str) -> Event:
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }


def _is_incomplete_call(item: Item) -> bool:
    return (item["type"], item["status"]) == ("function_call", "incomplete")


def _joined(item: Item, more: Item) -> Item:
    """Return a message or reasoning with the text of two, and the id of the first."""
    [before], [behind] = item["content"], more["content"]
    content = {**before, "text": before["text"] + behind["text"]}
    if "logprobs" in before:
        content["logprobs"] = before["logprobs"] + behind["logprobs"]
    return {**item, "status": more["status"], "content": [content]}
