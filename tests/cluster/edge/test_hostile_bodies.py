"""Small bodies that request much work must not delay the streams of the event loop."""

import asyncio
import contextlib
import json
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.resolve import demo_model_folder
from cluster.edge.openai import Usage
from cluster.edge.openai_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
)
from replicas.output_processor import OutputDelta
from replicas.tokenizer import Tokenizer
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_responses import Server
from tests.cluster.edge.test_routes import PROMPTS, Client, call, make_app, poll

MAX_BODY_BYTES = 8 * 2**20
LONGEST_STALL_S = 2.0
"""A fifth of the timeout of Serve's health check; the tested code stays far below it."""
HI = {"role": "user", "content": "hi"}


class DemoBackend(FakeBackend):
    """The demo model's tokenizer; an endless stream of tokens for every request."""

    def __init__(self, max_model_len=1024):
        super().__init__(self.stream)
        self.tokenizer = Tokenizer.from_folder(demo_model_folder())
        self.max_model_len = max_model_len
        self.num_sent = 0

    async def stream(self, request, emit):
        if request.request_id.startswith("hostile"):
            await emit(OutputDelta(0, "x", [1], "length"))
            return Usage(1, 1)
        while True:
            await emit(OutputDelta(0, "x", [1]))
            self.num_sent += 1
            await asyncio.sleep(0.001)


async def longest_stall_s(stop):
    """The longest time between two turns of the loop."""
    longest_s, last_s = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


async def attack(service, path, body):
    """Sends a body while 32 clients stream; the answer, and the loop's longest stall."""
    app = make_app(service, MAX_BODY_BYTES)
    streams = [Client(app) for _ in range(32)]
    ask = {"prompt": "hi", "stream": True}
    tasks = [asyncio.create_task(c.request("POST", "/v1/completions", ask)) for c in streams]
    await poll(lambda: service.num_open == len(streams))
    raw, stop = json.dumps(body, separators=(",", ":")).encode(), asyncio.Event()
    measuring = asyncio.create_task(longest_stall_s(stop))
    await asyncio.sleep(0.01)
    hostile = await Client(app).request("POST", path, raw, [("x-request-id", "hostile")])
    stop.set()
    stall_s = await measuring
    for client in streams:
        client.gone.set()
    await asyncio.gather(*tasks)
    assert all(client.status == 200 for client in streams)
    return hostile, stall_s


BODIES = {
    "stop-token-ids": ("/v1/completions", {"prompt": "hi", "stop_token_ids": [7] * 1_000_000}),
    "stop-strings": ("/v1/completions", {"prompt": "hi", "stop": ["a"] * 1_000_000}),
    "empty-messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ""}] * 20_000},
    ),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{**HI, "content": [{"type": "text", "text": ""}] * 60_000}]},
    ),
    "template-variables": (
        "/v1/chat/completions",
        {"messages": [HI], "chat_template_kwargs": {f"a{i}": i for i in range(400_000)}},
    ),
    "token-ids": ("/v1/completions", {"prompt": [7] * 4_000_000}),
    "long-text": ("/v1/completions", {"prompt": "return the " * 180_000}),
    "long-message": (
        "/v1/chat/completions",
        {"messages": [{**HI, "content": "return the " * 180_000}]},
    ),
    "empty-lists": (
        "/v1/chat/completions",
        {"messages": [HI], "metadata": {"a": [[]] * 2_700_000}},
    ),
    "detokenize": ("/detokenize", {"tokens": [7] * 3_000_000}),
    "token-strings": ("/tokenize", {"prompt": "return " * 300_000, "return_token_strs": True}),
}


