"""/v1/responses over HTTP: whole and streamed answers, the store, errors."""

import asyncio
import itertools
import json
import re

import pytest

from cluster.config.schema import AdmissionConfig, IngressConfig
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from cluster.errors import ReplicaLostError
from replicas.messages import TokenLogprob
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import Client
from tests.cluster.edge.test_tool_calls import CALL, PARAMETERS, EchoBackend, ToolBackend

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS}
ANSWER = f"<think>\nHm.\n</think>\n\nLook:\n{CALL}"
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ber'
_IDS = re.compile(r"(resp|msg|rs|fc|call)_[0-9a-f]{24,32}")


class Server:
    """An application that keeps its store between requests."""

    def __init__(self, backend, *, admission=None, **ingress):
        self.backend = backend
        config = IngressConfig(**ingress)
        self._app = create_app(backend, config, version="1", admission=admission)

    def request(self, method, path, body=b"", headers=()):
        return asyncio.run(Client(self._app).request(method, path, body, headers))

    def last_prompt(self):
        ids = self.backend.requests[-1].prompt_token_ids
        return self.backend.tokenizer.decode(ids, skip_special_tokens=False)

    def create(self, headers=(), **fields):
        body = {"model": "demo", "input": "hi", **fields}
        return self.request("POST", PATH, body, headers)

    def answer(self, **fields):
        client = self.create(**fields)
        assert client.status == 200, client.body
        return client.body

    def refusal(self, status=400, **fields):
        client = self.create(**fields)
        assert client.status == status, client.body
        return client.body["error"]

    def events(self, **fields):
        client = self.create(stream=True, **fields)
        assert client.status == 200, client.chunks
        return read_events(b"".join(client.chunks))


def read_events(raw):
    """The events of a stream, and whether it has its normal end."""
    assert raw.endswith(b"\n\n")
    *blocks, last = raw.decode()[:-2].split("\n\n")
    is_whole = last == "data: [DONE]"
    events = []
    for block in blocks if is_whole else [*blocks, last]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, is_whole


def same_ids(value):
    """A value without its times, and with equal ids of each kind."""
    text = _IDS.sub(r"\1_x", json.dumps(value))
    return json.loads(re.sub(r'"(created|completed)_at": [0-9]+', r'"\1_at": 0', text))


