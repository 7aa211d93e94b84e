"""Tools and reasoning over HTTP: fields, answers, streams, and resumed streams."""

import json
import re

import jinja2
import pytest

from cluster.edge.openai import Usage
from cluster.edge.openai_limits import BodyLimits
from cluster.edge.openai_requests import encoding_cost, parse_body, parse_chat_completion
from cluster.edge.pipeline import with_history
from cluster.edge.text_jobs import MAX_INLINE_COST
from cluster.errors import BadRequestError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_resume import stream
from tests.cluster.edge.test_routes import call

PATH = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}
BODY = {"messages": [USER], "tools": [TOOL]}
NAMED = {"type": "function", "function": {"name": "weather"}}
FUNCTION = {"name": "weather", "arguments": '{"city": "Bern"}'}


class ToolBackend(FakeBackend):
    """A model with Hermes' calls and Qwen's reasoning that says a text, a few tokens at a time."""

    max_model_len = 4096
    tool_call_parser, reasoning_parser = "hermes", "qwen3"

    def __init__(self, text="", reason="stop", size=7):
        super().__init__(self.say)
        self.text, self.reason, self.size = text, reason, size

    async def say(self, request, emit):
        pieces = [self.text[i : i + self.size] for i in range(0, len(self.text), self.size)]
        for choice in range(request.sampling.n):
            for piece in pieces:
                await emit(OutputDelta(choice, piece, [7] * len(piece)))
            await emit(OutputDelta(choice, "", [], self.reason))
        return Usage(len(request.prompt_token_ids), len(self.text))


class EchoBackend(FakeBackend):
    """A model with Hermes' calls that repeats its prompt."""

    max_model_len = 4096
    tool_call_parser = "hermes"


