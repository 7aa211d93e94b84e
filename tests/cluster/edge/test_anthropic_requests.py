"""Bodies of /v1/messages as the chats that they stand for."""

import json

import pytest

from cluster.edge.anthropic.requests import parse_count_tokens, parse_messages
from cluster.errors import BadRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
CACHED = {"type": "ephemeral", "ttl": "1h"}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}


def parse(messages=(USER,), **fields):
    return parse_messages({"model": "m", "max_tokens": 9, "messages": list(messages), **fields})


def chat(*messages, **fields):
    return parse(messages, **fields).prompt.messages


def user(*content):
    return {"role": "user", "content": list(content)}


def assistant(*content):
    return {"role": "assistant", "content": list(content)}


def system(content):
    return {"role": "system", "content": content}


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def called(call_id="toolu_1", **fields):
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    call = {"type": "function", "function": function, "id": call_id}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


def result(content="rain", call_id="toolu_1"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CHATS = [
    ([USER], [USER]),
    ([user(text("a", cache_control=CACHED), text("b"))], [{"role": "user", "content": "a\nb"}]),
    # Turns of one side are one message.
    ([USER, user(text("b")), USER], [{"role": "user", "content": "hi\nb\nhi"}]),
    ([USER, assistant(text("a")), assistant(text("b")), USER],
     [USER, {"role": "assistant", "content": "a\nb"}, USER]),
    ([USER, assistant(CALL), user(RESULT)], [USER, called(), result()]),
    ([USER, assistant(CALL), user({**RESULT, "content": [text("a"), text("b")]}, text("go"))],
     [USER, called(), result("a\nb"), {"role": "user", "content": "go"}]),
    ([USER, assistant(CALL), user({**RESULT, "is_error": True})],
     [USER, called(), result("Error: rain")]),
    ([USER, assistant(CALL), user({**RESULT, "content": None})], [USER, called(), result("")]),
    ([USER, assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"}, CALL),
      user(RESULT)],
     [USER, called(reasoning="Hm.", reasoning_content="Hm."), result()]),
    ([USER, assistant({"type": "redacted_thinking", "data": "x"}, text("So.")), USER],
     [USER, {"role": "assistant", "content": "So."}, USER]),
    # An answer of this server, as clients send it back.
    ([USER, assistant({**CALL, "caller": {"type": "direct"}}, text("So.", citations=None)),
      user(RESULT)],
     [USER, called(content="So."), result()]),
    # The model's own id comes back.
    ([USER, assistant({**CALL, "id": "toolu_m_ZnVuY3Rpb25zLmY6MA"}),
      user({**RESULT, "tool_use_id": "toolu_m_ZnVuY3Rpb25zLmY6MA"})],
     [USER, called("functions.f:0"), result(call_id="functions.f:0")]),
    # System messages: leading ones, and those that agents add on the way.
    ([system("a"), system([text("b")]), USER], [system("a\nb"), USER]),
    ([USER, system("note"), assistant(text("a")), system("now"), USER],
     [{"role": "user", "content": "hi\nnote"}, {"role": "assistant", "content": "a"},
      {"role": "user", "content": "now\nhi"}]),
    ([USER, assistant(CALL), system("note"), user(RESULT)], [USER, called(), result("rain\nnote")]),
    ([USER, assistant(CALL), user(RESULT), system("note")], [USER, called(), result("rain\nnote")]),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "expected"), CHATS)
def test_messages_become_those_of_a_chat(messages, expected):
    assert chat(*messages) == expected


def test_a_system_prompt_comes_first_without_the_accounting_of_agents():
    blocks = [text("x-anthropic-billing-header: 17"), text("a", cache_control=CACHED), text("b")]
    assert chat(system("c"), USER, system=blocks) == [system("a\nb\nc"), USER]
    assert chat(USER, system="a") == [system("a"), USER]


@pytest.mark.parametrize("is_last", [False, True])
def test_an_answer_continues_a_last_message_of_the_assistant(is_last):
    begin = [USER, assistant(text("So"))]
    prompt = parse(begin if is_last else [*begin, USER]).prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (is_last, not is_last)


def test_tools_become_functions():
    tools = [{**TOOL, "type": "custom", "cache_control": CACHED, "strict": True}]
    parsed = parse(tools=tools)
    assert parsed.prompt.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
        }
    ]
    assert [(tool.name, tool.is_strict) for tool in parsed.tool_use.tools] == [("weather", True)]
    many = [{**TOOL, "name": f"tool_{i}"} for i in range(200)]
    assert len(parse(tools=many).tool_use.tools) == 200


@pytest.mark.parametrize(
    ("choice", "expected", "num_tools"),
    [(None, "auto", 2), ("auto", "auto", 2), ("any", "required", 2), ("none", "none", 2),
     ("tool", "required", 1)],
)  # fmt: skip
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_choice_of_tools(choice, expected, num_tools, is_parallel):
    given = {"type": choice, "disable_parallel_tool_use": not is_parallel}
    if choice == "tool":
        given["name"] = "time"
    fields = {} if choice is None else {"tool_choice": given}
    use = parse(tools=[TOOL, {**TOOL, "name": "time"}], **fields).tool_use
    assert (use.choice, len(use.tools)) == (expected, num_tools)
    if choice in {"auto", "any"}:
        assert use.is_parallel == is_parallel