def tools(num_tools, num_parameters):
    """Tools as agents send them: every parameter is described."""
    kinds = [
        {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"},
        {"type": "array", "items": {"type": "string"}}, {"enum": ["a", "b", "c"]},
        {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    ]  # fmt: skip
    parameters = {
        f"parameter_{i}": {**kinds[i % len(kinds)], "description": f"The parameter {i} of it."}
        for i in range(num_parameters)
    }
    schema = {"type": "object", "properties": parameters, "required": [*parameters][::2]}
    return [
        {
            "type": "function",
            "function": {"name": f"tool_{i}", "description": "A tool.", "parameters": schema},
        }
        for i in range(num_tools)
    ]


BODIES |= {
    "tools": ("/v1/chat/completions", {"messages": [HI], "tools": tools(3_000, 10)}),
    "tools-without-parameters": ("/tokenize", {"messages": [HI], "tools": tools(30_000, 0)}),
    "unknown-fields": (
        "/v1/chat/completions",
        {"messages": [{**HI, **{f"x{i}": 1 for i in range(20_000)}}]},
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_sixty_tools_of_ten_parameters_are_served_and_hold_up_no_stream(choice):
    service = DemoBackend(max_model_len=2**17)
    service.tool_call_parser = "hermes"
    body = {"messages": [HI], "tools": tools(60, 10), "tool_choice": choice}
    answer, stall_s = asyncio.run(attack(service, "/v1/chat/completions", body))
    assert answer.status == 200, answer.body
    assert stall_s < LONGEST_STALL_S


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_asks_for_much_is_refused_and_holds_up_no_stream(name):
    path, body = BODIES[name]
    answer, stall_s = asyncio.run(attack(DemoBackend(), path, body))
    assert answer.status == 400, answer.body
    assert answer.body["error"]["type"] == "BadRequestError"
    assert stall_s < LONGEST_STALL_S


@pytest.mark.parametrize(
    "item",
    [HI, {**HI, "content": [{"type": "input_text", "text": "a"}] * 30}],
    ids=["items", "parts"],
)
def test_a_stored_conversation_has_the_limits_of_a_body(item):
    server, num_items = Server(FakeBackend(), max_body_bytes=MAX_BODY_BYTES), 400
    server.backend.max_model_len = 2**20
    if item is not HI:
        num_items = 50
    items, previous = [item] * num_items, None
    for _ in range(9):
        client = server.create(input=items, previous_response_id=previous, max_output_tokens=1)
        if client.status != 200:
            break
        previous = client.body["id"]
    assert client.body["error"]["param"] == "previous_response_id"
    assert "2048 items or 16384 values" in client.body["error"]["message"]


LONG_BODIES = {
    "text": ("/v1/completions", {"prompt": "return the " * 90_000}, 200),
    "message": (
        "/v1/chat/completions",
        {"messages": [{**HI, "content": "return the " * 90_000}]},
        200,
    ),
    "too-many-tokens": ("/v1/completions", {"prompt": "ab " * 400_000}, 400),
    "tokenize": ("/tokenize", {"prompt": "return the " * 90_000, "return_token_strs": True}, 200),
    "detokenize": ("/detokenize", {"tokens": [7] * 250_000}, 200),
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_long_texts_of_a_long_model_hold_up_no_stream(name):
    path, body, status = LONG_BODIES[name]
    answer, stall_s = asyncio.run(attack(DemoBackend(max_model_len=2**18), path, body))
    assert answer.status == status, answer.body
    assert stall_s < LONGEST_STALL_S


def test_a_text_that_can_never_fit_is_not_even_encoded(monkeypatch):
    service = DemoBackend()
    monkeypatch.setattr(service.tokenizer, "encode", None)
    most = service.max_model_len * service.tokenizer.max_token_chars
    for path, body, param in (
        ("/v1/completions", {"prompt": "x" * (most + 1)}, "prompt"),
        ("/v1/completions", {"prompt": ["x" * (most + 1)]}, "prompt[0]"),
        ("/v1/chat/completions", {"messages": [{**HI, "content": "x" * (most + 1)}]}, "messages"),
        ("/tokenize", {"prompt": "x" * (most + 1)}, "prompt"),
    ):
        error = call(service, "POST", path, body, max_body_bytes=MAX_BODY_BYTES).body["error"]
        assert (error["code"], error["param"]) == ("bad_request", param)
        assert f"{most + 1} characters" in error["message"]
        assert str(most) in error["message"]
    result = {"type": "tool_result", "content": [{"type": "text", "text": "x" * (most + 1)}]}
    for body in ({"system": "x" * (most + 1)}, {"messages": [{**HI, "content": [result]}]}):
        [param] = body
        error = call(service, "POST", "/v1/messages", body, max_body_bytes=MAX_BODY_BYTES).body
        assert error["error"]["message"].startswith(f"{param} has {most + 1} characters")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_lists_of_token_ids_have_no_more_entries_than_the_vocabulary(name):
    service = DemoBackend(max_model_len=2**18)
    vocab_size = service.tokenizer.vocab_size
    body = {"prompt": "hi", name: [*range(vocab_size)]}
    headers = [("x-request-id", "hostile")]
    assert call(service, "POST", "/v1/completions", body, headers=headers).status == 200
    assert {*getattr(service.requests[-1].sampling, name)} == {*range(vocab_size)}
    body[name] += [7]
    error = call(service, "POST", "/v1/completions", body).body["error"]
    assert error["message"] == (
        f"{name} has {vocab_size + 1} entries, but may have at most {vocab_size}"
    )


def test_many_bad_words_are_encoded_off_the_event_loop(monkeypatch):
    service = FakeBackend()
    threads = set()
    encode = service.tokenizer.encode

    def noted(text, add_special_tokens=True):
        threads.add(threading.current_thread().name)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(service.tokenizer, "encode", noted)
    body = {"prompt": "hi", "bad_words": ["a" * 200] * 100}
    assert call(service, "POST", "/v1/completions", body).status == 200
    assert len(service.requests[-1].sampling.bad_words_token_ids) == 100
    assert all(name.startswith("heavy-work") for name in threads)


async def test_texts_beyond_the_limit_of_encodings_get_429(monkeypatch):
    go_on = threading.Event()
    service = DemoBackend(max_model_len=2**18)
    decode = service.tokenizer.decode

    def slow(*args, **kwargs):
        assert go_on.wait(30)
        return decode(*args, **kwargs)

    monkeypatch.setattr(service.tokenizer, "decode", slow)
    app = make_app(service, MAX_BODY_BYTES)
    body = {"tokens": [7] * 5000}

    def ask():
        return asyncio.create_task(Client(app).request("POST", "/detokenize", body))

    asked = [ask() for _ in range(200)]
    await poll(lambda: sum(task.done() for task in asked) == 136)
    refused = [task for task in asked if task.done()]
    # One that waits and whose client has gone makes room; those that run do not.
    waiting = [task for task in asked if not task.done()]
    assert (len(waiting), len(refused)) == (64, 136)
    assert {task.result().status for task in refused} == {429}
    assert refused[0].result().headers["retry-after"] == "1"
    waiting[-1].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting.pop()
    go_on.set()
    answers = await asyncio.gather(*waiting, ask())
    assert {answer.status for answer in answers} == {200}


@pytest.mark.parametrize(
    "name",
    ["messages", "self", "add_generation_prompt", "tools", "documents", "raise_exception", "range"],
)
def test_variables_of_a_template_that_are_its_own_are_refused(name):
    body = {"messages": [HI], "chat_template_kwargs": {name: 1}}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = call(FakeBackend(), "POST", path, body)
        assert answer.status == 400
        assert answer.body["error"]["param"] == "chat_template_kwargs"
        assert name in answer.body["error"]["message"]


KEYS = ["role", "content", "type", "text", "self"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
VARIABLES = ["messages", "self", "add_generation_prompt", "variables", "template", "m", "loop"]
FUNCTION = st.fixed_dictionaries(
    {}, optional={"name": st.just("f") | JSON, "arguments": st.text(), "parameters": JSON}
)
PLAUSIBLE = {
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})),
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
            optional={
                "content": st.text() | st.lists(st.fixed_dictionaries({"type": st.just("text")},
                                                                      optional={"text": JSON})),
                "name": JSON,
                "reasoning": st.text(),
                "tool_calls": st.lists(st.fixed_dictionaries({"function": FUNCTION}) | JSON),
            },
        ),
        max_size=4,
    ),
    "prompt": st.text() | st.lists(st.integers(-2, 300)) | st.lists(st.lists(st.integers(0, 300))),
    "tokens": st.lists(st.integers(-2, 300)),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(VARIABLES) | st.text(), JSON),
    "stop": st.lists(st.text(max_size=3)),
    "stop_token_ids": st.lists(st.integers(-2, 300)),
    "allowed_token_ids": st.lists(st.integers(-2, 300)),
    "logprob_token_ids": st.lists(st.integers(-2, 300)),
    "logit_bias": st.dictionaries(st.integers(-2, 300).map(str) | st.text(), JSON),
    "bad_words": st.lists(st.text(max_size=3)),
    "n": st.integers(-1, 3),
    "truncate_prompt_tokens": st.integers(-2, 300),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "x"]), JSON),
}  # fmt: skip
FIELDS = sorted({*COMPLETION_FIELDS, *CHAT_FIELDS, "tokens", "return_token_strs", "nonsense"})
BODY = st.fixed_dictionaries(
    {},
    optional={name: PLAUSIBLE[name] | JSON if name in PLAUSIBLE else JSON for name in FIELDS},
)


@pytest.mark.parametrize("path", [*PROMPTS, "/tokenize", "/detokenize"])
def test_no_body_is_an_internal_error(path):
    @settings(suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        few = data.draw(st.lists(st.sampled_from(FIELDS), max_size=5))
        body = {name: data.draw(PLAUSIBLE.get(name, JSON) | JSON, name) for name in few}
        body |= data.draw(st.sampled_from([{}, PROMPTS.get(path, {})]))
        answer = call(FakeBackend(), "POST", path, body)
        assert answer.status in {200, 400, 404}, (body, answer.chunks)
        if answer.status == 200 and body.get("stream") is True:
            assert "error" not in answer.chunks[-1].decode()

    check()
