"""Several choices of a request over HTTP: a stop string ends one, and too many are refused."""

from __future__ import annotations

import pytest

from replicas.messages import Abort, Accepted, AddRequest, TokenOutput
from tests.cluster.engines import ScriptedEngine
from tests.cluster.test_seams import ask, serving

pytestmark = pytest.mark.process

X, STOP = (2 + ord(letter) - ord("!") for letter in "x!")
"""Tokens of the byte tokenizer."""


def stops_one(message):
    """Two tokens for each choice, of which the second one's are the stop string; then the ends."""
    match message:
        case AddRequest():
            request_id = message.request.request_id
            tokens = [[X, X], [X, STOP], [X, X]]
            outputs = [TokenOutput(request_id, 0, t, choice=i) for i, t in enumerate(tokens)]
            return [Accepted(request_id, 0, 0, 0, 1, len(tokens)), *outputs]
        case Abort(choices=[1]):
            [request_id] = message.request_ids
            return [TokenOutput(request_id, 2, [X], "length", choice=i) for i in (2, 0)]
    return []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_one_choice_and_the_others_continue(stream):
    async with (
        ScriptedEngine("both", "b", stops_one) as engine,
        serving(engine) as (_, post),
    ):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        response = await ask(post, n=3, stop="!", max_tokens=3, **options)
        [add], aborts = engine.received(AddRequest), engine.received(Abort)
    assert response.status == 200
    assert (add.mode, add.request.sampling.n) == ("local", 3)
    assert aborts == [Abort([add.request.request_id], "stop", [1])]
    bodies = [e for e in response.events if e != "[DONE]"] if stream else [response.body]
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    for body in bodies:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    assert texts == {0: "xxx", 1: "x", 2: "xxx"}
    assert reasons == {0: "length", 1: "stop", 2: "length"}
    assert bodies[-1]["usage"]["completion_tokens"] == 3 + 2 + 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 5}, "no replica runs more than 4 choices"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"n": 0}, "n must be 1 to 128, got 0"),
        ({"n": 2, "best_of": 3}, "best_of"),
    ],
)
async def test_choices_that_cannot_run_are_refused_with_the_field(fields, words):
    async with (
        ScriptedEngine("both", "b", stops_one) as engine,
        serving(engine) as (_, post),
    ):
        response = await ask(post, **fields)
        assert engine.received(AddRequest) == []
    error = response.body["error"]
    assert response.status == 400
    assert words in error["message"]
    assert error["param"] == ("best_of" if "best_of" in fields else "n")
