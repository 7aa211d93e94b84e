"""The real Anthropic client over a real socket, against the edge with a scripted model."""

import contextlib
import dataclasses
import os

import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.api_keys import ApiKeys, new_key
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from cluster.errors import (
    NotReadyError,
    OverloadedError,
    QuotaError,
    ReplicaLostError,
    SaturatedError,
)
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving

if not os.environ.get("CI"):  # where a missing package would hide a broken API
    pytest.importorskip("anthropic", reason="part of the dev extra")

import anthropic

MAX_BODY_BYTES = 2**16
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}
BODY = {"model": "demo", "max_tokens": 64, "messages": [USER]}
THINKING = {"type": "enabled", "budget_tokens": 1024}


class Model(FakeBackend):
    """A model with Hermes' calls and Qwen's reasoning that gives one scripted output after another.

    Attributes:
        outputs: Its next outputs: a text with a finish reason and a stop reason, or an error.
    """

    max_model_len = 4096

    def __init__(self, *outputs):
        super().__init__(self.say, adapters=("tuned",))
        self.outputs = list(outputs)

    def models(self):
        formats = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        return [dataclasses.replace(card, **formats) for card in super().models()]

    async def say(self, request, emit):
        text, reason, stop_reason = self.outputs.pop(0)
        for begin in range(0, len(text), 3):
            await emit(OutputDelta(0, text[begin : begin + 3], [7]))
        if isinstance(reason, Exception):
            raise reason
        await emit(OutputDelta(0, "", [], reason, stop_reason))
        return Usage(len(request.prompt_token_ids), len(text), 3)

    def prompt(self, index=-1):
        return self.tokenizer.decode(self.requests[index].prompt_token_ids)


def says(text, reason="stop", stop_reason=None):
    return (text, reason, stop_reason)


@pytest.fixture(scope="module")
def model():
    return Model()


@pytest.fixture(scope="module")
def client(model):
    config = IngressConfig(max_body_bytes=MAX_BODY_BYTES, prompt_tokens_details=True)
    with serving(create_app(model, config, version="1")) as port:
        url = f"http://127.0.0.1:{port}"
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0, timeout=10) as client:
            yield client


@contextlib.contextmanager
def outputs(model, *given):
    model.outputs[:] = given
    yield
    assert model.outputs == []


def streamed(client, **body):
    """The message of a stream, and the types of its events."""
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def test_a_message_whole_and_streamed(client, model):
    with outputs(model, says("Hello 你好"), says("Hello 你好")):
        whole = client.messages.create(**BODY, system="Be short.")
        final, kinds = streamed(client, **BODY, system="Be short.")
    assert model.prompt() == "[system]Be short.[user]hi[assistant]"
    assert [(block.type, block.text) for block in whole.content] == [("text", "Hello 你好")]
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", "demo", "end_turn")
    assert whole.id.startswith("msg_")
    assert whole._request_id
    num_prompt = len(model.requests[-1].prompt_token_ids)
    counts = (whole.usage.input_tokens, whole.usage.cache_read_input_tokens)
    assert (*counts, whole.usage.output_tokens) == (num_prompt - 3, 3, 8)
    assert final.to_dict() | {"id": ""} == whole.to_dict() | {"id": ""}
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_an_answer_continues_its_beginning(client, model):
    turns = [USER, {"role": "assistant", "content": "So it"}]
    with outputs(model, says(" is.")):
        whole = client.messages.create(**{**BODY, "messages": turns})
    assert model.prompt() == "[user]hi[assistant]So it"
    assert whole.content[0].text == " is."


def test_a_stop_sequence(client, model):
    with outputs(model, says("So", stop_reason="X")):
        whole = client.messages.create(**BODY, stop_sequences=["X", "Y"])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "X")
    assert model.requests[-1].sampling.stop == ("X", "Y")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_over_two_turns(client, model, is_streamed):
    def ask(messages):
        body = {**BODY, "messages": messages, "tools": [TOOL], "thinking": THINKING}
        return streamed(client, **body)[0] if is_streamed else client.messages.create(**body)

    with outputs(model, says(f"<think>Hm.</think>I look.\n{CALL}"), says("Rain.")):
        answer = ask([USER])
        thinking, text, use = answer.content
        assert (thinking.thinking, text.text) == ("Hm.", "I look.")
        assert (use.name, use.input) == ("weather", {"city": "Bern"})
        assert answer.stop_reason == "tool_use"
        assert use.id.startswith("toolu_")
        assert thinking.signature
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "wet", "is_error": True}
        turns = [USER, answer.to_param(), {"role": "user", "content": [result]}]
        assert ask(turns).content[0].text == "Rain."
    assert model.prompt() == "[user]hi[assistant]I look.[tool]Error: wet[assistant]"


def test_the_clients_own_loop_runs_a_tool(client, model):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"{city} is wet"

    with outputs(model, says(CALL), says("Rain.")):
        runner = client.beta.messages.tool_runner(**BODY, tools=[weather], betas=["any-beta"])
        assert runner.until_done().content[0].text == "Rain."
    assert "Bern is wet" in model.prompt()


