"""Arguments that a format gives one by one, strings without quotes."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.json_text import loads
from cluster.edge.families.lark import UnsupportedSchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import Tool

_ALL_KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_WORDS = {"True": True, "False": False, "None": None}
_MAX_DEPTH = 16
_ABOUT_OBJECTS = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "minProperties"),
    *("maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
)


def kinds(schema: object, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema permits, as far as its own keywords say it."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return _ALL_KINDS
    found = _ALL_KINDS
    if "type" in schema:
        given = schema["type"]
        found = frozenset(given if isinstance(given, list) else [given])
    elif "const" in schema:
        found = frozenset({_kind(schema["const"])})
    elif isinstance(schema.get("enum"), list):
        found = frozenset(map(_kind, schema["enum"]))
    else:
        options = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(options, list):
            found = frozenset().union(*(kinds(each, depth + 1) for each in options))
    return found


def property_schema(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of one argument; empty for one that the tool does not declare."""
    properties = parameters.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas that references in the schemas of arguments may name."""
    return {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether an argument stands without quotes: it can only be a string."""
    return kinds(schema) == {"string"}


def value_of(text: str, schema: Mapping[str, Any]) -> object:
    """Return the value of an argument's text: JSON if the schema permits it, else a string."""
    if is_text(schema):
        return text
    allowed = kinds(schema)
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else loads(stripped)
    except MalformedCallError:
        value = _literal(stripped) if stripped[:1] in ("{", "[") else text
    kind = _kind(value)
    fits = kind in allowed or (kind == "integer" and "number" in allowed)
    return value if fits or "string" not in allowed else text


def json_of(text: str) -> object:
    """Return the value of JSON; text that is none is a string."""
    try:
        return loads(text)
    except MalformedCallError:
        return text


def parameter_list(
    lark: Lark,
    tool: Tool,
    make: Callable[[str, str], str],
    end: str,
    without: Iterable[str] = (),
) -> str:
    """Return an expression for the arguments of a tool, in the order of its schema.

    Args:
        lark: The grammar.
        tool: The tool.
        make: Makes the expression of an argument from its name and that of its value with `end`.
        end: Text behind each value.
        without: Texts in a string that the parser would read as its end.

    Raises:
        UnsupportedSchemaError: See `listed_properties`.
    """
    required = tool.parameters.get("required", ())
    shared = definitions(tool.parameters)
    parts = []
    for name in listed_properties(tool.parameters):
        schema = property_schema(tool.parameters, name)
        if is_text(schema):
            value = lark.text_value(schema, end, without)
        else:
            value = lark.sequence(lark.json({**shared, **schema}), lark.text(end))
        parts.append((lark.rule(make(name, value)), name in required))
    return lark.list_of(parts, "")


def listed_properties(schema: Mapping[str, Any]) -> list[str]:
    """Return the properties that an object of a schema may have, in their order.

    Raises:
        UnsupportedSchemaError: Which objects are valid does not follow from these alone.
    """
    for keyword in _ABOUT_OBJECTS:
        if keyword in schema:
            raise UnsupportedSchemaError(f"has {keyword} beside properties")
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    names = [name for name, each in properties.items() if each is not False]
    for name in schema.get("required", ()):
        if name not in names:
            raise UnsupportedSchemaError(f"requires {name[:64]!r}, but does not declare it")
    return names


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _literal(text: str) -> object:
    """Return the value of a Python literal, as some models write objects; else the text."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value