def allowed(tools, mode="auto"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def answer(text, reason="stop", **fields):
    client = call(ToolBackend(text, reason), "POST", PATH, {**BODY, **fields})
    assert client.status == 200, client.body
    choice = client.body["choices"][0]
    for each in choice["message"].get("tool_calls", ()):
        assert each.pop("id").startswith("call_")
        assert each.pop("type") == "function"
    return choice["message"], choice["finish_reason"]


def joined(events):
    """The message of a stream, and its finish reason."""
    message, reason = {"role": None, "content": "", "reasoning": "", "tool_calls": []}, None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for each in delta.get("tool_calls", ()):
                if "id" in each:
                    assert (each["index"], each["type"]) == (len(message["tool_calls"]), "function")
                    name = each["function"]["name"]
                    message["tool_calls"].append({"name": name, "arguments": ""})
                own = message["tool_calls"][each["index"]]
                own["arguments"] += each["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


def request_of(**fields):
    backend = ToolBackend()
    client = call(backend, "POST", PATH, {**BODY, **fields})
    assert client.status == 200, client.body
    return backend.requests[0]


def refusal(**fields):
    client = call(ToolBackend(), "POST", PATH, {**BODY, **fields})
    assert client.status == 400
    return client.body["error"]


def test_an_answer_with_a_call_ends_for_it():
    message, reason = answer(f"<think>\nHm.\n</think>\n\nLook:\n{CALL}")
    assert reason == "tool_calls"
    assert message == {
        "role": "assistant",
        "content": "Look:",
        "refusal": None,
        "reasoning": "Hm.",
        "tool_calls": [{"function": FUNCTION}],
    }


def test_an_answer_without_text_has_null_for_content():
    assert answer(CALL)[0]["content"] is None
    assert answer("<think>\nHm.")[0]["content"] is None
    assert answer("")[0]["content"] == ""


@pytest.mark.parametrize("num_chars", [30, 60])
def test_a_cut_answer_keeps_its_complete_calls_and_its_reason(num_chars):
    message, reason = answer(f"{CALL}\n{CALL[:num_chars]}", "length")
    assert (len(message["tool_calls"]), message["content"], reason) == (1, None, "length")


def calls_of(text, reason="stop", **fields):
    """The entries of calls in the events of a stream, and its message and finish reason."""
    backend = ToolBackend(text, reason, size=1)
    events = call(backend, "POST", PATH, {**BODY, "stream": True, **fields}).events[:-1]
    entries = [event["choices"][0]["delta"].get("tool_calls", ()) for event in events]
    return [entry for [entry] in filter(None, entries)], *joined(events)


def test_a_call_is_streamed_once_it_is_complete():
    [entry], message, reason = calls_of(CALL)
    assert entry.pop("id").startswith("call_")
    assert entry == {"index": 0, "type": "function", "function": FUNCTION}
    assert (message["tool_calls"], reason) == ([FUNCTION], "tool_calls")


@pytest.mark.parametrize(
    ("text", "reason", "content"),
    [(CALL[:-20], "length", ""), (CALL.replace("}}", "]"), "stop", CALL.replace("}}", "]"))],
)
def test_a_stream_has_no_call_that_is_cut_or_malformed(text, reason, content):
    assert calls_of(f"{CALL}\n{text}", reason)[1]["tool_calls"] == [FUNCTION]
    entries, message, found = calls_of(text, reason)
    assert (entries, found, message["content"]) == ([], reason, content)


@pytest.mark.parametrize("size", [5, 1000])
def test_a_stopped_answer_has_all_of_its_text(size):
    assert answer(CALL[:30])[0]["content"] == CALL[:30]
    backend = ToolBackend(CALL[:30], size=size)
    events = call(backend, "POST", PATH, {**BODY, "stream": True}).events[:-1]
    assert joined(events)[0]["content"] == CALL[:30]


def test_an_answer_may_have_several_calls_unless_the_request_forbids_it():
    assert len(answer(f"{CALL}\n{CALL}")[0]["tool_calls"]) == 2
    assert len(answer(f"{CALL}\n{CALL}", parallel_tool_calls=False)[0]["tool_calls"]) == 1


def test_the_last_value_of_a_repeated_key_counts():
    twice = '{"city": "Ulm", "city": "Bern"}'
    text = CALL.replace('{"city": "Bern"}', twice)
    [called] = answer(text)[0]["tool_calls"]
    assert called["function"]["arguments"] == twice
    message = {"role": "assistant", "tool_calls": [called]}
    [sent_back] = history(EchoBackend(), [USER, message])[1]["tool_calls"]
    assert sent_back["function"]["arguments"] == {"city": "Bern"}
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"messages": [USER], "tools": [tool], "max_tokens": 99}
    [block] = call(ToolBackend(text), "POST", "/v1/messages", body).body["content"]
    assert block["input"] == {"city": "Bern"}


def test_without_tools_that_can_be_called_a_call_is_text():
    assert answer(CALL, tool_choice="none")[0]["content"] == CALL
    assert answer(CALL, tools=None)[0]["content"] == CALL


def test_reasoning_is_left_out_on_request():
    text = "<think>\nHm.\n</think>\n\nSo."
    assert "reasoning" not in answer(text, include_reasoning=False)[0]
    events = call(
        ToolBackend(text), "POST", PATH, {**BODY, "stream": True, "include_reasoning": False}
    ).events
    message, _ = joined(events[:-1])
    assert (message["content"], message["reasoning"]) == ("So.", "")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_the_parts_of_the_whole_answer(size, n):
    backend = ToolBackend(f"<think>\nHm.\n</think>\n\nLook:\n{CALL}\n{CALL}", size=size)
    client = call(backend, "POST", PATH, {**BODY, "stream": True, "n": n})
    *events, done = client.events
    assert done == "[DONE]"
    for index in range(n):
        own = [e for e in events if e["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["delta"]["role"] == "assistant"
        assert joined(own) == (
            {
                "role": "assistant",
                "content": "Look:",
                "reasoning": "Hm.",
                "tool_calls": [FUNCTION, FUNCTION],
            },
            "tool_calls",
        )


def test_a_resumed_stream_goes_on_after_any_event_even_within_a_call():
    text = f"Look: {CALL} and {CALL} so"
    body = {**BODY, "messages": [{"role": "user", "content": text}], "stream": True}
    whole = stream(PATH, body, "0", EchoBackend())
    message, _ = joined([json.loads(data) for _, data in whole[:-1]])
    assert len(message["tool_calls"]) == 2
    for place, (event_id, _) in enumerate(whole[:-2]):
        rest = stream(PATH, body, event_id, EchoBackend())
        assert len(rest) == len(whole) - place - 1
        for (_, mine), (_, theirs) in zip(rest[:-1], whole[place + 1 : -1], strict=True):
            ours, original = json.loads(mine), json.loads(theirs)
            for each in (ours, original):
                for made in each["choices"][0]["delta"].get("tool_calls", ()):
                    made.pop("id", None)
            assert ours["choices"] == original["choices"]


def test_token_ids_of_a_call_come_with_its_event():
    body = {**BODY, "stream": True, "return_token_ids": True}
    events = call(ToolBackend(CALL), "POST", PATH, body).events[:-1]
    assert sum(len(e["choices"][0]["token_ids"]) for e in events) == len(CALL)


# --- what reaches the engine ----------------------------------------------------------------------


def test_special_tokens_reach_the_parser():
    assert request_of().sampling.skip_special_tokens is False
    plain = call(backend := FakeBackend(), "POST", PATH, {"messages": [USER]})
    assert plain.status == 200
    assert backend.requests[0].sampling.skip_special_tokens is True


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_has_a_grammar(choice):
    grammar = request_of(tool_choice=choice).sampling.structured_outputs.grammar
    assert '\\"name\\": \\"weather\\"' in grammar
    assert '"additionalProperties": false' in grammar


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_are_shown_but_cannot_be_called(mode):
    other = {"type": "function", "function": {**TOOL["function"], "name": "clock"}}
    request = request_of(tools=[TOOL, other], tool_choice=allowed([NAMED], mode))
    grammar = request.sampling.structured_outputs.grammar
    assert "weather" in grammar
    assert "clock" not in grammar
    body = {**BODY, "tools": [TOOL, other], "tool_choice": allowed([NAMED], mode)}
    assert len(parse_chat_completion(body).prompt.tools) == 2
    free = request_of(tool_choice=allowed([NAMED]))
    assert free.sampling.structured_outputs is None


def test_other_calls_have_one_only_if_a_tool_is_strict():
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    assert request_of().sampling.structured_outputs is None
    assert request_of(tools=[strict]).sampling.structured_outputs is not None
    free = request_of(tools=[strict], tool_choice="none")
    assert free.sampling.structured_outputs is None


def test_a_grammar_of_the_request_decides_behind_the_reasoning():
    form = {"type": "json_object"}
    grammar = request_of(response_format=form).sampling.structured_outputs.grammar
    assert "</think>" in grammar
    assert '%json {"type": "object"' in grammar
    ended = [{"role": "user", "content": "<think>\n\n</think>\n\n"}]
    request = request_of(response_format=form, messages=ended, add_generation_prompt=False)
    assert request.sampling.structured_outputs.json_object
    error = refusal(response_format=form, tool_choice="required")
    assert error["param"] == "response_format"


def test_a_grammar_that_cannot_follow_reasoning_leaves_all_output_in_the_content():
    grammar = {"grammar": 'start: "yes" | "no"'}
    message, _ = answer("yes", structured_outputs=grammar)
    assert (message["content"], "reasoning" in message) == ("yes", False)
    asked = request_of(structured_outputs=grammar).sampling.structured_outputs
    assert asked.grammar == grammar["grammar"]


def test_an_output_with_a_grammar_of_its_own_has_no_calls():
    message, reason = answer(
        f"<think>\nHm.\n</think>\n\n{CALL}", response_format={"type": "json_object"}
    )
    assert (message["content"], reason) == (CALL, "stop")
    assert "tool_calls" not in message


def test_an_answer_with_a_schema_of_its_own_is_no_call_even_if_it_looks_like_one():
    text = '{"name": "weather", "parameters": {"city": "Bern"}}'
    backend = ToolBackend(text)
    backend.tool_call_parser, backend.reasoning_parser = "llama3_json", None
    body = {**BODY, "response_format": {"type": "json_object"}}
    choice = call(backend, "POST", PATH, body).body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


# --- fields ---------------------------------------------------------------------------------------

BAD_TOOLS = [
    ([{}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([{"type": "retrieval"}], "tools[0].type"),
    ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "a", "parameters": 1}}],
     "tools[0].function.parameters"),
    ([TOOL, TOOL], "tools[1].function.name"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "param"), BAD_TOOLS)
@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_a_bad_tool_is_refused_by_its_path(tools, param, path):
    client = call(ToolBackend(), "POST", path, {"messages": [USER], "tools": tools})
    assert (client.status, client.body["error"]["param"]) == (400, param)


BAD_SCHEMAS = [
    ({"required": None}, "required"),
    ({"required": ["a", 1]}, "required[1]"),
    ({"type": {}}, "type"),
    ({"type": []}, "type"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": {"type": [{}]}}}, "properties.a.type"),
    ({"properties": {"a": {"enum": []}}}, "properties.a.enum"),
    ({"properties": {"a": {"enum": 5}}}, "properties.a.enum"),
    ({"properties": {"a": {"minItems": "x"}}}, "properties.a.minItems"),
    ({"properties": {"a": {"maxLength": True}}}, "properties.a.maxLength"),
    ({"properties": {"a": {"minLength": -1}}}, "properties.a.minLength"),
    ({"properties": {"a": {"maximum": "9"}}}, "properties.a.maximum"),
    ({"properties": {"a": {"pattern": 1}}}, "properties.a.pattern"),
    ({"properties": {"a": {"anyOf": []}}}, "properties.a.anyOf"),
    ({"properties": {"a": {"anyOf": [{}, {"enum": {}}]}}}, "properties.a.anyOf[1].enum"),
    ({"properties": {"a": {"items": {"required": 1}}}}, "properties.a.items.required"),
    ({"$defs": {"d": 1}}, "$defs.d"),
]


@pytest.mark.parametrize(("schema", "param"), BAD_SCHEMAS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_of_another_shape_is_refused_by_its_path(schema, param, choice):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = refusal(tools=[tool], tool_choice=choice)
    assert error["param"] == f"tools[0].function.parameters.{param}"


def test_a_schema_that_is_nested_too_deep_is_refused():
    schema = {}
    for _ in range(100):
        schema = {"items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert "nested deeper" in refusal(tools=[tool])["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed([])}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed([NAMED], mode="none")}, "tool_choice.allowed_tools.mode"),
        (
            {"tool_choice": allowed([{"function": {"name": "other"}}])},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_a_bad_choice_is_refused_by_its_path(fields, param):
    assert refusal(**fields)["param"] == param


def test_a_schema_that_cannot_be_followed_is_refused_where_it_has_to_be():
    odd = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    assert refusal(tools=[odd], tool_choice="required")["param"] == "tools"
    assert request_of(tools=[odd]).sampling.structured_outputs is None


def test_a_model_without_a_format_of_calls_refuses_tools_it_may_call():
    client = call(FakeBackend(), "POST", PATH, BODY)
    assert (client.status, client.body["error"]["param"]) == (400, "tools")
    assert "args.tool_call_parser" in client.body["error"]["message"]
    assert call(FakeBackend(), "POST", PATH, {**BODY, "tool_choice": "none"}).status == 200


def test_templates_get_tools_calls_and_effort_in_their_own_form():
    asked = {"id": "1", "type": "function", "function": FUNCTION, "index": 0}
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [asked], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    body = {"messages": messages, "tools": [tool], "reasoning_effort": "none"}
    prompt = parse_chat_completion(body).prompt
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    assert prompt.messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert prompt.tools == [TOOL]
    assert prompt.template_kwargs == {
        "reasoning_effort": "none", "enable_thinking": False, "thinking": False,
    }  # fmt: skip


def test_sixty_tools_of_ten_parameters_are_held_and_count_as_work():
    parameters = {
        f"parameter_{i}": {"type": "string", "description": "What it is for.", "enum": ["a", "b"]}
        for i in range(10)
    }
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    tools = [
        {
            "type": "function",
            "function": {"name": f"t{i}", "description": "Does it.", "parameters": schema},
        }
        for i in range(60)
    ]
    body = {**BODY, "tools": tools, "tool_choice": "required"}
    limits = BodyLimits(max_model_len=4096, vocab_size=256, max_token_chars=8)
    parsed = parse_chat_completion(parse_body(json.dumps(body).encode(), limits))
    assert encoding_cost(parsed.prompt) > 10 * MAX_INLINE_COST
    assert request_of(tools=tools, tool_choice="required").sampling.structured_outputs is not None
    with pytest.raises(BadRequestError, match="tools holds more than"):
        parse_body(json.dumps({**BODY, "tools": tools * 9}).encode(), limits)


DEEPSEEK_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for t in m['tool_calls'] %}{{ '<call>' + t['function']['name'] + "
    "t['function']['arguments'] }}{% endfor %}{% elif m['role'] == 'tool' %}"
    "{{ '<out>' + m['content'] }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
"""As in DeepSeek's own templates: arguments are text, calls are shown without content alone."""
MISTRAL_TEMPLATE = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}{{ t.function | tojson }}"
    "{% if t.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif %}"
    "{{ t.id }}{% endfor %}"
    "{% if m.role == 'tool' %}<out>{{ m.tool_call_id }}{% endif %}{% endfor %}"
)


OBJECT_TEMPLATE = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}<call>{{ t.function.name }}"
    "{% for key, value in t.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}"
    "{% endfor %}{% if m.role == 'tool' %}<out>{{ m.content }}{% endif %}{% endfor %}"
)
"""As in the templates of Qwen 3 Coder, GLM and others: arguments are an object."""
JSON_TEMPLATE = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}<call>{{ t.function.name }}"
    "{% set given = t.function.arguments %}{{ given if given is string else given | tojson }}"
    "{% endfor %}{% if m.role == 'tool' %}<out>{{ m.content }}{% endif %}{% endfor %}"
)
"""As in the templates of Qwen 3 and Llama 3: arguments are JSON."""
KIMI_TEMPLATE = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}{{ t.id }}:"
    "{{ t.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}<out>{{ m.tool_call_id }}{{ m.content }}{% endif %}{% endfor %}"
)
"""As in Kimi K2's template: calls and results have the ids of earlier answers."""
GPT_OSS_TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('both content and thinking') }}{% endif %}"
    "<analysis>{{ m.content or m.thinking }}<call>{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% elif m.role == 'tool' %}"
    "<out>{{ m.content | tojson }}{% endif %}{% endfor %}"
)
"""As in GPT-OSS's template: reasoning before a call is `thinking`."""
AS_JSON = ["hermes", "llama3_json", "pythonic", "llama4_pythonic", "deepseek_v31", "deepseek_v3"]
AS_OBJECTS = ["qwen3_coder", "glm45", "glm47", "gemma4", "kimi_k3"]
AS_OBJECTS += ["deepseek_v32", "deepseek_v4", "deepseek_v41"]


