"""Formats of model families: parsers, grammars, and that both agree."""

import functools
import json
import random
import re
from dataclasses import replace
from typing import get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import ReasoningParserName, ToolParserName
from cluster.edge.families import formats
from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.formats import OutputContext, WholeFormat
from cluster.edge.families.grammar import CallRules, answer_grammar, message_grammar
from cluster.edge.families.json_text import JsonScanner, loads
from cluster.edge.families.lark import UnsupportedSchemaError
from cluster.edge.families.message import Message, MessageDelta, Tool, ToolCall
from cluster.edge.families.mistral import Mistral
from cluster.edge.families.parser import OutputParser
from cluster.edge.families.reader import Markers, TextReader
from cluster.edge.families.table import REASONING_FORMATS, TOOL_FORMATS
from replicas.grammar_checks import special_ids_for_checks
from replicas.grammars import GrammarCompiler
from replicas.sampling_params import StructuredOutputs

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = {tool.name: tool for tool in (WEATHER, TIME)}
PARIS = ToolCall("get_weather", '{"city": "Paris"}')
NOW = ToolCall("get_time", "{}")


def parser(tools, reasoning=None, prompt_end="", *, hidden=(), offered=TOOLS, max_calls=64):
    return OutputParser(
        TOOL_FORMATS[tools] if tools else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        OutputContext(offered, prompt_end, hidden),
        max_calls,
    )


def delta_in_pieces(own, text, cuts, *, is_cut=False):
    delta = MessageDelta()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        delta.extend(own.feed(text[begin:end]))
    delta.extend(own.finish(is_cut=is_cut))
    return delta


def read_in_pieces(own, text, cuts, *, is_cut=False):
    return Message.of(delta_in_pieces(own, text, cuts, is_cut=is_cut))