@pytest.mark.parametrize(
    ("thinking", "variables", "is_shown"),
    [
        (None, OFF, False),
        ({"type": "disabled"}, OFF, False),
        ({"type": "enabled", "budget_tokens": 1024}, ON, True),
        ({"type": "enabled", "budget_tokens": 2048, "display": "summarized"}, ON, True),
        ({"type": "adaptive", "display": "omitted"}, ON, False),
        ({"type": "between_tools"}, ON, True),
    ],
)
def test_thinking_is_the_switch_of_the_models_family(thinking, variables, is_shown):
    parsed = parse(thinking=thinking)
    assert parsed.prompt.template_kwargs == variables
    assert parsed.values["include_reasoning"] is is_shown
    assert parsed.values.get("thinking_token_budget") == (thinking or {}).get("budget_tokens")
    own = parse(thinking=thinking, chat_template_kwargs={"thinking": 5}).prompt.template_kwargs
    assert own == {**variables, "thinking": 5}


def test_effort_and_form_of_the_answer():
    form = {"type": "json_schema", "schema": SCHEMA}
    parsed = parse(output_config={"effort": "xhigh", "format": form})
    assert parsed.prompt.template_kwargs == {**OFF, "reasoning_effort": "xhigh"}
    assert json.loads(parsed.grammar.spec.json) == SCHEMA
    assert parse(output_format=form).grammar == parsed.grammar


def test_the_other_fields():
    parsed = parse(
        max_tokens=77, stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=3, stream=True,
        metadata={"user_id": "u"}, service_tier="auto", cache_control=CACHED, speed="fast",
        context_management={"edits": []}, inference_geo="eu",
    )  # fmt: skip
    names = ("model", "stop", "temperature", "top_p", "top_k", "stream")
    assert [parsed.values[n] for n in names] == ["m", ("a", "b"), 0.5, 0.9, 3, True]
    assert (parsed.max_tokens, parsed.max_tokens_param) == (77, "max_tokens")
    assert parsed.response_options.get("include_usage") is None


def test_tokens_are_counted_of_the_same_chat():
    body = {"model": "m", "messages": [USER], "system": "a", "tools": [TOOL]}
    body |= {"tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}}
    counted = parse_count_tokens(body)
    assert counted.prompt == parse(**body).prompt
    assert counted.max_tokens is None
    for wrong, param in [
        ({"stream": 5}, "stream"),
        ({"messages": [user()], "system": []}, "messages"),
    ]:
        with pytest.raises(BadRequestError) as refused:
            parse_count_tokens({**body, **wrong})
        assert refused.value.param == param


def nested(kind):
    return {"type": "tool_result", "tool_use_id": "a", "content": [{"type": kind}]}


WRONG = [
    ({"max_tokens": None}, "max_tokens", "is required"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [user()]}, "messages", "no text"),
    ({"messages": [system([])]}, "messages", "no text"),
    ({"messages": [system("x-anthropic-billing-header: a")]}, "messages", "no text"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "must be one of"),
    ({"messages": [user({"type": "image", "source": {}})]},
     "messages[0].content[0].type", '"image"'),
    ({"messages": [user(text("a"), {"type": "document"})]},
     "messages[0].content[1].type", '"document"'),
    ({"messages": [user(nested("image"))]}, "messages[0].content[0].content[0].type", '"image"'),
    ({"messages": [user(CALL)]}, "messages[0].content[0].type", '"tool_use"'),
    ({"messages": [assistant(RESULT)]}, "messages[0].content[0].type", '"tool_result"'),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "is required"),
    ({"messages": [user({"text": "a"})]}, "messages[0].content[0].type", "is required"),
    ({"messages": [user({"type": "tool_result"})]},
     "messages[0].content[0].tool_use_id", "is required"),
    ({"messages": [USER, assistant({**CALL, "input": None}), USER]},
     "messages[1].content[0].input", "is required"),
    ({"messages": [USER, assistant(text("a"), {**CALL, "name": "a b"}), USER]},
     "messages[1].content[1].name", "must have"),
    ({"messages": [USER, assistant(CALL)]}, "messages[1]", "no text"),
    ({"system": [{"type": "image"}]}, "system[0].type", '"image"'),
    ({"tools": [{"type": ["custom"], "name": "f"}]}, "tools[0].type", "must be"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0].type", "not offered here"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "is required"),
    ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name", "must have"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "repeats"),
    ({"tools": [{**TOOL, "input_schema": {"properties": 5}}]},
     "tools[0].input_schema.properties", "must be"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "not supported yet"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", '"any"'),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]}, "tool_choice.name", '"b"'),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name", "is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens", "at least"),
    ({"stop_sequences": ["a", 5]}, "stop_sequences[1]", "must be a string"),
    ({"stop_sequences": [""]}, "stop_sequences", "empty"),
    ({"temperature": 9}, "temperature", "9"),
    ({"service_tier": "batch"}, "service_tier", "must be one of"),
    ({"container": "a"}, "container", "not supported yet"),
    ({"thread": {"type": "create"}}, "thread", "whole conversation"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema", "is required"),
    ({"output_config": {"effort": "low", "format": {"type": "text"}}},
     "output_config.format.type", "must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_errors_name_the_field_of_the_clients_body(fields, param, message):
    with pytest.raises(BadRequestError) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    assert message in refused.value.message


def test_a_long_history_is_translated_once_for_each_block():
    turns = [assistant(text("a"), CALL), user(RESULT)]
    messages = chat(USER, *(turns * 500))
    assert len(messages) == 1001
    assert json.dumps(messages).count("Bern") == 500
