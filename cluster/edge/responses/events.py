"""Events of a response's stream: their numbers, beginning and end; those of one made before. Pure.

Source: OpenAI API reference, streaming events; GET /v1/responses/{response_id} with `stream` and
`starting_after`. The Open Responses specification ends a stream with `[DONE]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from cluster.edge.api import openai_error_body
from cluster.edge.fields import bad_field
from cluster.edge.responses.items import OutputItems

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.edge.responses.items import Event
    from cluster.edge.responses.recording import Part
    from cluster.errors import ServingError

Body = dict[str, Any]

DONE = b"data: [DONE]\n\n"
"""The end of a stream whose response did not fail."""
_AFTER = "starting_after"


class EventEncoder:
    """Encoder of one stream's events, which it numbers from 0.

    Args:
        after: Number of the last event that the client has; -1 for none.

    Attributes:
        num_events: Events so far, with those that the client has.
    """

    def __init__(self, after: int = -1) -> None:
        self._after = after
        self.num_events = 0

    def encode(self, events: Iterable[Event]) -> bytes:
        """Return the next events, without those that the client has."""
        encoded = bytearray()
        for event in events:
            if self.num_events > self._after:
                encoded += encode_event(event, self.num_events)
            self.num_events += 1
        return bytes(encoded)


def encode_event(event: Event, number: int) -> bytes:
    """Return an event with its number."""
    kind = event["type"]
    body = orjson.dumps({"type": kind, "sequence_number": number, **event})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


def begin_events(response: Body) -> list[Event]:
    """Return the first events of a stream; `response` has no output yet."""
    second = "queued" if response["background"] else "in_progress"
    return [
        {"type": kind, "response": response} for kind in ("response.created", f"response.{second}")
    ]


def error_event(details: Body) -> Event:
    """Return the event of an error.

    OpenAI's form of it has the details beside its type, Open Responses' below `error`.
    """
    flat = {name: details[name] for name in ("code", "message", "param")}
    return {"type": "error", **flat, "error": details}


def last_event(response: Body) -> Event:
    """Return the last event of a stream, with the finished response."""
    return {"type": f"response.{response['status']}", "response": response}


class Progress(NamedTuple):
    """What is new of a response.

    Attributes:
        response: The response without its output.
        parts: Parts of its output, in their order.
    """

    response: Body
    parts: Sequence[Part]


class EndedResponse(NamedTuple):
    """A response that has ended.

    Attributes:
        response: The response without its output.
        body: All of it as JSON. It stays encoded, as streams to many slow clients may hold it.
    """

    response: Body
    body: bytes


class ReplayedEvents:
    """Writer of the events of a response that another request has made, or makes.

    Args:
        response_id: Its id.
        after: Number of the last event that the client has; -1 for none.
    """

    def __init__(self, response_id: str, after: int = -1) -> None:
        self._after = after
        self._events = EventEncoder(after)
        self._output = OutputItems(response_id.removeprefix("resp_"))

    def add(self, progress: Progress) -> bytes:
        """Return the events of what is new, none while the client has more of them.

        It may, as a response that moves to another ingress is computed again from where it was.
        """
        encoded = bytearray()
        response = progress.response
        if not self._events.num_events:
            status = "queued" if response["background"] else "in_progress"
            encoded += self._events.encode(begin_events(_unfinished(response, status)))
        for part in progress.parts:
            if part.kind == "begin":
                running = _unfinished(response, "in_progress")
                events = [{"type": "response.in_progress", "response": running}]
            else:
                events = self._output.add(part)
            encoded += self._events.encode(events)
        return bytes(encoded)

    def finish(self, ended: EndedResponse) -> bytes:
        """Return the end of the stream.

        Raises:
            BadRequestError: There are not as many events as the client has.
        """
        events: list[Event] = []
        done = DONE
        response, status = ended.response, ended.response["status"]
        if status in {"completed", "incomplete"}:
            events = self._output.finish(status)
        elif status == "failed":
            details = {"type": "server_error", "param": None, **response["error"]}
            events, done = [error_event(details)], b""
        last = {**last_event(response), "response": orjson.Fragment(ended.body)}
        encoded, num_events = self._events.encode([*events, last]), self._events.num_events
        if self._after >= num_events:
            text = f"is {self._after}, but the last event of the response is {num_events - 1}"
            raise bad_field(_AFTER, text)
        return encoded + done

    def fail(self, error: ServingError) -> bytes:
        """Return the end of a stream that breaks, while its response may run on.

        Its event has the number of the last one, so that a client does not miss one by it.
        """
        last = max(self._events.num_events - 1, self._after)
        details = openai_error_body(error)["error"]
        if error.status >= 500:
            how = f"with {_AFTER}={last}" if last >= 0 else "again"
            details["message"] += f"; the response goes on: read it {how}"
        return encode_event(error_event(details), max(last, 0))


RUNNING = frozenset({"queued", "in_progress"})
"""Statuses of a response that has not ended."""


def _unfinished(response: Body, status: str) -> Body:
    """Return a response as it was before any output."""
    ends = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    return {**response, **ends, "status": status, "output": []}