@pytest.fixture(autouse=True, scope="module")
def _ids_of_calls():
    """Without ids of our own, messages can be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "new_call_id", str)
        patch.setattr(Mistral, "new_call_id", formats.ToolFormat.new_call_id)
        yield


def test_every_format_that_a_configuration_may_name_is_there():
    assert set(get_args(ToolParserName)) == set(TOOL_FORMATS)
    assert set(get_args(ReasoningParserName)) == set(REASONING_FORMATS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_start_of_a_call_is_the_beginning_of_another(name):
    starts = TOOL_FORMATS[name].starts
    assert not any(a != b and b.startswith(a) for a in starts for b in starts)


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MESSAGES = [
    ("hermes", None, "", "Hello <b>", Message("Hello <b>")),
    ("hermes", None, "", HERMES_CALL, Message(calls=[PARIS])),
    ("hermes", None, "", f"Look:\n{HERMES_CALL}\n", Message("Look:", calls=[PARIS])),
    ("hermes", None, "", f"{HERMES_CALL}\n{HERMES_CALL}", Message(calls=[PARIS, PARIS])),
    # What is no call is content.
    ("hermes", None, "", "<tool_call>no</tool_call>", Message("<tool_call>no</tool_call>")),
    ("hermes", None, "", '<tool_call>{"name": 5}', Message('<tool_call>{"name": 5}')),
    ("hermes", None, "", '<tool_call>{"name":"f","arguments":{"x":1e999}}',
     Message('<tool_call>{"name":"f","arguments":{"x":1e999}}')),
    # No body of a later request may hold half of a surrogate pair.
    ("hermes", None, "", '<tool_call>{"name":"f","arguments":{"x":"\\ud800"}}',
     Message('<tool_call>{"name":"f","arguments":{"x":"\\ud800"}}')),
    ("hermes", None, "", '<tool_call>{"name":"f","arguments":{"x":"\\ud83d\\ude00"}}',
     Message(calls=[ToolCall("f", '{"x":"\\ud83d\\ude00"}')])),
    ("hermes", "qwen3", "<think>\n", f"Hm.\n</think>\n\nSo.\n{HERMES_CALL}",
     Message("So.", "Hm.", [PARIS])),
    ("hermes", "qwen3", "<think>\n\n</think>\n\n", "So.", Message("So.")),
    ("hermes", "qwen3", "", "<think>\nHm.\n</think>\n\nSo.", Message("So.", "Hm.")),
    ("hermes", "qwen3", "", "I say <think>.", Message("I say <think>.")),
    ("hermes", "qwen3", "<think>\n", f"Hm.\n{HERMES_CALL}", Message("", "Hm.", [PARIS])),
    ("hermes", "qwen3", "<think>\n", "A <tool_call> is", Message("", "A <tool_call> is")),
    ("hermes", "qwen3", "<think>\n", "Never ends", Message("", "Never ends")),
    ("llama3_json", None, "", '{"name": ["f"], "parameters": {}}',
     Message('{"name": ["f"], "parameters": {}}')),
    (None, "deepseek_r1", "", "Hm.</think>So.", Message("So.", "Hm.")),
    (None, "deepseek_r1", "", "<think>Hm.</think>So.", Message("So.", "Hm.")),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "reasoning", "prompt_end", "text", "message"), MESSAGES)
def test_an_output_becomes_a_message(tools, reasoning, prompt_end, text, message):
    assert parser(tools, reasoning, prompt_end).read(text) == message


HARMONY_CALL = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>"
KIMI_CALL = '<|open|>tools<|sep|><|open|>call tool="get_time" index="0"<|sep|>'
UNENDED = [
    ("hermes", None, "", HERMES_CALL[:30], Message(HERMES_CALL[:30])),
    ("hermes", None, "", f"{HERMES_CALL}\n{HERMES_CALL[:30]}",
     Message(HERMES_CALL[:30], calls=[PARIS])),
    ("hermes", "qwen3", "<think>", f"Hm.{HERMES_CALL[:30]}",
     Message("", f"Hm.{HERMES_CALL[:30]}")),
    ("glm45", None, "", "Use <tool_call> to call.", Message("Use <tool_call> to call.")),
    ("openai", None, "", "to=5 is the answer", Message("to=5 is the answer")),
    ("openai", None, "", f'{HARMONY_CALL}{{"a": 1', Message('{"a": 1')),
    ("kimi_k3", None, "", KIMI_CALL, Message(KIMI_CALL)),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "reasoning", "prompt_end", "text", "message"), UNENDED)
def test_a_call_without_end_is_dropped_only_if_a_limit_cuts_it(
    tools, reasoning, prompt_end, text, message
):
    assert parser(tools, reasoning, prompt_end).read(text) == message
    own = parser(tools, reasoning, prompt_end)
    thought = "Hm." if reasoning else ""
    cut = own.read(text, is_cut=True)
    assert (cut.content.strip(), cut.reasoning) == ("Use" if tools == "glm45" else "", thought)
    assert cut.calls == message.calls


REFUSED = [
    ("hermes", HERMES_CALL.replace("}}", "}"), HERMES_CALL.replace("}}", "}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "name": "g"}',
     '<tool_call>{"name": "f", "arguments": {}, "name": "g"}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}',
     '<tool_call>{"name": "f", "arguments": {"a": tru}}'),
    ("llama3_json", '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}'),
    ("llama3_json", '{"name": "get_time"}', '{"name": "get_time"}'),
    ("openai", f'{HARMONY_CALL}{{"a": 1,}}<|call|>', '{"a": 1,}'),
    ("kimi_k3", "<|open|>tools<|sep|>of the trade", "<|open|>tools<|sep|>of the trade"),
    ("kimi_k3", f"{KIMI_CALL}text", f"{KIMI_CALL}text"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "content"), REFUSED)
def test_a_part_of_a_message_that_is_no_call_is_content(tools, text, content):
    assert parser(tools).read(text) == Message(content)


PIECES = [*sorted({start for each in TOOL_FORMATS.values() for start in each.starts}),
          "</tool_call>", "<think>", "</think>", "\n", " ", "<function=get_time>", "</function>",
          "<parameter=city>", "</parameter>", "get_time", "<arg_key>", "</arg_key>", "<arg_value>",
          "</arg_value>", "[get_time(", "x='a)'", ")]", "<|channel|>", "analysis", "<|message|>",
          "<|end|>", " to=functions.f", "final", "<|open|>", "call tool=", "<|sep|>", "<|close|>",
          "call:f{", '<|"|>', "a:1", "[THINK]", "[ARGS]", "<|tool_call_begin|>", "f:0", "é",
          "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", '{"name": "f"', "}",
          ', "arguments": {"x": [1, "a\\"b"]}', HERMES_CALL, "[", '"', "\\", "text"]  # fmt: skip


def kimi_section(*ids):
    """A section of calls of Kimi K2 with ids of the model's."""
    calls = [
        f"<|tool_call_begin|>{each}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for each in ids
    ]
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def dsml(section, space=""):
    """A section of one call in DeepSeek's elements."""
    mark = f"｜DSML｜{space}"
    call = f'<{mark}invoke name="get_time">\n</{mark}invoke>\n'
    return f"<｜DSML｜{section}>\n{call}</｜DSML｜{section}>"


def deepseek(call):
    """A section of one call with DeepSeek's tokens."""
    call = f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


QWEN_PARAMETER = "<parameter=city>\nParis\n</parameter>"
CALLS = {
    "hermes": HERMES_CALL,
    "llama3_json": '<|python_tag|>{"name": "get_time", "parameters": {}}',
    "qwen3_coder": f"<function=get_weather>\n{QWEN_PARAMETER}\n</function>\n</tool_call>",
    "deepseek_v3": deepseek("function<｜tool▁sep｜>get_time\n```json\n{}\n```"),
    "deepseek_v31": deepseek("get_time<｜tool▁sep｜>{}"),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml(" calls", " "),
    "openai": f"{HARMONY_CALL}{{}}<|call|>",
    "gemma4": "<|tool_call>call:get_time{}<tool_call|>",
    "mistral": "[TOOL_CALLS]get_time[ARGS]{}",
    "pythonic": "<|python_start|>[get_time()]<|python_end|>",
    "llama4_pythonic": "<|python_start|>[get_time()]<|python_end|>",
    "glm45": "<tool_call>get_time\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>",
    "kimi_k2": kimi_section("functions.get_time:0"),
    "kimi_k3": f"{KIMI_CALL}<|close|>call<|sep|><|close|>tools<|sep|>",
}
"""A complete call in each format."""


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_complete_call_is_read_without_rest(name):
    message = parser(name).read(CALLS[name], is_cut=True)
    assert [call.name in TOOLS for call in message.calls] == [True]
    assert message.content == ""