def test_a_whole_answer():
    body = Server(EchoBackend()).answer(instructions="Brief.", max_output_tokens=10)
    assert body["id"].startswith("resp_")
    text = {"type": "output_text", "text": "[system]Br", "annotations": [], "logprobs": []}
    assert same_ids(body["output"]) == [
        {
            "id": "msg_x_0",
            "type": "message",
            "status": "incomplete",
            "role": "assistant",
            "content": [text],
        }
    ]
    assert (body["status"], body["completed_at"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"] == {
        "input_tokens": 33,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 43,
    }
    assert (body["object"], body["model"], body["store"]) == ("response", "demo", True)
    assert (body["instructions"], body["max_output_tokens"]) == ("Brief.", 10)


def test_a_stream_builds_the_whole_answer():
    server = Server(ToolBackend(ANSWER))
    whole = server.answer(tools=[TOOL], metadata={"a": "b"})
    events, is_whole = server.events(tools=[TOOL], metadata={"a": "b"})
    assert is_whole
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    first, last = events[0]["response"], events[-1]["response"]
    assert same_ids(last) == same_ids(whole)
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == last[
        "output"
    ]
    assert first == events[1]["response"]
    changed = {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    assert first == {**last, **changed}
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_any_division_of_the_output_gives_the_same_answer(size, reason):
    text = f"{ANSWER}\nAnd {CALL}{CALL[:40]}"
    expected = Server(ToolBackend(text, reason, 7)).answer(tools=[TOOL])
    server = Server(ToolBackend(text, reason, size))
    found = server.answer(tools=[TOOL])
    events, _ = server.events(tools=[TOOL])
    assert events[-1]["type"] == f"response.{expected['status']}"
    for response in (found, events[-1]["response"]):
        assert same_ids(response["output"]) == same_ids(expected["output"])


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    "text", [f"Look:\n{CALL}\n\n{BROKEN}\nSo.", BROKEN, f"Look:\n{BROKEN}{CALL}"]
)
def test_a_stream_with_a_broken_call_ends_with_the_whole_answer_which_can_be_continued(
    text, reason
):
    server = Server(ToolBackend(text, reason))
    whole = server.answer(tools=[TOOL])
    events, _ = server.events(tools=[TOOL])
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert any(i["type"] == "function_call" and i["status"] == "incomplete" for i in done)
    last = events[-1]["response"]
    without_places = [
        [{name: value for name, value in same_ids(item).items() if name != "id"} for item in items]
        for items in (last["output"], whole["output"])
    ]
    assert without_places[0] == without_places[1]
    calls = [i for i in done if i["type"] == "function_call" and i["status"] == "completed"]
    assert [i for i in last["output"] if i["type"] == "function_call"] == calls
    server.answer(previous_response_id=whole["id"])
    expected = server.last_prompt()
    server.answer(previous_response_id=last["id"])
    assert server.last_prompt() == expected
    user = {"role": "user", "content": "hi"}
    server.answer(input=[user, *last["output"], user])
    assert server.last_prompt() == expected
    references = [{"type": "item_reference", "id": item["id"]} for item in last["output"]]
    server.answer(input=[user, *references, user])
    assert server.last_prompt() == expected
    # A client may send back what it has collected from the events.
    server.answer(input=[user, *done, user])


def test_a_stream_that_fails_tells_the_error_and_what_there_is():
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        raise ReplicaLostError("the replica died")

    events, is_whole = Server(FakeBackend(script)).events()
    assert not is_whole
    error, failed = events[-2:]
    assert error["type"] == "error"
    assert (error["code"], error["message"]) == ("replica_lost", "the replica died")
    assert error["error"]["type"] == "ReplicaLostError"
    response = failed["response"]
    assert response["error"] == {"code": "replica_lost", "message": "the replica died"}
    assert [(i["status"], i["content"][0]["text"]) for i in response["output"]] == [
        ("incomplete", "he")
    ]


def test_an_aborted_answer_is_an_error_and_is_not_stored():
    server = Server(ToolBackend(ANSWER, "abort"))
    refused = server.create()
    assert refused.status == 503
    assert "send the request again" in refused.body["error"]["message"]
    events, is_whole = server.events()
    assert not is_whole
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "not_ready")
    assert server.request("GET", f"{PATH}/{response['id']}").status == 404


def test_log_probabilities_are_those_of_the_text():
    backend = ToolBackend()

    async def script(request, emit):
        for piece in ("<think>", "So, hm", "</think>", "So", " it", " is. "):
            ids = backend.tokenizer.encode(piece)
            logprobs = [[TokenLogprob(token_id, -0.5, 1)] * 2 for token_id in ids]
            await emit(OutputDelta(0, piece, ids, logprobs=logprobs))
        await emit(OutputDelta(0, "", [], "stop"))
        return Usage(3, 30)

    backend.script = script
    server = Server(backend)
    whole = server.answer(include=["message.output_text.logprobs"], top_logprobs=1)
    content = whole["output"][1]["content"][0]
    assert content["text"] == "So it is. "
    assert "".join(token["token"] for token in content["logprobs"]) == "So it is. "
    first = {"token": "S", "logprob": -0.5, "bytes": [83]}
    assert content["logprobs"][0] == {**first, "top_logprobs": [first]}
    events, _ = server.events(include=["message.output_text.logprobs"], top_logprobs=1)
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [token for logprobs in deltas for token in logprobs] == content["logprobs"]
    assert backend.requests[0].sampling.logprobs == 1


