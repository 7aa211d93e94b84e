"""Translation of /v1/responses bodies into chats, and the errors in the client's own names."""

import pytest

from cluster.edge.field_names import naming_fields
from cluster.edge.fields import read_fields
from cluster.edge.openai_requests import parse_chat_completion
from cluster.edge.responses.fields import RESPONSES_FIELDS
from cluster.edge.responses.translation import translate
from cluster.errors import BadRequestError

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "x"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Look:", "annotations": [], "logprobs": []}],
}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "x"}'},
}


def translated(previous=(), **fields):
    body = {"model": "demo", "input": "hi", **fields}
    return translate(body, read_fields(body, RESPONSES_FIELDS), previous)


def messages(*items, previous=(), **fields):
    return translated(previous, input=list(items), **fields).chat["messages"]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([USER], [USER]),
        ([{**USER, "type": "message", "id": None, "status": "completed"}], [USER]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            [USER, REASONING, ANSWER, CALL, RESULT],
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning": "Hm.",
                    "content": "Look:",
                    "tool_calls": [CHAT_CALL],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
        ),
        (
            [USER, CALL, {**CALL, "call_id": "c2"}],
            [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
                },
            ],
        ),
        # A stream has given the beginning of this one, which is no object.
        (
            [USER, ANSWER, {**CALL, "status": "incomplete", "arguments": '{"ci'}],
            [USER, {"role": "assistant", "content": "Look:"}],
        ),
        # Reasoning behind an answer begins the next message, as does a second answer.
        (
            [USER, ANSWER, REASONING, CALL],
            [
                USER,
                {"role": "assistant", "content": "Look:"},
                {
                    "role": "assistant",
                    "reasoning": "Hm.",
                    "content": "",
                    "tool_calls": [CHAT_CALL],
                },
            ],
        ),
        (
            [USER, ANSWER, {"role": "assistant", "content": "So.", "phase": "final_answer"}],
            [
                USER,
                {"role": "assistant", "content": "Look:"},
                {"role": "assistant", "content": "So."},
            ],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "S."}]}, ANSWER],
            [{"role": "assistant", "reasoning": "S.", "content": "Look:"}],
        ),
        (
            [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "!"}],
            [{"role": "system", "content": "Be brief.\n\n!"}],
        ),
        ([USER, {"role": "developer", "content": "!"}], [USER, {"role": "system", "content": "!"}]),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": "No."}],
        ),
        (
            [CALL, {**RESULT, "output": [{"type": "input_text", "text": "sun"}]}],
            [
                {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            ],
        ),
    ],
)
def test_items_become_the_messages_of_a_chat(items, expected):
    assert messages(*items) == expected


def test_instructions_come_first_and_join_the_first_system_message():
    assert translated(instructions="Brief.").chat["messages"] == [
        {"role": "system", "content": "Brief."},
        USER,
    ]
    developer = {"role": "developer", "content": "Be kind."}
    assert messages(USER, previous=[developer], instructions="Brief.") == [
        {"role": "system", "content": "Brief.\n\nBe kind."},
        USER,
    ]


def test_the_conversation_before_a_request_comes_before_its_input():
    assert messages(USER, previous=[USER, ANSWER]) == [
        USER,
        {"role": "assistant", "content": "Look:"},
        USER,
    ]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"truncation": "auto"}, {}),
        ({"truncation": "disabled", "store": False, "user": "u", "metadata": {"a": "b"}}, {}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        (
            {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
            {"logprobs": True, "top_logprobs": 0},
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}}}, {}),
        (
            {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
            {"response_format": {"type": "json_object"}, "verbosity": "medium"},
        ),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
                }
            },
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}, "strict": True},
                }
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "weather",
                            "parameters": {"type": "object"},
                            "strict": False,
                        },
                    }
                ],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
        ),
        ({"temperature": 0, "stop": ["a"], "logit_bias": {"5": 1}, "stream": True}, {}),
    ],
)
def test_fields_become_those_of_a_chat(fields, chat):
    own = {name: fields[name] for name in ("temperature", "stop", "logit_bias") if name in fields}
    if "stream" in fields:
        own["stream"] = True
    found = translated(**fields).chat
    assert found == {"model": "demo", "messages": [USER], **chat, **own}
    parse_chat_completion(found)


def test_the_answer_repeats_the_request():
    schema = {"type": "json_schema", "name": "n", "schema": {}}
    repeated = translated(
        instructions="Brief.",
        max_output_tokens=7,
        metadata={"a": "b"},
        prompt_cache_key="p",
        reasoning={"summary": "auto"},
        text={"format": schema},
        tools=[TOOL],
        truncation="auto",
    ).repeated
    assert repeated == {
        "instructions": "Brief.",
        "max_output_tokens": 7,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "p",
        "reasoning": {"effort": None, "summary": "auto"},
        "safety_identifier": None,
        "text": {
            "format": {**schema, "description": None, "strict": False},
            "verbosity": "medium",
        },
        "tool_choice": "auto",
        "tools": [{**TOOL, "description": None, "strict": False}],
        "top_logprobs": 0,
        "truncation": "auto",
        "user": None,
    }


