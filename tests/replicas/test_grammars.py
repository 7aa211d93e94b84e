"""Grammars: what compiles, what is refused with the name of its field, and in bounded time."""

import contextlib
import json
from pathlib import Path

import pytest
import tokenizers

from replicas.errors import InvalidRequestError
from replicas.grammars import (
    MAX_EBNF_WORK,
    MAX_PROPERTIES,
    MAX_SCHEMA_DEPTH,
    GrammarCompiler,
)
from replicas.sampling_params import (
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_VALUES,
    SamplingParams,
    StructuredOutputs,
)

MODEL = Path(__file__).parents[2] / "configs/demo-model"
TEXT = (MODEL / "tokenizer.json").read_text()
TOKENIZER = tokenizers.Tokenizer.from_str(TEXT)
VOCAB = TOKENIZER.get_vocab_size()
EOS = TOKENIZER.token_to_id("<|eos|>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}]}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def properties(count):
    return {"properties": {f"p{i}": {"type": "string"} for i in range(count)}}


@pytest.fixture(scope="module")
def checks():
    return GrammarCompiler.for_checks(["<|eos|>", "<|tool|>"])


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler.for_model(TEXT, VOCAB + 40, [EOS])


def closed(schema):
    return {"json": schema, "disable_additional_properties": True, "disable_any_whitespace": True}


INNER = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
OPEN = {"type": "object", "additionalProperties": True}
CLOSED = [
    (closed({"enum": [{"properties": 1}]}), ['{"properties":1}'], []),
    (closed({"const": {"properties": {"a": 1}}}), ['{"properties":{"a":1}}'], []),
    (
        closed({**OPEN, "properties": {"properties": INNER}}),
        ['{"properties":{"a":1},"additionalProperties":1}'],
        ['{"properties":{"a":1,"b":2}}'],
    ),
    (
        closed({"type": "object", "properties": {"enum": INNER, "const": INNER}}),
        ['{"enum":{"a":1}}'],
        ['{"enum":{"a":1,"b":2}}', '{"const":{"a":1,"b":2}}'],
    ),
    (
        closed({"$ref": "#/$defs/properties", "$defs": {"properties": INNER}}),
        ['{"a":1}'],
        ['{"a":1,"b":2}'],
    ),
    (
        closed({"anyOf": [INNER, {"type": "array", "items": INNER}]}),
        ['{"a":1}', '[{"a":1}]'],
        ['{"a":1,"b":2}', '[{"a":1,"b":2}]'],
    ),
]
"""Schemas whose objects take no further properties, with the names of keywords as data."""

GOOD = [
    ({"json": SCHEMA}, ['{"a": 12}', '{"a":-1,"b":[null]}'], ['{"b":1}', '{"a":"1"}', "[]"]),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, ['{"a":12}'], ['{ "a": 12}']),
    ({"json": SCHEMA, "whitespace_pattern": "_?"}, ['{_"a":_1}'], ['{ "a": 1}']),
    ({"json": SCHEMA, "disable_additional_properties": True}, ['{"a":1}'], ['{"a":1,"b":2}']),
    *CLOSED,
    ({"regex": r"[a-c]+\d{2}"}, ["abc12"], ["abc1", "12", "abc123"]),
    ({"choice": ("yes", "no", 'é"\n')}, ["yes", "no", 'é"\n'], ["maybe", "ye"]),
    ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" tail'}, ["ab", "accb"], ["a", "bc"]),
    ({"grammar": 'root ::= start [s"]\nstart ::= "start" # "start'}, ["starts", 'start"'], ["s"]),
    ({"grammar": 'start: "a" /[0-9]+/'}, ["a1"], ["1"]),
    ({"json_object": True}, ["{}", '{"x": {"y": [1]}}'], ["[]", "{"]),
    ({"structural_tag": TAG}, ["plain text", 'so <f=x>{"a": 1}</f> it is'], ['<f=x>{"b": 1}</f>']),
]


@pytest.mark.parametrize(("given", "good", "bad"), GOOD, ids=lambda v: str(v)[:32])
def test_a_grammar_takes_its_texts_and_no_others(compiler, checks, given, good, bad):
    spec = StructuredOutputs(**given)
    spec.validate()
    checks.compile(spec)
    for text in (*good, *bad):
        matcher = compiler.compile(spec)
        token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        is_whole = matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert (is_whole and matcher.is_accepting()) == (text in good), text


BAD = [
    ({}, "structured_outputs", "exactly one"),
    ({"regex": "a", "json_object": True}, "structured_outputs", "regex and json_object"),
    ({"choice": ()}, "structured_outputs.choice", "at least one"),
    ({"json": "{bad"}, "structured_outputs.json", "JSON"),
    ({"json": "[" * 100_000}, "structured_outputs.json", "JSON"),
    ({"json": "3"}, "structured_outputs.json", "object"),
    ({"json": '{"minimum": NaN}'}, "structured_outputs.json", "NaN"),
    ({"json": {"enum": [-(2**63)]}}, "structured_outputs.json", "too small"),
    ({"json": {"const": 1 - 2**63}}, "structured_outputs.json", "too small"),
    ({"json": {"not": {}}}, "structured_outputs.json", "not"),
    ({"json": {"$ref": "https://example.com/x.json"}}, "structured_outputs.json", "retriev"),
    ({"json": nested(MAX_SCHEMA_DEPTH)}, "structured_outputs.json", "levels"),
    ({"json": {"enum": [*range(MAX_SCHEMA_VALUES)]}}, "structured_outputs.json", "10000 values"),
    ({"json": properties(MAX_PROPERTIES + 1)}, "structured_outputs.json", "1001 properties"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex", "look-around"),
    ({"regex": "a" * MAX_GRAMMAR_BYTES + "a"}, "structured_outputs.regex", "bytes"),
    ({"grammar": "no rules"}, "structured_outputs.grammar", "EBNF"),
    ({"grammar": "root ::= " + "(" * 3000}, "structured_outputs.grammar", "EBNF"),
    ({"grammar": "\n" * 200_000}, "structured_outputs.grammar", "bytes"),
    ({"grammar": 'a ::= "b"\n' * 1000}, "structured_outputs.grammar", str(MAX_EBNF_WORK)),
    ({"structural_tag": {"format": {}}}, "structured_outputs.structural_tag", "triggers"),
    ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "structured_outputs.structural_tag", "<f=x>"),
]  # fmt: skip