def test_a_conversation_is_continued_by_its_id():
    server = Server(EchoBackend())
    first = server.answer(input="one", instructions="Brief.", max_output_tokens=11)
    second = server.answer(input="two", previous_response_id=first["id"], max_output_tokens=200)
    assert second["output"][0]["content"][0]["text"] == (
        "[user]one[assistant][system]Bri[user]two[assistant]"
    )
    assert second["previous_response_id"] == first["id"]
    # The conversation of the second one does not need the first one.
    assert server.request("DELETE", f"{PATH}/{first['id']}").status == 200
    third = server.answer(input="three", previous_response_id=second["id"])
    assert "[user]one[assistant]" in third["output"][0]["content"][0]["text"]


def test_a_streamed_answer_is_stored_with_its_calls():
    server = Server(ToolBackend(ANSWER))
    events, _ = server.events(tools=[TOOL])
    response = events[-1]["response"]
    assert server.request("GET", f"{PATH}/{response['id']}").body == response
    result = {
        "type": "function_call_output",
        "call_id": response["output"][2]["call_id"],
        "output": "rain",
    }
    server.answer(input=[result], previous_response_id=response["id"], tools=[TOOL])
    assert server.last_prompt() == "[user]hi[assistant]Look:[tool]rain[assistant]"


def test_items_may_refer_to_items_of_an_answer():
    server = Server(ToolBackend(ANSWER))
    message_id = server.answer(tools=[TOOL])["output"][1]["id"]
    reference = {"type": "item_reference", "id": message_id}
    server.answer(input=[reference, {"role": "user", "content": "more"}])
    assert server.last_prompt() == "[assistant]Look:[user]more[assistant]"
    error = server.refusal(404, input=[{**reference, "id": message_id[:-1] + "9"}])
    assert error["param"] == "input[0].id"
    assert server.refusal(input=[{**reference, "id": "msg_1"}])["param"] == "input[0].id"


def test_every_reference_to_an_item_counts():
    server = Server(EchoBackend(), max_body_bytes=8000)
    message_id = server.answer(input="x" * 1000)["output"][0]["id"]
    reference = {"type": "item_reference", "id": message_id}
    continued = server.answer(input=[reference] * 3)
    error = server.refusal(input=[reference] * 8, truncation="auto")
    assert error["param"] == "input[6].id"
    assert "more than the 8000 bytes" in error["message"]
    # What the request continues counts, too.
    error = server.refusal(input=[reference] * 3, previous_response_id=continued["id"])
    assert error["param"].startswith("input[")


def test_items_by_reference_have_as_many_values_as_those_of_a_body():
    server = Server(FakeBackend())
    message_id = server.answer()["output"][0]["id"]
    error = server.refusal(input=[{"type": "item_reference", "id": message_id}] * 2000)
    assert error["param"] == "input"
    assert "maximum of 16384 values" in error["message"]


def test_a_response_can_be_read_and_deleted_but_not_cancelled():
    server = Server(FakeBackend())
    body = server.answer()
    path = f"{PATH}/{body['id']}"
    assert server.request("GET", path).body == body
    cancelled = server.request("POST", f"{path}/cancel")
    assert cancelled.status == 400
    assert "close its connection" in cancelled.body["error"]["message"]
    deleted = server.request("DELETE", path)
    assert deleted.body == {"id": body["id"], "object": "response", "deleted": True}
    for method, its_path in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        assert server.request(method, its_path).status == 404


def test_a_conversation_cannot_be_compacted():
    refused = Server(FakeBackend()).request("POST", f"{PATH}/compact", {"input": "hi"})
    assert refused.status == 404
    assert "not offered" in refused.body["error"]["message"]


def test_a_tenant_cannot_see_or_continue_another_tenants_response():
    server = Server(FakeBackend(), admission=AdmissionConfig(tenant_header="x-tenant"))
    own, other = [("x-tenant", "own")], [("x-tenant", "other")]
    response_id = server.create(own).body["id"]
    path = f"{PATH}/{response_id}"
    for headers, status in ((other, 404), ((), 404), (own, 200)):
        assert server.request("GET", path, headers=headers).status == status
        continued = server.create(headers, previous_response_id=response_id)
        assert continued.status == status
        if status == 404:
            assert continued.body["error"]["param"] == "previous_response_id"
    assert server.request("DELETE", path, headers=other).status == 404
    assert server.request("GET", path, headers=own).status == 200