def is_json(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_any_division_of_an_output_gives_the_same_message():
    num_messages = {True: 0, False: 0}
    num_unfinished = 0

    @settings(max_examples=300, deadline=None)
    @given(
        tools=st.sampled_from([None, *TOOL_FORMATS]),
        reasoning=st.sampled_from([None, *REASONING_FORMATS]),
        prompt_end=st.sampled_from(["", "<think>\n", "<think></think>", "<|open|>think<|sep|>"]),
        before=st.lists(st.sampled_from(PIECES), max_size=7),
        behind=st.lists(st.sampled_from(PIECES), max_size=7),
        is_cut=st.booleans(),
        data=st.data(),
    )
    def check(tools, reasoning, prompt_end, before, behind, is_cut, data):
        nonlocal num_unfinished
        call = CALLS.get(tools, HERMES_CALL)
        call = call[: data.draw(st.sampled_from([len(call), len(call) - 1, len(call) - 9]))]
        text = "".join([*before, call, *behind])
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
        whole = parser(tools, reasoning, prompt_end).read(text, is_cut=is_cut)
        num_messages[bool(whole.calls)] += 1
        delta = delta_in_pieces(parser(tools, reasoning, prompt_end), text, (), is_cut=is_cut)
        streamed = Message.of(delta)
        for call in streamed.calls:
            assert call.is_complete is is_json(call.arguments)
        complete = [call for call in streamed.calls if call.is_complete]
        num_unfinished += complete != streamed.calls
        # What was given of other calls is all that a stream has besides.
        assert replace(streamed, calls=complete) == whole
        for places in (cuts, range(1, len(text))):
            own = parser(tools, reasoning, prompt_end)
            assert delta_in_pieces(own, text, places, is_cut=is_cut) == delta

    check()
    assert num_messages[True] >= 100
    assert num_unfinished >= 1


def test_content_comes_at_once_unless_it_may_begin_a_call():
    own = parser("hermes")
    assert [Message.of(own.feed(piece)).content for piece in ("Hi", " <b", " you<tool", "_x")] == [
        "Hi", " <b", " you", "<tool_x",
    ]  # fmt: skip


JSON_FORMATS = [
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "openai",
]
FORMATS_OF_ARGUMENTS = [
    "qwen3_coder",
    "glm45",
    "glm47",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "kimi_k3",
]
WHOLE_FORMATS = ["gemma4", "pythonic", "llama4_pythonic"]


def calls_so_far(name, num_chars):
    """The calls of the beginning of a good call, and a parser that has read it."""
    prompt_end = "<|open|>response<|sep|>" if name == "kimi_k3" else ""
    own = parser(name, None, prompt_end, offered={"mixed": MIXED})
    return Message.of(own.feed(GOOD[name][:num_chars])).calls, own


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_arguments_of_a_call_come_as_soon_as_they_are_certain(name):
    assert {*JSON_FORMATS, *FORMATS_OF_ARGUMENTS, *WHOLE_FORMATS} == {*TOOL_FORMATS}
    text = GOOD[name]
    seen = {}
    for num_chars in range(len(text) + 1):
        calls, own = calls_so_far(name, num_chars)
        assert own.has_calls is any(call.is_complete for call in calls)
        for call in calls:
            assert call.name == "mixed"
            seen.setdefault(call.arguments, num_chars)
            assert call.is_complete is is_json(call.arguments)
    least = {"{", '{"text"', '{"text": "', '{"text": "x', '{"text": "x"'}
    if name in JSON_FORMATS:
        assert least <= seen.keys()
        assert seen['{"text": "x'] == text.index('"x') + 2
    elif name in FORMATS_OF_ARGUMENTS:
        assert {*seen} - {'{"text": "x"'} == {"{", '{"text": "x"}'}
    else:
        assert {*seen} == {'{"text": "x"}'}


def test_an_argument_comes_before_the_next():
    text = GOOD["qwen3_coder"].replace("</function>", "<parameter=all>\n")
    [call] = Message.of(parser("qwen3_coder").feed(text)).calls
    assert call == ToolCall("mixed", '{"text": "x"', is_complete=False)


SECTION_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
UNFINISHED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> So.',
     Message('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> So.',
             calls=[ToolCall("f", '{"a": 1', is_complete=False)])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, 5}',
     Message('<tool_call>{"name": "f", "arguments": {"a": 1}, 5}',
             calls=[ToolCall("f", '{"a": 1', is_complete=False)])),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": tru{HERMES_CALL}',
     Message('<tool_call>{"name": "f", "arguments": {"a": tru',
             calls=[ToolCall("f", '{"a": ', is_complete=False), PARIS])),
    ("qwen3_coder", "<function=f>\n<parameter=a>\nx",
     Message("<function=f>\n<parameter=a>\nx",
             calls=[ToolCall("f", "{", is_complete=False)])),
    ("deepseek_v31", deepseek('get_time<｜tool▁sep｜>{"a": "b') + "so",
     Message(deepseek('get_time<｜tool▁sep｜>{"a": "b') + "so",
             calls=[ToolCall("get_time", f'{{"a": "b{SECTION_END}so',
                             is_complete=False)])),
    ("openai", f'{HARMONY_CALL}{{"a": 1,}}<|call|>',
     Message('{"a": 1,}',
             calls=[ToolCall("get_time", '{"a": 1,', is_complete=False)])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), UNFINISHED)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_call_that_is_none_after_a_part_was_given_ends_without_its_last_brace(
    name, text, message, step
):
    own = parser(name)
    assert read_in_pieces(own, text, range(step, len(text), step)) == message
    assert own.has_calls is any(call.is_complete for call in message.calls)