def test_a_required_tool_and_an_answer_of_a_schema_have_grammars(client, model):
    form = {"type": "json_schema", "schema": SCHEMA}
    with outputs(model, says(CALL), says('{"city": "Bern"}')):
        choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        client.messages.create(**BODY, tools=[TOOL], tool_choice=choice)
        assert "weather" in model.requests[-1].sampling.structured_outputs.grammar
        client.messages.create(**BODY, output_config={"format": form})
        assert model.requests[-1].sampling.structured_outputs is not None


def test_a_request_as_coding_agents_send_it(client, model):
    cached = {"type": "ephemeral"}
    tools = [{**TOOL, "name": f"tool_{i}"} for i in range(60)]
    tools[-1]["cache_control"] = cached
    system = [{"type": "text", "text": "x-anthropic-billing-header: 5"}]
    system += [{"type": "text", "text": "You are an agent.", "cache_control": cached}]
    body = {**BODY, "system": system, "tools": tools, "metadata": {"user_id": "u"}}
    body |= {"model": "tuned", "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    with (
        outputs(model, says("Hi.")),
        client.beta.messages.stream(
            **body, context_management=edits, betas=["interleaved-thinking-2025-05-14"]
        ) as stream,
    ):
        assert stream.get_final_message().content[0].text == "Hi."
    assert model.requests[-1].adapter == "tuned"
    assert model.prompt() == "[system]You are an agent.[user]hi[assistant]"


def test_tokens_are_counted_as_in_an_answer(client, model):
    body = {"model": "demo", "messages": [USER], "system": "a", "tools": [TOOL]}
    with outputs(model, says("So.")):
        whole = client.messages.create(**body, max_tokens=9)
    usage = whole.usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(**body).input_tokens == total
    counted = client.beta.messages.count_tokens(**body, betas=["any-beta"])
    assert counted.input_tokens == total
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(**{**body, "model": "other"})


def refused(kind, ask):
    """The error of a request, and its body, which must have Anthropic's form."""
    with pytest.raises(kind) as caught:
        ask()
    body = caught.value.body
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == caught.value.request_id
    return body["error"]


def test_errors_before_an_answer(client):
    create = client.messages.create
    wrong = refused(anthropic.BadRequestError, lambda: create(**{**BODY, "max_tokens": 0}))
    assert wrong["type"] == "invalid_request_error"
    assert wrong["message"].startswith("max_tokens")
    long = {**BODY, "messages": [{"role": "user", "content": "a" * 5000}]}
    message = refused(anthropic.BadRequestError, lambda: create(**long))["message"]
    assert "max_model_len" in message
    unknown = refused(anthropic.NotFoundError, lambda: create(**{**BODY, "model": "other"}))
    assert unknown["type"] == "not_found_error"
    huge = {**BODY, "system": "a" * MAX_BODY_BYTES}
    error = refused(anthropic.APIStatusError, lambda: create(**huge))
    assert error["type"] == "request_too_large"
    batches = client.messages.batches.list
    assert refused(anthropic.NotFoundError, batches)["type"] == "not_found_error"


def test_other_methods_and_content_types(client):
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.get("/v1/messages", cast_to=object)
    assert caught.value.status_code == 405
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.post(
            "/v1/messages",
            cast_to=object,
            body=BODY,
            options={"headers": {"content-type": "text/plain"}},
        )
    assert caught.value.status_code == 415


FAILURES = [
    (QuotaError("m", retry_after_s=7), 429, "rate_limit_error", "7"),
    (SaturatedError("m"), 529, "overloaded_error", "1"),
    (OverloadedError("m"), 529, "overloaded_error", "1"),
    (NotReadyError("m"), 529, "overloaded_error", None),
    (ReplicaLostError("m"), 503, "api_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), FAILURES)
def test_failures_of_the_server(client, model, error, status, kind, retry_after):
    with outputs(model, says("", error)), pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**BODY)
    assert caught.value.status_code == status
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.response.headers.get("retry-after") == retry_after


def test_an_error_within_a_stream_is_raised_by_the_client(client, model):
    fails = pytest.raises(anthropic.APIStatusError, match="the replica died")
    with outputs(model, says("Hello", SaturatedError("the replica died"))), fails as caught:
        streamed(client, **BODY)
    assert caught.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("header", ["api_key", "auth_token"])
def test_keys_in_both_headers_of_the_client(model, tmp_path, header):
    key, line = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f'alice: {{keys: ["{line}"], models: [demo]}}')
    app = create_app(model, IngressConfig(), version="1", api_keys=ApiKeys(str(file)))
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}"
        with anthropic.Anthropic(base_url=url, **{header: key}, max_retries=0) as client:
            assert client.messages.count_tokens(model="demo", messages=[USER]).input_tokens == 19
        with anthropic.Anthropic(base_url=url, **{header: "wrong"}, max_retries=0) as client:
            error = refused(anthropic.AuthenticationError, lambda: client.messages.create(**BODY))
    assert error["type"] == "authentication_error"


def test_a_stream_cannot_be_resumed(client):
    with pytest.raises(anthropic.BadRequestError, match="last-event-id"):
        client.messages.create(**BODY, stream=True, extra_headers={"Last-Event-ID": "0"})