def check(compiler, spec):
    SamplingParams(structured_outputs=spec).checked(VOCAB)
    compiler.compile(spec)


@pytest.mark.parametrize(("given", "param", "text"), BAD, ids=lambda v: str(v)[:32])
def test_a_bad_grammar_is_refused_by_the_name_of_its_field(checks, given, param, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        check(checks, StructuredOutputs(**given))
    assert caught.value.param == param
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "given",
    [
        {"regex": 3},
        {"choice": "ab"},
        {"choice": [1]},
        {"json": {1, 2}},
        {"json_object": "yes"},
        {"json_object": True, "whitespace_pattern": 3},
        {"regex": "\ud800"},
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_is_refused_by_its_field(given):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured_outputs=StructuredOutputs(**given)).checked(VOCAB)
    assert caught.value.param.startswith("structured_outputs")


def exponential(keyword):
    ref = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    return {"$ref": "#/$defs/d0", "$defs": {**ref, "d40": {"type": "string"}}}


@pytest.mark.parametrize(
    "given",
    [
        {"json": exponential("allOf")},
        {"json": exponential("anyOf")},
        {"json": properties(MAX_PROPERTIES)},
        {"json": {"type": "array", "items": properties(MAX_PROPERTIES), "minItems": 10**6}},
        {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
        {"regex": "(a|aa)*" * 500},
        {"grammar": 'start: a\na: a a | "x" | a a a'},
        {"grammar": "start: " + "(" * 20_000},
        {"choice": tuple(f"{i:06}" for i in range(MAX_SCHEMA_VALUES))},
    ],
    ids=lambda v: str(v)[:32],
)
def test_absurd_grammars_end_in_an_error_or_a_matcher(checks, given):
    """The time limit of the test is generous; what is exponential would not end at all."""
    with contextlib.suppress(InvalidRequestError):
        checks.compile(StructuredOutputs(**given))


def test_rules_known_to_be_unambiguous_may_be_as_wide_as_a_schema(checks):
    rules = f"start: %json {json.dumps(properties(200))}"
    matcher = checks.compile(StructuredOutputs(grammar=rules))
    matcher.try_consume_tokens(list(b"{"))
    assert "max is 300" in matcher.get_error()
    matcher = checks.compile(StructuredOutputs(grammar=rules, is_unambiguous=True))
    assert matcher.try_consume_tokens(list(b'{"p3":"x","p150"')) == 16


def follow(matcher, text):
    """Let a matcher read a text; return what is wrong."""
    matcher.try_consume_tokens(TOKENIZER.encode(text, add_special_tokens=False).ids)
    return matcher.get_error()


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"choice": [f"{i:06}" for i in range(9_000)]}, "008999"),
        ({"choice": ["a" * i for i in range(300)]}, "a" * 299),
        ({"json": properties(MAX_PROPERTIES)}, '{"p0":"x","p998":"y"}'),
        ({"json": {"anyOf": [properties(500), properties(600)]}}, '{"p0":"x","p598":"y"}'),
    ],
    ids=["choice", "prefixes", "optional", "two objects"],
)
def test_wide_grammars_that_compile_can_be_followed(compiler, given, output):
    matcher = compiler.compile(StructuredOutputs(**given))
    assert follow(matcher, output) == ""
    assert matcher.is_accepting()


AMBIGUOUS = ['e: e e e e | "a" | ""', 'e: b*\nb: e "a"? e e']


@pytest.mark.parametrize("rules", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_before_a_token_takes_long(compiler, rules):
    """Its rows grow with the output, and the time of a token with their cube."""
    matcher = compiler.compile(StructuredOutputs(grammar=f"start: e\n{rules}"))
    for _ in range(2_000):
        matcher.compute_bitmask()
        if error := follow(matcher, "a"):
            break
    assert "max is 300" in error or "Too many items" in error


def test_a_structural_tag_may_begin_with_a_special_token(checks, compiler):
    tag = {"begin": "<|tool|>", "schema": SCHEMA, "end": ""}
    spec = StructuredOutputs(structural_tag={"triggers": ["<|tool|>"], "structures": [tag]})
    checks.compile(spec)
    compiler.compile(spec)  # it is plain text to this model


def test_after_its_end_an_output_may_only_end(compiler):
    matcher = compiler.compile(StructuredOutputs(choice=("a",)))
    matcher.consume_tokens(TOKENIZER.encode("a", add_special_tokens=False).ids)
    allowed = [i for i, byte in enumerate(matcher.compute_bitmask()) if byte]
    assert allowed == [EOS // 8]
    assert compiler.tokenizer.vocab_size == VOCAB + 40


def test_equal_grammars_are_equal_keys():
    first, second = StructuredOutputs(json=SCHEMA), StructuredOutputs(json=json.dumps(SCHEMA))
    assert first == second
    assert hash(first) == hash(second)
    assert StructuredOutputs(choice=["a"]).choice == ("a",)