def test_a_given_call_with_half_of_a_surrogate_pair_ends_incomplete():
    text = '<tool_call>{"name":"get_time","arguments":{"x":"\\ud800"}}</tool_call>'
    own = parser("hermes")
    message = read_in_pieces(own, text, range(1, len(text)))
    [call] = message.calls
    assert (call.arguments, call.is_complete, own.has_calls) == ('{"x":"\\ud800"', False, False)


@pytest.mark.parametrize("name", [*JSON_FORMATS, *FORMATS_OF_ARGUMENTS])
def test_a_cut_call_has_the_beginning_of_an_object(name):
    at = GOOD[name].index("x", GOOD[name].index("text") + len("text"))
    prompt_end = "<|open|>response<|sep|>" if name == "kimi_k3" else ""
    own = parser(name, None, prompt_end, offered={"mixed": MIXED})
    message = read_in_pieces(own, GOOD[name][: at + 1], range(1, at + 1), is_cut=True)
    arguments = '{"text": "x' if name in JSON_FORMATS else "{"
    assert message == Message(calls=[replace(message.calls[0], arguments=arguments)])
    assert [call.is_complete for call in message.calls] == [False]


def test_a_repeated_argument_keeps_its_first_value():
    text = "<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=a>\ny\n</parameter></function>"
    assert parser("qwen3_coder").read(text).calls == [ToolCall("f", '{"a": "x"}')]


# A number is unread until its end is there: with a wrong character it has up to 30, as below.
VALUES_OF_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**27), 10**27)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | st.sampled_from(['"', "\\", "\n", "\ud800"]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    value=VALUES_OF_JSON,
    indent=st.sampled_from([None, 1]),
    wrong=st.sampled_from(["", ",", "}", '"', "x", "-", "\\", "\n", "é"]),
    data=st.data(),
)
def test_a_scanner_of_json_agrees_with_a_decoder(value, indent, wrong, data):
    text = json.dumps(value, indent=indent, ensure_ascii=data.draw(st.booleans()))
    at = data.draw(st.integers(0, len(text)))
    text = f"[{text[:at]}{wrong}{text[at:]}]"
    scanner, end = JsonScanner(), 0
    for num_chars in range(1, len(text) + 1):
        end = scanner.scan(text[:num_chars], end)
        if not scanner.is_malformed:
            assert num_chars - end <= 30
    assert (scanner.is_done and end == len(text)) is not (json_error(text) is not None)
    whole = JsonScanner()
    assert (whole.scan(text, 0), whole.is_done, whole.is_malformed) == (
        end, scanner.is_done, scanner.is_malformed,
    )  # fmt: skip


def test_a_number_of_any_length_is_read_once_its_end_is_there():
    text = f"[{10**40}"
    scanner = JsonScanner()
    assert scanner.scan(text, 0) == 1
    assert scanner.scan(text + "]", 1) == len(text) + 1
    assert scanner.is_done


def json_error(text):
    try:
        loads(text)
    except MalformedCallError as error:
        return error
    return None


def test_special_tokens_are_left_out_and_further_calls_are_dropped():
    own = parser("hermes", hidden=["<|end|>"], max_calls=1)
    assert own.read(f"a<|end|>b{HERMES_CALL}{HERMES_CALL}") == Message("ab", calls=[PARIS])


def num_chars_handled(monkeypatch, pieces, prompt_end):
    """Characters that a parser keeps, summed over all changes of its text, and searches."""
    counted = 0

    def keep(reader, text):
        nonlocal counted
        counted += len(text)
        reader.kept = text

    def search(markers, text, begin):
        nonlocal counted
        found = find(markers, text, begin)
        counted += (found.end() if found else len(text)) - begin
        return found

    find = Markers.search
    with monkeypatch.context() as patch:
        patch.setattr(TextReader, "text", property(lambda reader: reader.kept, keep), raising=False)
        patch.setattr(Markers, "search", search)
        own = parser("hermes", "qwen3", prompt_end)
        for piece in pieces:
            own.feed(piece)
        own.finish()
    return counted