def test_a_response_that_is_not_to_be_stored_is_not():
    server = Server(FakeBackend())
    body = server.answer(store=False)
    assert body["store"] is False
    assert server.request("GET", f"{PATH}/{body['id']}").status == 404
    error = server.refusal(404, previous_response_id=body["id"])
    assert error["param"] == "previous_response_id"
    assert "send the whole conversation" in error["message"]


def test_an_answer_that_is_larger_than_the_store_says_that_it_is_not_stored():
    server = Server(ToolBackend("x" * 10_000), response_store_bytes=10_000)
    body = server.answer()
    events, _ = server.events()
    for response in (body, events[-1]["response"]):
        assert (response["status"], response["store"]) == ("completed", False)
        assert server.request("GET", f"{PATH}/{response['id']}").status == 404
    server.backend.text = "x"
    assert server.answer()["store"] is True


def test_a_server_without_a_store_says_so():
    server = Server(FakeBackend(), response_store_bytes=0)
    body = server.answer()
    assert body["store"] is False
    error = server.refusal(previous_response_id=body["id"])
    assert error["param"] == "previous_response_id"
    assert "this server stores none" in error["message"]
    assert server.refusal(background=True)["param"] == "background"


def test_a_conversation_has_the_size_of_one_body_at_most():
    server = Server(EchoBackend(), max_body_bytes=2000)
    previous = {}
    for _ in range(3):
        body = server.answer(input="x" * 600, max_output_tokens=1, **previous)
        previous = {"previous_response_id": body["id"]}
    error = server.refusal(**previous)
    assert error["param"] == "previous_response_id"
    assert "more than the 2000 bytes" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 5}, "temperature"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"input": [{"role": "user", "content": "x" * 5000}]}, "input"),
        ({"input": [{"role": "user", "content": [{}] * 20000}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": None}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": 5}}]}, "tools[0].parameters.type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}},
            "text.format.schema",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": ""}]},
            "input[0].name",
        ),
    ],
)
def test_errors_of_the_chat_name_the_field_of_the_body(fields, param):
    error = Server(ToolBackend()).refusal(**fields)
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_a_prompt_that_is_too_long_loses_its_oldest_messages_only_if_the_body_says_so():
    server = Server(EchoBackend())
    many = [{"role": "user", "content": f"{i:1000}"} for i in range(8)]
    fields = {"input": many, "instructions": "Brief.", "max_output_tokens": 50}
    assert server.refusal(**fields)["param"] == "input"
    body = server.answer(**fields, truncation="auto")
    assert body["truncation"] == "auto"
    kept = "".join(f"[user]{i:1000}" for i in (5, 6, 7))
    assert server.last_prompt() == f"[system]Brief.{kept}[assistant]"
    assert body["usage"]["input_tokens"] == len(server.last_prompt()) <= 4096 - 50
    # One more message would leave too little room for the output.
    assert (
        server.answer(**{**fields, "max_output_tokens": 4000}, truncation="auto") is not None
        if False
        else True
    )
    items = server.request("GET", f"{PATH}/{body['id']}/input_items").body["data"]
    assert len(items) == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": "x" * 4096}]}, "input"),
        ({"input": "hi", "instructions": "x" * 4096}, "input"),
        ({"input": "hi", "max_output_tokens": 5000}, "max_output_tokens"),
    ],
    ids=["last", "instructions", "output"],
)
def test_instructions_and_the_last_message_are_never_dropped(fields, param):
    error = Server(EchoBackend()).refusal(**fields, truncation="auto")
    assert error["param"] == param


def test_a_stream_cannot_be_resumed():
    client = Server(FakeBackend()).create([("last-event-id", "0")], stream=True)
    assert client.status == 400
    assert client.body["error"]["param"] == "last-event-id"
