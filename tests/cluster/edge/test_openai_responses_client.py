"""The unchanged OpenAI client on /v1/responses, over a real socket."""

import json
import re

import openai
import pydantic
import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from cluster.errors import ReplicaLostError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import flood
from tests.cluster.edge.http_server import poll, serving
from tests.cluster.edge.test_tool_calls import CALL, FUNCTION, PARAMETERS, ToolBackend

TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
ANSWER = f"<think>\nHm.\n</think>\n\nLook:\n{CALL}"


class Model(ToolBackend):
    """A model that says its text, or repeats the last message if it has none."""

    async def say(self, request, emit):
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        text = self.text or re.split(r"\[[a-z]+\]", prompt)[-2]
        await emit(OutputDelta(0, text, self.tokenizer.encode(text)))
        await emit(OutputDelta(0, "", [], self.reason))
        return Usage(len(request.prompt_token_ids), len(text))


@pytest.fixture(scope="module")
def service():
    return Model()


@pytest.fixture(scope="module")
def client(service):
    with serving(create_app(service, IngressConfig(), version="0")) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
            yield client


@pytest.fixture(autouse=True)
def quiet(service):
    service.text, service.reason = "", "stop"
    service.script = service.say


def checked(answer):
    """An answer, once it has the very types that OpenAI documents."""
    return type(answer).model_validate(answer.to_dict(), strict=True)


def test_a_text_whole_and_streamed(client):
    whole = checked(client.responses.create(model="demo", input="hello 你好", temperature=0.5))
    assert whole.output_text == "hello 你好"
    assert (whole.status, whole.temperature) == ("completed", 0.5)
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(model="demo", input="hello 你好") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "hello 你好"
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "hello 你好"


def test_reasoning_and_a_call_and_its_result(client, service):
    service.text = ANSWER
    question = [{"role": "user", "content": "How is the weather?"}]
    options = {"model": "demo", "tools": [TOOL], "instructions": "Be brief."}
    whole = checked(client.responses.create(**options, input=question))
    reasoning, message, call = whole.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "Look:"
    assert {"name": call.name, "arguments": call.arguments} == FUNCTION
    events = [checked(e) for e in client.responses.create(**options, input=question, stream=True)]
    assert [item.type for item in events[-1].response.output] == [
        "reasoning", "message", "function_call",
    ]  # fmt: skip
    service.text = ""
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    # The client sends the items of the answer back, or names the answer.
    for body in (
        {"input": [*question, *whole.output, result]},
        {"input": [result], "previous_response_id": whole.id},
    ):
        answer = client.responses.create(**options, **body)
        assert answer.output_text == "rain"
        assert service.requests[-1].prompt_token_ids == service.requests[-2].prompt_token_ids or (
            "previous_response_id" not in body
        )


def test_a_function_in_a_namespace_is_called_by_its_own_name(client, service):
    """As coding agents group the tools that they add, with nothing stored by the server."""
    service.text = f"<think>\nHm.\n</think>\n\n{CALL.replace(FUNCTION['name'], 'agents__spawn')}"
    spawn = {**TOOL, "name": "spawn"}
    namespace = {"type": "namespace", "name": "agents", "description": "d", "tools": [spawn]}
    options = {
        "model": "demo",
        "tools": [TOOL, namespace],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "prompt_cache_key": "p",
        "reasoning": {"summary": "auto"},
    }
    question = [{"role": "user", "content": "Spawn one."}]
    events = [checked(e) for e in client.responses.create(**options, input=question, stream=True)]
    added = [e.item for e in events if e.type == "response.output_item.added"]
    reasoning, call = events[-1].response.output
    for each in (added[-1], call):
        assert (each.namespace, each.name) == ("agents", "spawn")
    service.text = ""
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "spawned"}
    sent = [*question, reasoning.to_dict(), call.to_dict(), result]
    assert client.responses.create(**options, input=sent).output_text == "spawned"


def test_an_answer_of_a_given_form(client, service):
    class Weather(pydantic.BaseModel):
        city: str
        degrees: int

    service.text = json.dumps({"city": "Bern", "degrees": 7})
    parsed = client.responses.parse(model="demo", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Bern", degrees=7)
    grammar = service.requests[-1].sampling.structured_outputs
    assert grammar is not None
    assert "degrees" in str(getattr(grammar, grammar.kind))


def test_a_stored_answer_is_read_and_deleted(client):
    whole = client.responses.create(model="demo", input="hi", metadata={"a": "b"})
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    with pytest.raises(openai.BadRequestError, match="close its connection"):
        client.responses.cancel(whole.id)
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="demo", input="hi", previous_response_id=whole.id)
    assert refused.value.param == "previous_response_id"


def test_a_response_in_the_background_is_polled(client):
    started = checked(client.responses.create(model="demo", input="hello", background=True))
    assert started.status == "queued"
    ended = poll(
        lambda: (found := client.responses.retrieve(started.id)).status == "completed" and found,
        "the response is complete",
    )
    assert checked(ended).output_text == "hello"
    assert client.responses.cancel(started.id).status == "completed"


def test_a_response_in_the_background_is_cancelled(client, service):
    service.script = flood
    started = client.responses.create(model="demo", input="hello", background=True)
    assert checked(client.responses.cancel(started.id)).status == "cancelled"
    assert service.num_open == 0


def test_input_items_are_listed_over_pages(client):
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    response = client.responses.create(model="demo", input=items)
    found = list(client.responses.input_items.list(response.id, limit=2, order="asc"))
    assert [checked(item).content[0].text for item in found] == list("01234")


def test_bad_requests_name_the_field(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="demo", input="hi", tools=[{"type": "mcp"}])
    assert refused.value.param == "tools[0].type"


def test_an_answer_that_reaches_its_limit_is_incomplete(client, service):
    service.reason = "length"
    whole = checked(client.responses.create(model="demo", input="hi", max_output_tokens=16))
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_an_error_mid_stream_is_raised_by_the_client(client, service):
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        raise ReplicaLostError("the replica died")

    service.script = script
    stream = client.responses.create(model="demo", input="x", stream=True)
    with pytest.raises(openai.APIError, match="the replica died"):
        list(stream)