@pytest.mark.parametrize("piece", ["a", "<tool_cal", "<tool_call>", '<tool_call>{"a": 1}'])
@pytest.mark.parametrize("prompt_end", ["<think>\n", "<think></think>"])
def test_a_stream_without_calls_is_read_in_linear_time(monkeypatch, piece, prompt_end):
    least = num_chars_handled(monkeypatch, [piece] * 1_000, prompt_end)
    most = num_chars_handled(monkeypatch, [piece] * 2_000, prompt_end)
    assert 1_000 <= least < most < 2.1 * least


def test_text_that_looks_like_calls_again_and_again_is_not_read_as_often():
    text = "<function=f>\n<parameter=a>\n" * 4_000
    own = parser("qwen3_coder")
    assert own.read(text) == Message(text)
    streamed = read_in_pieces(parser("qwen3_coder"), text, ())
    assert 1 < len(streamed.calls) < 50


def test_many_short_texts_that_are_no_calls_do_not_hide_a_call():
    text = "<tool_call>no" * 200
    assert parser("hermes").read(text + HERMES_CALL) == Message(text, calls=[PARIS])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_reading_compiles_no_expressions_and_no_markers(name, monkeypatch):
    def read():
        own = parser(name, "qwen3", hidden=("<|end|>",), offered={"mixed": MIXED})
        return own.read(f"<think>Hm.</think>{GOOD[name]}")

    message = read()
    assert message.calls or name in ("openai", "kimi_k3")
    for owner in (re, Markers):
        monkeypatch.delattr(owner, "compile" if owner is re else "__init__")
    assert read() == message


def random_text(compiler, grammar, seed, begin=""):
    """A text of a grammar over bytes, drawn at random behind its beginning."""
    matcher = compiler.compile(StructuredOutputs(grammar=grammar))
    rng, text = random.Random(seed), bytearray(begin.encode())
    assert all(map(matcher.consume_token, text))
    while (
        len(text) < 4000
        and not matcher.is_stopped()
        and not (matcher.is_accepting() and rng.random() < 0.5)
    ):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> (i % 8) & 1]
        plain = [i for i in allowed if 32 <= i < 127] or allowed
        byte = rng.choice(plain if rng.random() < 0.8 else allowed)
        matcher.consume_token(byte)
        text.append(byte)
    assert matcher.is_accepting()
    return text.decode()


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_the_grammar_makes_the_parser_reads(name, is_parallel):
    compiler = GrammarCompiler.for_checks([])
    rules = CallRules([WEATHER, TIME], is_required=True, is_parallel=is_parallel)
    # The parts of a whole format in which any text may be are left out.
    prompt_end = "<|open|>response<|sep|>" if name == "kimi_k3" else ""
    begin = " to=" if name == "openai" else ""
    grammar = message_grammar(TOOL_FORMATS[name], None, rules, {}, prompt_end)
    num_calls = set()
    for seed in range(24):
        text = random_text(compiler, grammar, seed, begin)
        message = parser(name, None, prompt_end).read(text)
        assert not message.content, text
        assert message.calls, text
        num_calls.add(len(message.calls))
        for call in message.calls:
            arguments = json.loads(call.arguments)
            assert call.name in TOOLS
            assert arguments.keys() <= TOOLS[call.name].parameters["properties"].keys()
            assert call.name == "get_time" or len(arguments["city"]) <= 8
            assert arguments.get("unit", "c") in ("c", "f")
            assert arguments.get("days", 0) in range(10)
    has_several = is_parallel and name != "openai"
    assert (num_calls == {1}) is not has_several


MIXED = Tool(
    "mixed",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "some": {"type": ["string", "integer", "null"], "maxLength": 40},
            "all": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["text"],
        "additionalProperties": False,
    },
    is_strict=True,
)
GOOD = {
    "hermes": '<tool_call>\n{"name": "mixed", "arguments": {"text": "x"}}\n</tool_call>',
    "llama3_json": '{"name": "mixed", "parameters": {"text": "x"}}',
    "qwen3_coder": "<tool_call>\n<function=mixed>\n<parameter=text>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>mixed\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "glm47": "<tool_call>mixed<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>",
    "pythonic": '[mixed(text="x")]',
    "llama4_pythonic": '[mixed(text="x")]',
    "mistral": '[TOOL_CALLS]mixed[ARGS]{"text": "x"}',
    "gemma4": '<|tool_call>call:mixed{text:<|"|>x<|"|>}<tool_call|>',
    "openai": ' to=functions.mixed<|channel|>commentary <|constrain|>json<|message|>{"text": "x"}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.mixed:0"
    '<|tool_call_argument_begin|>{"text": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="mixed" index="1"'
    '<|sep|><|open|>argument key="text" type="string"<|sep|>x<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>mixed"
    "\n```json\n"
    '{"text": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>mixed<｜tool▁sep｜>"
    '{"text": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="mixed">\n'
    '<｜DSML｜parameter name="text" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
}
GOOD["deepseek_v4"] = GOOD["deepseek_v32"].replace("function_calls", "tool_calls")
GOOD["deepseek_v41"] = re.sub("(?<=｜DSML｜)", " ", GOOD["deepseek_v4"]).replace(
    "tool_calls", "calls"
)
"""A call in each format."""
WRONG = {
    name: [text.replace('"x"', "5").replace("text", "test").replace("x", "y")]
    for name, text in GOOD.items()
    if name not in ("openai", "kimi_k3")
}
WRONG["llama3_json"] += [f"\n{WRONG['llama3_json'][0]}", f"<|python_tag|>{GOOD['llama3_json']}"]
WRONG["pythonic"] += [f" {WRONG['pythonic'][0]}"]
WRONG["qwen3_coder"] += ["<function=mixed>\n</function>"]


