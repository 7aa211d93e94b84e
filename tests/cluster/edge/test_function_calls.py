"""Chats with `functions` and `function_call`, the former names of tools."""

import pytest

from cluster.edge.function_calls import parse_functions
from cluster.edge.openai_requests import parse_chat_completion
from tests.cluster.edge.test_resume import stream
from tests.cluster.edge.test_routes import call
from tests.cluster.edge.test_tool_calls import CALL, FUNCTION, PARAMETERS, PATH, USER, ToolBackend

DEFINITION = {"name": "weather", "parameters": PARAMETERS}
BODY = {"messages": [USER], "functions": [DEFINITION]}
AS_TOOLS = {
    "messages": [USER],
    "tools": [{"type": "function", "function": DEFINITION}],
    "parallel_tool_calls": False,
}


def test_an_answer_has_its_only_call_under_the_former_name():
    client = call(ToolBackend(f"Look:\n{CALL}\n{CALL}"), "POST", PATH, BODY)
    [choice] = client.body["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Look:",
        "refusal": None,
        "reasoning": None,
        "function_call": FUNCTION,
    }


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_has_it_too(size):
    backend = ToolBackend(f"Look:\n{CALL}\n{CALL}", size=size)
    events = call(backend, "POST", PATH, {**BODY, "stream": True}).events[:-1]
    choices = [event["choices"][0] for event in events]
    calls = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert (calls, choices[-1]["finish_reason"]) == ([FUNCTION], "function_call")
    assert not any("tool_calls" in each["delta"] for each in choices)


@pytest.mark.parametrize(
    ("fields", "as_tools"),
    [
        ({}, {}),
        ({"function_call": "auto"}, {"tool_choice": "auto"}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        (
            {"function_call": {"name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
    ],
    ids=["no choice", "auto", "none", "named"],
)
def test_functions_mean_what_tools_mean(fields, as_tools):
    parsed = parse_functions({**BODY, **fields})
    expected = parse_chat_completion({**AS_TOOLS, **as_tools})
    assert (parsed.prompt, parsed.tool_use) == (expected.prompt, expected.tool_use)


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": None, "function_call": None},
        {"functions": [], "function_call": "none"},
        {"functions": [], "tools": AS_TOOLS["tools"], "tool_choice": "none"},
    ],
    ids=["null", "none", "tools"],
)
def test_a_body_without_functions_has_no_former_names_in_its_answer(fields):
    assert not parse_functions({"messages": [USER], **fields}).response_options["own"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": 1}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "f", "parameters": {"type": 1}}]}, "functions[0].parameters.type"),
        ({"functions": [DEFINITION, DEFINITION]}, "functions[1].name"),
        ({"tools": AS_TOOLS["tools"]}, "functions"),
        ({"function_call": "required"}, "function_call"),
        ({"function_call": {"name": "other"}}, "function_call.name"),
        ({"function_call": {}}, "function_call.name"),
        ({"function_call": "auto", "tool_choice": "auto"}, "function_call"),
        ({"messages": [{**USER, "function_call": FUNCTION}]}, "messages[0].function_call"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "["}}]},
            "messages[0].function_call.arguments",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_the_name_that_the_client_gave(fields, param):
    client = call(ToolBackend(), "POST", PATH, {**BODY, **fields})
    assert client.status == 400
    error = client.body["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_a_model_without_a_format_of_calls_refuses_functions_by_their_name():
    backend = ToolBackend()
    backend.tool_call_parser = None
    assert call(backend, "POST", PATH, BODY).body["error"]["param"] == "functions"


def test_a_resumed_stream_has_the_call_too():
    body = {**BODY, "stream": True}
    whole = stream(PATH, body, "0", ToolBackend(f"Look: {CALL}"))
    assert any("function_call" in data for _, data in whole)
