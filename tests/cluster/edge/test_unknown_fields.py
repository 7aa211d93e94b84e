"""Fields that no API documents: ignored and named in a header, or refused."""

import pytest

from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import PROMPTS, call

HEADER = "x-ttserve-ignored-fields"
CHATS = "/v1/chat/completions"
BODIES = {**PROMPTS, "/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [104]}}


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named(path):
    plain = call(FakeBackend(), "POST", path, BODIES[path])
    body = {**BODIES[path], "nvext": {"a": 1}, "guided": None}
    answer = call(FakeBackend(), "POST", path, body)
    assert (plain.status, answer.status) == (200, 200)
    assert HEADER not in plain.headers
    assert answer.headers[HEADER] == "nvext, guided"


def test_unknown_fields_of_messages_parts_and_tools_are_named_by_their_paths():
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    messages = [
        {"role": "system", "content": "a", "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": parts},
    ]
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {}}
    body = {"messages": messages, "tools": [tool], "tool_choice": "none"}
    backend = FakeBackend()
    answer = call(backend, "POST", CHATS, body)
    assert answer.status == 200
    names = (
        "messages[0].cache_control, messages[1].content[0].cache_control, tools[0].cache_control"
    )
    assert answer.headers[HEADER] == names
    text = backend.tokenizer.decode(backend.requests[0].prompt_token_ids)
    assert text == "[system]a[user]hi[assistant]"


RESPONSE = {"model": "demo", "input": "hi"}
TOOLS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "function", "name": "f", "mood": 1},
    {"type": "web_search_preview_2025_03_11"},
]


def test_a_search_that_openai_runs_is_ignored_and_named():
    body = {**RESPONSE, "tools": TOOLS, "tool_choice": "none"}
    answer = call(FakeBackend(), "POST", "/v1/responses", body)
    assert answer.status == 200
    paths = "tools[0].external_web_access, tools[1].mood, tools[0], tools[2]"
    assert answer.headers[HEADER] == paths
    assert [tool["name"] for tool in answer.body["tools"]] == ["f"]


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("fields", [{"stream": True}, {"temperature": 9}], ids=["stream", "error"])
def test_streams_and_errors_name_them_too(path, fields):
    answer = call(FakeBackend(), "POST", path, {**PROMPTS[path], "nvext": 1, **fields})
    assert answer.status == (200 if "stream" in fields else 400)
    assert answer.headers[HEADER] == "nvext"


def test_the_header_is_bounded_and_holds_no_characters_of_the_clients_choice():
    names = {"a\r\nx-evil: 1": 1, "é,\0": 1, "y" * 5000: 1, **{f"z{i}": 1 for i in range(100)}}
    answer = call(FakeBackend(), "POST", "/v1/completions", {"prompt": "hi", **names})
    assert answer.status == 200
    first, second, third, *others, last = answer.headers[HEADER].split(", ")
    assert (first, second, third) == ("a??x-evil??1", "???", "y" * 64)
    assert others == [f"z{i}" for i in range(13)]
    assert last == "and 87 more"


@pytest.mark.parametrize("path", PROMPTS)
def test_documented_fields_that_are_not_supported_are_refused_all_the_same(path):
    answer = call(FakeBackend(), "POST", path, {**PROMPTS[path], "mm_payload": {"a": 1}})
    assert answer.status == 400
    assert answer.body["error"]["param"] == "mm_payload"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (CHATS, {"nvext": 1}, "nvext"),
        (CHATS, {"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
        ("/v1/responses", {**RESPONSE, "tools": TOOLS[:1]}, "tools[0].type"),
    ],
)
def test_a_configuration_may_refuse_unknown_fields(path, extra, param):
    body = {**PROMPTS.get(path, {}), **extra}
    answer = call(FakeBackend(), "POST", path, body, unknown_fields="refuse")
    assert answer.status == 400
    assert answer.body["error"]["param"] == param
    assert HEADER not in answer.headers