def misleading_text(compiler, grammar, rng, parts, pieces):
    """A text of parts with pieces between them, as far as a grammar accepts each; or None."""
    matcher, text = compiler.compile(StructuredOutputs(grammar=grammar)), bytearray()
    for part in parts:
        for piece in [*(rng.choice(pieces) for _ in range(rng.choice([0] * 8 + [1, 2]))), part]:
            accepted_part = piece.encode()
            accepted_part = accepted_part[: matcher.validate_tokens(list(accepted_part))]
            assert all(map(matcher.consume_token, accepted_part))
            text += accepted_part
    return text.decode(errors="replace") if matcher.is_accepting() else None


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("prompt_end", ["", "<think>\n"])
def test_what_a_grammar_accepts_has_only_calls_that_follow_their_schemas(
    name, is_required, prompt_end
):
    rng = random.Random(f"{name}{is_required}")
    compiler = GrammarCompiler.for_checks([])
    rules = CallRules([MIXED], is_required=is_required)
    grammar = message_grammar(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], rules, {}, prompt_end)
    # Parts of good messages, and what may mislead the parser between them.
    before = "<|open|>response<|sep|>" if name == "kimi_k3" else ""
    parts = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|[a-z]+|[^a-z]", GOOD[name])
    pieces = [*PIECES, *parts, *WRONG.get(name, ()), GOOD[name], "</think>",
              "</parameter>\n<parameter=some>", "</parameter><parameter=all>", "\n<parameter=some>",
              "</arg_value><arg_key>all</arg_key><arg_value>", "\n</function>\n</tool_call>",
              "</｜DSML｜parameter></｜DSML｜invoke>", "<|return|>",
              "<|close|>argument<|sep|>"]  # fmt: skip
    num_calls = num_texts = 0
    for _ in range(36):
        thought = ["Hm.", "</think>"] if prompt_end else rng.choice([[], ["<think>", "</think>"]])
        thought = [] if isinstance(TOOL_FORMATS[name], WholeFormat) else thought
        text = misleading_text(compiler, grammar, rng, [*thought, before, *parts], pieces)
        if text is None:
            continue
        num_texts += 1
        message = parser(name, "qwen3", prompt_end, offered={"mixed": MIXED}).read(text)
        num_calls += len(message.calls)
        for call in message.calls:
            assert call.name == "mixed", text
            jsonschema.validate(json.loads(call.arguments), MIXED.parameters)
        assert message.calls or not is_required, text
    assert num_texts > 2
    assert num_calls > 2


@functools.cache
def calls_alone(name):
    """The grammar of a required call without reasoning."""
    prompt_end = "<|open|>response<|sep|>" if name == "kimi_k3" else ""
    rules = CallRules([MIXED], is_required=True, is_parallel=False)
    return message_grammar(TOOL_FORMATS[name], None, rules, {}, prompt_end)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("is_required", [False, True])
def test_no_call_bypasses_a_grammar(name, is_required):
    rules = CallRules([MIXED], is_required=is_required)
    grammar = message_grammar(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], rules, {})
    end = message_grammar(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], rules, {}, "<think>\n")
    assert accepted(grammar, GOOD[name])
    assert accepted(end, f"Hm.\n</think>\n\n{GOOD[name]}")
    for wrong in WRONG[name]:
        assert not accepted(grammar, wrong)
        assert not accepted(grammar, f"\n<think>Hm.</think>{wrong}")
        if TOOL_FORMATS[name].start is None:
            assert not accepted(grammar, f"Look: {wrong}")
            assert not accepted(end, f"Hm.\n{wrong}</think>\n\n{GOOD[name]}")


VALUES = ["a</parameter>\n<parameter=b>", "a</arg_value><arg_key>b</arg_key>", '"', "{", "\n", "]",
          "</｜DSML｜parameter><｜DSML｜parameter",
          "<|close|>argument<|sep|><|open|>argument"]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "deepseek_v32", "kimi_k3"])
def test_json_in_an_argument_may_hold_the_markup_of_its_end(name, value):
    grammar = calls_alone(name)
    written = json.dumps([value, value], ensure_ascii=False)
    prompt_end = "<|open|>response<|sep|>" if name == "kimi_k3" else ""
    text = random_call_with(grammar, prompt_end, name, written)
    [call] = parser(name, None, prompt_end, offered={"mixed": MIXED}).read(text).calls
    assert json.loads(call.arguments) == {"text": "x", "all": [value, value]}
    split = read_in_pieces(
        parser(name, None, prompt_end, offered={"mixed": MIXED}), text, range(1, len(text))
    )
    assert split.calls == [call]


NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}},
    "required": ["v"],
    "additionalProperties": False,
}
CAT = {"properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["kind"]}
DOG = {
    "properties": {"kind": {"const": "dog"}},
    "required": ["kind"],
    "additionalProperties": False,
}
SHORT = {"type": "string", "maxLength": 3}
COMBINED = [
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "array"], "items": {"type": "boolean"}, "maxItems": 2, "minimum": 3},
    {"$ref": "#/$defs/node"},
    {"$ref": "#/$defs/short", "description": "d"},
    {"allOf": [{"$ref": "#/$defs/short"}], "default": "x"},
    {"allOf": [{"type": "string"}, {"maxLength": 2}]},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/short"}}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
    {"type": "object", "oneOf": [CAT, {"$ref": "#/$defs/dog"}]},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": SHORT},
    {"enum": ["x", 1, None, [1, "y"], {"a": True}]},
    {"type": "integer", "enum": ["x", 1]},
    {"maxLength": 2},
    {"type": "array", "items": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", COMBINED)
def test_gemma4_follows_schemas_that_combine_others(schema):
    definitions = {"node": NODE, "short": SHORT, "dog": DOG}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"],
                  "additionalProperties": False, "$defs": definitions}  # fmt: skip
    rules = CallRules([Tool("f", parameters)], is_required=True, is_parallel=False)
    grammar = message_grammar(TOOL_FORMATS["gemma4"], None, rules, {})
    compiler = GrammarCompiler.for_checks([])
    for seed in range(12):
        text = random_text(compiler, grammar, seed)
        [call] = parser("gemma4").read(text).calls
        jsonschema.validate(json.loads(call.arguments), parameters)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"not": {"type": "string"}}, "has not"),
        ({"$ref": "#/$defs/none"}, "to nothing"),
        ({"$ref": "http://x"}, "begin with #"),
        ({"$ref": "#/properties/a"}, "its own value"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"allOf": [{"maxLength": 1}, {"maxLength": 2}]}, "differ in maxLength"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "required": ["b"]}, "requires 'b'"),
        ({"type": "object", "properties": {"b:": {}}}, "cannot be written"),
        ({"enum": ["1"], "type": "integer"}, "enum"),
    ],
)
def test_gemma4_refuses_schemas_that_it_cannot_follow(schema, error):
    rules = CallRules([Tool("f", {"properties": {"a": schema}})], is_required=True)
    with pytest.raises(UnsupportedSchemaError, match=error):
        message_grammar(TOOL_FORMATS["gemma4"], None, rules, {})


@pytest.mark.parametrize(
    "pattern",
    [
        "^a$|^b$",
        "^a|b$",
        r"^x\$",
        r"^x\\$",
        "a",
        "^(a|b)$",
        "[|]$",
        r"a\|b",
        "/",
        r"^\/$",
        "^$",
        "[$]",
    ],
)
def test_a_pattern_of_a_string_without_quotes_means_what_it_means_in_a_schema(pattern):
    parameters = {"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    rules = CallRules([Tool("f", parameters)], is_required=True)
    grammar = message_grammar(TOOL_FORMATS["glm47"], None, rules, {})
    for value in ("", "a", "b", "ab", "xb", "ax", "x$", "x\\", "x", "|", "a|b", "/", "$"):
        text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert accepted(grammar, text) is bool(re.search(pattern, value)), value


def random_call_with(grammar, prompt_end, name, value):
    """A call whose argument `all` has a value."""
    key = {"qwen3_coder": "<parameter=all>\n{}\n</parameter>\n",
           "glm45": "<arg_key>all</arg_key>\n<arg_value>{}</arg_value>\n",
           "glm47": "<arg_key>all</arg_key><arg_value>{}</arg_value>",
           "deepseek_v32": '<｜DSML｜parameter name="all" string="false">{}</｜DSML｜parameter>\n',
           "kimi_k3": '<|open|>argument key="all" type="array"<|sep|>{}<|close|>argument<|sep|>',
    }[name].replace("{}", value)  # fmt: skip
    whole = GOOD[name]
    at = next(whole.index(end) for end in ("</function>", "</tool_call>", "</｜DSML｜invoke>",
              "<|close|>call") if end in whole)  # fmt: skip
    text = whole[:at] + key + whole[at:]
    assert accepted(grammar, text), text
    return text


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"a": {"type": "array", "items": {"type": "null"}, "maxItems": 1}}},
        {"properties": {"a": {"type": "array", "minItems": 2}, "b": {}}, "required": ["b"]},
        {"properties": {"a": {"type": ["string", "null"]}, "b": {"enum": ["x", 1, None]}}},
        {"properties": {"a": {"type": "string", "pattern": "^[a-z]/$"}, "b": {"const": "y"}}},
        {"properties": {"a": {"type": "string", "minLength": 2}, "b": {"type": "object"}}},
        {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "b": True}},
    ],
)
def test_a_schema_has_a_grammar_in_every_format(name, schema):
    compiler = GrammarCompiler.for_checks([])
    for is_required in (True, False):
        rules = CallRules([Tool("f", schema)], is_required=is_required)
        grammar = message_grammar(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], rules, {})
        compiler.compile(StructuredOutputs(grammar=grammar))