@pytest.mark.parametrize(
    ("name", "template", "prompt"),
    [
        *((name, JSON_TEMPLATE, '<call>weather{"city": "Bern"}<out>sun') for name in AS_JSON),
        *((name, OBJECT_TEMPLATE, "<call>weather<city>Bern<out>sun") for name in AS_OBJECTS),
        ("kimi_k2", KIMI_TEMPLATE,
         'call_0123456789abcdef01234567:{"city": "Bern"}<out>call_0123456789abcdef01234567sun'),
        ("openai", GPT_OSS_TEMPLATE, '<analysis>Hm.<call>weather{"city": "Bern"}<out>"sun"'),
        ("deepseek_v3", DEEPSEEK_TEMPLATE, 'hi<call>weather{"city": "Bern"}<out>sun'),
        ("mistral", MISTRAL_TEMPLATE,
         '{"arguments": {"city": "Bern"}, "name": "weather"}ID<out>ID'),
    ],
)  # fmt: skip
def test_a_template_of_a_family_shows_earlier_calls(name, template, prompt):
    backend = EchoBackend()
    backend.tool_call_parser = name
    given = "call_0123456789abcdef01234567"
    called = {"role": "assistant", "content": None, "reasoning": "Hm.",
              "tool_calls": [{"id": given, "type": "function", "function": FUNCTION}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": given, "content": "sun"}
    messages = history(backend, [USER, called, result])
    environment = jinja2.Environment(autoescape=False)
    rendered = environment.from_string(template).render(messages=messages)
    short = messages[2]["tool_call_id"]
    assert rendered == prompt.replace("ID", short)


def history(backend, messages):
    """The messages as the model's chat template gets them."""
    prompt = parse_chat_completion({"messages": messages})
    [card] = backend.models()
    return with_history(prompt, card).prompt.messages


def test_the_former_role_of_results_is_rendered_as_a_result():
    messages = [USER, {"role": "function", "name": "weather", "content": "sun"}]
    rendered = history(EchoBackend(), messages)[1]
    result = {"role": "tool", "name": "weather", "content": "sun"}
    assert rendered == {**result, "tool_call_id": "call_weather"}


def test_the_former_call_of_an_answer_is_rendered_as_a_call():
    messages = [USER, {"role": "assistant", "content": None, "function_call": FUNCTION}]
    call_ = {"id": "call_weather", "type": "function"}
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    calls = [{**call_, "function": function}]
    assert history(EchoBackend(), messages)[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": calls,
    }


@pytest.mark.parametrize("given", ["abc123XYZ", None])
def test_an_id_of_mistral_has_nine_characters(given):
    made = {"name": "weather", "arguments": {}} | ({"id": given} if given else {})
    backend = ToolBackend(f"[TOOL_CALLS]{json.dumps([made])}")
    backend.tool_call_parser = "mistral"
    client = call(backend, "POST", PATH, BODY)
    found = client.body["choices"][0]["message"]["tool_calls"][0]["id"]
    assert found == given if given else re.fullmatch("[A-Za-z0-9]{9}", found)


@pytest.mark.parametrize(("name", "argument"), [("get-file", "a"), ("f", "from"), ("f", "a b")])
def test_a_pythonic_model_refuses_tools_that_it_cannot_name(name, argument):
    parameters = {"type": "object", "properties": {argument: {}}}
    function = {"name": name, "parameters": parameters}
    backend = ToolBackend()
    backend.tool_call_parser = "pythonic"
    body = {**BODY, "tools": [{"type": "function", "function": function}]}
    client = call(backend, "POST", PATH, body)
    assert (client.status, client.body["error"]["param"]) == (400, "tools")
    assert name in client.body["error"]["message"]


@pytest.mark.parametrize(
    ("effort", "level"),
    [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
def test_an_effort_becomes_a_level_that_the_family_knows(effort, level):
    backend = ToolBackend()
    prompt = parse_chat_completion({"messages": [USER], "reasoning_effort": effort})
    for name, wanted in (("openai_gptoss", level), ("qwen3", effort)):
        backend.reasoning_parser = name
        [card] = backend.models()
        assert with_history(prompt, card).prompt.template_kwargs["reasoning_effort"] == wanted
    given = {"chat_template_kwargs": {"reasoning_effort": "max"}}
    own = parse_chat_completion({"messages": [USER], **given, "reasoning_effort": effort})
    backend.reasoning_parser = "openai_gptoss"
    [card] = backend.models()
    assert with_history(own, card).prompt.template_kwargs["reasoning_effort"] == "max"