def test_only_allowed_tools_are_offered():
    other = {**TOOL, "name": "time"}
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "time"}],
    }
    found = translated(tools=[TOOL, other], tool_choice=choice)
    assert found.chat["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == ["time"]
    assert found.field_names["tools[0].function"] == "tools[1]"
    assert [tool["name"] for tool in found.repeated["tools"]] == ["weather", "time"]


def test_functions_in_a_namespace_have_full_names_in_the_chat():
    namespace = {"type": "namespace", "name": "agents", "description": "d", "tools": [TOOL]}
    call = {**CALL, "namespace": "agents"}
    choice = {"type": "function", "name": "agents__weather"}
    found = translated(tools=[TOOL, namespace], input=[USER, call, RESULT], tool_choice=choice)
    names = [tool["function"]["name"] for tool in found.chat["tools"]]
    assert names == ["weather", "agents__weather"]
    assert found.field_names["tools[1].function"] == "tools[1].tools[0]"
    [called] = found.chat["messages"][1]["tool_calls"]
    assert called["function"]["name"] == "agents__weather"
    assert found.chat["tool_choice"]["function"]["name"] == "agents__weather"
    assert found.namespaces == {"agents__weather": {"name": "weather", "namespace": "agents"}}
    repeated = {**TOOL, "description": None, "strict": False}
    assert found.repeated["tools"] == [repeated, {**namespace, "tools": [repeated]}]


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"model": None}, "model", "is required"),
        ({"input": None}, "input", "is required"),
        ({"input": 5}, "input", "must be a string or an array of objects"),
        ({"input": []}, "input", "at least 1 entries"),
        ({"input": [5]}, "input[0]", "must be an object"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content", "is required"),
        ({"input": [{"content": "a"}]}, "input[0].role", "is required"),
        ({"input": [{**USER, "role": "tool"}]}, "input[0].role", "must be one of user"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "input_im"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "send message, function_call"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "is required"),
        ({"input": [{**REASONING, "encrypted_content": "x"}]}, "input[0].encrypted_content", ""),
        ({"input": [{**RESULT, "output": [IMAGE]}]}, "input[0].output[0].type", "input_text"),
        ({"input": [{**USER, "rolle": "user"}]}, "input[0].rolle", ""),
        ({"conversation": "conv_1"}, "conversation", "not supported yet"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported yet"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            '"web_search" is a tool that OpenAI',
        ),
        (
            {"tools": [{"type": "custom", "name": "f"}]},
            "tools[0].type",
            '"custom" is a tool without a JSON schema',
        ),
        ({"tools": [{}]}, "tools[0].type", "is required"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type", "is a tool that OpenAI runs"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]},
            "tools[0].tools[0].type",
            "",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]},
            "tools[0].tools[0].type",
            "a namespace inside a namespace",
        ),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "send function or allowed_tools"),
        ({"tool_choice": "any"}, "tool_choice", "must be one of auto"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "weather"}],
                }
            },
            "tool_choice.tools[0].name",
            "no tool has",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools", "at least one"),
        ({"text": {"format": {}}}, "text.format.type", "is required"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "requi"),
        ({"text": {"format": {"type": "text", "name": "n"}}}, "text.format.name", "json_schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of none"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"include": ["all"]}, "include[0]", "must be one of message.output_text.logprobs"),
        ({"metadata": {"a": 5}}, "metadata.a", "must be a string"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ],
)
def test_errors_name_the_field_of_the_body(fields, param, text):
    with pytest.raises(BadRequestError) as refused:
        translated(**fields)
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    assert text in refused.value.message


@pytest.mark.parametrize(
    "item", [{**CALL, "arguments": "["}, {**CALL, "name": 5}, {"type": "unknown"}]
)
def test_errors_of_what_a_request_continues_name_the_id(item):
    def parse():
        found = translated([USER, item])
        with naming_fields(found.field_names):
            parse_chat_completion(found.chat)

    with pytest.raises(BadRequestError) as refused:
        parse()
    assert refused.value.param == "previous_response_id"
    assert refused.value.message.startswith("previous_response_id ")


def test_every_field_of_the_chat_that_may_be_wrong_has_its_own_name():
    names = translated(
        instructions="Brief.",
        input=[USER, REASONING, CALL, RESULT],
        tools=[TOOL],
        text={"format": {"type": "json_object"}},
    ).field_names
    expected = {
        "messages": "input",
        "messages[0]": "instructions",
        "messages[1]": "input[0]",
        "messages[2]": "input[1]",
        "messages[2].tool_calls[0]": "input[2]",
        "messages[2].tool_calls[0].function": "input[2]",
        "messages[3].content": "input[3].output",
        "messages[3].tool_call_id": "input[3].call_id",
        "tools[0].function": "tools[0]",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
    }
    assert {name: names.get(name) for name in expected} == expected
