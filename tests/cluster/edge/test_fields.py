"""Checks that are derived from schemas agree with the schemas; unknown fields are found."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.edge import openai_fields
from cluster.edge.fields import (
    Field,
    FieldTable,
    Support,
    acts,
    any_of,
    array_of,
    check_of,
    read_fields,
    remove_unknown_fields,
)
from cluster.edge.openai_fields import CHAT_FIELDS
from cluster.edge.responses import fields as response_fields
from cluster.errors import BadRequestError

BOUNDS = st.integers(-2, 3)


def limited(kind, least, most):
    return st.fixed_dictionaries(
        {"type": st.just(kind)}, optional={least: BOUNDS.map(abs), most: BOUNDS.map(abs)}
    )


def types_of(schema):
    """A key that no two branches share: checks choose a branch by the type of a value."""
    if "anyOf" in schema:
        return "anyOf"
    return {"integer": "number"}.get(schema["type"], schema["type"])


SCALAR_SCHEMAS = st.one_of(
    st.just({"type": "boolean"}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": BOUNDS, "maximum": BOUNDS},
    ),
    limited("string", "minLength", "maxLength"),
    st.just({"type": "string", "pattern": "^[a-c]{1,2}$", "description": "a to c"}),
    st.just({"type": "string", "enum": ["a", "b"]}),
    st.just({"type": "object"}),
)
SCHEMAS = st.recursive(
    SCALAR_SCHEMAS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: {**a, "items": b}, limited("array", "minItems", "maxItems"), inner),
        st.builds(lambda a: {"type": "object", "additionalProperties": a}, inner),
        st.lists(inner, min_size=1, max_size=3, unique_by=types_of).map(
            lambda branches: {"anyOf": branches}
        ),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.booleans() | st.integers(-3, 4) | st.floats(-3, 4) | st.text("abcd", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)


def accepts(check, value, name="field"):
    """True, or None for an error that begins with the path of the wrong value."""
    try:
        check(value, name)
    except BadRequestError as error:
        return error.param.startswith(name) and error.message.startswith(error.param) and None
    return True


def is_valid(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def has_nested_choice(schema):
    branches = schema.get("anyOf", [])
    return any("anyOf" in branch for branch in branches) or any(
        has_nested_choice(s)
        for s in [*branches, schema.get("items"), schema.get("additionalProperties")]
        if s is not None
    )


@given(SCHEMAS.filter(lambda schema: not has_nested_choice(schema)), VALUES)
def test_a_check_accepts_the_values_of_its_schema_and_no_others(schema, value):
    expected = True if is_valid(schema, value) else None
    assert accepts(check_of(schema), value) is expected


TABLES = [
    value
    for module in (openai_fields, response_fields)
    for value in vars(module).values()
    if isinstance(value, FieldTable)
]
SAMPLES = [
    True, False, -2, -1, 0, 1, 2, 3, 129, 2**63, 0.5, -2.5, 2.5, 1.5, "", "a", "left", "auto",
    "function", "user", "a b", "x" * 300, "x" * 1025, [], [1], [0.5], ["a"], [""], ["x" * 1025],
    ["a"] * 17, ["a"] * 129, [1] * 129, [{}], {}, {"1": 1}, {"1": "a"}, {"type": "text"},
    {str(i): 1 for i in range(1025)},
]  # fmt: skip


def plain(schema):
    """A schema without the tables of objects, which checks leave to `read_fields`."""
    if "$ref" in schema:
        return {"type": "object"}
    return {
        key: plain(value)
        if key in {"items", "additionalProperties"}
        else [plain(branch) for branch in value]
        if key == "anyOf"
        else value
        for key, value in schema.items()
    }


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_each_field_accepts_the_values_of_its_schema_and_no_others(table):
    int64 = jsonschema.FormatChecker(())
    int64.checks("int64")(lambda value: type(value) is not int or -(2**63) <= value < 2**63)
    for name, field in table.items():
        assert field.text.endswith("."), name
        validator = jsonschema.Draft202012Validator(plain(field.schema), format_checker=int64)
        for value in SAMPLES:
            if name == "prompt" and isinstance(value, list):
                continue  # which kind of list it is, the parser finds out
            expected = True if validator.is_valid(value) else None
            assert accepts(field.check, value, name) is expected, (name, value)


def test_a_keyword_that_checks_do_not_know_is_refused():
    with pytest.raises(ValueError, match="multipleOf"):
        check_of({"type": "integer", "multipleOf": 2})


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ({"type": "integer", "minimum": 1}, 0, "f must be at least 1, got 0"),
        ({"type": "number", "maximum": 1}, 1.5, "f must be at most 1, got 1.5"),
        ({"type": "integer", "minimum": 1, "maximum": 9}, 10, "f must be 1 to 9, got 10"),
        ({"type": "string", "maxLength": 3}, "secret", "f must have at most 3 characters, got 6"),
        (array_of({"type": "string"}), ["a", 1], "f[1] must be a string, got 1"),
        (array_of({"type": "string"}), "a", 'f must be an array, got "a"'),
        (
            any_of({"type": "string"}, array_of({"type": "string"})), 1,
            "f must be a string or an array of strings, got 1",
        ),
        (
            {"type": "object", "additionalProperties": {"type": "number"}}, {"a": "b"},
            'f.a must be a number, got "b"',
        ),
    ],
)  # fmt: skip
def test_errors_name_the_path_and_say_what_a_value_must_be(schema, value, message):
    with pytest.raises(BadRequestError) as refused:
        check_of(schema)(value, "f")
    assert refused.value.message == message


def test_an_integer_may_be_spelled_with_a_fraction_of_zero():
    assert check_of({"type": "integer"})(16.0, "f") == 16
    assert check_of(array_of({"type": "integer"}))([1, 2.0], "f") == [1, 2]


def test_a_required_field_must_be_given_and_not_null():
    table = FieldTable("Row", {"a": acts({"type": "string"}, "A text.", is_required=True)})
    for body in ({}, {"a": None}):
        with pytest.raises(BadRequestError, match=r"^row[.]a is required"):
            read_fields(body, table, "row.")


# --- unknown fields -------------------------------------------------------------------------------

EXTRAS = {
    "nvext": {"ignore_eos": True},
    "messages[0].cache_control": {"type": "ephemeral"},
    "messages[1].content[0].cache_control": {"type": "ephemeral"},
    "messages[2].tool_calls[0].provider": "x",
    "messages[2].tool_calls[0].function.provider": "x",
    "tools[0].cache_control": {"type": "ephemeral"},
    "tools[0].function.cache_control": {"type": "ephemeral"},
    "tool_choice.mode": "auto",
    "stream_options.chunk": 5,
    "response_format.json_schema.mode": "x",
}


def full_body():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "tool_calls": [call]},
            "not a message",
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"unknown": 1}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"unknown": 1}}},
        "metadata": {"unknown": 1},
        "chat_template_kwargs": {"unknown": 1},
    }


@given(st.sets(st.sampled_from(sorted(EXTRAS))))
def test_unknown_fields_are_removed_at_any_depth_and_named(chosen):
    body = full_body()
    for path in chosen:
        *steps, name = path.replace("[", ".").replace("]", "").split(".")
        place = body
        for step in steps:
            place = place[int(step) if step.isdecimal() else step]
        place[name] = json.loads(json.dumps(EXTRAS[path]))
    assert {*remove_unknown_fields(body, CHAT_FIELDS)} == chosen
    assert body == full_body()


@given(VALUES)
def test_unknown_fields_are_looked_for_in_any_body(value):
    body = dict.fromkeys(CHAT_FIELDS, value) | {"other": value}
    assert "other" in remove_unknown_fields(body, CHAT_FIELDS)
    assert remove_unknown_fields(body, CHAT_FIELDS) == []


def test_a_known_field_that_is_not_supported_is_no_unknown_field():
    names = {name for name, field in CHAT_FIELDS.items() if field.support is Support.NOT_YET}
    assert names
    assert remove_unknown_fields(dict.fromkeys(names, 1), CHAT_FIELDS) == []


def test_rows_are_fields():
    assert all(isinstance(field, Field) for table in TABLES for field in table.values())