def accepted(grammar, text, special=()):
    """Whether a grammar accepts a text, whole."""
    matcher = GrammarCompiler.for_checks(special).compile(StructuredOutputs(grammar=grammar))
    ids, rest = special_ids_for_checks(special), text
    while rest:
        token = next((t for t in ids if rest.startswith(t)), None)
        parts = [ids[token]] if token else list(rest[0].encode())
        if not all(matcher.consume_token(part) for part in parts):
            return False
        rest = rest[len(token or rest[0]) :]
    return matcher.is_accepting()


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>", "<think>", "</think>")])
def test_a_strict_tool_is_followed_only_where_it_is_called(special):
    rules = CallRules([WEATHER], is_required=False)
    ids = special_ids_for_checks(special)
    grammar = message_grammar(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"], rules, ids)
    assert accepted(grammar, "Hello.", special)
    assert accepted(grammar, f"Look: {HERMES_CALL}", special)
    assert accepted(
        grammar, f"<think>\nHm.\n</think>\n\nLook: {HERMES_CALL}{HERMES_CALL}.", special
    )
    assert not accepted(grammar, HERMES_CALL.replace("city", "town"), special)
    assert not accepted(grammar, "<tool_call>no", special)


def test_a_required_call_may_follow_reasoning_alone():
    rules = CallRules([WEATHER], is_required=True)
    grammars = {
        prompt_end: message_grammar(
            TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"], rules, {}, prompt_end
        )
        for prompt_end in ("", "<think>\n", "<think>\n\n</think>\n\n")
    }
    text = f"Hm.\n</think>\n\n{HERMES_CALL}"
    assert {end: accepted(grammar, HERMES_CALL) for end, grammar in grammars.items()} == {
        "": True, "<think>\n": False, "<think>\n\n</think>\n\n": True,
    }  # fmt: skip
    assert accepted(grammars["<think>\n"], text)
    assert accepted(grammars[""], f"<think>{text}")
    assert not any(accepted(grammar, "Hello.") for grammar in grammars.values())


def test_an_id_that_the_model_gives_again_is_replaced():
    given = ["functions.f:0", "functions.f:0", "functions.f:1", "functions.g:2", "h", "h"]
    text = kimi_section(*given[:3]) + kimi_section(*given[3:])
    assert [call.call_id for call in parser("kimi_k2").read(text).calls] == [
        "functions.f:0", "functions.f:1", "functions.f:2", "functions.g:2", "h", "",
    ]  # fmt: skip


OPEN = {
    name: ["", each.start, each.start + each.end] if each.whole is None else [""]
    for name, each in REASONING_FORMATS.items()
}
"""Ends of prompts: without a mark, with reasoning begun, with reasoning ended."""
OPEN["kimi_k3"] += ["<|open|>think<|sep|>", "<|open|>response<|sep|>"]


def output_with(name, prompt_end, thought, answer):
    """An output of a thought, if the prompt permits one, and an answer."""
    if name == "openai_gptoss":
        thought = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        return f"{thought}<|channel|>final<|message|>{answer}"
    if name == "kimi_k3":
        parts = ["<|open|>think<|sep|>", thought, "<|close|>think<|sep|>",
                 "<|open|>response<|sep|>", f"{answer}<|close|>response<|sep|>"]  # fmt: skip
        return "".join(parts[parts.index(prompt_end) + 1 if prompt_end else 0 :])
    each = REASONING_FORMATS[name]
    is_open = each.opened_by(prompt_end)
    if is_open is False:
        return answer
    return f"{'' if is_open else each.start}{thought}{each.end}\n\n{answer}"


ANSWERS = [
    (StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}},
                             "additionalProperties": False}), '{"a": 1}', '{"b": 1}'),
    (StructuredOutputs(json_object=True, disable_any_whitespace=True), '{"a":1}', '{"a": 1}'),
    (StructuredOutputs(regex=r"a/b\/c|\d"), "a/b/c", "a/b"),
    (StructuredOutputs(choice=("yes", 'say "no"')), 'say "no"', "no"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "right", "wrong"), ANSWERS)
@pytest.mark.parametrize(
    ("name", "prompt_end"), [(name, end) for name, ends in OPEN.items() for end in ends]
)
def test_a_grammar_of_the_answer_begins_behind_the_reasoning(name, prompt_end, spec, right, wrong):
    grammar = answer_grammar(REASONING_FORMATS[name], spec, {}, prompt_end)
    if grammar is None:
        assert REASONING_FORMATS[name].opened_by(prompt_end) is False
        return
    text = output_with(name, prompt_end, "Hm.", right)
    assert accepted(grammar, text)
    assert not accepted(grammar, output_with(name, prompt_end, "Hm.", wrong))
    message = parser(None, name, prompt_end, offered={}).read(text)
    has_thought = prompt_end != "<|open|>response<|sep|>"
    assert message == Message(right, "Hm." if has_thought else "")
