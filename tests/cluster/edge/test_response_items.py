"""Output items of /v1/responses and the events that build them."""

import itertools
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.edge.families.message import (
    ArgumentsPiece,
    CallEnd,
    CallStart,
    ContentPiece,
    ReasoningPiece,
)
from cluster.edge.responses.items import OutputItems
from cluster.edge.responses.recording import part_of

ARGUMENTS = '{"city": "Bern"}'
CALL = [CallStart(0, "weather", "call_1"), ArgumentsPiece(0, ARGUMENTS), CallEnd(0)]
LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def built(pieces, status="completed"):
    """The events of a message's pieces, and the items at the end."""
    output = OutputItems("k")
    events = []
    for piece in pieces:
        logprobs = [LOGPROB] if isinstance(piece, ContentPiece) else []
        events += deepcopy(output.add(part_of(piece, logprobs, {})))
    events += deepcopy(output.finish(status))
    return events, output.items


def text_part(text, logprobs=()):
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def test_reasoning_a_text_and_a_call_are_items_in_their_order():
    pieces = [ReasoningPiece("Hm."), ContentPiece("Lo"), ContentPiece("ok:")]
    events, items = built([*pieces, *CALL, ContentPiece("Done.")])
    first = {"item_id": "rs_k_0", "output_index": 0, "content_index": 0}
    second = {"item_id": "msg_k_1", "output_index": 1, "content_index": 0}
    third = {"item_id": "fc_k_2", "output_index": 2}
    reasoning = {"type": "reasoning", "id": "rs_k_0", "summary": []}
    message = {"type": "message", "id": "msg_k_1", "role": "assistant"}
    call = {"type": "function_call", "id": "fc_k_2", "call_id": "call_1", "name": "weather"}
    thought = {"type": "reasoning_text", "text": "Hm."}
    two = [LOGPROB, LOGPROB]
    assert events[:18] == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**reasoning, "status": "in_progress", "content": []},
        },
        {
            "type": "response.content_part.added",
            **first,
            "part": {"type": "reasoning_text", "text": ""},
        },
        {"type": "response.reasoning_text.delta", **first, "delta": "Hm."},
        {"type": "response.reasoning_text.done", **first, "text": "Hm."},
        {"type": "response.content_part.done", **first, "part": thought},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {**reasoning, "status": "completed", "content": [thought]},
        },
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**message, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **second, "part": text_part("")},
        {"type": "response.output_text.delta", **second, "delta": "Lo", "logprobs": [LOGPROB]},
        {"type": "response.output_text.delta", **second, "delta": "ok:", "logprobs": [LOGPROB]},
        {"type": "response.output_text.done", **second, "text": "Look:", "logprobs": two},
        {"type": "response.content_part.done", **second, "part": text_part("Look:", two)},
        {
            "type": "response.output_item.done",
            "output_index": 1,
            "item": {**message, "status": "completed", "content": [text_part("Look:", two)]},
        },
        {
            "type": "response.output_item.added",
            "output_index": 2,
            "item": {**call, "status": "in_progress", "arguments": ""},
        },
        {
            "type": "response.function_call_arguments.delta",
            **third,
            "delta": ARGUMENTS,
        },
        {
            "type": "response.function_call_arguments.done",
            **third,
            "name": "weather",
            "arguments": ARGUMENTS,
        },
        {
            "type": "response.output_item.done",
            "output_index": 2,
            "item": {**call, "status": "completed", "arguments": ARGUMENTS},
        },
        {
            "type": "response.output_item.added",
            "output_index": 3,
            "item": {**message, "id": "msg_k_3", "status": "in_progress", "content": []},
        },
    ]
    assert items == [event["item"] for event in events if event["type"].endswith("item.done")]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "message"]


def test_an_answer_without_output_has_an_empty_message():
    events, items = built([])
    assert [item["content"] for item in items] == [[text_part("")]]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_only_the_last_item_can_be_incomplete(status):
    _, items = built([ReasoningPiece("Hm."), ContentPiece("So")], status)
    assert [item["status"] for item in items] == ["completed", status]
    _, items = built([ContentPiece("So"), *CALL], status)
    assert [item["status"] for item in items] == ["completed", "completed"]


def test_a_cut_call_is_incomplete_and_keeps_its_arguments():
    pieces = [CALL[0], ArgumentsPiece(0, '{"ci'), CallEnd(0, is_complete=False)]
    _, [item, message] = built(pieces, "incomplete")
    assert (item["status"], item["arguments"]) == ("incomplete", '{"ci')
    assert message["content"] == [text_part("")]


def test_the_whole_items_have_no_incomplete_call_and_one_message_instead_of_those_around_it():
    output = OutputItems("k")
    broken = [CALL[0], ArgumentsPiece(0, '{"ci'), CallEnd(0, is_complete=False)]
    for piece in [ContentPiece("So"), *broken, ContentPiece(" it is")]:
        output.add(part_of(piece, [LOGPROB] if isinstance(piece, ContentPiece) else [], {}))
    output.finish("incomplete")
    [message] = output.whole_items()
    assert (message["id"], message["status"]) == ("msg_k_0", "incomplete")
    assert message["content"] == [text_part("So it is", [LOGPROB, LOGPROB])]


KINDS = st.sampled_from([ContentPiece, ReasoningPiece, ArgumentsPiece])


@given(st.lists(st.tuples(KINDS, st.text(min_size=1, max_size=6)), max_size=8), st.data())
def test_any_division_into_pieces_gives_the_same_items_and_texts(runs, data):
    whole, divided = [], []
    for kind, text in runs:
        cuts = data.draw(st.sets(st.integers(1, len(text)), max_size=3))
        bounds = sorted({0, *cuts, len(text)})
        texts = [text[a:b] for a, b in itertools.pairwise(bounds)]
        for pieces, its_texts in ((whole, [text]), (divided, texts)):
            if kind is ArgumentsPiece:
                own = [ArgumentsPiece(0, each) for each in its_texts]
                pieces.extend([CALL[0], *own, CALL[2]])
            else:
                pieces.extend(map(kind, its_texts))
    _, expected = built(whole)
    events, items = built(divided)
    without_logprobs(expected)
    without_logprobs(items)
    assert items == expected
    sent = {}
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            sent[event["item_id"]] = sent.get(event["item_id"], "") + event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            done = event.get("text", event.get("arguments"))
            assert sent.pop(event["item_id"], "") == done
    assert not sent


def without_logprobs(items):
    for item in items:
        for content in item.get("content", ()):
            content.pop("logprobs", None)
